//! The launcher pods of a VMI: creation, deletion, search.

use std::{sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{event, reason},
    tsc::{self, Need},
    vmi::migration::VirtualMachineInstanceMigrationState,
    vsock,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    Observed, SyncError,
    data_volumes::{self, Gate},
    shows, state,
};
use crate::{
    launcher_pod::{self, Inputs, RenderError, Use, is_target_of},
    resources::{pods::CachedPod, vmis::node_name},
    runtime::{Decision, Effect, Event, Kind, POD_SECURITY},
    vm_lease,
};

/// Reason of a VMI for which there is no node, spelled as in the reference.
pub(super) const NO_HINTS: &str = "FailedGatherhingClusterTopologyHints";
/// Wait for a free context ID.
const NO_CID_WAIT: Duration = Duration::from_secs(1);

/// Renders a pod of a VMI.
type Render = fn(&Inputs<'_>) -> Result<Pod, RenderError>;

/// Searches for pods that no watch shows.
pub(super) fn restorations(observed: &Observed) -> Vec<Effect> {
    let metadata = &observed.instance.metadata;
    let restore = |name: Option<String>, uids: Vec<String>| Effect::Restore {
        namespace: metadata.namespace.clone(),
        name,
        uids,
        labels: launcher_pod::identity_labels(&observed.instance),
        owner: Kind::Instance.owner_reference(metadata),
    };
    let unseen = observed.pods.iter().filter(|pod| pod.unseen);
    let known = unseen.map(|pod| restore(pod.metadata.name.clone(), pod.metadata.uid.iter().cloned().collect()));
    let missing = (!observed.missing.is_empty()).then(|| restore(None, observed.missing.to_vec()));
    known.chain(missing).collect()
}

/// Returns the VMI's own pods and surplus pods. A former release could create another one after a creation that was not answered in
/// time: the first that belongs to the VMI stays, later ones are deleted. Targets of migrations are own pods as long as the migration has
/// not ended. Those of failed ones, and the pod that the guest has left, are until they have ended or their time is over.
pub(super) fn split_surplus<'a>(
    observed: &'a Observed,
    decision: &mut Decision,
) -> (Vec<&'a CachedPod>, Vec<&'a CachedPod>) {
    let (instance, pods) = (&observed.instance, &observed.pods);
    let status = instance.status.as_ref();
    let (targets, pods): (Vec<&CachedPod>, Vec<&CachedPod>) =
        pods.iter().map(Arc::as_ref).partition(|pod| is_target(observed, pod));
    let active = status.map(|status| &status.active_pods).filter(|active| !active.is_empty());
    let first = pods
        .iter()
        .min_by_key(|pod| (pod.metadata.creation_timestamp.as_ref().map(|at| at.0), pod.metadata.name.clone()));
    let first = first.and_then(|pod| pod.metadata.uid.as_deref());
    let is_own = |pod: &&CachedPod| {
        let uid = pod.metadata.uid.as_deref();
        match active {
            Some(active) => uid.is_some_and(|uid| active.contains_key(uid)),
            None => uid == first,
        }
    };
    let (own, others): (Vec<_>, Vec<_>) = pods.iter().copied().partition(is_own);
    let present = present_pod(instance, &own).and_then(|pod| pod.metadata.uid.clone());
    let is_left = |pod: &CachedPod| {
        let state = status.and_then(|status| status.migration_state.as_ref());
        state.is_some_and(|state| state.source_pod == pod.metadata.name && !is_abandoned(state, observed.now))
    };
    let (stray, own): (Vec<_>, Vec<_>) = own.into_iter().partition(|pod| {
        let is_elsewhere = node_name(instance).is_some() && pod.node_name.as_deref() != node_name(instance);
        is_elsewhere && present.is_some() && !is_left(pod)
    });
    // A surplus pod that is down is kept: it does not end the VMI, and its log may be of interest.
    let surplus = others.into_iter().chain(stray).filter(|pod| !pod.is_down());
    let (ending, surplus): (Vec<_>, Vec<_>) = surplus.partition(|pod| {
        let left = time_to_end(observed, pod);
        left.inspect(|left| decision.wake(*left + Duration::from_millis(1))).is_some()
    });
    (own.into_iter().chain(targets).chain(ending).collect(), surplus)
}

/// Time in which virt-handler ends the launcher that receives no guest any more.
pub(crate) const TARGET_TIME: SignedDuration = SignedDuration::from_secs(30);

/// Returns the time that virt-handler has left to end this pod, if it was the target of the VMI's last migration, which has failed.
fn time_to_end(observed: &Observed, pod: &CachedPod) -> Option<Duration> {
    let instance = &*observed.instance;
    let state = instance.status.as_ref()?.migration_state.as_deref().filter(|state| state.failed)?;
    let is_target = state.target_pod == pod.metadata.name && state.target_node.as_deref() != node_name(instance);
    let ended = state.end_timestamp.as_ref().filter(|_| is_target && !instance.is_final())?.0;
    let left = TARGET_TIME.saturating_sub(observed.now.duration_since(ended));
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

/// Time in which the pod that the guest has left ends by itself.
const LEFT_POD_TIME: SignedDuration = SignedDuration::from_secs(120);

/// Returns true if the guest has left the source pod of a migration so long ago that virt-handler does not end it.
fn is_abandoned(state: &VirtualMachineInstanceMigrationState, now: Timestamp) -> bool {
    let ended = state.end_timestamp.as_ref().map(|at| at.0);
    state.completed && !state.failed && ended.is_some_and(|ended| now.duration_since(ended) >= LEFT_POD_TIME)
}

/// Returns true for the target of a migration that has not ended, as long as the guest has not moved to it.
pub(super) fn is_target(observed: &Observed, pod: &CachedPod) -> bool {
    let instance = &*observed.instance;
    let state = instance.status.as_ref().and_then(|status| status.migration_state.as_ref());
    // virt-handler goes on with a migration whose object was removed by force.
    if let Some(state) = state.filter(|_| instance.is_handed_off())
        && state.target_pod == pod.metadata.name
    {
        return state.target_node.as_deref() != node_name(instance);
    }
    let is_of = |migration: &&Arc<VirtualMachineInstanceMigration>| is_target_of(pod, migration, instance);
    let is_named = |uid: Option<&String>| state.is_some_and(|state| state.migration_uid.as_ref() == uid);
    observed.migrations.iter().find(is_of).is_some_and(|migration| {
        let has_moved = state.is_some_and(|state| state.target_node.as_deref() == node_name(instance));
        !(is_named(migration.metadata.uid.as_ref()) && has_moved)
    })
}

/// Returns true if one of the pods may run the guest although none is on the node of the VMI: the guest has not started, or the
/// target of a migration has it and virt-handler has not recorded that.
pub(super) fn may_run_elsewhere(observed: &Observed) -> bool {
    may_have_moved(observed) || observed.pods.iter().any(|pod| !pod.is_down() && !is_target(observed, pod))
}

/// Returns true if the target of a migration may have the guest. If it does not, virt-handler of its node records that the migration
/// has failed.
pub(super) fn may_have_moved(observed: &Observed) -> bool {
    let state = observed.instance.status.as_ref().and_then(|status| status.migration_state.as_deref());
    // Once the address is published, the source may begin.
    let has_begun = |state: &VirtualMachineInstanceMigrationState| {
        (state.start_timestamp.is_some() || state.target_node_address.is_some()) && !state.failed && !state.completed
    };
    state.is_some_and(has_begun) && observed.pods.iter().any(|pod| !pod.is_down() && is_target(observed, pod))
}

/// Returns the pod that runs the VMI. Until its node is known, that is the newest. There is no second one beside a running one on
/// a node, except by mistake, so that the oldest that runs there is the one; of those that have ended, the last.
pub(crate) fn present_pod<'a>(instance: &VirtualMachineInstance, pods: &[&'a CachedPod]) -> Option<&'a CachedPod> {
    let created = |pod: &&CachedPod| pod.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let Some(node) = node_name(instance) else { return pods.iter().copied().max_by_key(created) };
    let there = || pods.iter().copied().filter(|pod| pod.node_name.as_deref() == Some(node));
    there().filter(|pod| !pod.is_down()).min_by_key(created).or_else(|| there().max_by_key(created))
}

/// Selects the TSC frequency of a VMI that needs one, before the pod is created, whose node selector depends on it. Returns
/// true when the pod can be created.
pub(super) fn choose_frequency(
    observed: &Observed,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<bool, SyncError> {
    let instance = &*observed.instance;
    let need = tsc::need(instance);
    if need == Need::Nothing || tsc::frequency(instance).is_some() {
        return Ok(true);
    }
    if observed.frequency.is_some() {
        let hints = wanted.status.get_or_insert_default().topology_hints.get_or_insert_default();
        hints.tsc_frequency = observed.frequency;
        return Ok(false);
    }
    // An emulated processor does not depend on the node.
    if need == Need::Migration || observed.config.use_emulation {
        return Ok(true);
    }
    // A node with a TSC wakes the VMI.
    let message = "no node that accepts VMIs reports the frequency of its time stamp counter".to_owned();
    if !shows(instance, NO_HINTS, &message) {
        let regarding = Kind::Instance.reference(&instance.metadata);
        decision.push(Effect::Event(Event::warning(regarding, NO_HINTS, message.clone())));
    }
    Err(SyncError { reason: NO_HINTS.to_owned(), message })
}

/// Selects the context ID of a VMI with a VSOCK device, before the pod is created: the launcher needs it. Returns true when
/// the pod can be created.
pub(super) fn choose_cid(
    observed: &Observed,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<bool, SyncError> {
    if !vsock::is_attached(&observed.instance) {
        return Ok(true);
    }
    let Some(cid) = observed.cid else {
        decision.wake(NO_CID_WAIT);
        let message = "no VSOCK context id was found to be free".to_owned();
        return Err(SyncError { reason: reason::FAILED_CREATE.to_owned(), message });
    };
    if vsock::cid(&observed.instance) == Some(cid) {
        return Ok(true);
    }
    wanted.status.get_or_insert_default().vsock_cid = Some(cid);
    Ok(false)
}

/// Returns what the launcher pod is rendered from.
pub(super) fn inputs<'a>(observed: &'a Observed) -> Inputs<'a> {
    Inputs {
        instance: &observed.instance,
        config: &observed.config,
        launcher_image: observed.launcher_images.of(&observed.instance.spec),
        claims: &observed.claims,
        limits: observed.limits,
        definitions: observed.definitions.as_ref(),
        state: None,
    }
}

/// Returns the error of a claim that does not exist. Its creation wakes the VMI. The event is emitted once per change of the condition.
fn missing_claim(observed: &Observed, claim: &str, decision: &mut Decision) -> SyncError {
    let metadata = &observed.instance.metadata;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    let message = format!("PVC {namespace}/{claim} does not exist, waiting for it to appear");
    if !shows(&observed.instance, reason::FAILED_PVC_NOT_FOUND, &message) {
        let regarding = Kind::Instance.reference(metadata);
        decision.push(Effect::Event(Event::normal(regarding, reason::FAILED_PVC_NOT_FOUND, message.clone())));
    }
    SyncError { reason: reason::FAILED_PVC_NOT_FOUND.to_owned(), message }
}

/// Returns the error of a claim whose DataVolume does not exist.
fn missing_data_volume(observed: &Observed, volume: &str, decision: &mut Decision) -> SyncError {
    let metadata = &observed.instance.metadata;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    let message = format!("Error determining if volume is ready: unable to find datavolume {namespace}/{volume}");
    if !shows(&observed.instance, event::FAILED_DATA_VOLUME_IMPORT, &message) {
        let regarding = Kind::Instance.reference(metadata);
        decision.push(Effect::Event(Event::warning(regarding, reason::FAILED_PVC_NOT_FOUND, message.clone())));
    }
    SyncError { reason: event::FAILED_DATA_VOLUME_IMPORT.to_owned(), message }
}

pub(super) fn create_pod(observed: &Observed, decision: &mut Decision) -> Result<Option<SyncError>, serde_json::Error> {
    let instance = &*observed.instance;
    let regarding = || Kind::Instance.reference(&instance.metadata);
    // The VM controller has created it in the instant in which the operation began.
    if let Some(lease) = &observed.held {
        return Ok(Some(SyncError { reason: vm_lease::OPERATION.to_owned(), message: vm_lease::awaited(lease) }));
    }
    let state = state::provide(observed, decision)?;
    let (render, of): (Render, Use<'_>) = match data_volumes::gate(observed) {
        Gate::Missing(claim) => return Ok(Some(missing_claim(observed, claim, decision))),
        Gate::Orphaned(volume) => return Ok(Some(missing_data_volume(observed, volume, decision))),
        Gate::Waits(_) | Gate::Failed(_) => return Ok(None),
        _ if !observed.temporary.is_empty() => return Ok(None),
        Gate::AwaitsConsumer(_) => (launcher_pod::render_temporary, Use::Binding),
        Gate::Open => (launcher_pod::render, Use::Start),
    };
    let state = match state {
        state::Gate::Open(state) => state,
        state::Gate::Closed(error) => return Ok(Some(error)),
    };
    let pod = match render(&Inputs { state: state.as_ref(), ..inputs(observed) }) {
        Ok(pod) => pod,
        Err(error) => {
            let (reason, message) = match error {
                RenderError::ContainerPathsDisabled(gate) => {
                    (event::CONTAINER_PATH_VOLUMES_DISABLED, format!("Cannot create pod: {gate}"))
                }
                other => (event::FAILED_CREATE, format!("failed to render launch manifest: {other}")),
            };
            if !shows(instance, reason, &message) {
                decision.push(Effect::Event(Event::warning(regarding(), reason, message.clone())));
            }
            return Ok(Some(SyncError { reason: reason.to_owned(), message }));
        }
    };
    let failure = observed.failures.of(event::FAILED_CREATE);
    if !decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
        let creation = Effect::create(Kind::Pod, instance.metadata.namespace.as_deref(), &pod)?;
        let forbidden = format!("failed to render launch manifest: {}", forbidden(&instance.metadata, "{error}"));
        let creation = creation.under(launcher_pod::pod_names(instance, of)).unless_secure(forbidden);
        decision.push(creation.reported(
            regarding(),
            (event::SUCCESSFUL_CREATE, "Created virtual machine pod {name}"),
            (event::FAILED_CREATE, "Error creating pod: {error}"),
        ));
    }
    Ok(failure.map(|failure| SyncError {
        reason: reason::FAILED_CREATE.to_owned(),
        message: refused(&instance.metadata, &failure.message),
    }))
}

/// Returns the message about a pod that the API server refused.
fn refused(instance: &ObjectMeta, error: &str) -> String {
    if error.contains(POD_SECURITY) {
        return forbidden(instance, error);
    }
    format!("failed to create virtual machine pod: {error}")
}

/// Returns the message about a pod that the Pod Security level of the namespace forbids, in the words of the reference.
fn forbidden(instance: &ObjectMeta, error: &str) -> String {
    let namespace = instance.namespace.as_deref().unwrap_or_default();
    let name = instance.name.as_deref().unwrap_or_default();
    format!("failed to create pod for vmi {namespace}/{name}, it needs a privileged namespace to run: {error}")
}

pub(super) fn delete_pods<'a>(observed: &Observed, pods: impl Iterator<Item = &'a CachedPod>, decision: &mut Decision) {
    let grace = launcher_pod::grace_of_pod(&observed.instance);
    // The grace period of a VMI can become shorter while its pod ends. kubelet keeps to it without virt-handler.
    let is_kept = |pod: &&CachedPod| match pod.metadata.deletion_timestamp {
        Some(_) => pod.metadata.deletion_grace_period_seconds.is_some_and(|seconds| seconds > grace),
        None => true,
    };
    for pod in pods.filter(is_kept) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        if decision.must_wait(&observed.failures, event::FAILED_DELETE, observed.now) {
            continue;
        }
        decision.push(Effect::delete(Kind::Pod, &pod.metadata).within(grace).reported(
            Kind::Instance.reference(&observed.instance.metadata),
            (event::SUCCESSFUL_DELETE, format!("Deleted virtual machine pod {name}")),
            (event::FAILED_DELETE, format!("Failed to delete virtual machine pod {name}")),
        ));
    }
}

/// Returns the error of a deleted VMI with a pod that the API server does not delete. With the next attempt it is over, or is renewed.
pub(super) fn undeleted(observed: &Observed) -> Option<SyncError> {
    let failure = observed.failures.of(event::FAILED_DELETE).filter(|failure| failure.blocks(observed.now))?;
    let is_left = observed.pods.iter().any(|pod| pod.metadata.deletion_timestamp.is_none());
    let message = format!("failed to delete pod: {}", failure.message);
    is_left.then(|| SyncError { reason: reason::FAILED_DELETE.to_owned(), message })
}

/// Removes pods that are being deleted and whose containers have all ended. kubelet removes a pod only after its volumes are
/// unmounted, 0.4 s later, and the VM of a restart cannot start before.
pub(super) fn remove_ended_pods(observed: &Observed, decision: &mut Decision) {
    let failed = observed.failures.of(event::FAILED_DELETE).is_some();
    let ended = |pod: &&Arc<CachedPod>| {
        let being_deleted = pod.metadata.deletion_timestamp.is_some() && !pod.has_finalizers;
        being_deleted && pod.all_ended && matches!(pod.phase.as_str(), "Succeeded" | "Failed")
    };
    // After a failure kubelet removes it.
    for pod in observed.pods.iter().filter(ended).filter(|_| !failed) {
        let regarding = Kind::Instance.reference(&observed.instance.metadata);
        let message = "Failed to remove an ended virtual machine pod: {error}";
        let delete = Effect::delete(Kind::Pod, &pod.metadata).at_once();
        decision.push(delete.on_failure(Event::warning(regarding, event::FAILED_DELETE, message)));
    }
}
