//! Path of a value in an object.
//!
//! Most values have no error and no change, so a path is a chain of borrowed keys and is written out on demand.

use std::fmt;

use json_patch::jsonptr::{PointerBuf, Token};

/// Path of a value in an object.
#[derive(Clone, Copy)]
pub(crate) enum FieldPath<'a> {
    /// The whole object.
    Root,
    /// Member of an object.
    Member(&'a FieldPath<'a>, &'a str),
    /// Item of a list.
    Item(&'a FieldPath<'a>, usize),
}

impl FieldPath<'_> {
    /// Returns the path as JSON pointer.
    pub(crate) fn pointer(&self) -> PointerBuf {
        match self {
            FieldPath::Root => PointerBuf::new(),
            FieldPath::Member(parent, key) => {
                let mut pointer = parent.pointer();
                pointer.push_back(Token::new(*key));
                pointer
            }
            FieldPath::Item(parent, index) => {
                let mut pointer = parent.pointer();
                pointer.push_back(*index);
                pointer
            }
        }
    }
}

/// Writes the path as Kubernetes does, such as `spec.disks[3].name`.
impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldPath::Root => Ok(()),
            FieldPath::Member(FieldPath::Root, key) => formatter.write_str(key),
            FieldPath::Member(parent, key) => write!(formatter, "{parent}.{key}"),
            FieldPath::Item(parent, index) => write!(formatter, "{parent}[{index}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FieldPath;

    #[test]
    fn paths_are_written_for_users_and_for_patches() {
        let spec = FieldPath::Member(&FieldPath::Root, "spec");
        let disks = FieldPath::Member(&spec, "disks");
        let disk = FieldPath::Item(&disks, 3);
        let odd = FieldPath::Member(&disk, "a/b~c");
        assert_eq!(
            (FieldPath::Root.to_string(), FieldPath::Root.pointer().to_string()),
            (String::new(), String::new())
        );
        assert_eq!(
            (odd.to_string().as_str(), odd.pointer().as_str()),
            ("spec.disks[3].a/b~c", "/spec/disks/3/a~1b~0c")
        );
    }
}
