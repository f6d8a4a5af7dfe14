//! Objects reduced to what the controllers read.

use std::collections::BTreeMap;

use api::{
    constants::{annotation, component, label},
    instancetype::MatchedKind,
    webhook_path,
};
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        admissionregistration::v1::{
            MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
        },
        apps::v1::{ControllerRevision, DaemonSet, Deployment},
        core::v1::{ContainerStatus, Namespace, Node, PersistentVolumeClaim, Pod, ResourceQuota},
        rbac::v1::ClusterRole,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{Resource, api::DynamicObject};
use serde::{Deserialize, Serialize};

use crate::{
    runtime::{Cached, cache::trim_meta},
    tsc,
    world::{POD_ANNOTATIONS, keep},
};

/// Label of instance types and preferences that come from a vendor.
const VENDOR_LABEL: &str = "instancetype.kubevirt.io/vendor";
/// Vendors whose names may be told: there are not many, and they are known anyway.
const VENDORS: [&str; 2] = ["kubevirt.io", "redhat.com"];

/// Longest annotation about a pod's networks that is read: a thousand of them and more.
const NETWORK_STATUS_LIMIT: usize = 256 * 1024;
/// Most networks of a pod that are kept. A VMI that is admitted has fewer.
const NETWORKS: usize = 256;
/// Longest value of a pod's annotation that is kept. Users may annotate pods with up to 256 KiB; those that are read are words and numbers.
pub(crate) const ANNOTATION_LIMIT: usize = 1024;

/// Name, version and owners: what every view keeps of metadata.
fn slim(meta: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        generation: meta.generation,
        creation_timestamp: meta.creation_timestamp,
        deletion_timestamp: meta.deletion_timestamp,
        owner_references: meta.owner_references,
        ..ObjectMeta::default()
    }
}

/// An instance type or preference.
#[derive(Clone, Debug, PartialEq)]
pub struct MatchedView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its kind.
    pub kind: MatchedKind,
    /// Whether it comes from a vendor whose names may be told in metrics.
    pub is_vendors: bool,
    /// The whole object as JSON. It is looked into only when a machine is started from it.
    pub object: Box<str>,
}

impl MatchedView {
    /// The view of an object of a kind.
    #[must_use]
    pub fn new<K: Resource + Serialize>(kind: MatchedKind, mut object: K) -> Self {
        trim_meta(object.meta_mut());
        let vendor = object.meta().labels.as_ref().and_then(|labels| labels.get(VENDOR_LABEL));
        let is_vendors = vendor.is_some_and(|vendor| VENDORS.contains(&vendor.as_str()));
        let json = serde_json::to_string(&object).unwrap_or_default();
        Self { metadata: slim(std::mem::take(object.meta_mut())), kind, is_vendors, object: json.into() }
    }
}

impl Cached for MatchedView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

/// The copy of an instance type or preference.
#[derive(Clone, Debug, PartialEq)]
pub struct RevisionView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// What the object copied is and says, as JSON.
    pub object: Box<str>,
}

impl From<ControllerRevision> for RevisionView {
    fn from(revision: ControllerRevision) -> Self {
        let mut object = revision.data.map(|data| data.0).unwrap_or_default();
        if let Some(object) = object.as_object_mut() {
            object.remove("metadata");
        }
        Self { metadata: slim(revision.metadata), object: object.to_string().into() }
    }
}

impl Cached for RevisionView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

/// What is kept of a VM's start.
#[derive(Clone, Debug, PartialEq)]
pub struct StartView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
}

impl From<ControllerRevision> for StartView {
    fn from(revision: ControllerRevision) -> Self {
        Self { metadata: slim(revision.metadata) }
    }
}

impl Cached for StartView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodConditionView {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Word for machines.
    pub reason: Option<String>,
    /// Sentence for people.
    pub message: Option<String>,
}

/// A network that plugins have connected a pod to.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct AttachedNetwork {
    /// What the link is called in the pod.
    #[serde(default)]
    pub interface: String,
    /// It is the one that the pod is reached by.
    #[serde(default)]
    pub default: bool,
}

/// What an annotation tells of a pod's networks; nothing if it cannot be read.
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
pub struct PodView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Where it runs.
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
    pub scheduled: Option<PodConditionView>,
    /// Condition `Ready`.
    pub ready: Option<PodConditionView>,
    /// Condition of the readiness gate.
    pub unpaused: Option<PodConditionView>,
    /// A container waits for this reason, with this message.
    pub waiting: Option<(String, String)>,
    /// The compute container runs.
    pub compute_running: bool,
    /// The compute container has ended; when.
    pub compute_ended: Option<Option<Timestamp>>,
    /// Every container has ended.
    pub all_ended: bool,
    /// Addresses.
    pub addresses: Vec<String>,
    /// Networks that plugins have connected it to, if they have told.
    pub networks: Option<Vec<AttachedNetwork>>,
    /// Its watch shows it no longer, though its end was not seen: its labels or owners may have been changed.
    pub unseen: bool,
}

impl PodView {
    /// Succeeded, failed, or the compute container has ended.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed") || self.compute_ended.is_some()
    }

    /// Down or being deleted.
    #[must_use]
    pub fn is_going_down(&self) -> bool {
        self.is_down() || self.metadata.deletion_timestamp.is_some()
    }

    /// The launcher runs.
    #[must_use]
    pub fn is_up(&self) -> bool {
        !self.is_going_down() && self.phase == "Running" && self.compute_running
    }
}

impl Cached for PodView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn unseen(&self) -> Option<Self> {
        // kubelet tells the end of a pod before it removes the pod; one without a node is removed at once and never runs.
        let ended = matches!(self.phase.as_str(), "Succeeded" | "Failed") || self.all_ended;
        let never_runs = self.metadata.deletion_timestamp.is_some() && self.node_name.is_none();
        if ended || never_runs {
            return None;
        }
        // Whatever is read of it is newer.
        let metadata = ObjectMeta { resource_version: None, ..self.metadata.clone() };
        Some(Self { unseen: true, metadata, ..self.clone() })
    }
    fn is_unseen(&self) -> bool {
        self.unseen
    }
}

fn waiting(statuses: &[ContainerStatus]) -> Option<(String, String)> {
    statuses.iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone()?;
        // What every container goes through.
        if matches!(reason.as_str(), "ContainerCreating" | "PodInitializing") {
            return None;
        }
        Some((reason, waiting.message.clone().unwrap_or_default()))
    })
}

impl From<Pod> for PodView {
    fn from(pod: Pod) -> Self {
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let mut annotations = keep(pod.metadata.annotations.as_ref(), POD_ANNOTATIONS);
        if let Some(annotations) = &mut annotations {
            annotations.retain(|_, value| value.len() <= ANNOTATION_LIMIT);
        }
        let labels = keep(pod.metadata.labels.as_ref(), &[label::NODE_NAME, label::OUTDATED_LAUNCHER_IMAGE]);
        let condition = |wanted: &str| {
            let found = status.conditions.iter().flatten().find(|condition| condition.type_ == wanted)?;
            Some(PodConditionView {
                status: found.status.clone(),
                reason: found.reason.clone(),
                message: found.message.clone(),
            })
        };
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        let compute = containers.iter().find(|status| status.name == component::COMPUTE_CONTAINER);
        let state = compute.and_then(|status| status.state.as_ref());
        let ended = |status: &ContainerStatus| status.state.as_ref().is_some_and(|state| state.terminated.is_some());
        Self {
            node_name: spec.node_name,
            image: spec
                .containers
                .into_iter()
                .find(|container| container.name == component::COMPUTE_CONTAINER)
                .and_then(|container| container.image),
            scheduled: condition("PodScheduled"),
            ready: condition("Ready"),
            unpaused: condition(api::constants::condition::POD_UNPAUSED),
            waiting: waiting(status.init_container_statuses.as_deref().unwrap_or_default())
                .or_else(|| waiting(containers)),
            compute_running: state.is_some_and(|state| state.running.is_some()),
            compute_ended: state
                .and_then(|state| state.terminated.as_ref())
                .map(|ended| ended.finished_at.as_ref().map(|at| at.0)),
            all_ended: !containers.is_empty() && containers.iter().all(ended),
            addresses: status.pod_ips.as_deref().unwrap_or_default().iter().map(|address| address.ip.clone()).collect(),
            networks: pod
                .metadata
                .annotations
                .as_ref()
                .and_then(|annotations| attached(annotations.get(annotation::NETWORK_STATUS)?)),
            phase: status.phase.unwrap_or_default(),
            qos_class: status.qos_class,
            reason: status.reason,
            message: status.message,
            metadata: ObjectMeta { annotations, labels, ..slim(pod.metadata) },
            unseen: false,
        }
    }
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// Metadata, reduced to names, the heartbeat annotation, the label of its outcome, and those about its counter.
    pub metadata: ObjectMeta,
}

impl Cached for NodeView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<Node> for NodeView {
    fn from(mut node: Node) -> Self {
        let annotations = keep(node.metadata.annotations.as_ref(), &[annotation::HEARTBEAT]);
        let wanted = |key: &str| {
            [label::SCHEDULABLE, tsc::OWN_FREQUENCY, tsc::SCALABLE].contains(&key)
                || key.starts_with(label::TSC_FREQUENCY_PREFIX)
        };
        let labels =
            node.metadata.labels.take().map(|labels| labels.into_iter().filter(|(key, _)| wanted(key)).collect());
        Self { metadata: ObjectMeta { annotations, labels, ..slim(node.metadata) } }
    }
}

/// A persistent volume claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// The volume is a block device.
    pub block: bool,
    /// How it may be attached.
    pub access_modes: Vec<String>,
    /// `Pending`, `Bound` or `Lost`.
    pub phase: String,
    /// Size asked for.
    pub requests: BTreeMap<String, Quantity>,
    /// Size of the volume.
    pub capacity: BTreeMap<String, Quantity>,
    /// Its blocks are allocated ahead.
    pub preallocated: bool,
    /// Name of its storage class.
    pub storage_class: Option<String>,
}

impl ClaimView {
    /// Whether machines are told the same of both.
    #[must_use]
    pub fn tells_the_same(&self, other: &Self) -> bool {
        let facts = |claim: &Self| Self { metadata: ObjectMeta::default(), ..claim.clone() };
        facts(self) == facts(other)
    }
}

impl Cached for ClaimView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<PersistentVolumeClaim> for ClaimView {
    fn from(claim: PersistentVolumeClaim) -> Self {
        let spec = claim.spec.unwrap_or_default();
        let status = claim.status.unwrap_or_default();
        // Annotations of importers, whose prefixes differ.
        let preallocated = claim.metadata.annotations.iter().flatten().any(|(key, value)| {
            value == "true" && (key.ends_with("/storage.preallocation") || key.ends_with("/storage.thick-provisioned"))
        });
        Self {
            metadata: slim(claim.metadata),
            block: spec.volume_mode.as_deref() == Some("Block"),
            access_modes: spec.access_modes.unwrap_or_default(),
            storage_class: spec.storage_class_name,
            phase: status.phase.unwrap_or_default(),
            requests: spec.resources.and_then(|resources| resources.requests).unwrap_or_default(),
            capacity: status.capacity.unwrap_or_default(),
            preallocated,
        }
    }
}

/// The definition of a network beside the pods' own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DefinitionView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Resource of a node that each pod on the network takes one of.
    pub resource: Option<String>,
}

impl Cached for DefinitionView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<DynamicObject> for DefinitionView {
    fn from(definition: DynamicObject) -> Self {
        let annotations = definition.metadata.annotations.as_ref();
        let resource = annotations.and_then(|annotations| annotations.get(annotation::RESOURCE_NAME)).cloned();
        Self { resource: resource.filter(|name| !name.is_empty()), metadata: slim(definition.metadata) }
    }
}

/// A resource quota.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuotaView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// It limits memory limits.
    pub memory_limits: bool,
    /// It limits CPU limits.
    pub cpu_limits: bool,
}

impl Cached for QuotaView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn index(&self) -> Option<String> {
        self.metadata.namespace.clone()
    }
}

impl From<ResourceQuota> for QuotaView {
    fn from(quota: ResourceQuota) -> Self {
        let hard = quota.spec.and_then(|spec| spec.hard).unwrap_or_default();
        Self {
            metadata: slim(quota.metadata),
            memory_limits: hard.contains_key("limits.memory"),
            cpu_limits: hard.contains_key("limits.cpu"),
        }
    }
}

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamespaceView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

impl Cached for NamespaceView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<Namespace> for NamespaceView {
    fn from(mut namespace: Namespace) -> Self {
        let labels = namespace.metadata.labels.take().unwrap_or_default();
        Self { metadata: slim(namespace.metadata), labels }
    }
}

/// A Deployment or DaemonSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkloadView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its controller has seen the present version.
    pub observed: bool,
    /// Pods wanted.
    pub wanted: i32,
    /// Pods available.
    pub available: i32,
    /// Pods that have a node (DaemonSets only).
    pub scheduled: i32,
    /// Pods of the present version.
    pub updated: i32,
    /// Pods that are ready.
    pub ready: i32,
    /// Image of the first container.
    pub image: Option<String>,
    /// When the condition Available last changed (Deployments only).
    pub availability_changed_at: Option<Timestamp>,
}

impl Cached for WorkloadView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<Deployment> for WorkloadView {
    fn from(deployment: Deployment) -> Self {
        let spec = deployment.spec.unwrap_or_default();
        let status = deployment.status.unwrap_or_default();
        let available = status.conditions.iter().flatten().find(|condition| condition.type_ == "Available");
        Self {
            observed: status.observed_generation >= deployment.metadata.generation,
            wanted: spec.replicas.unwrap_or(1),
            available: status.available_replicas.unwrap_or(0),
            scheduled: 0,
            updated: status.updated_replicas.unwrap_or(0),
            ready: status.ready_replicas.unwrap_or(0),
            image: spec.template.spec.and_then(|spec| spec.containers.into_iter().next()?.image),
            availability_changed_at: available
                .and_then(|condition| condition.last_transition_time.as_ref())
                .map(|at| at.0),
            metadata: slim(deployment.metadata),
        }
    }
}

impl From<DaemonSet> for WorkloadView {
    fn from(set: DaemonSet) -> Self {
        let status = set.status.unwrap_or_default();
        Self {
            observed: status.observed_generation >= set.metadata.generation,
            wanted: status.desired_number_scheduled,
            available: status.number_available.unwrap_or(0),
            scheduled: status.current_number_scheduled,
            updated: status.updated_number_scheduled.unwrap_or(0),
            ready: status.number_ready,
            image: set.spec.and_then(|spec| spec.template.spec?.containers.into_iter().next()?.image),
            availability_changed_at: None,
            metadata: slim(set.metadata),
        }
    }
}

/// A cluster role for users.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoleView {
    /// Metadata, reduced, with all labels.
    pub metadata: ObjectMeta,
}

impl Cached for RoleView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<ClusterRole> for RoleView {
    fn from(mut role: ClusterRole) -> Self {
        let labels = role.metadata.labels.take();
        Self { metadata: ObjectMeta { labels, ..slim(role.metadata) } }
    }
}

/// An object that carries a CA bundle, once or once per webhook.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CaBundleView {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Name of each webhook (empty for an API service) with its bundle.
    pub bundles: Vec<(String, Vec<u8>)>,
    /// The webhooks' paths (none for an API service).
    pub webhooks: Vec<WebhookPathView>,
    /// The API server can use the service (API services only).
    pub available: bool,
}

/// The path of a webhook.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WebhookPathView {
    /// Name of the webhook.
    pub name: String,
    /// Path that kube-apiserver uses.
    pub path: Option<String>,
    /// Path behind the segment, which the configuration's annotation names.
    pub wanted_path: Option<String>,
}

impl CaBundleView {
    fn of_webhooks(metadata: ObjectMeta, webhooks: Vec<(String, WebhookClientConfig)>) -> Self {
        let annotation = metadata.annotations.as_ref().and_then(|annotations| annotations.get(webhook_path::PATHS));
        let mut wanted: BTreeMap<String, String> =
            annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        wanted.retain(|_, path| path.starts_with('/'));
        let mut view = Self { metadata: slim(metadata), available: true, ..Self::default() };
        for (name, config) in webhooks {
            view.webhooks.push(WebhookPathView {
                path: config.service.and_then(|service| service.path),
                wanted_path: wanted.remove(&name),
                name: name.clone(),
            });
            view.bundles.push((name, config.ca_bundle.map(|bytes| bytes.0).unwrap_or_default()));
        }
        view
    }
}

impl Cached for CaBundleView {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<APIService> for CaBundleView {
    fn from(service: APIService) -> Self {
        let bundle = service.spec.and_then(|spec| spec.ca_bundle).map(|bytes| bytes.0).unwrap_or_default();
        let conditions = service.status.and_then(|status| status.conditions).unwrap_or_default();
        let available = conditions.iter().any(|condition| condition.type_ == "Available" && condition.status == "True");
        Self { metadata: slim(service.metadata), bundles: vec![(String::new(), bundle)], available, ..Self::default() }
    }
}

impl From<MutatingWebhookConfiguration> for CaBundleView {
    fn from(configuration: MutatingWebhookConfiguration) -> Self {
        let webhooks = configuration.webhooks.unwrap_or_default().into_iter();
        Self::of_webhooks(configuration.metadata, webhooks.map(|hook| (hook.name, hook.client_config)).collect())
    }
}

impl From<ValidatingWebhookConfiguration> for CaBundleView {
    fn from(configuration: ValidatingWebhookConfiguration) -> Self {
        let webhooks = configuration.webhooks.unwrap_or_default().into_iter();
        Self::of_webhooks(configuration.metadata, webhooks.map(|hook| (hook.name, hook.client_config)).collect())
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
            let view = PodView::from(serde_json::from_value::<Pod>(pod).unwrap());
            let unseen = view.unseen();
            assert_eq!(unseen.is_some(), may_run, "{phase} {deleted} {node}");
            assert!(unseen.is_none_or(|pod| pod.is_unseen() && pod.metadata.resource_version.is_none()));
        }
    }
}
