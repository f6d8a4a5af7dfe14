//! The job of a memory dump.
//!
//! ```text
//!   Writing ──> done
//!      └──────> Waiting -> Looking ──> done: the guest runs, or is paused for another reason
//!                 ^  ^        └──────> Resuming ──> done: the guest goes on
//!   later worker ─┘  └── refused ─────────┘
//! ```
//! libvirt stops the guest for a dump. If its daemon ends meanwhile, QEMU goes on writing and refuses to run the guest until it has ended,
//! and the next daemon tries to resume the guest only once (`qemuProcessRecoverJob`).

use protocol::Lifecycle;
use tokio::time::Instant;

use super::{INTERVAL, Steps, is_repeated};
use crate::{
    engine::model::{Base, DomainCall, JobInput, RequestError, Stage},
    hypervisor::HypervisorError,
};

/// A memory dump. The published state names it, also after its end.
#[derive(Clone, Debug)]
pub(crate) enum MemoryDump {
    /// libvirt writes the guest's memory.
    Writing {
        /// The guest ran before.
        ran: bool,
    },
    /// The guest is stopped, and libvirt may not let it go on. Waits for the next attempt.
    Waiting { at: Instant },
    /// Reads the domain.
    Looking,
    /// Resumes the guest.
    Resuming,
}

impl MemoryDump {
    /// Begins to write the guest's memory to a file in a volume.
    pub(crate) fn begin(base: &mut Base, volume: String, file: String) -> Result<Self, RequestError> {
        let lifecycle = base.published.lifecycle();
        let is_alive = matches!(lifecycle, Lifecycle::Running | Lifecycle::Paused);
        if base.stage != Stage::Live || !is_alive {
            return Err(RequestError::NoDomain);
        }
        base.check_link()?;
        let path = base.volume_file(&volume).ok_or_else(|| RequestError::NoVolume(volume.clone()))?;
        tracing::info!(volume, file, "writing the guest's memory");
        base.published.memory_dump = Some(protocol::MemoryDump { volume, file, ..Default::default() });
        base.call_for(Self::NAME, DomainCall::DumpMemory(path));
        Ok(Self::Writing { ran: lifecycle == Lifecycle::Running })
    }

    /// Lets a guest go on that was stopped for a dump of which no job is left: worker and daemon have both ended.
    pub(crate) fn left(base: &Base) -> Self {
        tracing::info!("the guest is stopped for a memory dump of a former worker");
        Self::wait(base)
    }

    fn wait(base: &Base) -> Self {
        Self::Waiting { at: base.now + INTERVAL }
    }

    fn on_dumped(base: &mut Base, ran: bool, result: Result<(), HypervisorError>) -> Option<Self> {
        let mut next = None;
        match result {
            Ok(()) => publish_end(base, ""),
            // libvirt's daemon has ended, or still writes the dump of a former worker: virt-handler asks again, once the guest goes on.
            Err(error) if is_repeated(&error) && base.stage == Stage::Live => {
                tracing::warn!(%error, "the memory dump is repeated");
                if ran {
                    next = Some(Self::wait(base));
                } else {
                    base.published.memory_dump = None;
                }
            }
            Err(error) => publish_end(base, &format!("Domain memory dump failed: {error}")),
        }
        // The guest was stopped meanwhile.
        base.read();
        next
    }

    /// Decides on a read of the domain.
    fn on_read(base: &mut Base) -> Option<Self> {
        if !base.reading.is_fresh {
            return Some(Self::wait(base));
        }
        if !is_stopped(base) {
            forget(base);
            return None;
        }
        base.call_for(Self::NAME, DomainCall::Resume);
        Some(Self::Resuming)
    }

    fn on_resumed(base: &mut Base, result: Result<(), HypervisorError>) -> Option<Self> {
        if let Err(error) = result {
            tracing::debug!(%error, "the guest cannot go on yet");
            return Some(Self::wait(base));
        }
        tracing::info!("the guest goes on after an interrupted memory dump");
        // virt-handler may ask again before the domain is read.
        base.published.set_lifecycle(Lifecycle::Running);
        base.published.reason = "unpaused".into();
        forget(base);
        base.read();
        None
    }
}

impl Steps for MemoryDump {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        match (self, input) {
            (Self::Writing { ran }, JobInput::MemoryDumped(result)) => Self::on_dumped(base, ran, result),
            (Self::Waiting { at }, JobInput::Timer) if at <= base.now => {
                base.read_for(Self::NAME);
                Some(Self::Looking)
            }
            (Self::Looking, JobInput::Read) => Self::on_read(base),
            (Self::Resuming, JobInput::Resumed(result)) => Self::on_resumed(base, result),
            (
                step,
                JobInput::Timer
                | JobInput::Connected
                | JobInput::Read
                | JobInput::Seen(_)
                | JobInput::Gone(_)
                | JobInput::Abort(_)
                | results_of!(start sync shutdown dump save source prepared served opened resumed paused),
            ) => Some(step),
        }
    }

    fn progress(&self) -> &'static str {
        match self {
            Self::Writing { .. } => "writing the guest's memory",
            Self::Waiting { .. } | Self::Looking | Self::Resuming => "resuming the guest",
        }
    }

    fn wake(&self) -> Option<Instant> {
        match self {
            Self::Waiting { at } => Some(*at),
            _ => None,
        }
    }

    fn end(self, base: &mut Base) -> Option<Self> {
        publish_end(base, "the domain has ended");
        None
    }
}

/// Reports a guest that was stopped for a dump; libvirt does not know the reason if its daemon ended just then. A pause by the user, or
/// after a disk error, stays.
fn is_stopped(base: &Base) -> bool {
    let published = &base.published;
    published.lifecycle() == Lifecycle::Paused && matches!(published.reason.as_str(), "dump" | "unknown")
}

/// Forgets a dump that was interrupted, so that virt-handler asks again.
fn forget(base: &mut Base) {
    base.published.memory_dump = base.published.memory_dump.take().filter(|dump| dump.ended);
}

/// Publishes the end of a dump.
fn publish_end(base: &mut Base, failure: &str) {
    let Some(dump) = base.published.memory_dump.as_mut().filter(|dump| !dump.ended) else { return };
    (dump.ended, dump.failure) = (true, failure.to_owned());
    tracing::info!(volume = dump.volume, file = dump.file, failure, "the memory dump has ended");
}
