//! The effects of which the decisions of controllers consist.

use std::{collections::BTreeMap, time::Duration};

use api::{cdi::DataVolume, constants::event, snapshot::content::VirtualMachineSnapshotContent};
use k8s_openapi::{
    api::core::v1::ObjectReference,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::Resource;
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use daemon::events::Event;

pub(crate) use super::kind::Kind;

/// The creation of a DataVolume.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DataVolumeCreation {
    /// The DataVolume.
    pub data_volume: DataVolume,
    /// Service account of its namespace whose right to clone counts.
    pub service_account: String,
    /// A claim of its name exists, which it takes over.
    pub adopts_claim: bool,
    /// The VM, for events.
    pub regarding: ObjectReference,
}

/// The creation of the content of a snapshot of a VM.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SnapshotContentCreation {
    /// The content. Its claims have names and UIDs, and the VM its present spec.
    pub content: VirtualMachineSnapshotContent,
    /// The record of the start, if the guest does not have the present spec.
    pub start: Option<String>,
}

/// The copy of a ControllerRevision.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RevisionCopy {
    /// Namespace of both.
    pub namespace: String,
    /// Name of the revision that is copied.
    pub source: String,
    /// Name of the copy.
    pub name: String,
    /// Controller of the copy.
    pub owner: OwnerReference,
}

/// Part of the message about a pod that the Pod Security level of its namespace forbids.
pub(crate) const POD_SECURITY: &str = "violates PodSecurity";

/// Events of a write, and the treatment of its failure.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WriteOptions {
    /// Event of a successful write.
    pub success: Option<Event>,
    /// Event of a refused write.
    pub failure: Option<Event>,
    /// Message of that event if Pod Security refuses.
    pub insecure: Option<String>,
    /// Reason under which a refusal is passed to the next reconcile of the key.
    pub failure_reason: Option<&'static str>,
    /// Creation: an existing object of the name counts as success.
    pub existing_will_do: bool,
    /// Creation: an existing object of the name counts as a refusal with this message.
    pub existing_refuses: Option<String>,
    /// Creation of a pod: names that are tried in this order. An existing pod with the same controller counts as created.
    pub names: Vec<String>,
    /// Deletion: the object stays until its dependents are gone.
    pub in_foreground: bool,
    /// No other effect depends on it: a refusal does not end the decision and is not remembered.
    pub independent: bool,
}

impl WriteOptions {
    /// Returns the event of a refusal with this message.
    pub(crate) fn refusal(&self, message: &str) -> Option<Event> {
        let mut note = self.failure.clone()?;
        if let Some(insecure) = self.insecure.as_ref().filter(|_| message.contains(POD_SECURITY)) {
            note.message.clone_from(insecure);
        }
        Some(note)
    }
}

/// Returns true if an object has a finalizer.
pub(crate) fn has_finalizer(meta: &ObjectMeta, finalizer: &str) -> bool {
    meta.finalizers.iter().flatten().any(|name| name == finalizer)
}

/// A write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Effect {
    /// Creates an object.
    Create {
        /// Its kind.
        kind: Kind,
        /// Its namespace.
        namespace: Option<String>,
        /// The object.
        object: Value,
        /// Events.
        options: WriteOptions,
    },
    /// Creates a DataVolume of a VM. A reference to a DataSource is replaced by the source that it names, and the right to clone a
    /// source of another namespace is checked.
    CreateDataVolume {
        /// The DataVolume, and the service account whose rights count.
        creation: Box<DataVolumeCreation>,
        /// Events.
        options: WriteOptions,
    },
    /// Creates the content of a snapshot. Its claims, and the record of the start, are read, so that it holds them whole.
    CreateSnapshotContent {
        /// The content.
        creation: Box<SnapshotContentCreation>,
        /// Events.
        options: WriteOptions,
    },
    /// Copies a ControllerRevision. An existing copy counts as success.
    CopyRevision {
        /// Both revisions.
        copy: RevisionCopy,
        /// Events.
        options: WriteOptions,
    },
    /// Freezes or thaws the file systems of a running guest by virt-api. Every failure is a refusal.
    Quiesce {
        /// Its namespace.
        namespace: String,
        /// Name of the VMI.
        name: String,
        /// Freezes, with this time until the automatic thaw. `None`: thaws.
        freeze: Option<Duration>,
        /// Events.
        options: WriteOptions,
    },
    /// Reads the VolumeSnapshotContent of a VolumeSnapshot. The effects that follow require that the storage has taken it. Until then
    /// the decision is stale. One whose deletion has begun is a refusal.
    RequireTaken {
        /// Namespace of the VolumeSnapshot.
        namespace: String,
        /// Its name.
        name: String,
        /// Its UID.
        uid: String,
        /// Name of its content.
        content: String,
        /// Events.
        options: WriteOptions,
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
        options: WriteOptions,
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
        options: WriteOptions,
    },
    /// Evicts a pod, on condition that it is the one with this UID. Disruption budgets and webhooks can refuse it. A refusal
    /// does not end the decision and is not remembered.
    Evict {
        /// Its namespace.
        namespace: Option<String>,
        /// Its name.
        name: String,
        /// Its UID.
        uid: Option<String>,
        /// Events.
        options: WriteOptions,
    },
    /// Searches for pods that no watch shows by their UIDs, which no user can change. Existing pods get back the labels and the
    /// owner by which the watch and the controller find them. The others count as deleted.
    Restore {
        /// Their namespace.
        namespace: Option<String>,
        /// Name of the pod, if there is only one and its name is known. Otherwise all pods of the namespace are listed.
        name: Option<String>,
        /// Their UIDs.
        uids: Vec<String>,
        /// Their labels.
        labels: BTreeMap<String, String>,
        /// Their controller.
        owner: OwnerReference,
    },
    /// Reads the warnings among the events of a pod. A failure does not end the decision and is not remembered.
    ReadWarnings {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// Its UID.
        uid: String,
    },
    /// Reads the pods that use claims of a namespace. A failure does not end the decision and is not remembered.
    ReadUsers {
        /// The namespace.
        namespace: String,
        /// UIDs of the claims by their names.
        claims: BTreeMap<String, String>,
    },
    /// Reads the newest warning about a claim. A failure does not end the decision and is not remembered.
    ReadClaimWarning {
        /// Its namespace.
        namespace: String,
        /// Its name.
        claim: String,
        /// Its UID.
        uid: String,
    },
    /// Emits an event.
    Event(Event),
}

impl Effect {
    /// Returns the creation of a typed object.
    pub(crate) fn create<T: Serialize>(
        kind: Kind,
        namespace: Option<&str>,
        object: &T,
    ) -> Result<Self, serde_json::Error> {
        let mut object = serde_json::to_value(object)?;
        // Typed custom resources do not all carry these.
        object["apiVersion"] = json!(kind.api_version());
        object["kind"] = json!(kind.kind());
        Ok(Self::Create { kind, namespace: namespace.map(str::to_owned), object, options: WriteOptions::default() })
    }

    /// Returns the creation of a DataVolume of a VM.
    pub(crate) fn create_data_volume(creation: DataVolumeCreation) -> Self {
        let created = "Created DataVolume {name}";
        let options = WriteOptions {
            success: Some(Event::normal(creation.regarding.clone(), event::SUCCESSFUL_DATA_VOLUME_CREATE, created)),
            failure_reason: Some(event::FAILED_DATA_VOLUME_CREATE),
            ..WriteOptions::default()
        };
        Self::CreateDataVolume { creation: Box::new(creation), options }
    }

    /// Returns the creation of the content of a snapshot.
    pub(crate) fn create_snapshot_content(creation: SnapshotContentCreation) -> Self {
        Self::CreateSnapshotContent { creation: Box::new(creation), options: WriteOptions::default() }
    }

    /// Returns the copy of a ControllerRevision.
    pub(crate) fn copy_revision(copy: RevisionCopy) -> Self {
        Self::CopyRevision { copy, options: WriteOptions::default() }
    }

    /// Returns the freeze of a guest with the time until its automatic thaw, or its thaw.
    pub(crate) fn quiesce(namespace: &str, name: &str, freeze: Option<Duration>) -> Self {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Self::Quiesce { namespace, name, freeze, options: WriteOptions::default() }
    }

    /// Returns the check that the storage has taken the content of the VolumeSnapshot with this metadata, and is not told to delete it.
    pub(crate) fn require_taken(snapshot: &ObjectMeta, content: &str) -> Self {
        Self::RequireTaken {
            namespace: snapshot.namespace.clone().unwrap_or_default(),
            name: snapshot.name.clone().unwrap_or_default(),
            uid: snapshot.uid.clone().unwrap_or_default(),
            content: content.to_owned(),
            options: WriteOptions::default(),
        }
    }

    /// Returns the change from `old` to `new`, two versions of one object, or `None` when they are equal.
    pub(crate) fn change<T: Serialize + Resource>(
        kind: Kind,
        old: &T,
        new: &T,
        subresource: Option<&'static str>,
    ) -> Result<Option<Self>, serde_json::Error> {
        let patch = daemon::merge_patch::diff(&serde_json::to_value(old)?, &serde_json::to_value(new)?);
        let change = patch.map(|patch| Self::merge(kind, old.meta(), patch));
        Ok(match subresource {
            Some(name) => change.map(|change| change.of_subresource(name)),
            None => change,
        })
    }

    /// Returns a merge patch of the object with this metadata, on condition that it is still this version.
    #[must_use]
    pub(crate) fn merge(kind: Kind, meta: &ObjectMeta, patch: Value) -> Self {
        Self::Patch {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            resource_version: meta.resource_version.clone(),
            subresource: None,
            strategic: false,
            patch,
            options: WriteOptions::default(),
        }
    }

    /// Returns the write after which an object has a finalizer, or has it no longer; `None` if that is so already.
    #[must_use]
    pub(crate) fn finalizer(kind: Kind, meta: &ObjectMeta, finalizer: &str, present: bool) -> Option<Self> {
        let others = meta.finalizers.iter().flatten().map(String::as_str).filter(|name| *name != finalizer);
        let finalizers: Vec<&str> = others.chain(present.then_some(finalizer)).collect();
        let patch = json!({"metadata": {"finalizers": (!finalizers.is_empty()).then_some(finalizers)}});
        (has_finalizer(meta, finalizer) != present).then(|| Self::merge(kind, meta, patch))
    }

    /// Returns this patch for a subresource.
    #[must_use]
    pub(crate) fn of_subresource(mut self, name: &'static str) -> Self {
        if let Self::Patch { subresource, .. } = &mut self {
            *subresource = Some(name);
        }
        self
    }

    /// Returns this patch as a strategic one, which merges lists by their keys.
    #[must_use]
    pub(crate) fn by_keys(mut self) -> Self {
        if let Self::Patch { strategic, .. } = &mut self {
            *strategic = true;
        }
        self
    }

    /// Returns this patch for any version of the object.
    #[must_use]
    pub(crate) fn of_any_version(mut self) -> Self {
        if let Self::Patch { resource_version, .. } = &mut self {
            *resource_version = None;
        }
        self
    }

    /// Returns the deletion of the object with this metadata.
    #[must_use]
    pub(crate) fn delete(kind: Kind, meta: &ObjectMeta) -> Self {
        Self::Delete {
            kind,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone(),
            grace_seconds: None,
            options: WriteOptions::default(),
        }
    }

    /// Returns this deletion without a grace period: the object is removed although its node may still clean up.
    #[must_use]
    pub(crate) fn at_once(mut self) -> Self {
        if let Self::Delete { grace_seconds, .. } = &mut self {
            *grace_seconds = Some(0);
        }
        self
    }

    /// Returns this deletion with a grace period of at most `seconds`.
    #[must_use]
    pub(crate) fn within(mut self, seconds: i64) -> Self {
        if let Self::Delete { grace_seconds, .. } = &mut self {
            *grace_seconds = u32::try_from(seconds.max(1)).ok();
        }
        self
    }

    /// Returns this deletion in the foreground: the object stays until its dependents are gone.
    #[must_use]
    pub(crate) fn in_foreground(self) -> Self {
        self.with(|options| options.in_foreground = true)
    }

    /// Returns true if it reads, and its failure matters to no other effect.
    #[must_use]
    pub(crate) fn is_read(&self) -> bool {
        matches!(self, Self::ReadWarnings { .. } | Self::ReadUsers { .. } | Self::ReadClaimWarning { .. })
    }

    /// Returns true if a request to the API server carries it out before the next effect.
    #[must_use]
    pub(crate) fn is_write(&self) -> bool {
        !matches!(self, Self::Event(_))
    }

    /// Sets options. Reads, restored pods and events have none.
    fn with(mut self, set: impl FnOnce(&mut WriteOptions)) -> Self {
        if let Self::Create { options, .. }
        | Self::CreateDataVolume { options, .. }
        | Self::CreateSnapshotContent { options, .. }
        | Self::CopyRevision { options, .. }
        | Self::Quiesce { options, .. }
        | Self::RequireTaken { options, .. }
        | Self::Patch { options, .. }
        | Self::Delete { options, .. }
        | Self::Evict { options, .. } = &mut self
        {
            set(options);
        }
        self
    }

    /// Adds the event of success.
    #[must_use]
    pub(crate) fn on_success(self, note: Event) -> Self {
        self.with(|options| options.success = Some(note))
    }

    /// Accepts an existing object of the name.
    #[must_use]
    pub(crate) fn or_existing(self) -> Self {
        self.with(|options| options.existing_will_do = true)
    }

    /// Treats an existing object of the name as a refusal with this message. By default it counts as created meanwhile, and the
    /// watch delivers it.
    #[must_use]
    pub(crate) fn unless_exists(self, refusal: String) -> Self {
        self.with(|options| options.existing_refuses = Some(refusal))
    }

    /// Gives the pod the first of these names that no pod of another controller has. One with the same controller was created by an
    /// earlier attempt, and counts as created.
    #[must_use]
    pub(crate) fn under(mut self, names: Vec<String>) -> Self {
        if let Self::Create { object, options, .. } = &mut self {
            object["metadata"]["name"] = json!(names.first());
            options.names = names;
        }
        self
    }

    /// Carries on after a refusal, which is not remembered.
    #[must_use]
    pub(crate) fn independent(self) -> Self {
        self.with(|options| options.independent = true)
    }

    /// Remembers a refusal under a reason, without an event.
    #[must_use]
    pub(crate) fn refused_as(self, reason: &'static str) -> Self {
        self.with(|options| options.failure_reason = Some(reason))
    }

    /// Adds the event of refusal and remembers the refusal under its reason.
    #[must_use]
    pub(crate) fn on_failure(self, note: Event) -> Self {
        self.with(|options| {
            options.failure_reason = Some(note.reason);
            options.failure = Some(note);
        })
    }

    /// Gives the event of refusal another message if Pod Security refuses.
    #[must_use]
    pub(crate) fn unless_secure(self, message: String) -> Self {
        self.with(|options| options.insecure = Some(message))
    }

    /// Adds the event of success and that of refusal, each with reason and message, about one object.
    #[must_use]
    pub(crate) fn reported(
        self,
        regarding: ObjectReference,
        (done, success): (&'static str, impl Into<String>),
        (refused, failure): (&'static str, impl Into<String>),
    ) -> Self {
        let success = Event::normal(regarding.clone(), done, success);
        self.on_success(success).on_failure(Event::warning(regarding, refused, failure))
    }
}
