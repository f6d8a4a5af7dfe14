//! The job of a memory dump.

use protocol::Lifecycle;

use super::{Steps, is_repeated};
use crate::engine::model::{Base, DomainCall, JobInput, RequestError, Stage};

/// A memory dump. The published state names it, also after its end.
#[derive(Clone, Debug)]
pub(crate) enum MemoryDump {
    /// libvirt writes the guest's memory.
    Writing,
}

impl MemoryDump {
    /// Begins to write the guest's memory to a file in a volume.
    pub(crate) fn begin(base: &mut Base, volume: String, file: String) -> Result<Self, RequestError> {
        let is_alive = matches!(base.published.lifecycle(), Lifecycle::Running | Lifecycle::Paused);
        if base.stage != Stage::Live || !is_alive {
            return Err(RequestError::NoDomain);
        }
        base.check_link()?;
        let path = base.volume_file(&volume).ok_or_else(|| RequestError::NoVolume(volume.clone()))?;
        tracing::info!(volume, file, "writing the guest's memory");
        base.published.memory_dump = Some(protocol::MemoryDump { volume, file, ..Default::default() });
        base.call_for(Self::NAME, DomainCall::DumpMemory(path));
        Ok(Self::Writing)
    }
}

impl Steps for MemoryDump {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        let result = match input {
            JobInput::MemoryDumped(result) => result,
            JobInput::Timer
            | JobInput::Connected
            | JobInput::Read
            | JobInput::Seen(_)
            | JobInput::Gone(_)
            | JobInput::Abort(_)
            | results_of!(start sync shutdown save source prepared served opened resumed paused) => {
                return Some(self);
            }
        };
        match result {
            Ok(()) => publish_end(base, ""),
            // libvirt's daemon has ended, or still writes the dump of a former worker: virt-handler asks again.
            Err(error) if is_repeated(&error) && base.stage == Stage::Live => {
                tracing::warn!(%error, "the memory dump is repeated");
                base.published.memory_dump = None;
            }
            Err(error) => publish_end(base, &format!("Domain memory dump failed: {error}")),
        }
        // The guest was stopped meanwhile.
        base.read();
        None
    }

    fn progress(&self) -> &'static str {
        "writing the guest's memory"
    }

    fn end(self, base: &mut Base) -> Option<Self> {
        publish_end(base, "the domain has ended");
        None
    }
}

/// Publishes the end of a dump.
fn publish_end(base: &mut Base, failure: &str) {
    let Some(dump) = &mut base.published.memory_dump else { return };
    (dump.ended, dump.failure) = (true, failure.to_owned());
    tracing::info!(volume = dump.volume, file = dump.file, failure, "the memory dump has ended");
}
