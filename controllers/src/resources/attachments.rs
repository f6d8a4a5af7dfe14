//! Attachment pods: each holds a claim that is plugged into a running VMI.

use std::collections::BTreeMap;

use api::{
    constants::{annotation, component, label},
    owner,
};
use k8s_openapi::{
    api::core::v1::{Pod, Volume},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{
    Caches,
    declaration::{Declaration, Selection},
    metadata::{keep, slim},
    pods::{ANNOTATION_LIMIT, BIND_CLAIMS, CachedPod},
};
use crate::{
    cache::{Cached, Key, Watch},
    runtime::Kind,
};

/// Option of the program of attachment pods: UID of the VMI. Pods of releases before it answer no question of virt-handler.
pub(crate) const VMI_UID: &str = "--vmi-uid";
/// Claims of a pod that are kept at most. The target of a migration has one pod for all hot-plugged volumes.
const CLAIMS: usize = 256;

/// Indices of attachment pods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AttachmentIndex {
    /// UID of the launcher pod.
    Launcher(String),
}

/// An attachment pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedAttachment {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its phase.
    pub phase: String,
    /// Names of its claims by the names of their volumes.
    pub claims: BTreeMap<String, String>,
    /// It only lets the scheduler bind a claim.
    pub temporary: bool,
    /// Its program answers for which VMI it holds volumes. Those of former releases do not.
    pub answers: bool,
    /// Its container runs, so that its claims are attached to the node and mounted.
    pub ready: bool,
}

impl CachedAttachment {
    /// Returns the pod if a pod controls it. The creator of a pod writes its label and owners.
    pub(crate) fn of(pod: Pod) -> Option<Self> {
        is_of_pod(&pod.metadata).then(|| Self::from(pod))
    }

    /// Returns true if the pod has ended.
    #[must_use]
    pub(crate) fn is_down(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Returns true if the pod is being deleted.
    #[must_use]
    pub(crate) fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Returns true if the launcher pod controls this pod.
    #[must_use]
    pub(crate) fn is_of(&self, launcher: &CachedPod) -> bool {
        let Some(reference) = owner::controller_of_kind::<Pod>(&self.metadata) else { return false };
        let of = &launcher.metadata;
        !reference.uid.is_empty()
            && of.uid.as_deref() == Some(reference.uid.as_str())
            && of.name.as_deref() == Some(reference.name.as_str())
            && of.namespace == self.metadata.namespace
    }

    /// Returns the VMI that the pod names, which is woken when the pod changes.
    #[must_use]
    pub(crate) fn vmi(&self) -> Option<Key> {
        let name = self.metadata.annotations.as_ref()?.get(annotation::OWNER_VMI_NAME)?;
        Some(Key::beside(&self.metadata, name.clone()))
    }
}

/// Returns true if a pod controls the object.
fn is_of_pod(metadata: &ObjectMeta) -> bool {
    owner::controller_of_kind::<Pod>(metadata).is_some()
}

impl Cached for CachedAttachment {
    type Index = AttachmentIndex;
    reduced!();

    fn indices(&self) -> Vec<AttachmentIndex> {
        let controller = owner::controller(&self.metadata);
        controller.map(|owner| AttachmentIndex::Launcher(owner.uid.clone())).into_iter().collect()
    }
}

impl Declaration for CachedAttachment {
    type Wire = Pod;
    type Kept = Self;
    const SELECTION: Selection = Selection::Label(label::APP, component::HOTPLUG_DISK);
    const WRITTEN: Option<Kind> = Some(Kind::Pod);

    fn keep(object: Pod) -> Option<CachedAttachment> {
        Self::of(object)
    }

    fn adjust(watch: Watch<Pod, Self>, _caches: &Caches) -> Watch<Pod, Self> {
        watch.selecting(is_of_pod)
    }
}

impl From<Pod> for CachedAttachment {
    fn from(pod: Pod) -> Self {
        let claim = |volume: Volume| Some((volume.name, volume.persistent_volume_claim?.claim_name));
        let spec = pod.spec.unwrap_or_default();
        let own = spec.containers.iter().filter(|container| container.name == component::HOTPLUG_CONTAINER);
        let mut commands = own.map(|container| container.command.as_deref().unwrap_or_default());
        let answers = commands.clone().any(|command| command.iter().any(|word| word == VMI_UID));
        let temporary = commands.any(|command| command == BIND_CLAIMS);
        let volumes = spec.volumes.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let phase = status.phase.unwrap_or_default();
        // Other webhooks may add containers.
        let runs = status
            .container_statuses
            .iter()
            .flatten()
            .any(|container| container.name == component::HOTPLUG_CONTAINER && container.ready);
        let mut annotations = keep(pod.metadata.annotations.as_ref(), &[annotation::OWNER_VMI_NAME]);
        if let Some(annotations) = &mut annotations {
            annotations.retain(|_, value| value.len() <= ANNOTATION_LIMIT);
        }
        Self {
            claims: volumes.into_iter().filter_map(claim).take(CLAIMS).collect(),
            answers,
            temporary,
            ready: runs && phase == "Running",
            phase,
            metadata: ObjectMeta { annotations, ..slim(pod.metadata) },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn attachment(owner: &Value, status: &Value) -> Option<CachedAttachment> {
        let pod = json!({
            "metadata": {"name": "hp-volume-x", "namespace": "d", "uid": "a", "ownerReferences": [owner],
                "annotations": {"kubevirt.io/owner-vmi-name": "m", "other": "x"}},
            "spec": {"containers": [], "volumes": [
                {"name": "hotplug-disks", "emptyDir": {}}, {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]},
            "status": status,
        });
        CachedAttachment::of(serde_json::from_value(pod).unwrap())
    }

    fn owner(change: &Value) -> Value {
        let mut owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "l", "uid": "p", "controller": true});
        json_patch::merge(&mut owner, change);
        owner
    }

    #[test]
    fn pod_belongs_to_the_launcher_that_controls_it() {
        let metadata = serde_json::from_value(json!({"name": "l", "namespace": "d", "uid": "p"})).unwrap();
        let launcher = CachedPod { metadata, ..CachedPod::default() };
        for (change, belongs) in [
            (json!({}), Some(true)),
            (json!({"uid": "other"}), Some(false)),
            (json!({"name": "other"}), Some(false)),
            (json!({"controller": false}), None),
            (json!({"kind": "ReplicaSet", "apiVersion": "apps/v1"}), None),
        ] {
            let read = attachment(&owner(&change), &json!({}));
            assert_eq!(read.map(|pod| pod.is_of(&launcher)), belongs, "{change}");
        }
    }

    #[test]
    fn pod_of_a_former_release_answers_no_question() {
        for (name, command, answers) in [
            ("hotplug-disk", json!(["/usr/bin/virt-launcher", "bind-claims"]), false),
            ("hotplug-disk", json!(["/usr/bin/virt-launcher", "hold-volumes", "--socket", "s"]), false),
            (
                "hotplug-disk",
                json!(["/usr/bin/virt-launcher", "hold-volumes", "--socket", "s", "--vmi-uid", "u"]),
                true,
            ),
            ("proxy", json!(["--vmi-uid"]), false),
            ("hotplug-disk", Value::Null, false),
        ] {
            let mut pod = json!({"metadata": {"name": "p", "ownerReferences": [owner(&json!({}))]}});
            pod["spec"] = json!({"containers": [{"name": name, "command": command}]});
            let read = CachedAttachment::of(serde_json::from_value(pod).unwrap()).unwrap();
            assert_eq!(read.answers, answers, "{name} {command}");
            assert_eq!(read.temporary, command[1] == "bind-claims", "{name} {command}");
        }
    }

    #[test]
    fn claims_are_attached_once_the_container_runs() {
        let container = |name: &str, ready: bool| json!({"name": name, "ready": ready, "restartCount": 0, "image": "", "imageID": ""});
        for (phase, containers, ready) in [
            ("Pending", json!([]), false),
            ("Running", json!([container("hotplug-disk", false)]), false),
            ("Running", json!([container("hotplug-disk", true)]), true),
            ("Running", json!([container("proxy", true), container("hotplug-disk", true)]), true),
            ("Running", json!([container("proxy", true)]), false),
            ("Failed", json!([container("hotplug-disk", true)]), false),
        ] {
            let status = json!({"phase": phase, "containerStatuses": containers});
            let read = attachment(&owner(&json!({})), &status).unwrap();
            assert_eq!(read.ready, ready, "{status}");
            assert_eq!(read.claims, BTreeMap::from([("data".to_owned(), "c".to_owned())]));
            assert_eq!(read.vmi(), Some(Key::new("d", "m")));
        }
    }
}
