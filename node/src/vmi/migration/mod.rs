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
//!   A failure is written by the source, because the guest runs on there; the target writes it before it is ready, or if the source is
//!   silent (docs/design/migration.md).
//! ```

pub(super) mod completion;
pub(super) mod progress;
pub(super) mod source;
pub(super) mod target;

use api::{VirtualMachineInstance, VirtualMachineInstanceStatus, constants::annotation::MIGRATION_PROGRESS};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{LauncherState, MigrationReport};

use super::{
    desired::Metadata,
    event::Event,
    migration_facts::{Migration, Side},
    observed::Observed,
};

/// `status.migrationTransport`.
const TRANSPORT: &str = "Unix";
/// `abortStatus` of an abort that ended the migration.
const ABORT_SUCCEEDED: &str = "Succeeded";
/// `abortStatus` of an abort that did not.
const ABORT_FAILED: &str = "Failed";
/// Failure reason of an aborted migration.
const ABORTED: &str = "Live migration has been aborted";
/// Failure reason of a migration that a test lets fail. Clients match it.
const FORCED: &str = "Failed migration to satisfy functional test condition";

impl Observed {
    /// Returns the migration by which the domain leaves this node, until ownership has passed or the migration has ended.
    pub(in crate::vmi) fn source_migration(&self) -> Option<&Migration> {
        let owner = self.role == super::role::Role::Owner;
        self.facts.migration.as_ref().filter(|known| owner && known.side == Side::Source && !known.over && !known.ended)
    }

    /// Returns the migration by which a domain comes to this node, until it has ended.
    pub(in crate::vmi) fn target_migration(&self) -> Option<&Migration> {
        let is_target = self.role == super::role::Role::MigrationTarget;
        self.facts.migration.as_ref().filter(|known| is_target && known.side == Side::Target && !known.over)
    }

    /// Returns the launcher's report of a migration.
    pub(in crate::vmi) fn migration_report(&self, uid: &str) -> Option<&MigrationReport> {
        report_of(self.report.as_ref()?, uid)
    }

    /// Returns the launcher's report while it copies the domain to the target.
    pub(in crate::vmi) fn copying(&self) -> Option<&MigrationReport> {
        let report = self.migration_report(&self.source_migration()?.uid)?;
        (report.step() == protocol::MigrationStep::Copying).then_some(report)
    }
}

fn report_of<'a>(state: &'a LauncherState, uid: &str) -> Option<&'a MigrationReport> {
    state.migration.as_ref().filter(|report| report.migration == uid)
}

/// Returns true if a VMI has an annotation, with any value.
pub(in crate::vmi) fn is_annotated(vmi: &VirtualMachineInstance, key: &str) -> bool {
    vmi.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(key))
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
