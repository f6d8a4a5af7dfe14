//! The conditions of a VMI that virt-handler writes.

use api::{
    Condition, StartStrategy, VirtualMachineInstance, condition,
    constants::{
        condition::{GUEST_MEMORY_PLUGGED, GUEST_VCPUS_ONLINE, SOFTWARE_EMULATION},
        reason::{CROSS_ARCHITECTURE_EMULATION, NOT_MIGRATABLE, PAUSED_BY_MIGRATION_MONITOR},
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{
    GuestAgent, ItemKind, ItemResult, LauncherState, Lifecycle, MigrationMode, MigrationStep, PATH_NOT_MOUNTED,
    features::Feature,
};

use super::{migratability, phase::simplified};
use crate::launcher::bounded;

const AGENT_CONNECTED: &str = "AgentConnected";
const AGENT_NOT_SUPPORTED: &str = "AgentVersionNotSupported";
const PAUSED: &str = "Paused";
const LIVE_MIGRATABLE: &str = "LiveMigratable";
const STORAGE_LIVE_MIGRATABLE: &str = "StorageLiveMigratable";
const SYNCHRONIZED: &str = "Synchronized";
/// Shows that keys and passwords of the guest equal the VMI's secrets.
pub(super) const CREDENTIALS: &str = "AccessCredentialsSynchronized";
/// Longest message of a launcher.
const MAX_MESSAGE: usize = 1024;
/// Reason and message of a pause by a user.
const PAUSED_BY_USER: (&str, &str) = ("PausedByUser", "VMI was paused by user");
/// Reason of a pause after an I/O error.
pub(super) const PAUSED_BY_DISK: &str = "PausedIOError";
/// Reason of a failed Sync, as in the reference.
const SYNC_FAILED: &str = "Synchronizing with the Domain failed.";
/// Reason of a failed Sync if nothing is mounted at a `containerPath`, as in the reference.
const NOTHING_MOUNTED: &str = "MissingVirtiofsContainers";
/// Reason if changes take effect at the next start.
const RESTART_REQUIRED: &str = "RestartRequired";
/// Reason if the launcher is of an older release.
const UNSUPPORTED: &str = "LauncherFeatureMissing";
/// Items that a message names.
const MAX_ITEMS: usize = 8;

/// Conditions that change by the guest itself. A write of only these may wait.
pub(super) const GUEST_DRIVEN: &[&str] =
    &[AGENT_CONNECTED, AGENT_NOT_SUPPORTED, GUEST_VCPUS_ONLINE, GUEST_MEMORY_PLUGGED];

/// Commands that every guest agent must provide.
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
/// Commands for SSH keys, needed by VMIs with such credentials.
const KEYS: &[&str] =
    &["guest-ssh-get-authorized-keys", "guest-ssh-add-authorized-keys", "guest-ssh-remove-authorized-keys"];
/// Commands for passwords, needed by VMIs with such credentials.
const PASSWORDS: &[&str] = &["guest-set-user-password"];

/// Result of the synchronization of the domain with the VMI.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sync<'a> {
    /// It failed with this message.
    Failed(&'a str),
    /// The spec changed, and the launcher does not apply such changes.
    Unsupported,
    /// These items are not in line with the spec.
    Items(&'a [ItemResult]),
    /// The domain is in line with the spec.
    Done,
    /// Unknown: the condition stays.
    Unknown,
}

/// Sets the condition `Synchronized`. It exists only while the domain is not in line with the VMI.
pub(super) fn synchronized(list: &mut Vec<Condition>, sync: Sync<'_>, now: &Time) {
    let (reason, message) = match sync {
        Sync::Failed(message) if message.contains(PATH_NOT_MOUNTED) => (NOTHING_MOUNTED, message.to_owned()),
        Sync::Failed(message) => (SYNC_FAILED, message.to_owned()),
        Sync::Unsupported => (UNSUPPORTED, unsupported_message()),
        Sync::Items(items) if items.iter().all(|item| item.needs_restart) => (RESTART_REQUIRED, items_message(items)),
        Sync::Items(items) => (SYNC_FAILED, items_message(items)),
        Sync::Done => {
            condition::remove(list, SYNCHRONIZED);
            return;
        }
        Sync::Unknown => return,
    };
    condition::set(list, Condition::new(SYNCHRONIZED, false, reason, &message, now));
}

/// Returns true if the object already shows that its launcher does not apply changes of the spec.
pub(super) fn shows_unsupported_change(vmi: &VirtualMachineInstance) -> bool {
    vmi.condition(SYNCHRONIZED).is_some_and(|known| known.reason.as_deref() == Some(UNSUPPORTED))
}

fn unsupported_message() -> String {
    format!(
        "virt-launcher does not support {}: changes of the spec take effect at the next start",
        Feature::ItemResults.name()
    )
}

/// Names each item with its error, failed ones first.
fn items_message(items: &[ItemResult]) -> String {
    let (restart, failed): (Vec<_>, Vec<_>) = items.iter().partition(|item| item.needs_restart);
    let mut parts: Vec<String> = failed.into_iter().chain(restart).take(MAX_ITEMS).map(item_text).collect();
    if items.len() > MAX_ITEMS {
        parts.push(format!("and {} more", items.len() - MAX_ITEMS));
    }
    bounded(&parts.join("; "))
}

fn item_text(item: &ItemResult) -> String {
    let kind = match item.kind() {
        ItemKind::Volume => "volume",
        ItemKind::Interface => "interface",
        ItemKind::Cpu => "CPU",
        ItemKind::Memory => "memory",
        ItemKind::Device => "device",
        ItemKind::Other | ItemKind::Unspecified => "domain",
    };
    let name = if item.name.is_empty() { String::new() } else { format!(" {}", item.name) };
    let when = if item.needs_restart { " (takes effect at the next start)" } else { "" };
    format!("{kind}{name}: {}{when}", item.message)
}

/// Sets the conditions of a running domain. `lacks_migration`: the launcher is of a release without live migration; `None` without
/// a connection.
pub(super) fn of_domain(
    list: &mut Vec<Condition>,
    vmi: &VirtualMachineInstance,
    lacks_migration: Option<bool>,
    report: &LauncherState,
    now: &Time,
) {
    paused(list, report, vmi.spec.start_strategy == Some(StartStrategy::Paused), now);
    let emulated = vmi.spec.is_arm64().then(|| {
        let message = "VM running with software emulation (host=amd64, guest=arm64)";
        Condition::new(SOFTWARE_EMULATION, true, CROSS_ARCHITECTURE_EMULATION, message, now)
    });
    condition::set_or_remove(list, SOFTWARE_EMULATION, emulated);
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
    migratable(list, vmi, lacks_migration, now);
}

/// Shows the result for keys and passwords, if the VMI has any.
fn credentials(list: &mut Vec<Condition>, report: &LauncherState, now: &Time) {
    let Some(credentials) = &report.access_credentials else { return };
    let message: String = credentials.message.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect();
    condition::set(list, Condition::new(CREDENTIALS, credentials.succeeded, "", &message, now));
}

/// Removes the conditions of a running domain after its end.
pub(super) fn ended(list: &mut Vec<Condition>) {
    condition::remove(list, PAUSED);
    list.retain(|condition| !GUEST_DRIVEN.contains(&condition.type_.as_str()));
}

/// Shows that the guest agent lacks commands that the VMI needs. Unknown until the guest agent has reported its commands.
fn supported(list: &mut Vec<Condition>, vmi: &VirtualMachineInstance, report: &LauncherState, now: &Time) {
    let Some(agent) = &report.agent else { return };
    let lacking = missing(vmi, agent).map(|reason| Condition {
        last_probe_time: Some(now.clone()),
        ..Condition::new(AGENT_NOT_SUPPORTED, true, reason, "", now)
    });
    condition::set_or_remove(list, AGENT_NOT_SUPPORTED, lacking);
}

/// Returns the commands that the guest agent lacks, in the words of the reference.
fn missing(vmi: &VirtualMachineInstance, agent: &GuestAgent) -> Option<&'static str> {
    let has = |commands: &[&str]| {
        commands.iter().all(|name| agent.commands.iter().any(|command| command.name == *name && command.enabled))
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

/// Returns true if the object shows the VMI as paused.
pub(super) fn is_paused(vmi: &VirtualMachineInstance) -> bool {
    vmi.condition(PAUSED).is_some_and(Condition::is_true)
}

/// Shows a pause with its first reason, and removes the condition when the VMI is not paused. `starts_paused`: its start strategy.
fn paused(list: &mut Vec<Condition>, report: &LauncherState, starts_paused: bool, now: &Time) {
    if report.lifecycle() != Lifecycle::Paused {
        condition::remove(list, PAUSED);
        return;
    }
    if list.iter().any(|known| known.type_ == PAUSED) {
        return;
    }
    let is_stopped_to_move = report
        .migration
        .as_ref()
        .is_some_and(|moving| moving.step() == MigrationStep::Copying && moving.mode() == MigrationMode::PausedCopy);
    let is_restored = report.migration.is_none() && report.memory_restore.as_ref().is_some_and(|file| file.ended);
    let (reason, message) = match simplified(&report.reason).as_str() {
        "user" | "migration" if is_stopped_to_move => {
            (PAUSED_BY_MIGRATION_MONITOR, "VMI was paused by the migration monitor")
        }
        "user" => PAUSED_BY_USER,
        // libvirt's reason until a guest that continues from saved memory runs.
        "migration" if starts_paused && is_restored => PAUSED_BY_USER,
        "ioerror" => (PAUSED_BY_DISK, "VMI was paused, low-level IO error detected"),
        _ => return,
    };
    condition::set(list, Condition::new(PAUSED, true, reason, message, now));
}

fn migratable(list: &mut Vec<Condition>, vmi: &VirtualMachineInstance, lacks_migration: Option<bool>, now: &Time) {
    // Without a connection the condition keeps what it shows of the launcher.
    let lacks_feature = lacks_migration.unwrap_or_else(|| {
        list.iter().any(|known| known.type_ == LIVE_MIGRATABLE && known.reason.as_deref() == Some(NOT_MIGRATABLE))
    });
    let obstacles = migratability::obstacles(vmi, lacks_feature);
    let live = obstacles.first().map_or_else(
        || Condition::new(LIVE_MIGRATABLE, true, "", "", now),
        |first| Condition::new(LIVE_MIGRATABLE, false, first.reason, &first.message, now),
    );
    condition::set(list, live);
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
    use protocol::{AccessCredentials, MemoryFile};

    use super::*;

    fn at(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    fn state(lifecycle: Lifecycle, reason: &str) -> LauncherState {
        let mut state = LauncherState { reason: reason.into(), ..LauncherState::default() };
        state.set_lifecycle(lifecycle);
        state
    }

    #[test]
    fn pause_shows_its_first_reason_and_goes_with_the_pause() {
        let mut list = Vec::new();
        paused(&mut list, &state(Lifecycle::Paused, "IOERROR"), false, &at(1));
        assert_eq!(list[0].reason.as_deref(), Some("PausedIOError"));
        paused(&mut list, &state(Lifecycle::Paused, "user"), false, &at(2));
        assert_eq!(list[0].reason.as_deref(), Some("PausedIOError"));
        paused(&mut list, &state(Lifecycle::Running, "unpaused"), false, &at(3));
        assert!(list.is_empty());
        paused(&mut list, &state(Lifecycle::Paused, "starting-up"), false, &at(4));
        assert!(list.is_empty(), "a pause during the start is not shown");
    }

    #[test]
    fn guest_that_continues_from_saved_memory_without_running_is_paused() {
        // Start strategy, its memory is restored, a migration; the condition is shown.
        for (starts_paused, ended, moves, is_shown) in [
            (true, true, false, true),
            (true, false, false, false),
            (false, true, false, false),
            // It is about to run at the other end.
            (true, true, true, false),
        ] {
            let mut report = state(Lifecycle::Paused, "migration");
            report.memory_restore = Some(MemoryFile { ended, ..MemoryFile::default() });
            report.migration = moves.then(Default::default);
            let mut list = Vec::new();
            paused(&mut list, &report, starts_paused, &at(1));
            assert_eq!(list.len(), usize::from(is_shown), "{starts_paused} {ended} {moves}");
        }
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
    fn a_guest_agent_must_provide_the_commands_that_the_vmi_needs() {
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
    fn commands_are_checked_only_while_a_guest_agent_reports_them() {
        let mut list = Vec::new();
        let vmi = VirtualMachineInstance::default();
        let mut report = state(Lifecycle::Running, "booted");
        report.guest_agent_connected = true;
        let names = |list: &[Condition]| -> Vec<String> { list.iter().map(|known| known.type_.clone()).collect() };
        of_domain(&mut list, &vmi, None, &report, &at(1));
        assert!(!names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
        report.agent = Some(agent(&[]));
        of_domain(&mut list, &vmi, None, &report, &at(2));
        assert!(names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
        report.guest_agent_connected = false;
        of_domain(&mut list, &vmi, None, &report, &at(3));
        assert!(!names(&list).contains(&AGENT_NOT_SUPPORTED.to_owned()));
    }

    #[test]
    fn credentials_are_shown_if_there_are_any() {
        let (mut list, vmi) = (Vec::new(), VirtualMachineInstance::default());
        let mut report = state(Lifecycle::Running, "booted");
        let shown = |list: &[Condition]| {
            let known = list.iter().find(|known| known.type_ == CREDENTIALS)?;
            Some((known.status.clone(), known.message.clone().unwrap_or_default()))
        };
        of_domain(&mut list, &vmi, None, &report, &at(1));
        assert_eq!(shown(&list), None);
        for (succeeded, message, status) in [(false, "Guest agent is offline", "False"), (true, "", "True")] {
            report.access_credentials = Some(AccessCredentials { succeeded, message: message.into() });
            of_domain(&mut list, &vmi, None, &report, &at(2));
            assert_eq!(shown(&list), Some((status.to_owned(), message.to_owned())));
        }
    }

    #[test]
    fn a_failure_shows_until_a_success() {
        let mut list = Vec::new();
        synchronized(&mut list, Sync::Failed("no disk"), &at(1));
        assert_eq!((list[0].status.as_str(), list[0].message.as_deref()), ("False", Some("no disk")));
        synchronized(&mut list, Sync::Unknown, &at(2));
        assert_eq!(list.len(), 1);
        synchronized(&mut list, Sync::Done, &at(3));
        assert!(list.is_empty());
    }

    #[test]
    fn a_path_of_the_container_that_nothing_is_mounted_at_has_its_own_reason() {
        let missing = format!("cannot share file system token: path /no/such/path {PATH_NOT_MOUNTED}");
        for (message, reason) in [(missing.as_str(), NOTHING_MOUNTED), ("no disk", SYNC_FAILED)] {
            let mut list = Vec::new();
            synchronized(&mut list, Sync::Failed(message), &at(1));
            assert!(list[0].is_false());
            assert_eq!((list[0].reason.as_deref(), list[0].message.as_deref()), (Some(reason), Some(message)));
        }
    }

    #[test]
    fn synchronized_names_each_item_that_is_not_in_line() {
        let item = |kind: ItemKind, name: &str, message: &str, needs_restart| ItemResult {
            kind: kind.into(),
            name: name.into(),
            message: message.into(),
            needs_restart,
        };
        let disk = item(ItemKind::Volume, "data", "no such file", false);
        let cpu = item(ItemKind::Cpu, "", "hotplug is off", true);
        let many = vec![disk.clone(); 10];
        for (items, reason, message) in [
            (vec![disk.clone()], SYNC_FAILED, "volume data: no such file".to_owned()),
            (vec![cpu.clone()], RESTART_REQUIRED, "CPU: hotplug is off (takes effect at the next start)".to_owned()),
            (
                vec![cpu, disk],
                SYNC_FAILED,
                "volume data: no such file; CPU: hotplug is off (takes effect at the next start)".to_owned(),
            ),
            (many, SYNC_FAILED, format!("{}and 2 more", "volume data: no such file; ".repeat(8))),
        ] {
            let mut list = Vec::new();
            synchronized(&mut list, Sync::Items(&items), &at(1));
            assert_eq!((list[0].reason.as_deref(), list[0].message.clone()), (Some(reason), Some(message)));
            assert!(list[0].is_false());
        }
    }

    #[test]
    fn a_launcher_without_item_results_is_named() {
        let mut list = Vec::new();
        synchronized(&mut list, Sync::Unsupported, &at(1));
        let message = "virt-launcher does not support item-results: changes of the spec take effect at the next start";
        assert_eq!(list[0].message.as_deref(), Some(message));
        let status = api::VirtualMachineInstanceStatus { conditions: list, ..Default::default() };
        let vmi = VirtualMachineInstance { status: Some(status), ..VirtualMachineInstance::default() };
        assert!(shows_unsupported_change(&vmi));
    }
}
