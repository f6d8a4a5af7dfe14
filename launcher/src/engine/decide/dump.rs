//! The job of a memory dump.

use protocol::{Lifecycle, MemoryDump};

use super::{Turn, requests::disconnected};
use crate::{
    engine::model::{Effect, Job, Link, RequestError, RequestId, Stage},
    hypervisor::HypervisorError,
};

/// libvirt's error (VIR_ERR_OPERATION_TIMEOUT) of a call that has waited for another job of the domain.
const OPERATION_TIMEOUT: u32 = 68;

impl Turn {
    /// Decides on a request to write the guest's memory to a volume.
    pub(super) fn dump_memory(&mut self, id: RequestId, volume: String, file: String) {
        let begun = self.begin_dump(volume, file);
        self.answer(id, begun.map(|()| false));
    }

    fn begin_dump(&mut self, volume: String, file: String) -> Result<(), RequestError> {
        let is_same = |known: &MemoryDump| known.volume == volume && known.file == file;
        if self.state.published.memory_dump.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        if let Some(job) = &self.state.job {
            return Err(RequestError::Conflict { job: job.name(), progress: job.progress() });
        }
        let is_alive = matches!(self.state.published.lifecycle(), Lifecycle::Running | Lifecycle::Paused);
        if self.state.stage != Stage::Live || !is_alive {
            return Err(RequestError::NoDomain);
        }
        if self.state.link != Link::Up {
            return Err(disconnected());
        }
        // One component of a path.
        if volume.is_empty() || volume.starts_with('.') || volume.contains('/') {
            return Err(RequestError::NoVolume(volume));
        }
        tracing::info!(volume, file, "writing the guest's memory");
        let path = self.state.hotplugged.join(api::hotplug::file_name(&volume, false));
        self.state.published.memory_dump = Some(MemoryDump { volume, file, ..MemoryDump::default() });
        self.state.job = Some(Job::MemoryDump);
        self.effects.push(Effect::DumpMemory(path));
        Ok(())
    }

    /// Decides on the end of a dump.
    pub(super) fn memory_dumped(&mut self, result: Result<(), HypervisorError>) {
        if matches!(self.state.job, Some(Job::MemoryDump)) {
            self.state.job = None;
        }
        match result {
            Ok(()) => self.end_dump(""),
            // libvirt's daemon has ended, or still writes the dump of a former worker: virt-handler asks again.
            Err(error) if is_repeated(&error) && self.state.stage == Stage::Live => {
                tracing::warn!(%error, "the memory dump is repeated");
                self.state.published.memory_dump = None;
            }
            Err(error) => self.end_dump(&format!("Domain memory dump failed: {error}")),
        }
        // The guest was stopped meanwhile.
        self.read_then(None);
    }

    /// Publishes the end of a dump. An end that is known stays.
    pub(super) fn end_dump(&mut self, failure: &str) {
        let Some(dump) = self.state.published.memory_dump.as_mut().filter(|dump| !dump.ended) else { return };
        dump.ended = true;
        dump.failure = failure.to_owned();
        tracing::info!(volume = dump.volume, file = dump.file, failure, "the memory dump has ended");
    }
}

/// Returns true for errors after which the same dump can succeed.
fn is_repeated(error: &HypervisorError) -> bool {
    match error {
        HypervisorError::Disconnected(_) | HypervisorError::Busy => true,
        HypervisorError::Libvirt { code, .. } => *code == OPERATION_TIMEOUT,
        _ => false,
    }
}
