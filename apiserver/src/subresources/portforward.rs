//! `virtualmachines/portforward` and `virtualmachineinstances/portforward`: a WebSocket to a port of the guest.
//!
//! The guest is reached by the address of its pod: with masquerade the pod forwards the ports, with bridge the guest has the
//! pod's address. After a pod has ended, its address soon belongs to another pod of any tenant. So virt-api connects only to
//! a pod that runs and is not being deleted, reads the pod again once the connection is open, and watches it as long as the
//! connection exists ([`crate::streaming::vmi_watch`]).

use std::net::SocketAddr;

use api::{VirtualMachineInstance, constants::condition};
use axum::{body::Body, response::Response};
use http::Request;
use k8s_openapi::api::core::v1::Pod;

use super::common::{
    call::Call,
    specification::{Answer, Parameter, Specification, VMIS, VMS},
    stream::{self, Client, Copying},
    vmi_checks::{check_running, conflict},
};
use crate::{
    clients::address::{self, Holds, LauncherAddress},
    metrics::StreamKind,
    requests::{error::ApiError, options::is_set},
    streaming::{
        frames::Content,
        guest::{self, GuestPort, Protocol},
        relay::Limits,
        tunnel,
    },
};

pub(super) static OF_VM: Specification = Specification {
    path_parameters: PATH,
    query_parameters: QUERY,
    listed: false,
    operation: "vm-PortForward",
    description: "Open a websocket to a port of the VirtualMachine's guest",
    ..Specification::get(VMS, "portforward", Answer::Stream(&STREAM), |call, request| {
        Box::pin(async move { serve(call, call.vmi_of_vm().await?, request).await })
    })
};

pub(super) static OF_VMI: Specification = Specification {
    path_parameters: PATH,
    query_parameters: QUERY,
    operation: "vmi-PortForward",
    description: "Open a websocket to a port of the guest",
    ..Specification::get(VMIS, "portforward", Answer::Stream(&STREAM), |call, request| {
        Box::pin(async move { serve(call, call.vmi().await?, request).await })
    })
};

const PATH: &[Parameter] = &[("port", "integer"), ("protocol", "string")];
const QUERY: &[Parameter] = &[("halfClose", "boolean")];

static STREAM: StreamKind = StreamKind {
    label: "portforward",
    gauge: "kubevirt_portforward_active_tunnels",
    help: "Forwarded connections open now",
};

/// Longest part of a path in an error.
const MAX_ECHO: usize = 256;

/// Errors of port and protocol in a path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum PortError {
    /// More or fewer elements than port and protocol.
    #[error("404: Page Not Found")]
    NoSuchPath,
    /// Invalid port.
    #[error("invalid port {0:?}: must be a number between 1 and 65535")]
    Port(String),
    /// Unknown protocol.
    #[error("invalid protocol {0:?}: must be tcp or udp")]
    Protocol(String),
}

const NOT_RUNNING: &str = "VMI is not running";

/// Parses port and protocol of `…/portforward/PORT[/PROTOCOL]`.
fn guest_port(path: &str) -> Result<GuestPort, PortError> {
    let mut elements = path.split('/').skip_while(|element| *element != "namespaces").skip(5);
    let cut = |text: &str| text.chars().take(MAX_ECHO).collect::<String>();
    let (port, protocol) = match (elements.next(), elements.next(), elements.next()) {
        (Some(port), protocol, None) => (port, protocol.unwrap_or("tcp")),
        _ => return Err(PortError::NoSuchPath),
    };
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let number = port.parse::<u16>().ok().filter(|number| digits && *number != 0);
    let port = number.ok_or_else(|| PortError::Port(cut(port)))?;
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        other => return Err(PortError::Protocol(cut(other))),
    };
    Ok(GuestPort { port, protocol })
}

/// Rejects a VMI that is not running, or not on the primary network of its pod.
fn decide(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.has_true(condition::PAUSED) {
        return Err(conflict(vmi, "VMI is paused"));
    }
    if vmi.status.as_ref().is_none_or(|status| status.interfaces.is_empty()) {
        return Err(ApiError::BadRequest("no network interfaces are present".to_owned()));
    }
    check_running(vmi, NOT_RUNNING)?;
    let networks = &vmi.spec.networks;
    let on_pod_network = networks
        .iter()
        .filter(|network| network.is_primary())
        .any(|network| vmi.spec.domain.devices.interfaces.iter().any(|interface| interface.name == network.name));
    if on_pod_network {
        Ok(())
    } else {
        Err(ApiError::BadRequest("no network interface is connected to the pod network".to_owned()))
    }
}

/// Returns the launcher pod of the VMI and its address, from the status of the pod.
fn target(vmi: &VirtualMachineInstance, pods: &[Pod]) -> Result<LauncherAddress, ApiError> {
    // Pods that have ended are not listed.
    let pod = address::launcher(vmi, pods).ok_or_else(|| not_running(vmi))?;
    if !address::is_running(pod) || pod.metadata.deletion_timestamp.is_some() {
        return Err(not_running(vmi));
    }
    let address = address::of_pod(pod).ok_or_else(|| {
        let name = vmi.metadata.name.as_deref().unwrap_or_default();
        ApiError::Internal(format!("dialing VM: the pod of VMI {name} has no usable address"))
    })?;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Ok(LauncherAddress { pod: text(&pod.metadata.name), uid: text(&pod.metadata.uid), address })
}

/// Returns 409 for a VMI without a running pod.
fn not_running(vmi: &VirtualMachineInstance) -> ApiError {
    conflict(vmi, NOT_RUNNING)
}

async fn serve(call: Call<'_>, vmi: VirtualMachineInstance, request: Request<Body>) -> Result<Response, ApiError> {
    let port = guest_port(request.uri().path()).map_err(|error| match error {
        PortError::NoSuchPath => ApiError::NoSuchPath,
        other => ApiError::BadRequest(other.to_string()),
    })?;
    decide(&vmi)?;
    let content = match port.protocol {
        Protocol::Tcp => Content::Bytes,
        Protocol::Udp => Content::Datagrams,
    };
    let half_close = is_set(request.uri().query(), "halfClose");
    let (context, objects) = (call.context, &call.context.objects);
    let stop = context.stop.clone();
    stream::serve(call, &STREAM, content, request, async {
        let target = target(&vmi, &objects.launcher_pods(&vmi).await?)?;
        let address = SocketAddr::new(target.address, port.port);
        let guest = guest::connect(address, port.protocol)
            .await
            .map_err(|error| ApiError::Internal(format!("dialing VM: {address}: {error}")))?;
        // Since the pod was read, its address may have passed to another pod.
        let pod = objects.pod_opt(&call.object.namespace, &target.pod).await?;
        if target.holds(pod.as_ref()) != Holds::Yes {
            return Err(not_running(&vmi));
        }
        let watch = context.vmi_watches.watch(&objects.client, &vmi, &target);
        let gone = async move { watch.gone().await };
        Ok(move |client: Client| -> Copying {
            Box::pin(tunnel::copy(client, guest, half_close, Limits::tunnel(), gone, stop))
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::requests::error::Kind;

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
        assert_eq!(decide(&vmi(pod.clone(), up.clone())), Ok(()));
        let default = json!([{"name": "default", "multus": {"networkName": "n", "default": true}}]);
        assert_eq!(decide(&vmi(default, up.clone())), Ok(()));
        assert_eq!(
            decide(&vmi(pod.clone(), json!({}))),
            Err(ApiError::BadRequest("no network interfaces are present".into()))
        );
        let paused = json!({"interfaces": [{"name": "default"}], "conditions": [{"type": "Paused", "status": "True"}]});
        assert_eq!(
            decide(&vmi(pod, paused)),
            Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", "VMI is paused"))
        );
        for phase in ["Scheduled", "Succeeded", "Failed", "Unknown"] {
            let ended = json!({"phase": phase, "interfaces": [{"name": "default"}]});
            assert_eq!(
                decide(&vmi(json!([{"name": "default", "pod": {}}]), ended)),
                Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", "VMI is not running")),
                "{phase}"
            );
        }
        let other = json!([{"name": "default", "multus": {"networkName": "n"}}]);
        assert!(matches!(decide(&vmi(other, up)), Err(ApiError::BadRequest(_))));
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

    fn dialled() -> LauncherAddress {
        LauncherAddress { pod: "virt-launcher-vmi".into(), uid: "p1".into(), address: "10.1.0.5".parse().unwrap() }
    }

    #[test]
    fn cve_2026_13318_address_reported_by_the_guest_is_ignored() {
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

    #[test]
    fn port_and_protocol_are_parsed_from_the_path() {
        let at = |rest: &str| {
            guest_port(&format!("/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/portforward{rest}"))
        };
        assert_eq!(at("/22"), Ok(GuestPort { port: 22, protocol: Protocol::Tcp }));
        assert_eq!(at("/53/udp"), Ok(GuestPort { port: 53, protocol: Protocol::Udp }));
        assert_eq!(at(""), Err(PortError::NoSuchPath));
        assert_eq!(at("/22/tcp/x"), Err(PortError::NoSuchPath));
        for port in ["0", "65536", "+22", "ssh", "-1"] {
            assert_eq!(at(&format!("/{port}")), Err(PortError::Port(port.into())));
        }
        assert_eq!(at("/22/sctp"), Err(PortError::Protocol("sctp".into())));
        // A namespace, a VM and a port of confusing names.
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/namespaces/virtualmachines/portforward/portforward/1";
        assert_eq!(guest_port(path), Ok(GuestPort { port: 1, protocol: Protocol::Tcp }));
    }
}
