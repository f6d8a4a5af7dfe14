//! The VM of a restore: its spec as captured, with the restored claims.

use admission::rules::patches;
use api::{
    RunStrategy, VirtualMachine, VirtualMachineSpec, constants::annotation, instancetype::matcher::Role, owner,
    snapshot::content::SourceVirtualMachine,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, REFUSED, Source, volumes};
use crate::{
    owned_vmis::firmware_uuid,
    resources::{claims::claim_name, instancetype_revisions::is_left},
    runtime::{Effect, Kind, RevisionCopy},
    snapshot::restored_copy_name,
};

/// Annotations of a captured VM that a new one does not get.
pub(crate) const DROPPED: [&str; 2] = ["kubectl.kubernetes.io/last-applied-configuration", annotation::TRACEPARENT];

/// Returns the writes that change or create the VM, or why there are none.
pub(super) fn effects(
    observed: &Observed,
    source: Source<'_>,
) -> Result<Result<Vec<Effect>, String>, serde_json::Error> {
    let (mut spec, copies) = captured(observed, source);
    let Some(vm) = observed.vm.as_deref() else {
        let vm = match created(observed, source, spec) {
            Ok(vm) => vm,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let create = Effect::create(Kind::VirtualMachine, Some(observed.namespace()), &vm)?;
        let taken = format!("VirtualMachine {} was created by another client", observed.target());
        return Ok(Ok(vec![create.unless_exists(taken).refused_as(REFUSED)]));
    };
    let mut effects = match revisions(observed, vm, &copies) {
        Ok(effects) => effects,
        Err(text) => return Ok(Err(text)),
    };
    (spec.running, spec.run_strategy) = (vm.spec.running, vm.spec.run_strategy.clone());
    let mut wanted = VirtualMachine { spec, ..vm.clone() };
    wanted.metadata.annotations.get_or_insert_default().insert(annotation::LAST_RESTORE.to_owned(), observed.id());
    let change = Effect::change(Kind::VirtualMachine, vm, &wanted, None)?;
    effects.extend(change.map(|change| change.refused_as(REFUSED)));
    Ok(Ok(effects))
}

/// A copy of an instance type or preference: its name at the snapshot, and that for the VM.
pub(super) struct Copied {
    kept: String,
    name: String,
}

/// Returns the captured spec with the restored claims, and the copies that it names.
fn captured(observed: &Observed, source: Source<'_>) -> (VirtualMachineSpec, Vec<Copied>) {
    let mut spec = source.vm.spec.clone().unwrap_or_default();
    volumes::rename(&mut spec, &observed.status().restores);
    let former = source.vm.metadata.name.as_deref().unwrap_or_default();
    let mut copies = Vec::new();
    for role in Role::ALL {
        let revision = match role {
            Role::Instancetype => spec.instancetype.as_mut().map(|matcher| &mut matcher.revision_name),
            Role::Preference => spec.preference.as_mut().map(|matcher| &mut matcher.revision_name),
        };
        let Some(Some(revision)) = revision else { continue };
        let name = restored_copy_name(revision, former, &source.snapshot.metadata, observed.target());
        if name != *revision {
            copies.push(Copied { kept: std::mem::replace(revision, name.clone()), name });
        }
    }
    (spec, copies)
}

/// Returns the copies that the VM of a snapshot names.
pub(super) fn copies(observed: &Observed, source: Source<'_>) -> Vec<Copied> {
    captured(observed, source).1
}

/// Returns the names of all copies that a restore reads.
pub(super) fn copy_names(vm: &SourceVirtualMachine, snapshot: &ObjectMeta, target: &str) -> Vec<String> {
    let former = vm.metadata.name.as_deref().unwrap_or_default();
    let instancetype = vm.spec.as_ref().and_then(|spec| spec.instancetype.as_ref()?.revision_name.clone());
    let preference = vm.spec.as_ref().and_then(|spec| spec.preference.as_ref()?.revision_name.clone());
    let kept = instancetype.into_iter().chain(preference);
    kept.flat_map(|name| [restored_copy_name(&name, former, snapshot, target), name]).collect()
}

/// Returns the creation of the copies that the VM lacks.
pub(super) fn revisions(observed: &Observed, vm: &VirtualMachine, copies: &[Copied]) -> Result<Vec<Effect>, String> {
    let mut effects = Vec::new();
    for copy in copies {
        let (kept, present) = (observed.revisions.get(&copy.kept), observed.revisions.get(&copy.name));
        match (kept, present) {
            (Some(kept), Some(present)) if kept.object == present.object && !is_left(&present.metadata, vm) => {}
            (Some(_), Some(present))
                if !(owner::is_controlled_by(&present.metadata, vm) || is_left(&present.metadata, vm)) =>
            {
                return Err(format!("found existing ControllerRevision with unexpected data: {}", copy.name));
            }
            (Some(_), present) => {
                effects.extend(present.map(|present| Effect::delete(Kind::ControllerRevision, &present.metadata)));
                effects.push(Effect::copy_revision(RevisionCopy {
                    namespace: observed.namespace().to_owned(),
                    source: copy.kept.clone(),
                    name: copy.name.clone(),
                    owner: Kind::VirtualMachine.owner_reference(&vm.metadata),
                }));
            }
            (None, Some(_)) => {}
            (None, None) => {
                return Err(format!("Unable to fetch ControllerRevision {}/{}", observed.namespace(), copy.kept));
            }
        }
    }
    Ok(effects.into_iter().map(|effect| effect.refused_as(REFUSED)).collect())
}

/// Returns the new VM, with the patches of the restore.
fn created(
    observed: &Observed,
    source: Source<'_>,
    mut spec: VirtualMachineSpec,
) -> Result<VirtualMachine, patches::PatchError> {
    let of = &source.vm.metadata;
    (spec.running, spec.run_strategy) = match spec.running {
        Some(_) => (Some(false), None),
        None => (None, Some(RunStrategy::Halted)),
    };
    // The UUID that the captured VM has by its name. Admission would generate another one.
    if of.name.as_deref() == Some(observed.target())
        && let Some(template) = &mut spec.template.spec
    {
        let firmware = template.domain.firmware.get_or_insert_default();
        if firmware.uuid.as_ref().is_none_or(String::is_empty) {
            firmware.uuid = Some(firmware_uuid(observed.target()));
        }
    }
    let mut annotations = of.annotations.clone().unwrap_or_default();
    annotations.retain(|key, _| !DROPPED.contains(&key.as_str()));
    let vm = VirtualMachine {
        metadata: ObjectMeta {
            name: Some(observed.target().to_owned()),
            namespace: observed.restore.metadata.namespace.clone(),
            labels: of.labels.clone(),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    };
    let mut vm = patches::apply(&observed.restore.spec.patches, &vm)?;
    // After the patches, whose paths are those of the snapshot.
    if of.name.as_deref() != Some(observed.target()) {
        drop_shared(observed, source, &mut vm.spec);
    }
    // By it the restore knows its VM.
    vm.metadata.annotations.get_or_insert_default().insert(annotation::LAST_RESTORE.to_owned(), observed.id());
    Ok(vm)
}

/// Removes the templates of shareable disks that the snapshot does not have: their DataVolumes are those of the captured VM, and another
/// VM with such a template would not start. A disk that is not shareable keeps its template, since two VMs would write to it.
fn drop_shared(observed: &Observed, source: Source<'_>, spec: &mut VirtualMachineSpec) {
    let Some(template) = &spec.template.spec else { return };
    let is_shared = |name: &str| {
        let mut volumes = template.volumes.iter().filter(|volume| claim_name(volume) == Some(name));
        let disks = &template.domain.devices.disks;
        volumes.any(|volume| disks.iter().any(|disk| disk.name == volume.name && disk.shareable == Some(true)))
    };
    let restores = observed.status().restores;
    let is_restored = |name: &str| restores.iter().any(|restored| restored.data_volume_name.as_deref() == Some(name));
    let captured = |name: &str| {
        let mut templates = source.vm.spec.iter().flat_map(|spec| &spec.data_volume_templates);
        templates.any(|known| known.metadata.name.as_deref() == Some(name))
    };
    let is_left = |name: &str| captured(name) && is_shared(name) && !is_restored(name);
    spec.data_volume_templates.retain(|known| !known.metadata.name.as_deref().is_some_and(is_left));
}
