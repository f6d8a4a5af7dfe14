//! libvirt and QEMU: the connection to libvirt ([`libvirt`], the only unsafe code), its daemon ([`daemon`]), its statistics
//! ([`stats`]) and the capabilities of a node ([`capabilities`]).

pub mod capabilities;
pub(crate) mod daemon;
pub(crate) mod libvirt;
pub(crate) mod stats;
