//! Webhooks of each kind: one module a kind, with its defaults, its rules and the functions that the registry calls.
//!
//! `mutate` sets defaults, `validate` checks; `field_errors` holds the rules without the request. [`checks`] has the parts
//! that the webhooks of several groups share.

pub(crate) mod backup;
mod checks;
pub(crate) mod clone;
mod data_source;
pub(crate) mod data_volume;
pub(crate) mod deletion;
pub(crate) mod eviction;
pub(crate) mod export;
mod host_disk;
pub mod instancetype;
pub mod kubevirt;
pub(crate) mod migration;
pub(crate) mod plugin;
pub(crate) mod policy;
pub(crate) mod pool;
pub(crate) mod preset;
pub mod replica_set;
pub(crate) mod restore;
pub(crate) mod snapshot;
pub(crate) mod status;
pub mod vm;
pub mod vmi;
mod volume_requests;
