//! Executes effects: the only place from which the task of a VMI calls the node, the launcher and the API server.
//!
//! Each call runs in a task of its own, has a time limit and is timed. At most one call of each kind is in progress, because
//! [`super::decide`] requests no second one. A panic in a call is passed on to the task, which [`super::restart`] restarts.

use std::{
    future::Future,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use api::{VirtualMachineInstance, constants::annotation::MIGRATION_PROGRESS};
use daemon::{
    CancellationToken, merge_patch,
    tasks::panics,
    telemetry::{OpenSpan, Traces},
};
use protocol::{PauseRequest, ResetRequest, SoftRebootRequest, UnpauseRequest};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    task::{AbortHandle, JoinSet},
};
use tracing::Instrument;

use super::{
    call::{Answered, AnyCall, Connected},
    desired::{Desired, Metadata},
    effect::Effect,
    event::Event,
    host::{ConnectError, Host, Relay},
    observed::{Link, Observed, Outcome},
    records::{Records, WriteError},
    request::{PendingRequest, Refusal, Request},
    trace::StartTrace,
};
use crate::{
    launcher::{self, CALL_TIMEOUT, Launcher, LauncherError, Report},
    metrics::VmiMetrics,
    safe_dir::Peer,
};

/// Limit of a connection beyond the wait for the socket: checks of the peer, HTTP/2 preface, SELinux context.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Limit of the request of a user.
const REQUEST_LIMIT: Duration = Duration::from_secs(25);
/// Limit of calls to the API server.
const RECORD_LIMIT: Duration = Duration::from_secs(20);

/// A connection to the launcher.
struct Connection {
    number: u64,
    launcher: Launcher,
    peer: Arc<Peer>,
    /// Follows the state stream, once the launcher has accepted the VMI's UID.
    follower: Option<AbortHandle>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(follower) = &self.follower {
            follower.abort();
        }
    }
}

/// The result of a call.
pub(super) enum Completed {
    /// A request of a user ended.
    Requested(PendingRequest, Result<(), Refusal>),
    /// A connection was opened: the launcher, its process, the SELinux context of its container.
    Connected(Result<(Launcher, Arc<Peer>, Option<String>), ConnectError>),
    /// A call to the launcher ended.
    Called(Answered),
    /// Any other effect ended.
    Outcome(Outcome),
}

impl Completed {
    /// Returns the error of a call that is part of a start.
    fn failure(&self) -> Option<String> {
        match self {
            Self::Connected(Err(error)) => Some(error.to_string()),
            Self::Called(answered) => answered.error.as_ref().map(ToString::to_string),
            Self::Outcome(Outcome::Written(Err(error), _) | Outcome::Read(Err(error))) => Some(error.to_string()),
            Self::Requested(..) | Self::Connected(Ok(_)) | Self::Outcome(_) => None,
        }
    }
}

/// Executes the effects of one VMI.
pub(super) struct Executor {
    host: Arc<dyn Host>,
    records: Arc<dyn Records>,
    metrics: VmiMetrics,
    connection: Option<Connection>,
    connections: u64,
    /// Connections of a migration that are relayed.
    relay: Option<Relay>,
    calls: JoinSet<Completed>,
    reports: mpsc::Sender<(u64, Report)>,
    trace: StartTrace,
}

impl Executor {
    /// Returns address and port under which this node accepts migrations.
    pub(super) fn migration_endpoint(&self) -> Option<(IpAddr, u16)> {
        self.host.migration_endpoint()
    }

    /// Returns the token that is cancelled once this virt-handler begins no further migration.
    pub(super) fn draining(&self) -> CancellationToken {
        self.host.draining()
    }

    /// Returns an executor that sends the reports of launchers to `reports`, each with the number of its connection.
    pub(super) fn new(
        host: Arc<dyn Host>,
        records: Arc<dyn Records>,
        metrics: VmiMetrics,
        reports: mpsc::Sender<(u64, Report)>,
    ) -> Self {
        let trace = StartTrace::default();
        let calls = JoinSet::new();
        Self { host, records, metrics, connection: None, connections: 0, relay: None, calls, reports, trace }
    }

    /// Records the calls of a start in the trace of the VMI.
    pub(super) fn with_traces(self, traces: Traces) -> Self {
        Self { trace: StartTrace::new(traces), ..self }
    }

    /// Returns the node's name.
    pub(super) fn node(&self) -> &str {
        self.host.name()
    }

    /// Returns the connected launcher.
    pub(super) fn launcher(&self) -> Option<&Launcher> {
        self.connection.as_ref().map(|connection| &connection.launcher)
    }

    /// Returns true if this is the current connection.
    pub(super) fn is_current(&self, number: u64) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.number == number)
    }

    /// Keeps a new connection and returns its number.
    pub(super) fn keep(&mut self, launcher: Launcher, peer: Arc<Peer>) -> u64 {
        self.connections += 1;
        let number = self.connections;
        self.connection = Some(Connection { number, launcher, peer, follower: None });
        number
    }

    /// Drops the connection, or follows the state of the VMI over it, as the link says.
    pub(super) fn align(&mut self, link: &Link) {
        match link {
            Link::Down { .. } => self.connection = None,
            Link::Up { greeted: true, .. } => self.follow(),
            Link::Up { .. } => {}
        }
    }

    fn follow(&mut self) {
        let Some(connection) = self.connection.as_mut().filter(|connection| connection.follower.is_none()) else {
            return;
        };
        let (number, launcher, reports) = (connection.number, connection.launcher.clone(), self.reports.clone());
        let follow = async move {
            if let Err(panic) = panics::catch(launcher::follow(launcher, number, reports.clone())).await {
                tracing::error!(%panic, "the follower of the launcher's state panicked");
                let _ = reports.send((number, Report::Lost(LauncherError::Lost("panic".into())))).await;
            }
        };
        connection.follower = Some(tokio::spawn(follow.in_current_span()).abort_handle());
    }

    /// Publishes an event for users.
    pub(super) fn publish(&self, vmi: &VirtualMachineInstance, event: Event) {
        self.records.publish(vmi, event);
    }

    /// Returns the result of the next call that ends; never returns if no call is in progress.
    pub(super) async fn completed(&mut self) -> Completed {
        match self.calls.join_next().await {
            Some(Ok(completed)) => completed,
            Some(Err(error)) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Calls are aborted with the executor only.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    pub(super) fn start(&mut self, effect: Effect, observed: &Observed) {
        let (host, records, vmi) = (self.host.clone(), self.records.clone(), observed.vmi.clone());
        self.trace.follow(&vmi);
        match effect {
            Effect::Connect { pod, within } => {
                let late = Err(ConnectError::Refused("the connection was not established in time".into()));
                let call = async move { connect(&*host, &vmi, &pod, within).await };
                self.call("connect", within + CONNECT_LIMIT, call, late, Completed::Connected);
            }
            Effect::Write(mut desired) => {
                let events = std::mem::take(&mut desired.events);
                let call = async move { write(&*records, &vmi, &desired).await };
                self.record("write", call, |result| Outcome::Written(result, events));
            }
            Effect::WriteProgress(progress) => {
                let version = &vmi.metadata.resource_version;
                let annotations = json!({MIGRATION_PROGRESS: progress});
                let patch = json!({"metadata": {"resourceVersion": version, "annotations": annotations}});
                let call = async move { records.patch(&vmi, patch).await };
                self.record("progress", call, Outcome::ProgressWritten);
            }
            Effect::Relay(route) => {
                // The former connections end before others begin.
                self.relay = None;
                tracing::info!(?route, "connections of a migration");
                self.relay = route.map(|route| host.relay(&observed.facts.uid, route));
            }
            Effect::Read => {
                let call = async move { records.read(&vmi).await };
                self.record("read", call, Outcome::Read);
            }
            Effect::Publish(event) => records.publish(&vmi, event),
            Effect::Retire => {}
            Effect::Call(call) => self.call_launcher(call, observed),
        }
    }

    fn call_launcher(&mut self, call: Arc<dyn AnyCall>, observed: &Observed) {
        // Link and connection change together.
        let (Some(connection), Link::Up { features, .. }) = (&self.connection, &observed.link) else { return };
        let (name, limit) = call.row();
        let span = self.trace.span(name);
        let number = connection.number;
        let to = Connected {
            host: self.host.clone(),
            launcher: connection.launcher.clone(),
            peer: connection.peer.clone(),
            features: features.clone(),
            vmi: observed.vmi.clone(),
            steps: span.as_ref().and_then(|span| self.trace.steps(span)),
            limit,
        };
        let late = call.clone().fail(number, LauncherError::Deadline { call: name, after: limit });
        self.call_in(span, name, limit, call.send(number, to), late, Completed::Called);
    }

    /// Starts the request of a user. Answers at once if no launcher is connected; returns true if a call was started.
    pub(super) fn request(&mut self, pending: PendingRequest, observed: &Observed) -> bool {
        let Some(launcher) = self.launcher().cloned() else {
            reply(pending.answer, Err(Refusal::NoLauncher(observed.facts.uid.clone())));
            return false;
        };
        let (request, records, vmi) = (pending.request, self.records.clone(), observed.vmi.clone());
        let call = async move {
            let limit = CALL_TIMEOUT;
            let (result, reason, done) = match request {
                Request::Pause => (launcher.call(PauseRequest {}, limit).await, "Paused", "paused"),
                Request::Unpause => (launcher.call(UnpauseRequest {}, limit).await, "Unpaused", "unpaused"),
                Request::Reset => (launcher.call(ResetRequest {}, limit).await, "Reset", "reset"),
                Request::SoftReboot => {
                    (launcher.call(SoftRebootRequest {}, limit).await, "SoftRebooted", "soft rebooted")
                }
            };
            if result.is_ok() {
                records.publish(&vmi, Event::normal(reason, format!("VirtualMachineInstance {done}")));
            }
            result.map(drop).map_err(Refusal::from)
        };
        let late = Err(LauncherError::Deadline { call: "the request", after: REQUEST_LIMIT }.into());
        self.call("request", REQUEST_LIMIT, call, late, move |result| Completed::Requested(pending, result));
        true
    }

    /// Starts a call to the API server.
    fn record<T: Send + 'static>(
        &mut self,
        name: &'static str,
        call: impl Future<Output = Result<T, WriteError>> + Send + 'static,
        outcome: impl FnOnce(Result<T, WriteError>) -> Outcome + Send + 'static,
    ) {
        let late = Err(WriteError::Other("the API server did not answer in time".into()));
        self.call(name, RECORD_LIMIT, call, late, |result| Completed::Outcome(outcome(result)));
    }

    /// Starts a call that ends with `late` after the limit.
    fn call<T: Send + 'static>(
        &mut self,
        name: &'static str,
        limit: Duration,
        call: impl Future<Output = T> + Send + 'static,
        late: T,
        complete: impl FnOnce(T) -> Completed + Send + 'static,
    ) {
        let span = self.trace.span(name);
        self.call_in(span, name, limit, call, late, complete);
    }

    /// Starts a call within a span.
    fn call_in<T: Send + 'static>(
        &mut self,
        span: Option<OpenSpan>,
        name: &'static str,
        limit: Duration,
        call: impl Future<Output = T> + Send + 'static,
        late: T,
        complete: impl FnOnce(T) -> Completed + Send + 'static,
    ) {
        let metrics = self.metrics.clone();
        let timed = async move {
            let started = Instant::now();
            let result = tokio::time::timeout(limit, call).await;
            metrics.observe_effect(name, started.elapsed(), result.is_ok());
            let completed = complete(result.unwrap_or(late));
            if let Some(mut span) = span
                && let Some(error) = completed.failure()
            {
                span.fail(error);
            }
            completed
        };
        self.calls.spawn(timed.in_current_span());
    }
}

/// Answers a request. The client may be gone.
pub(super) fn reply(answer: oneshot::Sender<Result<(), Refusal>>, result: Result<(), Refusal>) {
    drop(answer.send(result));
}

async fn connect(
    host: &dyn Host,
    vmi: &VirtualMachineInstance,
    pod: &str,
    within: Duration,
) -> Result<(Launcher, Arc<Peer>, Option<String>), ConnectError> {
    let (stream, peer) = host.connect(pod, within).await?;
    match Launcher::connect(stream).await {
        Ok(launcher) => {
            let security_context = host.security_context(&peer, vmi).await;
            Ok((launcher, peer, security_context))
        }
        Err(error) => Err(ConnectError::Refused(error.to_string())),
    }
}

async fn write(
    records: &dyn Records,
    vmi: &Arc<VirtualMachineInstance>,
    desired: &Desired,
) -> Result<Arc<VirtualMachineInstance>, WriteError> {
    match patch(vmi, desired) {
        Ok(Some(patch)) => records.patch(vmi, patch).await,
        Ok(None) => Ok(vmi.clone()),
        Err(error) => Err(WriteError::Other(error.to_string())),
    }
}

/// Returns the merge patch from the object to its desired status and metadata, bound to the version that it was computed from.
fn patch(vmi: &VirtualMachineInstance, desired: &Desired) -> Result<Option<Value>, serde_json::Error> {
    let from = match &vmi.status {
        Some(status) => serde_json::to_value(status)?,
        None => json!({}),
    };
    let difference = merge_patch::diff(&from, &serde_json::to_value(&desired.status)?);
    if difference.is_none() && desired.metadata.is_empty() {
        return Ok(None);
    }
    let mut patch = json!({"metadata": {"resourceVersion": vmi.metadata.resource_version}});
    let Metadata { labels, annotations } = &desired.metadata;
    for (field, changes) in [("labels", labels), ("annotations", annotations)] {
        if !changes.is_empty() {
            patch["metadata"][field] = json!(changes);
        }
    }
    if let Some(difference) = difference {
        patch["status"] = difference;
    }
    Ok(Some(patch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmi::tests::Stage;

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_ends_at_its_limit_and_is_counted() {
        let registry = prometheus::Registry::new();
        let mut executor = Stage::new().executor(VmiMetrics::new(&registry).unwrap());
        let hangs = std::future::pending::<Result<Option<Arc<VirtualMachineInstance>>, WriteError>>();
        executor.record("read", hangs, Outcome::Read);
        let completed = executor.completed().await;
        assert!(matches!(completed, Completed::Outcome(Outcome::Read(Err(WriteError::Other(_))))));
        let families = registry.gather();
        let effects = families.iter().find(|family| family.name() == "ferrovirt_handler_effect_seconds").unwrap();
        let labels: Vec<_> = effects.get_metric()[0].get_label().iter().map(|label| label.value()).collect();
        assert_eq!(labels, ["read", "false"]);
    }
}
