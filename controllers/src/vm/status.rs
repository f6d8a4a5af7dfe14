//! The status of a VM.

use std::{sync::Arc, time::Duration};

use api::{
    Condition, RunStrategy, VirtualMachine, VirtualMachineInstance, VirtualMachineStatus, VmOperation, VmiPhase,
    condition::{set, set_or_remove},
    constants::{condition, reason},
    vm::status::VolumeSnapshotStatus,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Observed, SyncError, backoff,
    data_volumes::DataVolumes,
    printable,
    restart::{self, Template},
    run_strategy,
};
use crate::{
    resources::claims::{CachedClaim, claim_name},
    snapshot::state_volume,
    volume_migration,
};

/// Longest wait for a change of the VMI that is about to follow. Timestamps are cut to seconds.
const FOLLOWS: Duration = Duration::from_secs(2);
/// Phase of a claim that has a volume.
const BOUND: &str = "Bound";

/// The VM's own conditions. All others are copied from its VMI.
const OWN: &[&str] = &[
    condition::READY,
    condition::FAILURE,
    condition::HIBERNATED,
    condition::RESTART_REQUIRED,
    condition::MANUAL_RECOVERY_REQUIRED,
];

pub(super) fn update(
    observed: &Observed,
    instance: Option<&VirtualMachineInstance>,
    error: Option<&SyncError>,
    template: Option<&Template>,
    data_volumes: &DataVolumes,
    wanted: &mut VirtualMachine,
) {
    let vm = &*observed.vm;
    let strategy = vm.spec.effective_run_strategy();
    let now = Time(observed.now);
    let former = vm.status.clone().unwrap_or_default();
    let mut status = former.clone();
    status.created = instance.is_some();
    status.desired_generation = vm.metadata.generation;
    if let Some(instance) = instance {
        status.observed_generation =
            restart::observed_generation(observed, instance, template).or(former.observed_generation);
    }
    // Written when there is a VMI, so that a new strategy counts as new until it has acted: only the change of the strategy
    // causes a start by RerunOnFailure, and that start may have to wait.
    let has_acted = status.created || (status.run_strategy.is_some() && strategy != RunStrategy::RerunOnFailure);
    if has_acted && !awaits_reset(vm, instance, data_volumes) {
        status.run_strategy = Some(strategy.clone());
    }
    (status.node_name, status.ip_address) = instance.map(location).unwrap_or_default();
    status.state_change_requests.retain(|request| !run_strategy::is_outdated(vm, request));
    run_strategy::trim(&mut status.state_change_requests, instance);
    status.start_failure = backoff::update(former.start_failure.as_ref(), &strategy, instance, observed.now);
    let restart = restart::condition(observed, template, instance, &now);
    volume_migration::update_state(vm, instance, &mut status, &now);
    let provisioned = data_volumes.condition(&now).filter(|_| instance.is_none());
    conditions(instance, error, restart, provisioned, &mut status.conditions, &now);
    status.ready = status.conditions.iter().any(|known| known.type_ == condition::READY && known.is_true());
    // The VMI reports claims that do not exist.
    let unbound_claim = observed.claims.values().any(|claim| claim.phase != BOUND);
    let start_failure = status.start_failure.as_ref();
    status.printable_status = Some(printable::status(vm, instance, start_failure, unbound_claim, data_volumes, error));
    status.volume_snapshot_statuses = snapshots(observed);
    operation(vm, instance, &mut status, &now);
    wanted.status = Some(status);
}

/// Returns true while the next explicit start creates a deleted DataVolume again. A new strategy counts as that start until the
/// DataVolume exists.
fn awaits_reset(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>, data_volumes: &DataVolumes) -> bool {
    let runs = instance.is_some_and(|instance| !instance.is_final() && !instance.is_deleting());
    !runs && run_strategy::must_run(vm, None) && data_volumes.await_reset()
}

/// Returns node and address of a VMI that runs. At a start they come with the phase, which changes the VM's status anyway.
fn location(instance: &VirtualMachineInstance) -> (Option<String>, Option<String>) {
    let Some(status) = instance.status.as_ref().filter(|_| *instance.phase() == VmiPhase::Running) else {
        return (None, None);
    };
    let address = status.interfaces.first().and_then(|interface| interface.ip_address.clone());
    (status.node_name.clone(), address)
}

/// Holds the lease for volumes that move. They are recorded before, so that no other operation begins meanwhile.
fn operation(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    status: &mut VirtualMachineStatus,
    now: &Time,
) {
    let moves = instance.and_then(|vmi| vmi.status.as_ref()).is_some_and(|status| !status.migrated_volumes.is_empty());
    status.hold(VmOperation::VolumeMigration, moves.then_some(&vm.metadata), now);
}

/// Returns the snapshot support of the volumes, and of the claim with the VM's state.
fn snapshots(observed: &Observed) -> Vec<VolumeSnapshotStatus> {
    let vm = &*observed.vm;
    let volumes = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    let of_volumes = volumes.map(|volume| {
        let claim = claim_name(volume).map(|claim| observed.claims.get(claim));
        support(observed, volume.name.clone(), claim)
    });
    let of_state = observed.state_claim.iter().map(|claim| support(observed, state_volume(vm), Some(Some(claim))));
    of_volumes.chain(of_state).collect()
}

/// Returns the snapshot support of a volume. `claim`: the claim that it names, if it exists.
fn support(observed: &Observed, name: String, claim: Option<Option<&Arc<CachedClaim>>>) -> VolumeSnapshotStatus {
    let class = claim.map(|claim| claim.map(|claim| claim.storage_class.as_deref().unwrap_or_default()));
    let reason = match class {
        None => Some(format!("Snapshot is not supported for this volumeSource type [{name}]")),
        Some(None) => Some("PVC not found".to_owned()),
        Some(Some(class)) => match observed.snapshot_classes.get(class) {
            Some(Ok(Some(_))) => None,
            Some(Err(several)) => Some(several.clone()),
            _ => Some(format!(
                "No VolumeSnapshotClass: Volume snapshots are not configured for this StorageClass [{class}] [{name}]"
            )),
        },
    };
    VolumeSnapshotStatus { enabled: reason.is_none(), name, reason }
}

fn conditions(
    instance: Option<&VirtualMachineInstance>,
    error: Option<&SyncError>,
    restart: Option<Condition>,
    data_volumes: Option<Condition>,
    conditions: &mut Vec<Condition>,
    now: &Time,
) {
    set(conditions, ready(instance, now));
    let error = error.map(|error| Condition::new(condition::FAILURE, true, &error.reason, &error.message, now));
    set_or_remove(conditions, condition::FAILURE, error);
    set_or_remove(conditions, condition::RESTART_REQUIRED, restart);
    let mirrored = instance.and_then(|instance| instance.status.as_ref()).map(|status| status.conditions.as_slice());
    let mirrored = mirrored.unwrap_or_default();
    let is_provisioned = data_volumes.is_none();
    if let Some(condition) = data_volumes {
        set(conditions, condition);
    }
    conditions.retain(|known| {
        (!is_provisioned && known.type_ == condition::DATA_VOLUMES_READY)
            || OWN.contains(&known.type_.as_str())
            || mirrored.iter().any(|mirrored| mirrored.type_ == known.type_)
    });
    let starts =
        instance.is_some_and(|instance| matches!(instance.phase(), VmiPhase::Scheduling | VmiPhase::Scheduled));
    for condition in mirrored.iter().filter(|condition| !OWN.contains(&condition.type_.as_str())) {
        // That nothing is wrong needs no write of its own. It is written when the guest runs.
        let is_no_news = starts && condition.type_ == condition::DATA_VOLUMES_READY && condition.is_true();
        if !is_no_news || conditions.iter().any(|known| known.type_ == condition.type_) {
            set(conditions, condition.clone());
        }
    }
}

/// Returns the condition Ready. It anticipates what a new VMI and one that is being deleted report next, so that the status needs no other
/// write then.
fn ready(instance: Option<&VirtualMachineInstance>, now: &Time) -> Condition {
    let not = |reason: &str, message: &str| Condition::new(condition::READY, false, reason, message, now);
    let Some(instance) = instance else { return not(reason::VMI_NOT_EXISTS, "VMI does not exist") };
    let has_pods = instance.status.as_ref().is_some_and(|status| !status.active_pods.is_empty());
    if has_pods && instance.is_deleting() && !instance.is_final() {
        return not(reason::POD_TERMINATING, "virt-launcher pod is terminating");
    }
    match instance.condition(condition::READY) {
        Some(ready) => ready.clone(),
        None if matches!(instance.phase(), VmiPhase::Unset | VmiPhase::Pending) => {
            not(reason::GUEST_NOT_RUNNING, "Guest VM is not reported as running")
        }
        None => not(reason::VMI_CONDITION_MISSING, "VMI is missing the Ready condition"),
    }
}

/// Returns how long a status waits for a change of the VMI that is about to follow, if all that it changes shows the VMI. A guest that has
/// begun to run becomes ready by another write, and a VMI that has ended is removed with its pod.
pub(super) fn time_to_wait(
    former: &VirtualMachine,
    wanted: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    now: Timestamp,
) -> Option<Duration> {
    let instance = instance?;
    let ready = instance.condition(condition::READY).and_then(|ready| ready.reason.as_deref());
    let is_about_to_change = if instance.is_deleting() {
        instance.is_final()
    } else {
        *instance.phase() == VmiPhase::Running && ready == Some(reason::GUEST_NOT_RUNNING)
    };
    if !is_about_to_change || !are_equal_but_for_view(former.status.as_ref()?, wanted.status.as_ref()?) {
        return None;
    }
    let passed = Duration::try_from(run_strategy::time_in_phase(instance, now)?).ok()?;
    FOLLOWS.checked_sub(passed).filter(|left| !left.is_zero())
}

/// Returns true if two statuses are equal but for what shows the state of the VMI.
fn are_equal_but_for_view(former: &VirtualMachineStatus, wanted: &VirtualMachineStatus) -> bool {
    let shown = VirtualMachineStatus {
        conditions: wanted.conditions.clone(),
        ip_address: wanted.ip_address.clone(),
        node_name: wanted.node_name.clone(),
        printable_status: wanted.printable_status.clone(),
        ready: wanted.ready,
        ..former.clone()
    };
    shown == *wanted
}
