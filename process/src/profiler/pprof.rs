//! Profiles in the form that `pprof` reads: its `profile.proto`, as far as it is used here, not compressed.
//!
//! Addresses are those of the files, not of the process: they tell nothing about where it was loaded, and are the same
//! in a build with symbols, which is where names come from (the programs carry none).

use std::collections::BTreeMap;

use prost::Message;

/// The message `Profile`.
#[derive(Clone, PartialEq, Message)]
pub struct Profile {
    /// What the values of a sample are, in their order.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// What was seen.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// The files that code is in.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// The addresses that samples name.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// Every text; the first is empty.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// The beginning, in nanoseconds of Unix time.
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    /// How long it was looked.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// What lies between two looks.
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    /// How much of it.
    #[prost(int64, tag = "12")]
    pub period: i64,
}

/// What a value is; both are indexes of texts.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ValueType {
    /// What is counted.
    #[prost(int64, tag = "1")]
    pub r#type: i64,
    /// In what.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// One stack of one kind of thread, and what was counted for it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Sample {
    /// Locations; the function that ran comes first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// A number for each of the profile's types.
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
    /// What else is known.
    #[prost(message, repeated, tag = "3")]
    pub label: Vec<Label>,
}

/// Something about a sample; both are indexes of texts.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Label {
    /// What.
    #[prost(int64, tag = "1")]
    pub key: i64,
    /// Its value.
    #[prost(int64, tag = "2")]
    pub str: i64,
}

/// A part of a file with code in it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mapping {
    /// Names it; from 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The first address.
    #[prost(uint64, tag = "2")]
    pub memory_start: u64,
    /// The first address after it.
    #[prost(uint64, tag = "3")]
    pub memory_limit: u64,
    /// Where it begins in the file.
    #[prost(uint64, tag = "4")]
    pub file_offset: u64,
    /// The file; index of a text.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// What the linker calls this build of it; index of a text.
    #[prost(int64, tag = "6")]
    pub build_id: i64,
}

/// An address that code ran at.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Location {
    /// Names it; from 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The mapping it is in; 0: none that is known.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// The address.
    #[prost(uint64, tag = "3")]
    pub address: u64,
}

/// The texts of a profile while it is made.
#[derive(Debug)]
pub struct Texts {
    all: Vec<String>,
    known: BTreeMap<String, i64>,
}

impl Texts {
    /// The empty text, which has to be the first.
    #[must_use]
    pub fn new() -> Self {
        let mut texts = Self { all: Vec::new(), known: BTreeMap::new() };
        texts.index("");
        texts
    }

    /// The index of a text, which is added if it is new.
    pub fn index(&mut self, text: &str) -> i64 {
        if let Some(index) = self.known.get(text) {
            return *index;
        }
        let index = i64::try_from(self.all.len()).unwrap_or(i64::MAX);
        self.all.push(text.to_owned());
        self.known.insert(text.to_owned(), index);
        index
    }

    /// All, in the order of their indexes.
    #[must_use]
    pub fn into_all(self) -> Vec<String> {
        self.all
    }
}

impl Default for Texts {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_kept_once_and_the_first_is_empty() {
        let mut texts = Texts::new();
        assert_eq!([texts.index("cpu"), texts.index(""), texts.index("cpu")], [1, 0, 1]);
        assert_eq!(texts.into_all(), ["", "cpu"]);
    }
}
