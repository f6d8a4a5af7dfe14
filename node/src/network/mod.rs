//! The networks of a VMI: for each interface a bridge and a tap device in the pod's network namespace. The guest is behind address
//! translation (masquerade) or on the link's own network ([`bridge`]).
//!
//! ```text
//!            pod's network namespace
//!   eth0 (CNI) <- nftables NAT -> k6t-eth0 (bridge, 10.0.2.1) - tap0 - guest (10.0.2.2 by DHCP)
//! ```
//!
//! [`request`] parses the VMI, [`plan`] compares it with the [`observed`] links and addresses and returns the missing steps, [`apply`]
//! executes them. An interrupted setup is continued by the next attempt. A mark on the bridge identifies a complete setup, which
//! is left alone, so that running VMIs keep their rules.

mod apply;
mod bridge;
mod mac;
mod namespace;
pub(crate) mod observed;
mod plan;
pub(crate) mod request;
pub(crate) mod ruleset;
mod step;

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use api::VirtualMachineInstance;
use daemon::errors;
use tokio::sync::Semaphore;

pub(crate) use self::namespace::NetworkNamespace;
use crate::safe_dir::Peer;

/// Limit of a setup, including all system calls and programs.
const DEADLINE: Duration = Duration::from_secs(20);
/// Setups at a time. Each has a thread of its own.
static CONCURRENT: Semaphore = Semaphore::const_new(4);

/// The networks of a pod after the setup.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodNetwork {
    /// Data for the launcher, one entry per interface.
    pub nics: Vec<protocol::Nic>,
    /// Data for the VMI's status, one entry per interface.
    pub interfaces: Vec<PodInterface>,
    /// Interfaces whose links were given back to the network plugins.
    pub released: BTreeSet<String>,
    /// Interfaces that were not set up or not given back. They do not affect the others.
    pub failures: Vec<InterfaceFailure>,
}

/// Reason why an interface was not set up or not given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceFailure {
    /// Name in the VMI's spec.
    pub name: String,
    pub message: String,
    /// No attempt can succeed.
    pub permanent: bool,
}

impl InterfaceFailure {
    fn of(name: &str, error: &Error) -> Self {
        Self { name: name.to_owned(), message: errors::chain(error), permanent: error.is_permanent() }
    }
}

/// An interface of the VMI as the cluster sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodInterface {
    /// Name in the VMI's spec.
    pub name: String,
    /// The pod's link that it uses.
    pub pod_interface_name: String,
    /// The pod's addresses on it, at most one per family, under which the guest is reached.
    pub ips: Vec<IpAddr>,
}

/// Reason why the network of a VMI, or one of its interfaces, was not set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The interface requests an unsupported feature.
    #[error("interface {interface}: {reason}")]
    Unsupported {
        /// Name of the interface.
        interface: String,
        /// The feature.
        reason: String,
    },
    /// The subnet of the guest is too small.
    #[error("VM CIDR subnet is too small, at least 2 host addresses are required: {0}")]
    SubnetTooSmall(String),
    /// The subnet of the guest is invalid.
    #[error("VM CIDR is not valid: {0}")]
    InvalidSubnet(String),
    /// A port is out of range.
    #[error("interface {interface}: {port} is not a port")]
    InvalidPort {
        /// Name of the interface.
        interface: String,
        /// The value.
        port: i32,
    },
    /// The launcher uses the node's network, which is not changed.
    #[error("the launcher is in the network of the node")]
    HostNetwork,
    /// The pod does not have the link yet.
    #[error("pod link ({0}) is missing")]
    PodLinkMissing(String),
    /// The pod's link has no address yet.
    #[error("pod link ({0}) has no address")]
    PodAddressMissing(String),
    /// The pod's link has no MAC address.
    #[error("pod link ({0}) has no MAC address")]
    NoMac(String),
    /// A link of another kind has the name that is needed.
    #[error("link {0} exists and belongs to another owner")]
    ForeignLink(String),
    /// The process of the launcher cannot be used.
    #[error("cannot enter the network of the launcher")]
    Namespace(#[source] std::io::Error),
    /// The process of the launcher has exited.
    #[error(transparent)]
    Peer(#[from] crate::safe_dir::Error),
    /// The kernel rejected a change of links or addresses.
    #[error("cannot {operation} {link}")]
    Link {
        operation: &'static str,
        link: String,
        /// The error of the kernel.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// nft rejected the rules.
    #[error("nft refused the rules: {0}")]
    Rules(String),
    /// nft cannot be run.
    #[error("cannot run nft")]
    Nft(#[source] std::io::Error),
    /// The limit was exceeded.
    #[error("setting up the network took longer than {} s", DEADLINE.as_secs())]
    Timeout,
}

impl Error {
    /// Returns true if the VMI requests an unsupported feature, so that no attempt can succeed.
    pub(crate) fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::Unsupported { .. }
                | Self::SubnetTooSmall(_)
                | Self::InvalidSubnet(_)
                | Self::InvalidPort { .. }
                | Self::HostNetwork
        )
    }
}

/// Sets up the networks of a VMI in the pod of the process `pod`, and gives the links of the interfaces `release` back.
/// Idempotent: nothing changes if the setup is complete.
pub(crate) async fn setup(pod: &Peer, vmi: &VirtualMachineInstance, release: &[String]) -> Result<PodNetwork, Error> {
    let (mut requests, mut failures) = (Vec::new(), Vec::new());
    for (name, request) in request::requests(vmi) {
        match request {
            Ok(request) => requests.push(request),
            Err(error) => failures.push(InterfaceFailure::of(&name, &error)),
        }
    }
    let releases = request::releases(vmi, release);
    if requests.is_empty() && releases.is_empty() {
        return Ok(PodNetwork { released: release.iter().cloned().collect(), failures, ..PodNetwork::default() });
    }
    let mut ready = setup_in(NetworkNamespace::of(pod)?, requests, releases).await?;
    failures.append(&mut ready.failures);
    Ok(PodNetwork { failures, ..ready })
}

/// Sets up interfaces in a network namespace.
pub(crate) async fn setup_in(
    namespace: NetworkNamespace,
    requests: Vec<request::Request>,
    releases: Vec<request::Release>,
) -> Result<PodNetwork, Error> {
    let work = async {
        // The semaphore is never closed.
        let _slot = CONCURRENT.acquire().await;
        namespace.run(move || async move { apply::reconcile(&requests, &releases).await }).await
    };
    tokio::time::timeout(DEADLINE, work).await.map_err(|_| Error::Timeout)?
}

#[cfg(test)]
mod tests;
