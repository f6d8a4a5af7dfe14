//! Following the state of one machine over its launcher's Watch stream.

use protocol::MachineState;
use tokio::sync::mpsc;

use super::{Launcher, LauncherError, client::cut};

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
                Ok(Some(mut state)) => {
                    keep(&mut state);
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

/// Keeps of a state what can be meant: it stays in memory as long as the machine.
fn keep(state: &mut MachineState) {
    cut(&mut state.interfaces);
    state.interfaces.iter_mut().for_each(|interface| cut(&mut interface.addresses));
    cut(&mut state.disks);
    cut(&mut state.disk_errors);
    state.agent.iter_mut().for_each(|agent| cut(&mut agent.commands));
}

#[cfg(test)]
mod tests {
    use protocol::{DiskError, DiskTarget, GuestAgent, GuestAgentCommand, GuestInterface};

    use super::*;
    use crate::launcher::client::LIST_LIMIT;

    #[test]
    fn cve_2026_13322_lists_that_a_launcher_makes_long_are_cut() {
        const MANY: usize = 10_000;
        let interface = GuestInterface { addresses: vec![String::new(); MANY], ..GuestInterface::default() };
        let mut state = MachineState {
            interfaces: [vec![interface], vec![GuestInterface::default(); MANY]].concat(),
            disks: vec![DiskTarget::default(); MANY],
            disk_errors: vec![DiskError::default(); MANY],
            agent: Some(GuestAgent { commands: vec![GuestAgentCommand::default(); MANY], ..GuestAgent::default() }),
            ..MachineState::default()
        };
        keep(&mut state);
        let agent = state.agent.unwrap();
        let interfaces = &state.interfaces;
        let disks = [state.disks.len(), state.disk_errors.len()];
        let lengths = [interfaces.len(), interfaces[0].addresses.len(), agent.commands.len()];
        assert_eq!((disks, lengths), ([LIST_LIMIT; 2], [LIST_LIMIT; 3]));
        assert!(state.interfaces.capacity() <= 2 * LIST_LIMIT);
    }
}
