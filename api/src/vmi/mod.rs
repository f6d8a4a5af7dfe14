//! VirtualMachineInstance: a running VM.
//!
//! Large parts that few VMs and VMIs have are boxed: virt-controller keeps all of them.

pub mod access;
pub mod clock;
pub mod cpu;
pub mod devices;
pub mod disks;
pub mod domain;
pub mod features;
pub mod firmware;
pub mod memory;
pub mod migration;
pub mod network;
pub mod security;
pub mod spec;
pub mod status;
pub mod volumes;

mod ext;
