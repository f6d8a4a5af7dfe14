//! Metrics of the runtime.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use api::{VirtualMachineInstance, VirtualMachineInstanceMigration, VmiPhase};
use daemon::{lock, metrics::Metrics as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prometheus::{HistogramVec, IntCounterVec, IntGauge, Registry};

use super::{queue::Queue, queue_metrics::QueueMetrics};
use crate::cache::Key;

/// Metrics of the runtime. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    writes: IntCounterVec,
    queues: QueueMetrics,
    /// Decisions about each VMI. A vector of counters would copy the description of the metric for each VMI.
    syncs: Arc<Mutex<HashMap<Key, u64>>>,
    events: IntCounterVec,
    panics: IntCounterVec,
    leading: IntGauge,
    ready: IntGauge,
    phase_from_creation: HistogramVec,
    phase_from_deletion: HistogramVec,
    phase_from_former: HistogramVec,
    migration_from_creation: HistogramVec,
}

/// Buckets of phase transition times, in seconds.
const PHASE_BUCKETS: &[f64] =
    &[0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0];

impl Metrics {
    /// Registers all metrics.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let phases = |name, help, labels: &[&str]| registry.histograms(name, help, labels, PHASE_BUCKETS);
        Ok(Self {
            writes: registry.counters(
                "ferrovirt_controller_writes_total",
                "Writes to the API server by their outcome",
                &["controller", "verb", "resource", "outcome"],
            )?,
            queues: QueueMetrics::new(registry)?,
            syncs: Arc::default(),
            events: registry.counters("ferrovirt_controller_events_total", "Events by their outcome", &["outcome"])?,
            panics: registry.counters(
                "ferrovirt_controller_panics_total",
                "Reconciles that panicked",
                &["controller"],
            )?,
            leading: registry.gauge("kubevirt_virt_controller_leading_status", "1 on the replica that leads")?,
            ready: registry.gauge("kubevirt_virt_controller_ready_status", "1 when the replica is ready")?,
            phase_from_creation: phases(
                "kubevirt_vmi_phase_transition_time_from_creation_seconds",
                "Time from the creation of a VMI to a phase",
                &["phase"],
            )?,
            phase_from_deletion: phases(
                "kubevirt_vmi_phase_transition_time_from_deletion_seconds",
                "Time from the deletion request of a VMI to its last phase",
                &["phase"],
            )?,
            phase_from_former: phases(
                "kubevirt_vmi_phase_transition_time_seconds",
                "Time from one phase of a VMI to the next",
                &["phase", "last_phase"],
            )?,
            migration_from_creation: phases(
                "kubevirt_vmi_migration_phase_transition_time_from_creation_seconds",
                "Time from the creation of a migration to a phase",
                &["phase"],
            )?,
        })
    }

    pub(super) fn wrote(&self, controller: &str, verb: &str, resource: &str, outcome: &str) {
        self.writes.with_label_values(&[controller, verb, resource, outcome]).inc();
    }

    /// Adds the queue of a controller.
    pub(super) fn add_queue(&self, controller: &str, queue: &Arc<Queue<Key>>) {
        self.queues.add(controller, queue);
    }

    /// Records how long a key was due.
    pub(super) fn waited(&self, controller: &str, duration: Duration) {
        self.queues.waited(controller, duration);
    }

    /// Records how long the work on a key took.
    pub(super) fn worked(&self, controller: &str, duration: Duration) {
        self.queues.worked(controller, duration);
    }

    /// Counts a decision about a VMI.
    pub(crate) fn synced(&self, vmi: &Key) {
        let mut syncs = lock(&self.syncs);
        match syncs.get_mut(vmi) {
            Some(count) => *count += 1,
            None => {
                syncs.insert(vmi.clone(), 1);
            }
        }
    }

    /// Forgets the decisions about a VMI that is gone.
    pub(crate) fn forget_syncs(&self, vmi: &Key) {
        lock(&self.syncs).remove(vmi);
    }

    /// Forgets the decisions about VMIs that another replica decides about.
    pub(super) fn retain_syncs(&self, is_kept: impl Fn(&Key) -> bool) {
        lock(&self.syncs).retain(|vmi, _| is_kept(vmi));
    }

    /// Returns the number of decisions of this replica about each VMI.
    #[must_use]
    pub(crate) fn syncs(&self) -> Vec<(Key, u64)> {
        lock(&self.syncs).iter().map(|(vmi, count)| (vmi.clone(), *count)).collect()
    }

    pub(super) fn panicked(&self, controller: &str) {
        self.panics.with_label_values(&[controller]).inc();
    }

    /// Returns the number of panics of a controller.
    #[cfg(test)]
    pub(super) fn panics(&self, controller: &str) -> u64 {
        self.panics.with_label_values(&[controller]).get()
    }

    pub(super) fn event(&self, outcome: &str) {
        self.events.with_label_values(&[outcome]).inc();
    }

    /// Records the phases that a VMI entered: virt-handler writes `Scheduled` and `Running` at once. Only the leader does, so that no
    /// change counts twice.
    pub(crate) fn phase_changed(&self, former: &VirtualMachineInstance, present: &VirtualMachineInstance) {
        let Some(status) = present.status.as_ref().filter(|_| self.is_leading()) else { return };
        let known = former.status.as_ref().map_or(0, |status| status.phase_transition_timestamps.len());
        let created = present.metadata.creation_timestamp.as_ref();
        let deleted = present.metadata.deletion_timestamp.as_ref();
        let (mut last, mut since) = (&VmiPhase::Unset, created);
        for (index, entry) in status.phase_transition_timestamps.iter().enumerate() {
            let (Some(phase), at) = (&entry.phase, entry.phase_transition_timestamp.as_ref()) else { continue };
            if index >= known {
                observe(&self.phase_from_former, &[phase.as_str(), last.as_str()], since, at);
                observe(&self.phase_from_creation, &[phase.as_str()], created, at);
                observe(&self.phase_from_deletion, &[phase.as_str()], deleted.filter(|_| phase.is_final()), at);
            }
            (last, since) = (phase, at);
        }
    }

    /// Records the phases that a migration entered. Only the leader does, so that no change counts twice.
    pub(crate) fn migration_phase_changed(
        &self,
        former: &VirtualMachineInstanceMigration,
        present: &VirtualMachineInstanceMigration,
    ) {
        let Some(status) = present.status.as_ref().filter(|_| self.is_leading()) else { return };
        let known = former.status.as_ref().map_or(0, |status| status.phase_transition_timestamps.len());
        let created = present.metadata.creation_timestamp.as_ref();
        for entry in status.phase_transition_timestamps.iter().skip(known) {
            let (Some(phase), at) = (&entry.phase, entry.phase_transition_timestamp.as_ref()) else { continue };
            observe(&self.migration_from_creation, &[phase.as_str()], created, at);
        }
    }

    /// Sets whether this replica leads.
    pub(crate) fn set_leading(&self, leading: bool) {
        self.leading.set(i64::from(leading));
    }

    /// Returns true if this replica leads.
    #[must_use]
    pub(crate) fn is_leading(&self) -> bool {
        self.leading.get() == 1
    }

    /// Sets whether this replica is ready.
    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.set(i64::from(ready));
    }
}

/// Observes the time from one time to another. A missing or negative one is not observed, as in the reference.
fn observe(histogram: &HistogramVec, labels: &[&str], from: Option<&Time>, to: Option<&Time>) {
    let (Some(from), Some(to)) = (from, to) else { return };
    let took = to.0.duration_since(from.0);
    if !took.is_negative() {
        histogram.with_label_values(labels).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns a VMI that entered these phases at these seconds.
    fn vmi(phases: &[(&str, u32)]) -> VirtualMachineInstance {
        let entry = |(phase, second): &(&str, u32)| -> Value {
            json!({"phase": phase, "phaseTransitionTimestamp": format!("2030-01-01T00:00:{second:02}Z")})
        };
        let entries: Vec<Value> = phases.iter().map(entry).collect();
        let vmi = json!({
            "metadata": {"name": "m", "namespace": "d", "creationTimestamp": "2030-01-01T00:00:10Z",
                "deletionTimestamp": "2030-01-01T00:00:30Z"},
            "spec": {"domain": {"devices": {}}},
            "status": {"phaseTransitionTimestamps": entries},
        });
        serde_json::from_value(vmi).unwrap()
    }

    #[test]
    fn times_of_phases_are_those_of_the_status() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let all = [("Pending", 12), ("Scheduling", 13), ("Scheduled", 16), ("Running", 21), ("Failed", 37)];
        metrics.phase_changed(&vmi(&[]), &vmi(&all));
        metrics.set_leading(true);
        for (former, present) in [(0, 1), (1, 2), (2, 4), (4, 4), (4, 5)] {
            metrics.phase_changed(&vmi(&all[..former]), &vmi(&all[..present]));
        }
        // The clock of a node is late.
        metrics.phase_changed(&vmi(&[]), &vmi(&[("Unknown", 9)]));
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        let prefix = "kubevirt_vmi_phase_transition_time";
        for (metric, sum) in [
            (r#"_seconds_sum{last_phase="",phase="Pending"}"#, 2),
            (r#"_seconds_sum{last_phase="Pending",phase="Scheduling"}"#, 1),
            (r#"_seconds_sum{last_phase="Scheduling",phase="Scheduled"}"#, 3),
            (r#"_seconds_sum{last_phase="Scheduled",phase="Running"}"#, 5),
            (r#"_seconds_sum{last_phase="Running",phase="Failed"}"#, 16),
            (r#"_from_creation_seconds_sum{phase="Scheduled"}"#, 6),
            (r#"_from_creation_seconds_sum{phase="Running"}"#, 11),
            (r#"_from_creation_seconds_count{phase="Running"}"#, 1),
            (r#"_from_deletion_seconds_sum{phase="Failed"}"#, 7),
        ] {
            let line = format!("{prefix}{metric} {sum}");
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
        assert!(!text.contains("Unknown"), "{text}");
        assert!(!text.contains(r#"from_deletion_seconds_sum{phase="Running"}"#), "{text}");
    }
}
