//! Objects of a new cluster that the API server does not create itself.

use serde_json::{Value, json};

use crate::{
    certificates::{DNS_USER, KUBELET_CLIENT, NETWORKS_USER, STORAGE_USER},
    plan::Plan,
    render::storage,
};

/// Renders the bootstrap objects as a `List`.
///
/// The DNS server runs beside the API server instead of in a pod, so it answers before the first node is ready and needs no
/// image. A Service without selector and its EndpointSlice provide the usual address.
#[must_use]
pub(crate) fn bootstrap(plan: &Plan) -> String {
    let binding = |name: &str, role: &str, user: &str| -> Value {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        })
    };
    let ports = || -> Value {
        json!([
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ])
    };
    let mut list = json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            binding("ferrovirt:kubelet-api", "system:kubelet-api-admin", KUBELET_CLIENT),
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": DNS_USER},
                "rules": [
                    {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
                    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                ],
            },
            binding(DNS_USER, DNS_USER, DNS_USER),
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": NETWORKS_USER},
                "rules": [
                    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
                    {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["update"]},
                    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                    {"apiGroups": ["k8s.cni.cncf.io"], "resources": ["network-attachment-definitions"], "verbs": ["get"]},
                ],
            },
            binding(NETWORKS_USER, NETWORKS_USER, NETWORKS_USER),
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": STORAGE_USER},
                "rules": storage::rules(),
            },
            binding(STORAGE_USER, STORAGE_USER, STORAGE_USER),
            network_attachment_definitions(),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {
                    "name": "kube-dns",
                    "namespace": "kube-system",
                    "labels": {"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"},
                },
                "spec": {"clusterIP": plan.dns_service_address().to_string(), "ports": ports()},
            },
        ],
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {
                "kubernetes.io/service-name": "kube-dns",
                "endpointslice.kubernetes.io/managed-by": "ferrovirt-cluster",
            },
        },
        "addressType": "IPv4",
        "ports": ports(),
        "endpoints": [{"addresses": [plan.control_address().to_string()], "conditions": {"ready": true}}],
    });
    if let Some(items) = list["items"].as_array_mut() {
        items.push(slice);
        items.extend(storage::objects());
    }
    list.to_string()
}

/// Returns the CRD of NetworkAttachmentDefinition, as in its specification.
fn network_attachment_definitions() -> Value {
    let names = json!({
        "plural": "network-attachment-definitions",
        "singular": "network-attachment-definition",
        "kind": "NetworkAttachmentDefinition",
        "shortNames": ["net-attach-def"],
    });
    let spec = json!({"type": "object", "properties": {"config": {"type": "string"}}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "network-attachment-definitions.k8s.cni.cncf.io"},
        "spec": {
            "group": "k8s.cni.cncf.io",
            "scope": "Namespaced",
            "names": names,
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn dns_service_leads_to_the_control_plane() {
        let list: Value = serde_json::from_str(&bootstrap(&Plan::new(PathBuf::from("/src"), 0).unwrap())).unwrap();
        let items = list["items"].as_array().unwrap();
        let of_kind = |kind: &str| items.iter().find(|item| item["kind"] == kind).unwrap();
        assert_eq!(of_kind("Service")["spec"]["clusterIP"], "10.212.0.10");
        assert_eq!(of_kind("EndpointSlice")["endpoints"][0]["addresses"][0], "10.210.0.1");
        assert_eq!(of_kind("Service")["spec"]["ports"][0]["port"], 53);
    }

    #[test]
    fn api_server_may_use_the_kubelets() {
        let text = bootstrap(&Plan::new(PathBuf::from("/src"), 0).unwrap());
        assert!(text.contains("system:kubelet-api-admin") && text.contains(KUBELET_CLIENT));
    }
}
