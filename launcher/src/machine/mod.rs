//! The machine: one task owns it and makes every change.
//!
//! ```text
//!            Hello                 Sync                        guest or QEMU ends
//!  Waiting ---------> Waiting -------------> Live -------------------------------------+
//!     |   (connects to  |      disks, XML,     |  Pause, Unpause, Reset, SoftReboot,    |
//!     |    libvirt)     |      define, create  |  Shutdown (asked again, then forced)   |
//!     |                 |                      |                                        v
//!     |                 +-- cannot start ------|------------------------------------> Ended
//!     |                                        |                                        |
//!     +-- Shutdown, Kill, Terminate -----------|--------------------------------------->|
//!                                                                 Finish, or too long   |
//!                                                                                       v
//!                                                                                     exit
//! ```
//!
//! Requests come through [`queue::RequestQueue`], which judges them by what is known and what waits. libvirt's events only
//! wake the driver; it reads the state from libvirt and publishes it. A restarted worker finds a running domain and goes
//! straight to `Live`.

mod crash;
mod driver;
pub mod queue;
mod start;
pub mod state;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::VirtualMachineInstance;
use futures::future::BoxFuture;
use protocol::{MachineState, StatsReply};
use thiserror::Error;
use tokio::sync::{Notify, oneshot, watch};

pub use self::driver::{Driver, Outcome};
use self::queue::{Action, Request, RequestQueue};
use crate::{
    agent::{Channel, GuestAgent},
    console::Console,
    domain::unsupported::Unsupported,
    libvirt,
    libvirt::Connection,
    options::MachineArgs,
    paths::Paths,
};

/// How long libvirt may take to tell what it counts.
const STATS_DEADLINE: Duration = Duration::from_secs(3);

/// Why a request was not carried out.
#[derive(Debug, Error)]
pub enum RequestError {
    /// There is no running machine.
    #[error("Domain not found.")]
    NoDomain,
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
    /// The machine is about to end.
    #[error("the machine is being stopped")]
    Ending,
    /// The machine has not ended.
    #[error("the machine has not ended")]
    NotEnded,
    /// Hello was not said yet.
    #[error("the agent has to say hello first")]
    NoHello,
    /// Too many requests wait.
    #[error("too many requests wait")]
    Busy,
    /// The request is for another machine than the pod's.
    #[error("this launcher runs {0}")]
    OtherMachine(String),
    /// The guest can be reached neither by agent nor by ACPI.
    #[error("VMI neither have the agent connected nor the ACPI feature enabled")]
    NoWayToReboot,
    /// The machine cannot be started, now or ever.
    #[error("{message}")]
    Start {
        /// Why.
        message: String,
        /// Whether trying again is pointless.
        lasting: bool,
    },
    /// The VMI has fields that nobody carries out. They stay as they are: another attempt fails, too.
    #[error("VMI uses fields that virt-launcher does not support: {0}")]
    Unsupported(Unsupported),
    /// libvirt failed.
    #[error(transparent)]
    Libvirt(#[from] libvirt::Error),
    /// The driver has ended.
    #[error("the launcher is ending")]
    Gone,
}

/// What the driver and its handles share.
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

/// How others reach the machine.
#[derive(Clone, Debug)]
pub struct MachineHandle {
    shared: Arc<Shared>,
    state: watch::Receiver<MachineState>,
    connection: watch::Receiver<Option<ConnectionHandle>>,
    console: watch::Receiver<Option<Console>>,
    agent: GuestAgent,
    paths: Paths,
    args: MachineArgs,
}

/// The way to the guest agent of a domain: whatever connection there is at the time.
struct AgentChannel {
    connection: watch::Receiver<Option<ConnectionHandle>>,
    domain: String,
}

impl Channel for AgentChannel {
    fn ask(&self, command: String, deadline: Duration) -> BoxFuture<'static, Result<String, libvirt::Error>> {
        let (connection, domain) = (self.connection.borrow().clone(), self.domain.clone());
        Box::pin(async move {
            let connection = connection.ok_or_else(|| libvirt::Error::Disconnected("reconnecting".into()))?;
            connection.0.agent_command(&domain, command, deadline).await
        })
    }
}

/// A connection to libvirt that can be shown in logs.
#[derive(Clone)]
pub struct ConnectionHandle(Connection);

impl std::fmt::Debug for ConnectionHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConnectionHandle")
    }
}

impl MachineHandle {
    /// The machine's state, now and as it changes.
    pub fn watch(&self) -> watch::Receiver<MachineState> {
        self.state.clone()
    }

    /// Where things are.
    pub const fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Which machine this is.
    pub const fn args(&self) -> &MachineArgs {
        &self.args
    }

    /// The serial console, once the machine was started.
    pub fn console(&self) -> Option<Console> {
        self.console.borrow().clone()
    }

    /// The guest agent.
    pub const fn agent(&self) -> &GuestAgent {
        &self.agent
    }

    /// The agent says hello.
    ///
    /// # Errors
    /// When the cache is not acceptable or the daemon cannot be set up.
    pub async fn hello(&self, cache: Vec<protocol::CacheFile>, allow_emulation: bool) -> Result<(), RequestError> {
        self.ask(|reply| Request::Hello { cache, allow_emulation, reply }).await
    }

    /// Makes the machine what it should be; true if that started it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn sync(
        &self,
        vmi: VirtualMachineInstance,
        unsupported: Unsupported,
        options: protocol::MachineOptions,
    ) -> Result<bool, RequestError> {
        self.ask(|reply| Request::Sync { vmi: Box::new(vmi), unsupported, options, reply }).await
    }

    /// Carries out an action.
    ///
    /// # Errors
    /// When it is refused or fails.
    pub async fn act(&self, action: Action) -> Result<(), RequestError> {
        self.ask(|reply| Request::Act { action, reply }).await
    }

    /// A picture of the display, as PNG or PPM.
    ///
    /// # Errors
    /// When there is no display or libvirt fails.
    pub async fn screenshot(&self) -> Result<(String, Vec<u8>), RequestError> {
        let connection = self.connection.borrow().clone().ok_or(RequestError::NoDomain)?;
        let name = crate::domain::domain_name(&self.args.namespace, &self.args.name);
        Ok(connection.0.screenshot(&name, driver::CALL_DEADLINE).await?)
    }

    /// What is counted about the machine.
    ///
    /// # Errors
    /// When there is no domain or libvirt fails.
    pub async fn stats(&self) -> Result<StatsReply, RequestError> {
        let connection = self.connection.borrow().clone().ok_or(RequestError::NoDomain)?;
        let name = crate::domain::domain_name(&self.args.namespace, &self.args.name);
        let mut stats = connection.0.stats(&name, STATS_DEADLINE).await?;
        stats.file_systems = self.agent.recent_file_systems().await;
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
    use super::*;

    /// The paths of a launcher whose daemon is not started: its /dev/kvm cannot be opened yet.
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

    fn args(simulate_crash: bool) -> MachineArgs {
        MachineArgs {
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
        let (driver, machine) = Driver::new(args(true), paths("fails"));
        let agent = async {
            let mut state = machine.watch();
            let failure = state.wait_for(|state| !state.failure.is_empty()).await.unwrap().failure.clone();
            machine.hello(Vec::new(), false).await.unwrap();
            machine.act(Action::Finish).await.unwrap();
            failure
        };
        let (outcome, failure) = tokio::join!(driver.run(), agent);
        assert!(!outcome.success);
        assert_eq!(outcome.message, failure);
    }

    #[tokio::test]
    async fn a_vmi_with_unsupported_fields_fails_with_their_names() {
        let paths = paths("unsupported");
        let root = paths.dev.clone();
        let (driver, machine) = Driver::new(args(false), paths);
        let object = serde_json::json!({
            "metadata": {"name": "m", "namespace": "d", "uid": "u"},
            "spec": {"domain": {"cpu": {"numa": {}}, "devices": {"tpm": {}}}},
        });
        let unsupported = Unsupported::find(&object);
        let vmi: VirtualMachineInstance = serde_json::from_value(object).unwrap();
        let sync = async {
            let error = machine.sync(vmi.clone(), unsupported, protocol::MachineOptions::default()).await.unwrap_err();
            let failure = machine.watch().borrow().failure.clone();
            let again = machine.sync(vmi, Unsupported::default(), protocol::MachineOptions::default()).await;
            assert!(matches!(again, Err(RequestError::Ended)), "{again:?}");
            machine.act(Action::Finish).await.unwrap();
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
