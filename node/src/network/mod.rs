//! The networks of a machine: for each interface a bridge and a tap device in the pod's network namespace, and behind them
//! the guest, its packets translated to and from the pod's addresses (masquerade) or on the link's own network ([`bridge`]).
//!
//! ```text
//!            pod's network namespace
//!   eth0 (CNI) <- nftables NAT -> k6t-eth0 (bridge, 10.0.2.1) - tap0 - guest (10.0.2.2 by DHCP)
//! ```
//!
//! [`request`] reads what the machine asks for, [`plan`] compares it with the links and addresses there are and says
//! what is missing, [`apply`] does that. An agent that stopped half-way leaves a state from which the next one goes on;
//! a finished set-up is recognised by a mark on the bridge and left alone, so running machines keep their rules.

mod apply;
mod bridge;
mod namespace;
pub mod plan;
pub mod request;
pub mod ruleset;

use std::{net::IpAddr, time::Duration};

use api::VirtualMachineInstance;
use tokio::sync::Semaphore;

pub use self::namespace::NetworkNamespace;
use crate::safe_dir::Peer;

/// Longest time a set-up may take, all system calls and programs included.
const DEADLINE: Duration = Duration::from_secs(20);
/// Set-ups at a time; each has a thread of its own while it lasts.
static CONCURRENT: Semaphore = Semaphore::const_new(4);

/// The networks of a pod as they were set up for its machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodNetwork {
    /// What the launcher needs to know, one entry an interface.
    pub nics: Vec<protocol::Nic>,
    /// What the machine's status shows, one entry an interface.
    pub interfaces: Vec<PodInterface>,
}

/// An interface of the machine as the cluster sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodInterface {
    /// Its name in the machine's specification.
    pub name: String,
    /// The link of the pod that it is connected to.
    pub pod_interface_name: String,
    /// The pod's addresses on it, at most one a family: under these the guest is reached.
    pub ips: Vec<IpAddr>,
}

/// Why the network of a machine could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The interface asks for what is not supported.
    #[error("interface {interface}: {reason}")]
    Unsupported {
        /// Name of the interface.
        interface: String,
        /// What it asks for.
        reason: String,
    },
    /// The range for the guest's address has no room.
    #[error("VM CIDR subnet is too small, at least 2 host addresses are required: {0}")]
    SubnetTooSmall(String),
    /// The range for the guest's address is not one.
    #[error("VM CIDR is not valid: {0}")]
    InvalidSubnet(String),
    /// A port is out of range.
    #[error("interface {interface}: {port} is not a port")]
    InvalidPort {
        /// Name of the interface.
        interface: String,
        /// What was given.
        port: i32,
    },
    /// The launcher shares its network with the node: nothing is changed there.
    #[error("the launcher is in the network of the node")]
    HostNetwork,
    /// The pod has no such link (yet).
    #[error("pod link ({0}) is missing")]
    PodLinkMissing(String),
    /// The pod's link has no address (yet).
    #[error("pod link ({0}) has no address")]
    PodAddressMissing(String),
    /// The pod's link is not one of those that have MAC addresses.
    #[error("pod link ({0}) has no MAC address")]
    NoMac(String),
    /// A name that is needed belongs to a link of another kind.
    #[error("link {0} exists and is not ours")]
    ForeignLink(String),
    /// The process of the launcher cannot be used.
    #[error("cannot enter the network of the launcher")]
    Namespace(#[source] std::io::Error),
    /// The process of the launcher is gone.
    #[error(transparent)]
    Peer(#[from] crate::safe_dir::Error),
    /// The kernel refused a change of links or addresses.
    #[error("cannot {operation} {link}")]
    Link {
        /// What was tried.
        operation: &'static str,
        /// On which link.
        link: String,
        /// What the kernel said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The rules for address translation were not taken.
    #[error("nft refused the rules: {0}")]
    Rules(String),
    /// nft could not be run.
    #[error("cannot run nft")]
    Nft(#[source] std::io::Error),
    /// It took too long.
    #[error("setting up the network took longer than {} s", DEADLINE.as_secs())]
    Timeout,
}

impl Error {
    /// The machine asks for what this agent cannot give: to try again is of no use.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
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

/// Sets up the networks of a machine in the pod that `pod` is a process of. Can be repeated at any time; when all is in
/// place nothing is changed.
pub async fn setup(pod: &Peer, vmi: &VirtualMachineInstance) -> Result<PodNetwork, Error> {
    let requests = request::requests(vmi)?;
    if requests.is_empty() {
        return Ok(PodNetwork::default());
    }
    let namespace = NetworkNamespace::of(pod)?;
    setup_in(namespace, requests).await
}

/// Sets up what is asked for in a network namespace.
pub async fn setup_in(namespace: NetworkNamespace, requests: Vec<request::Request>) -> Result<PodNetwork, Error> {
    let work = async {
        // The semaphore is never closed.
        let _slot = CONCURRENT.acquire().await;
        namespace.run(move || async move { apply::reconcile(&requests).await }).await
    };
    tokio::time::timeout(DEADLINE, work).await.map_err(|_| Error::Timeout)?
}

#[cfg(test)]
mod tests;
