//! A save of a guest's memory that is to begin, as plain values. [`super::hibernation`] decides on them.

use std::time::Duration;

/// A save that the launcher has not begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AwaitedSave {
    /// Since when.
    pub(super) since: Duration,
    /// The last request to begin it.
    pub(super) asked: Asked,
}

/// The state of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// None was sent.
    Never,
    /// The launcher may follow it.
    Open,
    /// The launcher has refused it, with this message.
    Refused(String),
}
