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

    /// Emits an event; placeholders are filled from the answer to a write or from its error.
    pub(crate) fn emit(&self, mut note: Event, answer: Option<&Value>, error: Option<&str>) {
        note.message = fill(&note.message, answer, error);
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

/// Returns the component of an event. Tools filter by it, so each controller has a name although all run in one process.
fn source(note: &Event) -> &'static str {
    match (note.reason, note.regarding.kind.as_deref()) {
        (event::NODE_UNRESPONSIVE, _) => "node-controller",
        (event::SUCCESSFUL_EVICT | event::FAILED_EVICT, _) => "workload-update-controller",
        (_, Some("VirtualMachineInstanceReplicaSet")) => "virtualmachinereplicaset-controller",
        (_, Some("VirtualMachinePool")) => "virtualmachinepool-controller",
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
            ("VirtualMachineInstance", "FailedEvict", "workload-update-controller"),
            ("VirtualMachineInstanceReplicaSet", "SuccessfulDelete", "virtualmachinereplicaset-controller"),
            ("VirtualMachinePool", "SuccessfulCreate", "virtualmachinepool-controller"),
        ] {
            let regarding = ObjectReference { kind: Some(kind.to_owned()), ..ObjectReference::default() };
            assert_eq!(source(&Event::normal(regarding, reason, "")), expected, "{kind} {reason}");
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
