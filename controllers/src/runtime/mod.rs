//! The runtime of the controllers. Start with [`Controller`]; `runner.rs` runs one, `executor/` carries decisions out.
//!
//! ```text
//!  watch ──> Cache ──key──> Queue ──> observe ──> decide ──> Decision { effects, wake_after }
//!              ^                                                 │
//!              └── answers of the API server ──── Executor <─────┘   (leadership, time limits, counters)
//! ```
//! Controllers do no IO: the same observation yields the same decision. Answers to writes go straight into the caches, so
//! that the next reconcile sees them before the watch delivers them.

mod clock;
mod controller;
mod decision;
mod effect;
mod executor;
mod kind;
mod lease;
mod lease_times;
mod lease_watch;
mod metrics;
mod queue;
mod queue_metrics;
mod recorder;
mod runner;
mod step;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    controller::{Attempt, ConfigChange, Controller, Needs, Wake},
    decision::{Decision, Failure, Failures},
    effect::{
        DataVolumeCreation, Effect, Event, Kind, POD_SECURITY, RevisionCopy, SnapshotContentCreation, WriteOptions,
        has_finalizer,
    },
    executor::{Answers, ClaimUser, Executor},
    lease::{Election, Leadership},
    lease_times::Times,
    metrics::Metrics,
    recorder::Recorder,
    runner::{Run, Runner},
    step::Step,
};
