//! Parts that the long-running programs share.
//!
//! - [`tasks`]: long-lived tasks under supervision, panics as errors; [`signals`], [`logging`].
//! - [`client`]: the client of the API server; [`config`]: the cluster configuration.
//! - [`events`], [`merge_patch`]: writes to the cluster.
//! - [`telemetry`]: traces of starts, exported to a collector.
//! - [`tls`]: identities, trust and the TLS server; [`ops`]: health, metrics and profiles; [`quota`]: slots by user.
//!
//! Everything is followed live: a changed configuration, Secret or CA bundle takes effect without a restart.

#[cfg(feature = "cluster")]
pub mod client;
#[cfg(feature = "cluster")]
pub mod config;
#[cfg(feature = "cluster")]
mod errors;
#[cfg(feature = "cluster")]
pub mod events;
pub mod logging;
#[cfg(feature = "cluster")]
pub mod merge_patch;
#[cfg(feature = "cluster")]
pub mod ops;
#[cfg(feature = "cluster")]
pub mod quota;
pub mod signals;
pub mod tasks;
#[cfg(feature = "cluster")]
pub mod telemetry;
#[cfg(feature = "cluster")]
pub mod tls;
#[cfg(feature = "cluster")]
mod watch;

#[cfg(feature = "cluster")]
pub use profiler;
pub use tokio_util::sync::CancellationToken;
