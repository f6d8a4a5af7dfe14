//! KubeVirt: the installation and the configuration of the cluster.

pub mod configuration;
pub mod developer;
pub mod migrations;
pub mod network;
pub mod spec;
pub mod status;
pub mod uninstall;

use k8s_openapi::jiff::Timestamp;
pub use spec::KubeVirt;

impl KubeVirt {
    /// Returns the rank of the object. Of several the first counts: the oldest one, unless it is being deleted and there is another.
    #[must_use]
    pub fn rank(&self) -> (bool, Option<Timestamp>, Option<String>) {
        let metadata = &self.metadata;
        let created = metadata.creation_timestamp.as_ref().map(|at| at.0);
        (metadata.deletion_timestamp.is_some(), created, metadata.name.clone())
    }
}
