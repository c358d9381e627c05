//! JSON from untrusted files: keys must be unique, and nesting and the number of values are bounded.
//!
//! `serde_json` alone keeps the last of two equal keys, so two programs could read two different models from one file.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

/// Levels of objects and arrays that a file may nest.
pub const DEPTH_MAX: u32 = 32;
/// Values that a configuration may have: more than fit in its bytes, so that only the depth is limited.
const VALUES_MAX: u32 = 1 << 20;

/// Parses `bytes` as one JSON value.
///
/// Errors: those of `serde_json`, a repeated key in one object, more than [`DEPTH_MAX`] levels.
pub fn parse(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let value = Strict::new(&Cell::new(VALUES_MAX), DEPTH_MAX).deserialize(&mut input)?;
    input.end()?;
    Ok(value)
}

/// Deserializes one value with a bound on its nesting, and subtracts its parts from a budget that values may share.
#[derive(Clone, Copy)]
pub(super) struct Strict<'a> {
    levels_left: u32,
    values_left: &'a Cell<u32>,
}

impl<'a> Strict<'a> {
    pub(super) fn new(values_left: &'a Cell<u32>, levels_left: u32) -> Self {
        Self { levels_left, values_left }
    }

    /// Subtracts one value from the budget.
    fn count<E: Error>(self) -> Result<Self, E> {
        let left = self.values_left.get().checked_sub(1).ok_or_else(|| E::custom("too many values"))?;
        self.values_left.set(left);
        Ok(self)
    }

    fn deeper<E: Error>(self) -> Result<Self, E> {
        let rejected = || E::custom(format_args!("nested deeper than {DEPTH_MAX} levels"));
        Ok(Self { levels_left: self.levels_left.checked_sub(1).ok_or_else(rejected)?, ..self })
    }
}

fn repeated<E: Error>(key: &str) -> E {
    E::custom(format_args!("the key {key:?} occurs twice"))
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self.count()?)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let below = self.deeper()?;
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(below)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let below = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(repeated(&key));
            }
            let value = entries.next_value_seed(below)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// A JSON object whose keys must be unique.
#[derive(Debug)]
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = entries.next_key::<String>()? {
            match map.entry(key) {
                Entry::Occupied(entry) => return Err(repeated(entry.key())),
                Entry::Vacant(entry) => entry.insert(entries.next_value()?),
            };
        }
        Ok(UniqueMap(map))
    }
}
