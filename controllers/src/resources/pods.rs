//! Launcher pods, and those of virt-handler.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use api::{
    VirtualMachineInstance,
    constants::{annotation, component, label},
    owner,
    persistent_state::DIRECTORY,
    quantity,
};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements, Volume},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use serde::{Deserialize, Serialize};

use super::{
    declaration::{Declaration, Selection},
    metadata::{keep, slim},
};
use crate::cache::{Cached, Key};

/// Longest annotation about a pod's networks that is read: enough for a thousand of them.
const NETWORK_STATUS_LIMIT: usize = 256 * 1024;
/// Networks of a pod that are kept at most. A VMI that is admitted has fewer.
const NETWORKS: usize = 256;
/// Longest value of a pod's annotation that is kept. Users can annotate pods with up to 256 KiB; controllers read words and
/// numbers only.
pub(crate) const ANNOTATION_LIMIT: usize = 1024;
/// Annotations of pods that are read.
const POD_ANNOTATIONS: &[&str] = &[
    annotation::MEMORY_OVERHEAD_BYTES,
    annotation::MIGRATION_TRANSPORT_UNIX,
    annotation::BACKUP_PRE_CONTAINER,
    annotation::DESCHEDULER_EVICT,
    annotation::DESCHEDULER_PREFER_NO_EVICTION,
    annotation::DESCHEDULER_EVICTION_IN_PROGRESS,
    annotation::DESCHEDULER_REQUEST_EVICT_ONLY,
    annotation::MIGRATION_TARGET_READY,
];
/// Command of the container in pods that only let the scheduler bind claims. No user can change that of an existing pod.
pub(crate) const BIND_CLAIMS: [&str; 2] = ["/usr/bin/virt-launcher", "bind-claims"];
/// Node labels that are kept of a pod's node selector: those that bind a guest to the CPU on which it started.
const CPU_SELECTORS: [&str; 2] = [label::CPU_FEATURE_PREFIX, label::CPU_MODEL_MIGRATION_PREFIX];
/// Node labels of a pod's node selector that are kept at most.
const SELECTORS: usize = 512;
/// Image volumes of a pod that are kept at most.
const IMAGES: usize = 256;

/// Indices of pods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PodIndex {
    /// UID of the controller.
    Controller(String),
    /// Name of the node.
    Node(String),
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodCondition {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason: one word for programs.
    pub reason: Option<String>,
    /// Message: one sentence for people.
    pub message: Option<String>,
}

/// CPU in thousandths, memory and huge pages in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// CPU.
    pub cpu: Option<i64>,
    /// Memory.
    pub memory: Option<i64>,
    /// Huge pages of all sizes.
    pub huge_pages: Option<i64>,
}

impl Amounts {
    fn of(amounts: Option<&BTreeMap<String, Quantity>>) -> Self {
        let amount = |name: &str| amounts.and_then(|amounts| amounts.get(name));
        Self {
            cpu: amount("cpu").and_then(|cpu| quantity::milli(cpu).ok()),
            memory: amount("memory").and_then(|memory| quantity::units(memory).ok()),
            huge_pages: amounts
                .into_iter()
                .flatten()
                .filter(|(name, _)| name.starts_with("hugepages-"))
                .filter_map(|(_, pages)| quantity::units(pages).ok())
                .reduce(i64::saturating_add),
        }
    }
}

/// CPU and memory of the compute container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ComputeResources {
    /// Requests.
    pub requests: Amounts,
    /// Limits.
    pub limits: Amounts,
}

impl ComputeResources {
    /// Reads CPU and memory of a container's resources.
    pub(crate) fn of(resources: &ResourceRequirements) -> Self {
        Self { requests: Amounts::of(resources.requests.as_ref()), limits: Amounts::of(resources.limits.as_ref()) }
    }

    /// Returns the resources that the kubelet has given to a container.
    fn granted(status: &ContainerStatus) -> Self {
        let actual = status.resources.as_ref().map(Self::of).unwrap_or_default();
        let allocated = status.allocated_resources.as_ref();
        Self { requests: allocated.map_or(actual.requests, |allocated| Amounts::of(Some(allocated))), ..actual }
    }
}

/// A network that plugins have connected a pod to.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct AttachedNetwork {
    /// Name of its definition, with its namespace.
    #[serde(default)]
    pub name: String,
    /// Name of the link in the pod.
    #[serde(default)]
    pub interface: String,
    /// It is the primary network.
    #[serde(default)]
    pub default: bool,
}

/// The desired state for which a launcher pod was created. It is an annotation of the pod.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct CreatedFor {
    /// Image of the launcher.
    #[serde(default)]
    pub launcher: String,
    /// Digest of its request for networks. `None` once the request has changed while the pod runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networks: Option<String>,
    /// vCPUs of the guest.
    #[serde(default)]
    pub vcpus: u32,
    /// Memory of the guest in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<i64>,
}

/// A request for no networks.
pub(crate) const NO_NETWORKS: &str = "[]";

/// Returns the digest of a pod's request for networks, which is compared within one process only.
pub(crate) fn digest(networks: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    networks.hash(&mut hasher);
    hasher.finish()
}

/// Parses the annotation about a pod's networks. Returns `None` if it cannot be read.
fn attached(text: &str) -> Option<Vec<AttachedNetwork>> {
    let mut networks: Vec<AttachedNetwork> =
        (text.len() <= NETWORK_STATUS_LIMIT).then(|| serde_json::from_str(text).ok())??;
    networks.retain(|network| !network.interface.is_empty());
    networks.truncate(NETWORKS);
    networks.shrink_to_fit();
    Some(networks)
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedPod {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Name of the node.
    pub node_name: Option<String>,
    /// Its phase.
    pub phase: String,
    /// Its quality of service class.
    pub qos_class: Option<String>,
    /// Reason of a failed pod, such as `Evicted`.
    pub reason: Option<String>,
    /// Message of a failed pod.
    pub message: Option<String>,
    /// Image of the compute container.
    pub image: Option<String>,
    /// Condition `PodScheduled`.
    pub scheduled: Option<PodCondition>,
    /// Condition `Ready`.
    pub ready: Option<PodCondition>,
    /// Condition of the readiness gate.
    pub unpaused: Option<PodCondition>,
    /// A container waits for this reason, with this message.
    pub waiting: Option<(String, String)>,
    /// Its volumes and networks are ready: condition `PodReadyToStartContainers`.
    pub has_network: bool,
    /// CPU and memory in the specification of the compute container.
    pub wanted: ComputeResources,
    /// CPU and memory that it has.
    pub granted: ComputeResources,
    /// The kubelet cannot resize the pod now: condition `PodResizePending`.
    pub resize_pending: Option<PodCondition>,
    /// The kubelet resizes the pod.
    pub is_resizing: bool,
    /// The compute container runs.
    pub compute_running: bool,
    /// The compute container has ended; when.
    pub compute_ended: Option<Option<Timestamp>>,
    /// Every container has ended.
    pub all_ended: bool,
    /// The part of its node selector that binds a guest to the CPU on which it started.
    pub cpu_selector: BTreeMap<String, String>,
    /// Digests of the images of its image volumes by the names of the volumes, as far as the kubelet reports them.
    pub image_digests: BTreeMap<String, String>,
    /// Claim with the state of its VMI.
    pub state_claim: Option<String>,
    /// It has finalizers, which keep it after its deletion.
    pub has_finalizers: bool,
    /// Addresses.
    pub addresses: Vec<String>,
    /// Digest of its request for secondary networks.
    pub requested_networks: Option<u64>,
    /// Networks that plugins have connected it to, if they report any.
    pub networks: Option<Vec<AttachedNetwork>>,
    /// Desired state for which it was created. Pods of older releases do not show it.
    pub created_for: Option<Box<CreatedFor>>,
    /// It only lets the scheduler bind the claims of its VMI, and runs nothing.
    pub temporary: bool,
    /// The watch shows it no longer although its end was not seen: its labels or owners may have changed.
    pub unseen: bool,
}

impl CachedPod {
    /// Returns true if the pod or its compute container has ended.
    #[must_use]
    pub(crate) fn is_down(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed") || self.compute_ended.is_some()
    }

    /// Returns the networks that plugins have connected the pod to, once they are known. No plugin need report about a pod that
    /// requests none: it has none when it runs.
    #[must_use]
    pub(crate) fn known_networks(&self) -> Option<&[AttachedNetwork]> {
        let requests_none = self.requested_networks.is_none_or(|requested| requested == digest(NO_NETWORKS));
        let has_none = requests_none && self.compute_running;
        self.networks.as_deref().or(has_none.then_some(&[]))
    }

    /// Returns true if the pod has a node and none of its containers has run.
    #[must_use]
    pub(crate) fn is_starting(&self) -> bool {
        self.node_name.is_some() && self.phase == "Pending" && !self.compute_running && !self.is_going_down()
    }

    /// Returns the VMI of a launcher pod.
    #[must_use]
    pub(crate) fn vmi(&self) -> Option<Key> {
        let owner = owner::controller_of_kind::<VirtualMachineInstance>(&self.metadata)?;
        Some(Key::beside(&self.metadata, owner.name.clone()))
    }

    /// Returns true if no node takes the pod.
    #[must_use]
    pub(crate) fn is_unschedulable(&self) -> bool {
        self.scheduled.as_ref().is_some_and(|condition| condition.status == "False")
    }

    /// Returns true if the pod is down or being deleted.
    #[must_use]
    pub(crate) fn is_going_down(&self) -> bool {
        self.is_down() || self.metadata.deletion_timestamp.is_some()
    }
}

/// Returns the claim that a container mounts as the state of the VMI.
fn state_claim(container: &Container, volumes: &[Volume]) -> Option<String> {
    let mounted = container.volume_mounts.iter().flatten().find(|mount| mount.mount_path == DIRECTORY)?;
    let volume = volumes.iter().find(|volume| volume.name == mounted.name)?;
    Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone())
}

impl Cached for CachedPod {
    type Index = PodIndex;
    reduced!();

    fn indices(&self) -> Vec<PodIndex> {
        let controller = api::owner::controller(&self.metadata).map(|owner| PodIndex::Controller(owner.uid.clone()));
        controller.into_iter().chain(self.node_name.clone().map(PodIndex::Node)).collect()
    }
    fn unseen(&self) -> Option<Self> {
        // The kubelet reports the end of a pod before it removes the pod. A pod without a node is removed at once and never runs.
        let ended = matches!(self.phase.as_str(), "Succeeded" | "Failed") || self.all_ended;
        let never_runs = self.metadata.deletion_timestamp.is_some() && self.node_name.is_none();
        if ended || never_runs || self.temporary {
            return None;
        }
        // Every version that is read later is newer.
        let metadata = ObjectMeta { resource_version: None, ..self.metadata.clone() };
        Some(Self { unseen: true, metadata, ..self.clone() })
    }
    fn is_unseen(&self) -> bool {
        self.unseen
    }
}

/// Pods of virt-handler.
pub(crate) enum Handlers {}

impl Declaration for Handlers {
    type Wire = Pod;
    type Kept = CachedPod;
    const SELECTION: Selection = Selection::Label(label::APP, component::VIRT_HANDLER);
    in_install_namespace!();
}

/// Returns the digests of the images that are mounted into a container.
fn image_digests(status: &ContainerStatus) -> BTreeMap<String, String> {
    let mounts = status.volume_mounts.iter().flatten();
    mounts
        .filter_map(|mount| {
            let reference = &mount.volume_status.as_ref()?.image.as_ref()?.image_ref;
            let (_, digest) = reference.split_once('@')?;
            digest.starts_with("sha256:").then(|| (mount.name.clone(), digest.to_owned()))
        })
        .take(IMAGES)
        .collect()
}

fn waiting(statuses: &[ContainerStatus]) -> Option<(String, String)> {
    statuses.iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone()?;
        // Every container passes through these.
        if matches!(reason.as_str(), "ContainerCreating" | "PodInitializing") {
            return None;
        }
        Some((reason, waiting.message.clone().unwrap_or_default()))
    })
}

impl From<Pod> for CachedPod {
    fn from(pod: Pod) -> Self {
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let mut annotations = keep(pod.metadata.annotations.as_ref(), POD_ANNOTATIONS);
        if let Some(annotations) = &mut annotations {
            annotations.retain(|_, value| value.len() <= ANNOTATION_LIMIT);
        }
        let labels = keep(
            pod.metadata.labels.as_ref(),
            &[label::NODE_NAME, label::OUTDATED_LAUNCHER_IMAGE, label::MIGRATION_JOB_UID],
        );
        let condition = |wanted: &str| {
            let found = status.conditions.iter().flatten().find(|condition| condition.type_ == wanted)?;
            Some(PodCondition {
                status: found.status.clone(),
                reason: found.reason.clone(),
                message: found.message.clone(),
            })
        };
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        let compute = containers.iter().find(|status| status.name == component::COMPUTE_CONTAINER);
        let state = compute.and_then(|status| status.state.as_ref());
        let is_true = |condition: &PodCondition| condition.status == "True";
        let container = spec.containers.into_iter().find(|container| container.name == component::COMPUTE_CONTAINER);
        let ended = |status: &ContainerStatus| status.state.as_ref().is_some_and(|state| state.terminated.is_some());
        let command = container.as_ref().and_then(|container| container.command.as_deref());
        Self {
            state_claim: container
                .as_ref()
                .and_then(|container| state_claim(container, spec.volumes.as_deref().unwrap_or_default())),
            temporary: command.is_some_and(|command| command == BIND_CLAIMS),
            node_name: spec.node_name,
            wanted: container
                .as_ref()
                .and_then(|container| container.resources.as_ref())
                .map(ComputeResources::of)
                .unwrap_or_default(),
            granted: compute.map(ComputeResources::granted).unwrap_or_default(),
            resize_pending: condition("PodResizePending").filter(is_true),
            is_resizing: condition("PodResizeInProgress").as_ref().is_some_and(is_true),
            image: container.and_then(|container| container.image),
            scheduled: condition("PodScheduled"),
            ready: condition("Ready"),
            has_network: condition("PodReadyToStartContainers").as_ref().is_some_and(is_true),
            unpaused: condition(api::constants::condition::POD_UNPAUSED),
            waiting: waiting(status.init_container_statuses.as_deref().unwrap_or_default())
                .or_else(|| waiting(containers)),
            compute_running: state.is_some_and(|state| state.running.is_some()),
            compute_ended: state
                .and_then(|state| state.terminated.as_ref())
                .map(|ended| ended.finished_at.as_ref().map(|at| at.0)),
            cpu_selector: spec
                .node_selector
                .into_iter()
                .flatten()
                .filter(|(key, _)| CPU_SELECTORS.iter().any(|prefix| key.starts_with(prefix)))
                .take(SELECTORS)
                .collect(),
            image_digests: compute.map(image_digests).unwrap_or_default(),
            has_finalizers: pod.metadata.finalizers.as_ref().is_some_and(|list| !list.is_empty()),
            all_ended: !containers.is_empty() && containers.iter().all(ended),
            addresses: status.pod_ips.as_deref().unwrap_or_default().iter().map(|address| address.ip.clone()).collect(),
            requested_networks: pod
                .metadata
                .annotations
                .as_ref()
                .and_then(|annotations| annotations.get(annotation::NETWORKS))
                .map(|text| digest(text)),
            networks: pod
                .metadata
                .annotations
                .as_ref()
                .and_then(|annotations| attached(annotations.get(annotation::NETWORK_STATUS)?)),
            created_for: pod.metadata.annotations.as_ref().and_then(|annotations| {
                let text = annotations.get(annotation::CREATED_FOR).filter(|text| text.len() <= ANNOTATION_LIMIT)?;
                serde_json::from_str(text).ok()
            }),
            phase: status.phase.unwrap_or_default(),
            qos_class: status.qos_class,
            reason: status.reason,
            message: status.message,
            metadata: ObjectMeta { annotations, labels, ..slim(pod.metadata) },
            unseen: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn pod_that_is_shown_no_longer_may_run_unless_its_end_was_seen() {
        let ended = json!({"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 0}}});
        let (deleting, none) = (json!("2030-01-01T00:00:00Z"), Value::Null);
        // phase, deletion timestamp, node, containers, may run
        for (phase, deleted, node, containers, may_run) in [
            ("Running", &none, json!("n"), json!([]), true),
            // Its label was removed while it was shut down.
            ("Running", &deleting, json!("n"), json!([]), true),
            ("Pending", &none, json!("n"), json!([]), true),
            ("Pending", &none, json!(null), json!([]), true),
            ("Pending", &deleting, json!(null), json!([]), false),
            ("Succeeded", &deleting, json!("n"), json!([]), false),
            ("Failed", &none, json!("n"), json!([]), false),
            ("Running", &deleting, json!("n"), json!([ended]), false),
        ] {
            let pod = json!({
                "metadata": {"name": "p", "resourceVersion": "3", "deletionTimestamp": deleted},
                "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase, "containerStatuses": containers},
            });
            let view = CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap());
            let unseen = view.unseen();
            assert_eq!(unseen.is_some(), may_run, "{phase} {deleted} {node}");
            assert!(unseen.is_none_or(|pod| pod.is_unseen() && pod.metadata.resource_version.is_none()));
        }
    }
}
