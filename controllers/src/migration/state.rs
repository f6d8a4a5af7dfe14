//! What virt-controller writes into `status.migrationState` of the VMI: the hand-off to virt-handler, the request to abort, and
//! the failure of a migration that never began.

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{annotation, event, label},
    vmi::migration::VirtualMachineInstanceMigrationState,
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Time};

use super::{
    Observed,
    options::{best_policy, sets_anything, settings},
    target,
};
use crate::{
    resources::vmis::node_name,
    runtime::{Decision, Effect, Event, Kind},
};

/// Failure reason of an aborted migration, which virt-handler writes, too.
const ABORTED: &str = "Live migration has been aborted";
/// `abortStatus` of an aborted migration.
const ABORT_SUCCEEDED: &str = "Succeeded";

/// Hands a migration over to virt-handler, once its target pod runs.
pub(super) fn hand_over(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let Some(pod) = observed.target().filter(|_| target::runs(observed)) else { return Ok(()) };
    let (source, node) = (node_name(vmi).unwrap_or_default(), pod.node_name.as_deref().unwrap_or_default());
    // A volume can have been plugged in meanwhile.
    let is_wrong = source == node || target::is_no_refuge(observed) || !target::has_attachments(observed, vmi);
    if is_wrong || *vmi.phase() != VmiPhase::Running || vmi.is_handed_off() {
        return target::provide(observed, vmi, decision);
    }
    // The end of the operation wakes the migration.
    if observed.held.is_some() || observed.must_wait(event::FAILED_HAND_OVER, decision) {
        return Ok(());
    }
    let policy = best_policy(&observed.policies, vmi, &observed.namespace);
    let policy = policy.filter(|policy| sets_anything(&policy.spec));
    let own = observed.migration.status.as_ref().and_then(|status| status.migration_state.clone()).unwrap_or_default();
    let overhead = pod.metadata.annotations.as_ref().and_then(|all| all.get(annotation::MEMORY_OVERHEAD_BYTES));
    let source_pod = observed.source().and_then(|pod| pod.metadata.name.clone());
    let state = VirtualMachineInstanceMigrationState {
        migration_uid: observed.migration.metadata.uid.clone(),
        source_node: Some(source.to_owned()),
        source_pod: source_pod.or(own.source_pod),
        target_node: Some(node.to_owned()),
        target_pod: pod.metadata.name.clone(),
        target_attachment_pod_uid: target::attachment(observed).and_then(|pod| pod.metadata.uid.clone()),
        target_memory_overhead: overhead.map(|bytes| Quantity(bytes.clone())),
        source_persistent_state_pvc_name: own.source_persistent_state_pvc_name,
        target_persistent_state_pvc_name: own.target_persistent_state_pvc_name,
        migration_configuration: Some(settings(observed, vmi)),
        migration_policy_name: policy.and_then(|policy| policy.metadata.name.clone()),
        ..VirtualMachineInstanceMigrationState::default()
    };
    let mut wanted = vmi.clone();
    let labels = wanted.metadata.labels.get_or_insert_default();
    labels.insert(label::MIGRATION_TARGET_NODE_NAME.to_owned(), node.to_owned());
    let status = wanted.status.get_or_insert_default();
    status.migration_state = Some(Box::new(state));
    // virt-handler finds the launchers of its node here.
    if let Some(uid) = &pod.metadata.uid {
        status.active_pods.insert(uid.clone(), node.to_owned());
    }
    let handed = "Migration target pod is ready for preparation by virt-handler.";
    let failed = "Failed to set MigrationStat in VMI status. :{error}";
    if let Some(change) = Effect::change(Kind::Instance, vmi, &wanted, None)? {
        decision.push(change.reported(
            observed.regarding(),
            (event::SUCCESSFUL_HAND_OVER, handed),
            (event::FAILED_HAND_OVER, failed),
        ));
    }
    Ok(())
}

/// Ends a migration that was deleted after its hand-off. Until the target has published its address, the source cannot begin, so
/// that the migration ends here. Later the source is asked.
pub(super) fn abort(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let Some(state) = observed.state().filter(|_| observed.migration.metadata.deletion_timestamp.is_some()) else {
        return Ok(());
    };
    if observed.has_moved() {
        return Ok(());
    }
    stop(observed, vmi, state, decision)
}

/// Ends a migration that the VMI names and whose object is gone.
pub(super) fn end_forgotten(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    if !vmi.is_handed_off() {
        return Ok(());
    }
    let Some(state) = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref()) else { return Ok(()) };
    let is_known = observed.all.iter().any(|other| other.metadata.uid == state.migration_uid);
    let has_moved = node_name(vmi).is_some() && node_name(vmi) == state.target_node.as_deref();
    if is_known || has_moved { Ok(()) } else { stop(observed, vmi, state, decision) }
}

/// Returns true once the source can move the guest without a further word of virt-controller.
pub(super) fn may_have_begun(state: &VirtualMachineInstanceMigrationState) -> bool {
    state.start_timestamp.is_some() || state.target_node_address.is_some()
}

/// Requests the end of a migration from its source, or ends it if the source cannot have begun.
pub(super) fn stop(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    state: &VirtualMachineInstanceMigrationState,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    if state.failed || state.completed || state.abort_requested {
        return Ok(());
    }
    if observed.must_wait(event::FAILED_ABORT_MIGRATION, decision) {
        return Ok(());
    }
    let mut wanted = vmi.clone();
    let Some(changed) = wanted.status.as_mut().and_then(|status| status.migration_state.as_mut()) else {
        return Ok(());
    };
    changed.abort_requested = true;
    if !may_have_begun(state) {
        changed.abort_status = Some(ABORT_SUCCEEDED.to_owned());
        set_failed(observed, changed, ABORTED);
    }
    let failed = "failed to set MigrationState in VMI status. :{error}";
    let message = "Migration is ready to be canceled by virt-handler.";
    if let Some(change) = Effect::change(Kind::Instance, vmi, &wanted, None)? {
        decision.push(change.reported(
            observed.regarding(),
            (event::SUCCESSFUL_ABORT_MIGRATION, message),
            (event::FAILED_ABORT_MIGRATION, failed),
        ));
    }
    Ok(())
}

fn set_failed(observed: &Observed, state: &mut VirtualMachineInstanceMigrationState, reason: &str) {
    let now = Time(observed.now);
    state.failed = true;
    state.completed = true;
    state.start_timestamp.get_or_insert_with(|| now.clone());
    state.end_timestamp.get_or_insert(now);
    if state.failure_reason.as_ref().is_none_or(String::is_empty) {
        state.failure_reason = Some(reason.to_owned());
    }
}

/// Records the failure of a migration that virt-handler does not end.
pub(super) fn mark_failed(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    reason: &str,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    if observed.must_wait(event::FAILED_MIGRATION, decision) {
        return Ok(());
    }
    let mut wanted = vmi.clone();
    if let Some(state) = wanted.status.as_mut().and_then(|status| status.migration_state.as_mut()) {
        set_failed(observed, state, reason);
    }
    if let Some(change) = Effect::change(Kind::Instance, vmi, &wanted, None)? {
        let uid = observed.migration.metadata.uid.as_deref().unwrap_or_default();
        let message = format!("VirtualMachineInstance migration uid {uid} failed. reason: {reason}");
        let event = Event::warning(Kind::Instance.reference(&vmi.metadata), event::FAILED_MIGRATION, message);
        decision.push(change.on_success(event));
    }
    Ok(())
}
