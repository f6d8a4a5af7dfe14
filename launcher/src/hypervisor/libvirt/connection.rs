//! The connection to libvirt's daemon. Its calls block: [`Connection::run`] runs each on a blocking thread with a time limit,
//! so that a blocked daemon never stops the worker.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::sync::Semaphore;
use virt::{connect::Connect, domain::Domain};

use super::callbacks::{self, Registrations};
use crate::hypervisor::{HypervisorError, Signals};

/// Limit of concurrent calls. A call past its deadline keeps its thread until libvirt answers; this bounds the threads
/// of a blocked daemon.
const CALLS_AT_ONCE: usize = 6;
/// The same for calls that end the domain. A guest agent that never answers must not hold them back: it can block the others
/// for as long as the guest runs.
const LAST_CALLS_AT_ONCE: usize = 2;

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
    last_calls: Arc<Semaphore>,
}

/// Starts libvirt's event loop on its own thread, once per process.
static EVENT_LOOP: LazyLock<Result<(), HypervisorError>> = LazyLock::new(|| {
    virt::error::clear_error_callback();
    virt::event::event_register_default_impl()?;
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
        .map_err(|error| HypervisorError::Disconnected(error.to_string()))?;
    Ok(())
});

impl Connection {
    /// Connects to the daemon behind `uri` and registers for its events.
    ///
    /// # Errors
    /// When the daemon cannot be reached within `deadline`.
    pub(crate) async fn open(uri: String, deadline: Duration) -> Result<Self, HypervisorError> {
        blocking("open", deadline, move || {
            EVENT_LOOP.clone()?;
            if uri.contains('\0') {
                return Err(HypervisorError::ZeroByte);
            }
            let connect =
                Connect::open(Some(&uri)).map_err(|e| HypervisorError::Disconnected(e.message().to_owned()))?;
            let signals = Arc::new(Signals::default());
            let registrations = Registrations::new(&connect, &signals)?;
            Ok(Self {
                inner: Arc::new(Inner {
                    _registrations: registrations,
                    connect,
                    signals,
                    calls: Arc::new(Semaphore::new(CALLS_AT_ONCE)),
                    last_calls: Arc::new(Semaphore::new(LAST_CALLS_AT_ONCE)),
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
    pub(super) async fn run<T, F>(&self, what: &'static str, deadline: Duration, call: F) -> Result<T, HypervisorError>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, HypervisorError> + Send + 'static,
    {
        self.run_within(&self.inner.calls, what, deadline, call).await
    }

    async fn run_within<T, F>(
        &self,
        calls: &Arc<Semaphore>,
        what: &'static str,
        deadline: Duration,
        call: F,
    ) -> Result<T, HypervisorError>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, HypervisorError> + Send + 'static,
    {
        if self.inner.signals.is_closed() {
            return Err(HypervisorError::Disconnected("connection closed".into()));
        }
        let permit = calls.clone().try_acquire_owned().map_err(|_| HypervisorError::Busy)?;
        let inner = self.inner.clone();
        blocking(what, deadline, move || {
            let result = call(&inner.connect);
            drop(permit);
            result
        })
        .await
    }

    /// Runs `call` with the domain of this name.
    pub(super) async fn with_domain<T, F>(
        &self,
        what: &'static str,
        name: String,
        deadline: Duration,
        call: F,
    ) -> Result<T, HypervisorError>
    where
        T: Send + 'static,
        F: FnOnce(&Domain) -> Result<T, HypervisorError> + Send + 'static,
    {
        self.run(what, deadline, with_domain(name, call)).await
    }

    /// Runs a call that ends the domain of this name.
    pub(super) async fn end_domain<F>(
        &self,
        what: &'static str,
        name: String,
        deadline: Duration,
        call: F,
    ) -> Result<(), HypervisorError>
    where
        F: FnOnce(&Domain) -> Result<(), HypervisorError> + Send + 'static,
    {
        self.run_within(&self.inner.last_calls, what, deadline, with_domain(name, call)).await
    }

    /// Returns libvirt's description of the host (`virConnectGetCapabilities`).
    ///
    /// # Errors
    /// A failed call.
    pub(crate) async fn host_capabilities(&self, deadline: Duration) -> Result<String, HypervisorError> {
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
    ) -> Result<String, HypervisorError> {
        self.run("domain capabilities", deadline, move |connect| {
            callbacks::domain_capabilities(connect, &machine_type, &virtualization)
        })
        .await
    }
}

/// Looks the domain of this name up for a call.
fn with_domain<T>(
    name: String,
    call: impl FnOnce(&Domain) -> Result<T, HypervisorError>,
) -> impl FnOnce(&Connect) -> Result<T, HypervisorError> {
    move |connect| {
        if name.contains('\0') {
            return Err(HypervisorError::ZeroByte);
        }
        call(&Domain::lookup_by_name(connect, &name)?)
    }
}

async fn blocking<T, F>(what: &'static str, deadline: Duration, call: F) -> Result<T, HypervisorError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, HypervisorError> + Send + 'static,
{
    match tokio::time::timeout(deadline, tokio::task::spawn_blocking(call)).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(HypervisorError::Timeout(what)),
        Err(_) => Err(HypervisorError::Timeout(what)),
    }
}
