//! The writer of events.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use k8s_openapi::{
    api::core::v1::{Event as EventObject, EventSource},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::sync::mpsc;

use super::{Event, name::name};
use crate::tasks::Spawner;

/// Most events that wait. A few for each VMI of a full node that starts all of them at once; further ones are dropped.
const QUEUE: usize = 512;
/// Most events remembered to recognise repetitions.
const REMEMBERED: usize = 512;
/// A repetition within this time is counted, and written only with a later one.
const QUIET: SignedDuration = SignedDuration::from_secs(10);
/// Longest message in bytes; longer ones are cut.
const MESSAGE_LIMIT: usize = 1024;
/// Longest time to write one event.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The result for one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An object was created.
    Written,
    /// The count of an earlier event was raised.
    Counted,
    /// The API server did not accept it in time.
    Failed,
    /// The queue was full.
    Dropped,
}

impl Outcome {
    /// Returns the label for metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Counted => "counted",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }
}

/// The reporter that events name.
#[derive(Clone)]
pub struct Source {
    /// Returns the component for an event. Tools filter by it.
    pub component: fn(&Event) -> &'static str,
    /// The node, for components that run on each of them.
    pub node: Option<String>,
}

/// Writes events in a task of its own, so that no caller waits. Cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    queue: mpsc::Sender<Event>,
    count: Arc<dyn Fn(Outcome) + Send + Sync>,
}

/// An event that was written lately.
struct Known {
    event: Event,
    name: String,
    namespace: String,
    count: i32,
    written: Timestamp,
}

impl Recorder {
    /// Starts the task. `count` is called with the outcome of each event.
    #[must_use]
    pub fn start(
        client: Client,
        source: Source,
        tasks: &Spawner,
        count: impl Fn(Outcome) + Send + Sync + 'static,
    ) -> Self {
        let (queue, events) = mpsc::channel(QUEUE);
        let count: Arc<dyn Fn(Outcome) + Send + Sync> = Arc::new(count);
        let writer = Writer { client, source, known: VecDeque::new() };
        tasks.spawn("events", writer.run(events, count.clone()));
        Self { queue, count }
    }

    /// Records an event. Never waits: an event that finds the queue full is dropped and counted. A message of more than
    /// 1,024 bytes is cut.
    pub fn record(&self, mut event: Event) {
        cut(&mut event.message);
        if self.queue.try_send(event).is_err() {
            (self.count)(Outcome::Dropped);
        }
    }
}

struct Writer {
    client: Client,
    source: Source,
    known: VecDeque<Known>,
}

impl Writer {
    async fn run(mut self, mut events: mpsc::Receiver<Event>, count: Arc<dyn Fn(Outcome) + Send + Sync>) {
        while let Some(event) = events.recv().await {
            let reason = event.reason;
            let outcome = match tokio::time::timeout(WRITE_TIMEOUT, self.write(event)).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => {
                    let cause = crate::errors::chain(&error);
                    // The API server refuses events of objects in a namespace that is being deleted.
                    match error {
                        kube::Error::Api(status) if matches!(status.code, 403 | 404) => {
                            tracing::debug!(reason, error = cause, "event was refused");
                        }
                        _ => tracing::warn!(reason, error = cause, "event was not written"),
                    }
                    Outcome::Failed
                }
                Err(_) => {
                    tracing::warn!(reason, "event was not written in time");
                    Outcome::Failed
                }
            };
            count(outcome);
        }
        // All recorders are gone. That is no failure of this task.
        std::future::pending::<()>().await;
    }

    async fn write(&mut self, event: Event) -> Result<Outcome, kube::Error> {
        let now = Timestamp::now();
        if let Some(mut known) = self.take_known(&event) {
            known.count = known.count.saturating_add(1);
            if now.duration_since(known.written) < QUIET {
                self.known.push_back(known);
                return Ok(Outcome::Counted);
            }
            known.written = now;
            let patch = json!({"count": known.count, "lastTimestamp": Time(now)});
            let events: Api<EventObject> = Api::namespaced(self.client.clone(), &known.namespace);
            match events.patch(&known.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
                Ok(_) => {
                    self.known.push_back(known);
                    return Ok(Outcome::Counted);
                }
                // The object has expired; a new one is created.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error),
            }
        }
        let object = object(&event, &self.source, now);
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let name = object.metadata.name.clone().unwrap_or_default();
        let events: Api<EventObject> = Api::namespaced(self.client.clone(), &namespace);
        events.create(&PostParams::default(), &object).await?;
        while self.known.len() >= REMEMBERED {
            self.known.pop_front();
        }
        self.known.push_back(Known { event, name, namespace, count: 1, written: now });
        Ok(Outcome::Written)
    }

    fn take_known(&mut self, event: &Event) -> Option<Known> {
        let same = |known: &Known| {
            known.event.regarding.uid == event.regarding.uid
                && known.event.event_type == event.event_type
                && known.event.reason == event.reason
                && known.event.message == event.message
                && known.event.component == event.component
        };
        let index = self.known.iter().position(same)?;
        self.known.remove(index)
    }
}

/// Returns the object that is created for an event. Events about cluster-wide objects live in the default namespace.
fn object(event: &Event, source: &Source, now: Timestamp) -> EventObject {
    let component = event.component.unwrap_or_else(|| (source.component)(event));
    EventObject {
        metadata: ObjectMeta {
            name: Some(name(event.regarding.name.as_deref().unwrap_or_default(), now)),
            namespace: Some(event.regarding.namespace.clone().unwrap_or_else(|| "default".to_owned())),
            ..ObjectMeta::default()
        },
        involved_object: event.regarding.clone(),
        type_: Some(event.event_type.as_str().to_owned()),
        reason: Some(event.reason.to_owned()),
        message: Some(event.message.clone()),
        source: Some(EventSource { component: Some(component.to_owned()), host: source.node.clone() }),
        reporting_component: Some(component.to_owned()),
        reporting_instance: source.node.clone(),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        ..EventObject::default()
    }
}

/// Cuts a message to [`MESSAGE_LIMIT`].
fn cut(message: &mut String) {
    if message.len() > MESSAGE_LIMIT {
        message.truncate(message.floor_char_boundary(MESSAGE_LIMIT));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::body::Body;
    use http::{Request, Response};
    use k8s_openapi::api::core::v1::ObjectReference;
    use serde_json::Value;

    use super::*;
    use crate::tasks::Tasks;

    fn source() -> Source {
        Source { component: |_| "virt-handler", node: Some("n1".into()) }
    }

    fn about(name: &str) -> ObjectReference {
        let (name, uid) = (Some(name.to_owned()), Some(format!("uid-{name}")));
        ObjectReference { name, uid, namespace: Some("ns".into()), ..ObjectReference::default() }
    }

    #[test]
    fn object_names_component_and_node() {
        let event = Event::warning(about("vm"), "SyncFailed", "no");
        let object = object(&event, &source(), Timestamp::from_second(1).unwrap());
        assert_eq!(object.metadata.name.as_deref(), Some("vm.3b9aca00"));
        assert_eq!(object.metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(object.type_.as_deref(), Some("Warning"));
        assert_eq!(object.source.and_then(|source| source.host).as_deref(), Some("n1"));
        assert_eq!(object.reporting_instance.as_deref(), Some("n1"));
        assert_eq!(object.reporting_component.as_deref(), Some("virt-handler"));
        let event = Event { component: Some("other"), ..event };
        let object = super::object(&event, &source(), Timestamp::from_second(1).unwrap());
        assert_eq!(object.reporting_component.as_deref(), Some("other"));
        assert_eq!(object.source.and_then(|source| source.component).as_deref(), Some("other"));
    }

    #[test]
    fn events_about_cluster_wide_objects_are_in_the_default_namespace() {
        let node = ObjectReference { namespace: None, ..about("n1") };
        let event = object(&Event::normal(node, "NodeUnresponsive", ""), &source(), Timestamp::UNIX_EPOCH);
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let mut message = "ü".repeat(2000);
        cut(&mut message);
        assert_eq!(message.len(), MESSAGE_LIMIT);
        let mut message = format!("a{}", "ü".repeat(2000));
        cut(&mut message);
        assert_eq!(message.len(), MESSAGE_LIMIT - 1);
    }

    #[tokio::test]
    async fn repetitions_are_counted_and_other_events_written() {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = calls.clone();
        let api = tower::service_fn(move |request: Request<kube::client::Body>| {
            seen.lock().unwrap().push(format!("{} {}", request.method(), request.uri().path()));
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut object: Value = serde_json::from_slice(&body).unwrap();
                object["metadata"]["name"] = "e".into();
                Ok::<_, std::convert::Infallible>(Response::new(Body::from(object.to_string())))
            }
        });
        let (sender, mut outcomes) = mpsc::unbounded_channel();
        let tasks = Tasks::new();
        let recorder = Recorder::start(Client::new(api, "default"), source(), &tasks.spawner(), move |outcome| {
            let _ = sender.send(outcome);
        });
        for (name, message, expected) in [
            ("a", "one", Outcome::Written),
            ("a", "one", Outcome::Counted),
            ("b", "one", Outcome::Written),
            ("a", "two", Outcome::Written),
            ("a", "one", Outcome::Counted),
        ] {
            recorder.record(Event::normal(about(name), "Started", message));
            assert_eq!(outcomes.recv().await, Some(expected), "{name} {message}");
        }
        let calls = calls.lock().unwrap();
        assert_eq!(*calls, vec!["POST /api/v1/namespaces/ns/events"; 3]);
    }
}
