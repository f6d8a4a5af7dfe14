//! virt-launcher: runs libvirt's daemon and the domain of one VMI in a pod, controlled by virt-handler.
//!
//! * `engine` owns the domain: one task makes every change. Start here.
//! * `domain` renders a VirtualMachineInstance as libvirt's XML, parses XML and compares domains; pure.
//! * `storage` prepares the disks: overlays, empty disks, cloud-init images. `virtiofs` serves directories to the guest.
//! * [`hypervisor`] holds the traits under the engine, and libvirt behind them (the only unsafe code) with its daemon and a
//!   node's capabilities, which are collected once so that launchers do not probe QEMU.
//! * `guest_agent` queries the guest agent, freezes file systems and propagates credentials.
//! * `vm_state` holds the state of the VMI beside its disks: TPM and UEFI variables.
//! * `saved_memory` finds complete files with the memory of hibernated guests, and marks those that were resumed.
//! * `downward_metrics` gives the guest metrics of its node and domain.
//! * `migration` passes on the connections of a live migration between two pods.
//! * `host_cpus` reads the CPUs of the pod, and keeps the launcher's own threads away from those of vCPUs.
//! * `network` serves DHCP to the guest; `streaming` serves the serial console, VNC, USB redirection and screenshots.
//! * `server` answers virt-handler, `socket` opens the sockets that it connects to; [`worker`] connects all of it; `tasks` are
//!   those that must not end.
//! * [`freezer`] and [`probe`] are commands that run in the launcher's container, [`hold_volumes`] is the program of attachment
//!   pods.

mod descriptors;
mod domain;
mod downward_metrics;
mod engine;
mod files;
pub mod find_migrated;
pub mod freezer;
mod guest_agent;
pub mod hold_volumes;
mod host_cpus;
pub mod hypervisor;
mod migration;
mod network;
pub mod options;
pub mod paths;
pub mod probe;
mod saved_memory;
mod server;
mod socket;
mod storage;
mod streaming;
mod tasks;
mod virtiofs;
mod vm_state;
pub mod worker;
