//! Hot-plugged volumes: the work for the launcher, and the phases in the status. Pure.

use std::time::Duration;

use api::{
    VirtualMachineInstance, VirtualMachineInstanceStatus, hotplug,
    vmi::{status::VolumeStatus, volumes::Volume},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    dump,
    event::Event,
    hibernation,
    observed::{Link, Observed, SYNC},
};
use crate::{
    launcher::{bounded, is_pod_uid},
    volumes::{Content, Handover, Work},
};

/// A start waits this long for volumes whose attachment pod runs, and for others.
const START_WAIT: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(10));

/// Phases before the launcher pod has a volume.
const BEFORE: [&str; 3] = ["Pending", "Bound", "AttachedToNode"];
/// Phases in which the launcher pod had, or may have had, a volume.
const AFTER: [&str; 6] =
    [hotplug::READY, hotplug::MOUNTED, "AttachedToNode", hotplug::DUMPING, hotplug::DUMPED, hotplug::DUMP_FAILED];

fn entries(vmi: &VirtualMachineInstance) -> impl Iterator<Item = &VolumeStatus> {
    let entries = vmi.status.iter().flat_map(|status| &status.volume_status);
    entries.filter(|entry| entry.hotplug_volume.is_some())
}

fn is_in_spec(vmi: &VirtualMachineInstance, volume: &str) -> bool {
    vmi.spec.volumes.iter().any(|known| known.name == volume) || hotplug::utility_volume(vmi, volume).is_some()
}

/// Returns true if the launcher is to have a volume: it is in the spec, or a disk of the domain that is to come.
fn is_wanted(observed: &Observed, volume: &str) -> bool {
    let vmi = &observed.vmi;
    let comes = || entries(vmi).any(|entry| entry.name == volume && is_moved(vmi, entry));
    is_in_spec(vmi, volume) || (observed.target_migration().is_some() && comes())
}

/// Returns what a volume holds; `None` before the file of a dump has its name, and for a claim of another kind.
fn content(vmi: &VirtualMachineInstance, entry: &VolumeStatus) -> Option<Content> {
    if api::hibernation::memory_in(vmi, &entry.name).is_some() {
        return hibernation::content(vmi);
    }
    let is_block = hotplug::is_block(entry);
    if dump::is_wanted(vmi, &entry.name) {
        return dump::file_of(entry).map(|file| Content::Dump(file.to_owned()));
    }
    if hotplug::utility_volume(vmi, &entry.name).is_some() {
        return (!is_block).then_some(Content::Directory);
    }
    Some(if is_block { Content::Device } else { Content::Image })
}

/// Returns the UID of the pod that attaches a volume.
fn attachment_pod(entry: &VolumeStatus) -> Option<&str> {
    entry.hotplug_volume.as_ref()?.attach_pod_uid.as_deref().filter(|uid| is_pod_uid(uid))
}

/// Returns the UID of the pod from which a volume is handed to the launcher.
fn source_pod<'a>(observed: &'a Observed, entry: &'a VolumeStatus) -> Option<&'a str> {
    if observed.target_migration().is_none() {
        return attachment_pod(entry);
    }
    // The launcher that is to receive the domain gets what the domain has.
    target_attachment_pod(observed).filter(|uid| is_pod_uid(uid) && is_moved(&observed.vmi, entry))
}

/// Returns the UID of the pod that attaches hot-plugged volumes for the launcher that is to receive the domain.
fn target_attachment_pod(observed: &Observed) -> Option<&str> {
    observed.vmi.status.as_ref()?.migration_state.as_ref()?.target_attachment_pod_uid.as_deref()
}

/// Returns true if a migration brings the disk of a hot-plugged volume.
fn is_moved(vmi: &VirtualMachineInstance, entry: &VolumeStatus) -> bool {
    !entry.target.is_empty() && matches!(content(vmi, entry), Some(Content::Device | Content::Image))
}

/// Returns true if the launcher has all hot-plugged volumes of the domain that is to come.
pub(super) fn has_moved_volumes(observed: &Observed) -> bool {
    let mut moved = entries(&observed.vmi).filter(|entry| is_moved(&observed.vmi, entry)).peekable();
    let mounted = observed.volumes.as_ref().map(|state| &state.volumes.mounted);
    moved.peek().is_none() || mounted.is_some_and(|mounted| moved.all(|entry| mounted.contains(&entry.name)))
}

/// Returns the work for the launcher and the time from which it may start; `None` if there is nothing to do.
pub(super) fn plan(observed: &Observed) -> Option<(Work, Duration)> {
    let vmi = &observed.vmi;
    let state = observed.volumes.as_ref();
    if state.is_none_or(|state| state.volumes.mounted.is_empty()) && entries(vmi).next().is_none() {
        return None;
    }
    let has = |volume: &str| state.is_some_and(|state| state.volumes.mounted.contains(volume));
    let handovers = entries(vmi).filter(|entry| is_wanted(observed, &entry.name)).filter_map(|entry| {
        let (volume, pod) = (entry.name.clone(), source_pod(observed, entry)?.to_owned());
        Some(Handover { volume, content: content(vmi, entry)?, pod })
    });
    let (present, mut attach): (Vec<_>, Vec<_>) = handovers.partition(|handover| has(&handover.volume));
    let devices: Vec<_> = present.into_iter().filter(|handover| handover.content == Content::Device).collect();
    let mounted = state.into_iter().flat_map(|state| &state.volumes.mounted);
    let detach: Vec<String> =
        mounted.filter(|volume| !is_wanted(observed, volume) && may_detach(observed, volume)).cloned().collect();
    if let (Some(state), true) = (state, attach.is_empty() && detach.is_empty()) {
        return (!devices.is_empty()).then_some((Work { attach: devices, detach }, state.grant_at));
    }
    let names = attach.iter().map(|handover| &handover.volume).chain(&detach);
    // A volume that was not attempted yet does not wait for those that failed.
    let is_new = |volume: &String| state.is_none_or(|state| !state.volumes.failures.contains_key(volume));
    let has_new = state.is_none() || names.into_iter().any(is_new);
    let at = state.filter(|_| !has_new).map_or(Duration::ZERO, |state| state.retry_at);
    attach.extend(devices);
    Some((Work { attach, detach }, at))
}

/// Returns true if the domain does not use a volume that the VMI no longer has, and does not start to.
fn may_detach(observed: &Observed, volume: &str) -> bool {
    // A restarted virt-handler does not know yet if the guest uses it.
    if observed.is_busy(SYNC) || !observed.reported {
        return false;
    }
    if !observed.domain().is_alive() {
        return true;
    }
    let Link::Up { synced, results_from, .. } = &observed.link else { return false };
    let Some(report) = &observed.report else { return false };
    *synced == Some(observed.facts.fingerprint)
        && report.sequence >= *results_from
        && report.disks.iter().all(|disk| disk.volume != volume)
        && !dump::is_written(report, volume)
        && !hibernation::is_written(report, volume)
}

/// Returns the time until which a start waits for volumes that the guest can do without; `None` if it does not wait.
pub(super) fn start_waits_until(observed: &Observed) -> Option<Duration> {
    let vmi = &observed.vmi;
    let plugged = |volume: &&Volume| volume.memory_dump.is_none() && hotplug::is_hotplugged(vmi, volume);
    let volumes = vmi.spec.volumes.iter().filter(plugged);
    let failures = observed.volumes.as_ref().map(|state| &state.volumes.failures);
    let is_awaited = |volume: &str| failures.and_then(|all| all.get(volume)).is_some_and(|failure| failure.waiting);
    let wait = |volume: &str| match hotplug::status_of(vmi, volume) {
        Some(entry) if hotplug::is_handed_over(entry) => None,
        Some(entry) if attachment_pod(entry).is_some() && !is_awaited(volume) => Some(START_WAIT.0),
        _ => Some(START_WAIT.1),
    };
    volumes.filter_map(|volume| wait(&volume.name)).max().map(|wait| observed.connected_at + wait)
}

/// Returns true if a start waits for the volume of the boot disk, without a limit: the guest would boot from nothing. The entry of the
/// volume in the status names the cause meanwhile.
pub(super) fn awaits_boot_disk(observed: &Observed) -> bool {
    let vmi = &observed.vmi;
    let is_missing = |volume: &Volume| {
        hotplug::is_hotplugged(vmi, volume)
            && hotplug::status_of(vmi, &volume.name).is_none_or(|entry| !hotplug::is_handed_over(entry))
    };
    boot_volume(vmi).is_some_and(is_missing)
}

/// Returns the volume of the disk from which the guest boots: the first one of the boot order, otherwise the first hard disk.
fn boot_volume(vmi: &VirtualMachineInstance) -> Option<&Volume> {
    let domain = &vmi.spec.domain;
    if domain.firmware.as_ref().is_some_and(|firmware| firmware.kernel_boot.is_some()) {
        return None;
    }
    let disks = domain.devices.disks.iter().filter_map(|disk| {
        let volume = vmi.spec.volumes.iter().find(|volume| volume.name == disk.name)?;
        can_boot(volume).then_some((disk, volume))
    });
    let first = disks.min_by_key(|(disk, _)| (disk.boot_order.unwrap_or(u64::MAX), disk.cdrom.is_some()));
    first.map(|(_, volume)| volume)
}

/// Returns true for a volume that can hold an operating system: no image of configuration, and no empty disk.
const fn can_boot(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some()
        || volume.data_volume.is_some()
        || volume.container_disk.is_some()
        || volume.ephemeral.is_some()
        || volume.host_disk.is_some()
}

/// Sets the device names and phases of hot-plugged volumes. Entries are added and removed by virt-controller.
pub(super) fn apply(next: &mut VirtualMachineInstanceStatus, observed: &Observed, time: &Time) {
    let alive = observed.domain().is_alive();
    let entries = next.volume_status.iter_mut().filter(|entry| entry.hotplug_volume.is_some());
    for entry in entries {
        if let Some(report) = observed.report.as_ref().filter(|_| alive) {
            let disk = report.disks.iter().find(|disk| disk.volume == entry.name);
            entry.target = disk.map(|disk| bounded(&disk.target)).unwrap_or_default();
        }
        if dump::apply(entry, attachment_pod(entry).is_some(), observed, time) {
            continue;
        }
        // A volume that is being handed over may be mounted by now.
        let known = observed.volumes.as_ref().filter(|_| !observed.handing_over.contains(&entry.name));
        let mounted = known.map(|state| state.volumes.mounted.contains(&entry.name));
        let current = entry.phase.as_deref().unwrap_or_default();
        if let Some((phase, reason, message)) =
            next_phase(&entry.name, current, !entry.target.is_empty(), mounted, is_in_spec(&observed.vmi, &entry.name))
        {
            entry.phase = Some(phase.to_owned());
            entry.reason = Some(reason.to_owned());
            entry.message = Some(message);
        }
    }
}

/// Returns phase, reason and message that follow. `mounted` is `None` while it is unknown. virt-controller takes the claim of an
/// unmounted volume for free.
fn next_phase(
    volume: &str,
    phase: &str,
    has_target: bool,
    mounted: Option<bool>,
    in_spec: bool,
) -> Option<(&'static str, &'static str, String)> {
    if has_target {
        return (phase != hotplug::READY)
            .then(|| (hotplug::READY, "VolumeReady", format!("Successfully attach hotplugged volume {volume} to VM")));
    }
    match (mounted?, in_spec) {
        (true, true) if BEFORE.contains(&phase) => Some((
            hotplug::MOUNTED,
            "VolumeMountedToPod",
            format!("Volume {volume} has been mounted in virt-launcher pod"),
        )),
        (false, false) if AFTER.contains(&phase) => Some((
            hotplug::UNMOUNTED,
            "VolumeUnMountedFromPod",
            format!("Volume {volume} has been unmounted from virt-launcher pod"),
        )),
        _ => None,
    }
}

/// Returns an event for each phase that virt-handler changed.
pub(super) fn events(current: &VirtualMachineInstanceStatus, next: &VirtualMachineInstanceStatus) -> Vec<Event> {
    let known = |name: &str| current.volume_status.iter().find(|entry| entry.name == name);
    let changed = next.volume_status.iter().filter(|entry| {
        entry.hotplug_volume.is_some() && known(&entry.name).is_some_and(|known| known.phase != entry.phase)
    });
    let reason = |entry: &VolumeStatus| match entry.phase.as_deref() {
        Some(hotplug::READY | hotplug::DUMPED) => Some("VolumeReady"),
        Some(hotplug::MOUNTED) => Some("VolumeMountedToPod"),
        Some(hotplug::UNMOUNTED) => Some("VolumeUnMountedFromPod"),
        // The phase is the reason.
        Some(hotplug::DUMPING) => Some(hotplug::DUMPING),
        Some(hotplug::DUMP_FAILED) => Some(hotplug::DUMP_FAILED),
        _ => None,
    };
    changed.filter_map(|entry| Some(Event::normal(reason(entry)?, entry.message.clone().unwrap_or_default()))).collect()
}

#[cfg(test)]
mod tests;
