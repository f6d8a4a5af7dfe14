//! The connection to libvirt's daemon. Its calls block: [`Connection::run`] runs each on a blocking thread with a time limit,
//! so that a blocked daemon never stops the worker.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use virt::connect::Connect;

use super::callbacks::Registrations;
use crate::hypervisor::{HypervisorError, Signals};

/// Kinds of calls, each with a limit of its own. A call past its deadline keeps its thread until libvirt answers; the limits
/// bound the threads of a blocked daemon, and no kind can use up the calls of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// Calls that libvirt and QEMU answer.
    Ordinary,
    /// Calls that wait for the guest agent, which may never answer.
    GuestAgent,
    /// Calls that end the domain.
    End,
    /// Calls that take minutes: the job slot permits one.
    Job,
}

impl CallKind {
    const ALL: [Self; 4] = [Self::Ordinary, Self::GuestAgent, Self::End, Self::Job];

    /// Returns the limit of concurrent calls. Their sum is less than the blocking threads of the worker.
    pub(crate) const fn limit(self) -> usize {
        match self {
            Self::Ordinary => 6,
            // A command, the clock, and a shutdown or reboot.
            Self::GuestAgent => 3,
            Self::End => 2,
            Self::Job => 1,
        }
    }
}

/// Permits of the calls in progress by kind.
struct Permits([Arc<Semaphore>; CallKind::ALL.len()]);

impl Permits {
    fn new() -> Self {
        Self(CallKind::ALL.map(|kind| Arc::new(Semaphore::new(kind.limit()))))
    }

    fn acquire(&self, kind: CallKind) -> Result<OwnedSemaphorePermit, HypervisorError> {
        self.0[kind as usize].clone().try_acquire_owned().map_err(|_| HypervisorError::Busy)
    }
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
    permits: Permits,
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
                inner: Arc::new(Inner { _registrations: registrations, connect, signals, permits: Permits::new() }),
            })
        })
        .await
    }

    /// Returns the signals of this connection's callbacks.
    pub(crate) fn signals(&self) -> &Arc<Signals> {
        &self.inner.signals
    }

    /// Runs `call` on a blocking thread, for at most `deadline`.
    pub(super) async fn run<T, F>(
        &self,
        kind: CallKind,
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
        let permit = self.inner.permits.acquire(kind)?;
        let inner = self.inner.clone();
        blocking(what, deadline, move || {
            let result = call(&inner.connect);
            drop(permit);
            result
        })
        .await
    }
}

async fn blocking<T, F>(what: &'static str, deadline: Duration, call: F) -> Result<T, HypervisorError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, HypervisorError> + Send + 'static,
{
    match tokio::time::timeout(deadline, tokio::task::spawn_blocking(call)).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) | Err(_) => Err(HypervisorError::Timeout(what)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::libvirt::daemon::DAEMON_CONF;

    #[test]
    fn no_kind_of_call_uses_up_the_permits_of_another() {
        for greedy in CallKind::ALL {
            let permits = Permits::new();
            let held: Vec<_> = std::iter::from_fn(|| permits.acquire(greedy).ok()).collect();
            assert_eq!(held.len(), greedy.limit());
            for kind in CallKind::ALL {
                assert_eq!(permits.acquire(kind).is_ok(), kind != greedy, "{greedy:?} {kind:?}");
            }
            drop(held);
            assert!(permits.acquire(greedy).is_ok());
        }
        let all: usize = CallKind::ALL.iter().map(|kind| kind.limit()).sum();
        assert!(all < crate::worker::BLOCKING_THREADS, "{all} calls leave no thread for files");
    }

    #[test]
    fn the_daemon_works_on_all_calls_at_once() {
        let setting = |name: &str| -> usize {
            let mut lines = DAEMON_CONF.lines().filter_map(|line| line.split_once(" = "));
            lines.find(|(known, _)| *known == name).unwrap().1.parse().unwrap()
        };
        let all: usize = CallKind::ALL.iter().map(|kind| kind.limit()).sum();
        assert!(setting("max_client_requests") > all, "a keep-alive is a request, too");
        assert!(setting("max_workers") >= all);
    }
}
