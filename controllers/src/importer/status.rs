//! The status of a DataVolume: phase, progress, restarts and conditions as CDI has them, and the events about changes.

use api::cdi::{DataVolume, DataVolumeCondition, DataVolumeStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::runtime::{Effect, Event, Kind};

/// Progress that is not known.
const UNKNOWN: &str = "N/A";

/// Phases of DataVolumes.
pub(crate) mod phase {
    /// Not looked at yet, or the claim cannot be rendered.
    pub(crate) const NONE: &str = "";
    /// It has no claim that is bound.
    pub(crate) const PENDING: &str = "Pending";
    /// The claim is bound once a pod uses it.
    pub(crate) const FIRST_CONSUMER: &str = "WaitForFirstConsumer";
    /// The import pod waits.
    pub(crate) const SCHEDULED: &str = "ImportScheduled";
    /// The import pod runs.
    pub(crate) const IN_PROGRESS: &str = "ImportInProgress";
    /// The claim is filled.
    pub(crate) const SUCCEEDED: &str = "Succeeded";
    /// The claim is never filled.
    pub(crate) const FAILED: &str = "Failed";
}

/// Reasons of conditions.
pub(crate) mod reason {
    /// The claim is bound.
    pub(crate) const BOUND: &str = "Bound";
    /// The claim is not bound.
    pub(crate) const PENDING: &str = "Pending";
    /// The volume of the claim is lost.
    pub(crate) const LOST: &str = "ClaimLost";
    /// There is no claim.
    pub(crate) const NOT_FOUND: &str = "NotFound";
    /// A quota refuses the claim or the pod.
    pub(crate) const QUOTA: &str = "ErrExceededQuota";
    /// The claim cannot be rendered, or is refused.
    pub(crate) const CLAIM_NOT_VALID: &str = "ErrClaimNotValid";
    /// No CSI driver fills the claim from the object that it names.
    pub(crate) const NO_DRIVER: &str = "NoCSIDriverForExternalPopulation";
    /// An object of somebody else has the name.
    pub(crate) const EXISTS: &str = "ErrResourceExists";
    /// The object of the name is being deleted.
    pub(crate) const DELETING: &str = "ErrResourceMarkedForDeletion";
    /// The pod runs.
    pub(crate) const RUNNING: &str = "Pod is running";
    /// The pod has filled the claim.
    pub(crate) const COMPLETED: &str = "Completed";
    /// The import fails.
    pub(crate) const ERROR: &str = "Error";
    /// The image cannot be pulled.
    pub(crate) const IMAGE_PULL: &str = "ImagePullFailed";
    /// No node takes the pod.
    pub(crate) const UNSCHEDULABLE: &str = "Unschedulable";
    /// The pod cannot be created.
    pub(crate) const POD: &str = "ErrStartingPod";
    /// The pod runs, in condition Ready.
    pub(crate) const TRANSFER: &str = "TransferRunning";
    /// The file has another checksum.
    pub(crate) const CHECKSUM: &str = "ChecksumError";
}

/// A condition without its times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fact {
    /// It is true.
    pub holds: bool,
    /// Its reason.
    pub reason: String,
    /// Its message.
    pub message: String,
}

impl Fact {
    /// Returns a condition that is true.
    pub(crate) fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self { holds: true, reason: reason.to_owned(), message: message.into() }
    }

    /// Returns a condition that is false.
    pub(crate) fn no(reason: &str, message: impl Into<String>) -> Self {
        Self { holds: false, reason: reason.to_owned(), message: message.into() }
    }
}

/// The state of a DataVolume as its status shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Its phase.
    pub phase: &'static str,
    /// Condition Bound.
    pub bound: Fact,
    /// Condition Running. `None`: as before.
    pub running: Option<Fact>,
    /// Progress. `None`: as before.
    pub progress: Option<String>,
    /// Restarts of the import pod that exists.
    pub restarts: i32,
    /// The claim exists.
    pub has_claim: bool,
}

/// Returns the text of a progress in percent.
pub(crate) fn percent(percent: f64) -> String {
    format!("{:.2}%", percent.clamp(0.0, 100.0))
}

/// Returns the status that shows a state.
pub(crate) fn status(volume: &DataVolume, shown: &Shown, now: Timestamp) -> DataVolumeStatus {
    let former = volume.status.clone().unwrap_or_default();
    let is_done = shown.phase == phase::SUCCEEDED;
    let running = shown.running.clone().unwrap_or_else(|| fact(&former.conditions, "Running"));
    let transfers = if running.holds { reason::TRANSFER } else { &running.reason };
    let ready = Fact {
        holds: is_done,
        reason: if is_done { String::new() } else { transfers.to_owned() },
        message: String::new(),
    };
    let progress = match &shown.progress {
        _ if is_done => "100.0%".to_owned(),
        Some(progress) => progress.clone(),
        None => former.progress.clone().unwrap_or_else(|| UNKNOWN.to_owned()),
    };
    let wanted = [("Bound", shown.bound.clone()), ("Running", running), ("Ready", ready)];
    DataVolumeStatus {
        claim_name: shown.has_claim.then(|| volume.metadata.name.clone().unwrap_or_default()),
        phase: Some(shown.phase.into()),
        progress: Some(progress),
        restart_count: Some(former.restart_count.unwrap_or_default().max(shown.restarts)),
        conditions: wanted.into_iter().map(|(type_, fact)| condition(&former.conditions, type_, fact, now)).collect(),
    }
}

/// Returns a condition without its times.
fn fact(conditions: &[DataVolumeCondition], type_: &str) -> Fact {
    let known = conditions.iter().find(|condition| condition.type_ == type_);
    known.map_or_else(Fact::default, |known| Fact {
        holds: known.status == "True",
        reason: known.reason.clone().unwrap_or_default(),
        message: known.message.clone().unwrap_or_default(),
    })
}

/// Returns a condition. One that is not changed keeps its times.
pub(super) fn condition(
    former: &[DataVolumeCondition],
    type_: &str,
    wanted: Fact,
    now: Timestamp,
) -> DataVolumeCondition {
    let status = if wanted.holds { "True" } else { "False" };
    let known = former.iter().find(|condition| condition.type_ == type_);
    if let Some(known) = known
        && known.status == status
        && fact(former, type_) == wanted
    {
        return known.clone();
    }
    let now = Some(Time(now));
    let changed = known.filter(|known| known.status == status).and_then(|known| known.last_transition_time.clone());
    DataVolumeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(wanted.reason).filter(|reason| !reason.is_empty()),
        message: Some(wanted.message).filter(|message| !message.is_empty()),
        last_transition_time: changed.or_else(|| now.clone()),
        last_heartbeat_time: now,
    }
}

/// Returns the events about the change to a state.
pub(crate) fn events(volume: &DataVolume, shown: &Shown) -> Vec<Effect> {
    let former = volume.status.clone().unwrap_or_default();
    let mut events = Vec::new();
    let about = || Kind::DataVolume.reference(&volume.metadata);
    let bound = &shown.bound;
    if fact(&former.conditions, "Bound") != *bound {
        let event = if is_error(&bound.reason) { Event::warning } else { Event::normal };
        events.extend(known(&bound.reason).map(|reason| event(about(), reason, bound.message.clone())));
    }
    if let Some(running) = &shown.running
        && !running.holds
        && is_error(&running.reason)
        && fact(&former.conditions, "Running") != *running
    {
        events.extend(known(&running.reason).map(|reason| Event::warning(about(), reason, running.message.clone())));
    }
    if volume.phase().as_str() != shown.phase {
        events.extend(told(volume, shown.phase).map(|(reason, message)| match shown.phase {
            phase::FAILED => Event::warning(about(), reason, message),
            _ => Event::normal(about(), reason, message),
        }));
    }
    events.into_iter().map(Effect::Event).collect()
}

/// Returns true for the reason of an error. Those of quotas are none, as with CDI: others may free them.
fn is_error(reason: &str) -> bool {
    let is_clone = reason.starts_with("Clone");
    let others = [reason::IMAGE_PULL, reason::UNSCHEDULABLE, reason::NO_DRIVER];
    reason != reason::QUOTA && (is_clone || reason.contains("Err") || others.contains(&reason))
}

/// Returns the reason of an event. Reasons of kubelet are shown in the condition only.
fn known(reason: &str) -> Option<&'static str> {
    const ALL: [&str; 19] = [
        reason::BOUND,
        reason::PENDING,
        reason::LOST,
        reason::NOT_FOUND,
        reason::QUOTA,
        reason::CLAIM_NOT_VALID,
        reason::NO_DRIVER,
        reason::EXISTS,
        reason::DELETING,
        reason::ERROR,
        reason::IMAGE_PULL,
        reason::UNSCHEDULABLE,
        reason::POD,
        reason::CHECKSUM,
        "CloneWithoutSource",
        "CloneValidationFailed",
        "CloneError",
        "CloneSourceInUse",
        "CloneNotPermitted",
    ];
    ALL.into_iter().find(|known| *known == reason)
}

/// Returns reason and message of the event about a phase.
fn told(volume: &DataVolume, phase: &'static str) -> Option<(&'static str, String)> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let is_clone = volume.spec.source.as_ref().is_some_and(|source| source.pvc.is_some() || source.snapshot.is_some());
    let done = |import, clone| if is_clone { clone } else { import };
    Some(match phase {
        phase::NONE => return None,
        phase::PENDING => (phase, format!("PVC {name} Pending")),
        phase::FIRST_CONSUMER => (phase, format!("PVC {name} Pending and waiting for the first consumer")),
        phase::SCHEDULED => (phase, format!("Import into {name} scheduled")),
        phase::IN_PROGRESS => (phase, format!("Import into {name} in progress")),
        phase::SUCCEEDED if is_clone => ("CloneSucceeded", format!("Successfully cloned into PVC {name}")),
        phase::SUCCEEDED => ("ImportSucceeded", format!("Successfully imported into PVC {name}")),
        phase::FAILED => (done("ImportFailed", "CloneFailed"), format!("Failed to fill PVC {name}")),
        other => (other, format!("Clone into PVC {name}")),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volume(status: Value) -> DataVolume {
        let object = json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "metadata": {"name": "d", "namespace": "n", "uid": "u"}, "spec": {}, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn shown(phase: &'static str, running: Option<Fact>) -> Shown {
        Shown { phase, bound: Fact::yes(reason::BOUND, "PVC d Bound"), running, has_claim: true, ..Shown::default() }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    #[test]
    fn condition_keeps_its_times_until_it_changes() {
        let scheduled = shown(phase::SCHEDULED, Some(Fact::no("ContainerCreating", "")));
        let first = status(&volume(json!(null)), &scheduled, at(1));
        assert_eq!((first.progress.as_deref(), first.claim_name.as_deref()), (Some("N/A"), Some("d")));
        let known = volume(serde_json::to_value(&first).unwrap());
        assert_eq!(status(&known, &scheduled, at(2)), first);
        let runs = status(&known, &shown(phase::IN_PROGRESS, Some(Fact::yes(reason::RUNNING, ""))), at(3));
        let times = |status: &DataVolumeStatus, index: usize| status.conditions[index].last_transition_time.clone();
        assert_eq!(times(&runs, 0), Some(Time(at(1))));
        assert_eq!(times(&runs, 1), Some(Time(at(3))));
        // Another message is no transition.
        let other = shown(phase::SCHEDULED, Some(Fact::no("ErrImagePull", "m")));
        let other = status(&known, &other, at(4));
        assert_eq!(times(&other, 1), Some(Time(at(1))));
        assert_eq!(other.conditions[1].last_heartbeat_time, Some(Time(at(4))));
    }

    #[test]
    fn volume_is_ready_exactly_when_it_succeeded() {
        for (phase, running, ready) in [
            (phase::SUCCEEDED, Fact::no(reason::COMPLETED, "Import Complete"), ("True", None, "100.0%")),
            (phase::IN_PROGRESS, Fact::yes(reason::RUNNING, ""), ("False", Some("TransferRunning"), "N/A")),
            (phase::FAILED, Fact::no(reason::CHECKSUM, "m"), ("False", Some("ChecksumError"), "N/A")),
        ] {
            let status = status(&volume(json!(null)), &shown(phase, Some(running)), at(1));
            let last = &status.conditions[2];
            let found = (last.status.as_str(), last.reason.as_deref(), status.progress.as_deref().unwrap());
            assert_eq!(found, ready, "{phase}");
        }
    }

    #[test]
    fn restarts_are_not_forgotten_with_the_pod() {
        let known = volume(json!({"restartCount": 4, "progress": "12.50%", "phase": "ImportInProgress"}));
        let next = status(&known, &shown(phase::SCHEDULED, None), at(1));
        assert_eq!((next.restart_count, next.progress.as_deref()), (Some(4), Some("12.50%")));
        let more = Shown { restarts: 6, progress: Some(percent(50.0)), ..shown(phase::IN_PROGRESS, None) };
        let next = status(&known, &more, at(1));
        assert_eq!((next.restart_count, next.progress.as_deref()), (Some(6), Some("50.00%")));
    }

    #[test]
    fn changes_are_told_once() {
        let told = |volume: &DataVolume, shown: &Shown| -> Vec<(String, &str)> {
            let events = events(volume, shown).into_iter().map(|effect| match effect {
                Effect::Event(event) => (event.reason.to_owned(), event.event_type.as_str()),
                other => panic!("{other:?}"),
            });
            events.collect()
        };
        let quota = Shown { bound: Fact::no(reason::QUOTA, "q"), phase: phase::PENDING, ..Shown::default() };
        let new = volume(json!(null));
        let normal = |reason: &str| (reason.to_owned(), "Normal");
        let warning = |reason: &str| (reason.to_owned(), "Warning");
        assert_eq!(told(&new, &quota), [normal("ErrExceededQuota"), normal("Pending")]);
        let after = volume(serde_json::to_value(status(&new, &quota, at(1))).unwrap());
        assert_eq!(told(&after, &quota), []);
        let failing = shown(phase::IN_PROGRESS, Some(Fact::no(reason::ERROR, "no route")));
        assert_eq!(told(&after, &failing), [normal("Bound"), warning("Error"), normal("ImportInProgress")]);
        let failed = shown(phase::FAILED, Some(Fact::no(reason::CHECKSUM, "m")));
        assert_eq!(told(&after, &failed), [normal("Bound"), warning("ChecksumError"), warning("ImportFailed")]);
        let waits = shown(phase::SCHEDULED, Some(Fact::no("ContainerCreating", "")));
        assert_eq!(told(&after, &waits), [normal("Bound"), normal("ImportScheduled")]);
    }
}
