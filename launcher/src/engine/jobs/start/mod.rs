//! The start job.
//!
//! ```text
//!   first worker:    Preparing -> Connecting -> Serving -> Defining [-> Tagging] -> Creating -> Reading -> done
//!   later worker:    Adopting -> (a domain runs)  Sync of the running domain
//!                             -> (none runs)      Preparing -> ...
//!   saved memory:    ... Creating -> Marking -> Resuming -> Reading -> done
//!                                                  └-> Unmarking -> failed: the guest has not run
//!   later worker:    Settling -> Marking [-> Resuming] -> Reading -> done
//! ```
//! A guest that starts from saved memory runs only after the file was durably marked as resumed: no other guest starts from it. The mark is
//! taken back if libvirt had no domain to run. The file stays whole until the guest runs. A worker that finds the domain of a former one
//! first waits until libvirt has restored it (`restored`).
//! A worker that may find a former worker's domain looks for it before it prepares or defines anything.

mod restored;

use std::sync::Arc;

use protocol::ItemKind;
use tokio::time::Instant;

pub(crate) use self::restored::is_restored;
use super::{DAEMON_DEADLINE, EndRequest, Steps, WAITING};
use crate::{
    domain::{Domain, diff::Item},
    engine::model::{Base, DomainCall, JobInput, Next, RequestError, RequestId, Stage, Wanted, Work, daemon_is_late},
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
    Marking { then: Vec<EndRequest> },
    /// Resumes the restored guest.
    Resuming {
        then: Vec<EndRequest>,
        /// This start has marked the file, so that no other has run the guest.
        is_first: bool,
    },
    /// Takes the mark back: the guest has not run, for this reason.
    Unmarking { then: Vec<EndRequest>, reason: String },
    /// Reads the running domain. Requests to end it follow.
    Reading { then: Vec<EndRequest> },
}

impl Step {
    /// Returns the requests to end the domain that follow the step; `None` before QEMU starts.
    fn requests(&self) -> Option<&Vec<EndRequest>> {
        match self {
            Self::Creating { then }
            | Self::Settling { then }
            | Self::Marking { then }
            | Self::Resuming { then, .. }
            | Self::Unmarking { then, .. }
            | Self::Reading { then } => Some(then),
            _ => None,
        }
    }

    /// Returns the same to add one.
    fn requests_mut(&mut self) -> Option<&mut Vec<EndRequest>> {
        match self {
            Self::Creating { then }
            | Self::Settling { then }
            | Self::Marking { then }
            | Self::Resuming { then, .. }
            | Self::Unmarking { then, .. }
            | Self::Reading { then } => Some(then),
            _ => None,
        }
    }
}

impl Start {
    /// Begins a start.
    pub(crate) fn begin(base: &mut Base, requests: Vec<RequestId>, wanted: Arc<Wanted>) -> Self {
        let start = Self { requests, wanted, step: Step::Preparing };
        if base.adopting && !base.has_read() {
            return Self { step: Step::Adopting { until: base.now + DAEMON_DEADLINE }, ..start };
        }
        start.prepare(base)
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
        // With an item that failed virt-handler repeats the Sync, which attaches a volume once it can be opened.
        let failed = |(name, why): &(String, String)| Item::new(ItemKind::Volume, name).failed(why.clone());
        base.published.items = domain.left_out.iter().map(failed).collect();
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

    /// Decides on a QEMU that has started.
    fn on_created(self, base: &mut Base, then: Vec<EndRequest>) -> Self {
        base.stage = Stage::Live;
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
    fn fail(mut self, base: &mut Base, error: RequestError) -> Option<Self> {
        let held_reads = self.holds_reads();
        base.fail_sync(self.requests, error);
        if let Some(then) = self.step.requests_mut() {
            base.act_later(std::mem::take(then));
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
            (Step::Settling { then }, JobInput::Paused(Ok(()))) => Some(at(Step::Preparing).mark(base, then)),
            (step @ Step::Settling { .. }, JobInput::Paused(Err(error))) => at(step).fail(base, error.into()),
            (Step::Marking { then }, JobInput::MemoryMarked(result)) => {
                at(Step::Preparing).on_marked(base, then, result)
            }
            (Step::Resuming { then, .. }, JobInput::Resumed(Ok(()))) => {
                Some(at(Step::Preparing).on_resumed(base, then))
            }
            (Step::Resuming { then, is_first }, JobInput::Resumed(Err(error))) => {
                at(Step::Preparing).on_not_resumed(base, then, is_first, error)
            }
            (Step::Unmarking { then, reason }, JobInput::MemoryUnmarked(result)) => {
                at(Step::Preparing).on_unmarked(base, then, &reason, result)
            }
            (Step::Reading { then }, JobInput::Read) => at(Step::Preparing).complete(base, then),
            // Late.
            (
                step,
                JobInput::Prepared(_)
                | JobInput::Served(_)
                | JobInput::Defined(_)
                | JobInput::TagsWritten(_)
                | JobInput::Created(_)
                | JobInput::MemoryMarked(_)
                | JobInput::MemoryUnmarked(_)
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
            Step::Marking { .. } => "marking the saved memory as resumed",
            Step::Resuming { .. } => "resuming the guest",
            Step::Unmarking { .. } => "taking the mark of the saved memory back",
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
        let is_ending = self.step.requests().is_some_and(|then| !then.is_empty());
        if is_ending { Err(RequestError::Ending) } else { Ok(()) }
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
        match self.step.requests_mut() {
            Some(then) => {
                if then.len() < WAITING {
                    then.push(request);
                } else {
                    base.answer(request.0, Err(RequestError::Busy));
                }
                (Some(self), None)
            }
            None if base.stage == Stage::Live => {
                base.answer_all(self.requests, &Err(RequestError::Ending));
                (None, Some(request))
            }
            None => (Some(self), Some(request)),
        }
    }

    fn holds_reads(&self) -> bool {
        matches!(
            self.step,
            Step::Defining { .. }
                | Step::Tagging { .. }
                | Step::Creating { .. }
                | Step::Marking { .. }
                | Step::Resuming { .. }
                | Step::Unmarking { .. }
        )
    }
}
