//! Connections from virt-api to a port of a guest.
//!
//! The guest is reached by the address of its pod: with masquerade the pod passes the ports on, with bridge the guest
//! has the pod's address.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use api::{constants::condition, vmi::spec::VirtualMachineInstance};
use k8s_openapi::api::core::v1::Pod;
use tokio::{
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use crate::{
    address,
    error::ApiError,
    instance::{conflict, has_condition},
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

/// The address to dial, from the status of the machine's pod.
pub fn guest_address(vmi: &VirtualMachineInstance, pods: &[Pod]) -> Result<IpAddr, ApiError> {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    let pod = address::launcher(vmi, pods)
        .ok_or_else(|| ApiError::BadRequest(format!("VMI {name} has no launcher pod that runs")))?;
    address::of_pod(pod)
        .ok_or_else(|| ApiError::Internal(format!("dialing VM: the pod of VMI {name} has no usable address")))
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
        let up = json!({"interfaces": [{"name": "default"}]});
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
        let other = json!([{"name": "default", "multus": {"networkName": "n"}}]);
        assert!(matches!(check(&vmi(other, up)), Err(ApiError::BadRequest(_))));
    }

    #[test]
    fn cve_2026_13318_what_the_guest_says_about_its_address_does_not_count() {
        let status = json!({
            "nodeName": "n1", "activePods": {"p1": "n1"},
            "interfaces": [{"name": "default", "ipAddress": "10.9.9.9", "infoSource": "guest-agent"}],
        });
        let vmi = vmi(json!([{"name": "default", "pod": {}}]), status);
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"uid": "p1", "ownerReferences": [
                {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vmi", "uid": "u1", "controller": true}
            ]},
            "spec": {"nodeName": "n1", "containers": []},
            "status": {"podIP": "10.1.0.5"},
        }))
        .unwrap();
        assert_eq!(guest_address(&vmi, &[pod]), Ok("10.1.0.5".parse().unwrap()));
        assert!(guest_address(&vmi, &[]).is_err());
    }
}
