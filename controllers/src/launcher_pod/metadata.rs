//! Owner, labels and annotations.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance,
    config::ClusterConfig,
    constants::{annotation, component, label},
    names, quantity,
    vmi::cpu::Cpu,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;
use sha1::{Digest, Sha1};

use super::{Inputs, networks};
use crate::{
    resources::pods::{CreatedFor, NO_NETWORKS},
    runtime::Kind,
};

/// Annotation of VMIs and label of pods that requests Istio's proxy.
pub(super) const ISTIO_INJECT: &str = "sidecar.istio.io/inject";

pub(super) fn metadata(inputs: &Inputs<'_>, overhead: i64) -> ObjectMeta {
    let instance = inputs.instance;
    ObjectMeta {
        labels: Some(labels(instance)),
        annotations: Some(annotations(inputs, overhead)),
        owner_references: Some(vec![Kind::Instance.owner_reference(&instance.metadata)]),
        ..ObjectMeta::default()
    }
}

fn labels(instance: &VirtualMachineInstance) -> BTreeMap<String, String> {
    let mut labels = instance.metadata.labels.clone().unwrap_or_default();
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    labels.extend(identity_labels(instance));
    labels.insert(label::DEPRECATED_VM_NAME.to_owned(), instance.hostname());
    labels.insert(label::VMI_ID.to_owned(), names::label_value(name));
    if let Some(value) = super::annotation(instance, ISTIO_INJECT) {
        labels.insert(ISTIO_INJECT.to_owned(), value.to_owned());
    }
    labels
}

/// Returns true if the pod has Istio's proxy, by the label that [`labels`] gives it.
pub(super) fn has_proxy(instance: &VirtualMachineInstance) -> bool {
    let label = instance.metadata.labels.as_ref().and_then(|labels| labels.get(ISTIO_INJECT));
    let value = super::annotation(instance, ISTIO_INJECT).or(label.map(String::as_str));
    value.is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns the labels by which the pod is found.
pub(crate) fn identity_labels(instance: &VirtualMachineInstance) -> BTreeMap<String, String> {
    BTreeMap::from([
        (label::APP.to_owned(), component::VIRT_LAUNCHER.to_owned()),
        (label::CREATED_BY.to_owned(), instance.metadata.uid.clone().unwrap_or_default()),
    ])
}

fn annotations(inputs: &Inputs<'_>, overhead: i64) -> BTreeMap<String, String> {
    let instance = inputs.instance;
    let name = instance.metadata.name.clone().unwrap_or_default();
    let mut annotations = BTreeMap::from([(annotation::DOMAIN.to_owned(), name)]);
    for (key, value) in instance.metadata.annotations.iter().flatten() {
        let internal = key.starts_with("kubectl.kubernetes.io")
            || key == annotation::STORAGE_OBSERVED_API_VERSION
            // Network plugins write it, and the status of the VMI follows it.
            || key == annotation::NETWORK_STATUS
            || key == annotation::INTERFACES_CHANGED
            || key == annotation::INTERFACES_WITHOUT_MAC
            || key == annotation::LATEST_OBSERVED_API_VERSION;
        if !internal {
            annotations.insert(key.clone(), value.clone());
        }
    }
    let mut set = |key: &str, value: &str| annotations.insert(key.to_owned(), value.to_owned());
    set("kubectl.kubernetes.io/default-container", component::COMPUTE_CONTAINER);
    set(annotation::MIGRATION_TRANSPORT_UNIX, "true");
    set(annotation::DESCHEDULER_REQUEST_EVICT_ONLY, "");
    if instance.spec.domain.devices.interfaces.iter().any(|interface| interface.masquerade.is_some()) {
        set("traffic.sidecar.istio.io/kubevirtInterfaces", "k6t-eth0");
        set("istio.io/reroute-virtual-interfaces", "k6t-eth0");
    }
    if hooks_backups(instance, inputs.config) {
        for (key, value) in backup_hooks(instance) {
            set(key, &value);
        }
    }
    for (key, value) in networks::annotations(instance) {
        set(key, &value);
    }
    set(annotation::MEMORY_OVERHEAD_BYTES, &overhead.to_string());
    set(annotation::CREATED_FOR, &json!(created_for(instance, inputs.launcher_image)).to_string());
    annotations
}

/// Returns the desired state for which a pod of the VMI is created now.
#[must_use]
pub(crate) fn created_for(instance: &VirtualMachineInstance, launcher_image: &str) -> CreatedFor {
    let domain = &instance.spec.domain;
    let memory = domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    let request = networks::network_request(instance, |interface| !interface.is_absent());
    CreatedFor {
        launcher: launcher_image.to_owned(),
        networks: Some(networks_digest(request.as_deref().unwrap_or(NO_NETWORKS))),
        vcpus: domain.cpu.as_ref().map_or(1, Cpu::vcpus),
        memory: memory.and_then(|memory| quantity::units(memory).ok()),
    }
}

/// Returns the digest of a request for networks in [`CreatedFor`].
#[must_use]
pub(crate) fn networks_digest(request: &str) -> String {
    Sha1::digest(request.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if backups of a pod freeze its guest, which VMI and cluster can turn off.
#[must_use]
pub(crate) fn hooks_backups(instance: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    let skip = super::annotation(instance, annotation::SKIP_BACKUP_HOOKS);
    !config.skip_backup_hooks && !skip.is_some_and(api::is_true)
}

/// Returns the annotations by which Velero freezes the guest while it copies the volumes of its pod, and thaws it again.
#[must_use]
pub(crate) fn backup_hooks(instance: &VirtualMachineInstance) -> [(&'static str, String); 5] {
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
    let command = |action: &str| {
        format!(r#"["/usr/bin/virt-freezer", "{action}", "--name", "{name}", "--namespace", "{namespace}"]"#)
    };
    [
        (annotation::BACKUP_PRE_CONTAINER, component::COMPUTE_CONTAINER.to_owned()),
        ("pre.hook.backup.velero.io/command", command("--freeze")),
        ("pre.hook.backup.velero.io/timeout", "60s".to_owned()),
        ("post.hook.backup.velero.io/container", component::COMPUTE_CONTAINER.to_owned()),
        ("post.hook.backup.velero.io/command", command("--unfreeze")),
    ]
}
