//! The wait of a migration that virt-controller created, after former ones of the VMI failed.

use std::{sync::Arc, time::Duration};

use api::{MigrationPhase, VirtualMachineInstanceMigration, constants::annotation};
use daemon::backoff;
use jiff::Timestamp;

/// First and longest wait after failures.
const WAIT: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20 << 10));

/// Returns true for a migration that virt-controller created.
fn is_automatic(migration: &VirtualMachineInstanceMigration) -> bool {
    let annotations = migration.metadata.annotations.as_ref();
    let keys = [annotation::EVACUATION_MIGRATION, annotation::WORKLOAD_UPDATE_MIGRATION];
    annotations.is_some_and(|annotations| keys.iter().any(|key| annotations.contains_key(*key)))
}

/// Returns the time at which a migration entered a phase.
pub(super) fn entered(migration: &VirtualMachineInstanceMigration, phase: &MigrationPhase) -> Option<Timestamp> {
    let times = migration.status.iter().flat_map(|status| &status.phase_transition_timestamps);
    let mut times = times.filter(|entry| entry.phase.as_ref() == Some(phase));
    times.find_map(|entry| entry.phase_transition_timestamp.as_ref()).map(|at| at.0)
}

/// Returns the time until which a migration waits. `all`: the migrations of the VMI.
pub(super) fn until(
    migration: &VirtualMachineInstanceMigration,
    all: &[Arc<VirtualMachineInstanceMigration>],
) -> Option<Timestamp> {
    let ignores = migration.metadata.annotations.as_ref();
    if ignores.is_some_and(|annotations| annotations.contains_key(annotation::IGNORE_MIGRATION_BACKOFF))
        || !is_automatic(migration)
    {
        return None;
    }
    let mut others: Vec<&Arc<VirtualMachineInstanceMigration>> = all
        .iter()
        .filter(|other| other.metadata.uid != migration.metadata.uid && is_automatic(other))
        .filter(|other| other.metadata.deletion_timestamp.is_none())
        .collect();
    others.sort_by_key(|other| std::cmp::Reverse(other.metadata.creation_timestamp.as_ref().map(|at| at.0)));
    let failed: Vec<_> = others
        .into_iter()
        .take_while(|other| *other.phase() != MigrationPhase::Succeeded)
        .filter(|other| *other.phase() == MigrationPhase::Failed)
        .collect();
    let newest = entered(failed.first()?, &MigrationPhase::Failed)?;
    let failures = u32::try_from(failed.len()).unwrap_or(u32::MAX);
    newest.checked_add(backoff::pause(WAIT, failures)).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn migration(number: i64, phase: &str, annotation: &str, is_deleted: bool) -> Arc<VirtualMachineInstanceMigration> {
        let at = Timestamp::from_second(1000 * number).unwrap().to_string();
        let mut object = json!({
            "metadata": {
                "name": format!("m{number}"), "uid": format!("u{number}"), "creationTimestamp": at,
                "annotations": {annotation: "", "x": "y"},
            },
            "spec": {"vmiName": "m"},
            "status": {"phase": phase,
                "phaseTransitionTimestamps": [{"phase": phase, "phaseTransitionTimestamp": at}]},
        });
        if is_deleted {
            object["metadata"]["deletionTimestamp"] = json!(at);
        }
        Arc::new(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn wait_doubles_with_each_failure_since_the_last_success() {
        let (evacuation, update) = (annotation::EVACUATION_MIGRATION, annotation::WORKLOAD_UPDATE_MIGRATION);
        let failed = |number| migration(number, "Failed", evacuation, false);
        let own = migration(9, "Pending", evacuation, false);
        for (others, expected) in [
            (vec![], None),
            (vec![failed(1)], Some(1020)),
            (vec![failed(1), failed(2)], Some(2040)),
            (vec![failed(1), failed(2), failed(3)], Some(3080)),
            (vec![failed(1), migration(2, "Succeeded", update, false), failed(3)], Some(3020)),
            (vec![failed(1), migration(2, "Succeeded", update, false)], None),
            (vec![failed(1), migration(2, "Failed", evacuation, true)], Some(1020)),
            (vec![migration(1, "Failed", "manual", false)], None),
            (vec![own.clone()], None),
        ] {
            let until = until(&own, &others);
            assert_eq!(until.map(Timestamp::as_second), expected, "{others:?}");
        }
        let manual = migration(9, "Pending", "manual", false);
        assert_eq!(until(&manual, &[failed(1)]), None);
        let mut ignoring = (*own).clone();
        let key = annotation::IGNORE_MIGRATION_BACKOFF.to_owned();
        ignoring.metadata.annotations.get_or_insert_default().insert(key, String::new());
        assert_eq!(until(&ignoring, &[failed(1)]), None);
    }
}
