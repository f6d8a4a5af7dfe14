//! Following the state of one machine over its launcher's Watch stream.

use protocol::MachineState;
use tokio::sync::mpsc;

use super::{Launcher, LauncherError};

/// What comes from one connection to a launcher.
#[derive(Debug)]
pub enum Report {
    /// The machine's state after a change.
    State(Box<MachineState>),
    /// The connection is of no more use. Nothing follows.
    Lost(LauncherError),
}

/// Passes on each state of the machine, tagged with the number of the connection, until the stream ends. A launcher
/// that sends faster than states are taken is held back by the stream's flow control.
pub async fn follow(launcher: Launcher, connection: u64, reports: mpsc::Sender<(u64, Report)>) {
    let lost = match launcher.watch().await {
        Ok(mut states) => loop {
            match states.message().await {
                Ok(Some(state)) => {
                    if reports.send((connection, Report::State(Box::new(state)))).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break LauncherError::Lost("the launcher closed it".into()),
                Err(status) => break LauncherError::Lost(status.code().description().to_owned()),
            }
        },
        Err(error) => error,
    };
    // Nobody may be interested any more.
    let _ = reports.send((connection, Report::Lost(lost))).await;
}
