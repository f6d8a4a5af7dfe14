//! `virt-freezer`: the command that a backup program runs in a launcher's container before and after it copies the
//! VMI's disks. Annotations of launcher pods fix its name and options.

use std::{path::Path, time::Duration};

use clap::{Args, Parser};
use protocol::{
    FreezeRequest, LauncherState, Lifecycle, UnfreezeRequest, WatchRequest, launcher_client::LauncherClient,
};
use tonic::transport::{Channel, Endpoint};

use crate::paths::Paths;

/// Name under which virt-launcher's program acts as this command.
pub const NAME: &str = "virt-freezer";
/// Time limit of the connection to the worker and of its first state.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of a freeze or thaw: the guest agent's own (45 s) plus time for the answer. With the connection it is that of
/// Velero's hook at most.
const LIMIT: Duration = Duration::from_secs(50);

/// Freezes or thaws the file systems of this pod's guest.
#[derive(Clone, Debug, Parser)]
#[command(name = NAME, version)]
pub struct Options {
    /// Action to take.
    #[command(flatten)]
    pub action: Action,
    /// Name of the VirtualMachineInstance, for messages.
    #[arg(long)]
    pub name: String,
    /// Its namespace, for messages.
    #[arg(long)]
    pub namespace: String,
    /// Seconds until the automatic thaw; 0: never.
    #[arg(long = "unfreezeTimeoutSeconds", default_value_t = 300)]
    pub unfreeze_timeout_seconds: u32,
}

/// Exactly one of the two.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct Action {
    /// Freeze.
    #[arg(long)]
    pub freeze: bool,
    /// Thaw.
    #[arg(long)]
    pub unfreeze: bool,
}

/// Failure to freeze or thaw the guest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program cannot run.
    #[error("cannot run")]
    Runtime(#[from] std::io::Error),
    /// The worker cannot be reached.
    #[error("cannot connect to virt-launcher")]
    Transport(#[from] tonic::transport::Error),
    /// The worker rejected the request.
    #[error("{}", .0.message())]
    Refused(#[source] Box<tonic::Status>),
    /// The worker does not answer.
    #[error("virt-launcher did not answer in time")]
    Timeout,
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// Runs the command.
///
/// # Errors
/// When the guest was not frozen or thawed as requested.
pub fn run(options: &Options, paths: &Paths) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(act(options, &paths.launcher_socket()))
}

async fn act(options: &Options, socket: &Path) -> Result<(), Error> {
    let (namespace, name) = (options.namespace.as_str(), options.name.as_str());
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect_timeout(HELLO_LIMIT).timeout(LIMIT).connect().await?;
    let mut launcher = LauncherClient::new(channel);
    let state = tokio::time::timeout(HELLO_LIMIT, state(&mut launcher)).await.map_err(|_| Error::Timeout)??;
    if let Some(why) = skip_reason(&state) {
        tracing::info!(namespace, name, "{why}");
        return Ok(());
    }
    if options.action.unfreeze {
        launcher.unfreeze(UnfreezeRequest {}).await?;
        tracing::info!(namespace, name, "the guest's file systems are thawed");
        return Ok(());
    }
    let request = FreezeRequest { unfreeze_timeout_seconds: options.unfreeze_timeout_seconds };
    if let Err(status) = launcher.freeze(request).await {
        // The answer may be lost while the guest is frozen, and an aborted backup thaws nothing.
        if let Err(error) = launcher.unfreeze(UnfreezeRequest {}).await {
            tracing::warn!(namespace, name, %error, "cannot thaw the guest after the failed freeze");
        }
        return Err(status.into());
    }
    tracing::info!(namespace, name, "the guest's file systems are frozen");
    Ok(())
}

async fn state(launcher: &mut LauncherClient<Channel>) -> Result<LauncherState, Error> {
    let mut states = launcher.watch(WatchRequest {}).await?.into_inner();
    Ok(states.message().await?.unwrap_or_default())
}

/// Returns why a guest needs no freeze or thaw; the backup then continues without. Clients match these texts.
fn skip_reason(state: &LauncherState) -> Option<&'static str> {
    if state.lifecycle() != Lifecycle::Running {
        Some("VM domain not running, no need to freeze/unfreeze")
    } else if !state.guest_agent_connected {
        Some("No guest agent, exiting")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once(NAME).chain(line.split_whitespace()))
    }

    #[test]
    fn options_are_those_of_the_annotations() {
        let freeze = parse("--freeze --name vm --namespace ns").unwrap();
        assert!(freeze.action.freeze && !freeze.action.unfreeze);
        assert_eq!(freeze.unfreeze_timeout_seconds, 300);
        let thaw = parse("--unfreeze --name vm --namespace ns --unfreezeTimeoutSeconds 0").unwrap();
        assert!(thaw.action.unfreeze && thaw.unfreeze_timeout_seconds == 0);
        for wrong in ["--name vm --namespace ns", "--freeze --unfreeze --name vm --namespace ns", "--freeze --name vm"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn guests_that_cannot_be_frozen_need_not_be() {
        let not_running = Some("VM domain not running, no need to freeze/unfreeze");
        for (lifecycle, connected, reason) in [
            (Lifecycle::Running, true, None),
            (Lifecycle::Running, false, Some("No guest agent, exiting")),
            (Lifecycle::Paused, true, not_running),
            (Lifecycle::NoDomain, false, not_running),
        ] {
            let mut state = LauncherState { guest_agent_connected: connected, ..LauncherState::default() };
            state.set_lifecycle(lifecycle);
            assert_eq!(skip_reason(&state), reason, "{lifecycle:?} {connected}");
        }
    }
}
