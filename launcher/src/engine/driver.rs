//! The state driver: the task that owns the domain.

use std::{path::Path, sync::Arc, time::Duration};

use protocol::{AccessCredentials, Lifecycle, MachineState};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use super::{
    ConnectionHandle, EngineHandle, GuestAgentChannel, RequestError, Shared, crash,
    queue::{Action, Request, RequestQueue},
    start::{Start, gives_up, kvm_usable, pauses_probes},
    state::{active_domain, errors_by_volume, lifecycle, waits_for_disk},
};
use crate::{
    domain::{AllocatedDevices, domain_name},
    guest_agent::{GuestAgent, GuestFacts, credentials},
    hypervisor::daemon::{self, Daemon, DaemonProgram},
    hypervisor::libvirt::{Connection, Error, RebootWay},
    options::VmiArgs,
    paths::Paths,
    streaming::console::Console,
};

/// Time limit of a plain call to libvirt.
pub(super) const CALL_DEADLINE: Duration = Duration::from_secs(20);
/// Time limit of QEMU's start.
const CREATE_DEADLINE: Duration = Duration::from_secs(120);
/// Time limit of a start's wait for libvirt's daemon.
const DAEMON_DEADLINE: Duration = Duration::from_secs(60);
/// Pause between attempts to connect to the daemon.
const CONNECT_RETRY: Duration = Duration::from_millis(15);
/// Interval of shutdown requests to the guest.
const SHUTDOWN_REPEAT: Duration = Duration::from_secs(5);
/// Time that virt-handler has to record the final state.
const FINISH_DEADLINE: Duration = Duration::from_secs(300);
/// The same while the pod terminates.
const FINISH_DEADLINE_TERMINATING: Duration = Duration::from_secs(10);
/// Time limit of a guest agent command.
const GUEST_AGENT_DEADLINE: Duration = Duration::from_secs(10);
/// Longest interval between reads of the domain's state: an event may be missed while libvirt's daemon restarts.
const REFRESH: Duration = Duration::from_secs(30);

/// Final result of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The domain ended as intended: the guest powered off, or the domain was stopped on request.
    pub(crate) success: bool,
    /// Reason, for the pod's termination message.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No domain has run in this pod.
    Waiting,
    /// The domain runs or is paused.
    Live,
    /// The domain has ended or failed to start for good.
    Ended,
}

struct Stopping {
    force_at: Instant,
    signal_at: Instant,
}

/// The state driver.
pub(crate) struct Driver {
    shared: Arc<Shared>,
    state: watch::Sender<MachineState>,
    connections: watch::Sender<Option<ConnectionHandle>>,
    consoles: watch::Sender<Option<Console>>,
    paths: Paths,
    args: VmiArgs,
    name: String,
    program: Option<DaemonProgram>,
    daemon: Option<Daemon>,
    /// The capabilities cache is written, by Hello or by a former worker. Without it libvirt's first call would spend
    /// seconds on probing QEMU.
    cache_written: bool,
    connection: Option<Connection>,
    allow_emulation: bool,
    stage: Stage,
    stopping: Option<Stopping>,
    terminating: bool,
    finish_at: Option<Instant>,
    finished: bool,
    refresh_at: Instant,
    retry_at: Instant,
    guest_agent: GuestAgent,
    guest_facts: watch::Receiver<GuestFacts>,
    dhcp: Vec<JoinHandle<()>>,
    /// Task that puts SSH keys and passwords into the guest, if the VMI has any.
    credentials: Option<JoinHandle<()>>,
    credentials_report: watch::Receiver<Option<AccessCredentials>>,
    /// Task that sets the guest's clock after a pause.
    clock: Option<JoinHandle<()>>,
    disk_sizes: Vec<protocol::DiskTarget>,
    acpi: bool,
    /// Host devices allocated to the pod.
    host_devices: AllocatedDevices,
    /// A former worker ran in this pod, and this one has started no domain so far.
    adopting: bool,
    /// Time of the first failed start.
    failing_since: Option<Instant>,
}

impl Driver {
    /// Creates a driver and its handle.
    pub(crate) fn new(args: VmiArgs, paths: Paths) -> (Self, EngineHandle) {
        let shared = Arc::new(Shared { queue: RequestQueue::default().into(), pushed: Notify::new() });
        let initial = MachineState { sequence: 1, lifecycle: Lifecycle::NoDomain.into(), ..MachineState::default() };
        let (state, state_receiver) = watch::channel(initial);
        let (connections, connection) = watch::channel(None);
        let (consoles, console) = watch::channel(None);
        let name = domain_name(&args.namespace, &args.name);
        let channel = GuestAgentChannel { connection: connection.clone(), domain: name.clone() };
        let guest_agent = GuestAgent::new(channel, paths.thaw_at(&args.uid));
        let handle = EngineHandle {
            shared: shared.clone(),
            state: state_receiver,
            connection,
            console,
            guest_agent: guest_agent.clone(),
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
            cache_written: false,
            connection: None,
            stage: Stage::Waiting,
            stopping: None,
            terminating: false,
            finish_at: None,
            finished: false,
            refresh_at: now,
            retry_at: now,
            guest_facts: guest_agent.facts(),
            guest_agent,
            dhcp: Vec::new(),
            credentials: None,
            credentials_report: watch::channel(None).1,
            clock: None,
            disk_sizes: Vec::new(),
            acpi: false,
            host_devices: AllocatedDevices::new(std::env::vars_os()),
            adopting: false,
            failing_since: None,
        };
        (driver, handle)
    }

    /// Runs until the domain has ended and virt-handler has recorded the end.
    pub(crate) async fn run(mut self) -> Outcome {
        if self.args.simulate_crash {
            // Report it to virt-handler first: in a pod that is kept after a failure nothing else shows it.
            self.publish(|state| state.failure = "simulated failure".to_owned());
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

    /// Starts the daemon ahead of Hello, unless virt-handler must first open /dev/kvm, which the daemon checks when it
    /// starts, or raise the limit of locked memory for VFIO devices, which the daemon and QEMU inherit. A restarted
    /// worker takes over the running daemon; the directory that each start creates first shows that a domain may run.
    fn bring_up_daemon(&mut self) {
        self.adopting = self.paths.domain(&self.args.uid).exists();
        if self.adopting {
            tracing::info!("a former worker started a domain, adopting it");
        } else if self.host_devices.has_pci() || (self.paths.dev.join("kvm").exists() && !kvm_usable(&self.paths.dev)) {
            return;
        }
        match self.start_daemon() {
            Ok(()) => self.cache_written = self.adopting,
            // Hello retries, and its response holds the reason.
            Err(error) => tracing::warn!(%error, "cannot start libvirt's daemon yet"),
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

    /// Waits for the next event or request and handles it.
    async fn step(&mut self) {
        let request = self.shared.queue().pop();
        if let Some(request) = request {
            self.handle(request).await;
            return;
        }
        let never = Instant::now() + Duration::from_secs(24 * 3600);
        let connecting = self.cache_written && self.connection.is_none() && self.stage != Stage::Ended;
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
            () = sleep_until(signal_at) => self.continue_shutdown().await,
            Ok(()) = self.guest_facts.changed() => self.publish_guest_facts(),
            Ok(()) = self.credentials_report.changed() => {
                let report = self.credentials_report.borrow_and_update().clone();
                self.publish(|state| state.access_credentials = report);
            }
            () = sleep_until(self.finish_at.unwrap_or(never)) => {
                tracing::warn!("virt-handler did not record the domain's end in time");
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
                    unsupported: *unsupported,
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
        let failed = |error: daemon::DaemonError| RequestError::Start { message: error.to_string(), permanent: false };
        self.allow_emulation |= allow_emulation;
        if !self.cache_written {
            daemon::write_cache(&self.paths, cache).map_err(failed)?;
        }
        self.start_daemon().map_err(failed)?;
        self.cache_written = true;
        Ok(())
    }

    /// Tries once to connect to the daemon.
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
                    // In parallel to virt-handler's network setup. A Sync that arrives earlier loses nothing.
                    tokio::spawn(async move {
                        if let Err(error) = connection.warm_up(CALL_DEADLINE).await {
                            tracing::debug!(%error, "cannot warm up libvirt");
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
        tracing::warn!("lost the connection to libvirt");
        self.connection = None;
        let _ = self.connections.send_replace(None);
        self.retry_at = Instant::now();
    }

    /// Starts the domain unless it runs. Returns true if it was started.
    async fn sync(&mut self, start: Start) -> Result<bool, RequestError> {
        if self.stage == Stage::Ended {
            return Err(RequestError::Ended);
        }
        let vmi = &start.vmi.metadata;
        if vmi.name.as_deref() != Some(&self.args.name)
            || vmi.namespace.as_deref() != Some(&self.args.namespace)
            || vmi.uid.as_deref() != Some(&self.args.uid)
        {
            return Err(RequestError::OtherVmi(self.name.clone()));
        }
        // A domain that may be running is adopted and served first.
        let supported = if self.may_run() { Ok(()) } else { start.check_supported() };
        let result = match supported {
            Ok(()) if !self.cache_written => return Err(RequestError::NoHello),
            Ok(()) => self.start(&start).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &result {
            tracing::error!(%error, "the domain cannot be brought in line with the VMI");
            // Other failures are retried by virt-handler for a limited time. A running guest is never stopped by a
            // failed Sync.
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
            // Prepare disks while the daemon starts.
            tracing::debug!("waiting for libvirt while the disks are prepared");
        }
        let known_live = self.stage == Stage::Live;
        let domain = if known_live { None } else { Some(start.domain().await?) };
        let deadline = Instant::now() + DAEMON_DEADLINE;
        while self.connection.is_none() {
            if self.shared.queue().has_end_request() {
                return Err(RequestError::Ending);
            }
            if Instant::now() > deadline {
                return Err(Error::Disconnected("libvirt's daemon did not start in time".into()).into());
            }
            sleep_until(self.retry_at).await;
            self.connect().await;
        }
        if self.dhcp.is_empty() {
            self.dhcp = start.serve_dhcp()?;
        }
        self.open_console(start);
        self.follow_credentials(start);
        self.guest_agent.pause_probes(pauses_probes(&start.vmi));
        // Connecting may have found a former worker's domain.
        if self.stage == Stage::Live {
            // First: the guest may be waiting for the space.
            self.grow(start).await?;
            self.resume_after_disk_error().await?;
            start.check_spec_supported()?;
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
        if start.has_tagged_interfaces() {
            self.write_interface_tags(start, &connection).await?;
        }
        if self.shared.queue().has_end_request() {
            return Err(RequestError::Ending);
        }
        if let Err(error) = connection.create(&self.name, domain.start_paused, CREATE_DEADLINE).await {
            // Keep the definition: the next attempt replaces it.
            return Err(error.into());
        }
        self.stage = Stage::Live;
        self.refresh().await;
        tracing::info!("the domain is running");
        Ok(true)
    }

    /// Writes the tags of interfaces, with the addresses libvirt assigned, to the cloud-init image.
    async fn write_interface_tags(&mut self, start: &Start, connection: &Connection) -> Result<(), RequestError> {
        let definition = connection.definition(&self.name, CALL_DEADLINE).await?;
        if let Some((volume, size)) = start.write_interface_tags(definition).await? {
            let made = self.disk_sizes.iter_mut().filter(|disk| disk.volume == volume);
            made.for_each(|disk| disk.size = size);
        }
        Ok(())
    }

    /// Grows the guest's disks to their claims.
    async fn grow(&self, start: &Start) -> Result<(), RequestError> {
        let Some(connection) = self.connection.clone().filter(|_| self.stopping.is_none()) else { return Ok(()) };
        for (volume, size) in start.claim_sizes().await {
            let target =
                self.state.borrow().disks.iter().find(|disk| disk.volume == volume).map(|disk| disk.target.clone());
            let Some(target) = target else { continue };
            match connection.grow_disk(&self.name, target, size, CALL_DEADLINE).await {
                Ok(true) => tracing::info!(volume, size, "resized the disk to its claim"),
                Ok(false) => {}
                Err(error) if error.is_transient() => return Err(error.into()),
                // The guest still has its disk.
                Err(error) => tracing::warn!(volume, size, %error, "cannot resize the disk to its claim"),
            }
        }
        Ok(())
    }

    /// Resumes a guest that is stopped by a disk error. It stops again if the cause persists.
    async fn resume_after_disk_error(&mut self) -> Result<(), RequestError> {
        let stuck = {
            let state = self.state.borrow();
            waits_for_disk(state.lifecycle(), &state.reason) && self.stopping.is_none()
        };
        let Some(connection) = self.connection.clone().filter(|_| stuck) else { return Ok(()) };
        tracing::info!("resuming the guest after a disk error");
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
        let (report, receiver) = watch::channel(None);
        self.credentials_report = receiver;
        self.credentials = Some(tokio::spawn(credentials::follow(self.guest_agent.clone(), sources, report)));
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
                        // No domain ran, so virt-handler has nothing to record.
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
                // One at a time: each holds one of the few calls to libvirt until the guest agent answers.
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
        self.continue_shutdown().await;
    }

    /// Requests the shutdown again, or destroys the domain when the grace period is over.
    async fn continue_shutdown(&mut self) {
        let now = Instant::now();
        let Some(stopping) = &mut self.stopping else { return };
        if now >= stopping.force_at {
            tracing::warn!("the grace period is over, destroying the domain");
            stopping.force_at = now + SHUTDOWN_REPEAT;
            stopping.signal_at = stopping.force_at;
            if let Err(error) = self.kill().await {
                tracing::error!(%error, "cannot destroy the domain");
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
                Err(error) => tracing::warn!(%error, "cannot request a shutdown of the guest"),
            }
        }
    }

    async fn kill(&mut self) -> Result<(), RequestError> {
        let connection = self.connection.clone().ok_or_else(|| Error::Disconnected("reconnecting".into()))?;
        let mut result = connection.destroy(&self.name, true, CALL_DEADLINE).await;
        if let Err(error) = &result {
            tracing::warn!(%error, "QEMU does not end after SIGTERM");
            result = connection.destroy(&self.name, false, CALL_DEADLINE).await;
        }
        self.refresh().await;
        match result {
            Ok(()) | Err(Error::NoDomain) => Ok(()),
            Err(_) if self.stage == Stage::Ended => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads and publishes the domain's state.
    async fn refresh(&mut self) {
        self.refresh_at = Instant::now() + REFRESH;
        let Some(connection) = self.connection.clone() else { return };
        if connection.signals().is_closed() {
            self.disconnect();
            return;
        }
        // First: virt-handler may disconnect once the domain has ended.
        if connection.signals().has_crashed() {
            self.record_crash().await;
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
            // A domain that does not run was defined by a start that may have failed. Only an adopting worker has
            // missed the end of a domain that ran.
            if over && (!self.adopting || matches!(reason, "unknown" | "failed")) {
                return;
            }
            self.stage = Stage::Live;
        }
        let active = active_domain(&facts.xml);
        let connected = !over && connection.signals().guest_agent_connected().unwrap_or(active.guest_agent_connected);
        let sizes = &self.disk_sizes;
        let acpi = self.acpi || active.acpi;
        let update = |state: &mut MachineState| {
            state.set_lifecycle(lifecycle);
            state.reason = reason.into();
            state.guest_agent_connected = connected;
            if !connected {
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
        self.update_queue();
        self.guest_agent.attend(connected, lifecycle == Lifecycle::Running);
        if over {
            tracing::info!(reason, state = lifecycle.as_str_name(), "the domain has ended");
            if reason == "crashed" {
                self.log_last_lines().await;
            }
            self.end();
        }
    }

    /// Publishes the guest's first kernel crash.
    async fn record_crash(&self) {
        if self.state.borrow().guest_panic.is_some() {
            return;
        }
        let log = self.paths.domain_log(&self.name);
        let panic = tokio::task::spawn_blocking(move || crash::last(&log)).await.unwrap_or_default();
        tracing::warn!(kind = panic.kind, "the guest's kernel has crashed");
        self.publish(|state| state.guest_panic = Some(panic));
    }

    /// Logs the end of QEMU's log, since the pod and that log are deleted soon.
    async fn log_last_lines(&self) {
        let log = self.paths.domain_log(&self.name);
        for line in tokio::task::spawn_blocking(move || crash::last_lines(&log)).await.unwrap_or_default() {
            tracing::warn!("QEMU's log ends: {line}");
        }
    }

    /// Publishes the guest agent's facts.
    fn publish_guest_facts(&mut self) {
        let facts = self.guest_facts.borrow_and_update().clone();
        self.publish(|state| {
            state.silences = facts.silences;
            if state.guest_agent_connected {
                state.guest = facts.guest;
                state.interfaces = facts.interfaces;
                state.agent = facts.agent;
                state.file_systems = facts.file_systems;
            }
        });
    }

    /// Enters the final stage: virt-handler records the end.
    fn end(&mut self) {
        self.stage = Stage::Ended;
        self.stopping = None;
        self.guest_agent.attend(false, false);
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
        self.update_queue();
    }

    fn publish(&self, update: impl FnOnce(&mut MachineState)) {
        publish(&self.state, update);
    }

    /// Passes the state that requests are checked against to the queue.
    fn update_queue(&self) {
        self.shared.queue().set_domain_state(self.state.borrow().lifecycle(), self.stage == Stage::Ended);
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

/// Clears the facts of a guest agent that is disconnected.
fn forget_guest(state: &mut MachineState) {
    state.guest = None;
    state.interfaces.clear();
    state.agent = None;
    state.file_systems.clear();
}

fn listens(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok()
}

/// Sets the guest's clock, which stood still during a pause.
async fn set_guest_time(connection: Connection, name: String) {
    for _ in 0..60 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(now.as_secs()).unwrap_or_default();
        match connection.set_time(&name, seconds, GUEST_AGENT_DEADLINE).await {
            Ok(()) | Err(Error::NoDomain) => return,
            Err(error) => tracing::debug!(%error, "cannot set the guest's clock"),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
