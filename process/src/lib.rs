//! What every Ferrovirt process does: log, stop on signals, follow the cluster configuration, keep its TLS identity
//! fresh, serve health and metrics; and share out what many want at a time.
//!
//! Everything here is followed live: a changed configuration, Secret or CA bundle takes effect without a restart.

pub mod client;
pub mod config;
pub mod events;
pub mod logging;
mod metrics_access;
mod object;
pub mod ops;
pub mod profiler;
pub mod rest_metrics;
pub mod shares;
pub mod signals;
pub mod tls;

pub use tokio_util::sync::CancellationToken;
