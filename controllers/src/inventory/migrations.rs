//! Metrics of migrations. A migration that has ended is counted as long as its object exists. The times of the last one are those of the
//! VMI, and remain without the name of a migration whose object is deleted.

use api::{MigrationPhase, VirtualMachineInstance, VirtualMachineInstanceMigration};
use kube::ResourceExt;
use prometheus::{GaugeVec, IntGauge, Opts, core::Collector, proto::MetricFamily};

const ENDED: [&str; 3] = ["vmi", "vmim", "namespace"];
const START: [&str; 4] = ["node", "namespace", "name", "migration_name"];
const END: [&str; 5] = ["node", "namespace", "name", "migration_name", "status"];

/// The metrics.
pub(super) struct Migrations {
    pending: IntGauge,
    scheduling: IntGauge,
    unset: IntGauge,
    running: IntGauge,
    succeeded: GaugeVec,
    failed: GaugeVec,
    start: GaugeVec,
    end: GaugeVec,
}

impl Migrations {
    /// Creates empty metrics.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        Ok(Self {
            pending: IntGauge::new("kubevirt_vmi_migrations_in_pending_phase", "Migrations that wait for their turn")?,
            scheduling: IntGauge::new(
                "kubevirt_vmi_migrations_in_scheduling_phase",
                "Migrations whose target pod does not run yet",
            )?,
            unset: IntGauge::new("kubevirt_vmi_migrations_in_unset_phase", "Migrations without a phase")?,
            running: IntGauge::new("kubevirt_vmi_migrations_in_running_phase", "Migrations with a running target pod")?,
            succeeded: gauge("kubevirt_vmi_migration_succeeded", "Migrations that succeeded", &ENDED)?,
            failed: gauge("kubevirt_vmi_migration_failed", "Migrations that failed", &ENDED)?,
            start: gauge("kubevirt_vmi_migration_start_time_seconds", "Start of the last migration of a VMI", &START)?,
            end: gauge("kubevirt_vmi_migration_end_time_seconds", "End of the last migration of a VMI", &END)?,
        })
    }

    /// Adds a migration.
    pub(super) fn migration(&self, migration: &VirtualMachineInstanceMigration) {
        let (name, namespace) = (migration.name_any(), migration.namespace().unwrap_or_default());
        let vmi = migration.spec.vmi_name.as_deref().unwrap_or_default();
        let labels = [vmi, name.as_str(), namespace.as_str()];
        match migration.phase() {
            MigrationPhase::Unset => self.unset.inc(),
            MigrationPhase::Pending => self.pending.inc(),
            MigrationPhase::Scheduling => self.scheduling.inc(),
            MigrationPhase::Succeeded => self.succeeded.with_label_values(&labels).set(1.0),
            MigrationPhase::Failed => self.failed.with_label_values(&labels).set(1.0),
            _ => self.running.inc(),
        }
    }

    /// Adds a VMI. `name_of`: returns the name of its migration with a UID, if the object exists.
    pub(super) fn vmi(&self, vmi: &VirtualMachineInstance, name_of: impl Fn(&str) -> Option<String>) {
        let Some(status) = &vmi.status else { return };
        let Some(state) = &status.migration_state else { return };
        let migration = state.migration_uid.as_deref().and_then(name_of).unwrap_or_default();
        let node = status.node_name.clone().unwrap_or_default();
        let (name, namespace) = (vmi.name_any(), vmi.namespace().unwrap_or_default());
        let labels = [node.as_str(), &namespace, &name, &migration];
        if let Some(at) = &state.start_timestamp {
            self.start.with_label_values(&labels).set(at.0.as_second() as f64);
        }
        if let Some(at) = &state.end_timestamp {
            let outcome = match (state.completed, state.failed) {
                (true, true) => "failed",
                (true, false) => "succeeded",
                (false, _) => "",
            };
            let labels = [node.as_str(), &namespace, &name, &migration, outcome];
            self.end.with_label_values(&labels).set(at.0.as_second() as f64);
        }
    }

    /// Returns the metrics.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        let collectors: [&dyn Collector; 8] = [
            &self.pending,
            &self.scheduling,
            &self.unset,
            &self.running,
            &self.succeeded,
            &self.failed,
            &self.start,
            &self.end,
        ];
        collectors.iter().flat_map(|collector| collector.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn migrations_are_counted_by_phase_and_shown_when_they_have_ended() {
        let metrics = Migrations::new().unwrap();
        for phase in ["", "Pending", "Pending", "Scheduling", "Scheduled", "Running", "Succeeded", "Failed"] {
            let migration = json!({"metadata": {"name": format!("g-{phase}"), "namespace": "d"}, "spec": {"vmiName": "m"},
                "status": {"phase": phase}});
            metrics.migration(&serde_json::from_value(migration).unwrap());
        }
        let vmi = json!({
            "metadata": {"name": "m", "namespace": "d"}, "spec": {"domain": {"devices": {}}},
            "status": {"nodeName": "b", "migrationState": {"migrationUid": "u", "completed": true,
                "startTimestamp": "2030-01-01T00:00:00Z", "endTimestamp": "2030-01-01T00:00:09Z"}},
        });
        metrics.vmi(&serde_json::from_value(vmi).unwrap(), |uid| (uid == "u").then(|| "g".to_owned()));
        let registry = prometheus::Registry::new();
        for collector in [&metrics.pending, &metrics.scheduling, &metrics.unset, &metrics.running] {
            registry.register(Box::new(collector.clone())).unwrap();
        }
        for collector in [&metrics.succeeded, &metrics.failed, &metrics.start, &metrics.end] {
            registry.register(Box::new(collector.clone())).unwrap();
        }
        assert_eq!(metrics.families().len(), 8);
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        for line in [
            "kubevirt_vmi_migrations_in_pending_phase 2",
            "kubevirt_vmi_migrations_in_scheduling_phase 1",
            "kubevirt_vmi_migrations_in_unset_phase 1",
            "kubevirt_vmi_migrations_in_running_phase 2",
            r#"kubevirt_vmi_migration_succeeded{namespace="d",vmi="m",vmim="g-Succeeded"} 1"#,
            r#"kubevirt_vmi_migration_failed{namespace="d",vmi="m",vmim="g-Failed"} 1"#,
            r#"kubevirt_vmi_migration_start_time_seconds{migration_name="g",name="m",namespace="d",node="b"} 1893456000"#,
            r#"kubevirt_vmi_migration_end_time_seconds{migration_name="g",name="m",namespace="d",node="b",status="succeeded"} 1893456009"#,
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn the_times_of_the_last_migration_remain_when_its_object_is_deleted() {
        for (completed, failed, status) in
            [(true, false, "succeeded"), (true, true, "failed"), (false, true, ""), (false, false, "")]
        {
            let metrics = Migrations::new().unwrap();
            let vmi = json!({
                "metadata": {"name": "m", "namespace": "d"}, "spec": {"domain": {"devices": {}}},
                "status": {"nodeName": "b", "migrationState": {
                    "migrationUid": "u", "completed": completed, "failed": failed,
                    "startTimestamp": "2030-01-01T00:00:00Z", "endTimestamp": "2030-01-01T00:00:09Z",
                }},
            });
            metrics.vmi(&serde_json::from_value(vmi).unwrap(), |_| None);
            let start = metrics.start.get_metric_with_label_values(&["b", "d", "m", ""]).unwrap();
            assert_eq!(start.get(), 1_893_456_000.0);
            let end = metrics.end.get_metric_with_label_values(&["b", "d", "m", "", status]).unwrap();
            assert_eq!(end.get(), 1_893_456_009.0, "{completed} {failed}");
        }
    }
}
