//! The status of a migration says that the leader has admitted it, if other replicas decide about it: a limit of the whole cluster needs
//! one place that counts. `admission_controller.rs` admits.
//!
//! ```text
//!             leader: it is its turn                 its replica: target pod created
//!  (waiting) ────────────────────────> Admitted ───────────────────────────────────> counts by its pod
//!      ^                                  │ its replica: no pod can be created now
//!      └──── leader: after the time ─── Admitted=False
//! ```
//! Users cannot write the status. An admitted migration counts as running wherever the leader is. Its replica alone gives its place back:
//! it knows that it creates no pod.

use std::time::Duration;

use api::{Condition, VirtualMachineInstanceMigration, condition, migration::VirtualMachineInstanceMigrationStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Type of the condition.
const ADMITTED: &str = "ferrovirt.io/Admitted";
/// Reasons of the condition.
const TURN: &str = "Turn";
const NO_TARGET_POD: &str = "NoTargetPod";
/// Shortest time between two admissions of a migration. Each is a write.
const LEAST_WAIT: Duration = Duration::from_secs(10);

fn known(migration: &VirtualMachineInstanceMigration) -> Option<&Condition> {
    let mut conditions = migration.status.iter().flat_map(|status| &status.conditions);
    conditions.find(|known| known.type_ == ADMITTED)
}

/// Returns true for a migration that the leader has admitted.
pub(super) fn is_admitted(migration: &VirtualMachineInstanceMigration) -> bool {
    known(migration).is_some_and(Condition::is_true)
}

/// Returns the time until which a migration leaves its turn to others.
pub(super) fn deferred_until(migration: &VirtualMachineInstanceMigration) -> Option<Timestamp> {
    known(migration).filter(|known| known.is_false())?.last_probe_time.as_ref().map(|until| until.0)
}

/// Gives a place back. The migration does not get one again before this time has passed.
pub(super) fn give_back(status: &mut VirtualMachineInstanceMigrationStatus, now: Timestamp, retry: Duration) {
    let until = now.checked_add(retry.max(LEAST_WAIT)).unwrap_or(Timestamp::MAX);
    let shown = Condition::new(ADMITTED, false, NO_TARGET_POD, "", &Time(now));
    condition::set(&mut status.conditions, Condition { last_probe_time: Some(Time(until)), ..shown });
}

/// Admits a migration.
pub(super) fn admit(status: &mut VirtualMachineInstanceMigrationStatus, now: Timestamp) {
    condition::set(&mut status.conditions, Condition::new(ADMITTED, true, TURN, "", &Time(now)));
}
