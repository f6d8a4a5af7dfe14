//! The base that all jobs share: identity, connection, reads of the domain, its stage, and the published state. A value.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use protocol::{LauncherState, Lifecycle};
use tokio::time::Instant;

use super::{
    effect::{DomainCall, Effect, Work},
    request::{Action, Answer, JobName, RequestError, RequestId, Wanted},
};
use crate::{
    domain::{diff::Item, domain_name, parse::DomainConfig},
    hypervisor::HypervisorError,
    options::VmiArgs,
    paths::Paths,
};

/// Longest interval between reads of the domain's state: an event may be missed while libvirt's daemon restarts.
const REFRESH: Duration = Duration::from_secs(30);

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

/// Work that follows a read of the domain, or the work in progress.
#[derive(Clone, Debug)]
pub(crate) enum Next {
    Answer(RequestId, Answer),
    /// Answer requests to destroy the domain.
    Killed(Vec<RequestId>, Result<(), HypervisorError>),
    /// Report the read to a job.
    Report(JobName),
    /// Carry out an action.
    Act(RequestId, Action),
    /// Bring the domain of a former worker in line with the VMI.
    Sync(Vec<RequestId>, Arc<Wanted>),
    /// Read the domain unless it has ended.
    Read,
}

/// Reads of the domain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    /// A read is in progress.
    pub(crate) in_progress: bool,
    /// Work that follows it.
    pub(crate) then: Vec<Next>,
    /// Another read follows, since the domain may have changed meanwhile.
    pub(crate) again: bool,
    /// Work that follows that read.
    pub(crate) then_again: Vec<Next>,
    /// The domain starts: a read would find it half-started, and one follows in any case.
    pub(crate) held: bool,
    /// The read in progress began before the start of the domain: it may show the end of an earlier one.
    pub(crate) outdated: bool,
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
    pub(crate) until: Instant,
    pub(crate) then: Vec<(RequestId, Action)>,
}

/// Identity of the pod's VMI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// The base of the engine's state.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    /// Time of the decision in progress.
    pub(crate) now: Instant,
    /// Effects of the decision in progress.
    pub(crate) effects: Vec<Effect>,
    /// Work that follows in the same decision.
    pub(crate) due: VecDeque<Next>,
    /// The pod's VMI.
    pub(crate) identity: Identity,
    /// State that virt-handler sees.
    pub(crate) published: LauncherState,
    /// Stage of the domain's life.
    pub(crate) stage: Stage,
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
    /// The guest is being shut down.
    pub(crate) stopping: bool,
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
    /// Directory of the container disks.
    pub(crate) container_disks: Arc<Path>,
    /// Time of the start of the worker: by the monotonic clock, and since 1970.
    pub(crate) clock: (Instant, Duration),
    /// Disks and interfaces that the guest was requested to release.
    pub(crate) detaching: BTreeSet<Item>,
    /// Disks and interfaces of the domain that was wanted last.
    pub(crate) wanted_devices: BTreeSet<Item>,
    /// Sizes of the disks that the launcher created.
    pub(crate) disk_sizes: Vec<protocol::DiskTarget>,
    /// The domain has, or had, ACPI.
    pub(crate) acpi: bool,
    /// Time of the last crash of the guest's kernel that was read.
    pub(crate) crashed_at: Option<Instant>,
}

impl Base {
    /// Creates the base of a worker that has just started.
    pub(crate) fn new(args: &VmiArgs, now: Instant) -> Self {
        Self {
            now,
            effects: Vec::new(),
            due: VecDeque::new(),
            identity: Identity { namespace: args.namespace.clone(), name: args.name.clone(), uid: args.uid.clone() },
            published: LauncherState { lifecycle: Lifecycle::NoDomain.into(), ..LauncherState::default() },
            stage: Stage::Waiting,
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
            stopping: false,
            terminating: false,
            finish_at: None,
            finished: false,
            failing_since: None,
            clock_is_late: false,
            setting_clock: false,
            active: Arc::default(),
            hotplugged: Path::new(api::hotplug::DIRECTORY).into(),
            own_images: Arc::default(),
            container_disks: Paths::default().container_disks.into(),
            clock: (now, SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            detaching: BTreeSet::new(),
            wanted_devices: BTreeSet::new(),
            disk_sizes: Vec::new(),
            acpi: false,
            crashed_at: None,
        }
    }

    pub(crate) fn domain_name(&self) -> String {
        domain_name(&self.identity.namespace, &self.identity.name)
    }

    /// Returns the file of a hot-plugged volume; `None` for a name that is no component of a path.
    pub(crate) fn volume_file(&self, volume: &str) -> Option<PathBuf> {
        let is_name = !volume.is_empty() && !volume.starts_with('.') && !volume.contains('/');
        is_name.then(|| self.hotplugged.join(api::hotplug::file_name(volume, false)))
    }

    /// Returns the time of the decision in nanoseconds since 1970.
    pub(crate) fn nanoseconds(&self) -> u64 {
        let time = self.clock.1.saturating_add(self.now.duration_since(self.clock.0));
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Reports a useful attempt to connect.
    pub(crate) fn may_connect(&self) -> bool {
        self.cache_written && self.stage != Stage::Ended
    }

    /// Fails while the connection is down.
    pub(crate) fn check_link(&self) -> Result<(), RequestError> {
        if self.link == Link::Up { Ok(()) } else { Err(disconnected()) }
    }

    /// Reports that the domain was read, or found missing, through the present connection.
    pub(crate) fn has_read(&self) -> bool {
        self.link == Link::Up && self.has_read
    }

    /// Fails for another VMI than the pod's.
    pub(crate) fn check_vmi(&self, wanted: &Wanted) -> Result<(), RequestError> {
        let (identity, vmi) = (&self.identity, &wanted.vmi.metadata);
        let is_same = vmi.name.as_ref() == Some(&identity.name)
            && vmi.namespace.as_ref() == Some(&identity.namespace)
            && vmi.uid.as_ref() == Some(&identity.uid);
        if is_same { Ok(()) } else { Err(RequestError::OtherVmi(self.domain_name())) }
    }

    /// Returns the time of the next wake-up.
    pub(crate) fn wake(&self) -> Option<Instant> {
        let connect = match self.link {
            Link::Down { retry_at } if self.may_connect() => Some(retry_at),
            _ => None,
        };
        let reads = self.link == Link::Up && self.stage != Stage::Ended && !self.reading.in_progress;
        let looking = self.looking.as_ref().map(|looking| looking.until);
        [connect, reads.then_some(self.refresh_at), looking, self.finish_at].into_iter().flatten().min()
    }

    pub(crate) fn answer(&mut self, id: RequestId, answer: Answer) {
        self.effects.push(Effect::Answer(id, answer));
    }

    pub(crate) fn answer_all(&mut self, ids: Vec<RequestId>, answer: &Answer) {
        self.effects.extend(ids.into_iter().map(|id| Effect::Answer(id, answer.clone())));
    }

    /// Calls libvirt, for no job.
    pub(crate) fn call(&mut self, call: DomainCall) {
        self.effects.push(Effect::Call(None, call));
    }

    /// Calls libvirt for a job.
    pub(crate) fn call_for(&mut self, job: JobName, call: DomainCall) {
        self.effects.push(Effect::Call(Some(job), call));
    }

    /// Lets the driver work for a job.
    pub(crate) fn work_for(&mut self, job: JobName, work: Work) {
        self.effects.push(Effect::Work(job, work));
    }

    /// Lets actions follow the work in progress.
    pub(crate) fn act_later(&mut self, actions: Vec<(RequestId, Action)>) {
        self.due.extend(actions.into_iter().map(|(id, action)| Next::Act(id, action)));
    }

    /// Reads the domain. A domain that starts is not read.
    pub(crate) fn read(&mut self) {
        if self.link != Link::Up {
            self.reading.is_fresh = false;
        } else if self.reading.held {
            self.refresh_at = self.now + REFRESH;
        } else {
            self.begin_read(None);
        }
    }

    /// Reads the domain, then does the work; without connection the work follows at once.
    pub(crate) fn read_then(&mut self, next: Next) {
        if self.link == Link::Up {
            self.begin_read(Some(next));
        } else {
            self.reading.is_fresh = false;
            self.due.push_back(next);
        }
    }

    /// Reads the domain for a job.
    pub(crate) fn read_for(&mut self, job: JobName) {
        self.read_then(Next::Report(job));
    }

    /// Begins the read that follows the one that has just ended, if one is due.
    pub(crate) fn read_again(&mut self) {
        if !std::mem::take(&mut self.reading.again) {
            return;
        }
        let mut then = std::mem::take(&mut self.reading.then_again).into_iter();
        match then.next() {
            Some(next) => self.read_then(next),
            None => self.read(),
        }
        if self.reading.in_progress {
            self.reading.then.extend(then);
        } else {
            self.due.extend(then);
        }
    }

    /// A read in progress may have missed the latest change, so another follows it.
    fn begin_read(&mut self, next: Option<Next>) {
        self.refresh_at = self.now + REFRESH;
        if self.reading.in_progress {
            self.reading.again = true;
            self.reading.then_again.extend(next);
        } else {
            self.reading.in_progress = true;
            self.reading.then.extend(next);
            self.call(DomainCall::Read);
        }
    }
}

/// Returns the error of a wait for libvirt's daemon.
pub(crate) fn daemon_is_late() -> RequestError {
    HypervisorError::Disconnected("libvirt's daemon did not start in time".into()).into()
}

/// Returns the error of a request while the connection is down.
pub(crate) fn disconnected() -> RequestError {
    HypervisorError::Disconnected("reconnecting".into()).into()
}
