//! Kubernetes Events that users see.
//!
//! [`Event`] is one of them, [`Recorder`] writes them in a task of its own and counts repetitions instead of writing them
//! again; `name` makes their object names.

mod name;
mod recorder;

use k8s_openapi::api::core::v1::ObjectReference;

pub use recorder::{Outcome, Recorder, Source};

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    /// Something ordinary.
    Normal,
    /// A problem.
    Warning,
}

impl EventType {
    /// Returns the name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// An event about an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The object.
    pub regarding: ObjectReference,
    /// Its type.
    pub event_type: EventType,
    /// The reason: one word for programs.
    pub reason: &'static str,
    /// The message: one sentence for people.
    pub message: String,
    /// The component that reports it, if it differs from the one that the recorder names.
    pub component: Option<&'static str>,
}

impl Event {
    /// Creates an event about something ordinary.
    #[must_use]
    pub fn normal(regarding: ObjectReference, reason: &'static str, message: impl Into<String>) -> Self {
        Self { regarding, event_type: EventType::Normal, reason, message: message.into(), component: None }
    }

    /// Creates an event about a problem.
    #[must_use]
    pub fn warning(regarding: ObjectReference, reason: &'static str, message: impl Into<String>) -> Self {
        Self { regarding, event_type: EventType::Warning, reason, message: message.into(), component: None }
    }
}
