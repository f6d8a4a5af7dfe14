//! The runtime under the controllers: what they observe comes from caches, what they decide is carried out here.
//!
//! ```text
//!  watch ──> Cache ──key──> Queue ──> reconcile(caches, failure, now) ──> Decision { effects, wake_after }
//!              ^                                                             │
//!              └───────── answers of the API server ──── Executor <──────────┘   (leadership, time limits, counters)
//! ```
//!
//! Controllers do no input or output: the same observation yields the same decision. Answers to writes go straight into
//! the caches, so that the next reconcile sees them although the watch has not delivered them yet.

pub mod cache;
pub mod diff;
pub mod driver;
pub mod effect;
pub mod executor;
pub mod lease;
pub mod metrics;
pub mod queue;
pub mod recorder;

pub use cache::{Cache, Cached};
pub use driver::{Failure, Key};
pub use effect::{Decision, Effect, Kind, Note, NoteType};
