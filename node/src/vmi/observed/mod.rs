//! Everything that the task of a VMI has observed: the object, the launcher, the results of its own calls.
//!
//! [`link`] is the connection to the launcher, [`report`] applies the states that the launcher reports, [`outcome`] applies the
//! results of effects. [`super::decide`] only reads this.

mod link;
mod outcome;
mod report;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use protocol::{LauncherState, MigrationStep, Nic};

pub(super) use self::{
    link::Link,
    outcome::{Outcome, pause},
    report::{GUEST_PANICKED, IoPause},
};
use super::{
    awaited_save::AwaitedSave,
    conditions,
    facts::Facts,
    launcher_volumes::LauncherVolumes,
    migration_facts::Route,
    phase::Domain,
    role::{self, Role},
};
use crate::network::PodNetwork;

/// Lowest average interval of writes to one VMI, independent of the reports of its launcher.
pub(super) const WRITE_INTERVAL: Duration = Duration::from_secs(2);
/// Writes that may follow each other at once: more than a start and the requests of a user need.
pub(super) const WRITE_BURST: u32 = 12;
/// Writes that a change of the spec adds to those: a volume that is plugged in or removed shows in two or three. No launcher can
/// change the spec.
const WRITES_PER_CHANGE: u32 = 3;

/// The clocks of the task: `since_start` for waits, `wall` for timestamps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    /// Time since the task started.
    pub(super) since_start: Duration,
    /// Time of day.
    pub(super) wall: jiff::Timestamp,
}

/// State of the object in the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectState {
    /// It exists, and the known version is current.
    Current,
    /// The known version may be outdated, or the object may be deleted: it has to be read.
    Unverified,
    /// It was deleted at this time.
    Deleted(Duration),
}

/// A failed call that is retried later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) message: String,
    /// Consecutive failures.
    pub(super) count: u32,
    /// Time of the next attempt.
    pub(super) retry_at: Duration,
    /// No attempt can succeed.
    pub(super) permanent: bool,
}

/// A shutdown in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopping {
    /// Start of the grace period.
    pub(super) since: Duration,
    /// Time of the last shutdown request or forced stop.
    pub(super) signalled: Duration,
    /// The domain was stopped by force.
    pub(super) killed: bool,
}

/// A repeated Sync at growing intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retry {
    /// Attempts so far.
    pub(super) attempts: u32,
    /// Time of the next attempt.
    pub(super) retry_at: Duration,
}

/// A migration that the launcher refused to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RefusedMigration {
    /// UID of the migration.
    pub(super) migration: String,
    /// The last message.
    pub(super) message: String,
    /// Number of refusals.
    pub(super) count: u32,
    /// No attempt can succeed.
    pub(super) permanent: bool,
}

/// Slot of the attempt to connect. Calls to the launcher have slots of their own.
pub(super) const CONNECT: &str = "connect";
/// Slot of a write or read of the object.
pub(super) const RECORD: &str = "record";
/// Slot of the request of a user.
pub(super) const REQUEST: &str = "request";
/// Slot of Sync.
pub(super) const SYNC: &str = "sync";
/// Slot of the setup of the network.
pub(super) const NETWORK: &str = "network";
/// Slot of the begin of a migration.
pub(super) const MIGRATE: &str = "migrate";

/// Everything that the task of a VMI has observed.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    /// Name of this node.
    pub(super) node: String,
    /// The object as last read or written.
    pub(super) vmi: Arc<VirtualMachineInstance>,
    /// The parts of the object that decisions need.
    pub(super) facts: Facts,
    /// Role of this node.
    pub(super) role: Role,
    /// State of the object in the API server.
    pub(super) object: ObjectState,
    /// Connection to the launcher.
    pub(super) link: Link,
    /// Last state that the launcher reported. Outlives the connection.
    pub(super) report: Option<LauncherState>,
    /// The launcher reported a state over the present connection.
    pub(super) reported: bool,
    /// The pod's network as last set up. Outlives the connection.
    pub(super) network: Option<Arc<PodNetwork>>,
    /// Connection over which the files of host disks were last created.
    pub(super) host_disks: Option<u64>,
    /// Hot-plugged volumes of the launcher; `None` until they are observed over the present connection.
    pub(super) volumes: Option<LauncherVolumes>,
    /// Volumes that the call in progress hands over.
    pub(super) handing_over: BTreeSet<String>,
    /// The last failed call, if it is retried.
    pub(super) failure: Option<Failure>,
    /// The last failed setup of interfaces that are plugged or unplugged while the guest runs, if it is retried.
    pub(super) network_failure: Option<Failure>,
    /// Consecutive connections that ended soon.
    pub(super) short_connections: u32,
    /// Time of the last connection.
    pub(super) connected_at: Duration,
    /// Earliest time of the next call to the launcher, after a call that found the connection broken.
    pub(super) hold_until: Duration,
    /// Shutdown in progress.
    pub(super) stopping: Option<Stopping>,
    /// Pause after an I/O error.
    pub(super) io_pause: Option<IoPause>,
    /// Repeated Sync for items that failed.
    pub(super) item_retry: Option<Retry>,
    /// The spec of the running VMI changed and its launcher, of an older release, does not apply such changes.
    pub(super) unsupported_change: bool,
    /// Earliest time of the next request to dump or save the memory.
    pub(super) dump_at: Duration,
    /// A save of the memory that the launcher has not begun.
    pub(super) awaited_save: Option<AwaitedSave>,
    /// The launcher was permitted to exit.
    pub(super) finished: bool,
    /// SELinux context of the launcher's container.
    pub(super) security_context: Option<String>,
    /// Time of the launcher's first answer.
    pub(super) hello_at: Option<jiff::Timestamp>,
    /// The guest has run.
    pub(super) ran: bool,
    /// The event `Created` was sent.
    pub(super) created_sent: bool,
    /// Number of panics of the guest's kernel in the last report; `None` before the first one to this process.
    pub(super) panics: Option<u32>,
    /// Time of the last event `GuestPanicked`.
    pub(super) panicked_at: Option<Duration>,
    /// Time of the last event `GuestAgentPingFailed`.
    pub(super) ping_failed_at: Option<Duration>,
    /// Since when there is no domain although the guest has run.
    pub(super) no_domain_since: Option<Duration>,
    /// Since when the report of the guest differs from the status.
    pub(super) guest_changed_at: Option<Duration>,
    /// Time of the last write of the guest's report.
    pub(super) guest_written_at: Option<Duration>,
    /// Retry of a failed write.
    pub(super) write_retry: Option<Failure>,
    /// Grows by [`WRITE_INTERVAL`] with each write and is never behind the clock: the distance to the clock measures recent
    /// writes.
    pub(super) paced: Duration,
    /// Address and port under which this node accepts migrations.
    pub(super) endpoint: Option<(IpAddr, u16)>,
    /// This virt-handler is about to stop: it begins no migration, and leaves those that have not begun to the next one.
    pub(super) draining: bool,
    /// Connections of a migration that are relayed.
    pub(super) route: Option<Route>,
    /// UID of the migration for which the launcher was prepared over the present connection.
    pub(super) prepared_migration: Option<String>,
    /// UID of the migration that the launcher accepted to begin.
    pub(super) called_migration: Option<String>,
    /// The launcher refused to begin a migration.
    pub(super) refused_migration: Option<RefusedMigration>,
    /// UID of the migration whose abort was requested.
    pub(super) aborted_migration: Option<String>,
    /// Earliest time at which an abort that has failed is requested again.
    pub(super) abort_at: Duration,
    /// Since when the launcher reports that the domain has moved away.
    pub(super) moved_since: Option<Duration>,
    /// Since when another node owns the VMI.
    pub(super) left_at: Option<Duration>,
    /// Since when the source of a migration to this node has no pod that could run the guest.
    pub(super) source_gone_since: Option<Duration>,
    /// Since when the launcher reports that a domain has not come to this node.
    pub(super) not_moved_since: Option<Duration>,
    /// UID of the migration for which this task began, if it began as the target of one.
    pub(super) target_of: Option<String>,
    /// A launcher of this node is, or was, to receive the domain.
    pub(super) was_target: bool,
    /// Time of the last write of a migration's progress.
    pub(super) progress_written_at: Option<Duration>,
    /// Slots of the calls in progress.
    pub(super) busy: BTreeSet<&'static str>,
}

/// Stage of a VMI for logs; see the diagram in [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No connection to a launcher.
    Waiting,
    /// Hello and network setup.
    Preparing,
    /// Sync is called, no domain runs yet.
    Starting,
    /// The guest runs.
    Live,
    /// The guest is shut down.
    Stopping,
    /// The domain ended.
    Ended,
    /// The launcher was permitted to exit.
    Finishing,
    /// The domain comes to this node.
    Receiving,
    /// The domain has left this node.
    Left,
}

impl Observed {
    /// Returns the state at the start of a task: only the object is known.
    pub(super) fn new(vmi: Arc<VirtualMachineInstance>, node: &str) -> Self {
        let (facts, role) = (Facts::of(&vmi, node), role::decide(&vmi, node));
        let was_target = role == Role::MigrationTarget;
        let target_of = facts.migration.as_ref().filter(|_| was_target).map(|migration| migration.uid.clone());
        Self {
            facts,
            role,
            target_of,
            was_target,
            unsupported_change: conditions::shows_unsupported_change(&vmi),
            node: node.to_owned(),
            vmi,
            object: ObjectState::Current,
            link: Link::down(Duration::ZERO, false),
            report: None,
            reported: false,
            network: None,
            host_disks: None,
            volumes: None,
            handing_over: BTreeSet::new(),
            failure: None,
            network_failure: None,
            short_connections: 0,
            connected_at: Duration::ZERO,
            hold_until: Duration::ZERO,
            stopping: None,
            io_pause: None,
            item_retry: None,
            dump_at: Duration::ZERO,
            awaited_save: None,
            finished: false,
            security_context: None,
            hello_at: None,
            ran: false,
            created_sent: false,
            panics: None,
            panicked_at: None,
            ping_failed_at: None,
            no_domain_since: None,
            guest_changed_at: None,
            guest_written_at: None,
            write_retry: None,
            paced: Duration::ZERO,
            endpoint: None,
            draining: false,
            route: None,
            prepared_migration: None,
            called_migration: None,
            refused_migration: None,
            aborted_migration: None,
            abort_at: Duration::ZERO,
            moved_since: None,
            left_at: None,
            source_gone_since: None,
            not_moved_since: None,
            progress_written_at: None,
            busy: BTreeSet::new(),
        }
    }

    /// Returns the domain as last reported.
    pub(super) fn domain(&self) -> Domain {
        Domain::of(self.report.as_ref())
    }

    /// Returns the earliest time of the next call to the launcher.
    pub(super) fn call_at(&self) -> Duration {
        self.failure.as_ref().map_or(Duration::ZERO, |failure| failure.retry_at).max(self.hold_until)
    }

    /// Returns the earliest time of the next setup of the network.
    pub(super) fn network_at(&self) -> Duration {
        self.network_failure.as_ref().map_or(Duration::ZERO, |failure| failure.retry_at).max(self.call_at())
    }

    /// Returns true if the VMI must stop: its object is deleted or about to be.
    pub(super) fn is_leaving(&self) -> bool {
        self.facts.deleting || matches!(self.object, ObjectState::Deleted(_))
    }

    /// Returns the network devices that are set up.
    pub(super) fn nics(&self) -> Vec<Nic> {
        self.network.as_ref().map(|network| network.nics.clone()).unwrap_or_default()
    }

    /// Returns true while a call of this slot is in progress.
    pub(super) fn is_busy(&self, slot: &str) -> bool {
        self.busy.contains(slot)
    }

    /// Returns the stage for logs.
    pub(super) fn stage(&self) -> Stage {
        let Link::Up { greeted, networked, .. } = &self.link else { return Stage::Waiting };
        if self.finished {
            return Stage::Finishing;
        }
        match self.role {
            Role::Owner | Role::None => {}
            Role::MigrationSource => return Stage::Left,
            Role::MigrationTarget => return Stage::Receiving,
        }
        match self.domain() {
            Domain::Ended(_) => Stage::Ended,
            domain if domain.is_alive() && self.stopping.is_some() => Stage::Stopping,
            domain if domain.is_alive() => Stage::Live,
            _ if *greeted && *networked => Stage::Starting,
            _ => Stage::Preparing,
        }
    }

    /// Returns true if the domain may be changed: it neither leaves this node nor is it about to.
    pub(super) fn may_change_domain(&self) -> bool {
        self.role == Role::Owner && self.source_migration().is_none()
    }

    /// Notes since when another node owns the VMI, and since when a migration to this node cannot end as usual.
    pub(super) fn note_role(&mut self, now: Now) {
        let migration = self.target_migration();
        let is_gone = migration.is_some_and(|migration| !migration.source_pod_active);
        let report = migration.and_then(|migration| self.migration_report(&migration.uid));
        let has_not_moved = report.is_some_and(|report| report.step() == MigrationStep::NotMoved);
        self.source_gone_since = is_gone.then(|| self.source_gone_since.unwrap_or(now.since_start));
        self.not_moved_since = has_not_moved.then(|| self.not_moved_since.unwrap_or(now.since_start));
        match self.role {
            Role::MigrationSource => {
                self.left_at.get_or_insert(now.since_start);
            }
            _ => self.left_at = None,
        }
    }

    /// Applies a version of the object from the watch.
    pub(super) fn apply_object(&mut self, vmi: Arc<VirtualMachineInstance>, node: &str) {
        self.object = ObjectState::Current;
        self.replace_object(vmi, node);
    }

    /// Replaces the object unless the new version is older: the watch is behind virt-handler's own writes. Leaves
    /// [`Self::object`] as it is, because the answer to a write can arrive after the deletion event.
    fn replace_object(&mut self, vmi: Arc<VirtualMachineInstance>, node: &str) {
        if is_older(&vmi, &self.vmi) {
            return;
        }
        let facts = Facts::of(&vmi, node);
        if facts.spec != self.facts.spec {
            self.paced = self.paced.saturating_sub(WRITE_INTERVAL * WRITES_PER_CHANGE);
            self.unsupported_change |= self.domain().is_alive() && self.link.lacks_item_results();
        }
        self.facts = facts;
        self.role = role::decide(&vmi, node);
        if self.role == Role::Owner {
            self.was_target = false;
        }
        self.vmi = vmi;
    }

    /// Returns true if a domain is to come by a migration for which this task did not begin: another launcher receives it, and
    /// another task begins with nothing that was observed here.
    pub(super) fn is_superseded(&self) -> bool {
        let comes = self.facts.migration.as_ref().map(|migration| &migration.uid);
        self.role == Role::MigrationTarget && comes != self.target_of.as_ref()
    }
}

/// Compares resource versions. They are ordered numbers; if one is not, the later arrival counts as newer.
fn is_older(vmi: &VirtualMachineInstance, known: &VirtualMachineInstance) -> bool {
    let version = |vmi: &VirtualMachineInstance| vmi.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    matches!((version(vmi), version(known)), (Some(new), Some(old)) if new < old)
}
