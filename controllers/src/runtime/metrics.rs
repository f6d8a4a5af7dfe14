//! Metrics of the runtime.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use api::{VirtualMachineInstance, VirtualMachineInstanceMigration};
use daemon::{lock, metrics::Metrics as _};
use jiff::Timestamp;
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

    /// Records the change from one phase of a VMI to another. Only the leader does, so that no change counts twice.
    pub(crate) fn phase_changed(
        &self,
        former: &VirtualMachineInstance,
        present: &VirtualMachineInstance,
        now: Timestamp,
    ) {
        let (from, to) = (former.phase(), present.phase());
        if from == to || !self.is_leading() {
            return;
        }
        let since = |at: Timestamp| now.duration_since(at).as_secs_f64().max(0.0);
        if let Some(created) = &present.metadata.creation_timestamp {
            self.phase_from_creation.with_label_values(&[to.as_str()]).observe(since(created.0));
        }
        if let Some(deleted) = present.metadata.deletion_timestamp.as_ref().filter(|_| to.is_final()) {
            self.phase_from_deletion.with_label_values(&[to.as_str()]).observe(since(deleted.0));
        }
        let entered = present.status.iter().flat_map(|status| &status.phase_transition_timestamps);
        let entered = entered
            .filter(|entry| entry.phase.as_ref() == Some(from))
            .find_map(|entry| entry.phase_transition_timestamp.as_ref());
        if let Some(entered) = entered {
            self.phase_from_former.with_label_values(&[to.as_str(), from.as_str()]).observe(since(entered.0));
        }
    }

    /// Records the phases that a migration entered. Only the leader does, so that no change counts twice.
    pub(crate) fn migration_phase_changed(
        &self,
        former: &VirtualMachineInstanceMigration,
        present: &VirtualMachineInstanceMigration,
    ) {
        let (true, Some(created)) = (self.is_leading(), &present.metadata.creation_timestamp) else { return };
        let known = former.status.as_ref().map_or(0, |status| status.phase_transition_timestamps.len());
        let entered = present.status.iter().flat_map(|status| &status.phase_transition_timestamps).skip(known);
        for entry in entered {
            let (Some(phase), Some(at)) = (&entry.phase, &entry.phase_transition_timestamp) else { continue };
            let took = at.0.duration_since(created.0).as_secs_f64().max(0.0);
            self.migration_from_creation.with_label_values(&[phase.as_str()]).observe(took);
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
