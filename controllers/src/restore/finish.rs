//! The writes after a VM was restored. Each can be repeated.

use api::{VirtualMachine, constants::annotation, names, owner, persistent_state};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::json;

use super::{Observed, REFUSED, Shown, Step, marks, source, target, volumes};
use crate::{
    persistent_state::belongs,
    runtime::{Effect, Kind},
};

/// Returns the last step of a restore.
pub(super) fn step(observed: &Observed) -> Result<Step, serde_json::Error> {
    Ok(Step::show(Shown::complete()).before(effects(observed)).before(belong(observed)).before(observed.release(true)?))
}

/// Makes the VM the owner of the restore, for clients that look for it, unless a clone is. One that is being deleted has released its
/// restores, or is about to (`vm/restores.rs`). A refused owner does not keep the VM locked for ever.
fn belong(observed: &Observed) -> Option<Effect> {
    let restore = &observed.restore.metadata;
    let vm = observed.vm.as_deref().filter(|vm| vm.metadata.deletion_timestamp.is_none())?;
    if restore.owner_references.iter().flatten().next().is_some() || observed.gives_up() {
        return None;
    }
    // It is not controlled by the VM, and holds up nothing.
    let owner = OwnerReference {
        controller: None,
        block_owner_deletion: None,
        ..Kind::VirtualMachine.owner_reference(&vm.metadata)
    };
    let patch = json!({"metadata": {"ownerReferences": [owner]}});
    Some(Effect::merge(Kind::VmRestore, restore, patch).refused_as(REFUSED))
}

/// Returns what is left to do for a VM that was restored.
pub(super) fn effects(observed: &Observed) -> Vec<Effect> {
    let Some(vm) = observed.vm.as_deref() else { return Vec::new() };
    let mut effects = Vec::new();
    // A snapshot that is gone has no copies.
    if let Ok(source) = source(observed)
        && let Ok(revisions) = target::revisions(observed, vm, &target::copies(observed, source))
    {
        effects.extend(revisions);
    }
    own(observed, vm, &mut effects);
    take_state(observed, &mut effects);
    if !observed.gives_up() {
        delete_data_volumes(observed, vm, &mut effects);
    }
    effects.into_iter().map(|effect| effect.refused_as(REFUSED)).collect()
}

/// Makes a new VM the owner of its claims, which lose the mark that has asked for it.
fn own(observed: &Observed, vm: &VirtualMachine, effects: &mut Vec<Effect>) {
    for restored in observed.status().restores {
        let claim =
            observed.claims.get(&restored.persistent_volume_claim).filter(|claim| volumes::is_own(observed, claim));
        let Some(claim) = claim else { continue };
        let annotations = claim.metadata.annotations.as_ref();
        let is_owned_later = annotations.is_some_and(|all| all.contains_key(annotation::OWNED_BY_VM));
        if is_owned_later && claim.metadata.owner_references.iter().flatten().next().is_none() {
            let owners = [Kind::VirtualMachine.owner_reference(&vm.metadata)];
            let unmarked = json!({annotation::OWNED_BY_VM: null});
            let patch = json!({"metadata": {"ownerReferences": owners, "annotations": unmarked}});
            effects.push(Effect::merge(Kind::Claim, &claim.metadata, patch));
        }
    }
}

/// Gives the VM its restored state: the claim gets the label by which the VM finds it, and then the former one is deleted. One that was
/// not made for the VM, or that another party does not let go, loses its label instead.
fn take_state(observed: &Observed, effects: &mut Vec<Effect>) {
    let volume = format!("{}{}", persistent_state::PREFIX, observed.target());
    let restores = observed.status().restores;
    let Some(restored) = restores.iter().find(|restored| restored.volume_name == volume) else { return };
    let name = &restored.persistent_volume_claim;
    let Some(claim) = observed.claims.get(name).filter(|claim| volumes::is_own(observed, claim)) else { return };
    let label = names::label_value(observed.target());
    let label = json!({"metadata": {"labels": {persistent_state::LABEL: label}}});
    if !observed.states.iter().any(|state| state.metadata.uid == claim.metadata.uid) {
        effects.push(Effect::merge(Kind::Claim, &claim.metadata, label));
    }
    for former in observed.states.iter().filter(|state| state.metadata.uid != claim.metadata.uid) {
        if !belongs(former) || observed.gives_up() {
            let (labels, annotations) =
                (json!({persistent_state::LABEL: null}), json!({annotation::REPLACED_BY: null}));
            let unlabelled = json!({"metadata": {"labels": labels, "annotations": annotations}});
            effects.push(Effect::merge(Kind::Claim, &former.metadata, unlabelled));
            continue;
        }
        // Without the mark virt-controller may not delete it. With its label it is found again.
        let mark = json!({"metadata": {"annotations": {annotation::REPLACED_BY: observed.id()}}});
        effects.push(Effect::merge(Kind::Claim, &former.metadata, mark));
        effects.push(Effect::delete(Kind::Claim, &former.metadata));
    }
}

/// Deletes the DataVolumes of the VM's former templates.
fn delete_data_volumes(observed: &Observed, vm: &VirtualMachine, effects: &mut Vec<Effect>) {
    let deleted = observed.status().deleted_data_volumes;
    let former = deleted.iter().filter_map(|name| observed.data_volumes.get(name));
    for volume in former.filter(|volume| owner::is_controlled_by(&volume.metadata, vm)) {
        if volume.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let [(key, name), _] = marks(observed);
        let mark = json!({"metadata": {"annotations": {key: name}}});
        effects.push(Effect::merge(Kind::DataVolume, &volume.metadata, mark));
        effects.push(Effect::delete(Kind::DataVolume, &volume.metadata));
    }
}
