//! Live migrations of VMIs: from the request to the hand-off to virt-handler, and their ends.

mod object;

pub(crate) use self::object::{Origin, migration_of};
