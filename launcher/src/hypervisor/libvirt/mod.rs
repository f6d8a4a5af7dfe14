//! The connection to libvirt's daemon: the only place of this crate that holds unsafe code.
//!
//! libvirt's calls block. [`Connection::run`] runs each on a blocking thread with a deadline, so that a blocked daemon
//! never stops the worker. Events arrive through [`Signals`]: callbacks only record *that* something changed, and the
//! state driver reads *what* from libvirt, so no event is lost in a full queue.
//! *that* something changed, and the state driver reads *what* from libvirt, so no event can be lost by a full queue.

mod callbacks;

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use protocol::StatsReply;
use thiserror::Error;
use tokio::sync::{Notify, Semaphore};
use virt::{connect::Connect, domain::Domain, error::ErrorNumber, stream::Stream, sys};

use self::callbacks::Registrations;
use crate::hypervisor::stats;

/// Limit of concurrent calls. A call past its deadline keeps its thread until libvirt answers; this bounds the threads
/// of a blocked daemon.
const CALLS_AT_ONCE: usize = 6;
/// Time beyond its own limit that libvirt has to report a guest agent without answer.
const AGENT_GRACE: Duration = Duration::from_secs(2);
/// Prefix of libvirt's message for an error of the guest agent (`qemuAgentCheckError`).
const GUEST_AGENT_REFUSED: &str = "unable to execute QEMU agent command";
/// Limit of a screenshot, in bytes of its uncompressed form (a little above 3840x2160 in 24 bit).
const SCREENSHOT_LIMIT: usize = 32 * 1024 * 1024;

/// Failure of a call to libvirt.
#[derive(Debug, Error)]
pub enum Error {
    /// libvirt reported an error.
    #[error("{message}")]
    Libvirt {
        /// libvirt's error number.
        code: u32,
        /// libvirt's text.
        message: String,
    },
    /// The domain does not exist.
    #[error("Domain not found.")]
    NoDomain,
    /// The guest agent does not answer.
    #[error("the guest agent does not answer: {0}")]
    GuestAgentUnresponsive(String),
    /// The guest agent returned an error.
    #[error("{0}")]
    GuestAgentRefused(String),
    /// The daemon cannot be reached.
    #[error("no connection to libvirt: {0}")]
    Disconnected(String),
    /// libvirt did not answer in time.
    #[error("libvirt did not answer to {0} in time")]
    Timeout(&'static str),
    /// Too many calls are waiting for libvirt.
    #[error("too many concurrent calls to libvirt")]
    Busy,
    /// A string for libvirt contains a zero byte.
    #[error("string for libvirt contains a zero byte")]
    ZeroByte,
    /// The screenshot exceeds the limit.
    #[error("the screenshot is too large")]
    PictureTooLarge,
}

impl From<virt::error::Error> for Error {
    fn from(error: virt::error::Error) -> Self {
        match error.code() {
            ErrorNumber::NoDomain => Self::NoDomain,
            ErrorNumber::AgentUnresponsive | ErrorNumber::AgentUnsynced | ErrorNumber::AgentCommandTimeout => {
                Self::GuestAgentUnresponsive(error.message().to_owned())
            }
            ErrorNumber::AgentCommandFailed => Self::GuestAgentRefused(error.message().to_owned()),
            ErrorNumber::NoConnect | ErrorNumber::InvalidConn | ErrorNumber::Rpc => {
                Self::Disconnected(error.message().to_owned())
            }
            ErrorNumber::SystemError if error.message().contains("socket") => {
                Self::Disconnected(error.message().to_owned())
            }
            _ => Self::Libvirt { code: callbacks::last_code(), message: error.message().to_owned() },
        }
    }
}

impl Error {
    /// Reports a failure of the daemon, not of the request: retry after a reconnect.
    pub(crate) const fn is_transient(&self) -> bool {
        matches!(self, Self::Disconnected(_) | Self::Timeout(_) | Self::Busy)
    }
}

/// Signals from libvirt's callbacks to the state driver.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    changed: Notify,
    closed: AtomicBool,
    crashed: AtomicBool,
    guest_agent: AtomicU32,
}

impl Signals {
    /// Waits for the next change. A change that happened before the call is not lost.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Reports the end of the connection.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Reports a crash of the guest's kernel.
    pub(crate) fn has_crashed(&self) -> bool {
        self.crashed.load(Ordering::Acquire)
    }

    /// State of the guest agent's connection; `None` before the first event.
    pub(crate) fn guest_agent_connected(&self) -> Option<bool> {
        match self.guest_agent.load(Ordering::Acquire) {
            sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_CONNECTED => Some(true),
            sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_DISCONNECTED => Some(false),
            _ => None,
        }
    }
}

/// State of a domain in libvirt's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DomainState {
    /// `virDomainState`.
    pub(crate) state: u32,
    /// Reason; its meaning depends on the state.
    pub(crate) reason: i32,
}

impl DomainState {
    /// Reports a guest stopped by a disk error.
    pub(crate) fn is_io_error(self) -> bool {
        self.state == sys::VIR_DOMAIN_PAUSED && i64::from(self.reason) == i64::from(sys::VIR_DOMAIN_PAUSED_IOERROR)
    }
}

/// Error of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskFailure {
    /// Reading or writing failed.
    InputOutput,
    /// Its storage is full.
    NoSpace,
}

/// Method of a guest's reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RebootWay {
    /// Through the guest agent.
    GuestAgent,
    /// By the ACPI power button.
    Acpi,
}

/// Facts of a domain, read in one call.
#[derive(Clone, Debug)]
pub(crate) struct DomainFacts {
    /// State and reason.
    pub(crate) state: DomainState,
    /// Current balloon size in bytes.
    pub(crate) memory: u64,
    /// Active domain XML; empty if the domain does not run.
    pub(crate) xml: String,
    /// Disks with an error, by target, while the guest is stopped by one.
    pub(crate) disk_errors: Vec<(String, DiskFailure)>,
}

/// A connection to the daemon. Dropping it closes it.
#[derive(Clone)]
pub(crate) struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    // Before `connect`: callbacks are removed before the connection closes.
    _registrations: Registrations,
    connect: Connect,
    signals: Arc<Signals>,
    calls: Arc<Semaphore>,
}

/// Starts libvirt's event loop on its own thread, once per process.
static EVENT_LOOP: LazyLock<Result<(), String>> = LazyLock::new(|| {
    virt::error::clear_error_callback();
    virt::event::event_register_default_impl().map_err(|e| e.to_string())?;
    std::thread::Builder::new()
        .name("libvirt-events".into())
        .stack_size(256 * 1024)
        .spawn(|| {
            loop {
                if let Err(error) = virt::event::event_run_default_impl() {
                    tracing::warn!(%error, "libvirt's event loop failed");
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        })
        .map_err(|e| e.to_string())?;
    Ok(())
});

impl Connection {
    /// Connects to the daemon behind `uri` and registers for its events.
    ///
    /// # Errors
    /// When the daemon cannot be reached within `deadline`.
    pub(crate) async fn open(uri: String, deadline: Duration) -> Result<Self, Error> {
        blocking("open", deadline, move || {
            EVENT_LOOP.clone().map_err(Error::Disconnected)?;
            if uri.contains('\0') {
                return Err(Error::ZeroByte);
            }
            let connect = Connect::open(Some(&uri)).map_err(|e| Error::Disconnected(e.message().to_owned()))?;
            let signals = Arc::new(Signals::default());
            let registrations = Registrations::new(&connect, &signals)?;
            Ok(Self {
                inner: Arc::new(Inner {
                    _registrations: registrations,
                    connect,
                    signals,
                    calls: Arc::new(Semaphore::new(CALLS_AT_ONCE)),
                }),
            })
        })
        .await
    }

    /// Returns the signals of this connection's callbacks.
    pub(crate) fn signals(&self) -> &Arc<Signals> {
        &self.inner.signals
    }

    /// Runs `call` on a blocking thread, for at most `deadline`.
    async fn run<T, F>(&self, what: &'static str, deadline: Duration, call: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, Error> + Send + 'static,
    {
        if self.inner.signals.is_closed() {
            return Err(Error::Disconnected("connection closed".into()));
        }
        let permit = self.inner.calls.clone().try_acquire_owned().map_err(|_| Error::Busy)?;
        let inner = self.inner.clone();
        blocking(what, deadline, move || {
            let result = call(&inner.connect);
            drop(permit);
            result
        })
        .await
    }

    async fn with_domain<T, F>(&self, what: &'static str, name: &str, deadline: Duration, call: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Domain) -> Result<T, Error> + Send + 'static,
    {
        if name.contains('\0') {
            return Err(Error::ZeroByte);
        }
        let name = name.to_owned();
        self.run(what, deadline, move |connect| call(&Domain::lookup_by_name(connect, &name)?)).await
    }

    /// Makes the daemon read the capabilities cache and the CPU models ahead of a start (30 ms). The answer, QEMU's
    /// version, is discarded.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn warm_up(&self, deadline: Duration) -> Result<(), Error> {
        self.run("version", deadline, |connect| Ok(connect.get_hyp_version().map(drop)?)).await
    }

    /// Defines a domain or replaces its definition.
    ///
    /// # Errors
    /// libvirt's refusal of the XML, or a failed call.
    pub(crate) async fn define(&self, xml: String, deadline: Duration) -> Result<(), Error> {
        if xml.contains('\0') {
            return Err(Error::ZeroByte);
        }
        self.run("define", deadline, move |connect| {
            Domain::define_xml(connect, &xml)?;
            Ok(())
        })
        .await
    }

    /// Returns a domain's XML, with the addresses that libvirt assigned to its devices.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn definition(&self, name: &str, deadline: Duration) -> Result<String, Error> {
        self.with_domain("definition", name, deadline, |domain| Ok(domain.get_xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?))
            .await
    }

    /// Starts a defined domain, paused if requested.
    ///
    /// # Errors
    /// When QEMU does not start, or the call fails.
    pub(crate) async fn create(&self, name: &str, paused: bool, deadline: Duration) -> Result<(), Error> {
        let flags = if paused { sys::VIR_DOMAIN_START_PAUSED } else { sys::VIR_DOMAIN_NONE };
        self.with_domain("create", name, deadline, move |domain| {
            domain.create_with_flags(flags)?;
            Ok(())
        })
        .await
    }

    /// Returns state, memory and XML of a domain.
    ///
    /// # Errors
    /// [`Error::NoDomain`] if there is none, or a failed call.
    pub(crate) async fn facts(&self, name: &str, with_xml: bool, deadline: Duration) -> Result<DomainFacts, Error> {
        self.with_domain("state", name, deadline, move |domain| {
            let (state, reason) = domain.get_state()?;
            let active = domain.is_active()?;
            let memory = if active { domain.get_info()?.memory.saturating_mul(1024) } else { 0 };
            let xml = if active && with_xml { domain.get_xml_desc(0)? } else { String::new() };
            let state = DomainState { state, reason };
            let disk_errors = if state.is_io_error() { callbacks::disk_errors(domain) } else { Ok(Vec::new()) };
            // The state is valid even if the failing disk is unknown.
            let disk_errors = disk_errors.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read the errors of the domain's disks");
                Vec::new()
            });
            Ok(DomainFacts { state, memory, xml, disk_errors })
        })
        .await
    }

    /// Pauses the guest's CPUs.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn suspend(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("suspend", name, deadline, |domain| Ok(domain.suspend().map(drop)?)).await
    }

    /// Resumes the guest's CPUs.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn resume(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("resume", name, deadline, |domain| Ok(domain.resume().map(drop)?)).await
    }

    /// Presses the reset button.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn reset(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("reset", name, deadline, |domain| Ok(domain.reset().map(drop)?)).await
    }

    /// Asks the guest to reboot.
    ///
    /// # Errors
    /// A failed call; a guest agent that disconnects during the reboot is no error.
    pub(crate) async fn reboot(&self, name: &str, way: RebootWay, deadline: Duration) -> Result<(), Error> {
        let flags = match way {
            RebootWay::GuestAgent => sys::VIR_DOMAIN_REBOOT_GUEST_AGENT,
            RebootWay::Acpi => sys::VIR_DOMAIN_REBOOT_ACPI_POWER_BTN,
        };
        let result = self.with_domain("reboot", name, deadline, move |domain| Ok(domain.reboot(flags)?)).await;
        match result {
            Err(Error::GuestAgentUnresponsive(_)) => Ok(()),
            other => other,
        }
    }

    /// Requests a shutdown of the guest, by the method that libvirt prefers.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn shutdown(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("shutdown", name, deadline, |domain| {
            domain.shutdown_flags(sys::VIR_DOMAIN_SHUTDOWN_DEFAULT)?;
            Ok(())
        })
        .await
    }

    /// Ends QEMU: with SIGTERM only if `gently`, else followed by SIGKILL.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn destroy(&self, name: &str, gently: bool, deadline: Duration) -> Result<(), Error> {
        let flags = if gently { sys::VIR_DOMAIN_DESTROY_GRACEFUL } else { sys::VIR_DOMAIN_DESTROY_DEFAULT };
        self.with_domain("destroy", name, deadline, move |domain| {
            domain.destroy_flags(flags)?;
            Ok(())
        })
        .await
    }

    /// Resizes a disk of a running guest. Returns false if it already has the size.
    ///
    /// # Errors
    /// A failed call, such as storage without room.
    pub(crate) async fn grow_disk(
        &self,
        name: &str,
        target: String,
        size: u64,
        deadline: Duration,
    ) -> Result<bool, Error> {
        if target.contains('\0') {
            return Err(Error::ZeroByte);
        }
        self.with_domain("grow a disk", name, deadline, move |domain| {
            if domain.get_block_info(&target, 0)?.capacity >= size {
                return Ok(false);
            }
            domain.block_resize(&target, size, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)?;
            Ok(true)
        })
        .await
    }

    /// Sets the guest's clock to the host's time through the guest agent.
    ///
    /// # Errors
    /// A failed call, such as a guest without guest agent.
    pub(crate) async fn set_time(&self, name: &str, seconds: i64, deadline: Duration) -> Result<(), Error> {
        self.with_domain("set time", name, deadline, move |domain| {
            domain.set_time(seconds, 0, 0)?;
            Ok(())
        })
        .await
    }

    /// Sends a command (JSON) to the guest agent and returns its answer (JSON).
    ///
    /// # Errors
    /// A failed call, such as a guest agent that does not answer or returns an error.
    pub(crate) async fn guest_agent_command(
        &self,
        name: &str,
        command: String,
        deadline: Duration,
    ) -> Result<String, Error> {
        if command.contains('\0') {
            return Err(Error::ZeroByte);
        }
        // libvirt's own limit ends first, so that no thread stays behind.
        let seconds = i32::try_from(deadline.as_secs().max(1)).unwrap_or(i32::MAX);
        self.with_domain("guest agent", name, deadline + AGENT_GRACE, move |domain| {
            match domain.qemu_agent_command(&command, seconds, 0) {
                Ok(answer) => Ok(answer),
                // libvirt uses one error number for errors of the guest agent and its own failures; only the message
                // differs.
                Err(error) if error.message().contains(GUEST_AGENT_REFUSED) => {
                    Err(Error::GuestAgentRefused(error.message().to_owned()))
                }
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Returns libvirt's statistics of a running domain.
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn stats(&self, name: &str, deadline: Duration) -> Result<StatsReply, Error> {
        self.with_domain("stats", name, deadline, |domain| {
            let parameters = callbacks::domain_stats(domain)?;
            Ok(stats::stats(&parameters, &domain.get_xml_desc(0)?))
        })
        .await
    }

    /// Takes a screenshot of the first display in QEMU's format: MIME type and bytes.
    ///
    /// # Errors
    /// A failed call or a screenshot above the limit.
    pub(crate) async fn screenshot(&self, name: &str, deadline: Duration) -> Result<(String, Vec<u8>), Error> {
        let name = name.to_owned();
        self.run("screenshot", deadline, move |connect| {
            let domain = Domain::lookup_by_name(connect, &name)?;
            let stream = Stream::new(connect, 0)?;
            let kind = domain.screenshot(&stream, 0, 0)?;
            let mut picture = Vec::new();
            let mut buffer = vec![0; 64 * 1024];
            loop {
                match stream.recv(&mut buffer)? {
                    0 => break,
                    n if picture.len() + n > SCREENSHOT_LIMIT => {
                        stream.abort()?;
                        return Err(Error::PictureTooLarge);
                    }
                    n => picture.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                }
            }
            stream.finish()?;
            Ok((kind, picture))
        })
        .await
    }

    /// Returns libvirt's description of the host (`virConnectGetCapabilities`).
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn host_capabilities(&self, deadline: Duration) -> Result<String, Error> {
        self.run("capabilities", deadline, |connect| Ok(connect.get_capabilities()?)).await
    }

    /// Returns libvirt's description of the domains the host can run (`virConnectGetDomainCapabilities`).
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn domain_capabilities(
        &self,
        machine_type: String,
        virtualization: String,
        deadline: Duration,
    ) -> Result<String, Error> {
        self.run("domain capabilities", deadline, move |connect| {
            callbacks::domain_capabilities(connect, &machine_type, &virtualization)
        })
        .await
    }
}

async fn blocking<T, F>(what: &'static str, deadline: Duration, call: F) -> Result<T, Error>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, Error> + Send + 'static,
{
    match tokio::time::timeout(deadline, tokio::task::spawn_blocking(call)).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(Error::Timeout(what)),
        Err(_) => Err(Error::Timeout(what)),
    }
}
