//! JSON from untrusted files: a key may appear once, nesting is bounded.
//!
//! `serde_json` alone lets the last of two equal keys win, so two readers of one file could see two models.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Number, Value};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

/// Levels of objects and arrays that a configuration may nest.
pub const DEPTH_MAX: u32 = 32;

/// Parses `bytes` as one JSON value.
///
/// Errors: what `serde_json` refuses, a key twice in one object, more than [`DEPTH_MAX`] levels.
pub fn parse(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let value = Strict { levels_left: DEPTH_MAX }.deserialize(&mut input)?;
    input.end()?;
    Ok(value)
}

#[derive(Clone, Copy)]
struct Strict {
    levels_left: u32,
}

impl Strict {
    fn deeper<E: Error>(self) -> Result<Self, E> {
        let refused = || E::custom(format_args!("nested deeper than {DEPTH_MAX} levels"));
        Ok(Self { levels_left: self.levels_left.checked_sub(1).ok_or_else(refused)? })
    }
}

fn repeated<E: Error>(key: &str) -> E {
    E::custom(format_args!("the key {key:?} is there twice"))
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
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
                Entry::Occupied(taken) => return Err(repeated(taken.key())),
                Entry::Vacant(free) => free.insert(entries.next_value()?),
            };
        }
        Ok(UniqueMap(map))
    }
}
