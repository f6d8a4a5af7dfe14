//! Defaulting and validation of the virtualization kinds.
//!
//! The rules are pure functions of the object, the old object, the user, the cluster configuration and what was read of
//! other objects; [`handle`]
//! wraps them as admission webhooks. Whatever a client sends, the answer is a well-formed review: nothing here
//! panics, and nothing is accepted that could not be read.
//!
//! ```text
//! body -> review::Request -> read (typed, unknown fields found)
//!           mutating:   defaults  -> patch (only what changes)
//!           validating: rules + unsupported -> causes -> denial
//!           either:     needs other objects -> the server reads them -> again, with `Neighbours`
//! ```

pub mod backup;
pub mod causes;
pub mod clone;
pub mod defaults;
pub mod eviction;
pub mod export;
pub mod instancetype;
pub mod kubevirt;
pub mod migration;
pub mod neighbours;
pub mod patch;
pub mod plugin;
pub mod policy;
pub mod pool;
pub mod preset;
pub mod read;
pub mod replica_set;
pub mod restore;
pub mod review;
pub mod rules;
pub mod snapshot;
pub mod status;
pub mod unsupported;
pub mod vm;
pub mod vmi;

mod addresses;
mod data_source;
mod names;
mod place;
mod resource;
mod semantic;
mod volume_requests;
mod webhook;

pub use review::AdmissionReview;
pub use webhook::{Context, Question, Stop, TrustedUsers, WEBHOOKS, Webhook, handle};
