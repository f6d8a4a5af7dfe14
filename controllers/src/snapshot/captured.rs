//! The content of a snapshot as it is created: the VM, its claims, and copies of its instance type and preference.

use api::{
    VirtualMachine, VirtualMachineSpec, VirtualMachineStatus,
    constants::{condition, finalizer},
    snapshot::content::{
        SourceClaim, SourceSpec, SourceVirtualMachine, VirtualMachineSnapshotContent,
        VirtualMachineSnapshotContentSpec, VolumeBackup,
    },
    vm::status::InstancetypeStatusRef,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, SourceVolume};
use crate::runtime::{Kind, RevisionCopy, SnapshotContentCreation};

/// Returns the content of a snapshot, and the copies of revisions that it names.
pub(super) fn content(observed: &Observed, vm: &VirtualMachine) -> (Vec<RevisionCopy>, SnapshotContentCreation) {
    let snapshot = &observed.snapshot.metadata;
    let mut spec = vm.spec.clone();
    let copies = copy_revisions(snapshot, vm, &mut spec);
    let live = observed.live();
    let start = live
        .filter(|_| !has_present_spec(vm))
        .and_then(|vmi| vmi.status.as_ref().and_then(|status| status.virtual_machine_revision_name.clone()));
    let metadata = ObjectMeta { managed_fields: None, ..vm.metadata.clone() };
    let status = live.and_then(|_| vm.status.clone());
    let source = SourceVirtualMachine { metadata, spec: Some(spec), status: Some(status.unwrap_or_default()) };
    let content = VirtualMachineSnapshotContent {
        metadata: ObjectMeta {
            name: Some(observed.snapshot.content_name()),
            namespace: snapshot.namespace.clone(),
            finalizers: Some(vec![finalizer::SNAPSHOT_CONTENT.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: VirtualMachineSnapshotContentSpec {
            source: SourceSpec { virtual_machine: Some(source) },
            virtual_machine_snapshot_name: snapshot.name.clone(),
            volume_backups: backups(observed),
        },
        status: None,
    };
    (copies, SnapshotContentCreation { content, start })
}

/// Returns true if a running guest has the present spec of its VM: nothing of it waits for a restart. vCPUs and memory that were
/// plugged are part of it.
fn has_present_spec(vm: &VirtualMachine) -> bool {
    let judged = vm.status.as_ref().and_then(|status| status.desired_generation);
    let waits = vm.condition(condition::RESTART_REQUIRED).is_some_and(api::Condition::is_true);
    judged == vm.metadata.generation && !waits
}

fn backups(observed: &Observed) -> Vec<VolumeBackup> {
    let uid = observed.snapshot.metadata.uid.as_deref().unwrap_or_default();
    let included = observed.volumes.iter().filter(|volume| volume.is_included());
    included
        .map(|volume| VolumeBackup {
            // Completed when the content is created.
            persistent_volume_claim: SourceClaim { metadata: identity(volume), spec: None },
            volume_name: volume.name.clone(),
            volume_snapshot_name: Some(format!("vmsnapshot-{uid}-volume-{}", volume.name)),
        })
        .collect()
}

fn identity(volume: &SourceVolume) -> ObjectMeta {
    let uid = volume.known.as_ref().and_then(|claim| claim.metadata.uid.clone());
    ObjectMeta { name: Some(volume.claim.clone()), uid, ..ObjectMeta::default() }
}

/// Names copies of the revisions of instance type and preference in a captured spec. Those in use are in the status of the VM.
fn copy_revisions(snapshot: &ObjectMeta, vm: &VirtualMachine, spec: &mut VirtualMachineSpec) -> Vec<RevisionCopy> {
    let status = vm.status.as_ref();
    let in_use = |of: fn(&VirtualMachineStatus) -> Option<&InstancetypeStatusRef>| {
        let reference = of(status?)?.controller_revision_ref.as_ref()?;
        reference.name.clone().filter(|name| !name.is_empty())
    };
    let vm_name = vm.metadata.name.as_deref().unwrap_or_default();
    let snapshot_name = snapshot.name.as_deref().unwrap_or_default();
    let mut copies = Vec::new();
    let mut copy = |revision: &mut Option<String>, used: Option<String>| {
        let Some(source) = used.or_else(|| revision.clone().filter(|name| !name.is_empty())) else { return };
        let name = source.replacen(vm_name, snapshot_name, 1);
        copies.push(RevisionCopy {
            namespace: snapshot.namespace.clone().unwrap_or_default(),
            source,
            name: name.clone(),
            owner: Kind::VmSnapshot.owner_reference(snapshot),
        });
        *revision = Some(name);
    };
    if let Some(matcher) = &mut spec.instancetype {
        copy(&mut matcher.revision_name, in_use(|status| status.instancetype_ref.as_ref()));
    }
    if let Some(matcher) = &mut spec.preference {
        copy(&mut matcher.revision_name, in_use(|status| status.preference_ref.as_ref()));
    }
    copies
}
