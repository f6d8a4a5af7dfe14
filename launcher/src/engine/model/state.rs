//! The engine's state, a value.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use protocol::{ItemResult, JobReport, LauncherState, Lifecycle};
use tokio::time::Instant;

use super::{
    job::Job,
    request::{Action, Answer, RequestId, Wanted},
};
use crate::{
    domain::{
        diff::{Item, Step},
        domain_name,
        parse::DomainConfig,
    },
    hypervisor::HypervisorError,
    options::VmiArgs,
};

/// Longest interval between reads of the domain's state: an event may be missed while libvirt's daemon restarts.
pub(crate) const REFRESH: Duration = Duration::from_secs(30);

/// Stage of the domain's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No domain has run in this pod.
    Waiting,
    /// The domain runs or is paused.
    Live,
    /// The domain has ended or failed to start for good.
    Ended,
}

/// Connection to the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// Not connected; the next attempt is due at that time.
    Down {
        /// Time of the next attempt.
        retry_at: Instant,
    },
    /// An attempt is in progress.
    Connecting,
    /// Connected.
    Up,
}

/// Work that follows a read of the domain.
#[derive(Clone, Debug)]
pub(crate) enum AfterRead {
    /// Answer a request.
    Answer(RequestId, Answer),
    /// Answer requests to destroy the domain.
    Killed(Vec<RequestId>, Result<(), HypervisorError>),
    /// Complete the start.
    Started,
    /// Complete the live sync.
    Synced,
    /// Decide on the domain after a migration to another launcher.
    Settled,
    /// Decide on a release of the domain that arrives.
    Arrived(RequestId),
    /// Decide on a domain that was resumed.
    Resumed,
}

/// Reads of the domain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    /// A read is in progress.
    pub(crate) in_progress: bool,
    /// Work that follows it.
    pub(crate) then: Vec<AfterRead>,
    /// Another read follows, since the domain may have changed meanwhile.
    pub(crate) again: bool,
    /// Work that follows that read.
    pub(crate) then_again: Vec<AfterRead>,
    /// libvirt has answered the read whose work is being done: the published state is that of now.
    pub(crate) is_fresh: bool,
}

/// Destruction of the domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kill {
    /// Requests that wait for it.
    pub(crate) requests: Vec<RequestId>,
    /// With SIGTERM only.
    pub(crate) gently: bool,
}

/// Requests to end a domain that a former worker may have started: they wait until this worker has looked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Looking {
    /// Time limit.
    pub(crate) until: Instant,
    /// The requests.
    pub(crate) then: Vec<(RequestId, Action)>,
}

/// Sync of a running domain.
#[derive(Clone, Debug)]
pub(crate) struct LiveSync {
    /// Requests that wait for it.
    pub(crate) requests: Vec<RequestId>,
    /// The VMI.
    pub(crate) wanted: Arc<Wanted>,
    /// Progress.
    pub(crate) step: LiveStep,
    /// Results of items that are not as wanted.
    pub(crate) items: Vec<ItemResult>,
    /// A device was changed: the domain is read before the Sync is complete.
    pub(crate) changed: bool,
}

/// Step of the sync of a running domain.
#[derive(Clone, Debug)]
pub(crate) enum LiveStep {
    /// Waits for the connection.
    Connecting {
        /// Time limit.
        until: Instant,
    },
    /// Starts DHCP, console and credentials if a former worker did.
    Serving,
    /// Reads the claims' sizes and renders the wanted domain.
    Comparing,
    /// Carries out the steps; the first is in progress.
    Changing(VecDeque<Step>),
    /// Resumes a guest that is stopped by a disk error.
    Resuming,
    /// Reads the domain.
    Reading,
}

/// Syncs that follow the one in progress; all get the result of the newest VMI.
#[derive(Clone, Debug)]
pub(crate) struct NextSync {
    /// The requests.
    pub(crate) requests: Vec<RequestId>,
    /// The newest VMI.
    pub(crate) wanted: Arc<Wanted>,
}

/// Identity of the pod's VMI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Namespace.
    pub(crate) namespace: String,
    /// Name.
    pub(crate) name: String,
    /// UID.
    pub(crate) uid: String,
}

/// The engine's state.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// The pod's VMI.
    pub(crate) identity: Identity,
    /// State that virt-handler sees.
    pub(crate) published: LauncherState,
    /// Stage of the domain's life.
    pub(crate) stage: Stage,
    /// The job slot.
    pub(crate) job: Option<Job>,
    /// Sync of the running domain in progress.
    pub(crate) sync: Option<LiveSync>,
    /// Syncs that follow it or the start.
    pub(crate) next_sync: Option<NextSync>,
    /// Actions on the guest in progress.
    pub(crate) actions: BTreeMap<RequestId, Action>,
    /// Destruction of the domain in progress.
    pub(crate) kill: Option<Kill>,
    /// Requests to end a domain that has to be found first.
    pub(crate) looking: Option<Looking>,
    /// Connection to the hypervisor.
    pub(crate) link: Link,
    /// The domain was read, or found missing, through the present connection.
    pub(crate) has_read: bool,
    /// Reads of the domain.
    pub(crate) reading: Reading,
    /// Time of the next read.
    pub(crate) refresh_at: Instant,
    /// The capabilities cache is written, by Hello or by a former worker. Without it libvirt's first call would spend
    /// seconds on probing QEMU.
    pub(crate) cache_written: bool,
    /// Software emulation is allowed.
    pub(crate) allow_emulation: bool,
    /// A former worker ran in this pod, and this one has started no domain so far.
    pub(crate) adopting: bool,
    /// The pod terminates.
    pub(crate) terminating: bool,
    /// Time limit for virt-handler to record the final state.
    pub(crate) finish_at: Option<Instant>,
    /// The launcher exits.
    pub(crate) finished: bool,
    /// Time of the first failed start.
    pub(crate) failing_since: Option<Instant>,
    /// The guest's clock has stood still in a migration.
    pub(crate) clock_is_late: bool,
    /// The guest's clock is being set after a pause.
    pub(crate) setting_clock: bool,
    /// Configuration of the active domain.
    pub(crate) active: Arc<DomainConfig>,
    /// Directory of hot-plugged volumes.
    pub(crate) hotplugged: Arc<Path>,
    /// Directories of the images that the launcher creates.
    pub(crate) own_images: Arc<[PathBuf]>,
    /// Time of the start of the worker: by the monotonic clock, and since 1970.
    pub(crate) clock: (Instant, Duration),
    /// Disks and interfaces that the guest was requested to release.
    pub(crate) detaching: BTreeSet<Item>,
    /// Disks and interfaces of the domain that was wanted last.
    pub(crate) wanted_devices: BTreeSet<Item>,
    /// Sizes of the disks that the launcher created.
    pub(crate) disk_sizes: Vec<protocol::DiskTarget>,
    /// The domain was started with ACPI.
    pub(crate) acpi: bool,
}

impl State {
    /// Creates the state of a worker that has just started.
    pub(crate) fn new(args: &VmiArgs, now: Instant) -> Self {
        Self {
            identity: Identity { namespace: args.namespace.clone(), name: args.name.clone(), uid: args.uid.clone() },
            published: LauncherState { lifecycle: Lifecycle::NoDomain.into(), ..LauncherState::default() },
            stage: Stage::Waiting,
            job: None,
            sync: None,
            next_sync: None,
            actions: BTreeMap::new(),
            kill: None,
            looking: None,
            link: Link::Down { retry_at: now },
            has_read: false,
            reading: Reading::default(),
            refresh_at: now,
            cache_written: false,
            allow_emulation: args.allow_emulation,
            adopting: false,
            terminating: false,
            finish_at: None,
            finished: false,
            failing_since: None,
            clock_is_late: false,
            setting_clock: false,
            active: Arc::default(),
            hotplugged: Path::new(api::hotplug::DIRECTORY).into(),
            own_images: Arc::default(),
            clock: (now, SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            detaching: BTreeSet::new(),
            wanted_devices: BTreeSet::new(),
            disk_sizes: Vec::new(),
            acpi: false,
        }
    }

    /// Returns the name of the domain.
    pub(crate) fn domain_name(&self) -> String {
        domain_name(&self.identity.namespace, &self.identity.name)
    }

    /// Reports a shutdown in progress.
    pub(crate) const fn is_stopping(&self) -> bool {
        matches!(self.job, Some(Job::Shutdown(_)))
    }

    /// Returns the time in nanoseconds since 1970.
    pub(crate) fn nanoseconds(&self, now: Instant) -> u64 {
        let time = self.clock.1.saturating_add(now.duration_since(self.clock.0));
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Reports a useful attempt to connect.
    pub(crate) fn may_connect(&self) -> bool {
        self.cache_written && self.stage != Stage::Ended
    }

    /// Returns the jobs in progress that virt-handler has started.
    pub(crate) fn jobs(&self) -> Vec<JobReport> {
        let started = self.job.iter().filter(|job| !matches!(job, Job::Start(_)));
        started.map(|job| JobReport { name: job.name().to_string(), progress: job.progress().into() }).collect()
    }

    /// Returns the time of the next wake-up.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        use super::job::StartStep::{Adopting, Connecting};

        let connect = match self.link {
            Link::Down { retry_at } if self.may_connect() => Some(retry_at),
            _ => None,
        };
        let reads = self.link == Link::Up && self.stage != Stage::Ended && !self.reading.in_progress;
        let job = match &self.job {
            Some(Job::Start(start)) => match start.step {
                Adopting { until } | Connecting { until, .. } => Some(until),
                _ => None,
            },
            Some(Job::Shutdown(shutdown)) => Some(shutdown.signal_at.min(shutdown.force_at)),
            Some(Job::MigrationOut(out)) => out.wake(),
            Some(Job::MigrationIn(incoming)) => incoming.wake(),
            Some(Job::MemoryDump) | None => None,
        };
        let sync = self.sync.as_ref().and_then(|sync| match sync.step {
            LiveStep::Connecting { until } => Some(until),
            _ => None,
        });
        let looking = self.looking.as_ref().map(|looking| looking.until);
        [connect, reads.then_some(self.refresh_at), job, sync, looking, self.finish_at].into_iter().flatten().min()
    }
}
