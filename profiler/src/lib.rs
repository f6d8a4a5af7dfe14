//! CPU profiles of this process in `pprof` format.
//!
//! ```text
//!            start                       stop
//!   idle ──────────────▶ sampling ────────────────▶ idle, with a profile for `dump`
//!                         │    ▲                        │
//!                         └────┘ start: restarts        └─ start: discards the profile
//!                           disabled by the configuration: idle, without a profile
//! ```
//!
//! A separate process, a second instance of this program, takes the samples ([`sampler`]). No signal handler walks stacks,
//! and the memory of profiling is freed with that process. Requests require the client certificate of virt-api, which
//! queries all components, and a configuration that allows profiles.

mod child;
mod control;
pub mod pprof;
#[cfg(target_arch = "x86_64")]
mod program;
#[cfg(target_arch = "x86_64")]
mod sampler;

pub use child::sample_parent;
pub use control::{PROCESSOR_TIME, Profiler, ProfilerAction, ProfilerError};
