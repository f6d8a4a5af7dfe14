//! The one word in the Status column. The first row that holds wins.

use api::{
    Condition, PrintableStatus, VirtualMachine, VirtualMachineInstance, VmiPhase,
    constants::{condition, reason},
    vm::status::VirtualMachineStartFailure,
};

use super::{SyncError, backoff, data_volumes::DataVolumes, hibernation, run_strategy};

/// `error`: it shows in condition Failure.
pub(super) fn status(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    start_failure: Option<&VirtualMachineStartFailure>,
    unbound_claim: bool,
    data_volumes: &DataVolumes,
    error: Option<&SyncError>,
) -> PrintableStatus {
    if vm.metadata.deletion_timestamp.is_some() {
        return PrintableStatus::Terminating;
    }
    let must_run = run_strategy::must_run(vm, instance);
    if let Some(instance) = instance.filter(|instance| !instance.is_final()) {
        return live(instance, must_run && unbound_claim, data_volumes);
    }
    // Clients know no other word. The condition Hibernated has the details.
    if hibernation::is_hibernated(vm) {
        return PrintableStatus::Stopped;
    }
    if data_volumes.fail(must_run) {
        return PrintableStatus::DataVolumeError;
    }
    if data_volumes.are_provisioned(must_run) {
        return PrintableStatus::Provisioning;
    }
    if must_run && unbound_claim {
        return PrintableStatus::WaitingForVolumeBinding;
    }
    let failures = start_failure.and_then(|failure| failure.consecutive_fail_count).unwrap_or(0);
    if failures > 0 && backoff::applies(&vm.spec.effective_run_strategy()) {
        return PrintableStatus::CrashLoopBackOff;
    }
    // The start is tried again.
    if must_run && instance.is_none() && error.is_some() {
        return PrintableStatus::Starting;
    }
    PrintableStatus::Stopped
}

fn live(instance: &VirtualMachineInstance, waits_for_volume: bool, data_volumes: &DataVolumes) -> PrintableStatus {
    if instance.is_deleting() {
        return PrintableStatus::Stopping;
    }
    let migrating = instance.status.as_ref().and_then(|status| status.migration_state.as_ref());
    if migrating.is_some_and(|state| state.start_timestamp.is_some() && state.end_timestamp.is_none()) {
        return PrintableStatus::Migrating;
    }
    let phase = instance.phase();
    if *phase == VmiPhase::Running {
        let paused = instance.condition(condition::PAUSED).is_some_and(Condition::is_true);
        return if paused { PrintableStatus::Paused } else { PrintableStatus::Running };
    }
    let refused = |type_: &str, wanted: &str| {
        instance
            .condition(type_)
            .is_some_and(|condition| condition.is_false() && condition.reason.as_deref() == Some(wanted))
    };
    if refused(condition::SYNCHRONIZED, reason::FAILED_PVC_NOT_FOUND) {
        return PrintableStatus::ErrorPvcNotFound;
    }
    if data_volumes.fail(false) {
        return PrintableStatus::DataVolumeError;
    }
    if !data_volumes.are_filled() && refused(condition::POD_SCHEDULED, reason::UNSCHEDULABLE) {
        return PrintableStatus::ErrorUnschedulable;
    }
    if data_volumes.are_provisioned(false) {
        return PrintableStatus::Provisioning;
    }
    if waits_for_volume {
        return PrintableStatus::WaitingForVolumeBinding;
    }
    if refused(condition::SYNCHRONIZED, reason::ERR_IMAGE_PULL) {
        return PrintableStatus::ErrImagePull;
    }
    if refused(condition::SYNCHRONIZED, reason::IMAGE_PULL_BACK_OFF) {
        return PrintableStatus::ImagePullBackOff;
    }
    match phase {
        VmiPhase::Unset | VmiPhase::Pending | VmiPhase::Scheduling | VmiPhase::Scheduled => PrintableStatus::Starting,
        _ => PrintableStatus::Unknown,
    }
}
