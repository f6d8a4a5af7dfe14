//! The memory of a guest in a claim: the request to save it, the wait for it before a start, and its phases. Pure.
//!
//! ```text
//!   Requested ──(claim mounted)──> Saving ──(domain ended as saved)──> Saved
//!       │                            └──(failed, or never begun)─────> SaveFailed
//!       └──(not supported, or given up by virt-controller)───────────────┘
//!   Restoring ──(file marked, guest runs)──> Restored
//! ```
//! The launcher is asked only once `Saving` is in the API server. virt-controller gives up only what is `Requested`; both write on
//! condition of the version that they have read. What is `Saving` is given up here: if the launcher has refused the last request, or got
//! none, it saves nothing later.
//! `Saved` is written together with the final phase of the VMI, so that no VMI has ended whose memory might be saved.

use std::time::Duration;

use api::{SavedMemoryPhase as Phase, VirtualMachineInstance, hibernation, vmi::status::SavedMemory};
use protocol::{LauncherState, Lifecycle, MemoryFile, SaveMemoryRequest, features::Feature};

use super::{
    awaited_save::{Asked, AwaitedSave},
    observed::{Link, Now, Observed},
    phase::simplified,
};
use crate::{launcher::bounded, volumes::Content};

/// The message for a launcher of an older release.
const NOT_SUPPORTED: &str = "virt-launcher does not support saved memory";

/// Time within which the launcher must begin a save: the VM holds its lease.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

impl Observed {
    /// Notes since when the launcher has not begun a save.
    pub(super) fn note_save(&mut self, now: Now) {
        let known = self.awaited_save.take();
        let report = self.report.as_ref().filter(|_| self.domain().is_alive());
        let memory = in_phase(&self.vmi, &Phase::Saving);
        let is_awaited = report.zip(memory).is_some_and(|(report, memory)| !is_begun(report, memory));
        let new = || AwaitedSave { since: now.since_start, asked: Asked::Never };
        self.awaited_save = is_awaited.then(|| known.unwrap_or_else(new));
    }

    /// Notes a request to save the memory.
    pub(super) fn note_save_request(&mut self) {
        self.note_asked(Asked::Open);
    }

    /// Notes the refusal of that request.
    pub(super) fn note_save_refusal(&mut self, message: &str) {
        self.note_asked(Asked::Refused(message.to_owned()));
    }

    fn note_asked(&mut self, asked: Asked) {
        if let Some(awaited) = &mut self.awaited_save {
            awaited.asked = asked;
        }
    }
}

/// Returns the time after which no save is begun. `None`: the launcher has begun, or may begin.
pub(super) fn ends_at(observed: &Observed) -> Option<Duration> {
    let awaited = observed.awaited_save.as_ref().filter(|awaited| awaited.asked != Asked::Open)?;
    Some(awaited.since.saturating_add(PATIENCE))
}

/// Returns the time at which a save that the launcher has not begun is given up: the launcher must have reported over this connection.
pub(super) fn given_up_at(observed: &Observed) -> Option<Duration> {
    ends_at(observed).filter(|_| observed.reported && matches!(observed.link, Link::Up { .. }))
}

/// Returns why a save is given up.
fn overdue(observed: &Observed, memory: &SavedMemory, now: Now) -> Option<String> {
    given_up_at(observed).filter(|at| now.since_start >= *at)?;
    let text = format!("the save to PVC {} did not begin within five minutes", memory.claim_name);
    let is_paused = observed.report.as_ref().is_some_and(|report| report.lifecycle() == Lifecycle::Paused);
    Some(match &observed.awaited_save.as_ref()?.asked {
        _ if is_paused => format!("{text}: the guest is paused"),
        Asked::Refused(message) => format!("{text}: {message}"),
        Asked::Never | Asked::Open => text,
    })
}

/// Returns the saved memory of a VMI, if its file has a valid name.
fn memory_of(vmi: &VirtualMachineInstance) -> Option<&SavedMemory> {
    let memory = vmi.status.as_ref()?.hibernation.as_ref()?;
    hibernation::is_file_name(&memory.file_name).then_some(memory)
}

fn in_phase<'a>(vmi: &'a VirtualMachineInstance, phase: &Phase) -> Option<&'a SavedMemory> {
    memory_of(vmi).filter(|memory| memory.phase == *phase)
}

/// Returns what the launcher gets of the claim; `None` when the memory is not needed any more.
pub(super) fn content(vmi: &VirtualMachineInstance) -> Option<Content> {
    let memory = memory_of(vmi)?;
    let file = memory.file_name.clone();
    match memory.phase {
        Phase::Requested | Phase::Saving => Some(Content::Memory { file, is_new: true }),
        Phase::Restoring => Some(Content::Memory { file, is_new: false }),
        _ => None,
    }
}

/// Returns true while the launcher writes memory to the volume.
pub(super) fn is_written(report: &LauncherState, volume: &str) -> bool {
    report.memory_save.as_ref().is_some_and(|save| save.volume == volume && !save.ended)
}

fn is_supported(link: &Link) -> Option<bool> {
    match link {
        Link::Up { greeted: true, features, .. } => Some(features.contains(&Feature::MemorySave)),
        Link::Up { .. } | Link::Down { .. } => None,
    }
}

fn is_mounted(observed: &Observed, memory: &SavedMemory) -> bool {
    observed.volumes.as_ref().is_some_and(|state| state.volumes.mounted.contains(&memory.claim_name))
}

fn is_of(file: &MemoryFile, memory: &SavedMemory) -> bool {
    file.volume == memory.claim_name && file.file == memory.file_name
}

/// Returns true if the launcher saves the memory, or has tried to.
fn is_begun(report: &LauncherState, memory: &SavedMemory) -> bool {
    report.memory_save.as_ref().is_some_and(|save| is_of(save, memory))
}

/// Returns the request to save the memory, if the launcher has not got it.
pub(super) fn request(observed: &Observed) -> Option<SaveMemoryRequest> {
    let memory = in_phase(&observed.vmi, &Phase::Saving)?;
    let report = observed.report.as_ref().filter(|_| observed.domain().is_alive())?;
    (is_supported(&observed.link) == Some(true) && is_mounted(observed, memory) && !is_begun(report, memory))
        .then(|| SaveMemoryRequest { volume: memory.claim_name.clone(), file: memory.file_name.clone() })
}

/// Returns true if a start waits for the memory from which the guest continues. It never starts without.
pub(super) fn delays_start(observed: &Observed) -> bool {
    in_phase(&observed.vmi, &Phase::Restoring)
        .is_some_and(|memory| is_supported(&observed.link) != Some(true) || !is_mounted(observed, memory))
}

/// Returns why a guest cannot be started from saved memory.
pub(super) fn obstacle(observed: &Observed) -> Option<&'static str> {
    let is_refused = is_supported(&observed.link) == Some(false);
    (is_refused && in_phase(&observed.vmi, &Phase::Restoring).is_some()).then_some(NOT_SUPPORTED)
}

/// Updates the saved memory in the status.
pub(super) fn apply(memory: Option<&mut SavedMemory>, observed: &Observed, now: Now) {
    let (Some(memory), Some(report)) = (memory, &observed.report) else { return };
    match memory.phase {
        Phase::Requested => match is_supported(&observed.link) {
            // The launcher saves no paused guest.
            Some(true) if report.lifecycle() == Lifecycle::Running && is_mounted(observed, memory) => {
                memory.phase = Phase::Saving;
            }
            Some(false) => (memory.phase, memory.message) = (Phase::SaveFailed, Some(NOT_SUPPORTED.to_owned())),
            _ => {}
        },
        Phase::Saving => {
            let ended = report.memory_save.as_ref().filter(|save| save.ended && is_of(save, memory));
            let has_saved = report.lifecycle() == Lifecycle::Shutoff && simplified(&report.reason) == "saved";
            let failure = ended.map(|save| bounded(&save.failure)).filter(|failure| !failure.is_empty());
            let unsupported = || (is_supported(&observed.link) == Some(false)).then(|| NOT_SUPPORTED.to_owned());
            if has_saved {
                memory.phase = Phase::Saved;
            } else if let Some(failure) = failure.or_else(unsupported).or_else(|| overdue(observed, memory, now)) {
                (memory.phase, memory.message) = (Phase::SaveFailed, Some(failure));
            }
        }
        Phase::Restoring => {
            let is_restored = |file: &MemoryFile| file.ended && is_of(file, memory);
            if report.memory_restore.as_ref().is_some_and(is_restored) {
                memory.phase = Phase::Restored;
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::vmi::launcher_volumes::LauncherVolumes;

    fn observed(phase: &str, lifecycle: Lifecycle, reason: &str) -> Observed {
        let memory = json!({"claimName": "c", "fileName": "v-1.memory.save", "phase": phase});
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": {"name": "v", "uid": "u"},
            "spec": {"domain": {"devices": {}}, "volumes": [{"name": "c", "memoryDump": {"claimName": "c"}}]},
            "status": {"phase": "Running", "nodeName": "n", "hibernation": memory},
        }))
        .unwrap();
        let mut observed = Observed::new(Arc::new(vmi), "n");
        let mut report = LauncherState { reason: reason.into(), ..LauncherState::default() };
        report.set_lifecycle(lifecycle);
        observed.report = Some(report);
        observed
    }

    fn connected(features: &[Feature]) -> Link {
        Link::Up {
            connection: 1,
            greeted: true,
            networked: true,
            synced: None,
            results_from: 0,
            features: features.iter().copied().collect(),
        }
    }

    fn file(ended: bool, failure: &str) -> MemoryFile {
        MemoryFile { volume: "c".into(), file: "v-1.memory.save".into(), ended, failure: failure.into() }
    }

    fn after(seconds: u64) -> Now {
        Now { since_start: Duration::from_secs(seconds), wall: jiff::Timestamp::UNIX_EPOCH }
    }

    #[test]
    fn phases_follow_the_launcher() {
        use Lifecycle::{Paused, Running, Shutoff};
        let now = after(0);
        // Phase, domain, what was saved and restored, and the phase after.
        for (phase, domain, saved, restored, after) in [
            ("Saving", (Running, "booted"), None, None, "Saving"),
            ("Saving", (Paused, "save"), Some(file(false, "")), None, "Saving"),
            ("Saving", (Running, "saveCanceled"), Some(file(true, "full")), None, "SaveFailed"),
            // The domain has not been read since.
            ("Saving", (Paused, "save"), Some(file(true, "")), None, "Saving"),
            ("Saving", (Shutoff, "saved"), Some(file(true, "")), None, "Saved"),
            // The worker was restarted.
            ("Saving", (Shutoff, "saved"), None, None, "Saved"),
            ("Saving", (Shutoff, "crashed"), Some(file(true, "ended")), None, "SaveFailed"),
            // The file was not written to its storage.
            ("Saving", (Shutoff, "failed"), Some(file(true, "input/output error")), None, "SaveFailed"),
            ("Restoring", (Paused, "migration"), None, None, "Restoring"),
            ("Restoring", (Running, "unpaused"), None, Some(file(true, "")), "Restored"),
            ("Restored", (Shutoff, "saved"), None, Some(file(true, "")), "Restored"),
        ] {
            let mut observed = observed(phase, domain.0, domain.1);
            let report = observed.report.as_mut().unwrap();
            (report.memory_save, report.memory_restore) = (saved.clone(), restored);
            let mut status = observed.vmi.status.clone().unwrap();
            apply(status.hibernation.as_mut(), &observed, now);
            assert_eq!(status.hibernation.unwrap().phase.as_str(), after, "{phase} {domain:?} {saved:?}");
        }
    }

    #[test]
    fn memory_is_saved_and_restored_in_its_volume_only() {
        let mut saving = observed("Saving", Lifecycle::Running, "booted");
        let mut restoring = observed("Restoring", Lifecycle::NoDomain, "");
        assert_eq!(request(&saving), None, "not connected");
        saving.link = connected(&[Feature::MemorySave]);
        restoring.link = connected(&[Feature::MemorySave]);
        assert_eq!(request(&saving), None, "not mounted");
        assert!(delays_start(&restoring));
        let mut volumes = LauncherVolumes::default();
        volumes.volumes.mounted.insert("c".into());
        (saving.volumes, restoring.volumes) = (Some(volumes.clone()), Some(volumes));
        assert!(request(&saving).is_some() && request(&restoring).is_none());
        assert!(!delays_start(&restoring) && !delays_start(&saving));
        assert_eq!(content(&restoring.vmi), Some(Content::Memory { file: "v-1.memory.save".into(), is_new: false }));
        saving.report.as_mut().unwrap().memory_save = Some(file(true, "full"));
        assert_eq!(request(&saving), None, "it was asked for");
        restoring.link = connected(&[]);
        assert!(delays_start(&restoring));
        assert_eq!(obstacle(&restoring), Some(NOT_SUPPORTED));
    }

    #[test]
    fn save_that_the_launcher_does_not_begin_is_given_up() {
        let refused = || Asked::Refused("the domain is busy".to_owned());
        let late = "the save to PVC c did not begin within five minutes";
        // The last request, the domain, its save, the time; the message of the failure.
        for (asked, lifecycle, saved, seconds, message) in [
            (Asked::Never, Lifecycle::Running, None, 309, None),
            (Asked::Never, Lifecycle::Running, None, 310, Some(late.to_owned())),
            (refused(), Lifecycle::Running, None, 309, None),
            (refused(), Lifecycle::Running, None, 310, Some(format!("{late}: the domain is busy"))),
            (refused(), Lifecycle::Paused, None, 310, Some(format!("{late}: the guest is paused"))),
            // The launcher may begin.
            (Asked::Open, Lifecycle::Running, None, 400, None),
            (refused(), Lifecycle::Paused, Some(file(false, "")), 400, None),
            (refused(), Lifecycle::Shutoff, None, 400, None),
        ] {
            let mut observed = observed("Saving", lifecycle, "");
            (observed.link, observed.reported) = (connected(&[Feature::MemorySave]), true);
            observed.note_save(after(10));
            match &asked {
                Asked::Never => {}
                Asked::Open => observed.note_save_request(),
                Asked::Refused(message) => observed.note_save_refusal(message),
            }
            observed.report.as_mut().unwrap().memory_save = saved.clone();
            observed.note_save(after(20));
            let mut status = observed.vmi.status.clone().unwrap();
            apply(status.hibernation.as_mut(), &observed, after(seconds));
            let memory = status.hibernation.unwrap();
            assert_eq!(memory.message, message, "{asked:?} {lifecycle:?} {saved:?} {seconds}");
            assert_eq!(memory.phase == Phase::SaveFailed, message.is_some(), "{asked:?} {lifecycle:?} {seconds}");
        }
        // The state of a former connection tells nothing about the present one.
        let mut observed = observed("Saving", Lifecycle::Running, "");
        observed.note_save(after(10));
        assert_eq!((given_up_at(&observed), ends_at(&observed)), (None, Some(Duration::from_secs(310))));
        (observed.link, observed.reported) = (connected(&[Feature::MemorySave]), true);
        assert_eq!(given_up_at(&observed), Some(Duration::from_secs(310)));
    }

    #[test]
    fn save_begins_once_its_claim_is_mounted_and_the_object_says_so() {
        let now = after(0);
        // Features of the launcher, its mounts, the domain; the phase after.
        for (supported, mounted, lifecycle, after) in [
            (None, true, Lifecycle::Running, "Requested"),
            (Some(true), false, Lifecycle::Running, "Requested"),
            (Some(true), true, Lifecycle::Shutoff, "Requested"),
            (Some(true), true, Lifecycle::Paused, "Requested"),
            (Some(true), true, Lifecycle::Running, "Saving"),
            (Some(false), true, Lifecycle::Running, "SaveFailed"),
        ] {
            let mut observed = observed("Requested", lifecycle, "booted");
            assert_eq!(content(&observed.vmi), Some(Content::Memory { file: "v-1.memory.save".into(), is_new: true }));
            if let Some(supported) = supported {
                observed.link = connected(if supported { &[Feature::MemorySave] } else { &[] });
            }
            let mut volumes = LauncherVolumes::default();
            volumes.volumes.mounted.extend(mounted.then(|| "c".to_owned()));
            observed.volumes = Some(volumes);
            let mut status = observed.vmi.status.clone().unwrap();
            apply(status.hibernation.as_mut(), &observed, now);
            assert_eq!(status.hibernation.unwrap().phase.as_str(), after, "{supported:?} {mounted} {lifecycle:?}");
            // virt-controller may have given it up since the object was read.
            assert_eq!(request(&observed), None);
        }
    }
}
