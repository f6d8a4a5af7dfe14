//! The conditions that the agent keeps on a machine.

use api::{Condition, VirtualMachineInstance, condition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{Lifecycle, MachineState};

use super::{migratability, phase::simplified};

const AGENT_CONNECTED: &str = "AgentConnected";
const PAUSED: &str = "Paused";
const LIVE_MIGRATABLE: &str = "LiveMigratable";
const STORAGE_LIVE_MIGRATABLE: &str = "StorageLiveMigratable";
const SYNCHRONIZED: &str = "Synchronized";
/// Reason of a failed synchronization, as the reference spells it.
const SYNC_FAILED: &str = "Synchronizing with the Domain failed.";

/// Conditions that follow what the guest does by itself; a change of only these may wait a little.
pub const GUEST_DRIVEN: &[&str] = &[AGENT_CONNECTED];

/// A failure shows while it lasts; a success takes it away.
pub fn synchronized(list: &mut Vec<Condition>, failure: Option<&str>, succeeded: bool, now: &Time) {
    match failure {
        Some(message) => {
            condition::set(list, Condition::new(SYNCHRONIZED, false, SYNC_FAILED, message, now));
        }
        None if succeeded => {
            condition::remove(list, SYNCHRONIZED);
        }
        None => {}
    }
}

/// What follows from the running domain.
pub fn of_domain(list: &mut Vec<Condition>, vmi: &VirtualMachineInstance, report: &MachineState, now: &Time) {
    paused(list, report, now);
    if report.guest_agent_connected {
        let mut connected = Condition::new(AGENT_CONNECTED, true, "", "", now);
        connected.last_probe_time = Some(now.clone());
        condition::set(list, connected);
    } else {
        condition::remove(list, AGENT_CONNECTED);
    }
    migratable(list, vmi, now);
}

/// What a domain that has ended leaves behind: neither a pause nor an agent.
pub fn ended(list: &mut Vec<Condition>) {
    condition::remove(list, PAUSED);
    condition::remove(list, AGENT_CONNECTED);
}

/// Shown with the reason of the pause that was seen first; gone as soon as the machine is not paused.
fn paused(list: &mut Vec<Condition>, report: &MachineState, now: &Time) {
    if report.lifecycle() != Lifecycle::Paused {
        condition::remove(list, PAUSED);
        return;
    }
    if list.iter().any(|known| known.type_ == PAUSED) {
        return;
    }
    let (reason, message) = match simplified(&report.reason).as_str() {
        "user" => ("PausedByUser", "VMI was paused by user"),
        "ioerror" => ("PausedIOError", "VMI was paused, low-level IO error detected"),
        _ => return,
    };
    condition::set(list, Condition::new(PAUSED, true, reason, message, now));
}

fn migratable(list: &mut Vec<Condition>, vmi: &VirtualMachineInstance, now: &Time) {
    let obstacles = migratability::obstacles(vmi);
    match obstacles.first() {
        Some(first) => {
            condition::set(list, Condition::new(LIVE_MIGRATABLE, false, first.reason, &first.message, now));
        }
        None => {
            condition::set(list, Condition::new(LIVE_MIGRATABLE, true, "", "", now));
        }
    }
    let with_storage: Vec<String> = obstacles
        .iter()
        .filter(|obstacle| obstacle.with_storage)
        .map(|obstacle| format!("{}: {}", obstacle.reason, obstacle.message))
        .collect();
    let storage = if with_storage.is_empty() {
        Condition::new(STORAGE_LIVE_MIGRATABLE, true, "", "", now)
    } else {
        Condition::new(STORAGE_LIVE_MIGRATABLE, false, "NotMigratable", &with_storage.join(", "), now)
    };
    condition::set(list, storage);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    fn state(lifecycle: Lifecycle, reason: &str) -> MachineState {
        let mut state = MachineState { reason: reason.into(), ..MachineState::default() };
        state.set_lifecycle(lifecycle);
        state
    }

    #[test]
    fn pause_shows_its_first_reason_and_goes_with_the_pause() {
        let mut list = Vec::new();
        paused(&mut list, &state(Lifecycle::Paused, "IOERROR"), &at(1));
        assert_eq!(list[0].reason.as_deref(), Some("PausedIOError"));
        paused(&mut list, &state(Lifecycle::Paused, "user"), &at(2));
        assert_eq!(list[0].reason.as_deref(), Some("PausedIOError"));
        paused(&mut list, &state(Lifecycle::Running, "unpaused"), &at(3));
        assert!(list.is_empty());
        paused(&mut list, &state(Lifecycle::Paused, "starting-up"), &at(4));
        assert!(list.is_empty(), "a pause of the start is nobody's business");
    }

    #[test]
    fn a_failure_shows_until_a_success() {
        let mut list = Vec::new();
        synchronized(&mut list, Some("no disk"), false, &at(1));
        assert_eq!((list[0].status.as_str(), list[0].message.as_deref()), ("False", Some("no disk")));
        synchronized(&mut list, None, false, &at(2));
        assert_eq!(list.len(), 1);
        synchronized(&mut list, None, true, &at(3));
        assert!(list.is_empty());
    }
}
