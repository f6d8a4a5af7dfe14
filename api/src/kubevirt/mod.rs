//! KubeVirt: the installation and the configuration of the cluster.

pub mod configuration;
pub mod developer;
pub mod migrations;
pub mod network;
pub mod spec;
pub mod status;
pub mod uninstall;

pub use spec::KubeVirt;
