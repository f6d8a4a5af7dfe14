//! The launcher: runs libvirt's daemon and one machine in a pod, for the node agent.
//!
//! * [`domain`] turns a VirtualMachineInstance into libvirt's XML; pure.
//! * [`disks`] makes the images a machine starts from: overlays, empty disks, cloud-init.
//! * [`libvirt`] is the connection to libvirt's daemon, and the only unsafe code.
//! * [`daemon`] configures, starts and watches that daemon.
//! * [`machine`] owns the machine: one task makes every change.
//! * [`agent`] asks the guest agent inside the machine; [`stats`] reads what libvirt counts.
//! * [`server`] answers the node agent, [`stream`] carries its streams; [`console`], [`display`], [`dhcp`] and [`dhcp6`]
//!   serve the serial port, pictures and the guest's addresses.
//! * [`capabilities`] prepares a node: what its libvirt and QEMU can do, kept so that launchers need not probe again.
//! * [`worker`] wires all of it together.

pub mod agent;
pub mod capabilities;
pub mod console;
pub mod daemon;
pub mod dhcp;
pub mod dhcp6;
pub mod disks;
pub mod display;
pub mod domain;
pub mod files;
pub mod freezer;
pub mod libvirt;
pub mod machine;
pub mod options;
pub mod paths;
pub mod probe;
pub mod resolver;
pub mod server;
pub mod stats;
pub mod stream;
pub mod worker;
