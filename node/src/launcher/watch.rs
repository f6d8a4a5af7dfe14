//! Following the state of one machine over its launcher's Watch stream.

use std::time::{Duration, Instant};

use protocol::MachineState;
use tokio::sync::mpsc;

use super::{
    Launcher, LauncherError,
    client::{bounded, cut},
};

/// A launcher's states are taken this often in the long run, however many it sends ...
const STATE_INTERVAL: Duration = Duration::from_millis(10);
/// ... and so many at once are no more than a start with a talkative guest.
const STATE_BURST: u32 = 100;

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
    let mut pace = Pace(Instant::now());
    let lost = match launcher.watch().await {
        Ok(mut states) => loop {
            match states.message().await {
                Ok(Some(mut state)) => {
                    keep(&mut state);
                    if reports.send((connection, Report::State(Box::new(state)))).await.is_err() {
                        return;
                    }
                    let wait = pace.after_one(Instant::now());
                    if !wait.is_zero() {
                        tokio::time::sleep(wait).await;
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

/// By when the states that were taken so far were due.
struct Pace(Instant);

impl Pace {
    /// How long the next state has to wait, one having been taken now.
    fn after_one(&mut self, now: Instant) -> Duration {
        self.0 = self.0.max(now) + STATE_INTERVAL;
        self.0.saturating_duration_since(now).saturating_sub(STATE_INTERVAL * STATE_BURST)
    }
}

/// Keeps of a state what can be meant: it stays in memory as long as the machine, and users read it.
fn keep(state: &mut MachineState) {
    state.reason = bounded(&state.reason);
    state.failure = bounded(&state.failure);
    cut(&mut state.interfaces);
    state.interfaces.iter_mut().for_each(|interface| cut(&mut interface.addresses));
    cut(&mut state.disks);
    cut(&mut state.disk_errors);
    state.agent.iter_mut().for_each(|agent| cut(&mut agent.commands));
    if let Some(panic) = &mut state.guest_panic {
        cut(&mut panic.values);
        panic.kind = bounded(&panic.kind);
        panic.values.iter_mut().for_each(|value| *value = bounded(value));
    }
}

#[cfg(test)]
mod tests {
    use protocol::{DiskError, DiskTarget, GuestAgent, GuestAgentCommand, GuestInterface, GuestPanic};

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
            guest_panic: Some(GuestPanic { values: vec![String::new(); MANY], ..GuestPanic::default() }),
            ..MachineState::default()
        };
        keep(&mut state);
        let agent = state.agent.unwrap();
        let interfaces = &state.interfaces;
        let disks = [state.disks.len(), state.disk_errors.len()];
        let values = state.guest_panic.unwrap().values.len();
        let lengths = [interfaces.len(), interfaces[0].addresses.len(), agent.commands.len(), values];
        assert_eq!((disks, lengths), ([LIST_LIMIT; 2], [LIST_LIMIT; 4]));
        assert!(state.interfaces.capacity() <= 2 * LIST_LIMIT);
    }

    #[test]
    fn what_a_launcher_says_of_a_failure_or_a_crash_is_one_line() {
        let hostile = format!("a\nb\u{1b}[31m{}", "x".repeat(100_000));
        let mut state = MachineState {
            reason: hostile.clone(),
            failure: hostile.clone(),
            guest_panic: Some(GuestPanic { kind: hostile.clone(), values: vec![hostile] }),
            ..MachineState::default()
        };
        keep(&mut state);
        let panic = state.guest_panic.unwrap();
        for text in [&state.reason, &state.failure, &panic.kind, &panic.values[0]] {
            assert!(text.starts_with("a b") && text.chars().count() <= 1024);
            assert!(!text.chars().any(char::is_control));
        }
    }

    #[test]
    fn a_launcher_that_reports_without_end_is_held_back() {
        let start = Instant::now();
        let mut pace = Pace(start);
        for _ in 0..STATE_BURST {
            assert_eq!(pace.after_one(start), Duration::ZERO);
        }
        assert_eq!(pace.after_one(start), STATE_INTERVAL);
        assert_eq!(pace.after_one(start + STATE_INTERVAL), STATE_INTERVAL);
        assert_eq!(pace.after_one(start + Duration::from_secs(60)), Duration::ZERO, "after a rest");
    }
}
