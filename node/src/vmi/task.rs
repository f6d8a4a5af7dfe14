//! The task of one VMI: waits for input, decides, and hands the effects to the executor.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::VirtualMachineInstance;
use daemon::{CancellationToken, telemetry::Traces};
use kube::ResourceExt;
use tokio::sync::{mpsc, watch};

use super::{
    conditions, decide,
    effect::Effect,
    effects::{Completed, Executor, reply},
    event::Event,
    handle::{Feed, Handle},
    host::{ConnectError, Host},
    observed::{GUEST_PANICKED, Link, Now, ObjectState, Observed, Outcome, REQUEST, Stage},
    records::{Records, WriteError},
    request::{self, PendingRequest, Refusal, Request},
    role::Role,
};
use crate::{launcher::Report, metrics::VmiMetrics};

/// Reports of a launcher that may wait; the stream's flow control holds back further ones.
const REPORTS: usize = 4;
/// Longest time for which the answer to a pause or unpause is held back.
const SHOWN_LIMIT: Duration = Duration::from_secs(2);

/// The answer to a pause or unpause, held back until the object shows it: the next request of the user is judged by the
/// object.
struct HeldAnswer {
    pending: PendingRequest,
    paused: bool,
    until: Duration,
}

/// The task of one VMI.
pub(super) struct Task {
    observed: Observed,
    executor: Executor,
    handle: Arc<Handle>,
    held: Option<HeldAnswer>,
    metrics: VmiMetrics,
    reports: mpsc::Receiver<(u64, Report)>,
    started: Instant,
}

impl Task {
    /// Returns a task for `vmi`.
    pub(super) fn new(
        vmi: Arc<VirtualMachineInstance>,
        host: Arc<dyn Host>,
        records: Arc<dyn Records>,
        handle: Arc<Handle>,
        metrics: VmiMetrics,
    ) -> Self {
        let (sender, reports) = mpsc::channel(REPORTS);
        Self {
            observed: Observed::new(vmi, host.name()),
            executor: Executor::new(host, records, metrics.clone(), sender),
            handle,
            held: None,
            metrics,
            reports,
            started: Instant::now(),
        }
    }

    /// Records the steps of the start in the trace of the VMI.
    pub(super) fn with_traces(self, traces: Traces) -> Self {
        Self { executor: self.executor.with_traces(traces), ..self }
    }

    /// Runs until the VMI has left this node, or until `stop`, which leaves the VMI as it is.
    pub(super) async fn run(
        mut self,
        feed: &mut watch::Receiver<Feed>,
        requests: &mut mpsc::Receiver<PendingRequest>,
        stop: &CancellationToken,
    ) {
        // A restarted task continues with the newest state of the watch.
        self.apply_feed(feed.borrow_and_update().clone());
        let draining = self.executor.draining();
        let mut stage = None;
        loop {
            let now = self.now();
            self.executor.align(&self.observed.link);
            self.observed.note_role(now);
            self.observed.note_save(now);
            self.observed.draining = draining.is_cancelled();
            // A migration goes on at the address at which it began.
            if self.observed.route.is_none() {
                self.observed.endpoint = self.executor.migration_endpoint();
            }
            let decision = decide::decide(&self.observed, now);
            self.handle.count_sync();
            for effect in decision.effects {
                self.observed.begin(&effect, now);
                if matches!(effect, Effect::Retire) {
                    tracing::info!("the VMI has left this node");
                    return;
                }
                self.executor.start(effect, &self.observed);
            }
            self.offer_launcher(&mut stage);
            self.release_answer(now);
            let held_until = self.held.as_ref().map(|held| held.until);
            // A user can set a grace period that no clock reaches.
            let wake_at = decision.wake_at.into_iter().chain(held_until).min();
            let wake_at = wake_at.and_then(|at| self.started.checked_add(at)).map(tokio::time::Instant::from_std);
            tokio::select! {
                () = stop.cancelled() => return,
                changed = feed.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let newest = feed.borrow_and_update().clone();
                    self.apply_feed(newest);
                }
                Some((connection, report)) = self.reports.recv() => self.apply_report(connection, report),
                completed = self.executor.completed() => self.complete(completed),
                Some(pending) = requests.recv(), if !self.observed.is_busy(REQUEST) && self.held.is_none() => {
                    self.request(pending);
                }
                // The route of a migration that has not begun would keep the process.
                () = draining.cancelled(), if !self.observed.draining => {}
                () = sleep_until(wake_at) => {}
            }
        }
    }

    fn now(&self) -> Now {
        Now { since_start: self.started.elapsed(), wall: jiff::Timestamp::now() }
    }

    fn apply_feed(&mut self, newest: Feed) {
        match newest {
            Feed::Object(vmi) => self.observed.apply_object(vmi, self.executor.node()),
            Feed::Missing => self.observed.object = ObjectState::Unverified,
            Feed::Replaced => self.observed.object = ObjectState::Deleted(self.started.elapsed()),
        }
    }

    fn apply_report(&mut self, connection: u64, report: Report) {
        if !self.executor.is_current(connection) {
            return;
        }
        let now = self.now();
        match report {
            Report::State(state) => {
                tracing::debug!(
                    lifecycle = state.lifecycle().as_str_name(), reason = %state.reason, "state of the launcher"
                );
                let panic = state.guest_panic.clone();
                let events = self.observed.apply_report(*state, now);
                if let Some(panic) = panic.filter(|_| events.iter().any(|event| event.reason == GUEST_PANICKED)) {
                    let vmi = &self.observed.vmi;
                    self.metrics.guest_panics.count(&vmi.namespace().unwrap_or_default(), &vmi.name_any(), &panic);
                }
                self.publish(events);
            }
            Report::Lost(error) => {
                tracing::info!(%error, "connection to virt-launcher lost");
                self.observed.apply_disconnect(connection, now);
            }
        }
    }

    fn publish(&self, events: Vec<Event>) {
        for event in events {
            self.executor.publish(&self.observed.vmi, event);
        }
    }

    fn complete(&mut self, completed: Completed) {
        let now = self.now();
        let outcome = match completed {
            Completed::Called(answered) => {
                match &answered.error {
                    // The next connection shows what has become of the call.
                    Some(error) if error.is_lost() => {
                        tracing::debug!(%error, call = answered.call, "no answer of virt-launcher")
                    }
                    Some(error) => tracing::warn!(%error, call = answered.call, "a call to virt-launcher failed"),
                    None => {}
                }
                let events = (answered.apply)(&mut self.observed, now);
                return self.publish(events);
            }
            Completed::Outcome(outcome) => outcome,
            Completed::Requested(pending, result) => {
                self.answer(pending, result, now);
                Outcome::Requested
            }
            Completed::Connected(Ok((launcher, peer, security_context))) => {
                tracing::info!(pid = peer.pid(), "connected to virt-launcher");
                self.observed.security_context = security_context;
                Outcome::Connected(Ok(self.executor.keep(launcher, peer)))
            }
            Completed::Connected(Err(error)) => {
                match &error {
                    // Logged once per reason.
                    ConnectError::Refused(message) if self.observed.refused_connect() != Some(message) => {
                        tracing::warn!(%error, "the socket of virt-launcher is refused");
                    }
                    _ => tracing::debug!(%error, "virt-launcher is not available yet"),
                }
                Outcome::Connected(Err(error))
            }
        };
        log(&outcome);
        let events = self.observed.apply_outcome(outcome, self.executor.node(), now);
        self.publish(events);
    }

    /// Starts the request of a user, or answers with the reason against it.
    fn request(&mut self, pending: PendingRequest) {
        match request::admit(&self.observed, pending.request) {
            Ok(()) => {
                if self.executor.request(pending, &self.observed) {
                    self.observed.busy.insert(REQUEST);
                }
            }
            Err(refusal) => reply(pending.answer, Err(refusal)),
        }
    }

    /// Answers a request, or holds the answer back until the object shows the result.
    fn answer(&mut self, pending: PendingRequest, result: Result<(), Refusal>, now: Now) {
        let paused = match pending.request {
            Request::Pause => Some(true),
            Request::Unpause => Some(false),
            Request::Reset | Request::SoftReboot => None,
        };
        match paused {
            Some(paused) if result.is_ok() => {
                self.held = Some(HeldAnswer { pending, paused, until: now.since_start + SHOWN_LIMIT });
            }
            _ => reply(pending.answer, result),
        }
    }

    /// Sends the held answer once the object shows the pause, or its end.
    fn release_answer(&mut self, now: Now) {
        let vmi = &self.observed.vmi;
        let shown = |held: &mut HeldAnswer| conditions::is_paused(vmi) == held.paused || now.since_start >= held.until;
        if let Some(held) = self.held.take_if(shown) {
            reply(held.pending.answer, Ok(()));
        }
    }

    /// Makes the launcher available for streams once it has accepted the VMI over this connection, and logs the stage. The
    /// launcher of a running guest is available after Hello, even if it rejects the spec.
    fn offer_launcher(&self, shown: &mut Option<Stage>) {
        let runs = self.observed.domain().is_alive();
        let is_owner = self.observed.role == Role::Owner;
        let accepted = matches!(self.observed.link, Link::Up { greeted: true, synced, .. } if synced.is_some() || runs);
        self.handle.set_launcher(self.executor.launcher().filter(|_| accepted && is_owner));
        self.handle.set_migration(self.observed.copying());
        let stage = self.observed.stage();
        if *shown != Some(stage) {
            tracing::debug!(?stage, phase = %self.observed.facts.phase, "stage");
            *shown = Some(stage);
        }
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn log(outcome: &Outcome) {
    match outcome {
        Outcome::Written(Err(WriteError::Conflict), _) => tracing::debug!("the object has changed since it was read"),
        Outcome::Written(Err(error), _) => tracing::warn!(%error, "cannot write the status"),
        Outcome::Read(Err(error)) => tracing::warn!(%error, "cannot read the object"),
        _ => {}
    }
}
