//! A start from saved memory.

use std::{path::PathBuf, sync::Arc};

use api::{SavedMemoryPhase, StartStrategy, vmi::status::SavedMemory};
use protocol::{Lifecycle, MemoryFile};

use super::{Start, Step};
use crate::{
    engine::{
        jobs::{EndRequest, OPERATION_INVALID, is_repeated},
        model::{Base, DomainCall, RequestError, RequestId, Stage, Wanted, Work, waits_for_disk},
    },
    hypervisor::HypervisorError,
};

impl Start {
    /// Continues to start a guest from saved memory, whose domain exists.
    pub(crate) fn continued(base: &mut Base, requests: Vec<RequestId>, wanted: Arc<Wanted>) -> Self {
        let start = Self { requests, wanted, step: Step::Preparing };
        if base.published.lifecycle() != Lifecycle::Paused {
            return start.mark(base, Vec::new());
        }
        // libvirt answers when it has restored the domain, and the guest stays paused.
        base.call_for(Self::NAME, DomainCall::Pause);
        Self { step: Step::Settling { then: Vec::new() }, ..start }
    }

    /// Returns the file with the memory from which the guest is to start. Without a valid name there is none, and the start fails.
    pub(super) fn saved_file(&self, base: &Base) -> Option<PathBuf> {
        saved_memory(&self.wanted).map(|memory| base.volume_file(&memory.claim_name).unwrap_or_default())
    }

    /// Decides on a QEMU that libvirt has started.
    pub(super) fn on_started(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        if saved_memory(&self.wanted).is_none() {
            return self.on_created(base, then);
        }
        base.stage = Stage::Live;
        self.mark(base, then)
    }

    /// Marks the saved memory as resumed before the guest runs.
    pub(super) fn mark(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.work_for(Self::NAME, Work::MarkMemory(self.saved_file(base).unwrap_or_default()));
        Self { step: Step::Marking { then }, ..self }
    }

    pub(super) fn on_marked(
        self,
        base: &mut Base,
        then: Vec<EndRequest>,
        result: Result<bool, String>,
    ) -> Option<Self> {
        let is_first = match result {
            Ok(is_first) => is_first,
            Err(error) => {
                let message = format!("cannot mark the saved memory as resumed: {error}");
                return self.lose(base, then, message);
            }
        };
        let published = &base.published;
        // A former worker may have resumed the guest.
        let runs =
            published.lifecycle() == Lifecycle::Running || waits_for_disk(published.lifecycle(), &published.reason);
        if runs || self.wanted.vmi.spec.start_strategy == Some(StartStrategy::Paused) {
            return Some(self.on_resumed(base, then));
        }
        base.call_for(Self::NAME, DomainCall::Resume);
        Some(Self { step: Step::Resuming { then, is_first }, ..self })
    }

    /// Decides on a guest that was not resumed. If libvirt has found no domain to run, the saved memory is still that of the disks.
    pub(super) fn on_not_resumed(
        self,
        base: &mut Base,
        then: Vec<EndRequest>,
        is_first: bool,
        error: HypervisorError,
    ) -> Option<Self> {
        if !is_first || !has_not_run(&error) {
            return Self { step: Step::Resuming { then, is_first }, ..self }.fail(base, error.into());
        }
        base.work_for(Self::NAME, Work::UnmarkMemory(self.saved_file(base).unwrap_or_default()));
        Some(Self { step: Step::Unmarking { then, reason: error.to_string() }, ..self })
    }

    pub(super) fn on_unmarked(
        self,
        base: &mut Base,
        then: Vec<EndRequest>,
        reason: &str,
        result: Result<(), String>,
    ) -> Option<Self> {
        let kept = match result {
            Ok(()) => "its saved memory is kept".to_owned(),
            Err(error) => format!("its saved memory stays marked as resumed: {error}"),
        };
        self.lose(base, then, format!("the restored guest has ended before it ran, and {kept}: {reason}"))
    }

    /// Ends a restored domain whose guest has not run.
    fn lose(self, base: &mut Base, then: Vec<EndRequest>, message: String) -> Option<Self> {
        base.on_lost(message.clone());
        Self { step: Step::Marking { then }, ..self }.fail(base, RequestError::retryable(message))
    }

    /// Decides on a restored guest that runs. Its clock has stood still.
    pub(super) fn on_resumed(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.clock_is_late = true;
        base.work_for(Self::NAME, Work::FreeMemory(self.saved_file(base).unwrap_or_default()));
        base.published.memory_restore = saved_memory(&self.wanted).map(|memory| MemoryFile {
            volume: memory.claim_name.clone(),
            file: memory.file_name.clone(),
            ended: true,
            failure: String::new(),
        });
        tracing::info!("the guest continues from saved memory");
        self.on_created(base, then)
    }

    /// Fails a start from saved memory, which is kept. Another attempt would fail as well, unless libvirt was in the way.
    pub(super) fn fail_restored(self, base: &mut Base, error: HypervisorError) -> Option<Self> {
        if saved_memory(&self.wanted).is_none() || is_repeated(&error) {
            return self.fail(base, error.into());
        }
        let message = format!("cannot resume the guest from saved memory: {error}");
        self.fail(base, RequestError::Start { message, permanent: true })
    }
}

/// Returns the memory from which the guest of a VMI is to start.
fn saved_memory(wanted: &Wanted) -> Option<&SavedMemory> {
    wanted.vmi.status.as_ref()?.hibernation.as_ref().filter(|memory| memory.phase == SavedMemoryPhase::Restoring)
}

/// Returns true for a domain that is started from saved memory and whose start has not been completed.
pub(crate) fn is_restored(base: &Base, wanted: &Wanted) -> bool {
    saved_memory(wanted).is_some() && base.published.memory_restore.is_none()
}

/// Returns true for the error of a call that libvirt has not begun, since no domain runs.
fn has_not_run(error: &HypervisorError) -> bool {
    match error {
        HypervisorError::NoDomain => true,
        HypervisorError::Libvirt { code, .. } => *code == OPERATION_INVALID,
        _ => false,
    }
}
