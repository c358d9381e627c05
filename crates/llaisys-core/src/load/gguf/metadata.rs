//! Keys and values of a GGUF file, borrowed from its header.

use super::cursor::Cursor;
use crate::error::GgufError;
use std::collections::BTreeMap;

/// The shortest key and value: a key's length and one byte, a type, one byte.
pub(super) const ENTRY_BYTES_MIN: u64 = 14;
/// Elements of one array (the longest real ones are merges of large vocabularies).
pub const ELEMENTS_MAX: u64 = 1 << 22;

/// A value. Numbers are widened to 64 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Unsigned, 8 to 64 bits.
    Uint(u64),
    /// Signed, 8 to 64 bits.
    Int(i64),
    /// 32 or 64 bits.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    Str(&'a str),
    /// A checked array, elements still encoded.
    Array(Array<'a>),
}

impl Value<'_> {
    /// Returns the type of the value for error messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Uint(_) => "an unsigned number",
            Value::Int(_) => "a signed number",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::Str(_) => "a string",
            Value::Array(array) if array.kind == Kind::String => "an array of strings",
            Value::Array(_) => "an array of numbers",
        }
    }
}

/// An array whose elements were checked when it was read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: Kind,
    n: u64,
    bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    U64,
    I64,
    F64,
}

/// The type number of an array; arrays of arrays are rejected.
const ARRAY: u32 = 9;

impl Kind {
    fn of(type_id: u32) -> Option<Self> {
        Some(match type_id {
            0 => Kind::U8,
            1 => Kind::I8,
            2 => Kind::U16,
            3 => Kind::I16,
            4 => Kind::U32,
            5 => Kind::I32,
            6 => Kind::F32,
            7 => Kind::Bool,
            8 => Kind::String,
            10 => Kind::U64,
            11 => Kind::I64,
            12 => Kind::F64,
            _ => return None,
        })
    }

    /// Bytes of the shortest element.
    fn bytes_min(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::String | Kind::U64 | Kind::I64 | Kind::F64 => 8,
        }
    }

    /// Reads one value. `key` names it in errors.
    fn read<'a>(self, cursor: &mut Cursor<'a>, key: &str) -> Result<Value<'a>, GgufError> {
        const WHAT: &str = "a metadata value";
        Ok(match self {
            Kind::U8 => Value::Uint(cursor.u8(WHAT)?.into()),
            Kind::I8 => Value::Int(cursor.u8(WHAT)?.cast_signed().into()),
            Kind::U16 => Value::Uint(cursor.u16(WHAT)?.into()),
            Kind::I16 => Value::Int(cursor.u16(WHAT)?.cast_signed().into()),
            Kind::U32 => Value::Uint(cursor.u32(WHAT)?.into()),
            Kind::I32 => Value::Int(cursor.u32(WHAT)?.cast_signed().into()),
            Kind::F32 => Value::Float(f32::from_bits(cursor.u32(WHAT)?).into()),
            Kind::U64 => Value::Uint(cursor.u64(WHAT)?),
            Kind::I64 => Value::Int(cursor.u64(WHAT)?.cast_signed()),
            Kind::F64 => Value::Float(f64::from_bits(cursor.u64(WHAT)?)),
            Kind::String => Value::Str(cursor.string(WHAT)?),
            Kind::Bool => match cursor.u8(WHAT)? {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                value => return Err(GgufError::Bool { key: key.to_owned(), value }),
            },
        })
    }
}

impl<'a> Array<'a> {
    fn read(cursor: &mut Cursor<'a>, whole: &'a [u8], key: &str) -> Result<Self, GgufError> {
        let type_id = cursor.u32("an array's element type")?;
        let unknown = || GgufError::UnknownValueType { key: key.to_owned(), type_id, in_array: true };
        let kind = Kind::of(type_id).ok_or_else(unknown)?;
        let n = cursor.count("array elements", kind.bytes_min(), ELEMENTS_MAX)?;
        let start = cursor.at();
        for _ in 0..n {
            kind.read(cursor, key)?;
        }
        Ok(Self { kind, n, bytes: &whole[start..cursor.at()] })
    }

    fn values(self) -> impl Iterator<Item = Value<'a>> {
        let mut cursor = Cursor::new(self.bytes, self.bytes.len());
        (0..self.n)
            .map(move |_| self.kind.read(&mut cursor, "").expect("every element was checked when read"))
    }
}

/// All keys of a file, each once.
#[derive(Debug)]
pub struct Metadata<'a> {
    values: BTreeMap<&'a str, Value<'a>>,
}

impl<'a> Metadata<'a> {
    pub(super) fn read(cursor: &mut Cursor<'a>, whole: &'a [u8], n_keys: u64) -> Result<Self, GgufError> {
        let mut values = BTreeMap::new();
        for _ in 0..n_keys {
            let key = cursor.name("a metadata key")?;
            let type_id = cursor.u32("a metadata value's type")?;
            let unknown = || GgufError::UnknownValueType { key: key.to_owned(), type_id, in_array: false };
            let value = if type_id == ARRAY {
                Value::Array(Array::read(cursor, whole, key)?)
            } else {
                Kind::of(type_id).ok_or_else(unknown)?.read(cursor, key)?
            };
            if values.insert(key, value).is_some() {
                return Err(GgufError::DuplicateKey { key: key.to_owned() });
            }
        }
        Ok(Self { values })
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.values.get(key)
    }

    /// Returns the string `key`; None if it is absent. Errors: another type.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Str(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(key, "a string", other)),
        }
    }

    /// Returns the non-negative integer `key`, of any width; None if it is absent. Errors: another type, a negative
    /// number.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, GgufError> {
        let found = match self.get(key) {
            None => return Ok(None),
            Some(Value::Uint(value)) => return Ok(Some(*value)),
            Some(found) => found,
        };
        match found {
            Value::Int(value) if *value >= 0 => Ok(Some(value.unsigned_abs())),
            Value::Int(_) => Err(GgufError::KeyType {
                key: key.to_owned(),
                expected: "a number from 0",
                found: "negative",
            }),
            other => Err(wrong_type(key, "a whole number", other)),
        }
    }

    /// Returns the float `key`; None if it is absent. Errors: another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a float", other)),
        }
    }

    /// Returns the boolean `key`; None if it is absent. Errors: another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a boolean", other)),
        }
    }

    /// Returns the array of strings `key`; None if it is absent. Errors: another type.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<String>>, GgufError> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.kind == Kind::String => array,
            Some(other) => return Err(wrong_type(key, "an array of strings", other)),
        };
        let text = |value| if let Value::Str(text) = value { Some(text.to_owned()) } else { None };
        Ok(Some(array.values().filter_map(text).collect()))
    }

    /// Returns the numbers of the array `key`, whole and from 0; None if it is absent or no array. Errors: an array of
    /// others.
    pub fn uints(&self, key: &str) -> Result<Option<Vec<u64>>, GgufError> {
        let Some(value @ Value::Array(array)) = self.get(key) else { return Ok(None) };
        let number = |number| match number {
            Value::Uint(number) => Some(number),
            Value::Int(number) => u64::try_from(number).ok(),
            _ => None,
        };
        let numbers: Option<Vec<u64>> = array.values().map(number).collect();
        numbers.map(Some).ok_or_else(|| wrong_type(key, "an array of whole numbers from 0", value))
    }

    /// Returns the array of 32-bit signed integers `key`; None if it is absent. Errors: another type.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.kind == Kind::I32 => array,
            Some(other) => return Err(wrong_type(key, "an array of 32-bit signed numbers", other)),
        };
        let number = |value| if let Value::Int(value) = value { i32::try_from(value).ok() } else { None };
        Ok(Some(array.values().filter_map(number).collect()))
    }

    /// Returns the array of bytes `key`; None if it is absent. Errors: another type.
    pub fn bytes(&self, key: &str) -> Result<Option<Vec<u8>>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array { kind: Kind::U8 | Kind::I8, bytes, .. })) => Ok(Some(bytes.to_vec())),
            Some(other) => Err(wrong_type(key, "an array of bytes", other)),
        }
    }

    /// Returns the array of booleans `key`; None if it is absent. Errors: another type.
    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.kind == Kind::Bool => array,
            Some(other) => return Err(wrong_type(key, "an array of booleans", other)),
        };
        let flag = |value| if let Value::Bool(flag) = value { Some(flag) } else { None };
        Ok(Some(array.values().filter_map(flag).collect()))
    }

    /// Returns the array of 32-bit floats `key`; None if it is absent. Errors: another type.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.kind == Kind::F32 => array,
            Some(other) => return Err(wrong_type(key, "an array of 32-bit floats", other)),
        };
        let number = |value| if let Value::Float(value) = value { Some(value as f32) } else { None };
        Ok(Some(array.values().filter_map(number).collect()))
    }
}

fn wrong_type(key: &str, expected: &'static str, found: &Value<'_>) -> GgufError {
    GgufError::KeyType { key: key.to_owned(), expected, found: found.type_name() }
}
