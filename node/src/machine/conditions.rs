//! The conditions that the agent keeps on a machine.

use api::{Condition, VirtualMachineInstance, condition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{GuestAgent, Lifecycle, MachineState};

use super::{migratability, phase::simplified};

const AGENT_CONNECTED: &str = "AgentConnected";
const AGENT_NOT_SUPPORTED: &str = "AgentVersionNotSupported";
const PAUSED: &str = "Paused";
const LIVE_MIGRATABLE: &str = "LiveMigratable";
const STORAGE_LIVE_MIGRATABLE: &str = "StorageLiveMigratable";
const SYNCHRONIZED: &str = "Synchronized";
/// Keys and passwords are in the guest as the machine's secrets have them.
pub const CREDENTIALS: &str = "AccessCredentialsSynchronized";
/// Longest message that is taken from a launcher.
const MAX_MESSAGE: usize = 1024;
/// Reason of a guest that stands still because of a disk.
pub const PAUSED_BY_DISK: &str = "PausedIOError";
/// Reason of a failed synchronization, as the reference spells it.
const SYNC_FAILED: &str = "Synchronizing with the Domain failed.";

/// Conditions that follow what the guest does by itself; a change of only these may wait a little.
pub const GUEST_DRIVEN: &[&str] = &[AGENT_CONNECTED, AGENT_NOT_SUPPORTED];

/// Commands that a guest agent has to have.
const BASIC: &[&str] = &[
    "guest-ping",
    "guest-get-time",
    "guest-info",
    "guest-shutdown",
    "guest-network-get-interfaces",
    "guest-get-fsinfo",
    "guest-get-host-name",
    "guest-get-users",
    "guest-get-timezone",
    "guest-get-osinfo",
];
/// Commands for public keys, if the machine has such credentials.
const KEYS: &[&str] =
    &["guest-ssh-get-authorized-keys", "guest-ssh-add-authorized-keys", "guest-ssh-remove-authorized-keys"];
/// Commands for passwords, if the machine has such credentials.
const PASSWORDS: &[&str] = &["guest-set-user-password"];

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
        supported(list, vmi, report, now);
    } else {
        condition::remove(list, AGENT_CONNECTED);
        condition::remove(list, AGENT_NOT_SUPPORTED);
    }
    credentials(list, report, now);
    migratable(list, vmi, now);
}

/// How the keys and passwords of the guest stand, if its agent has any to put there.
fn credentials(list: &mut Vec<Condition>, report: &MachineState, now: &Time) {
    let Some(told) = &report.access_credentials else { return };
    let message: String = told.message.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect();
    condition::set(list, Condition::new(CREDENTIALS, told.succeeded, "", &message, now));
}

/// What a domain that has ended leaves behind: neither a pause nor an agent.
pub fn ended(list: &mut Vec<Condition>) {
    condition::remove(list, PAUSED);
    condition::remove(list, AGENT_CONNECTED);
    condition::remove(list, AGENT_NOT_SUPPORTED);
}

/// Whether the guest agent can do what this machine needs; nothing is said before the agent has told.
fn supported(list: &mut Vec<Condition>, vmi: &VirtualMachineInstance, report: &MachineState, now: &Time) {
    let Some(agent) = &report.agent else { return };
    match missing(vmi, agent) {
        Some(reason) => {
            let mut condition = Condition::new(AGENT_NOT_SUPPORTED, true, reason, "", now);
            condition.last_probe_time = Some(now.clone());
            condition::set(list, condition);
        }
        None => {
            condition::remove(list, AGENT_NOT_SUPPORTED);
        }
    }
}

/// What the guest agent lacks, as the reference words it.
fn missing(vmi: &VirtualMachineInstance, agent: &GuestAgent) -> Option<&'static str> {
    let has = |wanted: &[&str]| {
        wanted.iter().all(|name| agent.commands.iter().any(|command| command.name == *name && command.enabled))
    };
    let credentials = &vmi.spec.access_credentials;
    let keys = credentials.iter().any(|credential| {
        credential.ssh_public_key.as_ref().is_some_and(|key| key.propagation_method.qemu_guest_agent.is_some())
    });
    let passwords = credentials.iter().any(|credential| credential.user_password.is_some());
    if !has(BASIC) {
        Some("This guest agent doesn't support required basic commands")
    } else if keys && !has(KEYS) {
        Some("This guest agent doesn't support required public key commands")
    } else if passwords && !has(PASSWORDS) {
        Some("This guest agent doesn't support required password commands")
    } else {
        None
    }
}

/// Whether the object shows the machine as paused.
pub fn is_paused(vmi: &VirtualMachineInstance) -> bool {
    vmi.condition(PAUSED).is_some_and(Condition::is_true)
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
        "ioerror" => (PAUSED_BY_DISK, "VMI was paused, low-level IO error detected"),
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
    use protocol::AccessCredentials;

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

    fn agent(commands: &[&[&str]]) -> GuestAgent {
        let commands = commands
            .concat()
            .into_iter()
            .map(|name| protocol::GuestAgentCommand { name: name.into(), enabled: true })
            .collect();
        GuestAgent { version: "10.0".into(), commands }
    }

    #[test]
    fn an_agent_has_to_do_what_the_machine_needs() {
        let plain = VirtualMachineInstance::default();
        let with = |credential: serde_json::Value| -> VirtualMachineInstance {
            let spec = serde_json::json!({"domain": {"devices": {}}, "accessCredentials": [credential]});
            serde_json::from_value(serde_json::json!({"metadata": {}, "spec": spec})).unwrap()
        };
        let keys = with(serde_json::json!({"sshPublicKey": {
            "source": {"secret": {"secretName": "s"}}, "propagationMethod": {"qemuGuestAgent": {"users": ["u"]}},
        }}));
        let password = with(serde_json::json!({"userPassword": {
            "source": {"secret": {"secretName": "s"}}, "propagationMethod": {"qemuGuestAgent": {}},
        }}));
        let basic = Some("This guest agent doesn't support required basic commands");
        for (vmi, commands, expected) in [
            (&plain, &[BASIC] as &[&[&str]], None),
            (&plain, &[], basic),
            (&plain, &[&BASIC[1..]], basic),
            (&keys, &[BASIC], Some("This guest agent doesn't support required public key commands")),
            (&keys, &[BASIC, KEYS], None),
            (&password, &[BASIC], Some("This guest agent doesn't support required password commands")),
            (&password, &[BASIC, PASSWORDS], None),
        ] {
            assert_eq!(missing(vmi, &agent(commands)), expected, "{commands:?}");
        }
        let mut off = agent(&[BASIC]);
        off.commands[0].enabled = false;
        assert_eq!(missing(&plain, &off), basic);
    }

    #[test]
    fn an_agent_that_has_not_told_is_not_judged_and_one_that_is_gone_neither() {
        let mut list = Vec::new();
        let vmi = VirtualMachineInstance::default();
        let mut report = state(Lifecycle::Running, "booted");
        report.guest_agent_connected = true;
        let names = |list: &[Condition]| -> Vec<String> { list.iter().map(|known| known.type_.clone()).collect() };
        of_domain(&mut list, &vmi, &report, &at(1));
        assert!(!names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
        report.agent = Some(agent(&[]));
        of_domain(&mut list, &vmi, &report, &at(2));
        assert!(names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
        report.guest_agent_connected = false;
        of_domain(&mut list, &vmi, &report, &at(3));
        assert!(!names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
    }

    #[test]
    fn the_guests_credentials_are_told_where_it_has_any() {
        let (mut list, vmi) = (Vec::new(), VirtualMachineInstance::default());
        let mut report = state(Lifecycle::Running, "booted");
        let told = |list: &[Condition]| {
            let known = list.iter().find(|known| known.type_ == CREDENTIALS)?;
            Some((known.status.clone(), known.message.clone().unwrap_or_default()))
        };
        of_domain(&mut list, &vmi, &report, &at(1));
        assert_eq!(told(&list), None);
        for (succeeded, message, status) in [(false, "Guest agent is offline", "False"), (true, "", "True")] {
            report.access_credentials = Some(AccessCredentials { succeeded, message: message.into() });
            of_domain(&mut list, &vmi, &report, &at(2));
            assert_eq!(told(&list), Some((status.to_owned(), message.to_owned())));
        }
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
