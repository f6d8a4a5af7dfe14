//! The connection to libvirt's daemon: the only place of this crate that holds unsafe code.
//!
//! libvirt's calls block. [`Connection::run`] carries each one out on a blocking thread and gives it a deadline, so that a
//! wedged daemon never stops the worker. What happens in a domain is announced through [`Signals`]: callbacks only say
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
use crate::stats;

/// Calls that may be under way at once. A call whose deadline passed keeps its thread until libvirt answers; this bounds
/// how many threads a wedged daemon can hold.
const CALLS_AT_ONCE: usize = 6;
/// Time beyond its own limit that libvirt has to say that the guest agent does not answer.
const AGENT_GRACE: Duration = Duration::from_secs(2);
/// What libvirt says before the error that a guest agent answered (`qemuAgentCheckError`).
const AGENT_REFUSED: &str = "unable to execute QEMU agent command";
/// Largest picture taken of a display, in bytes of its uncompressed form (a little above 3840x2160 in 24 bit).
const SCREENSHOT_LIMIT: usize = 32 * 1024 * 1024;

/// What can go wrong between the worker and libvirt.
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
    AgentUnresponsive(String),
    /// The guest agent answered that it does not do it.
    #[error("{0}")]
    AgentRefused(String),
    /// The daemon cannot be reached.
    #[error("no connection to libvirt: {0}")]
    Disconnected(String),
    /// libvirt did not answer in time.
    #[error("libvirt did not answer to {0} in time")]
    Timeout(&'static str),
    /// Too many calls are waiting for libvirt.
    #[error("too many calls to libvirt are under way")]
    Busy,
    /// A text handed to libvirt contains a zero byte.
    #[error("text for libvirt contains a zero byte")]
    ZeroByte,
    /// The picture of the display is larger than what is accepted.
    #[error("the picture of the display is too large")]
    PictureTooLarge,
}

impl From<virt::error::Error> for Error {
    fn from(error: virt::error::Error) -> Self {
        match error.code() {
            ErrorNumber::NoDomain => Self::NoDomain,
            ErrorNumber::AgentUnresponsive | ErrorNumber::AgentUnsynced | ErrorNumber::AgentCommandTimeout => {
                Self::AgentUnresponsive(error.message().to_owned())
            }
            ErrorNumber::AgentCommandFailed => Self::AgentRefused(error.message().to_owned()),
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
    /// Whether the daemon, not the request, is the cause: to be tried again after a reconnect.
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Disconnected(_) | Self::Timeout(_) | Self::Busy)
    }
}

/// What libvirt's callbacks leave for the state driver.
#[derive(Debug, Default)]
pub struct Signals {
    changed: Notify,
    closed: AtomicBool,
    crashed: AtomicBool,
    agent: AtomicU32,
}

impl Signals {
    /// Waits for the next change. A change that happened before the call is not lost.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the guest's kernel has crashed.
    pub fn has_crashed(&self) -> bool {
        self.crashed.load(Ordering::Acquire)
    }

    /// Whether the guest agent is connected; `None` if no event has told so far.
    pub fn agent_connected(&self) -> Option<bool> {
        match self.agent.load(Ordering::Acquire) {
            sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_CONNECTED => Some(true),
            sys::VIR_CONNECT_DOMAIN_EVENT_AGENT_LIFECYCLE_STATE_DISCONNECTED => Some(false),
            _ => None,
        }
    }
}

/// State of a domain as libvirt numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainState {
    /// `virDomainState`.
    pub state: u32,
    /// Reason; its meaning depends on the state.
    pub reason: i32,
}

impl DomainState {
    /// Whether QEMU has stopped the guest because of a disk.
    pub fn is_io_error(self) -> bool {
        self.state == sys::VIR_DOMAIN_PAUSED && i64::from(self.reason) == i64::from(sys::VIR_DOMAIN_PAUSED_IOERROR)
    }
}

/// What a disk has met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskTrouble {
    /// Reading or writing failed.
    InputOutput,
    /// There is no space behind it.
    NoSpace,
}

/// How a guest is asked to reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebootWay {
    /// Through the guest agent.
    GuestAgent,
    /// By the ACPI power button.
    Acpi,
}

/// Facts of a domain that are read in one go.
#[derive(Clone, Debug)]
pub struct DomainFacts {
    /// State and reason.
    pub state: DomainState,
    /// Current balloon size in bytes.
    pub memory: u64,
    /// XML of the domain as it runs; empty if it does not run.
    pub xml: String,
    /// Disks that have met an error, by target, while the guest stands still because of one.
    pub disk_errors: Vec<(String, DiskTrouble)>,
}

/// One connection to the daemon. Dropping it ends it.
#[derive(Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    // Before `connect`: the callbacks go before the connection does.
    _registrations: Registrations,
    connect: Connect,
    signals: Arc<Signals>,
    calls: Arc<Semaphore>,
}

/// Starts libvirt's event loop on its own thread, once in the life of the process.
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
    pub async fn open(uri: String, deadline: Duration) -> Result<Self, Error> {
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

    /// What the callbacks of this connection announce.
    pub fn signals(&self) -> &Arc<Signals> {
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

    /// Makes the daemon read what it needs for a start anyway: the capabilities cache and the processor models, 30 ms of
    /// work. Its answer, QEMU's version, is of no interest.
    ///
    /// # Errors
    /// A failed call.
    pub async fn warm_up(&self, deadline: Duration) -> Result<(), Error> {
        self.run("version", deadline, |connect| Ok(connect.get_hyp_version().map(drop)?)).await
    }

    /// Defines a domain, or changes the definition of one that exists.
    ///
    /// # Errors
    /// libvirt's refusal of the XML, or a failed call.
    pub async fn define(&self, xml: String, deadline: Duration) -> Result<(), Error> {
        if xml.contains('\0') {
            return Err(Error::ZeroByte);
        }
        self.run("define", deadline, move |connect| {
            Domain::define_xml(connect, &xml)?;
            Ok(())
        })
        .await
    }

    /// A domain's definition, with the addresses that libvirt has chosen for its devices.
    ///
    /// # Errors
    /// A failed call.
    pub async fn definition(&self, name: &str, deadline: Duration) -> Result<String, Error> {
        self.with_domain("definition", name, deadline, |domain| Ok(domain.get_xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?))
            .await
    }

    /// Starts a defined domain, paused if asked so.
    ///
    /// # Errors
    /// When QEMU does not start, or the call fails.
    pub async fn create(&self, name: &str, paused: bool, deadline: Duration) -> Result<(), Error> {
        let flags = if paused { sys::VIR_DOMAIN_START_PAUSED } else { sys::VIR_DOMAIN_NONE };
        self.with_domain("create", name, deadline, move |domain| {
            domain.create_with_flags(flags)?;
            Ok(())
        })
        .await
    }

    /// State, memory and XML of a domain.
    ///
    /// # Errors
    /// [`Error::NoDomain`] if there is none, or a failed call.
    pub async fn facts(&self, name: &str, with_xml: bool, deadline: Duration) -> Result<DomainFacts, Error> {
        self.with_domain("state", name, deadline, move |domain| {
            let (state, reason) = domain.get_state()?;
            let active = domain.is_active()?;
            let memory = if active { domain.get_info()?.memory.saturating_mul(1024) } else { 0 };
            let xml = if active && with_xml { domain.get_xml_desc(0)? } else { String::new() };
            let state = DomainState { state, reason };
            let disk_errors = if state.is_io_error() { callbacks::disk_errors(domain) } else { Ok(Vec::new()) };
            // The state counts, whether or not it can be told which disk it comes from.
            let disk_errors = disk_errors.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read the errors of the domain's disks");
                Vec::new()
            });
            Ok(DomainFacts { state, memory, xml, disk_errors })
        })
        .await
    }

    /// Removes a domain's definition.
    ///
    /// # Errors
    /// A failed call; a domain that is not there is fine.
    pub async fn undefine(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        let result = self
            .with_domain("undefine", name, deadline, |domain| {
                domain.undefine_flags(sys::VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)?;
                Ok(())
            })
            .await;
        match result {
            Err(Error::NoDomain) => Ok(()),
            other => other,
        }
    }

    /// Stops the guest's processors.
    ///
    /// # Errors
    /// A failed call.
    pub async fn suspend(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("suspend", name, deadline, |domain| Ok(domain.suspend().map(drop)?)).await
    }

    /// Lets the guest's processors run.
    ///
    /// # Errors
    /// A failed call.
    pub async fn resume(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("resume", name, deadline, |domain| Ok(domain.resume().map(drop)?)).await
    }

    /// Presses the reset button.
    ///
    /// # Errors
    /// A failed call.
    pub async fn reset(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("reset", name, deadline, |domain| Ok(domain.reset().map(drop)?)).await
    }

    /// Asks the guest to reboot.
    ///
    /// # Errors
    /// A failed call; an agent that goes away while it reboots is none.
    pub async fn reboot(&self, name: &str, way: RebootWay, deadline: Duration) -> Result<(), Error> {
        let flags = match way {
            RebootWay::GuestAgent => sys::VIR_DOMAIN_REBOOT_GUEST_AGENT,
            RebootWay::Acpi => sys::VIR_DOMAIN_REBOOT_ACPI_POWER_BTN,
        };
        let result = self.with_domain("reboot", name, deadline, move |domain| Ok(domain.reboot(flags)?)).await;
        match result {
            Err(Error::AgentUnresponsive(_)) => Ok(()),
            other => other,
        }
    }

    /// Asks the guest to power off, in the way that libvirt finds best.
    ///
    /// # Errors
    /// A failed call.
    pub async fn shutdown(&self, name: &str, deadline: Duration) -> Result<(), Error> {
        self.with_domain("shutdown", name, deadline, |domain| {
            domain.shutdown_flags(sys::VIR_DOMAIN_SHUTDOWN_DEFAULT)?;
            Ok(())
        })
        .await
    }

    /// Ends QEMU: by SIGTERM alone if `gently`, else with SIGKILL when that does not help.
    ///
    /// # Errors
    /// A failed call.
    pub async fn destroy(&self, name: &str, gently: bool, deadline: Duration) -> Result<(), Error> {
        let flags = if gently { sys::VIR_DOMAIN_DESTROY_GRACEFUL } else { sys::VIR_DOMAIN_DESTROY_DEFAULT };
        self.with_domain("destroy", name, deadline, move |domain| {
            domain.destroy_flags(flags)?;
            Ok(())
        })
        .await
    }

    /// Grows a disk under its running guest; false if it is that large.
    ///
    /// # Errors
    /// A failed call, among them storage that has no room for it.
    pub async fn grow_disk(&self, name: &str, target: String, size: u64, deadline: Duration) -> Result<bool, Error> {
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

    /// Sets the guest's clock to the host's through the guest agent.
    ///
    /// # Errors
    /// A failed call, among them a guest without agent.
    pub async fn set_time(&self, name: &str, seconds: i64, deadline: Duration) -> Result<(), Error> {
        self.with_domain("set time", name, deadline, move |domain| {
            domain.set_time(seconds, 0, 0)?;
            Ok(())
        })
        .await
    }

    /// Sends a command (JSON) to the guest agent and returns its answer (JSON).
    ///
    /// # Errors
    /// A failed call, among them an agent that does not answer or refuses.
    pub async fn agent_command(&self, name: &str, command: String, deadline: Duration) -> Result<String, Error> {
        if command.contains('\0') {
            return Err(Error::ZeroByte);
        }
        // libvirt gives up first, so that no thread is left behind.
        let seconds = i32::try_from(deadline.as_secs().max(1)).unwrap_or(i32::MAX);
        self.with_domain("guest agent", name, deadline + AGENT_GRACE, move |domain| {
            match domain.qemu_agent_command(&command, seconds, 0) {
                Ok(answer) => Ok(answer),
                // libvirt has one number for what the agent refuses and for its own failures; the text tells.
                Err(error) if error.message().contains(AGENT_REFUSED) => {
                    Err(Error::AgentRefused(error.message().to_owned()))
                }
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// What libvirt counts about a domain that runs.
    ///
    /// # Errors
    /// A failed call.
    pub async fn stats(&self, name: &str, deadline: Duration) -> Result<StatsReply, Error> {
        self.with_domain("stats", name, deadline, |domain| {
            let parameters = callbacks::domain_stats(domain)?;
            Ok(stats::stats(&parameters, &domain.get_xml_desc(0)?))
        })
        .await
    }

    /// A picture of the first display in the format QEMU gives: its type and its bytes.
    ///
    /// # Errors
    /// A failed call or a picture above the limit.
    pub async fn screenshot(&self, name: &str, deadline: Duration) -> Result<(String, Vec<u8>), Error> {
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

    /// libvirt's description of the host (`virConnectGetCapabilities`).
    ///
    /// # Errors
    /// A failed call.
    pub async fn host_capabilities(&self, deadline: Duration) -> Result<String, Error> {
        self.run("capabilities", deadline, |connect| Ok(connect.get_capabilities()?)).await
    }

    /// libvirt's description of the domains the host can run (`virConnectGetDomainCapabilities`).
    ///
    /// # Errors
    /// A failed call.
    pub async fn domain_capabilities(
        &self,
        machine: String,
        virtualization: String,
        deadline: Duration,
    ) -> Result<String, Error> {
        self.run("domain capabilities", deadline, move |connect| {
            callbacks::domain_capabilities(connect, &machine, &virtualization)
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
