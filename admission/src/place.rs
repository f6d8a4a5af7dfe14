//! Where a value stands in an object. Of most values nobody is ever told, so a place is a chain of borrowed keys, and is
//! written out only for those that are at fault or change.

use std::fmt;

/// Where a value stands in the one that is looked at.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// It is the one that is looked at.
    Root,
    /// Member of an object.
    Member(&'a Place<'a>, &'a str),
    /// Item of a list.
    Item(&'a Place<'a>, usize),
}

impl Place<'_> {
    /// The place as a JSON pointer, as patches have it.
    pub(crate) fn pointer(&self) -> String {
        match self {
            Place::Root => String::new(),
            Place::Member(parent, key) => {
                let mut pointer = parent.pointer();
                pointer.push('/');
                pointer.push_str(&key.replace('~', "~0").replace('/', "~1"));
                pointer
            }
            Place::Item(parent, index) => format!("{}/{index}", parent.pointer()),
        }
    }
}

/// The place as users know it.
impl fmt::Display for Place<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Root => Ok(()),
            Place::Member(Place::Root, key) => formatter.write_str(key),
            Place::Member(parent, key) => write!(formatter, "{parent}.{key}"),
            Place::Item(parent, index) => write!(formatter, "{parent}[{index}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Place;

    #[test]
    fn places_are_told_to_users_and_to_patches() {
        let spec = Place::Member(&Place::Root, "spec");
        let disks = Place::Member(&spec, "disks");
        let disk = Place::Item(&disks, 3);
        let odd = Place::Member(&disk, "a/b~c");
        assert_eq!((Place::Root.to_string(), Place::Root.pointer()), (String::new(), String::new()));
        assert_eq!(
            (odd.to_string().as_str(), odd.pointer().as_str()),
            ("spec.disks[3].a/b~c", "/spec/disks/3/a~1b~0c")
        );
    }
}
