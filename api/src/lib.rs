//! Types, constants and custom resource definitions of the virtualization API.
//!
//! This crate contains data and pure functions without IO. The wire format (field names, fields that are always present, fields
//! that are omitted when empty) is that of the published API.

pub mod address;
pub mod backup;
pub mod boolean;
pub mod cdi;
pub mod clone;
pub mod condition;
pub mod config;
pub mod constants;
pub mod crds;
pub mod dedicated;
pub mod duration;
pub mod enums;
pub mod export;
pub mod fields;
pub mod gates;
pub mod hibernation;
pub mod host_devices;
pub mod hotplug;
pub mod instancetype;
pub mod kubevirt;
pub mod migration;
pub mod names;
pub mod nics;
pub mod overhead;
pub mod owner;
pub mod persistent_state;
pub mod plugin;
pub mod policy;
pub mod pool;
pub mod preset;
pub mod quantity;
pub mod replicaset;
pub mod resize;
pub mod snapshot;
pub mod subresources;
pub mod tls;
pub mod traceparent;
pub mod tsc;
pub mod virtiofs;
pub mod vm;
pub mod vmi;
pub mod vsock;
pub mod webhook_path;

pub(crate) use boolean::is_false;
pub use boolean::is_true;
pub use condition::Condition;
pub use enums::{
    DataVolumePhase, EvictionStrategy, HibernationPhase, MigrationPhase, PrintableStatus, QuiesceState, RunStrategy,
    SavedMemoryPhase, StartStrategy, StateChangeAction, VmOperation, VmiPhase,
};
pub use gates::FeatureGate;
pub use kubevirt::spec::KubeVirt;
pub use migration::VirtualMachineInstanceMigration;
pub use policy::MigrationPolicy;
pub use pool::VirtualMachinePool;
pub use preset::VirtualMachineInstancePreset;
pub use replicaset::VirtualMachineInstanceReplicaSet;
pub use vm::spec::{VirtualMachine, VirtualMachineSpec};
pub use vm::status::VirtualMachineStatus;
pub use vmi::spec::{VirtualMachineInstance, VirtualMachineInstanceSpec, VirtualMachineInstanceTemplateSpec};
pub use vmi::status::VirtualMachineInstanceStatus;
