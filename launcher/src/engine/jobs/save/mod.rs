//! The job that saves the guest's memory and ends the domain.
//!
//! ```text
//!   Recording -> Pausing -> Writing -> Checking -> done: the guest is saved, or has ended
//!                   │          │          ^
//!                   │          │          └── the domain has ended in any of these steps
//!                   └──────────┴──> Waiting -> Settling -> Discarding -> Resuming -> done: the guest goes on
//!   later worker:    Adopting ─────────^
//! ```
//! The guest is paused first, and runs again only after the file was emptied. A complete file thus belongs to a guest that has not run
//! since, and the end of the domain is that of a saved guest, whatever libvirt reports: its daemon may be killed once the file is complete,
//! and names another reason, or none, when it starts again. libvirt resumes only guests that it has paused itself when it starts again
//! (`qemuProcessRecoverJob`). The record lets a later worker continue.

use std::path::PathBuf;

use protocol::Lifecycle;
use tokio::time::Instant;

use super::{INTERVAL, Steps, is_repeated};
use crate::{
    engine::model::{Base, DomainCall, Effect, JobInput, RequestError, SaveRecord, Stage, Work},
    hypervisor::HypervisorError,
};

/// A save of the memory. The published state names it, also after its end.
#[derive(Clone, Debug)]
pub(crate) struct MemorySave {
    /// The file for the memory.
    path: PathBuf,
    step: Step,
}

/// A step. An empty `failure` is one after which virt-handler asks again.
#[derive(Clone, Debug)]
enum Step {
    /// Records the save for a later worker.
    Recording,
    /// Pauses the guest.
    Pausing,
    /// libvirt writes the guest's memory, and ends the domain.
    Writing,
    /// A former worker began the save: waits until the domain is found.
    Adopting,
    /// The save has failed. Waits for the next attempt to let the guest go on.
    Waiting { failure: String, at: Instant },
    /// Waits until libvirt does not write any more, also for a former worker.
    Settling { failure: String },
    /// Empties the file.
    Discarding { failure: String },
    /// Resumes the guest.
    Resuming { failure: String },
    /// The domain has ended, for this reason. Reads if the file is complete, and syncs it.
    Checking { reason: &'static str },
}

impl MemorySave {
    /// Begins to write the guest's memory to a file in a volume.
    pub(crate) fn begin(base: &mut Base, volume: String, file: String) -> Result<Self, RequestError> {
        // A paused guest would continue by itself when it is restored.
        if base.stage != Stage::Live || base.published.lifecycle() != Lifecycle::Running {
            return Err(RequestError::NoDomain);
        }
        // The launcher in which it continues would not thaw it.
        if base.published.file_systems == "frozen" {
            return Err(RequestError::Frozen);
        }
        base.check_link()?;
        let path = base.volume_file(&volume).ok_or_else(|| RequestError::NoVolume(volume.clone()))?;
        tracing::info!(volume, file, "saving the guest's memory");
        let record = SaveRecord { volume, file };
        base.published.memory_save = Some(record.report());
        base.work_for(Self::NAME, Work::RecordSave(Some(record)));
        Ok(Self { path, step: Step::Recording })
    }

    /// Continues the save of a former worker.
    pub(crate) fn adopted(base: &mut Base, record: &SaveRecord) -> Option<Self> {
        let path = base.volume_file(&record.volume)?;
        base.published.memory_save = Some(record.report());
        Some(Self { path, step: Step::Adopting })
    }

    fn at(self, step: Step) -> Self {
        Self { step, ..self }
    }

    fn on_recorded(self, base: &mut Base, result: Result<(), String>) -> Option<Self> {
        if let Err(error) = result {
            publish_end(base, &format!("cannot record the save of the guest's memory: {error}"));
            return None;
        }
        base.call_for(Self::NAME, DomainCall::Pause);
        Some(self.at(Step::Pausing))
    }

    fn write(self, base: &mut Base) -> Self {
        base.call_for(Self::NAME, DomainCall::SaveMemory(self.path.clone()));
        self.at(Step::Writing)
    }

    /// Decides on a save that has failed. libvirt's daemon may have ended, or write for a former worker.
    fn give_up(self, base: &mut Base, error: &HypervisorError, is_asked_again: bool) -> Self {
        tracing::warn!(%error, "the guest's memory was not saved");
        let failure = if is_asked_again { String::new() } else { format!("cannot save the guest's memory: {error}") };
        self.wait(base, failure)
    }

    /// Looks for the domain, and then tries to let the guest go on.
    fn wait(self, base: &mut Base, failure: String) -> Self {
        base.read();
        let at = base.now + INTERVAL;
        self.at(Step::Waiting { failure, at })
    }

    fn on_timer(self, base: &mut Base, failure: String) -> Self {
        if !base.has_read() {
            let at = base.now + INTERVAL;
            return self.at(Step::Waiting { failure, at });
        }
        // libvirt answers when it has ended what it does with the domain.
        base.call_for(Self::NAME, DomainCall::Pause);
        self.at(Step::Settling { failure })
    }

    fn discard(self, base: &mut Base, failure: String) -> Self {
        base.work_for(Self::NAME, Work::DiscardMemory(self.path.clone()));
        self.at(Step::Discarding { failure })
    }

    fn on_discarded(self, base: &mut Base, mut failure: String, result: Result<(), String>) -> Self {
        if let Err(error) = result {
            // A later worker must not take the file for that of a saved guest.
            base.work_for(Self::NAME, Work::RecordSave(None));
            failure = format!("cannot empty the file of the guest's memory: {error}");
        }
        base.call_for(Self::NAME, DomainCall::Resume);
        self.at(Step::Resuming { failure })
    }

    /// Ends a save after which the guest goes on.
    fn stay(base: &mut Base, failure: &str) {
        base.work_for(Self::NAME, Work::RecordSave(None));
        base.clock_is_late = true;
        // virt-handler may ask again before the domain is read.
        base.published.set_lifecycle(Lifecycle::Running);
        base.published.reason = "unpaused".into();
        if failure.is_empty() {
            base.published.memory_save = None;
        } else {
            publish_end(base, failure);
        }
        base.read();
    }

    /// Reads if the file of a domain that has ended is complete.
    fn check(self, base: &mut Base, reason: &'static str) -> Self {
        base.work_for(Self::NAME, Work::KeepMemory(self.path.clone()));
        self.at(Step::Checking { reason })
    }
}

impl Steps for MemorySave {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        let Self { path, step } = self;
        let at = |step| Self { path, step };
        Some(match (step, input) {
            (Step::Recording, JobInput::SaveRecorded(result)) => return at(Step::Recording).on_recorded(base, result),
            (Step::Pausing, JobInput::Paused(Ok(()))) => at(Step::Pausing).write(base),
            (step @ Step::Pausing, JobInput::Paused(Err(error))) => {
                at(step).give_up(base, &error, is_repeated(&error) || error.is_transient())
            }
            (step @ Step::Writing, JobInput::MemorySaved(Err(error))) => {
                at(step).give_up(base, &error, is_repeated(&error))
            }
            (step @ Step::Writing, JobInput::MemorySaved(Ok(()))) => at(step).check(base, SAVED),
            (Step::Waiting { failure, at: due }, JobInput::Timer) if due <= base.now => {
                at(Step::Adopting).on_timer(base, failure)
            }
            (Step::Settling { failure }, JobInput::Paused(Ok(()))) => at(Step::Adopting).discard(base, failure),
            (Step::Settling { failure }, JobInput::Paused(Err(error)))
            | (Step::Resuming { failure }, JobInput::Resumed(Err(error))) => {
                tracing::info!(%error, "the guest cannot go on yet");
                at(Step::Adopting).wait(base, failure)
            }
            (Step::Discarding { failure }, JobInput::MemoryDiscarded(result)) => {
                at(Step::Adopting).on_discarded(base, failure, result)
            }
            (Step::Resuming { failure }, JobInput::Resumed(Ok(()))) => {
                Self::stay(base, &failure);
                return None;
            }
            (Step::Checking { reason }, JobInput::MemoryKept(result)) => {
                end(base, reason, result);
                return None;
            }
            // The guest was not paused, or its file is emptied.
            (Step::Recording | Step::Discarding { .. } | Step::Resuming { .. }, JobInput::Gone(reason)) => {
                end(base, reason, Err(ENDED.to_owned()));
                return None;
            }
            (step @ Step::Checking { .. }, JobInput::Gone(_)) => at(step),
            (step, JobInput::Gone(reason)) => at(step).check(base, reason),
            (step, JobInput::Seen(_)) => {
                show_pause(base);
                match step {
                    Step::Adopting => at(Step::Adopting).wait(base, String::new()),
                    step => at(step),
                }
            }
            (
                step,
                JobInput::Timer
                | JobInput::Connected
                | JobInput::Read
                | JobInput::Abort(_)
                | results_of!(start sync shutdown dump save source prepared served opened resumed paused),
            ) => at(step),
        })
    }

    fn progress(&self) -> &'static str {
        match self.step {
            Step::Recording | Step::Pausing => "pausing the guest",
            Step::Writing | Step::Adopting => "saving the guest's memory",
            Step::Waiting { .. } | Step::Settling { .. } => "waiting for libvirt",
            Step::Discarding { .. } | Step::Resuming { .. } => "resuming the guest",
            Step::Checking { .. } => "checking the saved memory",
        }
    }

    fn wake(&self) -> Option<Instant> {
        match self.step {
            Step::Waiting { at, .. } => Some(at),
            _ => None,
        }
    }

    /// A domain that is saved already would be started again.
    fn check_sync(&self) -> Result<(), RequestError> {
        if matches!(self.step, Step::Adopting) { Err(self.conflict()) } else { Ok(()) }
    }

    /// The end of the domain is published with that of the save.
    fn keeps_end(&self) -> bool {
        true
    }

    /// The domain has ended beside a shutdown. Its reason says if it was saved.
    fn end(self, base: &mut Base) -> Option<Self> {
        publish_end(base, if base.published.reason == SAVED { "" } else { ENDED });
        None
    }
}

/// Reason of the end of a domain whose memory was saved.
const SAVED: &str = "saved";
/// Failure of a save whose domain has ended otherwise.
const ENDED: &str = "the domain has ended";

/// Publishes the pause as that of the save: libvirt names its caller.
fn show_pause(base: &mut Base) {
    if base.published.lifecycle() == Lifecycle::Paused && base.published.reason == "user" {
        "save".clone_into(&mut base.published.reason);
    }
}

/// Publishes the end of a domain, and of its save: the file is kept, or not.
fn end(base: &mut Base, reason: &'static str, kept: Result<(), String>) {
    let reason = match kept {
        Ok(()) => {
            publish_end(base, "");
            SAVED
        }
        Err(error) => {
            tracing::info!(reason, error, "the domain has ended without saved memory");
            publish_end(base, if reason == SAVED { &error } else { ENDED });
            if reason == "crashed" {
                base.effects.push(Effect::LogLastLines);
            }
            if reason == SAVED { "failed" } else { reason }
        }
    };
    base.end_as(Lifecycle::Shutoff, reason);
}

/// Publishes the end of a save.
fn publish_end(base: &mut Base, failure: &str) {
    let Some(save) = base.published.memory_save.as_mut().filter(|save| !save.ended) else { return };
    (save.ended, save.failure) = (true, failure.to_owned());
    tracing::info!(volume = save.volume, file = save.file, failure, "the save of the memory has ended");
}
