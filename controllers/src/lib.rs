//! virt-controller: the cluster-wide controllers.
//!
//! `process` starts everything. `registry/` lists the controllers; each has a folder with its watches, observations and
//! decisions. `resources/` caches the cluster, `runtime/` runs the controllers and carries their decisions out, `inventory/`
//! exports metrics of VMs and VMIs.

mod attachment_pod;
mod budgets;
mod cache;
mod certificates;
mod clone;
mod clone_source;
mod common_instancetypes;
mod data_volumes;
mod evacuation;
mod hold;
mod importer;
mod inventory;
mod kubevirt;
mod launcher_pod;
mod lead;
mod migration;
mod node;
pub mod options;
mod owned_vmis;
mod persistent_state;
mod pod_parts;
mod pod_trace;
mod pool;
mod process;
mod registry;
mod replicas;
mod replicaset;
mod resources;
mod restore;
mod runtime;
#[cfg(test)]
mod scripted;
mod server;
mod setup;
mod shards;
mod silence;
mod snapshot;
mod snapshot_class;
mod tsc;
mod uninstall;
mod vm;
mod vm_lease;
mod vmi;
mod volume_migration;
mod webhook_path;
mod workload_update;

pub use process::{RunError, run};
