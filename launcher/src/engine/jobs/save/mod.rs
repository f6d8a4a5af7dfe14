//! The job that saves the guest's memory and ends the domain.

use protocol::Lifecycle;

use super::{Steps, is_repeated};
use crate::engine::model::{Base, DomainCall, JobInput, JobName, RequestError, Stage};

/// A save of the memory. The published state names it, also after its end.
#[derive(Clone, Debug)]
pub(crate) enum MemorySave {
    /// libvirt writes the guest's memory, and ends the domain.
    Writing,
    /// The call has failed. The domain is read: the call of a former worker may have saved it.
    Checking { failure: String },
}

impl MemorySave {
    const NAME: JobName = JobName::MemorySave;

    /// Begins to write the guest's memory to a file in a volume.
    pub(crate) fn begin(base: &mut Base, volume: String, file: String) -> Result<Self, RequestError> {
        // A paused guest would continue by itself when it is restored.
        if base.stage != Stage::Live || base.published.lifecycle() != Lifecycle::Running {
            return Err(RequestError::NoDomain);
        }
        base.check_link()?;
        let path = base.volume_file(&volume).ok_or_else(|| RequestError::NoVolume(volume.clone()))?;
        tracing::info!(volume, file, "saving the guest's memory");
        base.published.memory_save = Some(protocol::MemoryFile { volume, file, ..Default::default() });
        base.call_for(Self::NAME, DomainCall::SaveMemory(path));
        Ok(Self::Writing)
    }
}

impl Steps for MemorySave {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        let result = match (self, input) {
            (Self::Writing, JobInput::MemorySaved(result)) => result,
            (Self::Checking { failure }, JobInput::Read) => {
                publish_end(base, &failure);
                return None;
            }
            (
                step,
                JobInput::Timer
                | JobInput::Connected
                | JobInput::Read
                | JobInput::Seen(_)
                | JobInput::Gone(_)
                | JobInput::Abort(_)
                | results_of!(start sync shutdown dump save source prepared served opened resumed paused),
            ) => return Some(step),
        };
        match result {
            Ok(()) => publish_end(base, ""),
            // libvirt's daemon has ended, or still writes for a former worker: virt-handler asks again.
            Err(error) if is_repeated(&error) && base.stage == Stage::Live => {
                tracing::warn!(%error, "the save of the memory is repeated");
                base.published.memory_save = None;
            }
            Err(error) => {
                base.read_for(Self::NAME);
                return Some(Self::Checking { failure: format!("cannot save the guest's memory: {error}") });
            }
        }
        base.read();
        None
    }

    fn name(&self) -> JobName {
        Self::NAME
    }

    fn progress(&self) -> &'static str {
        "saving the guest's memory"
    }

    /// The domain has ended. Its reason says if it was saved.
    fn end(self, base: &mut Base) -> Option<Self> {
        let failure = if base.published.reason == "saved" { "" } else { "the domain has ended" };
        publish_end(base, failure);
        None
    }
}

/// Publishes the end of a save.
fn publish_end(base: &mut Base, failure: &str) {
    let Some(save) = &mut base.published.memory_save else { return };
    (save.ended, save.failure) = (true, failure.to_owned());
    tracing::info!(volume = save.volume, file = save.file, failure, "the save of the memory has ended");
}
