//! Import pods: each fills the claim of a DataVolume.

use api::{
    cdi::DataVolume,
    constants::{component, label},
    owner,
};
use importer::task::Report;
use k8s_openapi::{
    api::core::v1::{ContainerStatus, PersistentVolumeClaim, Pod, PodStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::{
    cache::{Cached, Watch},
    runtime::Kind,
};

/// Longest text of a pod's status that is kept.
const TEXT: usize = 1024;

/// Indices of import pods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ImportPodIndex {
    /// Pods whose program runs.
    Running,
}

/// An import pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedImportPod {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its phase.
    pub phase: String,
    /// Reason and message of a pod that the node ended, such as `Evicted`.
    pub ended: Option<(String, String)>,
    /// The scheduler finds no node: its message.
    pub unschedulable: Option<String>,
    /// The container waits for this reason, with this message.
    pub waiting: Option<(String, String)>,
    /// The container runs.
    pub running: bool,
    /// Restarts of the container.
    pub restarts: i32,
    /// The last end of the container.
    pub last: Option<End>,
    /// Address.
    pub address: Option<String>,
}

/// The end of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct End {
    /// Exit code.
    pub code: i32,
    /// Reason of kubelet, such as `OOMKilled`.
    pub reason: String,
    /// Report of the program. Programs that were killed leave none.
    pub report: Option<Box<Report>>,
}

impl CachedImportPod {
    /// Returns true if the pod is being deleted.
    #[must_use]
    pub(crate) fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }
}

/// Returns text of at most [`TEXT`] bytes.
fn text(text: Option<String>) -> String {
    let mut text = text.unwrap_or_default();
    text.truncate(text.floor_char_boundary(TEXT));
    text
}

/// Returns the last end of a container.
fn end(status: &mut ContainerStatus) -> Option<End> {
    let current = status.state.as_mut().and_then(|state| state.terminated.take());
    let ended = current.or_else(|| status.last_state.as_mut().and_then(|state| state.terminated.take()))?;
    Some(End {
        code: ended.exit_code,
        report: ended.message.as_deref().and_then(Report::parse).map(Box::new),
        reason: text(ended.reason),
    })
}

/// Returns true if a DataVolume or a claim controls the object.
fn is_controlled(metadata: &ObjectMeta) -> bool {
    owner::controller_of_kind::<DataVolume>(metadata).is_some()
        || owner::controller_of_kind::<PersistentVolumeClaim>(metadata).is_some()
}

impl Cached for CachedImportPod {
    type Index = ImportPodIndex;
    reduced!();

    fn indices(&self) -> Vec<ImportPodIndex> {
        self.running.then_some(ImportPodIndex::Running).into_iter().collect()
    }
}

/// Progress of an import pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ImportProgress {
    /// Name, namespace and UID of the pod.
    pub metadata: ObjectMeta,
    /// Share that is done, in percent.
    pub percent: f64,
}

unindexed!(ImportProgress);

impl Declaration for CachedImportPod {
    type Wire = Pod;
    type Kept = Self;
    const SELECTION: Selection = Selection::Label(label::APP, component::VIRT_IMPORTER);
    const WRITTEN: Option<Kind> = Some(Kind::Pod);

    fn keep(object: Pod) -> Option<Self> {
        is_controlled(&object.metadata).then(|| object.into())
    }

    fn adjust(watch: Watch<Pod, Self>, _caches: &super::Caches) -> Watch<Pod, Self> {
        watch.selecting(is_controlled)
    }
}

impl From<Pod> for CachedImportPod {
    fn from(pod: Pod) -> Self {
        let PodStatus { phase, reason, message, pod_ip, conditions, container_statuses, .. } =
            pod.status.unwrap_or_default();
        let scheduled = conditions.into_iter().flatten().find(|condition| condition.type_ == "PodScheduled");
        let unschedulable = scheduled.filter(|scheduled| scheduled.reason.as_deref() == Some("Unschedulable"));
        let container =
            container_statuses.into_iter().flatten().find(|status| status.name == component::IMPORT_CONTAINER);
        let mut container = container.unwrap_or_default();
        let last = end(&mut container);
        let state = container.state.unwrap_or_default();
        Self {
            metadata: slim(pod.metadata),
            ended: reason.map(|reason| (text(Some(reason)), text(message))),
            unschedulable: unschedulable.map(|scheduled| text(scheduled.message)),
            waiting: state.waiting.map(|waiting| (text(waiting.reason), text(waiting.message))),
            running: state.running.is_some(),
            restarts: container.restart_count,
            last,
            address: pod_ip.filter(|address| address.parse::<std::net::IpAddr>().is_ok()),
            phase: text(phase),
        }
    }
}

#[cfg(test)]
mod tests {
    use importer::task::Reason;
    use serde_json::{Value, json};

    use super::*;

    fn pod(owner: &Value, status: &Value) -> Option<CachedImportPod> {
        let pod = json!({
            "metadata": {"name": "importer-c", "namespace": "n", "uid": "p", "ownerReferences": [owner]},
            "status": status,
        });
        CachedImportPod::keep(serde_json::from_value(pod).unwrap())
    }

    fn owner() -> Value {
        json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": "d", "uid": "u", "controller": true})
    }

    #[test]
    fn pods_of_others_are_not_kept() {
        let claim =
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": "d", "uid": "u", "controller": true});
        for (owner, kept) in [
            (owner(), true),
            (claim, true),
            (json!({"apiVersion": "v1", "kind": "DataVolume", "name": "d", "uid": "u", "controller": true}), false),
            (
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "d", "uid": "u", "controller": true}),
                false,
            ),
        ] {
            assert_eq!(pod(&owner, &json!({})).is_some(), kept, "{owner}");
        }
    }

    #[test]
    fn container_shows_its_last_report() {
        let message = r#"{"result":"failed","reason":"ChecksumError","message":"m","fatal":true}"#;
        let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": message}});
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        for (state, last) in [(ended.clone(), json!({})), (waiting, ended)] {
            let container = json!({
                "name": "importer", "state": state, "lastState": last, "restartCount": 3, "ready": false, "image": "", "imageID": "",
            });
            let status = json!({"phase": "Running", "podIP": "::1", "containerStatuses": [container]});
            let pod = pod(&owner(), &status).unwrap();
            let end = pod.last.unwrap();
            assert_eq!((end.code, end.report.unwrap().reason, pod.restarts), (1, Reason::ChecksumError, 3));
            assert_eq!(pod.address.as_deref(), Some("::1"));
        }
    }
}
