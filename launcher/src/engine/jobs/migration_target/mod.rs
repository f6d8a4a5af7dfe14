//! The job of a migration to this launcher.
//!
//! ```text
//!   Preparing -> Connecting -> Serving -> Opening -> Waiting -> Releasing -> moved
//!                                                       +----> (the domain is gone)  not moved
//! ```
//! The domain arrives paused. Only a release of the source's launcher, whose domain has ended, lets the guest run. In post-copy it
//! runs before, and is released when all of its memory is here. The domain comes twice then: first without post-copy. A source that
//! has switched never runs the guest again, so that this launcher decides alone if the source is silent: a whole guest is released,
//! one with a broken connection is lost.
//!
//! Addresses of tagged devices are known when the domain is seen. Their tags are written then to an image of cloud-init that is not copied.
//!
//! `arrival.rs` has the arrival and the release.

mod arrival;

use std::sync::Arc;

use protocol::{MigrationReport, MigrationStep};
use tokio::time::Instant;

use self::arrival::{Arrival, Release};
use super::{DAEMON_DEADLINE, EndRequest, INTERVAL, Steps};
use crate::{
    domain::{Domain, HostCpus},
    engine::model::{
        Action, Base, ChannelMode, JobInput, MigrationEnd, MigrationRecord, RequestError, RequestId, Stage, Wanted,
        Work, disconnected,
    },
};

/// A migration to this launcher.
#[derive(Clone, Debug)]
pub(crate) struct MigrationTarget {
    /// Name of the migration.
    migration: String,
    /// The VMI; `None` after a restart of the worker, until virt-handler repeats its request.
    wanted: Option<Arc<Wanted>>,
    /// Requests that wait for the preparation.
    requests: Vec<RequestId>,
    /// CPUs of the pod, if they are dedicated.
    cpus: Option<HostCpus>,
    step: Step,
}

#[derive(Clone, Debug)]
enum Step {
    /// Prepares the disks.
    Preparing,
    /// Waits for the connection.
    Connecting {
        /// The rendered domain.
        domain: Box<Domain>,
        until: Instant,
    },
    /// Starts DHCP, console and credentials.
    Serving,
    /// Writes the record and opens the channels.
    Opening,
    /// Waits for the domain and for the release.
    Waiting(Arrival),
    /// Lets the guest run.
    Releasing(Release),
}

impl MigrationTarget {
    /// Begins to prepare for the domain of another launcher.
    pub(crate) fn begin(
        base: &mut Base,
        id: RequestId,
        migration: String,
        wanted: Arc<Wanted>,
    ) -> Result<Self, RequestError> {
        match base.stage {
            Stage::Ended => return Err(RequestError::Ended),
            Stage::Live => return Err(RequestError::Runs),
            Stage::Waiting => {}
        }
        wanted.check_supported()?;
        if !base.cache_written {
            return Err(RequestError::NoHello);
        }
        tracing::info!(migration, "preparing for the domain of another launcher");
        base.published.migration = None;
        base.work_for(Self::NAME, Work::PrepareTarget(wanted.clone(), migration.clone()));
        Ok(Self { migration, wanted: Some(wanted), requests: vec![id], cpus: None, step: Step::Preparing })
    }

    /// Returns the job of a record. A released guest must run.
    pub(crate) fn adopted(record: &MigrationRecord, now: Instant) -> Self {
        let (seen, paused) = (false, record.paused);
        let step = match record.step() {
            MigrationStep::Releasing => Step::Releasing(Release {
                seen,
                paused,
                releases: Vec::new(),
                next: now,
                calling: false,
                resumed: false,
            }),
            _ => Step::Waiting(Arrival { paused, ..Arrival::default() }),
        };
        Self { migration: record.migration.clone(), wanted: None, requests: Vec::new(), cpus: None, step }
    }

    /// Returns the name of the migration.
    pub(crate) fn migration(&self) -> &str {
        &self.migration
    }

    /// Reports that another migration can replace this one, which has not begun.
    pub(crate) fn is_replaceable(&self) -> bool {
        matches!(&self.step, Step::Waiting(arrival) if !arrival.seen)
    }

    /// Answers the releases of a job that another one replaces.
    pub(crate) fn answer_releases(&self, base: &mut Base) {
        base.answer_all(self.step.releases(), &Ok(false));
    }

    /// Answers a repeated request, now or when the preparation has ended.
    pub(crate) fn repeat(&mut self, base: &mut Base, id: RequestId, wanted: Arc<Wanted>) {
        match (&self.step, &self.wanted) {
            (Step::Waiting(_) | Step::Releasing(_), Some(_)) => base.answer(id, Ok(false)),
            // The services of a former worker have ended with it.
            (Step::Waiting(_) | Step::Releasing(_), None) => {
                self.wanted = Some(wanted.clone());
                self.requests.push(id);
                base.work_for(Self::NAME, Work::Serve(wanted));
            }
            _ => self.requests.push(id),
        }
    }

    /// Decides on a request to release the guest: the source's domain has ended.
    pub(crate) fn on_release(&mut self, base: &mut Base, id: RequestId, paused: bool) {
        match (&mut self.step, base.check_link()) {
            (Step::Releasing(release), _) => release.releases.push(id),
            (Step::Waiting(_), Err(error)) => base.answer(id, Err(error)),
            (Step::Waiting(arrival), Ok(())) => {
                arrival.paused = paused;
                arrival.asked.push(id);
                base.read_for(Self::NAME);
            }
            _ => base.answer(id, Ok(false)),
        }
    }

    fn on_prepared(self, base: &mut Base, result: Result<Box<Domain>, RequestError>) -> Option<Self> {
        match result {
            Ok(domain) => {
                let until = base.now + DAEMON_DEADLINE;
                Self { step: Step::Connecting { domain, until }, ..self }.advance(base)
            }
            Err(error) => self.fail(base, &error),
        }
    }

    /// Continues when the connection was made, or a time has come.
    fn advance(mut self, base: &mut Base) -> Option<Self> {
        let (now, has_read) = (base.now, base.has_read());
        match &mut self.step {
            Step::Waiting(arrival) if arrival.until.is_some_and(|until| until <= now) => {
                arrival.until = Some(now + INTERVAL);
                if has_read { self.decide_alone(base) } else { Some(self) }
            }
            Step::Connecting { domain, .. } if has_read => {
                base.disk_sizes.clone_from(&domain.disks);
                base.acpi = domain.acpi;
                self.cpus.clone_from(&domain.cpus);
                if let Some(wanted) = self.wanted.clone() {
                    base.work_for(Self::NAME, Work::Serve(wanted));
                }
                Some(Self { step: Step::Serving, ..self })
            }
            Step::Connecting { until, .. } if *until <= now => self.fail(base, &disconnected()),
            Step::Releasing(release) if !release.calling && release.next <= now => self.run(base),
            _ => Some(self),
        }
    }

    /// Opens the channels of a launcher whose services run.
    fn open(self, base: &mut Base) -> Self {
        let report = base.new_report(&self.migration, MigrationStep::Prepared);
        let record = Box::new(MigrationRecord::of(&report, MigrationEnd::Target, false));
        base.work_for(Self::NAME, Work::OpenMigration(record, ChannelMode::Target));
        Self { step: Step::Opening, ..self }
    }

    /// Decides on the services of a job that a former worker has begun.
    fn on_served_again(mut self, base: &mut Base, result: Result<(), RequestError>) -> Self {
        if result.is_err() {
            self.wanted = None;
        }
        base.answer_all(std::mem::take(&mut self.requests), &result.map(|()| false));
        self
    }

    fn on_opened(mut self, base: &mut Base) -> Self {
        let (cpus, topology) = self.cpus.take().map(|cpus| cpus.report()).unwrap_or_default();
        let report = base.new_report(&self.migration, MigrationStep::Prepared);
        base.published.migration = Some(MigrationReport { cpus, topology, ..report });
        base.answer_all(std::mem::take(&mut self.requests), &Ok(false));
        Self { step: Step::Waiting(Arrival::default()), ..self }
    }

    /// Fails a preparation. virt-handler repeats it.
    fn fail(self, base: &mut Base, error: &RequestError) -> Option<Self> {
        tracing::warn!(%error, "cannot prepare for the domain of another launcher");
        base.answer_all(self.requests, &Err(error.clone()));
        None
    }
}

impl Step {
    /// Returns the releases that wait.
    fn releases(&self) -> Vec<RequestId> {
        match self {
            Self::Waiting(arrival) => arrival.asked.clone(),
            Self::Releasing(release) => release.releases.clone(),
            Self::Preparing | Self::Connecting { .. } | Self::Serving | Self::Opening => Vec::new(),
        }
    }
}

impl Steps for MigrationTarget {
    fn take(mut self, base: &mut Base, input: JobInput) -> Option<Self> {
        match (&mut self.step, input) {
            (_, JobInput::Timer | JobInput::Connected) => self.advance(base),
            (_, JobInput::Seen(id)) => Some(self.on_seen(base, id)),
            (_, JobInput::Gone(_)) => self.on_gone(base),
            (_, JobInput::Abort(id)) => self.on_abort(base, id),
            (Step::Preparing, JobInput::Prepared(result)) => self.on_prepared(base, result),
            (Step::Serving, JobInput::Served(Ok(()))) => Some(self.open(base)),
            (Step::Serving, JobInput::Served(Err(error))) => self.fail(base, &error),
            (Step::Waiting(_) | Step::Releasing(_), JobInput::Served(result)) => {
                Some(self.on_served_again(base, result))
            }
            (Step::Opening, JobInput::MigrationOpened(Ok(()))) => Some(self.on_opened(base)),
            (Step::Opening, JobInput::MigrationOpened(Err(error))) => self.fail(base, &error),
            (Step::Waiting(_), JobInput::Read) => self.on_read(base),
            (Step::Releasing(release), JobInput::Read) if release.resumed => {
                (release.calling, release.resumed) = (false, false);
                self.run(base)
            }
            (_, JobInput::Resumed(result)) => Some(self.on_resumed(base, result)),
            // Late.
            (_, JobInput::Read | JobInput::Prepared(_) | JobInput::Served(_) | JobInput::MigrationOpened(_)) => {
                Some(self)
            }
            (_, results_of!(start sync shutdown dump save source paused)) => Some(self),
        }
    }

    fn progress(&self) -> &'static str {
        match self.step {
            Step::Preparing => "preparing the disks",
            Step::Connecting { .. } => "connecting to libvirt",
            Step::Serving => "serving the network and the console",
            Step::Opening => "opening its channels",
            Step::Waiting(_) => "waiting for the domain",
            Step::Releasing(_) => "resuming the guest",
        }
    }

    fn wake(&self) -> Option<Instant> {
        match &self.step {
            Step::Connecting { until, .. } => Some(*until),
            Step::Waiting(arrival) => arrival.until,
            Step::Releasing(release) if !release.calling => Some(release.next),
            _ => None,
        }
    }

    /// The domain that arrives is the source's.
    fn check_sync(&self) -> Result<(), RequestError> {
        Err(self.conflict())
    }

    fn end(self, base: &mut Base) -> Option<Self> {
        base.answer_all(self.step.releases(), &Err(RequestError::Ended));
        base.answer_all(self.requests, &Err(RequestError::Ended));
        None
    }

    fn end_domain(self, base: &mut Base, request: EndRequest) -> (Option<Self>, Option<EndRequest>) {
        let (id, action) = request;
        if let Step::Releasing(release) = self.step {
            base.answer_all(release.releases, &Err(RequestError::Ending));
            base.answer_all(self.requests, &Err(RequestError::Ending));
            return (None, Some(request));
        }
        if self.is_seen() {
            base.kill(vec![id]);
            return (Some(self), None);
        }
        let job = self.fail_arrival(base, "the launcher was stopped");
        // Nothing ran here, so virt-handler has nothing to record.
        base.finished |= matches!(action, Action::Terminate { .. });
        base.answer(id, Ok(false));
        (job, None)
    }

    fn keeps_end(&self) -> bool {
        !matches!(self.step, Step::Releasing(_))
    }
}
