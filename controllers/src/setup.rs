//! Everything that controllers are created from.

use std::sync::Arc;

use daemon::config::ConfigHandle;

use crate::{options::Options, resources::Caches, runtime::Metrics};

/// Version of this installation.
pub(crate) const VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));

/// Everything that controllers are created from.
pub(crate) struct Setup {
    /// The caches.
    pub caches: Arc<Caches>,
    /// The cluster configuration.
    pub config: ConfigHandle,
    /// Metrics of the runtime.
    pub metrics: Metrics,
    /// The command line.
    pub options: Options,
}
