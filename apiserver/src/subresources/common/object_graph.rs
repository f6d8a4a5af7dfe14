//! The objects that a VM or VMI depends on. Backup tools read them.

use std::collections::BTreeMap;

use api::{
    persistent_state::STATUS_VOLUME,
    subresources::{ObjectGraphNode, ObjectGraphOptions, ObjectReference, graph::DEPENDENCY_TYPE},
    vm::{
        spec::{InstancetypeMatcher, PreferenceMatcher, VirtualMachine},
        status::InstancetypeStatusRef,
    },
    vmi::{
        access::AccessCredential,
        spec::{VirtualMachineInstance, VirtualMachineInstanceSpec},
        volumes::Volume,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Type of a dependency.
#[derive(Clone, Copy)]
enum Dependency {
    Compute,
    Config,
    Storage,
    Network,
}

impl Dependency {
    const fn label(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Config => "config",
            Self::Storage => "storage",
            Self::Network => "network",
        }
    }
}

const KUBEVIRT: &str = "kubevirt.io";
const INSTANCETYPE: &str = "instancetype.kubevirt.io";

/// Returns a required node without children.
fn node(group: &str, kind: &str, namespace: &str, name: &str, dependency: Dependency) -> ObjectGraphNode {
    ObjectGraphNode {
        labels: BTreeMap::from([(DEPENDENCY_TYPE.to_owned(), dependency.label().to_owned())]),
        object_reference: ObjectReference {
            api_group: group.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            namespace: Some(namespace.to_owned()),
        },
        ..ObjectGraphNode::default()
    }
}

fn with(children: Vec<ObjectGraphNode>, parent: ObjectGraphNode) -> ObjectGraphNode {
    ObjectGraphNode { children, ..parent }
}

fn optional(node: ObjectGraphNode) -> ObjectGraphNode {
    ObjectGraphNode { optional: Some(true), ..node }
}

/// Returns the tree of a VM. `pod`: name of its launcher pod, if there is one. `state`: claim with its state.
pub(crate) fn of_vm(
    vm: &VirtualMachine,
    pod: Option<&str>,
    state: Option<&str>,
    options: &ObjectGraphOptions,
) -> ObjectGraphNode {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let mut children = Vec::new();
    if vm.status.as_ref().is_some_and(|status| status.created) {
        let vmi = node(KUBEVIRT, "VirtualMachineInstance", namespace, name, Dependency::Compute);
        children.push(with(launcher(namespace, pod), vmi));
    }
    let status = vm.status.as_ref();
    if let Some(matcher) = &vm.spec.instancetype {
        let revision = status.and_then(|status| status.instancetype_ref.as_ref());
        children.extend(matched(&Matcher::from(matcher), revision, namespace));
    }
    if let Some(matcher) = &vm.spec.preference {
        let revision = status.and_then(|status| status.preference_ref.as_ref());
        children.extend(matched(&Matcher::from(matcher), revision, namespace));
    }
    if let Some(spec) = &vm.spec.template.spec {
        children.extend(of_spec(spec, state, namespace));
    }
    let root = node(KUBEVIRT, "VirtualMachine", namespace, name, Dependency::Compute);
    with(filtered(children, options), root)
}

/// Returns the tree of a VMI.
pub(crate) fn of_vmi(vmi: &VirtualMachineInstance, pod: Option<&str>, options: &ObjectGraphOptions) -> ObjectGraphNode {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let mut children = launcher(namespace, pod);
    children.extend(of_spec(&vmi.spec, state_claim(vmi), namespace));
    let root = node(KUBEVIRT, "VirtualMachineInstance", namespace, name, Dependency::Compute);
    with(filtered(children, options), root)
}

/// Returns the claim with the state of a VMI, once its status shows it.
pub(crate) fn state_claim(vmi: &VirtualMachineInstance) -> Option<&str> {
    let entry = vmi.status.as_ref()?.volume_status.iter().find(|entry| entry.name == STATUS_VOLUME)?;
    entry.persistent_volume_claim_info.as_ref()?.claim_name.as_deref()
}

fn launcher(namespace: &str, pod: Option<&str>) -> Vec<ObjectGraphNode> {
    pod.map(|pod| node("", "Pod", namespace, pod, Dependency::Compute)).into_iter().collect()
}

/// A reference to an instance type or a preference.
struct Matcher<'a> {
    kind: &'a str,
    name: &'a str,
    revision: Option<&'a str>,
}

impl<'a> From<&'a InstancetypeMatcher> for Matcher<'a> {
    fn from(matcher: &'a InstancetypeMatcher) -> Self {
        Self {
            kind: matcher.kind.as_deref().unwrap_or_default(),
            name: matcher.name.as_deref().unwrap_or_default(),
            revision: matcher.revision_name.as_deref(),
        }
    }
}

impl<'a> From<&'a PreferenceMatcher> for Matcher<'a> {
    fn from(matcher: &'a PreferenceMatcher) -> Self {
        Self {
            kind: matcher.kind.as_deref().unwrap_or_default(),
            name: matcher.name.as_deref().unwrap_or_default(),
            revision: matcher.revision_name.as_deref(),
        }
    }
}

fn matched(matcher: &Matcher<'_>, status: Option<&InstancetypeStatusRef>, namespace: &str) -> Vec<ObjectGraphNode> {
    let kind = match matcher.kind.to_ascii_lowercase().as_str() {
        "virtualmachineinstancetype" => Some(("VirtualMachineInstancetype", namespace)),
        "virtualmachineclusterinstancetype" => Some(("VirtualMachineClusterInstancetype", "")),
        "virtualmachinepreference" => Some(("VirtualMachinePreference", namespace)),
        "virtualmachineclusterpreference" => Some(("VirtualMachineClusterPreference", "")),
        _ => None,
    };
    let object =
        kind.map(|(kind, namespace)| optional(node(INSTANCETYPE, kind, namespace, matcher.name, Dependency::Config)));
    let revision = status
        .and_then(|status| status.controller_revision_ref.as_ref())
        .and_then(|reference| reference.name.as_deref())
        .or(matcher.revision)
        .filter(|name| !name.is_empty())
        .map(|name| node("apps", "ControllerRevision", namespace, name, Dependency::Config));
    object.into_iter().chain(revision).collect()
}

fn of_spec(spec: &VirtualMachineInstanceSpec, state: Option<&str>, namespace: &str) -> Vec<ObjectGraphNode> {
    let credentials = spec.access_credentials.iter().filter_map(secret_of_credential);
    let mut nodes = credentials.map(|name| node("", "Secret", namespace, name, Dependency::Config)).collect::<Vec<_>>();
    nodes.extend(spec.volumes.iter().flat_map(|volume| of_volume(volume, namespace)));
    nodes.extend(state.map(|name| claim(namespace, name)));
    nodes.extend(spec.networks.iter().filter_map(|network| network.multus.as_ref()).map(|multus| {
        let (namespace, name) = multus.definition(namespace);
        optional(node("k8s.cni.cncf.io", "NetworkAttachmentDefinition", namespace, name, Dependency::Network))
    }));
    nodes
}

fn secret_of_credential(credential: &AccessCredential) -> Option<&str> {
    let keys = credential.ssh_public_key.as_ref().and_then(|keys| keys.source.secret.as_ref());
    let password = || credential.user_password.as_ref().and_then(|password| password.source.secret.as_ref());
    keys.or_else(password).map(|secret| secret.secret_name.as_str())
}

fn claim(namespace: &str, name: &str) -> ObjectGraphNode {
    node("", "PersistentVolumeClaim", namespace, name, Dependency::Storage)
}

fn of_volume(volume: &Volume, namespace: &str) -> Vec<ObjectGraphNode> {
    let config = |kind: &str, name: &str| node("", kind, namespace, name, Dependency::Config);
    if let Some(source) = &volume.data_volume {
        let object = node("cdi.kubevirt.io", "DataVolume", namespace, &source.name, Dependency::Storage);
        return vec![with(vec![claim(namespace, &source.name)], object)];
    }
    if let Some(source) = &volume.persistent_volume_claim {
        return vec![claim(namespace, &source.claim_name)];
    }
    if let Some(source) = &volume.config_map {
        return vec![config("ConfigMap", &source.name)];
    }
    if let Some(name) = volume.secret.as_ref().and_then(|source| source.secret_name.as_deref()) {
        return vec![config("Secret", name)];
    }
    if let Some(name) = volume.service_account.as_ref().and_then(|source| source.service_account_name.as_deref()) {
        return vec![config("ServiceAccount", name)];
    }
    let no_cloud = volume.cloud_init_no_cloud.iter().flat_map(|c| [&c.secret_ref, &c.network_data_secret_ref]);
    let drive = volume.cloud_init_config_drive.iter().flat_map(|c| [&c.secret_ref, &c.network_data_secret_ref]);
    no_cloud.chain(drive).flatten().map(|secret| config("Secret", &secret.name)).collect()
}

fn filtered(nodes: Vec<ObjectGraphNode>, options: &ObjectGraphOptions) -> Vec<ObjectGraphNode> {
    let selected = |node: &ObjectGraphNode| {
        let kept = node.optional != Some(true) || options.include_optional_nodes != Some(false);
        kept && options.label_selector.as_ref().is_none_or(|selector| matches(selector, &node.labels))
    };
    nodes
        .into_iter()
        .filter(selected)
        .map(|node| ObjectGraphNode { children: filtered(node.children.clone(), options), ..node })
        .collect()
}

/// Returns true if labels are selected. An invalid selector selects everything.
fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let mut matches = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    for expression in selector.match_expressions.iter().flatten() {
        let values = expression.values.as_deref().unwrap_or_default();
        let value = labels.get(&expression.key);
        let holds = match (expression.operator.as_str(), values.is_empty()) {
            ("In", false) => value.is_some_and(|value| values.contains(value)),
            ("NotIn", false) => value.is_none_or(|value| !values.contains(value)),
            ("Exists", true) => value.is_some(),
            ("DoesNotExist", true) => value.is_none(),
            _ => return true,
        };
        matches &= holds;
    }
    matches
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm() -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm", "namespace": "ns"},
            "spec": {
                "instancetype": {"kind": "VirtualMachineClusterInstancetype", "name": "small", "revisionName": "old"},
                "preference": {"kind": "unknown", "name": "p"},
                "template": {"spec": {
                    "domain": {"devices": {}},
                    "accessCredentials": [{"sshPublicKey": {"source": {"secret": {"secretName": "keys"}}, "propagationMethod": {}}}],
                    "networks": [{"name": "a", "multus": {"networkName": "other/nad"}}, {"name": "b", "pod": {}}],
                    "volumes": [
                        {"name": "a", "dataVolume": {"name": "dv"}},
                        {"name": "b", "cloudInitNoCloud": {"secretRef": {"name": "user"}}},
                        {"name": "c", "containerDisk": {"image": "i"}},
                    ],
                }},
            },
            "status": {"created": true, "instancetypeRef": {"controllerRevisionRef": {"name": "rev"}}},
        }))
        .unwrap()
    }

    fn names(node: &ObjectGraphNode) -> Vec<String> {
        let own = format!("{}/{}", node.object_reference.kind, node.object_reference.name);
        std::iter::once(own).chain(node.children.iter().flat_map(names)).collect()
    }

    fn options(body: Value) -> ObjectGraphOptions {
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn tree_of_a_vm_contains_its_dependencies() {
        let tree = of_vm(&vm(), Some("virt-launcher-x"), Some("state"), &ObjectGraphOptions::default());
        assert_eq!(
            names(&tree),
            [
                "VirtualMachine/vm",
                "VirtualMachineInstance/vm",
                "Pod/virt-launcher-x",
                "VirtualMachineClusterInstancetype/small",
                "ControllerRevision/rev",
                "Secret/keys",
                "DataVolume/dv",
                "PersistentVolumeClaim/dv",
                "Secret/user",
                "PersistentVolumeClaim/state",
                "NetworkAttachmentDefinition/nad",
            ]
        );
        assert_eq!(
            json!(tree.children.last()),
            json!({
                "labels": {"kubevirt.io/dependency-type": "network"},
                "objectReference": {
                    "apiGroup": "k8s.cni.cncf.io", "kind": "NetworkAttachmentDefinition", "name": "nad", "namespace": "other",
                },
                "optional": true,
            })
        );
    }

    #[test]
    fn options_filter_all_but_the_root() {
        let tree = of_vm(&vm(), None, None, &options(json!({"includeOptionalNodes": false})));
        assert!(!names(&tree).iter().any(|name| name.contains("small") || name.contains("nad")));
        let storage = json!({"labelSelector": {"matchLabels": {"kubevirt.io/dependency-type": "storage"}}});
        assert_eq!(
            names(&of_vm(&vm(), None, Some("state"), &options(storage))),
            ["VirtualMachine/vm", "DataVolume/dv", "PersistentVolumeClaim/dv", "PersistentVolumeClaim/state"]
        );
        let other = json!({"labelSelector": {"matchExpressions": [
            {"key": "kubevirt.io/dependency-type", "operator": "NotIn", "values": ["storage", "config", "compute"]}
        ]}});
        assert_eq!(
            names(&of_vm(&vm(), None, Some("state"), &options(other))),
            ["VirtualMachine/vm", "NetworkAttachmentDefinition/nad"]
        );
        let invalid = json!({"labelSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}});
        assert_eq!(names(&of_vm(&vm(), None, None, &options(invalid))).len(), 9);
    }

    #[test]
    fn tree_of_a_vmi_starts_with_its_pod() {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vmi", "namespace": "ns"},
            "spec": {"domain": {"devices": {}}, "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]},
            "status": {"volumeStatus": [
                {"name": "persistent-state-for-this-vm", "target": "", "persistentVolumeClaimInfo": {"claimName": "state"}},
                {"name": "a", "target": "vda", "persistentVolumeClaimInfo": {"claimName": "c"}},
            ]},
        }))
        .unwrap();
        let tree = of_vmi(&vmi, Some("pod"), &ObjectGraphOptions::default());
        let claims = ["PersistentVolumeClaim/c", "PersistentVolumeClaim/state"];
        assert_eq!(names(&tree), ["VirtualMachineInstance/vmi", "Pod/pod", claims[0], claims[1]]);
    }
}
