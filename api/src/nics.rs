//! Network interfaces in the status of a VMI: who reports each.

use crate::{
    VirtualMachineInstance,
    vmi::{
        network::{Interface, Network},
        status::VirtualMachineInstanceNetworkInterface as Shown,
    },
};

/// Source of an interface that the running domain has.
pub const DOMAIN: &str = "domain";
/// Source of an interface that the guest agent reports.
pub const GUEST_AGENT: &str = "guest-agent";
/// Source of an interface that the network plugins have connected to the pod.
pub const MULTUS: &str = "multus-status";
/// Separates the sources of an interface.
pub const SEPARATOR: &str = ", ";
/// State of an interface that is to be unplugged.
pub const ABSENT: &str = "absent";
/// State of an interface whose link is down.
pub const DOWN: &str = "down";

impl Interface {
    /// Returns true if the interface is to be unplugged.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.state.as_deref() == Some(ABSENT)
    }
}

/// Returns the sources of an interface of the status.
pub fn sources(shown: &Shown) -> impl Iterator<Item = &str> {
    let sources = shown.info_source.as_deref().unwrap_or_default().split(SEPARATOR);
    sources.filter(|source| !source.is_empty())
}

/// Returns the status of an interface.
#[must_use]
pub fn shown<'a>(vmi: &'a VirtualMachineInstance, name: &str) -> Option<&'a Shown> {
    let shown = vmi.status.iter().flat_map(|status| &status.interfaces);
    shown.into_iter().find(|shown| shown.name.as_deref() == Some(name))
}

/// Returns true if the status shows an interface with this source.
#[must_use]
pub fn has_source(vmi: &VirtualMachineInstance, name: &str, source: &str) -> bool {
    shown(vmi, name).is_some_and(|shown| sources(shown).any(|known| known == source))
}

/// Returns the interfaces on secondary Multus networks, with their networks.
pub fn secondary(vmi: &VirtualMachineInstance) -> impl Iterator<Item = (&Interface, &Network)> {
    let networks = &vmi.spec.networks;
    vmi.spec.domain.devices.interfaces.iter().filter_map(|interface| {
        let network = networks.iter().find(|network| network.name == interface.name)?;
        (network.multus.is_some() && !network.is_primary()).then_some((interface, network))
    })
}
