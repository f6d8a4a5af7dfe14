//! What a controller may ask for.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    api::core::v1::ObjectReference,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::Resource;
use serde::Serialize;
use serde_json::{Value, json};

use super::diff::merge_patch;

/// Kinds of objects that controllers write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `v1` Pod.
    Pod,
    /// `v1` Secret.
    Secret,
    /// `v1` ConfigMap.
    ConfigMap,
    /// `v1` Node.
    Node,
    /// `kubevirt.io/v1` VirtualMachine.
    VirtualMachine,
    /// `kubevirt.io/v1` VirtualMachineInstance.
    Instance,
    /// `kubevirt.io/v1` VirtualMachineInstanceReplicaSet.
    ReplicaSet,
    /// `kubevirt.io/v1` KubeVirt.
    KubeVirt,
    /// `apps/v1` ControllerRevision.
    ControllerRevision,
    /// `certificates.k8s.io/v1` CertificateSigningRequest.
    CertificateSigningRequest,
    /// `apiregistration.k8s.io/v1` APIService.
    ApiService,
    /// `admissionregistration.k8s.io/v1` MutatingWebhookConfiguration.
    MutatingWebhooks,
    /// `admissionregistration.k8s.io/v1` ValidatingWebhookConfiguration.
    ValidatingWebhooks,
    /// `rbac.authorization.k8s.io/v1` ClusterRole.
    ClusterRole,
}

impl Kind {
    /// Group and version as objects carry it, kind, and plural name in addresses.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Pod => ("v1", "Pod", "pods"),
            Self::Secret => ("v1", "Secret", "secrets"),
            Self::ConfigMap => ("v1", "ConfigMap", "configmaps"),
            Self::Node => ("v1", "Node", "nodes"),
            Self::VirtualMachine => ("kubevirt.io/v1", "VirtualMachine", "virtualmachines"),
            Self::Instance => ("kubevirt.io/v1", "VirtualMachineInstance", "virtualmachineinstances"),
            Self::ReplicaSet => {
                ("kubevirt.io/v1", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets")
            }
            Self::KubeVirt => ("kubevirt.io/v1", "KubeVirt", "kubevirts"),
            Self::ControllerRevision => ("apps/v1", "ControllerRevision", "controllerrevisions"),
            Self::CertificateSigningRequest => {
                ("certificates.k8s.io/v1", "CertificateSigningRequest", "certificatesigningrequests")
            }
            Self::ApiService => ("apiregistration.k8s.io/v1", "APIService", "apiservices"),
            Self::MutatingWebhooks => {
                ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")
            }
            Self::ValidatingWebhooks => {
                ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")
            }
            Self::ClusterRole => ("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles"),
        }
    }

    /// `apiVersion` of objects of this kind.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        self.names().0
    }

    /// `kind` of objects of this kind.
    #[must_use]
    pub fn kind(self) -> &'static str {
        self.names().1
    }

    /// Address of the collection, in a namespace or cluster-wide.
    #[must_use]
    pub fn path(self, namespace: Option<&str>) -> String {
        let (api_version, _, plural) = self.names();
        let prefix = if api_version.contains('/') { "/apis" } else { "/api" };
        match namespace {
            Some(namespace) => format!("{prefix}/{api_version}/namespaces/{namespace}/{plural}"),
            None => format!("{prefix}/{api_version}/{plural}"),
        }
    }

    /// Plural name, used as metric label.
    #[must_use]
    pub fn plural(self) -> &'static str {
        self.names().2
    }

    /// A controller reference to an object of this kind.
    #[must_use]
    pub fn owner_reference(self, meta: &ObjectMeta) -> OwnerReference {
        OwnerReference {
            api_version: self.api_version().to_owned(),
            kind: self.kind().to_owned(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }

    /// A reference for an event about an object of this kind.
    #[must_use]
    pub fn reference(self, meta: &ObjectMeta) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.api_version().to_owned()),
            kind: Some(self.kind().to_owned()),
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            field_path: None,
        }
    }
}

/// Whether an event tells of something ordinary or of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoteType {
    /// Ordinary.
    Normal,
    /// A problem.
    Warning,
}

/// An event to be shown to users.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// What it is about.
    pub regarding: ObjectReference,
    /// Ordinary or a problem.
    pub note_type: NoteType,
    /// Word for machines.
    pub reason: &'static str,
    /// Sentence for people. `{name}`, `{uid}` and `{error}` are filled in from the answer to the write it belongs to.
    pub message: String,
}

impl Note {
    /// An ordinary event.
    #[must_use]
    pub fn normal(regarding: ObjectReference, reason: &'static str, message: impl Into<String>) -> Self {
        Self { regarding, note_type: NoteType::Normal, reason, message: message.into() }
    }

    /// An event about a problem.
    #[must_use]
    pub fn warning(regarding: ObjectReference, reason: &'static str, message: impl Into<String>) -> Self {
        Self { regarding, note_type: NoteType::Warning, reason, message: message.into() }
    }
}

/// Events that go with a write, and how its failure is remembered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Notes {
    /// Emitted when the write was made.
    pub success: Option<Note>,
    /// Emitted when the write was refused.
    pub failure: Option<Note>,
    /// The reason under which a refusal is handed to the next reconcile of the key.
    pub failure_reason: Option<&'static str>,
    /// Creation: an object of this name that exists already will do.
    pub existing_will_do: bool,
    /// Creation: what a refusal says because an object of this name exists already, where none that counts does.
    pub existing_refuses: Option<String>,
}

/// A write.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Creates an object.
    Create {
        /// Its kind.
        kind: Kind,
        /// Its namespace.
        namespace: Option<String>,
        /// The object.
        object: Value,
        /// Events.
        notes: Notes,
    },
    /// Changes an object by a patch, on condition that it is still the version that was observed.
    Patch {
        /// Its kind.
        kind: Kind,
        /// Its namespace.
        namespace: Option<String>,
        /// Its name.
        name: String,
        /// The observed version; `None`: no condition.
        resource_version: Option<String>,
        /// Subresource, such as `status`.
        subresource: Option<&'static str>,
        /// A strategic merge patch (lists merged by their keys) instead of a JSON merge patch. Built-in kinds only.
        strategic: bool,
        /// The patch. One that changes nothing is not sent.
        patch: Value,
        /// Events.
        notes: Notes,
    },
    /// Deletes an object, on condition that it is the one with this UID.
    Delete {
        /// Its kind.
        kind: Kind,
        /// Its namespace.
        namespace: Option<String>,
        /// Its name.
        name: String,
        /// Its UID.
        uid: Option<String>,
        /// Grace period other than the object's own.
        grace_seconds: Option<u32>,
        /// Events.
        notes: Notes,
    },
    /// Evicts a pod, on condition that it is the one with this UID: a deletion that budgets and webhooks have a say in.
    /// One that is refused ends nothing else, and is not remembered.
    Evict {
        /// Its namespace.
        namespace: Option<String>,
        /// Its name.
        name: String,
        /// Its UID.
        uid: Option<String>,
        /// Events.
        notes: Notes,
    },
    /// Looks for pods that no watch shows, by their UIDs, which no user can change. Those that exist get back the labels and the owner
    /// by which the watch and the controller know them; the others count as deleted.
    Restore {
        /// Their namespace.
        namespace: Option<String>,
        /// Their name, if only one is looked for and its name is known. Otherwise all pods of the namespace are listed.
        name: Option<String>,
        /// Their UIDs.
        uids: Vec<String>,
        /// Their labels.
        labels: BTreeMap<String, String>,
        /// Their controller.
        owner: OwnerReference,
    },
    /// Emits an event.
    Event(Note),
}

impl Effect {
    /// Creation of a typed object.
    pub fn create<T: Serialize>(kind: Kind, namespace: Option<&str>, object: &T) -> Result<Self, serde_json::Error> {
        let mut object = serde_json::to_value(object)?;
        // Typed custom resources do not all carry these.
        object["apiVersion"] = json!(kind.api_version());
        object["kind"] = json!(kind.kind());
        Ok(Self::Create { kind, namespace: namespace.map(str::to_owned), object, notes: Notes::default() })
    }

    /// The change from `old` to `new`, two versions of one object; `None` when they are equal.
    pub fn change<T: Serialize + Resource>(
        kind: Kind,
        old: &T,
        new: &T,
        subresource: Option<&'static str>,
    ) -> Result<Option<Self>, serde_json::Error> {
        let patch = merge_patch(&serde_json::to_value(old)?, &serde_json::to_value(new)?);
        let Some(patch) = patch else { return Ok(None) };
        let meta = old.meta();
        Ok(Some(Self::Patch {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            resource_version: meta.resource_version.clone(),
            subresource,
            strategic: false,
            patch,
            notes: Notes::default(),
        }))
    }

    /// A merge patch of the object with this metadata, if it is still the version that was seen.
    #[must_use]
    pub fn merge(kind: Kind, meta: &ObjectMeta, patch: Value) -> Self {
        Self::Patch {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            resource_version: meta.resource_version.clone(),
            subresource: None,
            strategic: false,
            patch,
            notes: Notes::default(),
        }
    }

    /// Deletion of the object with this metadata.
    #[must_use]
    pub fn delete(kind: Kind, meta: &ObjectMeta) -> Self {
        Self::Delete {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone(),
            grace_seconds: None,
            notes: Notes::default(),
        }
    }

    fn notes_mut(&mut self) -> Option<&mut Notes> {
        match self {
            Self::Create { notes, .. }
            | Self::Patch { notes, .. }
            | Self::Delete { notes, .. }
            | Self::Evict { notes, .. } => Some(notes),
            Self::Restore { .. } | Self::Event(_) => None,
        }
    }

    /// Adds the event of success.
    #[must_use]
    pub fn on_success(mut self, note: Note) -> Self {
        if let Some(notes) = self.notes_mut() {
            notes.success = Some(note);
        }
        self
    }

    /// A creation that is content with an object of this name that exists already.
    #[must_use]
    pub fn or_existing(mut self) -> Self {
        if let Some(notes) = self.notes_mut() {
            notes.existing_will_do = true;
        }
        self
    }

    /// A creation for which an object of this name is a refusal in these words. Without, it counts as one that was made
    /// meanwhile, of which the watch will tell.
    #[must_use]
    pub fn unless_exists(mut self, refusal: String) -> Self {
        if let Some(notes) = self.notes_mut() {
            notes.existing_refuses = Some(refusal);
        }
        self
    }

    /// Adds the event of refusal and remembers the refusal under its reason.
    #[must_use]
    pub fn on_failure(mut self, note: Note) -> Self {
        if let Some(notes) = self.notes_mut() {
            notes.failure_reason = Some(note.reason);
            notes.failure = Some(note);
        }
        self
    }
}

/// What a controller wants: effects in order (the first that fails ends the rest) and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Writes, in order.
    pub effects: Vec<Effect>,
    /// Look again after this time even if nothing changes.
    pub wake_after: Option<Duration>,
}

impl Decision {
    /// Nothing to do.
    #[must_use]
    pub fn settled() -> Self {
        Self::default()
    }

    /// True when there is nothing to do and nothing to wait for.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.effects.is_empty() && self.wake_after.is_none()
    }

    /// Look again after `time`, or sooner if something asked for that before.
    pub fn wake(&mut self, time: Duration) {
        self.wake_after = Some(self.wake_after.map_or(time, |known| known.min(time)));
    }

    /// Adds an effect.
    pub fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }
}
