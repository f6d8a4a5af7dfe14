//! Events shown to users, repeated ones counted instead of written anew.

use std::collections::VecDeque;

use api::constants::event;
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Event, EventSource},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Note, effect::NoteType, metrics::Metrics};

/// Events that may wait; more are dropped and counted. A burst of this many takes a few seconds to write.
const QUEUE: usize = 256;
/// Events remembered to recognise repetitions.
const REMEMBERED: usize = 512;
/// A repetition within this time is counted, but written only with a later one.
const QUIET: jiff::SignedDuration = jiff::SignedDuration::from_secs(10);
/// Longest message; longer ones are cut.
const MESSAGE_LIMIT: usize = 1024;
/// Longest time for one event to be written.
const WRITE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Emits events in a task of its own, so that no controller waits for one.
#[derive(Clone)]
pub struct Recorder {
    queue: mpsc::Sender<Note>,
    metrics: Metrics,
}

struct Known {
    note: Note,
    name: String,
    namespace: String,
    count: i32,
    written: Timestamp,
}

impl Recorder {
    /// Starts the task.
    #[must_use]
    pub fn start(client: Client, metrics: Metrics) -> Self {
        let (queue, mut notes) = mpsc::channel::<Note>(QUEUE);
        let counters = metrics.clone();
        tokio::spawn(async move {
            let mut known: VecDeque<Known> = VecDeque::new();
            while let Some(note) = notes.recv().await {
                let written = write(&client, &mut known, note);
                let outcome = match tokio::time::timeout(WRITE_TIMEOUT, written).await {
                    Ok(Ok(outcome)) => outcome,
                    Ok(Err(error)) => {
                        // Events of objects in a namespace that is being deleted are refused; nobody misses them.
                        tracing::debug!(error = %error, "event was not written");
                        "failed"
                    }
                    Err(_) => "failed",
                };
                counters.event(outcome);
            }
        });
        Self { queue, metrics }
    }

    /// Emits an event; placeholders are filled from the answer to a write or from its error.
    pub fn emit(&self, mut note: Note, answer: Option<&Value>, error: Option<&str>) {
        note.message = fill(&note.message, answer, error);
        if self.queue.try_send(note).is_err() {
            self.metrics.event("dropped");
        }
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
    if text.len() > MESSAGE_LIMIT {
        let mut end = MESSAGE_LIMIT;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}

/// The controller that an event is said to come from: tools filter by it, so each has a name though all are one process.
fn source(note: &Note) -> &'static str {
    match (note.reason, note.regarding.kind.as_deref()) {
        (event::NODE_UNRESPONSIVE, _) => "node-controller",
        (event::SUCCESSFUL_EVICT | event::FAILED_EVICT, _) => "workload-update-controller",
        (_, Some("VirtualMachineInstanceReplicaSet")) => "virtualmachinereplicaset-controller",
        _ => "virtualmachine-controller",
    }
}

async fn write(client: &Client, known: &mut VecDeque<Known>, note: Note) -> Result<&'static str, kube::Error> {
    let now = Timestamp::now();
    let same = |known: &Known| {
        known.note.regarding.uid == note.regarding.uid
            && known.note.note_type == note.note_type
            && known.note.reason == note.reason
            && known.note.message == note.message
    };
    if let Some(index) = known.iter().position(same)
        && let Some(mut entry) = known.remove(index)
    {
        entry.count = entry.count.saturating_add(1);
        if now.duration_since(entry.written) < QUIET {
            known.push_back(entry);
            return Ok("counted");
        }
        entry.written = now;
        let patch = json!({"count": entry.count, "lastTimestamp": Time(now)});
        let events: Api<Event> = Api::namespaced(client.clone(), &entry.namespace);
        let result = events.patch(&entry.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        match result {
            Ok(_) => {
                known.push_back(entry);
                return Ok("counted");
            }
            // The event has expired; it is written anew.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    // Events of cluster-wide objects live in the default namespace.
    let namespace = note.regarding.namespace.clone().unwrap_or_else(|| "default".to_owned());
    let name = process::events::name(note.regarding.name.as_deref().unwrap_or_default(), now);
    let component = source(&note);
    let event = Event {
        metadata: ObjectMeta { name: Some(name.clone()), namespace: Some(namespace.clone()), ..ObjectMeta::default() },
        involved_object: note.regarding.clone(),
        type_: Some(
            match note.note_type {
                NoteType::Normal => "Normal",
                NoteType::Warning => "Warning",
            }
            .to_owned(),
        ),
        reason: Some(note.reason.to_owned()),
        message: Some(note.message.clone()),
        source: Some(EventSource { component: Some(component.to_owned()), host: None }),
        reporting_component: Some(component.to_owned()),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        ..Event::default()
    };
    let events: Api<Event> = Api::namespaced(client.clone(), &namespace);
    events.create(&PostParams::default(), &event).await?;
    while known.len() >= REMEMBERED {
        known.pop_front();
    }
    known.push_back(Known { note, name, namespace, count: 1, written: now });
    Ok("written")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;

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
        ] {
            let regarding = ObjectReference { kind: Some(kind.to_owned()), ..ObjectReference::default() };
            assert_eq!(source(&Note::normal(regarding, reason, "")), expected, "{kind} {reason}");
        }
    }

    #[test]
    fn placeholders_are_filled_and_long_messages_cut() {
        let answer = json!({"metadata": {"name": "pod-x", "uid": "1"}});
        assert_eq!(
            fill("Created virtual machine pod {name}", Some(&answer), None),
            "Created virtual machine pod pod-x"
        );
        assert_eq!(fill("Error creating pod: {error}", None, Some("no")), "Error creating pod: no");
        assert_eq!(fill("{error}", None, Some(&"ü".repeat(2000))).len(), MESSAGE_LIMIT);
    }
}
