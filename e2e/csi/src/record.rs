//! Volumes and snapshots as the driver records them.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::faults::Faults;

/// Identifier of a volume or snapshot, derived from the name that the orchestrator gives it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Id(String);

impl Id {
    /// Length in hexadecimal digits.
    const LENGTH: usize = 32;

    /// Returns the identifier for a name.
    pub(crate) fn of_name(name: &str) -> Self {
        let mut text: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        text.truncate(Self::LENGTH);
        Self(text)
    }

    /// Returns an identifier that a call contains. `None` if the driver never gave out one like it.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (text.len() == Self::LENGTH && text.bytes().all(is_digit)).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Form of a volume's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Content {
    /// A directory. Its size is not limited.
    Directory,
    /// A file with the file system ext4, of the size of the volume.
    Ext4,
    /// A file behind a block device.
    Block,
}

/// Source of a volume's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    /// A snapshot.
    Snapshot(Id),
    /// A volume.
    Volume(Id),
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Volume {
    pub id: Id,
    /// Name that the orchestrator gave it.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    pub content: Content,
    /// The only node that can use it; `None` for all.
    pub node: Option<String>,
    pub source: Option<Source>,
    /// Allows snapshots and clones of it.
    pub snapshots: bool,
    pub faults: Faults,
}

/// A snapshot of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Snapshot {
    pub id: Id,
    /// Name that the orchestrator gave it.
    pub name: String,
    /// The volume.
    pub source: Id,
    /// Size of the volume in bytes.
    pub size: u64,
    pub content: Content,
    /// Time of creation in seconds since 1970.
    pub created: i64,
}

impl Content {
    /// Returns true if a volume of this content can be made from a copy of another.
    pub(crate) fn accepts(self, other: Self) -> bool {
        (self == Self::Directory) == (other == Self::Directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_no_paths() {
        let id = Id::of_name("pvc-1");
        assert_eq!(Id::parse(&id.to_string()), Some(id));
        for bad in ["", "..", "/etc", "../../etc/passwd/../../../../../e", "0123456789ABCDEF0123456789ABCDEF"] {
            assert_eq!(Id::parse(bad), None);
        }
    }

    #[test]
    fn directories_and_files_are_no_copies_of_each_other() {
        for (one, other, expected) in [
            (Content::Directory, Content::Directory, true),
            (Content::Directory, Content::Ext4, false),
            (Content::Block, Content::Directory, false),
            (Content::Block, Content::Ext4, true),
        ] {
            assert_eq!(one.accepts(other), expected);
        }
    }
}
