//! Defaulting and validation of the virtualization kinds.
//!
//! Rules are pure functions of the object, the stored object, the user, the cluster configuration and lookups of other
//! objects; [`handle`] runs them as admission webhooks. Every body gets a well-formed response: nothing here panics, and
//! an object that cannot be decoded is denied.
//!
//! ```text
//! body -> request -> decode (unknown fields are errors)
//!           mutating:   defaults            -> patch (necessary changes only)
//!           validating: rules + unsupported -> field errors -> denial
//!           both:       lookups missing     -> virt-api reads them -> evaluated again
//!                       effects             -> virt-api writes them before it responds
//! ```
//!
//! Folders import in one direction: `context` <- `rules`, `defaults` <- `kinds` (a module a kind) <- `registry` (the table
//! of webhooks).

pub mod context;
pub mod defaults;
pub mod kinds;
mod registry;
pub mod rules;

pub use context::{
    AdmissionRequest, AdmissionResponse, AdmissionReview, Effect, Failure, FieldError, FieldErrors, Generated,
    LookupError, LookupResult, Lookups, ObjectQuery, ReviewTrace, Selection, decode,
};
pub use registry::{Evaluation, Review, WEBHOOKS, Webhook, handle};
