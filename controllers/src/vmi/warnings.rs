//! Causes for which a launcher pod does not start: its state, or its events, which are read when a normal start would be over, and
//! rarely.

use api::{
    VirtualMachineInstance,
    constants::{condition, event},
};
use jiff::SignedDuration;

use super::Observed;
use crate::{
    resources::{
        pod_warnings::{self, PodWarning},
        pods::CachedPod,
    },
    runtime::{Decision, Effect, Event, Kind},
};

/// Reasons for which a container does not start, and which do not pass by themselves.
pub(super) const STUCK: &[&str] = &[
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];
/// Age of a pod that should have started. The API server reads all events of the namespace for each list, so that no pod of a burst
/// of starts should get there.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);

/// Returns reason and message of a container that does not start.
pub(super) fn stuck(pod: &CachedPod) -> Option<(&str, &str)> {
    let (reason, message) = pod.waiting.as_ref()?;
    STUCK.contains(&reason.as_str()).then_some((reason, message))
}

/// Returns the outcome of the last read of the events of a pod.
pub(super) fn of<'a>(observed: &'a Observed, pod: &CachedPod) -> Option<&'a PodWarning> {
    observed.warnings.iter().map(AsRef::as_ref).find(|warning| warning.metadata.uid == pod.metadata.uid)
}

/// Reads the events of pods that do not start and do not say why.
pub(super) fn read(observed: &Observed, decision: &mut Decision) {
    for pod in observed.pods.iter().filter(|pod| pod.is_starting() && stuck(pod).is_none()) {
        let metadata = &pod.metadata;
        let (Some(created), Some(name), Some(uid)) = (&metadata.creation_timestamp, &metadata.name, &metadata.uid)
        else {
            continue;
        };
        let left = match of(observed, pod) {
            Some(known) => known.read_again_after(created.0) - observed.now.duration_since(known.read_at),
            None => PATIENCE - observed.now.duration_since(created.0),
        };
        if left > SignedDuration::ZERO {
            decision.wake(left.unsigned_abs());
            continue;
        }
        decision.wake(pod_warnings::SHORTEST_INTERVAL.unsigned_abs());
        decision.push(Effect::ReadWarnings {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            pod: name.clone(),
            uid: uid.clone(),
        });
    }
}

/// Returns the event of a cause that is new or has another text. A warning about a pod often passes, and KubeVirt's functional tests
/// give up at any event of type Warning about a VMI that starts. A rejected pod is final.
pub(super) fn event(former: &VirtualMachineInstance, wanted: &VirtualMachineInstance) -> Option<Effect> {
    let shown = wanted.condition(condition::SYNCHRONIZED)?;
    let reason = shown.reason.as_deref()?;
    let is_rejected = reason == event::POD_REJECTED;
    let reason = if is_rejected { event::POD_REJECTED } else { pod_warnings::known(reason)? };
    if former.condition(condition::SYNCHRONIZED).is_some_and(|former| former.says_same(shown)) {
        return None;
    }
    let regarding = Kind::Instance.reference(&former.metadata);
    let message = shown.message.clone()?;
    Some(Effect::Event(if is_rejected {
        Event::warning(regarding, reason, message)
    } else {
        Event::normal(regarding, reason, message)
    }))
}
