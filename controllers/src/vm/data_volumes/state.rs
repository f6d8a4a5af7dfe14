//! The state of one DataVolume, as far as it concerns a VM.

use std::time::Duration;

use api::{
    DataVolumePhase,
    cdi::{DataVolume, DataVolumeCondition},
};
use jiff::Timestamp;

/// Restarts and time after which an error of an import counts as one that does not go away by itself.
const RESTARTS: i32 = 2;
const PERSISTENCE: Duration = Duration::from_secs(30);
/// Characters of a message of CDI that are shown.
const SHOWN: usize = 512;
/// Steps of the progress that is shown: each step is a write of the VM's status.
const PROGRESS_STEP: u32 = 10;

/// Reason of a step that a quota refuses.
const QUOTA: &str = "ErrExceededQuota";
/// Reason of a clone whose source does not exist.
const NO_SOURCE: &str = "CloneWithoutSource";
/// Reason of a claim that names its content, which its storage class cannot provide.
const NO_DRIVER: &str = "NoCSIDriverForExternalPopulation";
/// Beginnings of the phases in which a pod or the storage fills the claim, or the content is handed over.
const FILLING: [&str; 6] = ["Import", "Clone", "CSIClone", "Rebind", "SnapshotForSmartClone", "PrepClaim"];

/// The state of a DataVolume.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
    /// The VM can start.
    Usable {
        /// It is bound for its first consumer and is filled soon.
        is_filled: bool,
    },
    /// It does not exist, but a claim of its name that it takes over.
    Adoptable,
    /// It does not exist.
    Missing,
    /// It is deleted, and with it data that the VM has used. An explicit start creates it again, unless it resumes.
    Lost,
    /// The cluster lacks the kind.
    Unserved,
    /// Another object controls it.
    Foreign(String),
    /// It is being bound or filled.
    Working(Work),
    /// It failed, or fails again and again.
    Failing(String),
}

/// A DataVolume that is being bound or filled.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Phase, progress and newest message.
    pub text: String,
    /// A pod fills it, or its content is handed over.
    pub fills: bool,
    /// It cannot go on until somebody acts.
    pub refusal: Option<Refusal>,
    /// Time after which it counts as failing.
    pub wake: Option<Duration>,
}

/// The cause why a DataVolume cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Refusal {
    pub is_quota: bool,
    /// The source of the clone does not exist.
    pub lacks_source: bool,
    pub message: String,
}

impl State {
    /// Returns the state of a DataVolume that waits for something else.
    pub(super) fn waits(text: &str) -> Self {
        Self::Working(Work { text: text.to_owned(), ..Work::default() })
    }

    /// Returns the text for condition DataVolumesReady. `None`: it is usable.
    pub(super) fn text(&self) -> Option<String> {
        Some(match self {
            Self::Usable { .. } | Self::Adoptable => return None,
            Self::Missing => "not created yet".to_owned(),
            Self::Lost => LOST.to_owned(),
            Self::Unserved => super::NOT_INSTALLED.to_owned(),
            Self::Foreign(text) | Self::Failing(text) => text.clone(),
            Self::Working(work) => work.text.clone(),
        })
    }

    /// Returns the error for condition Failure without its context.
    pub(super) fn error(&self, name: &str) -> Option<String> {
        Some(match self {
            Self::Lost => format!("DataVolume {name}: {LOST}"),
            Self::Unserved => format!("{}: {}", super::NOT_SERVED, super::NOT_INSTALLED),
            Self::Foreign(text) => {
                format!("failed to create DataVolume: datavolumes.cdi.kubevirt.io \"{name}\" already exists: {text}")
            }
            Self::Working(Work { refusal: Some(refusal), .. }) => {
                format!("DataVolume {name} importer is not running due to an error: {}", refusal.message)
            }
            _ => return None,
        })
    }
}

/// Text about a DataVolume that was deleted.
const LOST: &str = "it was deleted, and a new one has the content of its source without the changes of the VM; to create it, \
     stop the VM if it is set to run, and start it, with `kubectl virt start --discard` if it is hibernated";

/// Returns the state of a DataVolume that exists.
pub(super) fn of(data_volume: &DataVolume, now: Timestamp) -> State {
    let phase = data_volume.phase();
    match phase {
        DataVolumePhase::Succeeded | DataVolumePhase::PendingPopulation => return State::Usable { is_filled: false },
        DataVolumePhase::WaitForFirstConsumer => {
            return State::Usable {
                is_filled: data_volume.condition("Bound").is_some_and(|bound| bound.status == "True"),
            };
        }
        DataVolumePhase::Failed => return State::Failing(describe(data_volume)),
        _ => {}
    }
    let mut work = Work {
        text: describe(data_volume),
        fills: FILLING.iter().any(|start| phase.as_str().starts_with(start)),
        refusal: refusal(data_volume),
        wake: None,
    };
    let errors = ["Error", "ImagePullFailed"];
    let running = data_volume.condition("Running").filter(|running| running.status == "False");
    if let Some(running) = running.filter(|running| errors.contains(&reason(running))) {
        let since = running
            .last_transition_time
            .as_ref()
            .map_or(Duration::ZERO, |since| Duration::try_from(now.duration_since(since.0)).unwrap_or_default());
        let restarts = data_volume.status.as_ref().and_then(|status| status.restart_count).unwrap_or(0);
        match PERSISTENCE.checked_sub(since).filter(|left| !left.is_zero()) {
            Some(left) if restarts < RESTARTS => work.wake = Some(left),
            _ => return State::Failing(format!("repeated errors: {}", work.text)),
        }
    }
    State::Working(work)
}

fn reason(condition: &DataVolumeCondition) -> &str {
    condition.reason.as_deref().unwrap_or_default()
}

/// Returns the cause why a DataVolume cannot go on until somebody acts.
fn refusal(data_volume: &DataVolume) -> Option<Refusal> {
    let is = |type_: &str, reasons: &[&str]| {
        data_volume.condition(type_).filter(|known| known.status != "True" && reasons.contains(&reason(known)))
    };
    let is_early = matches!(data_volume.phase(), DataVolumePhase::Unset | DataVolumePhase::Pending);
    let bound = is("Bound", &["ErrClaimNotValid", NO_SOURCE, NO_DRIVER, "CloneValidationFailed"]);
    let bound = bound.or_else(|| is("Bound", &[QUOTA]).filter(|_| is_early));
    let found = bound.or_else(|| is("Running", &[QUOTA, "ErrStartingPod"]))?;
    let is_quota = reason(found) == QUOTA;
    let mut message = shortened(found.message.as_deref().unwrap_or_default());
    if is_quota {
        message.push_str(" (an import can need the size of the DataVolume up to three times)");
    }
    Some(Refusal { is_quota, lacks_source: reason(found) == NO_SOURCE, message })
}

/// Returns phase, progress and the newest message of a DataVolume.
fn describe(data_volume: &DataVolume) -> String {
    let phase = data_volume.phase();
    let mut text = match phase {
        DataVolumePhase::Unset => "not processed yet".to_owned(),
        known => known.as_str().to_owned(),
    };
    let progress = data_volume.status.as_ref().and_then(|status| status.progress.as_deref());
    if let Some(percent) = progress.and_then(percent) {
        text.push_str(&format!(", {percent} %"));
    }
    let conditions = ["Bound", "Running"].into_iter().filter_map(|type_| data_volume.condition(type_));
    let told = conditions
        .filter(|known| known.status != "True" && known.message.as_ref().is_some_and(|text| !text.is_empty()));
    let newest = told.max_by_key(|known| known.last_transition_time.as_ref().map(|at| at.0));
    if let Some(message) = newest.and_then(|known| known.message.as_deref()) {
        text.push_str(": ");
        text.push_str(&shortened(message));
    }
    text
}

/// Returns the progress in steps.
fn percent(progress: &str) -> Option<u32> {
    let whole: u32 = progress.trim_end_matches('%').split('.').next()?.parse().ok()?;
    Some(whole / PROGRESS_STEP * PROGRESS_STEP).filter(|shown| (PROGRESS_STEP..=100).contains(shown))
}

fn shortened(message: &str) -> String {
    message.trim().chars().take(SHOWN).collect()
}
