//! Live migration of a VMI: what its status says, and what the nodes at both ends write into it. Pure.
//!
//! ```text
//!   source                                              target
//!   Owner                                               MigrationTarget
//!     │          status names address and port  ◀────── network, volumes, PrepareMigration, channels
//!     │ channels, Migrate
//!     │ start time, mode, progress                        COPYING: domain detected
//!     │ QEMU has ended, target resumes the guest ───────▶ MOVED
//!     ▼                                                   │ one write passes ownership
//!   MigrationSource                                       ▼
//!     Finish of the old launcher                        Owner: Sync, then completed
//!
//!   A failure is written by the source, because the guest runs on there; the target writes it only before it is ready.
//! ```

pub(super) mod completion;
pub(super) mod progress;
pub(super) mod source;
pub(super) mod target;

use std::{collections::BTreeMap, net::IpAddr};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceStatus, constants::annotation::MIGRATION_PROGRESS,
    vmi::migration::VirtualMachineInstanceMigrationState as State,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{LauncherState, MigrationReport};

use super::{event::Event, observed::Observed};

/// `status.migrationTransport`.
const TRANSPORT: &str = "Unix";
/// `abortStatus` of an abort that ended the migration.
const ABORT_SUCCEEDED: &str = "Succeeded";
/// `abortStatus` of an abort that did not.
const ABORT_FAILED: &str = "Failed";
/// Failure reason of an aborted migration.
const ABORTED: &str = "Live migration has been aborted";

/// Connections of a migration that this node carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// From the node of the source to a launcher of this node.
    Arrival {
        /// UID of the migration.
        migration: String,
        /// Node of the source.
        source_node: String,
        /// UID of the launcher's pod.
        pod: String,
    },
    /// From a launcher of this node to the node of the target.
    Departure {
        /// UID of the migration.
        migration: String,
        /// Node of the target.
        node: String,
        /// Address of its virt-handler.
        address: IpAddr,
        /// Port of its virt-handler.
        port: u16,
        /// UID of the launcher's pod.
        pod: String,
    },
}

/// Changes of metadata that belong to a write of the status: `None` removes the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::vmi) struct Metadata {
    /// Labels.
    pub(in crate::vmi) labels: BTreeMap<&'static str, Option<String>>,
    /// Annotations.
    pub(in crate::vmi) annotations: BTreeMap<&'static str, Option<String>>,
}

impl Metadata {
    /// Returns true if nothing changes.
    pub(in crate::vmi) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }

    fn remove_label(&mut self, vmi: &VirtualMachineInstance, key: &'static str) {
        if vmi.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(key)) {
            self.labels.insert(key, None);
        }
    }

    fn remove_annotation(&mut self, vmi: &VirtualMachineInstance, key: &'static str) {
        if vmi.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(key)) {
            self.annotations.insert(key, None);
        }
    }
}

/// End of a migration at which this node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The domain leaves this node.
    Source,
    /// The domain comes to this node.
    Target,
}

/// The migration in the status of a VMI, as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Migration {
    /// UID of the migration.
    pub(super) uid: String,
    /// This node's end.
    pub(super) side: Side,
    /// Node of the source.
    pub(super) source_node: String,
    /// Node of the target.
    pub(super) target_node: String,
    /// Address and port of the target's virt-handler, once the target is ready.
    pub(super) endpoint: Option<(IpAddr, u16)>,
    /// The status has the start time.
    pub(super) started: bool,
    /// The status has the end time.
    pub(super) ended: bool,
    /// It is over: completed or failed.
    pub(super) over: bool,
    /// It failed.
    pub(super) failed: bool,
    /// A user aborts it.
    pub(super) abort_requested: bool,
    /// The target's node has a pod of the VMI.
    pub(super) target_pod_active: bool,
}

impl Migration {
    /// Returns the migration of a VMI if it concerns `node`.
    pub(super) fn of(vmi: &VirtualMachineInstance, node: &str) -> Option<Self> {
        let status = vmi.status.as_ref()?;
        let state = status.migration_state.as_ref()?;
        let uid = state.migration_uid.clone().filter(|uid| !uid.is_empty())?;
        let (source, target) = (state.source_node.clone()?, state.target_node.clone().filter(|name| !name.is_empty())?);
        let side = match (source == node, target == node) {
            (true, false) => Side::Source,
            (false, true) => Side::Target,
            _ => return None,
        };
        Some(Self {
            uid,
            side,
            endpoint: endpoint(state),
            started: state.start_timestamp.is_some(),
            ended: state.end_timestamp.is_some(),
            over: state.completed || state.failed,
            failed: state.failed,
            abort_requested: state.abort_requested,
            target_pod_active: status.active_pods.values().any(|name| *name == target),
            source_node: source,
            target_node: target,
        })
    }
}

/// Returns address and port of the target's virt-handler.
fn endpoint(state: &State) -> Option<(IpAddr, u16)> {
    let address = state.target_node_address.as_ref()?.parse().ok()?;
    let port = state.target_direct_migration_node_ports.iter().find(|(_, channel)| **channel == 0)?.0;
    Some((address, port.parse().ok().filter(|port| *port != 0)?))
}

impl Observed {
    /// Returns the migration by which the domain leaves this node, until ownership has passed or the migration has ended.
    pub(in crate::vmi) fn departing(&self) -> Option<&Migration> {
        let owner = self.role == super::role::Role::Owner;
        self.facts.migration.as_ref().filter(|known| owner && known.side == Side::Source && !known.over && !known.ended)
    }

    /// Returns the migration by which a domain comes to this node, until it has ended.
    pub(in crate::vmi) fn arriving(&self) -> Option<&Migration> {
        let is_target = self.role == super::role::Role::MigrationTarget;
        self.facts.migration.as_ref().filter(|known| is_target && known.side == Side::Target && !known.over)
    }

    /// Returns the launcher's report of a migration.
    pub(in crate::vmi) fn migration_report(&self, uid: &str) -> Option<&MigrationReport> {
        report_of(self.report.as_ref()?, uid)
    }

    /// Returns the launcher's report while it copies a departing domain.
    pub(in crate::vmi) fn copying(&self) -> Option<&MigrationReport> {
        let report = self.migration_report(&self.departing()?.uid)?;
        (report.step() == protocol::MigrationStep::Copying).then_some(report)
    }
}

fn report_of<'a>(state: &'a LauncherState, uid: &str) -> Option<&'a MigrationReport> {
    state.migration.as_ref().filter(|report| report.migration == uid)
}

/// Marks a migration as failed. Returns the event.
fn fail(
    status: &mut VirtualMachineInstanceStatus,
    metadata: &mut Metadata,
    vmi: &VirtualMachineInstance,
    reason: &str,
    aborted: bool,
    end: Time,
) -> Event {
    let state = status.migration_state.get_or_insert_default();
    (state.failed, state.completed) = (true, true);
    state.failure_reason = Some(reason.to_owned());
    state.end_timestamp.get_or_insert(end);
    if aborted {
        state.abort_status = Some(ABORT_SUCCEEDED.into());
    }
    metadata.remove_annotation(vmi, MIGRATION_PROGRESS);
    let uid = state.migration_uid.as_deref().unwrap_or_default();
    Event::warning("Migrated", format!("VirtualMachineInstance migration uid {uid} failed. reason:{reason}"))
}

/// Returns a time of a report: nanoseconds since 1970 by the clock of the node. Unset and absurd times become `now`.
fn time_of(nanoseconds: u64, now: jiff::Timestamp) -> Time {
    let reported = i128::from(nanoseconds);
    let time = (nanoseconds != 0).then(|| jiff::Timestamp::from_nanosecond(reported).ok()).flatten();
    Time(time.filter(|time| *time <= now).unwrap_or(now))
}
