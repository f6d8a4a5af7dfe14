//! The task of one machine: waits for news, asks what to do, does it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::{VirtualMachineInstance, VirtualMachineInstanceStatus};
use process::CancellationToken;
use protocol::MachineOptions;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinSet},
};
use tracing::Instrument;

use super::{
    conditions,
    decide::{self, Effect},
    directory::Handle,
    host::{ConnectError, Host, NetworkFailure},
    records::{Records, WriteError, merge_difference},
    state::{Announcement, Busy, Link, Machine, Now, Outcome, Presence, Refusal, Request, Stage},
};
use crate::{
    launcher::{self, Launcher, LauncherError, Report},
    safe_dir::Peer,
};

/// States of the machine under way from the launcher; more are held back by the stream's flow control.
const REPORTS: usize = 4;
/// Longest network set-up.
const NETWORK_LIMIT: Duration = Duration::from_secs(30);
/// Longest choice of devices and capabilities for a launcher.
const EQUIP_LIMIT: Duration = Duration::from_secs(10);

/// Longest wait of an answered pause or unpause for the object to show it.
const SHOWN_LIMIT: Duration = Duration::from_secs(2);

/// The newest from the watch of objects.
#[derive(Clone, Debug)]
pub enum Feed {
    /// A version of the object.
    Object(Arc<VirtualMachineInstance>),
    /// The watch no longer shows it.
    Missing,
    /// Another object has taken its name.
    Replaced,
}

/// A request of a user with the place for its answer.
pub type Asked = (Request, oneshot::Sender<Result<(), Refusal>>);

/// A connection to the launcher.
struct Connection {
    number: u64,
    launcher: Launcher,
    peer: Arc<Peer>,
    /// Follows the machine's state, once the launcher has answered to the machine's UID.
    follower: Option<AbortHandle>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(follower) = &self.follower {
            follower.abort();
        }
    }
}

/// An answer that is held back until the object shows what was done, so that the user's next request, which is judged
/// by the object, finds it.
struct Owed {
    answer: oneshot::Sender<Result<(), Refusal>>,
    paused: bool,
    until: Duration,
}

/// What a call under way ends with.
enum Completed {
    /// A user's request was carried out, or not.
    Asked(Request, Result<(), Refusal>, oneshot::Sender<Result<(), Refusal>>),
    /// The launcher, its process, and what SELinux calls its container.
    Connected(Result<(Launcher, Arc<Peer>, Option<String>), ConnectError>),
    Outcome(Outcome),
}

/// The owner of one machine.
pub struct Task {
    machine: Machine,
    host: Arc<dyn Host>,
    records: Arc<dyn Records>,
    handle: Arc<Handle>,
    connection: Option<Connection>,
    connections: u64,
    calls: JoinSet<Completed>,
    owed: Option<Owed>,
    report: mpsc::Sender<(u64, Report)>,
    reports: mpsc::Receiver<(u64, Report)>,
    started: Instant,
}

impl Task {
    /// A task for the machine of `vmi`.
    pub fn new(
        vmi: Arc<VirtualMachineInstance>,
        host: Arc<dyn Host>,
        records: Arc<dyn Records>,
        handle: Arc<Handle>,
    ) -> Self {
        let (report, reports) = mpsc::channel(REPORTS);
        Self {
            machine: Machine::new(vmi, host.name()),
            host,
            records,
            handle,
            connection: None,
            connections: 0,
            calls: JoinSet::new(),
            owed: None,
            report,
            reports,
            started: Instant::now(),
        }
    }

    /// Runs until the machine is no longer this node's business, or until `stop`, which leaves it as it is.
    pub async fn run(
        mut self,
        mut feed: watch::Receiver<Feed>,
        mut requests: mpsc::Receiver<Asked>,
        stop: CancellationToken,
    ) {
        let mut stage = None;
        loop {
            let now = self.now();
            let decision = decide::decide(&self.machine, now);
            for effect in decision.effects {
                self.machine.begin(&effect, now);
                if effect == Effect::Retire {
                    tracing::info!("the machine has left this node");
                    return;
                }
                self.start(effect);
            }
            self.publish(&mut stage);
            self.settle(now);
            let owed_at = self.owed.as_ref().map(|owed| owed.until);
            // A user may set a grace period that no clock reaches.
            let wake_at = decision.wake_at.into_iter().chain(owed_at).min();
            let wake_at = wake_at.and_then(|at| self.started.checked_add(at)).map(tokio::time::Instant::from_std);
            tokio::select! {
                () = stop.cancelled() => return,
                changed = feed.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let news = feed.borrow_and_update().clone();
                    self.take_in(news);
                }
                Some((connection, report)) = self.reports.recv() => self.hear(connection, report),
                Some(completed) = self.calls.join_next(), if !self.calls.is_empty() => self.complete(completed),
                Some((request, answer)) = requests.recv(), if !self.machine.busy.request && self.owed.is_none() => {
                    self.ask(request, answer);
                }
                () = sleep_until(wake_at) => {}
            }
        }
    }

    fn now(&self) -> Now {
        Now { since_start: self.started.elapsed(), wall: jiff::Timestamp::now() }
    }

    fn take_in(&mut self, news: Feed) {
        match news {
            Feed::Object(vmi) => self.machine.see(vmi, self.host.name()),
            Feed::Missing => self.machine.presence = Presence::Unseen,
            Feed::Replaced => self.machine.presence = Presence::Deleted(self.started.elapsed()),
        }
    }

    fn hear(&mut self, connection: u64, report: Report) {
        if self.connection.as_ref().is_none_or(|current| current.number != connection) {
            return;
        }
        let now = self.now();
        match report {
            Report::State(state) => {
                tracing::debug!(
                    lifecycle = state.lifecycle().as_str_name(), reason = %state.reason, "the launcher reports"
                );
                for announcement in self.machine.hear(*state, now) {
                    self.records.announce(&self.machine.vmi, announcement);
                }
            }
            Report::Lost(error) => {
                tracing::info!(%error, "launcher lost");
                self.lose(connection, now);
            }
        }
    }

    fn follow(&mut self, number: u64) {
        if let Some(connection) = self.connection.as_mut().filter(|connection| connection.number == number) {
            let follow = launcher::follow(connection.launcher.clone(), number, self.report.clone());
            connection.follower = Some(tokio::spawn(follow.in_current_span()).abort_handle());
        }
    }

    fn lose(&mut self, number: u64, now: Now) {
        if self.connection.as_ref().is_some_and(|connection| connection.number == number) {
            self.connection = None;
        }
        self.machine.lose(number, now);
    }

    fn complete(&mut self, completed: Result<Completed, tokio::task::JoinError>) {
        let now = self.now();
        let outcome = match completed {
            Ok(Completed::Outcome(outcome)) => outcome,
            Ok(Completed::Asked(request, result, answer)) => {
                self.answer(request, result, answer, now);
                Outcome::Requested
            }
            Ok(Completed::Connected(Ok((launcher, peer, security_context)))) => {
                self.connections += 1;
                let number = self.connections;
                tracing::info!(pid = peer.pid(), "connected to the launcher");
                self.machine.security_context = security_context;
                self.connection = Some(Connection { number, launcher, peer, follower: None });
                Outcome::Connected(Ok(number))
            }
            Ok(Completed::Connected(Err(error))) => {
                match &error {
                    // Logged when the reason changes, however often it is tried.
                    ConnectError::Refused(message) if self.machine.trouble() != Some(message) => {
                        tracing::warn!(%error, "the launcher's socket is refused");
                    }
                    _ => tracing::debug!(%error, "no launcher yet"),
                }
                Outcome::Connected(Err(error))
            }
            // Taken along by the one that panicked: those that were started since are left alone.
            Err(error) if error.is_cancelled() => return,
            Err(error) => {
                // A call that panicked would otherwise count as under way for ever.
                tracing::error!(%error, "a call was aborted");
                self.machine.busy = Busy::default();
                self.calls.abort_all();
                return;
            }
        };
        log(&outcome);
        match &outcome {
            Outcome::Greeted(number, Ok(())) => self.follow(*number),
            // Nothing follows the connection yet that would notice its end.
            Outcome::Greeted(number, Err(error)) if error.is_lost() => self.lose(*number, now),
            _ => {}
        }
        for announcement in self.machine.learn(outcome, self.host.name(), now) {
            self.records.announce(&self.machine.vmi, announcement);
        }
    }

    fn start(&mut self, effect: Effect) {
        match effect {
            Effect::Connect { pod, within } => {
                let (host, vmi) = (self.host.clone(), self.machine.vmi.clone());
                self.call(async move { Completed::Connected(connect(&*host, &vmi, &pod, within).await) });
            }
            Effect::Write(status, announcements) => {
                let (records, vmi) = (self.records.clone(), self.machine.vmi.clone());
                self.call(async move {
                    let written = write(&*records, &vmi, &status).await;
                    Completed::Outcome(Outcome::Written(written, announcements))
                });
            }
            Effect::Read => {
                let (records, vmi) = (self.records.clone(), self.machine.vmi.clone());
                self.call(async move { Completed::Outcome(Outcome::Read(records.read(&vmi).await)) });
            }
            Effect::Announce(announcement) => self.records.announce(&self.machine.vmi, announcement),
            Effect::Retire => {}
            Effect::Hello
            | Effect::SetUpNetwork
            | Effect::Sync { .. }
            | Effect::Shutdown { .. }
            | Effect::Kill
            | Effect::Finish => self.start_call(effect),
        }
    }

    /// Starts a call to the launcher.
    fn start_call(&mut self, effect: Effect) {
        let Some(connection) = &self.connection else {
            // Link and connection change together, so this cannot be; if it were, no call would be under way.
            let known = self.machine.busy;
            self.machine.busy = Busy { connect: known.connect, record: known.record, ..Busy::default() };
            return;
        };
        let (number, launcher, peer) = (connection.number, connection.launcher.clone(), connection.peer.clone());
        let (host, vmi) = (self.host.clone(), self.machine.vmi.clone());
        match effect {
            Effect::Hello => self.call(async move {
                let greeted = greet(&*host, &launcher, &peer, &vmi).await;
                Completed::Outcome(Outcome::Greeted(number, greeted))
            }),
            Effect::SetUpNetwork => self.call(async move {
                let ready = tokio::time::timeout(NETWORK_LIMIT, host.set_up_network(&peer, &vmi)).await;
                let ready = ready.unwrap_or_else(|_| {
                    Err(NetworkFailure { message: "not done within the time limit".into(), permanent: false })
                });
                Completed::Outcome(Outcome::Network(number, ready))
            }),
            Effect::Sync { fingerprint } => {
                let nics = self.machine.network.as_ref().map(|network| network.nics.clone()).unwrap_or_default();
                let options = MachineOptions { nics, ..host.settings().options };
                self.call(async move {
                    let synced = sync(&launcher, &vmi, options).await;
                    Completed::Outcome(Outcome::Synced(number, fingerprint, synced))
                });
            }
            Effect::Shutdown { grace } => {
                self.call(async move { Completed::Outcome(Outcome::Signalled(launcher.shutdown(grace).await)) });
            }
            Effect::Kill => {
                self.call(async move { Completed::Outcome(Outcome::Signalled(launcher.kill().await)) });
            }
            Effect::Finish => {
                self.call(async move { Completed::Outcome(Outcome::Finished(launcher.finish().await)) });
            }
            Effect::Connect { .. } | Effect::Write(..) | Effect::Read | Effect::Announce(_) | Effect::Retire => {}
        }
    }

    fn call(&mut self, call: impl Future<Output = Completed> + Send + 'static) {
        self.calls.spawn(call.in_current_span());
    }

    /// Carries out a user's request, or says why not.
    fn ask(&mut self, request: Request, answer: oneshot::Sender<Result<(), Refusal>>) {
        let admitted = decide::admit(&self.machine, request);
        let connection = match (admitted, &self.connection) {
            (Ok(()), Some(connection)) => connection,
            (Ok(()), None) => {
                let _ = answer.send(Err(Refusal::NoLauncher(self.machine.facts.uid.clone())));
                return;
            }
            (Err(refusal), _) => {
                let _ = answer.send(Err(refusal));
                return;
            }
        };
        self.machine.busy.request = true;
        let (launcher, records, vmi) = (connection.launcher.clone(), self.records.clone(), self.machine.vmi.clone());
        self.call(async move {
            let (result, reason, message) = match request {
                Request::Pause => (launcher.pause().await, "Paused", "VirtualMachineInstance paused"),
                Request::Unpause => (launcher.unpause().await, "Unpaused", "VirtualMachineInstance unpaused"),
                Request::Reset => (launcher.reset().await, "Reset", "VirtualMachineInstance reset"),
                Request::SoftReboot => {
                    (launcher.soft_reboot().await, "SoftRebooted", "VirtualMachineInstance soft rebooted")
                }
            };
            if result.is_ok() {
                records.announce(&vmi, Announcement::normal(reason, message));
            }
            Completed::Asked(request, result.map_err(Refusal::from), answer)
        });
    }

    /// Answers a request, at once or when the object shows what it did.
    fn answer(
        &mut self,
        request: Request,
        result: Result<(), Refusal>,
        answer: oneshot::Sender<Result<(), Refusal>>,
        now: Now,
    ) {
        let paused = match request {
            Request::Pause => Some(true),
            Request::Unpause => Some(false),
            Request::Reset | Request::SoftReboot => None,
        };
        match paused {
            Some(paused) if result.is_ok() => {
                self.owed = Some(Owed { answer, paused, until: now.since_start + SHOWN_LIMIT });
            }
            // The client may have gone.
            _ => drop(answer.send(result)),
        }
    }

    /// Gives the answer that is held back once the object shows the pause, or its end.
    fn settle(&mut self, now: Now) {
        let shown =
            |owed: &mut Owed| conditions::is_paused(&self.machine.vmi) == owed.paused || now.since_start >= owed.until;
        if let Some(owed) = self.owed.take_if(shown) {
            drop(owed.answer.send(Ok(())));
        }
    }

    /// Lets streams reach the launcher once it has accepted the machine over this connection, and logs the stage. A guest
    /// that runs is reached as soon as the launcher has answered to the machine's UID, whatever else it cannot do.
    fn publish(&self, shown: &mut Option<Stage>) {
        let runs = self.machine.domain().is_alive();
        let accepted = matches!(self.machine.link, Link::Up { greeted: true, synced, .. } if synced.is_some() || runs);
        let launcher = self.connection.as_ref().filter(|_| accepted).map(|connection| &connection.launcher);
        self.handle.set_launcher(launcher);
        let stage = self.machine.stage();
        if *shown != Some(stage) {
            tracing::debug!(?stage, phase = %self.machine.facts.phase, "stage");
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

async fn greet(
    host: &dyn Host,
    launcher: &Launcher,
    peer: &Arc<Peer>,
    vmi: &VirtualMachineInstance,
) -> Result<(), LauncherError> {
    const CALL: &str = "Hello";
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    let cache = match tokio::time::timeout(EQUIP_LIMIT, host.equip(peer, vmi)).await {
        Ok(Ok(cache)) => cache,
        Ok(Err(message)) if peer.is_alive() => {
            return Err(LauncherError::Refused { call: CALL, message, irrecoverable: false });
        }
        // Nothing else notices the end of a connection over which Hello was not answered.
        Ok(Err(message)) => return Err(LauncherError::Lost(message)),
        Err(_) => return Err(LauncherError::Deadline { call: CALL, after: EQUIP_LIMIT }),
    };
    let version = launcher.hello(uid, cache, host.settings().allow_emulation).await?;
    tracing::debug!(%version, "the launcher answered hello");
    Ok(())
}

async fn sync(
    launcher: &Launcher,
    vmi: &VirtualMachineInstance,
    options: MachineOptions,
) -> Result<bool, LauncherError> {
    let json = serde_json::to_vec(vmi).map_err(|error| LauncherError::Refused {
        call: "Sync",
        message: error.to_string(),
        irrecoverable: true,
    })?;
    launcher.sync(json, options).await
}

async fn write(
    records: &dyn Records,
    vmi: &Arc<VirtualMachineInstance>,
    status: &VirtualMachineInstanceStatus,
) -> Result<Arc<VirtualMachineInstance>, WriteError> {
    match patch(vmi, status) {
        Ok(Some(patch)) => records.patch(vmi, patch).await,
        Ok(None) => Ok(vmi.clone()),
        Err(error) => Err(WriteError::Other(error.to_string())),
    }
}

/// The merge patch from the object's status to `status`, tied to the version it was computed from.
fn patch(
    vmi: &VirtualMachineInstance,
    status: &VirtualMachineInstanceStatus,
) -> Result<Option<Value>, serde_json::Error> {
    let from = match &vmi.status {
        Some(status) => serde_json::to_value(status)?,
        None => json!({}),
    };
    let difference = merge_difference(&from, &serde_json::to_value(status)?);
    Ok(difference.map(
        |difference| json!({"metadata": {"resourceVersion": vmi.metadata.resource_version}, "status": difference}),
    ))
}

fn log(outcome: &Outcome) {
    match outcome {
        Outcome::Network(_, Err(failure)) => tracing::warn!(error = %failure, "network set-up failed"),
        Outcome::Greeted(_, Err(error)) => tracing::warn!(%error, "hello failed"),
        Outcome::Synced(_, _, Err(error)) => tracing::warn!(%error, "synchronization failed"),
        Outcome::Synced(_, _, Ok(started)) => tracing::info!(started, "synchronized"),
        Outcome::Signalled(Err(error)) => tracing::warn!(%error, "the machine was not signalled"),
        Outcome::Finished(Err(error)) if !error.is_lost() => tracing::warn!(%error, "the launcher was not released"),
        Outcome::Written(Err(WriteError::Conflict), _) => tracing::debug!("status has changed meanwhile"),
        Outcome::Written(Err(error), _) => tracing::warn!(%error, "status was not written"),
        Outcome::Read(Err(error)) => tracing::warn!(%error, "the object was not read"),
        _ => {}
    }
}
