//! The desired status of a VMI.

use api::{
    VirtualMachineInstanceStatus, VmiPhase as Phase,
    vmi::{
        domain,
        memory::MemoryStatus,
        status::{VirtualMachineInstanceGuestOsInfo, VolumeStatus},
    },
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Time};
use protocol::{GuestInfo, LauncherState};

use super::{
    conditions::{self, Sync},
    desired::{self, Desired, Metadata},
    event::Event,
    hibernation, interfaces, migratability, migration, nics,
    observed::{Link, Now, Observed},
    phase::{self, Context, Domain, End},
    resize, volumes,
};

/// Duration without a connection after which a VMI is lost, if this virt-handler was connected before.
const LOST_AFTER: std::time::Duration = std::time::Duration::from_secs(30);
/// The same if it was never connected: the pod may be starting.
const NEVER_MET_AFTER: std::time::Duration = std::time::Duration::from_secs(180);
/// Time for the target of a migration to confirm that it runs the guest: as long as a node may be silent.
const TARGET_LIMIT: std::time::Duration = std::time::Duration::from_secs(300);
/// Duration of refused connections after which the condition shows them. A restarted worker is back much sooner.
const REFUSED_SHOWN: std::time::Duration = std::time::Duration::from_secs(10);
/// Longest text of the guest agent in the status.
const MAX_GUEST_TEXT: usize = 256;

/// Loss of a VMI whose launcher or domain has disappeared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// It is lost, for this reason.
    Lost(&'static str),
    /// It will be lost at this time.
    At(std::time::Duration),
    /// It is not lost.
    No,
}

/// Decides whether the VMI is lost.
pub(super) fn loss(observed: &Observed, now: Now) -> Loss {
    if !matches!(observed.facts.phase, Phase::Scheduled | Phase::Running) {
        return Loss::No;
    }
    // A launcher whose domain has moved away may end.
    if let Some(since) = observed.moved_since {
        let awaited = observed.source_migration().is_some_and(|migration| migration.target_pod_active);
        let (limit, reason) = match awaited {
            true => (TARGET_LIMIT, "the target of the migration has not taken the guest over"),
            false => (LOST_AFTER, "the guest has moved to a launcher that is gone"),
        };
        return lost_after(since + limit, reason, now);
    }
    let (since, limit, reason) = match &observed.link {
        Link::Up { .. } => match observed.no_domain_since {
            Some(since) => (since, LOST_AFTER, "the domain has disappeared from virt-launcher"),
            None => return Loss::No,
        },
        Link::Down { pod_missing_since: Some(since), .. } => (*since, LOST_AFTER, "the launcher pod is gone"),
        Link::Down { since, had: true, .. } => (*since, LOST_AFTER, "virt-launcher no longer answers"),
        Link::Down { since, .. } => (*since, NEVER_MET_AFTER, "virt-launcher does not answer"),
    };
    // A VMI that never ran may wait for its launcher as long as its pod exists.
    if observed.facts.phase == Phase::Scheduled && matches!(observed.link, Link::Down { had: false, .. }) {
        return Loss::No;
    }
    lost_after(since + limit, reason, now)
}

fn lost_after(at: std::time::Duration, reason: &'static str, now: Now) -> Loss {
    if now.since_start >= at { Loss::Lost(reason) } else { Loss::At(at) }
}

/// Returns the desired status; `None` if the status is up to date.
pub(super) fn desired(observed: &Observed, now: Now) -> Option<Desired> {
    if observed.facts.is_final() {
        return None;
    }
    let current = observed.vmi.status.clone().unwrap_or_default();
    let mut next = current.clone();
    let time = Time(now.wall);
    let domain = observed.domain();
    let lost = match loss(observed, now) {
        Loss::Lost(reason) => Some(reason),
        Loss::At(_) | Loss::No => None,
    };

    let says_nothing = matches!(domain, Domain::Unclear | Domain::None | Domain::Ended(End::Migrated));
    if let Some(report) = observed.report.as_ref().filter(|_| !says_nothing) {
        of_report(&mut next, observed, report, domain.is_alive(), &time);
    }
    volumes::apply(&mut next, observed, &time);
    hibernation::apply(next.hibernation.as_mut(), observed, now);
    let launcher_failure =
        observed.report.as_ref().map(|report| report.failure.as_str()).filter(|text| !text.is_empty());
    let failure = lost
        .or(launcher_failure)
        .or(hibernation::obstacle(observed))
        .or(observed.failure.as_ref().map(|failure| failure.message.as_str()))
        .or(nics::failure(observed).map(|failure| failure.message.as_str()))
        .or(match &observed.link {
            Link::Down { refused: Some(refused), .. } if now.since_start >= refused.since + REFUSED_SHOWN => {
                Some(refused.message.as_str())
            }
            Link::Down { .. } => None,
            Link::Up { .. } => None,
        });
    let sync = match failure {
        Some(message) => Sync::Failed(message),
        None if observed.unsupported_change => Sync::Unsupported,
        None => match (&observed.link, &observed.report) {
            // The results are on their way: those of the Sync before would show for a moment.
            (Link::Up { synced: Some(_), results_from, .. }, Some(report)) if report.sequence < *results_from => {
                Sync::Unknown
            }
            (_, Some(report)) if !report.items.is_empty() => Sync::Items(&report.items),
            (Link::Up { synced: Some(_), .. }, _) => Sync::Done,
            _ => Sync::Unknown,
        },
    };
    conditions::synchronized(&mut next.conditions, sync, &time);

    let permanent = lost.is_some()
        || launcher_failure.is_some()
        || observed.failure.as_ref().is_some_and(|failure| failure.permanent);
    let context = Context {
        ran: observed.ran,
        permanent,
        force_is_failure: observed.facts.grace != 0 && observed.report.as_ref().is_some_and(|report| report.acpi),
    };
    let current_phase = &observed.facts.phase;
    let next_phase = phase::next(current_phase, domain, context);
    // Scheduled is written together with Running, or with the failure that prevents Running.
    let is_intermediate = next_phase == Phase::Scheduled && failure.is_none();
    if next_phase != *current_phase && !is_intermediate {
        desired::enter(&mut next, next_phase.clone(), observed.hello_at, now.wall);
    }
    let mut metadata = Metadata::default();
    let ends = next.phase.as_ref().is_some_and(Phase::is_final);
    let failed = migration::source::apply(&mut next, &mut metadata, observed, ends, now);
    migration::completion::apply(&mut next, &mut metadata, observed, now);
    if next == current && metadata.is_empty() {
        return None;
    }
    let mut events = events(current_phase, next.phase.as_ref(), observed, &current, &next);
    events.extend(failed);
    let may_wait = metadata.is_empty() && may_wait(&current, &next);
    Some(Desired { status: next, metadata, events, may_wait })
}

fn of_report(
    next: &mut VirtualMachineInstanceStatus,
    observed: &Observed,
    report: &LauncherState,
    alive: bool,
    time: &Time,
) {
    for disk in report.disks.iter().take(observed.vmi.spec.volumes.len()) {
        // Only names of the object are written.
        if !observed.vmi.spec.volumes.iter().any(|volume| volume.name == disk.volume) {
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
    api::persistent_state::sort_volumes(&mut next.volume_status);
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
    let (network, in_domain) = (observed.network.as_deref(), nics::in_domain(&observed.link, report));
    next.interfaces = interfaces::merged(&observed.vmi, network, in_domain, &report.nic_queues, guest);
    let lacks_migration = observed.link.lacks_live_migration();
    conditions::of_domain(&mut next.conditions, &observed.vmi, lacks_migration, report, time);
    resize::apply(next, observed, report, time);
    resize::show_guest(next, observed, report, time);
    next.migration_method = Some(migratability::method(&observed.vmi).into());
    // The former value stays until this virt-handler has connected to the launcher.
    if observed.security_context.is_some() {
        next.selinux_context.clone_from(&observed.security_context);
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

/// Formats bytes as a Kubernetes quantity: the largest binary unit without a fraction.
fn quantity(bytes: u64) -> String {
    for (unit, shift) in [("Gi", 30), ("Mi", 20), ("Ki", 10)] {
        if bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

fn events(
    before: &Phase,
    after: Option<&Phase>,
    observed: &Observed,
    current: &VirtualMachineInstanceStatus,
    next: &VirtualMachineInstanceStatus,
) -> Vec<Event> {
    let mut list = volumes::events(current, next);
    list.extend(resize::events(current, next));
    match after {
        Some(phase) if phase == before => {}
        Some(Phase::Running) => list.push(Event::normal("Started", "VirtualMachineInstance started.")),
        Some(Phase::Succeeded) => {
            list.push(Event::normal("Stopped", "The VirtualMachineInstance was shut down."));
        }
        Some(Phase::Failed) => {
            list.push(Event::warning("Stopped", "The VirtualMachineInstance crashed."));
        }
        _ => {}
    }
    if let Some(pause) =
        next.condition("Paused").filter(|pause| pause.reason.as_deref() == Some(conditions::PAUSED_BY_DISK))
        && !current.condition("Paused").is_some_and(|known| known.says_same(pause))
    {
        list.extend(disk_errors(observed));
    }
    if let Some(reported) = next.condition(conditions::CREDENTIALS)
        && !current.condition(conditions::CREDENTIALS).is_some_and(|known| known.says_same(reported))
    {
        list.push(if reported.is_true() {
            Event::normal("AccessCredentialsSyncSuccess", "Access credentials sync successful.")
        } else {
            let message = reported.message.as_deref().unwrap_or_default();
            Event::warning("AccessCredentialsSyncFailed", format!("Access credentials sync failed: {message}"))
        });
    }
    let evictable = matches!(observed.vmi.spec.eviction_strategy, Some(api::EvictionStrategy::LiveMigrate));
    if let Some(condition) = next.condition("LiveMigratable").filter(|condition| evictable && condition.is_false())
        && !current.condition("LiveMigratable").is_some_and(|known| known.says_same(condition))
    {
        list.push(Event::warning(
            "Migrated",
            format!(
                "EvictionStrategy is set but vmi is not migratable; {}",
                condition.message.as_deref().unwrap_or_default()
            ),
        ));
    }
    list
}

/// Returns an event for each disk whose I/O errors paused the guest. Only names of the object are used.
fn disk_errors(observed: &Observed) -> Vec<Event> {
    let Some(report) = &observed.report else { return Vec::new() };
    let volumes = observed.vmi.spec.volumes.iter().map(|volume| &volume.name);
    volumes
        .filter_map(|name| {
            let message = if report.disk_errors.iter().find(|error| error.volume == *name)?.no_space {
                format!("VM Paused due to not enough space on volume: {name}")
            } else {
                format!("VM Paused due to IO error at the volume: {name}")
            };
            Some(Event::warning("IOerror", message))
        })
        .collect()
}

/// Returns true if only changes by the guest itself differ.
fn may_wait(current: &VirtualMachineInstanceStatus, next: &VirtualMachineInstanceStatus) -> bool {
    let without_guest = |status: &VirtualMachineInstanceStatus| {
        let mut status = status.clone();
        status.conditions.retain(|condition| !conditions::GUEST_DRIVEN.contains(&condition.type_.as_str()));
        status.guest_os_info = VirtualMachineInstanceGuestOsInfo::default();
        status.interfaces = Vec::new();
        // The size that was requested of the guest is not its own change.
        status.memory = status.memory.take().filter(|memory| memory.guest_requested.is_some());
        if let Some(memory) = &mut status.memory {
            memory.guest_current = None;
        }
        status
    };
    without_guest(current) == without_guest(next)
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
