//! The form of the state that virt-handler sees.

use std::{collections::BTreeSet, sync::Arc};

use protocol::{
    DiskError, DiskTarget, GuestPanic, ItemKind, ItemResult, LauncherState, Lifecycle, MigrationMode, MigrationReport,
    MigrationStep,
};

use super::{
    base::Base,
    effect::Effect,
    migration::{MigrationEnd, MigrationRecord},
    request::{RequestError, RequestId},
};
use crate::{
    domain::{diff::Item, parse::DomainConfig},
    guest_agent::GuestFacts,
    hypervisor::{DiskFailure, DomainFacts},
    migration::ChannelMode,
};

/// Begin of the error of a device that the guest has not released.
const NOT_RELEASED: &str = "the guest has not released";

impl Base {
    /// Publishes a domain that was read. Returns true if it has changed.
    pub(crate) fn publish_facts(&mut self, facts: &DomainFacts, active: DomainConfig, connected: bool) -> bool {
        let over = is_over(facts.lifecycle);
        let published = &mut self.published;
        let changed = published.lifecycle() != facts.lifecycle || *self.active != active;
        published.set_lifecycle(facts.lifecycle);
        published.reason = facts.reason.into();
        published.guest_agent_connected = connected;
        if !connected {
            forget_guest(published);
        }
        // A domain that has ended has no XML, and a later worker has not started it.
        self.acpi |= active.acpi;
        published.acpi = self.acpi;
        if over || active.machine_type.is_empty() {
            return changed;
        }
        published.machine_type.clone_from(&active.machine_type);
        published.software_emulation = active.software_emulation;
        // Without a memory device, a balloon may hold some of the guest's memory.
        let with_device = |boot: u64| Some(boot.saturating_add(active.memory_device.as_ref()?.current));
        published.memory_current = active.memory.and_then(with_device).unwrap_or(facts.memory);
        published.memory_requested = active.memory_requested().unwrap_or(0);
        published.vcpus = active.vcpus.unwrap_or(0);
        (published.nics, published.nic_queues) = (active.nics(), active.nic_queues());
        published.disks = active.disk_targets();
        published.disk_errors = errors_by_volume(&facts.disk_errors, &published.disks);
        for disk in &mut published.disks {
            let made = self.disk_sizes.iter().find(|made| made.volume == disk.volume);
            disk.size = made.map_or(0, |made| made.size);
        }
        self.active = Arc::new(active);
        self.forget_released();
        changed
    }

    /// Publishes the guest agent's facts.
    pub(crate) fn publish_guest(&mut self, facts: GuestFacts) {
        let published = &mut self.published;
        published.silences = facts.silences;
        if published.guest_agent_connected {
            published.guest = facts.guest;
            published.interfaces = facts.interfaces;
            published.agent = facts.agent;
            published.file_systems = facts.file_systems;
            published.online_vcpus = facts.online_vcpus;
        }
    }

    /// Publishes a crash of the guest's kernel. The guest goes on if it writes a dump of its own.
    pub(crate) fn publish_crash(&mut self, panic: GuestPanic) {
        tracing::warn!(kind = panic.kind, "the guest's kernel has crashed");
        self.published.guest_panics = self.published.guest_panics.saturating_add(1);
        self.published.guest_panic = Some(panic);
    }

    /// Returns the items of devices that the guest has not released.
    pub(crate) fn unreleased(&self) -> Vec<ItemResult> {
        self.detaching.iter().map(|item| item.failed(not_released(item))).collect()
    }

    /// Forgets the devices that the guest has released, and their items.
    fn forget_released(&mut self) {
        let active: BTreeSet<Item> = pluggable(&self.active).collect();
        let released: Vec<Item> = self.detaching.difference(&active).cloned().collect();
        for item in released {
            let noun = noun(&item);
            tracing::info!(device = item.name, "the guest has released {noun}");
            self.detaching.remove(&item);
            let is_of_device = |result: &ItemResult| {
                result.kind() == item.kind && result.name == item.name && result.message.starts_with(NOT_RELEASED)
            };
            self.published.items.retain(|result| !is_of_device(result));
            // Wanted again meanwhile: the item makes virt-handler repeat the Sync.
            if self.wanted_devices.contains(&item) {
                let message = format!("the guest has released {noun}, which will be attached again");
                self.published.items.push(item.failed(message));
            }
        }
    }

    /// Returns a report of a migration that begins now.
    pub(crate) fn new_report(&self, migration: &str, step: MigrationStep) -> MigrationReport {
        let begin = self.nanoseconds();
        MigrationReport { migration: migration.to_owned(), step: step.into(), begin, ..MigrationReport::default() }
    }

    /// Returns how the guest of the published migration leaves.
    pub(crate) fn migration_mode(&self) -> MigrationMode {
        self.published.migration.as_ref().map_or(MigrationMode::PreCopy, MigrationReport::mode)
    }

    /// Publishes how the guest leaves.
    pub(crate) fn publish_mode(&mut self, mode: MigrationMode) {
        if let Some(report) = &mut self.published.migration {
            report.set_mode(mode);
        }
    }

    /// Publishes the step of a migration, and keeps it in its record.
    pub(crate) fn publish_step(
        &mut self,
        step: MigrationStep,
        direction: MigrationEnd,
        paused: bool,
        channels: ChannelMode,
    ) {
        let now = self.nanoseconds();
        let Some(report) = &mut self.published.migration else { return };
        report.set_step(step);
        if matches!(step, MigrationStep::Moved | MigrationStep::NotMoved) {
            report.end = now;
        }
        let record = MigrationRecord::of(report, direction, paused);
        self.effects.push(Effect::SaveMigration(Box::new(record), channels));
    }

    /// Publishes the failure of a migration, which its last step follows.
    pub(crate) fn publish_failure(&mut self, failure: String, aborted: bool) {
        if let Some(report) = &mut self.published.migration {
            (report.failure, report.aborted) = (failure, aborted);
        }
    }

    /// Answers a request to abort a migration, and publishes its failure.
    pub(crate) fn answer_abort(&mut self, id: RequestId, result: Result<(), RequestError>) {
        if let (Err(error), Some(report)) = (&result, &mut self.published.migration) {
            report.abort_failure = error.to_string();
        }
        self.answer(id, result.map(|()| false));
    }
}

/// Returns true for the state of a domain that does not run any more.
pub(crate) fn is_over(lifecycle: Lifecycle) -> bool {
    matches!(lifecycle, Lifecycle::Shutoff | Lifecycle::Crashed | Lifecycle::NoDomain)
}

/// Returns true for the reason of a domain whose memory is not at one place.
pub(crate) fn is_apart(reason: &str) -> bool {
    matches!(reason, "postcopy" | "postcopyFailed")
}

/// Returns the disks and interfaces of a domain.
pub(crate) fn pluggable(config: &DomainConfig) -> impl Iterator<Item = Item> {
    let disks = config.disks.iter().map(|disk| Item::new(ItemKind::Volume, &disk.name));
    disks.chain(config.interfaces.iter().map(|interface| Item::new(ItemKind::Interface, &interface.name)))
}

/// Returns the noun for a disk or interface.
pub(crate) fn noun(item: &Item) -> &'static str {
    if item.kind == ItemKind::Volume { "the disk" } else { "the interface" }
}

/// Returns the error of a device that the guest has not released.
pub(crate) fn not_released(item: &Item) -> String {
    format!("{NOT_RELEASED} {} yet", noun(item))
}

/// Clears the facts of a guest agent that is disconnected.
pub(super) fn forget_guest(state: &mut LauncherState) {
    state.guest = None;
    state.interfaces.clear();
    state.agent = None;
    state.file_systems.clear();
    state.online_vcpus = 0;
}

/// Reports a guest stopped by a disk error. Other pauses are requested or end by themselves.
pub(crate) fn waits_for_disk(lifecycle: Lifecycle, reason: &str) -> bool {
    lifecycle == Lifecycle::Paused && reason == "ioError"
}

/// Returns true for a state in which a guest agent may not answer: no guest runs yet, or it is paused or being migrated.
pub(crate) fn may_be_silent(state: &LauncherState) -> bool {
    const REASONS: [&str; 9] =
        ["user", "migration", "save", "dump", "fromSnapshot", "shuttingDown", "snapshot", "startingUp", "postcopy"];
    let is_silent = match state.lifecycle() {
        Lifecycle::NoDomain => true,
        Lifecycle::Paused => REASONS.contains(&state.reason.as_str()),
        _ => false,
    };
    let step = state.migration.as_ref().map(MigrationReport::step);
    is_silent || matches!(step, Some(MigrationStep::Copying | MigrationStep::Releasing))
}

/// Returns disk errors by volume. Disks without a volume are left out.
fn errors_by_volume(errors: &[(String, DiskFailure)], disks: &[DiskTarget]) -> Vec<DiskError> {
    let volume = |target: &str| disks.iter().find(|disk| disk.target == target).map(|disk| disk.volume.clone());
    errors
        .iter()
        .filter_map(|(target, failure)| {
            Some(DiskError { volume: volume(target)?, no_space: *failure == DiskFailure::NoSpace })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_guest_stopped_by_a_disk_error_is_resumed() {
        for (state, reason, waits) in [
            (Lifecycle::Paused, "ioError", true),
            (Lifecycle::Paused, "user", false),
            (Lifecycle::Paused, "startingUp", false),
            (Lifecycle::Running, "ioError", false),
            (Lifecycle::Running, "booted", false),
        ] {
            assert_eq!(waits_for_disk(state, reason), waits, "{state:?} {reason}");
        }
    }

    #[test]
    fn a_paused_guest_may_be_silent() {
        for (lifecycle, reason, step, excused) in [
            (Lifecycle::NoDomain, "", None, true),
            (Lifecycle::Paused, "user", None, true),
            (Lifecycle::Paused, "ioError", None, false),
            (Lifecycle::Running, "booted", None, false),
            (Lifecycle::Shutoff, "shutdown", None, false),
            // A guest that is being migrated may be slow.
            (Lifecycle::Running, "booted", Some(MigrationStep::Copying), true),
            (Lifecycle::Paused, "ioError", Some(MigrationStep::Copying), true),
            (Lifecycle::Shutoff, "migrated", Some(MigrationStep::Releasing), true),
            (Lifecycle::Running, "migrated", Some(MigrationStep::Moved), false),
            (Lifecycle::Running, "booted", Some(MigrationStep::NotMoved), false),
        ] {
            let migration = step.map(|step| MigrationReport { step: step.into(), ..MigrationReport::default() });
            let mut state = LauncherState { reason: reason.into(), migration, ..LauncherState::default() };
            state.set_lifecycle(lifecycle);
            assert_eq!(may_be_silent(&state), excused, "{lifecycle:?} {reason} {step:?}");
        }
    }

    #[test]
    fn disk_errors_are_reported_by_volume() {
        let disks = [DiskTarget { volume: "data".into(), target: "vdb".into(), size: 0 }];
        let errors = [("vdb".to_owned(), DiskFailure::NoSpace), ("vdc".to_owned(), DiskFailure::InputOutput)];
        assert_eq!(errors_by_volume(&errors, &disks), [DiskError { volume: "data".into(), no_space: true }]);
    }
}
