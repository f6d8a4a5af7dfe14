//! The addresses that have connections of their own.

use std::net::IpAddr;

use super::{ProbeAddresses, TrustedAddresses, connections::Sender};

/// Addresses with connections of their own.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    /// Addresses with a proof.
    pub trusted: TrustedAddresses,
    /// Addresses that kubelet's probes come from.
    pub probes: ProbeAddresses,
}

impl Callers {
    pub(super) fn sender(&self, address: IpAddr) -> Sender {
        let address = address.to_canonical();
        Sender { address, trusted: self.trusted.contains(address), probes: self.probes.contains(address) }
    }
}
