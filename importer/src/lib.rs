//! virt-importer fills the claim of a DataVolume from its source.
//!
//! [`task`] is the contract with virt-controller, which starts the program in an import pod.

pub mod task;
