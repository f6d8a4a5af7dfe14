//! Metrics of snapshots, restores and clones. An object is shown as long as it exists.

use api::{
    clone::VirtualMachineClone,
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, phase, restore::VirtualMachineRestore},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::ResourceExt;
use prometheus::{GaugeVec, Opts, core::Collector, proto::MetricFamily};

const OBJECT: [&str; 3] = ["kind", "namespace", "name"];

/// The metrics.
pub(super) struct Copies {
    succeeded: GaugeVec,
    duration: GaugeVec,
    failed: GaugeVec,
    unfinished: GaugeVec,
    now: Timestamp,
}

/// How far an object is.
enum State<'a> {
    /// It was complete at this time.
    Complete(Option<&'a Time>),
    Failed,
    Unfinished,
}

impl Copies {
    /// Creates empty metrics.
    pub(super) fn new(now: Timestamp) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        Ok(Self {
            succeeded: gauge(
                "kubevirt_vmsnapshot_succeeded_timestamp_seconds",
                "Time at which a snapshot of a VM was taken",
                &["name", "snapshot_name", "namespace"],
            )?,
            duration: gauge(
                "ferrovirt_copy_duration_seconds",
                "Time that a snapshot, its content, a restore or a clone took",
                &OBJECT,
            )?,
            failed: gauge(
                "ferrovirt_copy_failed",
                "1 for a snapshot, content, restore or clone that has failed",
                &OBJECT,
            )?,
            unfinished: gauge(
                "ferrovirt_copy_unfinished_seconds",
                "Age of a snapshot, content, restore or clone that has not ended",
                &OBJECT,
            )?,
            now,
        })
    }

    /// Adds a snapshot.
    pub(super) fn snapshot(&self, snapshot: &VirtualMachineSnapshot) {
        let created = snapshot.status.as_ref().and_then(|status| status.creation_time.as_ref());
        let state = if snapshot.is_in(phase::SUCCEEDED) {
            State::Complete(created)
        } else if snapshot.is_in(phase::FAILED) {
            State::Failed
        } else {
            State::Unfinished
        };
        if let (State::Complete(_), Some(at)) = (&state, created) {
            let (name, namespace) = (snapshot.name_any(), snapshot.namespace().unwrap_or_default());
            let labels = [snapshot.spec.source.name.as_str(), name.as_str(), namespace.as_str()];
            self.succeeded.with_label_values(&labels).set(at.0.as_second() as f64);
        }
        self.object("VirtualMachineSnapshot", &snapshot.metadata, &state);
    }

    /// Adds a content. It has failed if its volume snapshots are lost.
    pub(super) fn content(&self, content: &VirtualMachineSnapshotContent) {
        let status = content.status.clone().unwrap_or_default();
        let created = status.creation_time.as_ref();
        let state = match (created, status.ready_to_use) {
            (Some(_), Some(true)) => State::Complete(created),
            (Some(_), _) if status.error.is_some() => State::Failed,
            _ => State::Unfinished,
        };
        self.object("VirtualMachineSnapshotContent", &content.metadata, &state);
    }

    /// Adds a restore.
    pub(super) fn restore(&self, restore: &VirtualMachineRestore) {
        let status = restore.status.as_ref();
        let state = match status.and_then(|status| status.complete) {
            Some(true) => State::Complete(status.and_then(|status| status.restore_time.as_ref())),
            _ if restore.is_final() => State::Failed,
            _ => State::Unfinished,
        };
        self.object("VirtualMachineRestore", &restore.metadata, &state);
    }

    /// Adds a clone, which is complete once its VM exists.
    pub(super) fn clone(&self, clone: &VirtualMachineClone) {
        let status = clone.status.as_ref();
        let state = match status.and_then(|status| status.phase.as_deref()) {
            Some(phase::SUCCEEDED) => State::Complete(status.and_then(|status| status.creation_time.as_ref())),
            Some(phase::FAILED) => State::Failed,
            _ => State::Unfinished,
        };
        self.object("VirtualMachineClone", &clone.metadata, &state);
    }

    fn object(&self, kind: &str, metadata: &ObjectMeta, state: &State<'_>) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let (namespace, name) = (text(&metadata.namespace), text(&metadata.name));
        let labels = [kind, namespace.as_str(), name.as_str()];
        let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs_f64().max(0.0);
        let created = metadata.creation_timestamp.as_ref().map(|at| at.0);
        match (state, created) {
            (State::Complete(Some(at)), Some(created)) => {
                self.duration.with_label_values(&labels).set(seconds(created, at.0));
            }
            (State::Failed, _) => self.failed.with_label_values(&labels).set(1.0),
            (State::Unfinished, Some(created)) => {
                self.unfinished.with_label_values(&labels).set(seconds(created, self.now));
            }
            _ => {}
        }
    }

    /// Returns the metrics.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        let collectors: [&dyn Collector; 4] = [&self.succeeded, &self.duration, &self.failed, &self.unfinished];
        collectors.iter().flat_map(|collector| collector.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn objects_show_by_their_state() {
        let now = "2030-01-01T00:01:00Z".parse().unwrap();
        let object = |status: Value| {
            json!({
                "metadata": {"name": "o", "namespace": "n", "creationTimestamp": "2030-01-01T00:00:00Z"},
                "spec": {
                    "source": {"kind": "VirtualMachine", "name": "v"}, "target": {"kind": "VirtualMachine", "name": "v"},
                    "virtualMachineSnapshotName": "s",
                },
                "status": status,
            })
        };
        let taken = "2030-01-01T00:00:10Z";
        let shown = |kind: &str, status: Value| {
            let copies = Copies::new(now).unwrap();
            match kind {
                "snapshot" => copies.snapshot(&serde_json::from_value(object(status)).unwrap()),
                "clone" => copies.clone(&serde_json::from_value(object(status)).unwrap()),
                "content" => copies.content(&serde_json::from_value(object(status)).unwrap()),
                _ => copies.restore(&serde_json::from_value(object(status)).unwrap()),
            }
            let families = copies.families().into_iter().filter(|family| !family.get_metric().is_empty());
            let value = |family: MetricFamily| {
                let name = family.name().rsplit('_').nth(1).unwrap_or_default().to_owned();
                (name, family.get_metric()[0].get_gauge().get_value())
            };
            families.map(value).collect::<Vec<_>>()
        };
        let named = |name: &str, value: f64| (name.to_owned(), value);
        assert_eq!(
            shown("snapshot", json!({"phase": "Succeeded", "creationTime": taken})),
            [named("timestamp", 1_893_456_010.0), named("duration", 10.0)]
        );
        for (kind, status, expected) in [
            ("snapshot", json!({"phase": "Failed"}), named("copy", 1.0)),
            ("snapshot", json!({"phase": "InProgress"}), named("unfinished", 60.0)),
            ("content", json!({"creationTime": taken, "readyToUse": true}), named("duration", 10.0)),
            ("content", json!({"creationTime": taken, "error": {"message": "lost"}}), named("copy", 1.0)),
            ("restore", json!({"complete": true, "restoreTime": taken}), named("duration", 10.0)),
            (
                "restore",
                json!({"complete": false, "conditions": [{"type": "Failure", "status": "True"}]}),
                named("copy", 1.0),
            ),
            ("restore", json!({}), named("unfinished", 60.0)),
            ("clone", json!({"phase": "Succeeded", "creationTime": taken}), named("duration", 10.0)),
            ("clone", json!({"phase": "Failed"}), named("copy", 1.0)),
            ("clone", json!({"phase": "RestoreInProgress"}), named("unfinished", 60.0)),
        ] {
            assert_eq!(shown(kind, status.clone()), [expected], "{kind} {status}");
        }
    }
}
