//! Follows the state of one VMI over the Watch stream of its launcher.

use std::time::{Duration, Instant};

use prost::Message as _;
use protocol::LauncherState;
use tokio::sync::mpsc;

use super::{
    Launcher, LauncherError,
    client::{bounded, cut},
};

/// Average interval of states that are accepted from a launcher.
const STATE_INTERVAL: Duration = Duration::from_millis(10);
/// States that may follow each other at once: more than a start with a busy guest needs.
const STATE_BURST: u32 = 100;
/// Bytes that count as one state: more than a real one has. The largest states take far longer to read.
const STATE_SIZE: usize = 16 << 10;

/// Most CPUs, and longest topology of them, that a launcher can report. The status of a VMI has room for them.
const MOST_CPUS: usize = 4096;
const TOPOLOGY_LIMIT: usize = 256 << 10;

/// Input from a connection to a launcher.
#[derive(Debug)]
pub(crate) enum Report {
    /// The state after a change.
    State(Box<LauncherState>),
    /// The connection is lost. No further report follows.
    Lost(LauncherError),
}

/// Sends each state with the number of the connection, until the stream ends. The stream's flow control delays a launcher
/// that sends faster.
pub(crate) async fn follow(launcher: Launcher, connection: u64, reports: mpsc::Sender<(u64, Report)>) {
    let mut pace = Pace(Instant::now());
    let lost = match launcher.watch().await {
        Ok(mut states) => loop {
            match states.message().await {
                Ok(Some(mut state)) => {
                    let size = state.encoded_len();
                    keep(&mut state);
                    if reports.send((connection, Report::State(Box::new(state)))).await.is_err() {
                        return;
                    }
                    let wait = pace.after_one(Instant::now(), size);
                    if !wait.is_zero() {
                        tokio::time::sleep(wait).await;
                    }
                }
                Ok(None) => break LauncherError::Lost("closed by virt-launcher".into()),
                Err(status) => break LauncherError::Lost(status.code().description().to_owned()),
            }
        },
        Err(error) => error,
    };
    // The receiver may be gone.
    let _ = reports.send((connection, Report::Lost(lost))).await;
}

/// Time at which the accepted states are within the rate.
struct Pace(Instant);

impl Pace {
    /// Counts a state of so many bytes and returns the pause before the next one.
    fn after_one(&mut self, now: Instant, size: usize) -> Duration {
        let states = u32::try_from(size.div_ceil(STATE_SIZE).max(1)).unwrap_or(u32::MAX);
        self.0 = self.0.max(now) + STATE_INTERVAL * states;
        self.0.saturating_duration_since(now).saturating_sub(STATE_INTERVAL * STATE_BURST)
    }
}

/// Bounds a state: it stays in memory as long as the VMI, and parts of it are written to the status.
fn keep(state: &mut LauncherState) {
    state.reason = bounded(&state.reason);
    state.failure = bounded(&state.failure);
    cut(&mut state.interfaces);
    state.interfaces.iter_mut().for_each(|interface| cut(&mut interface.addresses));
    cut(&mut state.disks);
    cut(&mut state.disk_errors);
    cut(&mut state.nics);
    cut(&mut state.nic_queues);
    // Nothing here shows them.
    state.jobs = Vec::new();
    cut(&mut state.items);
    for item in &mut state.items {
        item.name = bounded(&item.name);
        item.message = bounded(&item.message);
    }
    state.agent.iter_mut().for_each(|agent| cut(&mut agent.commands));
    if let Some(migration) = &mut state.migration {
        // A part of them would describe another pod.
        if migration.cpus.len() > MOST_CPUS || migration.topology.len() > TOPOLOGY_LIMIT {
            (migration.cpus, migration.topology) = (Vec::new(), String::new());
        }
        migration.cpus.shrink_to_fit();
    }
    if let Some(panic) = &mut state.guest_panic {
        cut(&mut panic.values);
        panic.kind = bounded(&panic.kind);
        panic.values.iter_mut().for_each(|value| *value = bounded(value));
    }
}

#[cfg(test)]
mod tests {
    use protocol::{
        DiskError, DiskTarget, GuestAgent, GuestAgentCommand, GuestInterface, GuestPanic, ItemResult, JobReport,
        MigrationReport,
    };

    use super::*;
    use crate::launcher::client::LIST_LIMIT;

    #[test]
    fn cve_2026_13322_long_lists_of_a_launcher_are_cut() {
        const MANY: usize = 10_000;
        let interface = GuestInterface { addresses: vec![String::new(); MANY], ..GuestInterface::default() };
        let migration = MigrationReport { cpus: vec![1; MANY], topology: "{}".into(), ..MigrationReport::default() };
        let mut state = LauncherState {
            interfaces: [vec![interface], vec![GuestInterface::default(); MANY]].concat(),
            disks: vec![DiskTarget::default(); MANY],
            disk_errors: vec![DiskError::default(); MANY],
            items: vec![ItemResult::default(); MANY],
            agent: Some(GuestAgent { commands: vec![GuestAgentCommand::default(); MANY], ..GuestAgent::default() }),
            guest_panic: Some(GuestPanic { values: vec![String::new(); MANY], ..GuestPanic::default() }),
            nics: vec![String::new(); MANY],
            nic_queues: vec![1; MANY],
            jobs: vec![JobReport::default(); MANY],
            migration: Some(migration),
            ..LauncherState::default()
        };
        keep(&mut state);
        let migration = state.migration.unwrap();
        assert_eq!((migration.cpus.capacity(), migration.topology.as_str()), (0, ""));
        assert_eq!((state.nics.len(), state.nic_queues.len(), state.jobs.capacity()), (LIST_LIMIT, LIST_LIMIT, 0));
        let agent = state.agent.unwrap();
        let interfaces = &state.interfaces;
        let disks = [state.disks.len(), state.disk_errors.len(), state.items.len()];
        let values = state.guest_panic.unwrap().values.len();
        let lengths = [interfaces.len(), interfaces[0].addresses.len(), agent.commands.len(), values];
        assert_eq!((disks, lengths), ([LIST_LIMIT; 3], [LIST_LIMIT; 4]));
        assert!(state.interfaces.capacity() <= 2 * LIST_LIMIT);
    }

    #[test]
    fn cpus_of_a_launcher_are_kept_whole_or_not_at_all() {
        for (cpus, topology, kept) in
            [(MOST_CPUS, TOPOLOGY_LIMIT, true), (MOST_CPUS + 1, 1, false), (1, TOPOLOGY_LIMIT + 1, false)]
        {
            let (cpus, topology) = (vec![1; cpus], "x".repeat(topology));
            let sent = MigrationReport { cpus, topology, ..MigrationReport::default() };
            let mut state = LauncherState { migration: Some(sent.clone()), ..LauncherState::default() };
            keep(&mut state);
            let expected = if kept { sent } else { MigrationReport::default() };
            assert!(state.migration == Some(expected), "{kept}");
        }
    }

    #[test]
    fn texts_of_a_launcher_are_one_bounded_line() {
        let hostile = format!("a\nb\u{1b}[31m{}", "x".repeat(100_000));
        let mut state = LauncherState {
            reason: hostile.clone(),
            failure: hostile.clone(),
            items: vec![ItemResult { name: hostile.clone(), message: hostile.clone(), ..ItemResult::default() }],
            guest_panic: Some(GuestPanic { kind: hostile.clone(), values: vec![hostile] }),
            ..LauncherState::default()
        };
        keep(&mut state);
        let panic = state.guest_panic.unwrap();
        for text in [
            &state.reason,
            &state.failure,
            &state.items[0].name,
            &state.items[0].message,
            &panic.kind,
            &panic.values[0],
        ] {
            assert!(text.starts_with("a b") && text.chars().count() <= 1024);
            assert!(!text.chars().any(char::is_control));
        }
    }

    #[test]
    fn a_launcher_that_reports_without_end_is_delayed() {
        let start = Instant::now();
        let mut pace = Pace(start);
        for _ in 0..STATE_BURST {
            assert_eq!(pace.after_one(start, STATE_SIZE), Duration::ZERO);
        }
        assert_eq!(pace.after_one(start, 0), STATE_INTERVAL);
        assert_eq!(pace.after_one(start + STATE_INTERVAL, 1), STATE_INTERVAL);
        assert_eq!(pace.after_one(start + STATE_INTERVAL * 2, 8 * STATE_SIZE), STATE_INTERVAL * 8);
        assert_eq!(pace.after_one(start + Duration::from_secs(60), STATE_SIZE + 1), Duration::ZERO, "after a pause");
    }
}
