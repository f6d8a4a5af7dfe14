//! Defaulting and validation of the virtualization kinds.
//!
//! The rules are pure functions of the object, the old object, the user and the cluster configuration; [`handle`]
//! wraps them as admission webhooks. Whatever a client sends, the answer is a well-formed review: nothing here
//! panics, and nothing is accepted that could not be read.
//!
//! ```text
//! body -> review::Request -> read (typed, unknown fields found)
//!           mutating:   defaults  -> patch (only what changes)
//!           validating: rules + unsupported -> causes -> denial
//! ```

pub mod causes;
pub mod defaults;
pub mod patch;
pub mod read;
pub mod replica_set;
pub mod review;
pub mod rules;
pub mod unsupported;
pub mod vm;
pub mod vmi;

mod names;
mod semantic;
mod webhook;

pub use review::AdmissionReview;
pub use webhook::{PATHS, TrustedUsers, Webhook, answer, handle, review as respond};
