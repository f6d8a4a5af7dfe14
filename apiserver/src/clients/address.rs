//! The addresses that virt-api connects to for its clients.
//!
//! virt-api is inside the cluster's network and connects on behalf of users, so an address under control of a guest or a user
//! would open that network to them. Only addresses of pods are used, as kubelet reports them, and none that cannot be a
//! pod's.

use std::net::IpAddr;

pub(crate) use api::address::is_dialable;
use api::{owner, vmi::spec::VirtualMachineInstance};
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};

/// Returns the address in the status of a pod that has a network of its own.
pub(crate) fn of_pod(pod: &Pod) -> Option<IpAddr> {
    let host_network = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let text = pod.status.as_ref()?.pod_ip.as_deref()?;
    text.parse().ok().filter(|ip| !host_network && is_dialable(*ip))
}

/// Returns the launcher pod of a VMI, among pods of its namespace.
///
/// Labels alone prove nothing, since users can label pods: the VMI must own the pod, the pod must run on the VMI's node, and
/// the VMI's status, which only the controllers write, must contain the pod's UID.
pub(crate) fn launcher<'a>(vmi: &VirtualMachineInstance, pods: &'a [Pod]) -> Option<&'a Pod> {
    let status = vmi.status.as_ref()?;
    let node = status.node_name.as_deref().filter(|node| !node.is_empty())?;
    pods.iter().find(|pod| {
        let owned = owner::is_controlled_by(&pod.metadata, vmi);
        let known = pod.metadata.uid.as_ref().is_some_and(|uid| status.active_pods.contains_key(uid));
        let here = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node);
        owned && known && here
    })
}

/// The address of a launcher pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LauncherAddress {
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Its address.
    pub address: IpAddr,
}

/// Returns true while a pod runs.
pub(crate) fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// Time for which a pod keeps its address, according to its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// No end is known.
    Yes,
    /// It is being deleted; its grace period ends then.
    Until(Timestamp),
    /// It has ended, or is another one.
    No,
}

impl LauncherAddress {
    /// Returns the time for which a pod holds the address. A pod that is being deleted holds it until its grace period ends:
    /// the guest is shutting down and may still send.
    #[must_use]
    pub(crate) fn holds(&self, pod: Option<&Pod>) -> Holds {
        let same = |pod: &&Pod| pod.metadata.uid.as_deref() == Some(&self.uid) && is_running(pod);
        match pod.filter(same) {
            Some(pod) if of_pod(pod) != Some(self.address) => Holds::No,
            Some(pod) => match &pod.metadata.deletion_timestamp {
                Some(end) => Holds::Until(end.0),
                None => Holds::Yes,
            },
            None => Holds::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {
                "name": "virt-launcher-vmi", "uid": "p1",
                "labels": {"kubevirt.io/created-by": "u1"},
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vmi", "uid": "u1",
                    "controller": true,
                }],
            },
            "spec": {"nodeName": "node1", "containers": []},
            "status": {"podIP": "10.1.0.5"},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn vmi() -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi", "uid": "u1"},
            "spec": {"domain": {"devices": {}}},
            "status": {"nodeName": "node1", "activePods": {"p1": "node1"}, "interfaces": [{"ipAddress": "169.254.169.254"}]},
        }))
        .unwrap()
    }

    #[test]
    fn launcher_is_known_by_owner_status_and_node() {
        let found = |pod: Pod| launcher(&vmi(), &[pod]).is_some();
        assert!(found(pod(|_| {})));
        assert!(!found(pod(|pod| pod["metadata"]["uid"] = json!("p2"))));
        assert!(!found(pod(|pod| pod["metadata"]["ownerReferences"] = json!([]))));
        for (field, value) in [("uid", "u2"), ("name", "other"), ("kind", "Invented"), ("apiVersion", "example.org/v1")]
        {
            assert!(!found(pod(|pod| pod["metadata"]["ownerReferences"][0][field] = json!(value))), "{field}");
        }
        assert!(!found(pod(|pod| pod["metadata"]["ownerReferences"][0]["controller"] = json!(false))));
        assert!(!found(pod(|pod| pod["spec"]["nodeName"] = json!("node2"))));
    }

    #[test]
    fn cve_2026_13318_only_addresses_that_a_pod_can_have_are_dialled() {
        assert_eq!(of_pod(&pod(|_| {})), Some("10.1.0.5".parse().unwrap()));
        assert_eq!(of_pod(&pod(|pod| pod["status"]["podIP"] = json!("fd00::5"))), Some("fd00::5".parse().unwrap()));
        assert_eq!(of_pod(&pod(|pod| pod["spec"]["hostNetwork"] = json!(true))), None);
        for address in [
            "127.0.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "0.0.0.0",
            "0.1.2.3",
            "::",
            "::1",
            "::127.0.0.1",
            "fe80::1",
            "ff02::1",
            "::ffff:169.254.169.254",
            "::ffff:127.0.0.1",
            "168.63.129.16",
            "fd00:ec2::254",
            "fd20:ce::254",
            "64:ff9b::169.254.169.254",
            "",
            "x",
        ] {
            assert_eq!(of_pod(&pod(|pod| pod["status"]["podIP"] = json!(address))), None, "{address}");
        }
    }
}
