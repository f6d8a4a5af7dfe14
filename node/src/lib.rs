//! virt-handler: manages the VMIs of one node.
//!
//! - [`vmi`]: one task per VMI, which drives its launcher ([`launcher`]) and writes its status; [`network`]: the pod's network.
//! - [`devices`]: devices of the node for kubelet and for launcher pods. [`node_object`]: labels, heartbeat, readiness.
//! - [`volumes`]: hot-plugged volumes; [`host_disks`]: disks that are files of the node.
//! - [`server`]: consoles and lifecycle requests of virt-api; [`vsock`]: VSOCK connections of guests. [`metrics`].
//! - [`migration`]: connections of live migrations between nodes.
//! - [`certificate`]: the certificates of this virt-handler. [`process`] starts everything. [`standalone`]: channels without a
//!   cluster, for measurements.
//!
//! Every byte, path and socket of a pod or guest is hostile. All access to files goes through [`safe_dir`].

mod certificate;
mod devices;
mod host_disks;
mod launcher;
mod metrics;
mod migration;
mod network;
mod node_object;
mod process;
mod safe_dir;
mod server;
mod standalone;
mod vmi;
mod volumes;
mod vsock;

pub use process::{Error, Options, run, runtime};
pub use standalone::StandaloneChannels;
