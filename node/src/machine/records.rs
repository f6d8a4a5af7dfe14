//! Writing and reading machines' objects, and telling users about them in events.

use std::{sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use async_trait::async_trait;
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use prometheus::{IntCounter, IntCounterVec};
use serde_json::Value;
use tokio::sync::mpsc;

use super::state::Announcement;

/// Longest wait for the API server, a call.
const LIMIT: Duration = Duration::from_secs(15);
/// Announcements under way: a few for each machine of a full node that starts all of them at once.
const QUEUE: usize = 512;
/// Field manager of all writes.
const MANAGER: &str = "virt-handler";

/// Why an object was not written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// It has changed since it was read.
    #[error("the object has changed")]
    Conflict,
    /// It does not exist.
    #[error("the object does not exist")]
    Gone,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// The API server as a task sees it. Everything here is bounded in time.
#[async_trait]
pub trait Records: Send + Sync + 'static {
    /// Applies a merge patch to a machine's object; returns the new version.
    async fn patch(
        &self,
        vmi: &VirtualMachineInstance,
        patch: Value,
    ) -> Result<Arc<VirtualMachineInstance>, WriteError>;

    /// Reads the object of that name.
    async fn read(&self, vmi: &VirtualMachineInstance) -> Result<Option<Arc<VirtualMachineInstance>>, WriteError>;

    /// Tells users. Never waits: what there is no room for is dropped and counted.
    fn announce(&self, vmi: &VirtualMachineInstance, announcement: Announcement);
}

/// The real API server.
pub struct ApiRecords {
    client: Client,
    events: mpsc::Sender<(ObjectReference, Announcement)>,
    dropped: IntCounter,
    writes: IntCounterVec,
}

impl ApiRecords {
    /// Writes with `client`. Spawns the task that posts events, one after another.
    #[must_use]
    pub fn new(client: Client, node: &str, writes: IntCounterVec, dropped: IntCounter) -> Arc<Self> {
        let (events, queue) = mpsc::channel(QUEUE);
        tokio::spawn(post_events(client.clone(), node.to_owned(), queue, writes.clone()));
        Arc::new(Self { client, events, dropped, writes })
    }

    fn api(&self, vmi: &VirtualMachineInstance) -> Api<VirtualMachineInstance> {
        Api::namespaced(self.client.clone(), &vmi.namespace().unwrap_or_default())
    }
}

#[async_trait]
impl Records for ApiRecords {
    async fn patch(
        &self,
        vmi: &VirtualMachineInstance,
        patch: Value,
    ) -> Result<Arc<VirtualMachineInstance>, WriteError> {
        let api = self.api(vmi);
        let params = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
        let name = vmi.name_any();
        let patch = Patch::Merge(patch);
        let result = match tokio::time::timeout(LIMIT, api.patch(&name, &params, &patch)).await {
            Ok(Ok(mut written)) => {
                trim(&mut written);
                Ok(Arc::new(written))
            }
            Ok(Err(error)) => Err(classify(&error)),
            Err(_) => Err(WriteError::Other("the API server did not answer in time".into())),
        };
        let outcome = match &result {
            Ok(_) => "succeeded",
            Err(WriteError::Conflict) => "conflict",
            Err(WriteError::Gone) => "gone",
            Err(WriteError::Other(_)) => "failed",
        };
        self.writes.with_label_values(&["status", outcome]).inc();
        result
    }

    async fn read(&self, vmi: &VirtualMachineInstance) -> Result<Option<Arc<VirtualMachineInstance>>, WriteError> {
        let api = self.api(vmi);
        match tokio::time::timeout(LIMIT, api.get_opt(&vmi.name_any())).await {
            Ok(Ok(found)) => Ok(found.map(|mut vmi| {
                trim(&mut vmi);
                Arc::new(vmi)
            })),
            Ok(Err(error)) => Err(classify(&error)),
            Err(_) => Err(WriteError::Other("the API server did not answer in time".into())),
        }
    }

    fn announce(&self, vmi: &VirtualMachineInstance, announcement: Announcement) {
        tracing::info!(
            namespace = vmi.namespace().unwrap_or_default(),
            name = vmi.name_any(),
            reason = announcement.reason,
            message = announcement.message,
            "event"
        );
        if self.events.try_send((vmi.object_ref(&()), announcement)).is_err() {
            self.dropped.inc();
        }
    }
}

/// Drops what an agent never needs, so that its cache stays small.
pub fn trim(vmi: &mut VirtualMachineInstance) {
    const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
    vmi.metadata.managed_fields = None;
    if let Some(annotations) = &mut vmi.metadata.annotations {
        annotations.remove(LAST_APPLIED);
    }
}

fn classify(error: &kube::Error) -> WriteError {
    match error {
        kube::Error::Api(status) if status.code == 409 => WriteError::Conflict,
        kube::Error::Api(status) if status.code == 404 => WriteError::Gone,
        other => WriteError::Other(other.to_string()),
    }
}

async fn post_events(
    client: Client,
    node: String,
    mut queue: mpsc::Receiver<(ObjectReference, Announcement)>,
    writes: IntCounterVec,
) {
    while let Some((object, announcement)) = queue.recv().await {
        let event = event(object, &announcement, &node, jiff::Timestamp::now());
        let api = Api::<Event>::namespaced(client.clone(), event.metadata.namespace.as_deref().unwrap_or_default());
        let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
        let outcome = match tokio::time::timeout(LIMIT, api.create(&params, &event)).await {
            Ok(Ok(_)) => "succeeded",
            Ok(Err(error)) => {
                tracing::warn!(%error, reason = announcement.reason, "event was not posted");
                "failed"
            }
            Err(_) => "failed",
        };
        writes.with_label_values(&["event", outcome]).inc();
    }
}

fn event(object: ObjectReference, announcement: &Announcement, node: &str, now: jiff::Timestamp) -> Event {
    Event {
        metadata: ObjectMeta {
            name: Some(process::events::name(object.name.as_deref().unwrap_or_default(), now)),
            namespace: object.namespace.clone(),
            ..ObjectMeta::default()
        },
        type_: Some(if announcement.warning { "Warning" } else { "Normal" }.into()),
        reason: Some(announcement.reason.into()),
        message: Some(announcement.message.clone()),
        involved_object: object,
        source: Some(EventSource { component: Some("virt-handler".into()), host: Some(node.into()) }),
        reporting_component: Some("virt-handler".into()),
        reporting_instance: Some(node.into()),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        ..Event::default()
    }
}

/// The merge patch that turns one value into another: only what differs, `null` for what goes.
#[must_use]
pub fn merge_difference(from: &Value, to: &Value) -> Option<Value> {
    match (from, to) {
        (Value::Object(from), Value::Object(to)) => {
            let mut patch = serde_json::Map::new();
            for key in from.keys().filter(|key| !to.contains_key(*key)) {
                patch.insert(key.clone(), Value::Null);
            }
            for (key, value) in to {
                match from.get(key) {
                    None => {
                        patch.insert(key.clone(), value.clone());
                    }
                    Some(known) => {
                        if let Some(part) = merge_difference(known, value) {
                            patch.insert(key.clone(), part);
                        }
                    }
                }
            }
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        (from, to) if from == to => None,
        (_, to) => Some(to.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_patch_holds_only_what_differs() {
        let from = json!({"phase": "Scheduling", "nodeName": "n1", "memory": {"a": 1, "b": 2}, "list": [1, 2]});
        let to = json!({"phase": "Running", "nodeName": "n1", "memory": {"a": 1, "c": 3}, "list": [1]});
        let patch = merge_difference(&from, &to);
        assert_eq!(patch, Some(json!({"phase": "Running", "memory": {"b": null, "c": 3}, "list": [1]})));
        assert_eq!(merge_difference(&to, &to), None);
        assert_eq!(merge_difference(&json!({}), &json!({"guestOSInfo": {}})), Some(json!({"guestOSInfo": {}})));
    }

    #[test]
    fn an_event_names_component_and_node() {
        let object = ObjectReference { name: Some("vm".into()), namespace: Some("ns".into()), ..Default::default() };
        let now = jiff::Timestamp::from_second(1).unwrap();
        let hostile = format!("a\n\u{1b}[2J{}", "x".repeat(4000));
        let event = event(object, &Announcement::warning("SyncFailed", hostile), "n1", now);
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let message = event.message.unwrap();
        assert!(message.starts_with("a  [2Jx") && message.len() == 1024, "one line, not too long");
        assert_eq!(event.source.and_then(|source| source.host).as_deref(), Some("n1"));
        assert_eq!(event.metadata.name.as_deref(), Some("vm.3b9aca00"));
    }
}
