//! Uncompressed profiles in the format of `pprof`: the used subset of its `profile.proto`.
//!
//! Addresses are relative to the files, not to the process. They reveal no load addresses and match a build with symbols, which
//! provides the function names (released programs are stripped).

use std::collections::BTreeMap;

use prost::Message;

/// The message `Profile`.
#[derive(Clone, PartialEq, Message)]
pub struct Profile {
    /// Types of the values of a sample, in their order.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// The samples.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// Mapped files with code.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// Addresses in samples.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// String table; the first string is empty.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// Start time in nanoseconds of Unix time.
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    /// Duration in nanoseconds.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// Type of the sampling period.
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    /// Sampling period.
    #[prost(int64, tag = "12")]
    pub period: i64,
}

/// Type of a value; fields are indexes of strings.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ValueType {
    /// Counted quantity.
    #[prost(int64, tag = "1")]
    pub r#type: i64,
    /// Unit.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// A distinct stack of threads with the same name, and its counts.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Sample {
    /// Locations, innermost function first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// A number for each type of the profile.
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
    /// Labels.
    #[prost(message, repeated, tag = "3")]
    pub label: Vec<Label>,
}

/// Label of a sample; fields are indexes of strings.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Label {
    /// Key.
    #[prost(int64, tag = "1")]
    pub key: i64,
    /// Value.
    #[prost(int64, tag = "2")]
    pub str: i64,
}

/// Mapped part of a file with code.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mapping {
    /// ID, counted from 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// First address.
    #[prost(uint64, tag = "2")]
    pub memory_start: u64,
    /// First address after the mapping.
    #[prost(uint64, tag = "3")]
    pub memory_limit: u64,
    /// Offset in the file.
    #[prost(uint64, tag = "4")]
    pub file_offset: u64,
    /// File name; index of a string.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// Build ID of the file; index of a string.
    #[prost(int64, tag = "6")]
    pub build_id: i64,
}

/// Address of code.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Location {
    /// ID, counted from 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// ID of the mapping; 0 if unknown.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// The address.
    #[prost(uint64, tag = "3")]
    pub address: u64,
}

/// String table of a profile under construction.
#[derive(Debug)]
pub struct StringTable {
    all: Vec<String>,
    known: BTreeMap<String, i64>,
}

impl StringTable {
    /// Creates a table with the empty string, which must be first.
    #[must_use]
    pub fn new() -> Self {
        let mut texts = Self { all: Vec::new(), known: BTreeMap::new() };
        texts.index("");
        texts
    }

    /// Returns the index of a string and adds the string if it is new.
    pub fn index(&mut self, text: &str) -> i64 {
        if let Some(index) = self.known.get(text) {
            return *index;
        }
        let index = i64::try_from(self.all.len()).unwrap_or(i64::MAX);
        self.all.push(text.to_owned());
        self.known.insert(text.to_owned(), index);
        index
    }

    /// Returns all strings in the order of their indexes.
    #[must_use]
    pub fn into_all(self) -> Vec<String> {
        self.all
    }
}

impl Default for StringTable {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_unique_and_the_first_is_empty() {
        let mut texts = StringTable::new();
        assert_eq!([texts.index("cpu"), texts.index(""), texts.index("cpu")], [1, 0, 1]);
        assert_eq!(texts.into_all(), ["", "cpu"]);
    }
}
