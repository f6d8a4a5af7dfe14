//! Events that go with writes: their placeholders and their components.

use api::constants::event;
use daemon::{
    events::{self, Source},
    tasks::Spawner,
};
use kube::Client;
use serde_json::Value;

use super::{Event, metrics::Metrics};

/// Records events of effects.
#[derive(Clone)]
pub(crate) struct Recorder(events::Recorder);

impl Recorder {
    /// Starts the task that writes.
    #[must_use]
    pub(crate) fn start(client: Client, metrics: Metrics, tasks: &Spawner) -> Self {
        let count = move |outcome: events::Outcome| metrics.event(outcome.label());
        Self(events::Recorder::start(client, Source { component: source, node: None }, tasks, count))
    }

    /// Emits an event of a controller; placeholders are filled from the answer to a write or from its error.
    pub(crate) fn emit(&self, controller: &str, mut note: Event, answer: Option<&Value>, error: Option<&str>) {
        note.message = fill(&note.message, answer, error);
        note.component = component(controller);
        self.0.record(note);
    }
}

/// Fills in `{name}`, `{uid}` and `{error}`.
fn fill(message: &str, answer: Option<&Value>, error: Option<&str>) -> String {
    let mut text = message.to_owned();
    if let Some(answer) = answer {
        for (placeholder, field) in [("{name}", "name"), ("{uid}", "uid")] {
            if let Some(value) = answer["metadata"][field].as_str() {
                text = text.replace(placeholder, value);
            }
        }
    }
    if let Some(error) = error {
        text = text.replace("{error}", error);
    }
    text
}

/// Returns the component of the events of a controller that emits them about VMIs, as others do.
fn component(controller: &str) -> Option<&'static str> {
    match controller {
        "evacuation" => Some("evacuation-controller"),
        "disruption-budget" => Some("disruptionbudget-controller"),
        "workload-update" => Some("workload-update-controller"),
        _ => None,
    }
}

/// Returns the component of other events. Tools filter by it, so each controller has a name although all run in one process.
fn source(note: &Event) -> &'static str {
    match (note.reason, note.regarding.kind.as_deref()) {
        (event::NODE_UNRESPONSIVE, _) => "node-controller",
        (_, Some("VirtualMachineInstanceReplicaSet")) => "virtualmachinereplicaset-controller",
        (_, Some("VirtualMachinePool")) => "virtualmachinepool-controller",
        (_, Some("VirtualMachineSnapshot" | "VirtualMachineSnapshotContent")) => "snapshot-controller",
        (_, Some("VirtualMachineRestore")) => "restore-controller",
        (_, Some("VirtualMachineClone")) => "clone-controller",
        _ => "virtualmachine-controller",
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;
    use serde_json::json;

    use super::*;

    #[test]
    fn events_come_from_the_controller_of_their_object() {
        for (kind, reason, expected) in [
            ("VirtualMachine", "SuccessfulCreate", "virtualmachine-controller"),
            ("VirtualMachineInstance", "SuccessfulCreate", "virtualmachine-controller"),
            ("VirtualMachineInstance", "NodeUnresponsive", "node-controller"),
            ("Node", "NodeUnresponsive", "node-controller"),
            ("VirtualMachineInstanceReplicaSet", "SuccessfulDelete", "virtualmachinereplicaset-controller"),
            ("VirtualMachinePool", "SuccessfulCreate", "virtualmachinepool-controller"),
            ("VirtualMachineSnapshot", "SuccessfulVirtualMachineSnapshotContentCreate", "snapshot-controller"),
            ("VirtualMachineSnapshotContent", "SuccessfulVolumeSnapshotCreate", "snapshot-controller"),
            ("VirtualMachineRestore", "VirtualMachineRestoreComplete", "restore-controller"),
            ("VirtualMachineClone", "RestoreCreationFailed", "clone-controller"),
        ] {
            let regarding = ObjectReference { kind: Some(kind.to_owned()), ..ObjectReference::default() };
            assert_eq!(source(&Event::normal(regarding, reason, "")), expected, "{kind} {reason}");
        }
        for (controller, expected) in [
            ("evacuation", Some("evacuation-controller")),
            ("disruption-budget", Some("disruptionbudget-controller")),
            ("workload-update", Some("workload-update-controller")),
            ("vmi", None),
        ] {
            assert_eq!(component(controller), expected, "{controller}");
        }
    }

    #[test]
    fn placeholders_are_filled() {
        let answer = json!({"metadata": {"name": "pod-x", "uid": "1"}});
        assert_eq!(
            fill("Created virtual machine pod {name}", Some(&answer), None),
            "Created virtual machine pod pod-x"
        );
        assert_eq!(fill("Error creating pod: {error}", None, Some("no")), "Error creating pod: no");
    }
}
