//! Reads and writes of VMIs in the API server, and events about them.

use std::{sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use daemon::{
    events::{self, EventType, Outcome, Recorder, Source},
    tasks::Spawner,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use prometheus::{IntCounter, IntCounterVec};
use serde_json::Value;
use tonic::async_trait;

use super::event::Event;

/// Longest call to the API server.
const LIMIT: Duration = Duration::from_secs(15);
/// Field manager of all writes.
const MANAGER: &str = "virt-handler";

/// Reason why an object was not written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WriteError {
    /// It has changed since it was read.
    #[error("the object has changed")]
    Conflict,
    /// It does not exist.
    #[error("the object does not exist")]
    Gone,
    /// Another error.
    #[error("{0}")]
    Other(String),
}

/// The API server. Every call is bounded in time.
#[async_trait]
pub(crate) trait Records: Send + Sync + 'static {
    /// Applies a merge patch to the object of a VMI and returns the new version.
    async fn patch(
        &self,
        vmi: &VirtualMachineInstance,
        patch: Value,
    ) -> Result<Arc<VirtualMachineInstance>, WriteError>;

    /// Reads the object of this name.
    async fn read(&self, vmi: &VirtualMachineInstance) -> Result<Option<Arc<VirtualMachineInstance>>, WriteError>;

    /// Publishes an event. Never waits: an event that finds the queue full is dropped and counted.
    fn publish(&self, vmi: &VirtualMachineInstance, event: Event);
}

/// The real API server.
pub(crate) struct ApiRecords {
    client: Client,
    events: Recorder,
    writes: IntCounterVec,
}

impl ApiRecords {
    /// Returns records that use `client`. Events are written by a task of their own.
    pub(crate) fn new(
        client: Client,
        node: &str,
        writes: IntCounterVec,
        dropped: IntCounter,
        tasks: &Spawner,
    ) -> Arc<Self> {
        let source = Source { component: |_| MANAGER, node: Some(node.to_owned()) };
        let counters = writes.clone();
        let events = Recorder::start(client.clone(), source, tasks, move |outcome| match outcome {
            Outcome::Written | Outcome::Counted => counters.with_label_values(&["event", "succeeded"]).inc(),
            Outcome::Failed => counters.with_label_values(&["event", "failed"]).inc(),
            Outcome::Dropped => dropped.inc(),
        });
        Arc::new(Self { client, events, writes })
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

    fn publish(&self, vmi: &VirtualMachineInstance, event: Event) {
        tracing::info!(
            namespace = vmi.namespace().unwrap_or_default(),
            name = vmi.name_any(),
            reason = event.reason,
            message = event.message,
            "event"
        );
        let Event { warning, reason, message } = event;
        let event_type = if warning { EventType::Warning } else { EventType::Normal };
        let regarding = vmi.object_ref(&());
        self.events.record(events::Event { regarding, event_type, reason, message, component: None });
    }
}

/// Removes parts that virt-handler never needs, so that its memory stays small.
pub(super) fn trim(vmi: &mut VirtualMachineInstance) {
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
