//! The HTTP form of requests and answers.
//!
//! - [`error`]: failures as Kubernetes `Status` objects, and the helpers for all other answers.
//! - [`body`]: reads bodies within a memory budget; [`options`]: their contents and the query.
//! - [`negotiation`]: media types and other tokens in headers.

pub(crate) mod body;
pub(crate) mod error;
pub(crate) mod negotiation;
pub(crate) mod options;
