//! Events for the users of a VMI, as plain values.

use crate::launcher::bounded;

/// An event about a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// `Warning` instead of `Normal`.
    pub warning: bool,
    pub reason: &'static str,
    /// The message: one line of bounded length.
    pub message: String,
}

impl Event {
    /// Returns an event of type `Normal`.
    pub(crate) fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self { warning: false, reason, message: bounded(&message.into()) }
    }

    /// Returns an event of type `Warning`.
    pub(crate) fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self { warning: true, reason, message: bounded(&message.into()) }
    }
}
