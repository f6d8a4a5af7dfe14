//! The content of a snapshot as it is created: the VM, its claims, and copies of its instance type and preference.

use api::{
    VirtualMachine, VirtualMachineSpec, VirtualMachineStatus,
    constants::{condition, finalizer},
    names,
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
            // The volume with the state of a VM has the name of the VM, which can be long.
            volume_snapshot_name: Some(names::object_name(&format!("vmsnapshot-{uid}-volume-{}", volume.name), "")),
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
    let mut copies = Vec::new();
    let mut copy = |revision: &mut Option<String>, used: Option<String>| {
        let Some(source) = used.or_else(|| revision.clone().filter(|name| !name.is_empty())) else { return };
        let name = names::object_name(&source, &copy_end(snapshot));
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

/// Returns the end of the names of a snapshot's copies. By it they differ from the revisions themselves, which can go with the VM, and from
/// copies of a former snapshot of the name, which go with that one.
fn copy_end(snapshot: &ObjectMeta) -> String {
    format!("-{}", names::hash(snapshot.uid.as_deref().unwrap_or_default()))
}

/// Returns the name that the copy of a snapshot has for a restored VM. `vm`: name of the captured VM.
pub(crate) fn restored_copy_name(copy: &str, vm: &str, snapshot: &ObjectMeta, target: &str) -> String {
    let name = match copy.strip_suffix(copy_end(snapshot).as_str()) {
        Some(revision) => revision.replacen(vm, target, 1),
        // By a former release, or KubeVirt.
        None => copy.replacen(snapshot.name.as_deref().unwrap_or_default(), target, 1),
    };
    names::object_name(&name, "")
}
