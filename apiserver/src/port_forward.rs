//! Connections from virt-api to a port of a guest.
//!
//! The guest is reached by the address of its pod: with masquerade the pod passes the ports on, with bridge the guest
//! has the pod's address. The address of a pod that has ended is soon another pod's, of any tenant: only that of a pod that
//! runs and is not being deleted is dialled, the pod is looked at again once the connection is up, and followed as long as it
//! is open ([`crate::presence`]).

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use api::{constants::condition, enums::VmiPhase, vmi::spec::VirtualMachineInstance};
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use tokio::{
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use crate::{
    address,
    error::ApiError,
    instance::{self, conflict, has_condition},
    path::{GuestPort, Protocol},
};

/// Longest time for a connection to come up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a guest.
#[derive(Debug)]
pub enum Connection {
    /// A stream.
    Tcp(TcpStream),
    /// Datagrams to and from one port.
    Udp(UdpSocket),
}

/// Whether ports of the machine can be forwarded.
pub fn check(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if has_condition(vmi, condition::PAUSED) {
        return Err(conflict(vmi, "VMI is paused"));
    }
    if vmi.status.as_ref().is_none_or(|status| status.interfaces.is_empty()) {
        return Err(ApiError::BadRequest("no network interfaces are present".to_owned()));
    }
    if instance::phase(vmi) != VmiPhase::Running {
        return Err(not_running(vmi));
    }
    let networks = &vmi.spec.networks;
    let on_pod_network = networks
        .iter()
        .filter(|network| network.pod.is_some())
        .any(|network| vmi.spec.domain.devices.interfaces.iter().any(|interface| interface.name == network.name));
    if on_pod_network {
        Ok(())
    } else {
        Err(ApiError::BadRequest("no network interface is connected to the pod network".to_owned()))
    }
}

/// The pod whose address is dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Its address.
    pub address: IpAddr,
}

/// Returns the launcher pod of the VMI and its address, from the status of the pod.
pub fn target(vmi: &VirtualMachineInstance, pods: &[Pod]) -> Result<Target, ApiError> {
    // Pods that have ended are not listed.
    let pod = address::launcher(vmi, pods).ok_or_else(|| not_running(vmi))?;
    if !is_running(pod) || pod.metadata.deletion_timestamp.is_some() {
        return Err(not_running(vmi));
    }
    let address = address::of_pod(pod).ok_or_else(|| {
        let name = vmi.metadata.name.as_deref().unwrap_or_default();
        ApiError::Internal(format!("dialing VM: the pod of VMI {name} has no usable address"))
    })?;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Ok(Target { pod: text(&pod.metadata.name), uid: text(&pod.metadata.uid), address })
}

/// 409: what has been connected to is no longer, or not yet, the guest.
pub fn not_running(vmi: &VirtualMachineInstance) -> ApiError {
    conflict(vmi, "VMI is not running")
}

fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// How long a pod keeps its address, as far as its object tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// No end is in sight.
    Yes,
    /// It is being deleted, and its grace period ends then.
    Until(Timestamp),
    /// It has ended, or is another one.
    No,
}

impl Target {
    /// Returns how long a pod, as it is now, holds the address. While it is being deleted it does until its grace period is
    /// over: its guest is being shut down, and may be saying its last words.
    #[must_use]
    pub fn holds(&self, pod: Option<&Pod>) -> Holds {
        let same = |pod: &&Pod| pod.metadata.uid.as_deref() == Some(&self.uid) && is_running(pod);
        match pod.filter(same) {
            Some(pod) if address::of_pod(pod) != Some(self.address) => Holds::No,
            Some(pod) => match &pod.metadata.deletion_timestamp {
                Some(end) => Holds::Until(end.0),
                None => Holds::Yes,
            },
            None => Holds::No,
        }
    }
}

/// Connects to a port of the guest at `address`.
pub async fn connect(address: IpAddr, to: GuestPort) -> Result<Connection, ApiError> {
    let target = SocketAddr::new(address, to.port);
    let connecting = async {
        match to.protocol {
            Protocol::Tcp => {
                let stream = TcpStream::connect(target).await?;
                stream.set_nodelay(true)?;
                Ok(Connection::Tcp(stream))
            }
            Protocol::Udp => {
                let any: IpAddr =
                    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
                let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
                // Datagrams of others are dropped by the kernel from here on.
                socket.connect(target).await?;
                Ok(Connection::Udp(socket))
            }
        }
    };
    let failed = |error: std::io::Error| ApiError::Internal(format!("dialing VM: {target}: {error}"));
    match timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(result) => result.map_err(failed),
        Err(_) => Err(failed(std::io::ErrorKind::TimedOut.into())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error::Kind;

    fn vmi(networks: Value, status: Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi", "uid": "u1"},
            "spec": {"domain": {"devices": {"interfaces": [{"name": "default"}]}}, "networks": networks},
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn guest_must_run_and_be_on_the_pod_network() {
        let pod = json!([{"name": "default", "pod": {}}]);
        let up = json!({"phase": "Running", "interfaces": [{"name": "default"}]});
        assert_eq!(check(&vmi(pod.clone(), up.clone())), Ok(()));
        assert_eq!(
            check(&vmi(pod.clone(), json!({}))),
            Err(ApiError::BadRequest("no network interfaces are present".into()))
        );
        let paused = json!({"interfaces": [{"name": "default"}], "conditions": [{"type": "Paused", "status": "True"}]});
        assert_eq!(
            check(&vmi(pod, paused)),
            Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", "VMI is paused"))
        );
        for phase in ["Scheduled", "Succeeded", "Failed", "Unknown"] {
            let ended = json!({"phase": phase, "interfaces": [{"name": "default"}]});
            assert_eq!(
                check(&vmi(json!([{"name": "default", "pod": {}}]), ended)),
                Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", "VMI is not running")),
                "{phase}"
            );
        }
        let other = json!([{"name": "default", "multus": {"networkName": "n"}}]);
        assert!(matches!(check(&vmi(other, up)), Err(ApiError::BadRequest(_))));
    }

    fn placed() -> VirtualMachineInstance {
        let status = json!({
            "nodeName": "n1", "activePods": {"p1": "n1"},
            "interfaces": [{"name": "default", "ipAddress": "10.9.9.9", "infoSource": "guest-agent"}],
        });
        vmi(json!([{"name": "default", "pod": {}}]), status)
    }

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "virt-launcher-vmi", "uid": "p1", "ownerReferences": [
                {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vmi", "uid": "u1", "controller": true}
            ]},
            "spec": {"nodeName": "n1", "containers": []},
            "status": {"phase": "Running", "podIP": "10.1.0.5"},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn dialled() -> Target {
        Target { pod: "virt-launcher-vmi".into(), uid: "p1".into(), address: "10.1.0.5".parse().unwrap() }
    }

    #[test]
    fn cve_2026_13318_what_the_guest_says_about_its_address_does_not_count() {
        assert_eq!(target(&placed(), &[pod(|_| {})]), Ok(dialled()));
        assert!(target(&placed(), &[]).is_err());
    }

    #[test]
    fn pod_that_has_ended_or_is_being_deleted_is_not_dialled() {
        let refused = Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", "VMI is not running"));
        for phase in ["Pending", "Succeeded", "Failed", "Unknown"] {
            assert_eq!(target(&placed(), &[pod(|pod| pod["status"]["phase"] = json!(phase))]), refused, "{phase}");
        }
        let deleted = pod(|pod| pod["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z"));
        assert_eq!(target(&placed(), &[deleted]), refused);
    }

    #[test]
    fn pod_holds_its_address_while_it_runs() {
        let holds = |change: fn(&mut Value)| dialled().holds(Some(&pod(change)));
        assert_eq!(holds(|_| {}), Holds::Yes);
        assert_eq!(
            holds(|pod| pod["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z")),
            Holds::Until("2030-01-01T00:00:00Z".parse().unwrap())
        );
        assert_eq!(holds(|pod| pod["metadata"]["uid"] = json!("p2")), Holds::No);
        assert_eq!(holds(|pod| pod["status"]["phase"] = json!("Succeeded")), Holds::No);
        assert_eq!(holds(|pod| pod["status"]["podIP"] = json!("10.1.0.6")), Holds::No);
        assert_eq!(holds(|pod| pod["status"]["podIP"] = Value::Null), Holds::No);
        assert_eq!(dialled().holds(None), Holds::No);
    }
}
