//! Unsupported fields of migrations and of their policies.

use api::{migration::VirtualMachineInstanceMigrationSpec, policy::MigrationPolicySpec};

use super::add_error;
use crate::context::FieldErrors;

/// Reason for fields of migrations that leave the cluster or the namespace.
pub(crate) const DECENTRALIZED: &str = "decentralized live migration, to another cluster or namespace";
const EXPERIMENTAL: &str = "the stall detector, the schedule of downtimes and compression";

/// Path of a field below the spec, reason, and test for its use.
type Entry<T> = (&'static str, &'static str, fn(&T) -> bool);

const MIGRATION: &[Entry<VirtualMachineInstanceMigrationSpec>] = &[
    ("sendTo", DECENTRALIZED, |spec| spec.send_to.is_some()),
    ("receive", DECENTRALIZED, |spec| spec.receive.is_some()),
];

const POLICY: &[Entry<MigrationPolicySpec>] = &[("experimental", EXPERIMENTAL, |spec| spec.experimental.is_some())];

fn errors<T>(entries: &[Entry<T>], spec: &T) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (path, reason, _) in entries.iter().filter(|(_, _, used)| used(spec)) {
        add_error(format!("spec.{path}"), reason, &mut errors);
    }
    errors
}

/// Returns an error for each unsupported field of a migration.
pub(crate) fn migration(spec: &VirtualMachineInstanceMigrationSpec) -> FieldErrors {
    errors(MIGRATION, spec)
}

/// Returns an error for each unsupported field of a policy.
pub(crate) fn policy(spec: &MigrationPolicySpec) -> FieldErrors {
    errors(POLICY, spec)
}

/// Returns the unsupported fields, after the names of their kinds, with their reasons, for documents.
#[must_use]
pub fn fields() -> Vec<(String, &'static str)> {
    let migrations =
        MIGRATION.iter().map(|(path, reason, _)| (format!("VirtualMachineInstanceMigration: spec.{path}"), *reason));
    let policies = POLICY.iter().map(|(path, reason, _)| (format!("MigrationPolicy: spec.{path}"), *reason));
    migrations.chain(policies).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn each_unsupported_field_is_refused_by_name() {
        let named = |errors: FieldErrors| -> Vec<String> {
            errors.as_slice().iter().map(|error| error.field.clone()).collect()
        };
        for (spec, expected) in [
            (json!({"vmiName": "web", "addedNodeSelector": {"a": "b"}}), vec![]),
            (json!({"vmiName": "web", "sendTo": {"migrationID": "a", "connectURL": "u"}}), vec!["spec.sendTo"]),
            (json!({"vmiName": "web", "receive": {"migrationID": "a"}}), vec!["spec.receive"]),
        ] {
            assert_eq!(named(migration(&serde_json::from_value(spec).unwrap())), expected);
        }
        for (change, expected) in [
            (json!({"allowAutoConverge": true, "allowPostCopy": true, "allowWorkloadDisruption": true}), vec![]),
            (json!({"bandwidthPerMigration": "64Mi", "completionTimeoutPerGiB": 60, "maxDowntimeMs": 500}), vec![]),
            (json!({"experimental": {"downtimeTuning": {}}}), vec!["spec.experimental"]),
        ] {
            let mut spec: Value = json!({"selectors": {}});
            json_patch::merge(&mut spec, &change);
            assert_eq!(named(policy(&serde_json::from_value(spec).unwrap())), expected, "{change}");
        }
    }
}
