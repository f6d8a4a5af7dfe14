//! Calls over the connection to a launcher. Each is one row of [`super::calls`]: name, limit, slot, request, and how the answer is
//! applied. [`super::decide`] decides what is sent; execution, metrics, traces and logs know no kind of call.

use std::{any::Any, collections::BTreeSet, fmt, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use futures::future::BoxFuture;
use protocol::{Done, StartJobRequest, Unary, features::Feature, start_job_request::Job};
use tonic::{IntoRequest, Status};

use super::{
    event::Event,
    host::Host,
    observed::{Now, Observed},
    trace::LauncherSteps,
};
use crate::{
    launcher::{Launcher, LauncherError, Reply},
    safe_dir::Peer,
};

/// Part of the limit of a call that is left when a launcher has not answered.
const MARGIN: Duration = Duration::from_secs(5);

/// The answer of a launcher, or the reason why there is none.
pub(super) type Answer<T> = Result<T, LauncherError>;

/// A call over the connection to a launcher.
pub(super) trait Call: Any + fmt::Debug + Send + Sync {
    /// Content of the answer.
    type Reply: Send + 'static;

    /// Name in metrics, logs and traces.
    const NAME: &'static str;
    /// Time limit.
    const LIMIT: Duration = Duration::from_secs(25);
    /// At most one call of a slot is in progress, so that their number is bounded.
    const SLOT: &'static str = Self::NAME;

    /// Notes that the call begins.
    fn begin(&self, _observed: &mut Observed, _now: Now) {}

    /// Sends the request.
    fn send(&self, to: &Connected) -> impl Future<Output = Answer<Self::Reply>> + Send;

    /// Applies the answer that came over this connection. Returns events for users: without more to do, that of an error.
    fn apply(&self, _: &mut Observed, _connection: u64, answer: Answer<Self::Reply>, _: Now) -> Vec<Event> {
        let error = answer.err().filter(|error| !error.is_lost());
        error.map(|error| Event::warning("SyncFailed", error.to_string())).into_iter().collect()
    }
}

/// A launcher that is called, and its node.
pub(super) struct Connected {
    /// The node.
    pub(super) host: Arc<dyn Host>,
    pub(super) launcher: Launcher,
    /// Its process.
    pub(super) peer: Arc<Peer>,
    /// Its optional features.
    pub(super) features: BTreeSet<Feature>,
    /// The object.
    pub(super) vmi: Arc<VirtualMachineInstance>,
    /// Records the launcher's steps of a traced start.
    pub(super) steps: Option<LauncherSteps>,
    /// Limit of the call.
    pub(super) limit: Duration,
}

impl Connected {
    /// Sends a request.
    pub(super) async fn send<R: Unary<Reply: Reply>>(&self, request: impl IntoRequest<R>) -> Answer<R::Reply> {
        self.launcher.call(request, self.limit.saturating_sub(MARGIN)).await
    }

    /// Starts a job, which messages name `call`. Older releases have a call for each of their jobs.
    pub(super) async fn start(&self, call: &'static str, job: Job) -> Answer<Done> {
        if self.features.contains(&Feature::Jobs) {
            return self.send(StartJobRequest { job: Some(job) }).await.map_err(|error| error.of(call));
        }
        match job {
            Job::Shutdown(request) => self.send(request).await,
            Job::MemoryDump(request) => self.send(request).await,
            Job::MigrationIn(request) => self.send(request).await,
            Job::MigrationOut(request) => self.send(request).await,
            // A job without such a call is a later one.
            _ => Err(LauncherError::from_status(call, &Status::unimplemented("unknown job"))),
        }
    }
}

/// A call of any kind.
pub(super) trait AnyCall: Any + fmt::Debug + Send + Sync {
    /// Returns name and time limit.
    fn row(&self) -> (&'static str, Duration);
    /// Notes that the call begins.
    fn begin(&self, observed: &mut Observed, now: Now);
    /// Sends the request over this connection.
    fn send(self: Arc<Self>, connection: u64, to: Connected) -> BoxFuture<'static, Answered>;
    /// Returns the end of a call without an answer.
    fn fail(self: Arc<Self>, connection: u64, error: LauncherError) -> Answered;
}

/// Applies an answer. Returns events for users.
type Apply = Box<dyn FnOnce(&mut Observed, Now) -> Vec<Event> + Send>;

/// The end of a call.
pub(super) struct Answered {
    /// Name of the call.
    pub(super) call: &'static str,
    pub(super) error: Option<LauncherError>,
    /// Applies the answer. Returns events for users.
    pub(super) apply: Apply,
}

impl<C: Call> AnyCall for C {
    fn row(&self) -> (&'static str, Duration) {
        (C::NAME, C::LIMIT)
    }

    fn begin(&self, observed: &mut Observed, now: Now) {
        observed.busy.insert(C::SLOT);
        Call::begin(self, observed, now);
    }

    fn send(self: Arc<Self>, connection: u64, to: Connected) -> BoxFuture<'static, Answered> {
        Box::pin(async move {
            let answer = Call::send(&*self, &to).await;
            answered(self, connection, answer)
        })
    }

    fn fail(self: Arc<Self>, connection: u64, error: LauncherError) -> Answered {
        answered(self, connection, Err(error))
    }
}

/// Calls that show the same send the same.
impl PartialEq for dyn AnyCall {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

fn answered<C: Call>(call: Arc<C>, connection: u64, answer: Answer<C::Reply>) -> Answered {
    let error = answer.as_ref().err().cloned();
    let apply = Box::new(move |observed: &mut Observed, now| observed.apply_answer(&*call, connection, answer, now));
    Answered { call: C::NAME, error, apply }
}

impl Observed {
    /// Applies the answer to a call. Returns events for users.
    pub(super) fn apply_answer<C: Call>(
        &mut self,
        call: &C,
        connection: u64,
        answer: Answer<C::Reply>,
        now: Now,
    ) -> Vec<Event> {
        self.busy.remove(C::SLOT);
        call.apply(self, connection, answer, now)
    }
}
