//! Addresses that have proven to be an API server.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::lock;

/// Most addresses kept. A cluster has fewer API servers.
const MAX_ADDRESSES: usize = 64;
/// Validity of a proof. Each request of an API server renews it.
const TTL: Duration = Duration::from_secs(600);

/// Addresses that showed the webhook path segment or a front-proxy certificate. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct TrustedAddresses {
    proofs: Arc<Mutex<HashMap<IpAddr, Instant>>>,
}

impl TrustedAddresses {
    /// Records that a request from `address` proved its sender to be an API server.
    pub fn record(&self, address: IpAddr) {
        self.record_at(address.to_canonical(), Instant::now());
    }

    /// Returns true while a proof of `address` counts.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.contains_at(address.to_canonical(), Instant::now())
    }

    fn record_at(&self, address: IpAddr, now: Instant) {
        let mut proofs = lock(&self.proofs);
        if proofs.len() >= MAX_ADDRESSES && !proofs.contains_key(&address) {
            proofs.retain(|_, at| now.duration_since(*at) < TTL);
            let oldest = proofs.iter().min_by_key(|(_, at)| **at).map(|(address, _)| *address);
            if let Some(oldest) = oldest.filter(|_| proofs.len() >= MAX_ADDRESSES) {
                proofs.remove(&oldest);
            }
        }
        proofs.insert(address, now);
    }

    fn contains_at(&self, address: IpAddr, now: Instant) -> bool {
        lock(&self.proofs).get(&address).is_some_and(|at| now.duration_since(*at) < TTL)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(number: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, number).into()
    }

    #[test]
    fn proof_counts_for_its_address_and_time() {
        let trusted = TrustedAddresses::default();
        let now = Instant::now();
        trusted.record_at(address(1), now);
        assert!(trusted.contains_at(address(1), now + TTL / 2));
        assert!(!trusted.contains_at(address(1), now + TTL));
        assert!(!trusted.contains_at(address(2), now));
    }

    #[test]
    fn mapped_addresses_are_the_same() {
        let trusted = TrustedAddresses::default();
        trusted.record(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().into());
        assert!(trusted.contains(address(1)));
    }

    #[test]
    fn number_of_addresses_is_bounded_and_the_newest_stay() {
        let trusted = TrustedAddresses::default();
        let now = Instant::now();
        for number in 0..=u8::MAX {
            trusted.record_at(address(number), now + Duration::from_millis(number.into()));
        }
        assert_eq!(lock(&trusted.proofs).len(), MAX_ADDRESSES);
        assert!(trusted.contains_at(address(u8::MAX), now + Duration::from_secs(1)));
        assert!(!trusted.contains_at(address(0), now + Duration::from_secs(1)));
    }
}
