//! Handle of the engine for the server and the signal handler.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use protocol::{LauncherState, StatsReply};
use tokio::sync::{
    mpsc::{self, error::TrySendError},
    oneshot, watch,
};

use super::timings::Timings;
use crate::{
    engine::model::{Answer, Request, RequestError},
    guest_agent::{Channel, GuestAgent},
    hypervisor::{Domain, HypervisorError},
    migration::{self, Channels},
    options::VmiArgs,
    paths::Paths,
    streaming::console::Console,
    vm_state::VmState,
};

/// A request with the sender of its answer.
pub(super) type Envelope = (Request, oneshot::Sender<Answer>);

/// The current connection, if any.
pub(super) type CurrentDomain = Option<Arc<dyn Domain>>;

/// Handle of the engine. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    pub(super) requests: mpsc::Sender<Envelope>,
    pub(super) state: watch::Receiver<LauncherState>,
    pub(super) domain: watch::Receiver<CurrentDomain>,
    pub(super) console: watch::Receiver<Option<Console>>,
    pub(crate) guest_agent: GuestAgent,
    pub(crate) paths: Paths,
    pub(crate) args: VmiArgs,
    pub(crate) timings: Timings,
    pub(super) channels: Channels,
    pub(crate) vm_state: VmState,
}

/// Channel to the domain's guest agent through the current connection.
pub(super) struct GuestAgentChannel(pub(super) watch::Receiver<CurrentDomain>);

impl Channel for GuestAgentChannel {
    fn ask(&self, command: String, deadline: Duration) -> BoxFuture<'static, Result<String, HypervisorError>> {
        match self.0.borrow().as_ref() {
            Some(domain) => domain.guest_agent_command(command, deadline),
            None => Box::pin(std::future::ready(Err(HypervisorError::Disconnected("reconnecting".into())))),
        }
    }
}

impl EngineHandle {
    /// Subscribes to the domain's state.
    pub(crate) fn watch(&self) -> watch::Receiver<LauncherState> {
        self.state.clone()
    }

    /// Returns the serial console, once the domain was started.
    pub(crate) fn console(&self) -> Option<Console> {
        self.console.borrow().clone()
    }

    /// Takes a screenshot, as PNG or PPM.
    pub(crate) async fn screenshot(&self) -> Result<(String, Vec<u8>), RequestError> {
        let screenshot = self.domain.borrow().as_ref().ok_or(RequestError::NoDomain)?.screenshot();
        Ok(screenshot.await?)
    }

    /// Returns the domain's statistics.
    pub(crate) async fn stats(&self) -> Result<StatsReply, RequestError> {
        let stats = self.domain.borrow().as_ref().ok_or(RequestError::NoDomain)?.stats();
        let mut stats = stats.await?;
        (stats.file_systems, stats.load) = self.guest_agent.recent().await;
        Ok(stats)
    }

    /// Passes a request to the driver and returns the answer.
    pub(crate) async fn ask(&self, request: Request) -> Answer {
        let (reply, answer) = oneshot::channel();
        self.requests.try_send((request, reply)).map_err(|error| match error {
            TrySendError::Full(_) => RequestError::Busy,
            TrySendError::Closed(_) => RequestError::Gone,
        })?;
        answer.await.map_err(|_| RequestError::Gone)?
    }
}

impl migration::Engine for EngineHandle {
    fn channels(&self) -> &Channels {
        &self.channels
    }

    async fn release(&self, paused: bool) -> std::io::Result<bool> {
        self.ask(Request::Release { paused }).await.map_err(std::io::Error::other)
    }

    fn thaw_after(&self, seconds: u32) {
        self.guest_agent.take_thaw(seconds);
    }
}
