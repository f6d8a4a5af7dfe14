//! The engine: one task owns the domain and makes every change.
//!
//! ```text
//!            Hello                 Sync                        guest or QEMU ends
//!  Waiting ---------> Waiting -------------> Live -------------------------------------+
//!     |   (connects to  |      disks, XML,     |  Pause, Unpause, Reset, SoftReboot,    |
//!     |    libvirt)     |      define, create  |  Shutdown (repeated, then forced)      |
//!     |                 |                      |                                        v
//!     |                 +-- cannot start ------|------------------------------------> Ended
//!     |                                        |                                        |
//!     +-- Shutdown, Kill, Terminate -----------|--------------------------------------->|
//!                                                                 Finish, or too long   |
//!                                                                                       v
//!                                                                                     exit
//! ```
//!
//! Requests come through [`queue::RequestQueue`], which checks them against the domain's state and the queued requests.
//! libvirt's events only wake the driver; it reads the state from libvirt and publishes it. A restarted worker adopts a
//! running domain and starts in `Live`.

mod crash;
mod driver;
pub(crate) mod queue;
mod start;
pub(crate) mod state;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::VirtualMachineInstance;
use futures::future::BoxFuture;
use protocol::{MachineState, StatsReply};
use thiserror::Error;
use tokio::sync::{Notify, oneshot, watch};

pub(crate) use self::driver::Driver;
use self::queue::{Action, Request, RequestQueue};
use crate::{
    domain::unsupported::Unsupported,
    guest_agent::{Channel, GuestAgent},
    hypervisor::libvirt::{self, Connection},
    options::VmiArgs,
    paths::Paths,
    streaming::console::Console,
};

/// Time limit of libvirt's statistics.
const STATS_DEADLINE: Duration = Duration::from_secs(3);

/// Failure of a request.
#[derive(Debug, Error)]
pub(crate) enum RequestError {
    /// There is no running domain.
    #[error("Domain not found.")]
    NoDomain,
    /// The domain has ended.
    #[error("the domain has ended")]
    Ended,
    /// The domain is being stopped.
    #[error("the domain is being stopped")]
    Ending,
    /// The domain has not ended.
    #[error("the domain has not ended")]
    NotEnded,
    /// virt-handler has not sent Hello yet.
    #[error("Hello must come first")]
    NoHello,
    /// The queue is full.
    #[error("too many requests are queued")]
    Busy,
    /// The request is for another VMI than the pod's.
    #[error("this launcher runs VMI {0}")]
    OtherVmi(String),
    /// The guest has neither a connected guest agent nor ACPI.
    #[error("VMI neither have the agent connected nor the ACPI feature enabled")]
    NoWayToReboot,
    /// The domain cannot be started.
    #[error("{message}")]
    Start {
        /// Cause.
        message: String,
        /// A retry cannot succeed.
        permanent: bool,
    },
    /// The VMI has fields that no component carries out. A retry fails, too.
    #[error("VMI uses fields that virt-launcher does not support: {0}")]
    Unsupported(Unsupported),
    /// libvirt failed.
    #[error(transparent)]
    Libvirt(#[from] libvirt::Error),
    /// The driver has stopped.
    #[error("the launcher is stopping")]
    Gone,
}

/// State shared by the driver and its handles.
#[derive(Debug)]
struct Shared {
    queue: Mutex<RequestQueue>,
    pushed: Notify,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, RequestQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of the engine for the server and the signal handler.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    shared: Arc<Shared>,
    state: watch::Receiver<MachineState>,
    connection: watch::Receiver<Option<ConnectionHandle>>,
    console: watch::Receiver<Option<Console>>,
    guest_agent: GuestAgent,
    paths: Paths,
    args: VmiArgs,
}

/// Channel to the domain's guest agent through the current connection.
struct GuestAgentChannel {
    connection: watch::Receiver<Option<ConnectionHandle>>,
    domain: String,
}

impl Channel for GuestAgentChannel {
    fn ask(&self, command: String, deadline: Duration) -> BoxFuture<'static, Result<String, libvirt::Error>> {
        let (connection, domain) = (self.connection.borrow().clone(), self.domain.clone());
        Box::pin(async move {
            let connection = connection.ok_or_else(|| libvirt::Error::Disconnected("reconnecting".into()))?;
            connection.0.guest_agent_command(&domain, command, deadline).await
        })
    }
}

/// A connection to libvirt with `Debug`.
#[derive(Clone)]
pub(crate) struct ConnectionHandle(Connection);

impl std::fmt::Debug for ConnectionHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConnectionHandle")
    }
}

impl EngineHandle {
    /// Subscribes to the domain's state.
    pub(crate) fn watch(&self) -> watch::Receiver<MachineState> {
        self.state.clone()
    }

    /// Returns the paths of this pod.
    pub(crate) const fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns the identity of this pod's VMI.
    pub(crate) const fn args(&self) -> &VmiArgs {
        &self.args
    }

    /// Returns the serial console, once the domain was started.
    pub(crate) fn console(&self) -> Option<Console> {
        self.console.borrow().clone()
    }

    /// Returns the guest agent.
    pub(crate) const fn guest_agent(&self) -> &GuestAgent {
        &self.guest_agent
    }

    /// Handles Hello of virt-handler.
    ///
    /// # Errors
    /// When the cache is rejected or the daemon cannot be set up.
    pub(crate) async fn hello(
        &self,
        cache: Vec<protocol::CacheFile>,
        allow_emulation: bool,
    ) -> Result<(), RequestError> {
        self.ask(|reply| Request::Hello { cache, allow_emulation, reply }).await
    }

    /// Brings the domain in line with the VMI. Returns true if it was started.
    ///
    /// # Errors
    /// When the domain cannot be started, or the VMI has fields that no component carries out.
    pub(crate) async fn sync(
        &self,
        vmi: VirtualMachineInstance,
        unsupported: Unsupported,
        options: protocol::MachineOptions,
    ) -> Result<bool, RequestError> {
        self.ask(|reply| Request::Sync { vmi: Box::new(vmi), unsupported: Box::new(unsupported), options, reply }).await
    }

    /// Runs an action.
    ///
    /// # Errors
    /// When the action is rejected or fails.
    pub(crate) async fn act(&self, action: Action) -> Result<(), RequestError> {
        self.ask(|reply| Request::Act { action, reply }).await
    }

    /// Takes a screenshot, as PNG or PPM.
    ///
    /// # Errors
    /// When there is no display or libvirt fails.
    pub(crate) async fn screenshot(&self) -> Result<(String, Vec<u8>), RequestError> {
        let connection = self.connection.borrow().clone().ok_or(RequestError::NoDomain)?;
        let name = crate::domain::domain_name(&self.args.namespace, &self.args.name);
        Ok(connection.0.screenshot(&name, driver::CALL_DEADLINE).await?)
    }

    /// Returns the domain's statistics.
    ///
    /// # Errors
    /// When there is no domain or libvirt fails.
    pub(crate) async fn stats(&self) -> Result<StatsReply, RequestError> {
        let connection = self.connection.borrow().clone().ok_or(RequestError::NoDomain)?;
        let name = crate::domain::domain_name(&self.args.namespace, &self.args.name);
        let mut stats = connection.0.stats(&name, STATS_DEADLINE).await?;
        stats.file_systems = self.guest_agent.recent_file_systems().await;
        Ok(stats)
    }

    async fn ask<T>(&self, request: impl FnOnce(queue::Reply<T>) -> Request) -> Result<T, RequestError> {
        let (reply, answer) = oneshot::channel();
        self.shared.queue().push(request(reply))?;
        self.shared.pushed.notify_one();
        answer.await.map_err(|_| RequestError::Gone)?
    }
}

#[cfg(test)]
mod tests {
    use super::{driver::Outcome, *};

    /// Paths of a launcher that does not start its daemon ahead of Hello: /dev/kvm cannot be opened.
    fn paths(test: &str) -> Paths {
        let root = std::env::temp_dir().join(format!("launcher-{test}-{}", std::process::id()));
        std::fs::create_dir_all(root.join("kvm")).unwrap();
        Paths {
            private: root.clone(),
            sockets: root.clone(),
            runtime: root.clone(),
            dev: root.clone(),
            ..Paths::default()
        }
    }

    fn args(simulate_crash: bool) -> VmiArgs {
        VmiArgs {
            name: "m".into(),
            uid: "u".into(),
            namespace: "d".into(),
            grace_period_seconds: 45,
            allow_emulation: false,
            libvirt_log_filters: None,
            ovmf_path: "/nowhere".into(),
            simulate_crash,
        }
    }

    #[tokio::test]
    async fn a_simulated_failure_is_published_before_the_launcher_ends() {
        let paths = paths("fails");
        let root = paths.dev.clone();
        let (driver, engine) = Driver::new(args(true), paths);
        let handler = async {
            let mut state = engine.watch();
            let failure = state.wait_for(|state| !state.failure.is_empty()).await.unwrap().failure.clone();
            engine.hello(Vec::new(), false).await.unwrap();
            engine.act(Action::Finish).await.unwrap();
            failure
        };
        let (outcome, failure) = tokio::join!(driver.run(), handler);
        assert!(!outcome.success);
        assert_eq!(outcome.message, failure);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[tokio::test]
    async fn a_vmi_with_unsupported_fields_fails_with_their_names() {
        let paths = paths("unsupported");
        let root = paths.dev.clone();
        let (driver, engine) = Driver::new(args(false), paths);
        let object = serde_json::json!({
            "metadata": {"name": "m", "namespace": "d", "uid": "u"},
            "spec": {"domain": {"cpu": {"numa": {}}, "devices": {"tpm": {}}}},
        });
        let unsupported = Unsupported::find(&object);
        let vmi: VirtualMachineInstance = serde_json::from_value(object).unwrap();
        let sync = async {
            let error = engine.sync(vmi.clone(), unsupported, protocol::MachineOptions::default()).await.unwrap_err();
            let failure = engine.watch().borrow().failure.clone();
            let second = engine.sync(vmi, Unsupported::default(), protocol::MachineOptions::default()).await;
            assert!(matches!(second, Err(RequestError::Ended)), "{second:?}");
            engine.act(Action::Finish).await.unwrap();
            (error, failure)
        };
        let (outcome, (error, failure)) = tokio::join!(driver.run(), sync);
        assert_eq!(
            failure,
            "VMI uses fields that virt-launcher does not support: spec.domain.cpu.numa, spec.domain.devices.tpm"
        );
        assert_eq!(error.to_string(), failure);
        assert_eq!(outcome, Outcome { success: false, message: failure });
        std::fs::remove_dir_all(root).unwrap();
    }
}
