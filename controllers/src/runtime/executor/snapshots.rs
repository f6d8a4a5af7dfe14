//! The content of snapshots of VMs, copies of ControllerRevisions, the freeze of guests, and the content of volume snapshots.

use std::time::Duration;

use api::{VirtualMachineSpec, snapshot::content::VirtualMachineSnapshotContent};
use k8s_openapi::{
    api::{apps::v1::ControllerRevision, core::v1::PersistentVolumeClaim},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    api::{GetParams, PostParams},
    core::Request,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    Executor, Kind, RevisionCopy, SnapshotContentCreation,
    data_volumes::is_name,
    errors::{WriteError, classify},
};

/// Collection of the contents of volume snapshots.
const VOLUME_SNAPSHOT_CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
/// Annotation of the content of a VolumeSnapshot that is deleted, and that no pending claim keeps.
const BEING_DELETED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
/// Longest message of virt-api that is kept.
const MESSAGE: usize = 512;

impl Executor {
    async fn read<T: DeserializeOwned + Clone + std::fmt::Debug>(
        &self,
        collection: String,
        name: &str,
    ) -> Result<T, WriteError> {
        let request = Request::new(collection);
        let request =
            request.get(name, &GetParams::default()).map_err(|error| WriteError::Refused(error.to_string()))?;
        self.client.request(request).await.map_err(|error| classify(&error, true))
    }

    /// Returns the content of a snapshot with its claims and the spec that the guest has.
    pub(super) async fn snapshot_content(&self, creation: &SnapshotContentCreation) -> Result<Value, WriteError> {
        let mut content = creation.content.clone();
        let namespace = content.metadata.namespace.clone().unwrap_or_default();
        if let Some(start) = &creation.start {
            let record: ControllerRevision = self.read(Kind::ControllerRevision.path(Some(&namespace)), start).await?;
            let data = record.data.map(|data| data.0).unwrap_or_default();
            let spec = serde_json::from_value(data["spec"].clone()).map_err(|error| {
                WriteError::Refused(format!("cannot read the VM in ControllerRevision {namespace}/{start}: {error}"))
            })?;
            set_started(&mut content, spec);
        }
        for backup in &mut content.spec.volume_backups {
            let known = &mut backup.persistent_volume_claim;
            let name = known.metadata.name.clone().unwrap_or_default();
            let mut claim: PersistentVolumeClaim = self.read(Kind::Claim.path(Some(&namespace)), &name).await?;
            if claim.metadata.uid != known.metadata.uid {
                return Err(WriteError::Stale);
            }
            claim.metadata.managed_fields = None;
            (known.metadata, known.spec) = (claim.metadata, claim.spec);
        }
        let mut object = serde_json::to_value(&content).map_err(|error| WriteError::Refused(error.to_string()))?;
        object["apiVersion"] = Kind::VmSnapshotContent.api_version().into();
        object["kind"] = Kind::VmSnapshotContent.kind().into();
        Ok(object)
    }

    /// Returns the copy of a ControllerRevision with its labels and data.
    pub(super) async fn copied_revision(&self, copy: &RevisionCopy) -> Result<Value, WriteError> {
        let RevisionCopy { namespace, source, name, owner } = copy;
        let read = self.read(Kind::ControllerRevision.path(Some(namespace)), source).await;
        let mut revision: ControllerRevision = read.map_err(|error| match error {
            WriteError::Refused(message) => {
                WriteError::Refused(format!("Unable to fetch ControllerRevision {namespace}/{source}: {message}"))
            }
            other => other,
        })?;
        revision.metadata = ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            labels: revision.metadata.labels,
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        };
        serde_json::to_value(&revision).map_err(|error| WriteError::Refused(error.to_string()))
    }

    /// Freezes or thaws the file systems of a guest.
    pub(super) async fn quiesce(
        &self,
        namespace: &str,
        name: &str,
        freeze: Option<Duration>,
    ) -> Result<(), WriteError> {
        let (verb, body) = match freeze {
            Some(limit) => ("freeze", json!({"unfreezeTimeout": format!("{}s", limit.as_secs())}).to_string()),
            None => ("unfreeze", String::new()),
        };
        let group = api::constants::SUBRESOURCES_GROUP;
        let path = format!("/apis/{group}/v1/namespaces/{namespace}/virtualmachineinstances");
        let refused = |text: String| WriteError::Refused(text.chars().take(MESSAGE).collect());
        let request = Request::new(path).replace_subresource(verb, name, &PostParams::default(), body.into_bytes());
        let request = request.map_err(|error| refused(error.to_string()))?;
        match self.client.request_text(request).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) => Err(refused(status.message)),
            Err(error) => Err(refused(error.to_string())),
        }
    }

    /// Succeeds if the storage has taken the content of a VolumeSnapshot. One whose deletion has begun is refused. A content that is
    /// deleted before its VolumeSnapshot stays as long as that.
    pub(super) async fn require_taken(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        content: &str,
    ) -> Result<(), WriteError> {
        // The status of the VolumeSnapshot selects no other path.
        if !is_name(content) {
            return Err(WriteError::Refused(format!("{content:?} names no VolumeSnapshotContent")));
        }
        let object: Value = self.read(VOLUME_SNAPSHOT_CONTENTS.to_owned(), content).await?;
        let snapshot = &object["spec"]["volumeSnapshotRef"];
        let is_of = snapshot["uid"] == uid && snapshot["namespace"] == namespace && snapshot["name"] == name;
        let is_marked = object["metadata"]["annotations"][BEING_DELETED].is_string();
        if is_of && is_marked && object["spec"]["deletionPolicy"] != "Retain" {
            return Err(WriteError::Refused(format!("VolumeSnapshotContent {content} is being deleted")));
        }
        let status = &object["status"];
        // A number, in contrast to that of the VolumeSnapshot. The storage may not know the time of a content that was not made here.
        let is_taken = status["creationTime"].is_number() || status["readyToUse"] == true;
        if is_of && is_taken { Ok(()) } else { Err(WriteError::Stale) }
    }
}

/// Gives the VM of a content the spec with which its guest was started. Volumes and disks follow the VM while it runs.
fn set_started(content: &mut VirtualMachineSnapshotContent, mut started: VirtualMachineSpec) {
    let Some(vm) = &mut content.spec.source.virtual_machine else { return };
    let present = vm.spec.take().unwrap_or_default();
    started.data_volume_templates = present.data_volume_templates;
    if let (Some(started), Some(present)) = (&mut started.template.spec, present.template.spec) {
        started.volumes = present.volumes;
        started.domain.devices.disks = present.domain.devices.disks;
    }
    // The copies of instance type and preference belong to the snapshot.
    if let (Some(started), Some(present)) = (&mut started.instancetype, present.instancetype) {
        started.revision_name = present.revision_name;
    }
    if let (Some(started), Some(present)) = (&mut started.preference, present.preference) {
        started.revision_name = present.revision_name;
    }
    vm.spec = Some(started);
}
