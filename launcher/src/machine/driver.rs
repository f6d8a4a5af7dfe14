//! The state driver: the task that owns the machine.

use std::{path::Path, sync::Arc, time::Duration};

use protocol::{AccessCredentials, Lifecycle, MachineState};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use super::{
    AgentChannel, ConnectionHandle, MachineHandle, RequestError, Shared, crash,
    queue::{Action, Request, RequestQueue},
    start::{Start, gives_up, kvm_usable, pauses_probes},
    state::{active_domain, errors_by_volume, lifecycle, waits_for_disk},
};
use crate::{
    agent::{GuestAgent, Told, credentials},
    console::Console,
    daemon::{self, Daemon, DaemonProgram},
    domain::{Given, domain_name},
    libvirt::{Connection, Error, RebootWay},
    options::MachineArgs,
    paths::Paths,
};

/// How long a plain call to libvirt may take.
pub(super) const CALL_DEADLINE: Duration = Duration::from_secs(20);
/// How long starting QEMU may take.
const CREATE_DEADLINE: Duration = Duration::from_secs(120);
/// How long a start waits for libvirt's daemon.
const DAEMON_DEADLINE: Duration = Duration::from_secs(60);
/// How often the daemon's socket is tried while there is no connection.
const CONNECT_RETRY: Duration = Duration::from_millis(15);
/// How often the guest is asked to power off.
const SHUTDOWN_REPEAT: Duration = Duration::from_secs(5);
/// How long the final state waits for the agent to record it.
const FINISH_DEADLINE: Duration = Duration::from_secs(300);
/// The same when the pod is being ended.
const FINISH_DEADLINE_TERMINATING: Duration = Duration::from_secs(10);
/// How long the guest agent may take to answer.
const AGENT_DEADLINE: Duration = Duration::from_secs(10);
/// A change may be missed while libvirt's daemon restarts, so the state is read anew at least this often.
const REFRESH: Duration = Duration::from_secs(30);

/// How the driver ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the machine ended well: its guest powered off, or it was stopped as asked.
    pub success: bool,
    /// Why, for the pod's status.
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No domain has run in this pod.
    Waiting,
    /// The domain runs or is paused.
    Live,
    /// It has ended, or never will start.
    Ended,
}

struct Stopping {
    force_at: Instant,
    signal_at: Instant,
}

/// The state driver.
pub struct Driver {
    shared: Arc<Shared>,
    state: watch::Sender<MachineState>,
    connections: watch::Sender<Option<ConnectionHandle>>,
    consoles: watch::Sender<Option<Console>>,
    paths: Paths,
    args: MachineArgs,
    name: String,
    program: Option<DaemonProgram>,
    daemon: Option<Daemon>,
    /// What the node knows about QEMU is in place, by Hello or by a worker before this one. libvirt reads it with the first
    /// question that needs it, and would spend seconds on probing QEMU if it were not there.
    informed: bool,
    connection: Option<Connection>,
    allow_emulation: bool,
    stage: Stage,
    stopping: Option<Stopping>,
    terminating: bool,
    finish_at: Option<Instant>,
    finished: bool,
    refresh_at: Instant,
    retry_at: Instant,
    agent: GuestAgent,
    told: watch::Receiver<Told>,
    dhcp: Vec<JoinHandle<()>>,
    /// Puts keys and passwords into the guest, if it is to have any.
    credentials: Option<JoinHandle<()>>,
    credentials_told: watch::Receiver<Option<AccessCredentials>>,
    /// Sets the guest's clock after a pause.
    clock: Option<JoinHandle<()>>,
    disk_sizes: Vec<protocol::DiskTarget>,
    acpi: bool,
    /// Devices of the host that the pod was given.
    host_devices: Given,
    /// A worker ran here before, and this one has started nothing so far.
    adopting: bool,
    /// Starts have failed since.
    failing_since: Option<Instant>,
}

impl Driver {
    /// A driver for a machine, and the handle by which others reach it.
    pub fn new(args: MachineArgs, paths: Paths) -> (Self, MachineHandle) {
        let shared = Arc::new(Shared { queue: RequestQueue::default().into(), pushed: Notify::new() });
        let initial = MachineState { sequence: 1, lifecycle: Lifecycle::NoDomain.into(), ..MachineState::default() };
        let (state, state_receiver) = watch::channel(initial);
        let (connections, connection) = watch::channel(None);
        let (consoles, console) = watch::channel(None);
        let name = domain_name(&args.namespace, &args.name);
        let channel = AgentChannel { connection: connection.clone(), domain: name.clone() };
        let agent = GuestAgent::new(channel, paths.thaw_at(&args.uid));
        let handle = MachineHandle {
            shared: shared.clone(),
            state: state_receiver,
            connection,
            console,
            agent: agent.clone(),
            paths: paths.clone(),
            args: args.clone(),
        };
        let now = Instant::now();
        let driver = Self {
            shared,
            state,
            connections,
            consoles,
            name,
            paths,
            allow_emulation: args.allow_emulation,
            args,
            program: None,
            daemon: None,
            informed: false,
            connection: None,
            stage: Stage::Waiting,
            stopping: None,
            terminating: false,
            finish_at: None,
            finished: false,
            refresh_at: now,
            retry_at: now,
            told: agent.told(),
            agent,
            dhcp: Vec::new(),
            credentials: None,
            credentials_told: watch::channel(None).1,
            clock: None,
            disk_sizes: Vec::new(),
            acpi: false,
            host_devices: Given::new(std::env::vars_os()),
            adopting: false,
            failing_since: None,
        };
        (driver, handle)
    }

    /// Runs until the machine has ended and its end is recorded.
    pub async fn run(mut self) -> Outcome {
        if self.args.simulate_crash {
            // The agent is to hear of it: where the pod is kept after a failure, nothing else tells that there was one.
            self.publish(|state| state.failure = "failing as asked".to_owned());
            self.end();
        } else {
            self.bring_up_daemon();
        }
        while !self.finished {
            self.step().await;
        }
        for task in self.dhcp.iter().chain(&self.credentials).chain(&self.clock) {
            task.abort();
        }
        self.connection = None;
        let _ = self.connections.send_replace(None);
        if let Some(daemon) = self.daemon.take() {
            daemon.stop().await;
        }
        let state = self.state.borrow().clone();
        let success = state.failure.is_empty()
            && (state.lifecycle() == Lifecycle::NoDomain
                || (state.lifecycle() == Lifecycle::Shutoff
                    && matches!(state.reason.as_str(), "shutdown" | "destroyed" | "migrated")));
        let message = if state.failure.is_empty() { state.reason } else { state.failure };
        Outcome { success, message }
    }

    /// The daemon comes up while the agent finds the launcher's socket, unless the agent has to open /dev/kvm first: the
    /// daemon looks into it while it starts. With devices behind the IOMMU the agent has to raise first what this process
    /// may lock of its memory, for the daemon and QEMU inherit that. A restarted worker finds the daemon of the one before; whether there may be a
    /// domain as well is told by the directory that each start makes first.
    fn bring_up_daemon(&mut self) {
        self.adopting = self.paths.machine(&self.args.uid).exists();
        if self.adopting {
            tracing::info!("a machine was started here before, looking for it");
        } else if self.host_devices.has_pci() || (self.paths.dev.join("kvm").exists() && !kvm_usable(&self.paths.dev)) {
            return;
        }
        match self.start_daemon() {
            Ok(()) => self.informed = self.adopting,
            // Hello tries again, and its answer says why that fails.
            Err(error) => tracing::warn!(%error, "libvirt's daemon cannot be started yet"),
        }
    }

    fn start_daemon(&mut self) -> Result<(), daemon::DaemonError> {
        if self.daemon.is_none() {
            let mut program = DaemonProgram::find()?;
            program.log_filters.clone_from(&self.args.libvirt_log_filters);
            daemon::configure(&program, &self.paths)?;
            self.daemon = Some(Daemon::start(program.clone(), self.paths.clone()));
            self.program = Some(program);
        }
        Ok(())
    }

    /// Waits for the next thing to do and does it.
    async fn step(&mut self) {
        let request = self.shared.queue().pop();
        if let Some(request) = request {
            self.handle(request).await;
            return;
        }
        let never = Instant::now() + Duration::from_secs(24 * 3600);
        let connecting = self.informed && self.connection.is_none() && self.stage != Stage::Ended;
        let signals = self.connection.as_ref().map(|connection| connection.signals().clone());
        let changed = async {
            match &signals {
                Some(signals) => signals.changed().await,
                None => std::future::pending().await,
            }
        };
        let refresh_at = if self.connection.is_some() && self.stage != Stage::Ended { self.refresh_at } else { never };
        let signal_at = self.stopping.as_ref().map_or(never, |stopping| stopping.signal_at.min(stopping.force_at));
        tokio::select! {
            () = self.shared.pushed.notified() => {}
            () = changed => self.refresh().await,
            () = sleep_until(refresh_at) => self.refresh().await,
            () = sleep_until(if connecting { self.retry_at } else { never }) => self.connect().await,
            () = sleep_until(signal_at) => self.press_on().await,
            Ok(()) = self.told.changed() => self.learn(),
            Ok(()) = self.credentials_told.changed() => {
                let told = self.credentials_told.borrow_and_update().clone();
                self.publish(|state| state.access_credentials = told);
            }
            () = sleep_until(self.finish_at.unwrap_or(never)) => {
                tracing::warn!("the agent did not record the machine's end in time");
                self.finished = true;
            }
        }
    }

    async fn handle(&mut self, request: Request) {
        match request {
            Request::Hello { cache, allow_emulation, reply } => {
                let _ = reply.send(self.hello(&cache, allow_emulation));
            }
            Request::Sync { vmi, unsupported, options, reply } => {
                let start = Start {
                    vmi: *vmi,
                    unsupported,
                    options,
                    paths: self.paths.clone(),
                    args: self.args.clone(),
                    allow_emulation: self.allow_emulation,
                    host_devices: self.host_devices.clone(),
                };
                let result = self.sync(start).await;
                let _ = reply.send(result);
            }
            Request::Act { action, reply } => {
                let result = self.act(action).await;
                let _ = reply.send(result);
            }
        }
    }

    fn hello(&mut self, cache: &[protocol::CacheFile], allow_emulation: bool) -> Result<(), RequestError> {
        if self.stage == Stage::Ended {
            return Ok(());
        }
        let failed = |error: daemon::DaemonError| RequestError::Start { message: error.to_string(), lasting: false };
        self.allow_emulation |= allow_emulation;
        if !self.informed {
            daemon::place_cache(&self.paths, cache).map_err(failed)?;
        }
        self.start_daemon().map_err(failed)?;
        self.informed = true;
        Ok(())
    }

    /// One attempt to connect to the daemon.
    async fn connect(&mut self) {
        self.retry_at = Instant::now() + CONNECT_RETRY;
        let Some(program) = &self.program else { return };
        if !listens(&program.socket(&self.paths)) {
            return;
        }
        match Connection::open(program.uri(&self.paths), DAEMON_DEADLINE).await {
            Ok(connection) => {
                tracing::debug!("connected to libvirt");
                let _ = self.connections.send_replace(Some(ConnectionHandle(connection.clone())));
                self.connection = Some(connection.clone());
                if self.stage == Stage::Waiting {
                    // While the agent sets up the network. A start that comes first waits no longer than it would have.
                    tokio::spawn(async move {
                        if let Err(error) = connection.warm_up(CALL_DEADLINE).await {
                            tracing::debug!(%error, "libvirt was not warmed up");
                        }
                    });
                }
                self.refresh().await;
            }
            Err(error) => {
                tracing::debug!(%error, "libvirt does not answer yet");
                self.retry_at = Instant::now() + CONNECT_RETRY * 10;
            }
        }
    }

    fn disconnect(&mut self) {
        tracing::warn!("the connection to libvirt is gone");
        self.connection = None;
        let _ = self.connections.send_replace(None);
        self.retry_at = Instant::now();
    }

    /// Starts the machine unless it runs; true if that was done.
    async fn sync(&mut self, start: Start) -> Result<bool, RequestError> {
        if self.stage == Stage::Ended {
            return Err(RequestError::Ended);
        }
        let vmi = &start.vmi.metadata;
        if vmi.name.as_deref() != Some(&self.args.name)
            || vmi.namespace.as_deref() != Some(&self.args.namespace)
            || vmi.uid.as_deref() != Some(&self.args.uid)
        {
            return Err(RequestError::OtherMachine(self.name.clone()));
        }
        // A domain that may run already is adopted and served first.
        let supported = if self.may_run() { Ok(()) } else { start.check_supported() };
        let result = match supported {
            Ok(()) if !self.informed => return Err(RequestError::NoHello),
            Ok(()) => self.start(&start).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &result {
            tracing::error!(%error, "the machine cannot be made what it should be");
            // All else may pass, and the agent asks again, but not for ever. A guest that runs is never ended by it.
            let failing_for = self.failing_since.get_or_insert_with(Instant::now).elapsed();
            if self.stage != Stage::Live && gives_up(error, failing_for, self.adopting) {
                let text = error.to_string();
                self.publish(|state| state.failure = text);
                self.end();
            }
        }
        result
    }

    fn may_run(&self) -> bool {
        self.adopting || self.stage == Stage::Live
    }

    async fn start(&mut self, start: &Start) -> Result<bool, RequestError> {
        if self.connection.is_none() {
            // Images are made while the daemon comes up.
            tracing::debug!("waiting for libvirt while the disks are made");
        }
        let known_live = self.stage == Stage::Live;
        let domain = if known_live { None } else { Some(start.domain().await?) };
        let deadline = Instant::now() + DAEMON_DEADLINE;
        while self.connection.is_none() {
            if self.shared.queue().wants_end() {
                return Err(RequestError::Ending);
            }
            if Instant::now() > deadline {
                return Err(Error::Disconnected("libvirt's daemon did not come up".into()).into());
            }
            sleep_until(self.retry_at).await;
            self.connect().await;
        }
        if self.dhcp.is_empty() {
            self.dhcp = start.serve_dhcp()?;
        }
        self.open_console(start);
        self.follow_credentials(start);
        self.agent.pause_probes(pauses_probes(&start.vmi));
        // Connecting may have found the domain of a former worker.
        if self.stage == Stage::Live {
            // First: it may be what the guest waits for.
            self.grow(start).await?;
            self.go_on().await?;
            start.check_supported()?;
            return Ok(false);
        }
        start.check_supported()?;
        let Some(domain) = domain else { return Ok(false) };
        let connection = self.connection.clone().ok_or_else(|| Error::Disconnected("lost".into()))?;
        self.disk_sizes.clone_from(&domain.disks);
        self.acpi = domain.acpi;
        self.adopting = false;
        tracing::debug!(xml = domain.xml, "defining the domain");
        connection.define(domain.xml, CALL_DEADLINE).await?;
        if start.has_roles() {
            self.tell_roles(start, &connection).await?;
        }
        if self.shared.queue().wants_end() {
            return Err(RequestError::Ending);
        }
        if let Err(error) = connection.create(&self.name, domain.start_paused, CREATE_DEADLINE).await {
            // The definition is left: the next attempt replaces it.
            return Err(error.into());
        }
        self.stage = Stage::Live;
        self.refresh().await;
        tracing::info!("the machine runs");
        Ok(true)
    }

    /// Tells the guest of the roles of its interfaces, whose addresses libvirt has chosen.
    async fn tell_roles(&mut self, start: &Start, connection: &Connection) -> Result<(), RequestError> {
        let definition = connection.definition(&self.name, CALL_DEADLINE).await?;
        if let Some((volume, size)) = start.tell_roles(definition).await? {
            let made = self.disk_sizes.iter_mut().filter(|disk| disk.volume == volume);
            made.for_each(|disk| disk.size = size);
        }
        Ok(())
    }

    /// Gives the disks of the guest what their claims have grown by.
    async fn grow(&self, start: &Start) -> Result<(), RequestError> {
        let Some(connection) = self.connection.clone().filter(|_| self.stopping.is_none()) else { return Ok(()) };
        for (volume, size) in start.room().await {
            let target =
                self.state.borrow().disks.iter().find(|disk| disk.volume == volume).map(|disk| disk.target.clone());
            let Some(target) = target else { continue };
            match connection.grow_disk(&self.name, target, size, CALL_DEADLINE).await {
                Ok(true) => tracing::info!(volume, size, "the disk was grown to its claim"),
                Ok(false) => {}
                Err(error) if error.is_transient() => return Err(error.into()),
                // The guest has its disk all the same.
                Err(error) => tracing::warn!(volume, size, %error, "the disk was not grown to its claim"),
            }
        }
        Ok(())
    }

    /// Lets a guest that stands still because of a disk run on. If the cause is still there, it stops again.
    async fn go_on(&mut self) -> Result<(), RequestError> {
        let stuck = {
            let state = self.state.borrow();
            waits_for_disk(state.lifecycle(), &state.reason) && self.stopping.is_none()
        };
        let Some(connection) = self.connection.clone().filter(|_| stuck) else { return Ok(()) };
        tracing::info!("the machine goes on after an error of a disk");
        connection.resume(&self.name, CALL_DEADLINE).await?;
        self.refresh().await;
        Ok(())
    }

    fn open_console(&mut self, start: &Start) {
        let devices = &start.vmi.spec.domain.devices;
        if devices.autoattach_serial_console == Some(false) || self.consoles.borrow().is_some() {
            return;
        }
        let log = devices.log_serial_console.unwrap_or(!start.options.serial_console_log_disabled);
        let console = Console::start(self.paths.serial(&self.args.uid), log);
        let _ = self.consoles.send_replace(Some(console));
    }

    fn follow_credentials(&mut self, start: &Start) {
        let sources = credentials::Sources::of(&start.vmi, &self.paths);
        if self.credentials.is_some() || sources.is_empty() {
            return;
        }
        let (told, receiver) = watch::channel(None);
        self.credentials_told = receiver;
        self.credentials = Some(tokio::spawn(credentials::follow(self.agent.clone(), sources, told)));
    }

    async fn act(&mut self, action: Action) -> Result<(), RequestError> {
        match action {
            Action::Finish => {
                if self.stage != Stage::Ended {
                    return Err(RequestError::NotEnded);
                }
                self.finished = true;
                Ok(())
            }
            Action::Terminate { grace } => {
                self.terminating = true;
                match self.stage {
                    Stage::Waiting => {
                        self.end();
                        // Nothing ran, so there is nothing for the agent to record.
                        self.finished = true;
                    }
                    Stage::Ended => self.end(),
                    Stage::Live => self.stop_within(grace).await,
                }
                Ok(())
            }
            Action::Shutdown { grace } => {
                if self.stage == Stage::Waiting {
                    self.publish(|state| state.reason = "destroyed".into());
                    self.end();
                } else if self.stage == Stage::Live {
                    self.stop_within(grace).await;
                }
                Ok(())
            }
            Action::Kill => match self.stage {
                Stage::Waiting => {
                    self.publish(|state| state.reason = "destroyed".into());
                    self.end();
                    Ok(())
                }
                Stage::Live => self.kill().await,
                Stage::Ended => Ok(()),
            },
            Action::Pause | Action::Unpause | Action::Reset | Action::SoftReboot => self.act_live(action).await,
        }
    }

    async fn act_live(&mut self, action: Action) -> Result<(), RequestError> {
        if self.stage != Stage::Live {
            return Err(RequestError::NoDomain);
        }
        let connection = self.connection.clone().ok_or_else(|| Error::Disconnected("reconnecting".into()))?;
        let state = self.state.borrow().clone();
        let (running, paused) = (state.lifecycle() == Lifecycle::Running, state.lifecycle() == Lifecycle::Paused);
        match action {
            Action::Pause if running => connection.suspend(&self.name, CALL_DEADLINE).await?,
            Action::Unpause if paused => {
                connection.resume(&self.name, CALL_DEADLINE).await?;
                // One at a time: each holds one of the few calls to libvirt for as long as the agent does not answer.
                if state.guest_agent_connected && self.clock.as_ref().is_none_or(JoinHandle::is_finished) {
                    self.clock = Some(tokio::spawn(set_guest_time(connection, self.name.clone())));
                }
            }
            Action::Reset => connection.reset(&self.name, CALL_DEADLINE).await?,
            Action::SoftReboot => {
                let way = match (state.guest_agent_connected, state.acpi) {
                    (true, _) => RebootWay::GuestAgent,
                    (false, true) => RebootWay::Acpi,
                    (false, false) => return Err(RequestError::NoWayToReboot),
                };
                connection.reboot(&self.name, way, CALL_DEADLINE).await?;
            }
            _ => {}
        }
        self.refresh().await;
        Ok(())
    }

    async fn stop_within(&mut self, grace: u64) {
        let now = Instant::now();
        let force_at = now + Duration::from_secs(grace.min(365 * 24 * 3600));
        match &mut self.stopping {
            Some(stopping) => stopping.force_at = stopping.force_at.min(force_at),
            None => self.stopping = Some(Stopping { force_at, signal_at: now }),
        }
        self.press_on().await;
    }

    /// Asks the guest to power off once more, or forces it when its time is over.
    async fn press_on(&mut self) {
        let now = Instant::now();
        let Some(stopping) = &mut self.stopping else { return };
        if now >= stopping.force_at {
            tracing::warn!("the grace period is over, stopping the machine by force");
            stopping.force_at = now + SHUTDOWN_REPEAT;
            stopping.signal_at = stopping.force_at;
            if let Err(error) = self.kill().await {
                tracing::error!(%error, "cannot stop the machine");
            }
            return;
        }
        if now < stopping.signal_at {
            return;
        }
        stopping.signal_at = (now + SHUTDOWN_REPEAT).min(stopping.force_at);
        let already = self.state.borrow().lifecycle() == Lifecycle::ShuttingDown;
        if let (Some(connection), false) = (self.connection.clone(), already) {
            match connection.shutdown(&self.name, CALL_DEADLINE).await {
                Ok(()) => {}
                Err(Error::NoDomain) => self.refresh().await,
                Err(error) => tracing::warn!(%error, "cannot ask the guest to power off"),
            }
        }
    }

    async fn kill(&mut self) -> Result<(), RequestError> {
        let connection = self.connection.clone().ok_or_else(|| Error::Disconnected("reconnecting".into()))?;
        let mut result = connection.destroy(&self.name, true, CALL_DEADLINE).await;
        if let Err(error) = &result {
            tracing::warn!(%error, "QEMU does not end by itself");
            result = connection.destroy(&self.name, false, CALL_DEADLINE).await;
        }
        self.refresh().await;
        match result {
            Ok(()) | Err(Error::NoDomain) => Ok(()),
            Err(_) if self.stage == Stage::Ended => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the domain's state and publishes it.
    async fn refresh(&mut self) {
        self.refresh_at = Instant::now() + REFRESH;
        let Some(connection) = self.connection.clone() else { return };
        if connection.signals().is_closed() {
            self.disconnect();
            return;
        }
        // Before the rest: with the machine's end the agent may let go of the launcher.
        if connection.signals().has_crashed() {
            self.note_crash().await;
        }
        if self.stage == Stage::Ended {
            return;
        }
        let facts = match connection.facts(&self.name, true, CALL_DEADLINE).await {
            Ok(facts) => facts,
            Err(Error::NoDomain) if self.stage == Stage::Live => {
                self.publish(|state| {
                    state.set_lifecycle(Lifecycle::Shutoff);
                    state.reason = "unknown".into();
                });
                self.end();
                return;
            }
            Err(Error::NoDomain) => return,
            Err(Error::Disconnected(_)) => {
                self.disconnect();
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the domain's state");
                self.refresh_at = Instant::now() + Duration::from_secs(2);
                return;
            }
        };
        let (lifecycle, reason) = lifecycle(facts.state);
        let over = matches!(lifecycle, Lifecycle::Shutoff | Lifecycle::Crashed | Lifecycle::NoDomain);
        if self.stage == Stage::Waiting {
            // A domain that does not run is one that a start has defined, and maybe failed to start. Only a worker that
            // finds it so right after its own start has missed the machine's end.
            if over && (!self.adopting || matches!(reason, "unknown" | "failed")) {
                return;
            }
            self.stage = Stage::Live;
        }
        let active = active_domain(&facts.xml);
        let agent = !over && connection.signals().agent_connected().unwrap_or(active.agent_connected);
        let sizes = &self.disk_sizes;
        let acpi = self.acpi || active.acpi;
        let update = |state: &mut MachineState| {
            state.set_lifecycle(lifecycle);
            state.reason = reason.into();
            state.guest_agent_connected = agent;
            if !agent {
                forget_guest(state);
            }
            state.acpi = acpi;
            if !over && !active.machine_type.is_empty() {
                state.machine_type.clone_from(&active.machine_type);
                state.software_emulation = active.software_emulation;
                state.memory_current = facts.memory;
                state.disk_errors = errors_by_volume(&facts.disk_errors, &active.disks);
                state.disks.clone_from(&active.disks);
                for disk in &mut state.disks {
                    disk.size = sizes.iter().find(|made| made.volume == disk.volume).map_or(0, |made| made.size);
                }
            }
        };
        publish(&self.state, update);
        self.known();
        self.agent.attend(agent, lifecycle == Lifecycle::Running);
        if over {
            tracing::info!(reason, state = lifecycle.as_str_name(), "the machine has ended");
            if reason == "crashed" {
                self.tell_last_lines().await;
            }
            self.end();
        }
    }

    /// Notes that the guest's kernel has crashed, and what is known of that. The first crash counts.
    async fn note_crash(&self) {
        if self.state.borrow().guest_panic.is_some() {
            return;
        }
        let log = self.paths.domain_log(&self.name);
        let panic = tokio::task::spawn_blocking(move || crash::last(&log)).await.unwrap_or_default();
        tracing::warn!(kind = panic.kind, "the guest's kernel has crashed");
        self.publish(|state| state.guest_panic = Some(panic));
    }

    /// Logs how QEMU's own log ends: the pod, and that log with it, is soon gone.
    async fn tell_last_lines(&self) {
        let log = self.paths.domain_log(&self.name);
        for line in tokio::task::spawn_blocking(move || crash::last_lines(&log)).await.unwrap_or_default() {
            tracing::warn!("QEMU's log ends: {line}");
        }
    }

    /// Takes over what the guest agent has told.
    fn learn(&mut self) {
        let told = self.told.borrow_and_update().clone();
        self.publish(|state| {
            state.silences = told.silences;
            if state.guest_agent_connected {
                state.guest = told.guest;
                state.interfaces = told.interfaces;
                state.agent = told.agent;
                state.file_systems = told.file_systems;
            }
        });
    }

    /// The machine is over: what is left is to have it recorded.
    fn end(&mut self) {
        self.stage = Stage::Ended;
        self.stopping = None;
        self.agent.attend(false, false);
        let deadline = if self.terminating { FINISH_DEADLINE_TERMINATING } else { FINISH_DEADLINE };
        let at = Instant::now() + deadline;
        self.finish_at = Some(self.finish_at.map_or(at, |earlier| earlier.min(at)));
        self.publish(|state| {
            state.guest_agent_connected = false;
            state.disk_errors.clear();
            forget_guest(state);
            if state.failure.is_empty() && state.lifecycle() == Lifecycle::NoDomain {
                state.set_lifecycle(Lifecycle::Shutoff);
                state.reason = "destroyed".into();
            }
        });
        self.known();
    }

    fn publish(&self, update: impl FnOnce(&mut MachineState)) {
        publish(&self.state, update);
    }

    /// Tells the queue what requests are to be judged by.
    fn known(&self) {
        self.shared.queue().set_known(self.state.borrow().lifecycle(), self.stage == Stage::Ended);
    }
}

fn publish(sender: &watch::Sender<MachineState>, update: impl FnOnce(&mut MachineState)) {
    sender.send_if_modified(|state| {
        let before = state.clone();
        update(state);
        let changed = *state != before;
        if changed {
            state.sequence += 1;
        }
        changed
    });
}

/// What only a guest agent can tell is not known without one.
fn forget_guest(state: &mut MachineState) {
    state.guest = None;
    state.interfaces.clear();
    state.agent = None;
    state.file_systems.clear();
}

fn listens(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok()
}

/// A guest that was paused has a clock that stood still.
async fn set_guest_time(connection: Connection, name: String) {
    for _ in 0..60 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(now.as_secs()).unwrap_or_default();
        match connection.set_time(&name, seconds, AGENT_DEADLINE).await {
            Ok(()) | Err(Error::NoDomain) => return,
            Err(error) => tracing::debug!(%error, "cannot set the guest's clock"),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
