//! The status that a machine's object should have.

use api::{
    VirtualMachineInstanceStatus, VmiPhase as Phase,
    vmi::{
        domain,
        memory::MemoryStatus,
        status::{VirtualMachineInstanceGuestOsInfo, VirtualMachineInstancePhaseTransitionTimestamp, VolumeStatus},
    },
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Time};
use protocol::{GuestInfo, MachineState};

use super::{
    conditions, interfaces, migratability,
    phase::{self, Circumstances, Domain},
    state::{Announcement, Link, Machine, Now},
};

/// Silence of a machine that this agent has been connected to, after which it is lost.
const LOST_AFTER: std::time::Duration = std::time::Duration::from_secs(30);
/// The same where this agent has not been connected to it: its pod may be starting.
const NEVER_MET_AFTER: std::time::Duration = std::time::Duration::from_secs(180);
/// A launcher that refuses connections this long is worth telling; a worker that is restarted is back much sooner.
const TROUBLE_SHOWS: std::time::Duration = std::time::Duration::from_secs(10);
/// Longest text taken from the guest agent.
const MAX_GUEST_TEXT: usize = 256;

/// The status that should be, and what users should read about the change.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The whole status.
    pub status: VirtualMachineInstanceStatus,
    /// Said once it has been written.
    pub announcements: Vec<Announcement>,
    /// Only what the guest does by itself differs, so that the write may wait.
    pub may_wait: bool,
}

/// Why the machine counts as lost, if it does, and otherwise when it will.
pub fn lost(machine: &Machine, now: Now) -> Result<&'static str, Option<std::time::Duration>> {
    if !matches!(machine.facts.phase, Phase::Scheduled | Phase::Running) {
        return Err(None);
    }
    let (since, limit, why) = match &machine.link {
        Link::Up { .. } => match machine.vanished_since {
            Some(since) => (since, LOST_AFTER, "the launcher has lost the machine"),
            None => return Err(None),
        },
        Link::Down { pod_missing_since: Some(since), .. } => (*since, LOST_AFTER, "the launcher's pod is gone"),
        Link::Down { since, had: true, .. } => (*since, LOST_AFTER, "the launcher does not answer any more"),
        Link::Down { since, .. } => (*since, NEVER_MET_AFTER, "the launcher does not answer"),
    };
    // A machine that is only being started may wait for its launcher as long as its pod does.
    if machine.facts.phase == Phase::Scheduled && matches!(machine.link, Link::Down { had: false, .. }) {
        return Err(None);
    }
    if now.since_start >= since + limit { Ok(why) } else { Err(Some(since + limit)) }
}

/// The status that should be; `None` when it is what it should be.
pub fn wanted(machine: &Machine, now: Now) -> Option<Wanted> {
    if machine.facts.is_final() {
        return None;
    }
    let current = machine.vmi.status.clone().unwrap_or_default();
    let mut next = current.clone();
    let time = Time(now.wall);
    let domain = machine.domain();
    let lost = lost(machine, now).ok();

    if let Some(report) = machine.report.as_ref().filter(|_| !matches!(domain, Domain::Unclear | Domain::None)) {
        of_report(&mut next, machine, report, domain.is_alive(), &time);
    }
    let launcher_failure =
        machine.report.as_ref().map(|report| report.failure.as_str()).filter(|text| !text.is_empty());
    let failure = lost.or(launcher_failure).or(machine.failure.as_ref().map(|failure| failure.message.as_str())).or(
        match &machine.link {
            Link::Down { trouble: Some(trouble), .. } if now.since_start >= trouble.since + TROUBLE_SHOWS => {
                Some(trouble.message.as_str())
            }
            Link::Down { .. } => None,
            Link::Up { .. } => None,
        },
    );
    let succeeded = matches!(&machine.link, Link::Up { synced: Some(_), .. });
    conditions::synchronized(&mut next.conditions, failure, succeeded, &time);

    let hopeless = lost.is_some()
        || launcher_failure.is_some()
        || machine.failure.as_ref().is_some_and(|failure| failure.hopeless);
    let around = Circumstances {
        ran: machine.ran,
        hopeless,
        force_is_failure: machine.facts.grace != 0 && machine.report.as_ref().is_some_and(|report| report.acpi),
    };
    let current_phase = &machine.facts.phase;
    let next_phase = phase::next(current_phase, domain, around);
    // The step to Scheduled is recorded together with Running, or with the failure that keeps it from Running.
    let on_the_way = next_phase == Phase::Scheduled && failure.is_none();
    if next_phase != *current_phase && !on_the_way {
        transitions(&mut next, &next_phase, machine, now);
        next.phase = Some(next_phase.clone());
    }
    if next == current {
        return None;
    }
    let announcements = announcements(current_phase, next.phase.as_ref(), machine, &current, &next);
    let may_wait = may_wait(&current, &next);
    Some(Wanted { status: next, announcements, may_wait })
}

fn of_report(
    next: &mut VirtualMachineInstanceStatus,
    machine: &Machine,
    report: &MachineState,
    alive: bool,
    time: &Time,
) {
    for disk in report.disks.iter().take(machine.vmi.spec.volumes.len()) {
        // Names come from the object, never from the launcher.
        if !machine.vmi.spec.volumes.iter().any(|volume| volume.name == disk.volume) {
            continue;
        }
        let position = match next.volume_status.iter().position(|entry| entry.name == disk.volume) {
            Some(position) => position,
            None => {
                next.volume_status.push(VolumeStatus { name: disk.volume.clone(), ..VolumeStatus::default() });
                next.volume_status.len() - 1
            }
        };
        let entry = &mut next.volume_status[position];
        entry.target = bounded(&disk.target);
        if disk.size > 0 {
            entry.size = i64::try_from(disk.size).ok();
        }
    }
    next.volume_status.sort_by(|left, right| left.name.cmp(&right.name));
    if let Some(guest) = report.guest.as_ref().filter(|guest| !guest.name.is_empty()) {
        next.guest_os_info = guest_os(guest);
    }
    match report.file_systems.as_str() {
        "" => {}
        "thawed" => next.fs_freeze_status = None,
        status => next.fs_freeze_status = Some(bounded(status)),
    }
    if !report.machine_type.is_empty() {
        next.machine = Some(domain::Machine { type_: bounded(&report.machine_type) });
    }
    if report.memory_current > 0 {
        let memory = next.memory.get_or_insert_with(MemoryStatus::default);
        memory.guest_current = Some(Quantity(quantity(report.memory_current)));
    }
    if !alive {
        conditions::ended(&mut next.conditions);
        return;
    }
    let guest = if report.guest_agent_connected { report.interfaces.as_slice() } else { &[] };
    next.interfaces = interfaces::merged(&machine.vmi, machine.network.as_deref(), guest);
    conditions::of_domain(&mut next.conditions, &machine.vmi, report, time);
    next.migration_method = Some(migratability::method(&machine.vmi).into());
    // What it was before counts until this agent has seen the launcher.
    if machine.security_context.is_some() {
        next.selinux_context.clone_from(&machine.security_context);
    }
}

fn guest_os(guest: &GuestInfo) -> VirtualMachineInstanceGuestOsInfo {
    let text = |value: &str| (!value.is_empty()).then(|| bounded(value));
    VirtualMachineInstanceGuestOsInfo {
        name: text(&guest.name),
        kernel_release: text(&guest.kernel_release),
        version: text(&guest.version),
        pretty_name: text(&guest.pretty_name),
        version_id: text(&guest.version_id),
        kernel_version: text(&guest.kernel_version),
        machine: text(&guest.machine),
        id: text(&guest.id),
    }
}

/// Bytes as Kubernetes writes quantities: the largest binary unit without a fraction.
fn quantity(bytes: u64) -> String {
    for (unit, shift) in [("Gi", 30), ("Mi", 20), ("Ki", 10)] {
        if bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

fn transitions(next: &mut VirtualMachineInstanceStatus, phase: &Phase, machine: &Machine, now: Now) {
    let list = &mut next.phase_transition_timestamps;
    let mut add = |phase: Phase, at: jiff::Timestamp| {
        if !list.iter().any(|known| known.phase.as_ref() == Some(&phase)) {
            list.push(VirtualMachineInstancePhaseTransitionTimestamp {
                phase: Some(phase),
                phase_transition_timestamp: Some(Time(at)),
            });
        }
    };
    if let Some(hello_at) = machine.hello_at {
        add(Phase::Scheduled, hello_at);
    }
    add(phase.clone(), now.wall);
}

fn announcements(
    before: &Phase,
    after: Option<&Phase>,
    machine: &Machine,
    current: &VirtualMachineInstanceStatus,
    next: &VirtualMachineInstanceStatus,
) -> Vec<Announcement> {
    let mut list = Vec::new();
    match after {
        Some(phase) if phase == before => {}
        Some(Phase::Running) => list.push(Announcement::normal("Started", "VirtualMachineInstance started.")),
        Some(Phase::Succeeded) => {
            list.push(Announcement::normal("Stopped", "The VirtualMachineInstance was shut down."));
        }
        Some(Phase::Failed) => {
            list.push(Announcement::warning("Stopped", "The VirtualMachineInstance crashed."));
        }
        _ => {}
    }
    if let Some(pause) =
        next.condition("Paused").filter(|pause| pause.reason.as_deref() == Some(conditions::PAUSED_BY_DISK))
        && !current.condition("Paused").is_some_and(|known| known.says_same(pause))
    {
        list.extend(disk_errors(machine));
    }
    if let Some(told) = next.condition(conditions::CREDENTIALS)
        && !current.condition(conditions::CREDENTIALS).is_some_and(|known| known.says_same(told))
    {
        list.push(if told.is_true() {
            Announcement::normal("AccessCredentialsSyncSuccess", "Access credentials sync successful.")
        } else {
            let message = told.message.as_deref().unwrap_or_default();
            Announcement::warning("AccessCredentialsSyncFailed", format!("Access credentials sync failed: {message}"))
        });
    }
    let evictable = matches!(machine.vmi.spec.eviction_strategy, Some(api::EvictionStrategy::LiveMigrate));
    if let Some(condition) = next.condition("LiveMigratable").filter(|condition| evictable && condition.is_false())
        && !current.condition("LiveMigratable").is_some_and(|known| known.says_same(condition))
    {
        list.push(Announcement::warning(
            "Migrated",
            format!(
                "EvictionStrategy is set but vmi is not migratable; {}",
                condition.message.as_deref().unwrap_or_default()
            ),
        ));
    }
    list
}

/// The disks that a guest stands still for. Names come from the object, never from the launcher.
fn disk_errors(machine: &Machine) -> Vec<Announcement> {
    let Some(report) = &machine.report else { return Vec::new() };
    let volumes = machine.vmi.spec.volumes.iter().map(|volume| &volume.name);
    volumes
        .filter_map(|name| {
            let message = if report.disk_errors.iter().find(|error| error.volume == *name)?.no_space {
                format!("VM Paused due to not enough space on volume: {name}")
            } else {
                format!("VM Paused due to IO error at the volume: {name}")
            };
            Some(Announcement::warning("IOerror", message))
        })
        .collect()
}

/// True when nothing differs but what the guest does by itself.
fn may_wait(current: &VirtualMachineInstanceStatus, next: &VirtualMachineInstanceStatus) -> bool {
    let calm = |status: &VirtualMachineInstanceStatus| {
        let mut status = status.clone();
        status.conditions.retain(|condition| !conditions::GUEST_DRIVEN.contains(&condition.type_.as_str()));
        status.guest_os_info = VirtualMachineInstanceGuestOsInfo::default();
        status.interfaces = Vec::new();
        status.memory = None;
        status
    };
    calm(current) == calm(next)
}

fn bounded(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_GUEST_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_in_the_largest_whole_unit() {
        assert_eq!(quantity(1 << 30), "1Gi");
        assert_eq!(quantity(1536 << 20), "1536Mi");
        assert_eq!(quantity(1 << 10), "1Ki");
        assert_eq!(quantity(1000), "1000");
    }

    #[test]
    fn text_of_the_guest_is_bounded() {
        assert_eq!(bounded(&"y".repeat(10_000)).len(), MAX_GUEST_TEXT);
        assert_eq!(bounded("Debian\u{7}\n12"), "Debian12");
    }
}
