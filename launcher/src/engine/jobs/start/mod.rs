//! The start job.
//!
//! ```text
//!   first worker:    Preparing -> Connecting -> Serving -> Defining [-> Tagging] -> Creating -> Reading -> done
//!   later worker:    Adopting -> (a domain runs)  Sync of the running domain
//!                             -> (none runs)      Preparing -> ...
//!   saved memory:    ... Creating -> Consuming -> Resuming -> Reading -> done
//!   later worker:    Settling -> Consuming [-> Resuming] -> Reading -> done
//! ```
//! A guest that starts from saved memory runs only after the file was durably marked as resumed: no other guest starts from it. A worker
//! that finds the domain of a former one first waits until libvirt has restored it.
//! A worker that may find a former worker's domain looks for it before it prepares or defines anything.

use std::{path::PathBuf, sync::Arc};

use api::{SavedMemoryPhase, StartStrategy, vmi::status::SavedMemory};
use protocol::{Lifecycle, MemoryFile};
use tokio::time::Instant;

use super::{DAEMON_DEADLINE, EndRequest, Steps, WAITING, is_repeated};
use crate::{
    domain::Domain,
    engine::model::{
        Base, DomainCall, JobInput, JobName, Next, RequestError, RequestId, Stage, Wanted, Work, daemon_is_late,
        waits_for_disk,
    },
    hypervisor::HypervisorError,
};

/// Start of the domain.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    /// Requests that wait for the start.
    requests: Vec<RequestId>,
    /// The VMI.
    wanted: Arc<Wanted>,
    step: Step,
}

#[derive(Clone, Debug)]
enum Step {
    /// A former worker may have started the domain: waits for the connection to find it.
    Adopting { until: Instant },
    /// Prepares the disks and renders the XML while libvirt's daemon starts.
    Preparing,
    /// Waits for the connection.
    Connecting {
        /// The rendered domain.
        domain: Box<Domain>,
        until: Instant,
    },
    /// Starts DHCP, console and credentials.
    Serving {
        /// The rendered domain.
        domain: Box<Domain>,
    },
    /// Defines the domain.
    Defining {
        /// Start without running the guest.
        paused: bool,
    },
    /// Writes the tags of devices.
    Tagging {
        /// Start without running the guest.
        paused: bool,
    },
    /// QEMU starts. Requests to end the domain follow.
    Creating { then: Vec<EndRequest> },
    /// Waits until libvirt has restored a domain that a former worker began to start.
    Settling { then: Vec<EndRequest> },
    /// Marks the file with the memory as resumed.
    Consuming { then: Vec<EndRequest> },
    /// Resumes the restored guest.
    Resuming { then: Vec<EndRequest> },
    /// Reads the running domain. Requests to end it follow.
    Reading { then: Vec<EndRequest> },
}

impl Start {
    const NAME: JobName = JobName::Start;

    /// Begins a start.
    pub(crate) fn begin(base: &mut Base, requests: Vec<RequestId>, wanted: Arc<Wanted>) -> Self {
        let start = Self { requests, wanted, step: Step::Preparing };
        if base.adopting && !base.has_read() {
            return Self { step: Step::Adopting { until: base.now + DAEMON_DEADLINE }, ..start };
        }
        start.prepare(base)
    }

    /// Continues to start a guest from saved memory, whose domain exists.
    pub(crate) fn continued(base: &mut Base, requests: Vec<RequestId>, wanted: Arc<Wanted>) -> Self {
        let start = Self { requests, wanted, step: Step::Preparing };
        if base.published.lifecycle() != Lifecycle::Paused {
            return start.consume(base, Vec::new());
        }
        // libvirt answers when it has restored the domain, and the guest stays paused.
        base.call_for(Self::NAME, DomainCall::Pause);
        Self { step: Step::Settling { then: Vec::new() }, ..start }
    }

    fn prepare(self, base: &mut Base) -> Self {
        base.work_for(Self::NAME, Work::Prepare(self.wanted.clone()));
        Self { step: Step::Preparing, ..self }
    }

    /// Decides on the first read through the connection.
    fn on_connected(self, base: &mut Base) -> Option<Self> {
        match (self.step, base.stage) {
            // The domain was found running.
            (Step::Adopting { .. } | Step::Connecting { .. }, Stage::Live) if is_restored(base, &self.wanted) => {
                Some(Self::continued(base, self.requests, self.wanted))
            }
            (Step::Adopting { .. } | Step::Connecting { .. }, Stage::Live) => {
                base.due.push_back(Next::Sync(self.requests, self.wanted));
                None
            }
            (step @ Step::Adopting { .. }, _) => {
                let start = Self { step, ..self };
                match start.wanted.check_supported() {
                    Ok(()) => Some(start.prepare(base)),
                    Err(error) => start.fail(base, error),
                }
            }
            (Step::Connecting { domain, .. }, _) => {
                base.work_for(Self::NAME, Work::Serve(self.wanted.clone()));
                Some(Self { step: Step::Serving { domain }, ..self })
            }
            (step, _) => Some(Self { step, ..self }),
        }
    }

    fn on_prepared(self, base: &mut Base, result: Result<Box<Domain>, RequestError>) -> Option<Self> {
        match result {
            Ok(domain) => {
                let start = Self { step: Step::Connecting { domain, until: base.now + DAEMON_DEADLINE }, ..self };
                if base.has_read() { start.on_connected(base) } else { Some(start) }
            }
            Err(error) => self.fail(base, error),
        }
    }

    /// Defines the domain, whose services run.
    fn define(self, base: &mut Base, domain: Box<Domain>) -> Self {
        let step = Step::Defining { paused: domain.start_paused };
        base.disk_sizes.clone_from(&domain.disks);
        base.acpi = domain.acpi;
        base.adopting = false;
        base.call_for(Self::NAME, DomainCall::Define(domain));
        Self { step, ..self }
    }

    fn on_defined(self, base: &mut Base, paused: bool) -> Self {
        if !self.wanted.has_tagged_devices() {
            return self.create(base, paused);
        }
        base.work_for(Self::NAME, Work::WriteTags(self.wanted.clone()));
        Self { step: Step::Tagging { paused }, ..self }
    }

    fn on_tags_written(self, base: &mut Base, paused: bool, image: Option<(String, u64)>) -> Self {
        if let Some((volume, size)) = image {
            let made = base.disk_sizes.iter_mut().filter(|disk| disk.volume == volume);
            made.for_each(|disk| disk.size = size);
        }
        self.create(base, paused)
    }

    fn create(self, base: &mut Base, paused: bool) -> Self {
        base.call_for(
            Self::NAME,
            match self.saved_file(base) {
                Some(path) => DomainCall::RestoreMemory(path),
                None => DomainCall::Create { paused },
            },
        );
        Self { step: Step::Creating { then: Vec::new() }, ..self }
    }

    /// Returns the file with the memory from which the guest is to start. Without a valid name there is none, and the start fails.
    fn saved_file(&self, base: &Base) -> Option<PathBuf> {
        saved_memory(&self.wanted).map(|memory| base.volume_file(&memory.claim_name).unwrap_or_default())
    }

    /// Decides on a QEMU that libvirt has started.
    fn on_started(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        if saved_memory(&self.wanted).is_none() {
            return self.on_created(base, then);
        }
        base.stage = Stage::Live;
        self.consume(base, then)
    }

    /// Marks the saved memory as resumed before the guest runs.
    fn consume(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.work_for(Self::NAME, Work::ConsumeMemory(self.saved_file(base).unwrap_or_default()));
        Self { step: Step::Consuming { then }, ..self }
    }

    fn on_consumed(self, base: &mut Base, then: Vec<EndRequest>, result: Result<(), String>) -> Option<Self> {
        if let Err(error) = result {
            let message = format!("cannot mark the saved memory as resumed: {error}");
            base.on_lost(message.clone());
            return Self { step: Step::Consuming { then }, ..self }.fail(base, RequestError::retryable(message));
        }
        let published = &base.published;
        // A former worker may have resumed the guest.
        let runs =
            published.lifecycle() == Lifecycle::Running || waits_for_disk(published.lifecycle(), &published.reason);
        if runs || self.wanted.vmi.spec.start_strategy == Some(StartStrategy::Paused) {
            return Some(self.on_resumed(base, then));
        }
        base.call_for(Self::NAME, DomainCall::Resume);
        Some(Self { step: Step::Resuming { then }, ..self })
    }

    /// Decides on a restored guest that runs. Its clock has stood still.
    fn on_resumed(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.clock_is_late = true;
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
    fn fail_restored(self, base: &mut Base, error: HypervisorError) -> Option<Self> {
        if saved_memory(&self.wanted).is_none() || is_repeated(&error) {
            return self.fail(base, error.into());
        }
        let message = format!("cannot resume the guest from saved memory: {error}");
        self.fail(base, RequestError::Start { message, permanent: true })
    }

    /// Decides on a QEMU that has started.
    fn on_created(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.stage = Stage::Live;
        base.published.items.clear();
        base.reading.outdated = base.reading.in_progress;
        base.read_for(Self::NAME);
        Self { step: Step::Reading { then }, ..self }
    }

    /// Completes the start after the first read of the domain.
    fn complete(self, base: &mut Base, then: Vec<EndRequest>) -> Option<Self> {
        tracing::info!("the domain is running");
        base.answer_all(self.requests, &Ok(true));
        base.act_later(then);
        None
    }

    /// Fails the start. After a failure the definition stays: the next attempt replaces it.
    fn fail(self, base: &mut Base, error: RequestError) -> Option<Self> {
        let held_reads = self.holds_reads();
        base.fail_sync(self.requests, error);
        if let Step::Creating { then } | Step::Settling { then } | Step::Consuming { then } | Step::Resuming { then } =
            self.step
        {
            base.act_later(then);
        }
        // Events during these steps were not followed by a read, and QEMU may have started although the call failed.
        if held_reads {
            base.due.push_back(Next::Read);
        }
        None
    }
}

impl Steps for Start {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        let Self { requests, wanted, step } = self;
        let at = |step| Self { requests, wanted, step };
        match (step, input) {
            (step, JobInput::Connected) => at(step).on_connected(base),
            (step, JobInput::Timer) => match at(step) {
                start if start.wake().is_some_and(|until| until <= base.now) => start.fail(base, daemon_is_late()),
                start => Some(start),
            },
            (Step::Preparing, JobInput::Prepared(result)) => at(Step::Preparing).on_prepared(base, result),
            (Step::Serving { domain }, JobInput::Served(Ok(()))) => Some(at(Step::Preparing).define(base, domain)),
            (step @ Step::Serving { .. }, JobInput::Served(Err(error))) => at(step).fail(base, error),
            (Step::Defining { paused }, JobInput::Defined(Ok(()))) => {
                Some(at(Step::Preparing).on_defined(base, paused))
            }
            (step @ Step::Defining { .. }, JobInput::Defined(Err(error))) => at(step).fail(base, error.into()),
            (Step::Tagging { paused }, JobInput::TagsWritten(Ok(image))) => {
                Some(at(Step::Preparing).on_tags_written(base, paused, image))
            }
            (step @ Step::Tagging { .. }, JobInput::TagsWritten(Err(error))) => at(step).fail(base, error),
            (Step::Creating { then }, JobInput::Created(Ok(()))) => Some(at(Step::Preparing).on_started(base, then)),
            (step @ Step::Creating { .. }, JobInput::Created(Err(error))) => at(step).fail_restored(base, error),
            (Step::Settling { then }, JobInput::Paused(Ok(()))) => Some(at(Step::Preparing).consume(base, then)),
            (Step::Consuming { then }, JobInput::MemoryConsumed(result)) => {
                at(Step::Preparing).on_consumed(base, then, result)
            }
            (Step::Resuming { then }, JobInput::Resumed(Ok(()))) => Some(at(Step::Preparing).on_resumed(base, then)),
            (step @ Step::Settling { .. }, JobInput::Paused(Err(error)))
            | (step @ Step::Resuming { .. }, JobInput::Resumed(Err(error))) => at(step).fail(base, error.into()),
            (Step::Reading { then }, JobInput::Read) => at(Step::Preparing).complete(base, then),
            // Late.
            (
                step,
                JobInput::Prepared(_)
                | JobInput::Served(_)
                | JobInput::Defined(_)
                | JobInput::TagsWritten(_)
                | JobInput::Created(_)
                | JobInput::MemoryConsumed(_)
                | JobInput::Paused(_)
                | JobInput::Resumed(_),
            ) => Some(at(step)),
            (
                step,
                JobInput::Read
                | JobInput::Seen(_)
                | JobInput::Gone(_)
                | JobInput::Abort(_)
                | results_of!(sync shutdown dump save source opened),
            ) => Some(at(step)),
        }
    }

    fn name(&self) -> JobName {
        Self::NAME
    }

    fn progress(&self) -> &'static str {
        match self.step {
            Step::Adopting { .. } => "looking for a running domain",
            Step::Preparing => "preparing the disks",
            Step::Connecting { .. } => "connecting to libvirt",
            Step::Serving { .. } => "serving the network and the console",
            Step::Defining { .. } => "defining the domain",
            Step::Tagging { .. } => "writing the tags of interfaces",
            Step::Creating { .. } => "starting QEMU",
            Step::Settling { .. } => "waiting for the restored domain",
            Step::Consuming { .. } => "marking the saved memory as resumed",
            Step::Resuming { .. } => "resuming the guest",
            Step::Reading { .. } => "reading the running domain",
        }
    }

    fn wake(&self) -> Option<Instant> {
        match self.step {
            Step::Adopting { until } | Step::Connecting { until, .. } => Some(until),
            _ => None,
        }
    }

    fn check_sync(&self) -> Result<(), RequestError> {
        match &self.step {
            Step::Creating { then }
            | Step::Settling { then }
            | Step::Consuming { then }
            | Step::Resuming { then }
            | Step::Reading { then }
                if !then.is_empty() =>
            {
                Err(RequestError::Ending)
            }
            _ => Ok(()),
        }
    }

    /// Answers the requests, unless QEMU has started: the read in progress completes the start.
    fn end(self, base: &mut Base) -> Option<Self> {
        if matches!(self.step, Step::Reading { .. }) {
            return Some(self);
        }
        base.answer_all(self.requests, &Err(RequestError::Ending));
        None
    }

    /// A start during which QEMU may be starting is completed first. One during which the domain of an earlier start was found
    /// running is aborted.
    fn end_domain(mut self, base: &mut Base, request: EndRequest) -> (Option<Self>, Option<EndRequest>) {
        match &mut self.step {
            Step::Creating { then }
            | Step::Settling { then }
            | Step::Consuming { then }
            | Step::Resuming { then }
            | Step::Reading { then } => {
                if then.len() < WAITING {
                    then.push(request);
                } else {
                    base.answer(request.0, Err(RequestError::Busy));
                }
                (Some(self), None)
            }
            _ if base.stage == Stage::Live => {
                base.answer_all(self.requests, &Err(RequestError::Ending));
                (None, Some(request))
            }
            _ => (Some(self), Some(request)),
        }
    }

    fn holds_reads(&self) -> bool {
        matches!(
            self.step,
            Step::Defining { .. }
                | Step::Tagging { .. }
                | Step::Creating { .. }
                | Step::Consuming { .. }
                | Step::Resuming { .. }
        )
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
