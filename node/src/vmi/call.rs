//! A call over the connection to a launcher, declared as one row: name, limit, slot, request, and how the answer is applied.
//!
//! A row is a value that holds what is sent, so that [`super::decide`] decides it. It lies beside the code that makes it, and
//! [`super::effects`] executes it without knowledge of its kind.

use std::{any::Any, collections::BTreeSet, fmt, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use futures::future::BoxFuture;
use protocol::{Nic, StartJobRequest, Unary, VmiOptions, features::Feature, start_job_request::Job};
use tonic::Request;

use super::{
    event::Event,
    host::{Host, NetworkFailure, PodError},
    observed::{Now, Observed},
    trace::LauncherSteps,
};
use crate::{
    launcher::{Answer, Launcher, LauncherError},
    safe_dir::{self, Peer},
};

/// Part of the limit of a call that remains when the launcher has not answered.
const MARGIN: Duration = Duration::from_secs(5);

/// A call over the connection to a launcher.
pub(super) trait Call: fmt::Debug + PartialEq + Send + Sync + Sized + 'static {
    /// The answer.
    type Reply: Send + 'static;
    /// Reason why it failed.
    type Error: CallError;

    /// Name in metrics, logs and traces.
    const NAME: &'static str;
    /// Time limit.
    const LIMIT: Duration = Duration::from_secs(25);
    /// At most one call of a slot is in progress, so that their number is bounded.
    const SLOT: &'static str = Self::NAME;

    /// Notes that the call begins.
    fn begin(&self, _observed: &mut Observed, _now: Now) {}

    /// Sends the request.
    fn send(&self, to: &Connected) -> impl Future<Output = Result<Self::Reply, Self::Error>> + Send;

    /// Applies the answer that came over this connection. Returns events for users.
    fn apply(
        &self,
        observed: &mut Observed,
        connection: u64,
        result: Result<Self::Reply, Self::Error>,
        now: Now,
    ) -> Vec<Event>;
}

/// Reason why a call failed.
pub(super) trait CallError: fmt::Display + Send + 'static {
    /// Returns the error of a call that reached its limit.
    fn late(call: &'static str, after: Duration) -> Self;

    /// Returns true if the launcher has ended or the connection to it is broken, which the next connection shows.
    fn is_lost(&self) -> bool;
}

impl CallError for LauncherError {
    fn late(call: &'static str, after: Duration) -> Self {
        Self::Deadline { call, after }
    }

    fn is_lost(&self) -> bool {
        self.is_lost()
    }
}

impl CallError for NetworkFailure {
    fn late(_: &'static str, _: Duration) -> Self {
        Self { message: "not done within the time limit".into(), permanent: false }
    }

    fn is_lost(&self) -> bool {
        false
    }
}

impl CallError for PodError {
    fn late(call: &'static str, _: Duration) -> Self {
        safe_dir::Error::Timeout(call.into()).into()
    }

    fn is_lost(&self) -> bool {
        true
    }
}

/// A launcher that is called, and its node.
pub(super) struct Connected {
    /// The node.
    pub(super) host: Arc<dyn Host>,
    /// The launcher.
    pub(super) launcher: Launcher,
    /// Its process.
    pub(super) peer: Arc<Peer>,
    /// Optional features of the launcher.
    pub(super) features: BTreeSet<Feature>,
    /// The object.
    pub(super) vmi: Arc<VirtualMachineInstance>,
    /// Records the launcher's steps of a traced start.
    pub(super) steps: Option<LauncherSteps>,
    /// Limit of the call.
    pub(super) limit: Duration,
}

impl Connected {
    /// Sends a request and returns the answer.
    pub(super) async fn call<R: Unary<Reply: Answer>>(&self, request: R) -> Result<R::Reply, LauncherError> {
        self.send(Request::new(request)).await
    }

    /// Sends a request with metadata and returns the answer.
    pub(super) async fn send<R: Unary<Reply: Answer>>(&self, request: Request<R>) -> Result<R::Reply, LauncherError> {
        self.launcher.send(request, self.limit.saturating_sub(MARGIN)).await
    }

    /// Starts a job. A launcher of an older release has a call for each.
    pub(super) async fn start(&self, job: Job) -> Result<(), LauncherError> {
        match job {
            job if self.features.contains(&Feature::Jobs) => self.call(StartJobRequest { job: Some(job) }).await,
            Job::Shutdown(request) => self.call(request).await,
            Job::MemoryDump(request) => self.call(request).await,
            Job::MigrationIn(request) => self.call(request).await,
            Job::MigrationOut(request) => self.call(request).await,
        }
        .map(drop)
    }

    /// Returns the options for the launcher with these network devices.
    pub(super) fn options(&self, nics: &[Nic]) -> VmiOptions {
        VmiOptions { nics: nics.to_vec(), ..self.host.settings().options }
    }
}

/// Encodes the VMI for a launcher.
pub(super) fn encode(call: &'static str, vmi: &VirtualMachineInstance) -> Result<Vec<u8>, LauncherError> {
    serde_json::to_vec(vmi).map_err(|error| LauncherError::Refused {
        call,
        message: error.to_string(),
        irrecoverable: true,
    })
}

/// A call of any kind.
pub(super) trait AnyCall: Any + fmt::Debug + Send + Sync {
    /// Returns the name.
    fn name(&self) -> &'static str;
    /// Returns the time limit.
    fn limit(&self) -> Duration;
    /// Notes that the call begins.
    fn begin(&self, observed: &mut Observed, now: Now);
    /// Sends the request over this connection.
    fn start(self: Arc<Self>, connection: u64, to: Connected) -> BoxFuture<'static, Answered>;
    /// Returns the end of a call that reached its limit.
    fn late(self: Arc<Self>, connection: u64) -> Answered;
    /// Returns true if both send the same.
    fn is_same(&self, other: &dyn AnyCall) -> bool;
}

impl<C: Call> AnyCall for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn limit(&self) -> Duration {
        C::LIMIT
    }

    fn begin(&self, observed: &mut Observed, now: Now) {
        observed.busy.insert(C::SLOT);
        Call::begin(self, observed, now);
    }

    fn start(self: Arc<Self>, connection: u64, to: Connected) -> BoxFuture<'static, Answered> {
        Box::pin(async move {
            let result = Call::send(&*self, &to).await;
            Answered::new(self, connection, result)
        })
    }

    fn late(self: Arc<Self>, connection: u64) -> Answered {
        Answered::new(self, connection, Err(C::Error::late(C::NAME, C::LIMIT)))
    }

    fn is_same(&self, other: &dyn AnyCall) -> bool {
        (other as &dyn Any).downcast_ref::<C>() == Some(self)
    }
}

impl PartialEq for dyn AnyCall {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

/// The end of a call.
pub(super) struct Answered {
    /// The error.
    pub(super) error: Option<String>,
    /// Applies the answer.
    pub(super) apply: Box<dyn FnOnce(&mut Observed, Now) -> Vec<Event> + Send>,
}

impl Answered {
    fn new<C: Call>(call: Arc<C>, connection: u64, result: Result<C::Reply, C::Error>) -> Self {
        match &result {
            Ok(_) => {}
            Err(error) if error.is_lost() => tracing::debug!(%error, call = C::NAME, "virt-launcher has not answered"),
            Err(error) => tracing::warn!(%error, call = C::NAME, "a call to virt-launcher failed"),
        }
        let error = result.as_ref().err().map(ToString::to_string);
        Self { error, apply: Box::new(move |observed, now| observed.apply_answer(&*call, connection, result, now)) }
    }
}

impl Observed {
    /// Applies the answer to a call. Returns events for users.
    pub(super) fn apply_answer<C: Call>(
        &mut self,
        call: &C,
        connection: u64,
        result: Result<C::Reply, C::Error>,
        now: Now,
    ) -> Vec<Event> {
        self.busy.remove(C::SLOT);
        call.apply(self, connection, result, now)
    }
}
