//! The target pod of a migration, and the pod that attaches the hot-plugged volumes to it.

use api::{
    MigrationPhase, VirtualMachineInstance,
    constants::{annotation, event, label},
};
use jiff::{SignedDuration, tz::TimeZone};
use serde_json::json;

use super::{Observed, RENDER_AGAIN, names, options::settings, seconds, state_claim};
use crate::{
    attachment_pod::{self, Attached},
    launcher_pod::{self, Inputs, Target, Use},
    resources::{attachments::CachedAttachment, pods::CachedPod},
    runtime::{Decision, Effect, Event, Kind},
    vmi::{leaving_volume, plugged_volumes},
};

/// Seconds after which an unschedulable pod is deleted.
const UNSCHEDULABLE_TIMEOUT: i64 = 300;
/// Seconds after which a pod that does not start is deleted.
pub(super) const PENDING_TIMEOUT: i64 = 900;
/// Format of the time in the annotation, as Go prints it.
const GO_TIME: &str = "%Y-%m-%d %H:%M:%S %z %Z";

/// Returns true if the target pod runs on its node.
pub(super) fn runs(observed: &Observed) -> bool {
    observed.target().is_some_and(|pod| {
        pod.phase == "Running" && pod.compute_running && !pod.is_going_down() && pod.node_name.is_some()
    })
}

/// Returns true for the target of an evacuation on a node that the VMI would have to leave, too, and so on without end. A VMI that
/// tolerates the taint gets there.
pub(super) fn is_no_refuge(observed: &Observed) -> bool {
    let annotations = observed.migration.metadata.annotations.as_ref();
    observed.is_target_drained
        && annotations.is_some_and(|annotations| annotations.contains_key(annotation::EVACUATION_MIGRATION))
}

/// Returns the pods that attach volumes to a launcher pod.
pub(super) fn attachments_of<'a>(
    observed: &'a Observed,
    pod: &'a CachedPod,
) -> impl Iterator<Item = &'a CachedAttachment> {
    observed.attachments.iter().map(AsRef::as_ref).filter(move |attachment| attachment.is_of(pod))
}

/// Returns the pod that attaches the volumes to the target pod: all that the source has by now.
pub(super) fn attachment(observed: &Observed) -> Option<&CachedAttachment> {
    let target = observed.target()?;
    let plugged = observed.vmi.as_deref().map(|vmi| plugged_volumes(vmi, &observed.attachments)).unwrap_or_default();
    let has_all = |attachment: &CachedAttachment| {
        plugged.iter().all(|volume| attachment.claims.get(volume.name).is_some_and(|claim| claim == volume.claim))
    };
    let usable =
        |attachment: &&CachedAttachment| attachment.answers && !attachment.is_deleting() && has_all(attachment);
    let usable = attachments_of(observed, target).filter(usable);
    usable.min_by_key(|attachment| attachment.metadata.creation_timestamp.as_ref().map(|at| at.0))
}

/// Returns true if the target pod has all volumes of the source. One that leaves the guest has to leave first.
pub(super) fn has_attachments(observed: &Observed, vmi: &VirtualMachineInstance) -> bool {
    let has_pod = || attachment(observed).is_some_and(|attachment| attachment.ready);
    leaving_volume(vmi).is_none() && (plugged_volumes(vmi, &observed.attachments).is_empty() || has_pod())
}

/// Creates the target pod and the pod that attaches its volumes, and deletes those that are not of use.
pub(super) fn provide(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    for surplus in observed.targets().into_iter().skip(1) {
        delete(observed, surplus, "surplus pod {pod} is deleted", decision);
    }
    let Some(target) = observed.target() else {
        let is_due = observed.is_admitted && observed.held.is_none() && vmi.spec.utility_volumes.is_empty();
        return if is_due { create(observed, vmi, decision) } else { Ok(()) };
    };
    if target.node_name.is_some() && target.node_name.as_deref() == crate::resources::vmis::node_name(vmi) {
        delete(observed, target, "pod {pod} on the node of the VMI is deleted", decision);
        return Ok(());
    }
    if is_no_refuge(observed) {
        delete(observed, target, "pod {pod} on a node that is being drained is deleted", decision);
        return Ok(());
    }
    if runs(observed) && !plugged_volumes(vmi, &observed.attachments).is_empty() && attachment(observed).is_none() {
        create_attachment(observed, vmi, target, decision)?;
    }
    limit_time(observed, vmi, target, decision);
    Ok(())
}

fn inputs<'a>(observed: &'a Observed, vmi: &'a VirtualMachineInstance) -> Inputs<'a> {
    Inputs {
        instance: vmi,
        config: &observed.config,
        launcher_image: observed.launcher_images.of(&vmi.spec),
        claims: &observed.claims,
        limits: observed.limits,
        definitions: observed.definitions.as_ref(),
        state: None,
    }
}

fn create(observed: &Observed, vmi: &VirtualMachineInstance, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let Some(source) = observed.source() else { return Ok(()) };
    if *observed.migration.phase() != MigrationPhase::Pending || observed.must_wait(event::FAILED_CREATE, decision) {
        return Ok(());
    }
    let regarding = || Kind::Instance.reference(&vmi.metadata);
    let uid = observed.migration.metadata.uid.as_deref().unwrap_or_default();
    let target = Target {
        migration: &observed.migration,
        source,
        source_node: observed.source_node.as_deref(),
        post_copy: settings(observed, vmi).switches_to_post_copy(),
    };
    let state = match state_claim::provide(observed, vmi, decision)? {
        state_claim::Gate::Open(state) => state,
        state_claim::Gate::Closed => return Ok(()),
    };
    // The words are those of the reference.
    let [namespace, name] =
        [&vmi.metadata.namespace, &vmi.metadata.name].map(|text| text.as_deref().unwrap_or_default());
    let forbidden = format!(
        "failed to render launch manifest: failed to create target pod for vmi {namespace}/{name}, \
         it needs a privileged namespace to run: {{error}}"
    );
    match launcher_pod::render_target(&Inputs { state: state.as_ref(), ..inputs(observed, vmi) }, &target) {
        Ok(pod) => decision.push(
            Effect::create(Kind::Pod, vmi.metadata.namespace.as_deref(), &pod)?
                .under(launcher_pod::pod_names(vmi, Use::Migration(uid)))
                .on_success(Event::normal(
                    observed.regarding(),
                    event::SUCCESSFUL_CREATE,
                    "Created migration target pod {name}",
                ))
                .on_failure(Event::warning(regarding(), event::FAILED_CREATE, "Error creating pod: {error}"))
                .unless_secure(forbidden),
        ),
        Err(error) => {
            let message = format!("failed to render launch manifest of the migration target: {error}");
            decision.push(Effect::Event(Event::warning(regarding(), event::FAILED_CREATE, message)));
            decision.wake(RENDER_AGAIN);
        }
    }
    Ok(())
}

fn create_attachment(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    target: &CachedPod,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    if observed.must_wait(event::FAILED_CREATE, decision) {
        return Ok(());
    }
    let volumes: Option<Vec<Attached<'_>>> = plugged_volumes(vmi, &observed.attachments)
        .into_iter()
        .map(|volume| {
            let claim = observed.claims.get(volume.claim)?;
            Some(Attached { name: volume.name, read_only: volume.read_only, claim })
        })
        .collect();
    // The source has the claim, so it exists. It is about to show.
    let Some(volumes) = volumes else {
        decision.wake(RENDER_AGAIN);
        return Ok(());
    };
    let pod = attachment_pod::render(&attachment_pod::Inputs {
        instance: vmi,
        launcher: target,
        migration: Some(&observed.migration.metadata),
        node: target.node_name.as_deref().unwrap_or_default(),
        config: &observed.config,
        image: observed.launcher_images.plain(),
        volumes: &volumes,
    });
    let regarding = || Kind::Instance.reference(&vmi.metadata);
    decision.push(
        Effect::create(Kind::Pod, vmi.metadata.namespace.as_deref(), &pod)?
            .on_success(Event::normal(observed.regarding(), event::SUCCESSFUL_CREATE, "Created attachment pod {name}"))
            .on_failure(Event::warning(regarding(), event::FAILED_CREATE, "Error creating attachment pod: {error}")),
    );
    Ok(())
}

/// Deletes a target pod. `{pod}` in the text stands for its name.
pub(super) fn delete(observed: &Observed, pod: &CachedPod, text: &str, decision: &mut Decision) {
    if pod.metadata.deletion_timestamp.is_some() || observed.must_wait(event::FAILED_DELETE, decision) {
        return;
    }
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    let name = format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
    let failed = "Error deleting canceled migration target pod: {error}";
    decision.push(Effect::delete(Kind::Pod, &pod.metadata).reported(
        observed.regarding(),
        (event::SUCCESSFUL_DELETE, text.replace("{pod}", &name)),
        (event::FAILED_DELETE, failed),
    ));
}

/// Deletes a target pod that does not start in time.
fn limit_time(observed: &Observed, vmi: &VirtualMachineInstance, pod: &CachedPod, decision: &mut Decision) {
    if pod.phase != "Pending" || pod.is_going_down() {
        return;
    }
    let Some(created) = pod.metadata.creation_timestamp.as_ref() else { return };
    let age = observed.now.duration_since(created.0);
    let limit = |key: &str, default: i64| SignedDuration::from_secs(seconds(observed, key).unwrap_or(default));
    let condition = pod.scheduled.as_ref();
    let is_unschedulable = condition.is_some_and(|condition| {
        condition.status == "False" && condition.reason.as_deref() == Some(api::constants::reason::UNSCHEDULABLE)
    });
    if is_unschedulable && !observed.is_reported {
        let (namespace, name) = names(vmi);
        let message = format!("Migration target pod for VMI [{namespace}/{name}] is currently unschedulable.");
        let reason = event::MIGRATION_TARGET_POD_UNSCHEDULABLE;
        decision.push(Effect::Event(Event::warning(observed.regarding(), reason, message)));
        report_host_model(observed, vmi, decision);
    }
    let pending = (limit(annotation::MIGRATION_PENDING_TIMEOUT, PENDING_TIMEOUT), "pending");
    let unschedulable = (limit(annotation::MIGRATION_UNSCHEDULABLE_TIMEOUT, UNSCHEDULABLE_TIMEOUT), "unschedulable");
    let (limit, word) = if is_unschedulable { pending.min(unschedulable) } else { pending };
    let left = limit.saturating_sub(age);
    if left > SignedDuration::ZERO {
        decision.wake(left.unsigned_abs());
    } else {
        delete(observed, pod, &format!("{word} pod {{pod}} timeout period exceeded"), decision);
    }
}

/// Reports that no other node has the CPU of a VMI with the host model.
fn report_host_model(observed: &Observed, vmi: &VirtualMachineInstance, decision: &mut Decision) {
    let model = vmi.spec.domain.cpu.as_ref().and_then(|cpu| cpu.model.as_deref()).unwrap_or_default();
    if !matches!(model, "" | "host-model") {
        return;
    }
    let is_of_cpu =
        |key: &&str| key.starts_with(label::CPU_MODEL_MIGRATION_PREFIX) || key.starts_with(label::CPU_FEATURE_PREFIX);
    let lacking: Vec<&str> = observed.unoffered.iter().map(String::as_str).filter(is_of_cpu).collect();
    if lacking.is_empty() {
        return;
    }
    let message = format!(
        "Migration cannot proceed since no node is suitable to run the required CPU model / required features: {}",
        lacking.join(", ")
    );
    let reason = event::NO_SUITABLE_NODES_FOR_HOST_MODEL_MIGRATION;
    decision.push(Effect::Event(Event::warning(Kind::Instance.reference(&vmi.metadata), reason, message)));
}

/// Records on the target pod when the guest ran there. Network plugins move the addresses of the guest then.
pub(super) fn mark_ready(observed: &Observed, decision: &mut Decision) {
    let Some(at) = observed.state().and_then(|state| state.target_node_domain_ready_timestamp.as_ref()) else { return };
    let Some(pod) = observed.target().filter(|pod| !pod.is_going_down()) else { return };
    let annotations = pod.metadata.annotations.as_ref();
    if annotations.is_some_and(|annotations| annotations.contains_key(annotation::MIGRATION_TARGET_READY)) {
        return;
    }
    let time = at.0.to_zoned(TimeZone::UTC).strftime(GO_TIME).to_string();
    let patch = json!({"metadata": {"annotations": {annotation::MIGRATION_TARGET_READY: time}}});
    decision.push(Effect::merge(Kind::Pod, &pod.metadata, patch).of_any_version());
}
