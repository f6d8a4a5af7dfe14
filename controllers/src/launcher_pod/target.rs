//! The pod to which a migration moves a VMI: the launcher pod of the VMI as it is now, on another node with a suitable CPU.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{annotation, component, device, label},
};
use k8s_openapi::{
    api::core::v1::{Affinity, Pod, PodAffinityTerm, PodAntiAffinity, PodSpec, SELinuxOptions},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector},
};

use super::{Inputs, RenderError, render};
use crate::resources::{nodes::CachedNode, pods::CachedPod};

/// Topology key: no two pods on one node.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Annotations of a VMI that are not about its pod.
const NOT_COPIED: [&str; 3] =
    [annotation::MIGRATION_PROGRESS, annotation::EVICTION_SOURCE, annotation::MIGRATION_TARGET_READY];
/// Labels of a VMI that are about its present pod.
const OF_SOURCE: [&str; 3] = [label::NODE_NAME, label::MIGRATION_TARGET_NODE_NAME, label::OUTDATED_LAUNCHER_IMAGE];

/// The migration for which a pod is rendered.
pub(crate) struct Target<'a> {
    /// The migration.
    pub migration: &'a VirtualMachineInstanceMigration,
    /// The present pod of the VMI.
    pub source: &'a CachedPod,
    /// The present node of the VMI.
    pub source_node: Option<&'a CachedNode>,
    /// It may switch to post-copy.
    pub post_copy: bool,
}

/// Returns true for a target pod of the migration. Once the VMI names the pod, its label, which users can change, proves nothing.
#[must_use]
pub(crate) fn is_target_of(
    pod: &CachedPod,
    migration: &VirtualMachineInstanceMigration,
    vmi: &VirtualMachineInstance,
) -> bool {
    let uid = migration.metadata.uid.as_deref().filter(|uid| !uid.is_empty());
    let Some(uid) = uid else { return false };
    let state = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref());
    match state.filter(|state| state.migration_uid.as_deref() == Some(uid)) {
        Some(state) => state.target_pod == pod.metadata.name,
        None => pod
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(label::MIGRATION_JOB_UID))
            .is_some_and(|known| known == uid),
    }
}

/// Renders the pod.
pub(crate) fn render_target(inputs: &Inputs<'_>, target: &Target<'_>) -> Result<Pod, RenderError> {
    let mut pod = render(inputs)?;
    let migration = &target.migration.metadata;
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.retain(|key, _| !OF_SOURCE.contains(&key.as_str()));
    labels.insert(label::MIGRATION_JOB_UID.to_owned(), migration.uid.clone().unwrap_or_default());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.retain(|key, _| !NOT_COPIED.contains(&key.as_str()));
    annotations.insert(annotation::MIGRATION_JOB_NAME.to_owned(), migration.name.clone().unwrap_or_default());
    let Some(spec) = &mut pod.spec else { return Ok(pod) };
    spec.node_selector = Some(node_selector(inputs, target, spec.node_selector.take().unwrap_or_default())?);
    apart_from_source(inputs, spec.affinity.get_or_insert_default());
    if target.post_copy {
        add_userfaultfd(spec);
    }
    if let Some(level) = selinux_level(inputs) {
        let security = spec.security_context.get_or_insert_default();
        security.se_linux_options.get_or_insert_with(SELinuxOptions::default).level = Some(level);
    }
    // The same image on both nodes: only its overlay moves.
    for volume in spec.volumes.iter_mut().flatten() {
        let digest = target.source.image_digests.get(&volume.name);
        if let Some((reference, digest)) = volume.image.as_mut().and_then(|image| image.reference.as_mut()).zip(digest)
        {
            *reference = format!("{}@{digest}", repository(reference));
        }
    }
    Ok(pod)
}

/// Requests the device with which QEMU fetches missing pages. The source does not need it.
fn add_userfaultfd(spec: &mut PodSpec) {
    for container in spec.containers.iter_mut().filter(|container| container.name == component::COMPUTE_CONTAINER) {
        let limits = container.resources.get_or_insert_default().limits.get_or_insert_default();
        limits.insert(device::USERFAULTFD.to_owned(), Quantity("1".to_owned()));
    }
}

/// Returns a reference to an image without tag and digest.
fn repository(reference: &str) -> &str {
    let reference = reference.split_once('@').map_or(reference, |(before, _)| before);
    let name = reference.rfind('/').map_or(0, |slash| slash + 1);
    match reference.get(name..).and_then(|name| name.rfind(':')) {
        Some(colon) => reference.get(..name + colon).unwrap_or(reference),
        None => reference,
    }
}

/// Returns the node selector: that of the VMI, further labels of the migration, and the CPU on which the guest started.
fn node_selector(
    inputs: &Inputs<'_>,
    target: &Target<'_>,
    of_vmi: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, RenderError> {
    let mut selector = target.migration.spec.added_node_selector.clone();
    selector.extend(of_vmi);
    // An emulated CPU does not depend on the node.
    if super::is_emulated(inputs.instance, inputs.config) {
        return Ok(selector);
    }
    let model = inputs.instance.spec.domain.cpu.as_ref().and_then(|cpu| cpu.model.as_deref()).unwrap_or_default();
    if matches!(model, "" | "host-model") {
        selector.extend(host_model(target)?);
    }
    let has_vendor = selector.keys().any(|key| key.starts_with(label::CPU_VENDOR_PREFIX));
    let vendor = target.source_node.and_then(|node| node.labels_with(label::CPU_VENDOR_PREFIX).next());
    if let Some((vendor, _)) = vendor.filter(|_| !has_vendor) {
        selector.insert(format!("{}{vendor}", label::CPU_VENDOR_PREFIX), "true".to_owned());
    }
    Ok(selector)
}

/// Returns the labels of nodes that offer the CPU of the guest: those of the source pod, if the guest has moved before, else
/// the CPU of its node.
fn host_model(target: &Target<'_>) -> Result<BTreeMap<String, String>, RenderError> {
    if !target.source.cpu_selector.is_empty() {
        return Ok(target.source.cpu_selector.clone());
    }
    let unknown = || RenderError::NoHostModel(target.source.node_name.clone().unwrap_or_default());
    let node = target.source_node.ok_or_else(unknown)?;
    let renamed = |from: &'static str, to: &'static str| {
        node.labels_with(from).map(move |(name, value)| (format!("{to}{name}"), value.to_owned()))
    };
    let mut labels: BTreeMap<String, String> =
        renamed(label::HOST_MODEL_CPU_PREFIX, label::CPU_MODEL_MIGRATION_PREFIX).collect();
    if labels.is_empty() {
        return Err(unknown());
    }
    labels.extend(renamed(label::HOST_MODEL_REQUIRED_FEATURES_PREFIX, label::CPU_FEATURE_PREFIX));
    Ok(labels)
}

/// Keeps the pod away from the nodes of the VMI's other pods.
fn apart_from_source(inputs: &Inputs<'_>, affinity: &mut Affinity) {
    let uid = inputs.instance.metadata.uid.clone().unwrap_or_default();
    let of_vmi = LabelSelector {
        match_labels: Some(BTreeMap::from([(label::CREATED_BY.to_owned(), uid)])),
        ..LabelSelector::default()
    };
    let term = PodAffinityTerm {
        label_selector: Some(of_vmi),
        topology_key: HOSTNAME.to_owned(),
        ..PodAffinityTerm::default()
    };
    let apart = affinity.pod_anti_affinity.get_or_insert_with(PodAntiAffinity::default);
    apart.required_during_scheduling_ignored_during_execution.get_or_insert_default().push(term);
}

/// Returns the SELinux level of the source, so that files that both launchers use stay readable.
fn selinux_level(inputs: &Inputs<'_>) -> Option<String> {
    if inputs.config.migrations.match_selinux_level == Some(false) {
        return None;
    }
    let context = inputs.instance.status.as_ref()?.selinux_context.as_deref()?;
    context.splitn(4, ':').nth(3).filter(|level| !level.is_empty()).map(str::to_owned)
}
