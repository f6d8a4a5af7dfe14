//! Deserializer of a JSON value that records unknown fields and the path of a failure.
//!
//! Adapters around the deserializer of `serde_json` would be compiled for every type of the API, which made up half of
//! virt-api, and would copy each key. Here keys are borrowed, and a path is written out only for a message.

use std::slice;

use serde::{
    Deserializer,
    de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor, value::BorrowedStrDeserializer},
};
use serde_json::{Error, Map, Value, map};

use super::Problems;
use crate::context::FieldPath;

/// A value and its path.
pub(super) struct Tracked<'de, 'a> {
    value: &'de Value,
    path: FieldPath<'a>,
    problems: &'a mut Problems,
}

impl<'de, 'a> Tracked<'de, 'a> {
    /// Returns the root.
    pub(super) fn new(value: &'de Value, problems: &'a mut Problems) -> Self {
        Self { value, path: FieldPath::Root, problems }
    }

    fn list<V: Visitor<'de>>(self, list: &'de [Value], visitor: V) -> Result<V::Value, Error> {
        let mut items = Items { left: list.iter(), index: 0, path: &self.path, problems: self.problems };
        let read = visitor.visit_seq(&mut items)?;
        if items.left.len() > 0 {
            return Err(Error::invalid_length(list.len(), &"fewer elements in array"));
        }
        Ok(read)
    }

    fn object<V: Visitor<'de>>(self, object: &'de Map<String, Value>, visitor: V) -> Result<V::Value, Error> {
        let mut members = Members { left: object.iter(), at: None, path: &self.path, problems: self.problems };
        let read = visitor.visit_map(&mut members)?;
        if members.left.len() > 0 {
            return Err(Error::invalid_length(object.len(), &"fewer elements in map"));
        }
        Ok(read)
    }
}

/// Items of a list.
struct Items<'de, 'a> {
    left: slice::Iter<'de, Value>,
    index: usize,
    path: &'a FieldPath<'a>,
    problems: &'a mut Problems,
}

impl<'de> SeqAccess<'de> for Items<'de, '_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some(value) = self.left.next() else { return Ok(None) };
        let path = FieldPath::Item(self.path, self.index);
        self.index += 1;
        let read = seed.deserialize(Tracked { value, path, problems: &mut *self.problems });
        if read.is_err() {
            self.problems.set_failed(path);
        }
        read.map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left.len())
    }
}

/// Members of an object.
struct Members<'de, 'a> {
    left: map::Iter<'de>,
    /// Member whose key was read last.
    at: Option<(&'de str, &'de Value)>,
    path: &'a FieldPath<'a>,
    problems: &'a mut Problems,
}

impl<'de> MapAccess<'de> for Members<'de, '_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some((key, value)) = self.left.next() else { return Ok(None) };
        let key = key.as_str();
        self.at = Some((key, value));
        let read = seed.deserialize(BorrowedStrDeserializer::<Error>::new(key));
        if read.is_err() {
            self.problems.set_failed(FieldPath::Member(self.path, key));
        }
        read.map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let Some((key, value)) = self.at.take() else { return Err(Error::custom("value is missing")) };
        let path = FieldPath::Member(self.path, key);
        let read = seed.deserialize(Tracked { value, path, problems: &mut *self.problems });
        if read.is_err() {
            self.problems.set_failed(path);
        }
        read
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left.len())
    }
}

/// Scalars are deserialized by `serde_json`, whose errors [`super::explain`] formats.
macro_rules! as_serde_json {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.value.$method(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Tracked<'de, '_> {
    type Error = Error;

    as_serde_json! {
        deserialize_bool
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64
        deserialize_char deserialize_str deserialize_string deserialize_identifier
        deserialize_bytes deserialize_byte_buf
        deserialize_unit
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Array(list) => self.list(list, visitor),
            Value::Object(object) => self.object(object, visitor),
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        self.value.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Array(list) => self.list(list, visitor),
            other => other.deserialize_seq(visitor),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Object(object) => self.object(object, visitor),
            other => other.deserialize_map(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value {
            Value::Array(list) => self.list(list, visitor),
            Value::Object(object) => self.object(object, visitor),
            other => other.deserialize_struct(name, fields, visitor),
        }
    }

    /// The enumerations of the API have no content, so nothing inside them has to be tracked.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.value.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.problems.add_unknown(self.path);
        visitor.visit_unit()
    }
}
