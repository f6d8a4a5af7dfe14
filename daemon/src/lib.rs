//! Parts that the long-running programs share.
//!
//! - [`tasks`]: long-lived tasks under supervision, panics as errors; [`backoff`], [`errors`], [`signals`], [`logging`].
//! - [`client`]: the client of the API server; [`watch`]: watches with jitter; [`config`]: the cluster configuration.
//! - [`events`], [`merge_patch`]: writes to the cluster.
//! - [`telemetry`]: traces of starts, exported to a collector.
//! - [`tls`]: identities, trust and the TLS server; [`ops`]: health, metrics and profiles; [`metrics`]: registered metrics; [`quota`]: slots by user.
//!
//! Everything is followed live: a changed configuration, Secret or CA bundle takes effect without a restart.

pub mod backoff;
pub mod client;
pub mod config;
pub mod errors;
pub mod events;
mod lock;
pub mod logging;
pub mod merge_patch;
pub mod metrics;
pub mod ops;
pub mod quota;
pub mod signals;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod watch;

pub use lock::lock;
pub use profiler;
pub use tokio_util::sync::CancellationToken;
