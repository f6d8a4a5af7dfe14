//! Memory dumps: the phases of their volumes, and the request to the launcher. Pure.
//!
//! ```text
//!   AttachedToNode -> file named -> MountedToPod -> MemoryDumpInProgress -> MemoryDumpCompleted
//!                                                          └──────────────> MemoryDumpFailed
//! ```
//! The name of the file is in the status before the file exists, so that a restarted virt-handler continues with the same.

use api::{
    VirtualMachineInstance, hibernation, hotplug,
    vmi::status::{DomainMemoryDumpInfo, VolumeStatus},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{DumpMemoryRequest, LauncherState, features::Feature};

use super::observed::{Link, Observed};
use crate::launcher::bounded;

/// Longest part of the VMI's name in the name of a file.
const VMI_NAME: usize = 63;
/// Longest name of a file, with margin.
const NAME_LIMIT: usize = 240;

/// Returns true if a volume of the VMI is for memory dumps.
pub(super) fn is_wanted(vmi: &VirtualMachineInstance, volume: &str) -> bool {
    vmi.spec.volumes.iter().any(|known| known.name == volume && known.memory_dump.is_some())
        && hibernation::memory_in(vmi, volume).is_none()
}

/// Returns the name of the file in the claim.
pub(super) fn file_of(entry: &VolumeStatus) -> Option<&str> {
    entry.memory_dump_volume.as_ref()?.target_file_name.as_deref().filter(|name| is_file_name(name))
}

/// Accepts one component of a path that has the name of a dump: no other file of a claim is written.
fn is_file_name(name: &str) -> bool {
    let stem = name.strip_suffix(hotplug::DUMP_SUFFIX).unwrap_or_default();
    !stem.is_empty() && name.len() <= NAME_LIMIT && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// Returns true while the launcher writes a dump to the volume.
pub(super) fn is_written(report: &LauncherState, volume: &str) -> bool {
    report.memory_dump.as_ref().is_some_and(|dump| dump.volume == volume && !dump.ended)
}

fn is_supported(link: &Link) -> bool {
    match link {
        Link::Up { greeted: true, features, .. } => features.contains(&Feature::MemoryDump),
        // Not known yet.
        Link::Up { .. } | Link::Down { .. } => true,
    }
}

/// Updates the entry of a volume for memory dumps. `attached`: its attachment pod is known. Returns false if the rules of other
/// volumes apply.
pub(super) fn apply(entry: &mut VolumeStatus, attached: bool, observed: &Observed, time: &Time) -> bool {
    if !is_wanted(&observed.vmi, &entry.name) || !observed.domain().is_alive() {
        return false;
    }
    let phase = entry.phase.clone().unwrap_or_default();
    let name = entry.name.clone();
    let mut become_ = |phase: &str, reason: &str, message: String| {
        entry.phase = Some(phase.to_owned());
        entry.reason = Some(reason.to_owned());
        entry.message = Some(message);
        let info = entry.memory_dump_volume.get_or_insert_default();
        match phase {
            hotplug::DUMPING => info.start_timestamp = Some(time.clone()),
            _ => info.end_timestamp = Some(time.clone()),
        }
        true
    };
    match phase.as_str() {
        hotplug::MOUNTED => become_(
            hotplug::DUMPING,
            hotplug::DUMPING,
            format!("Memory dump Volume {name} is attached, getting memory dump"),
        ),
        hotplug::DUMPING => {
            let file = observed.vmi.status.iter().flat_map(|status| &status.volume_status);
            let file = file.into_iter().find(|known| known.name == name).and_then(file_of);
            let dump = observed.report.as_ref().and_then(|report| report.memory_dump.as_ref());
            let failed = |reason: &str| format!("Memory dump to pvc {name} failed: {reason}");
            match dump.filter(|dump| dump.volume == name && Some(dump.file.as_str()) == file && dump.ended) {
                Some(dump) if dump.failure.is_empty() => become_(
                    hotplug::DUMPED,
                    "VolumeReady",
                    format!("Memory dump to Volume {name} has completed successfully"),
                ),
                Some(dump) => become_(hotplug::DUMP_FAILED, hotplug::DUMP_FAILED, failed(&bounded(&dump.failure))),
                None if !is_supported(&observed.link) => {
                    become_(hotplug::DUMP_FAILED, hotplug::DUMP_FAILED, failed("virt-launcher does not support it"))
                }
                None => true,
            }
        }
        hotplug::DUMPED | hotplug::DUMP_FAILED => true,
        "AttachedToNode" if attached && file_of(entry).is_none() => {
            let vmi: String = observed.vmi.metadata.name.iter().flat_map(|name| name.chars()).take(VMI_NAME).collect();
            let at = time.0.strftime("%Y%m%d-%H%M%S");
            entry.memory_dump_volume = Some(Box::new(DomainMemoryDumpInfo {
                claim_name: Some(entry.name.clone()),
                target_file_name: Some(format!("{vmi}-{}-{at}{}", entry.name, hotplug::DUMP_SUFFIX)),
                ..DomainMemoryDumpInfo::default()
            }));
            true
        }
        _ => false,
    }
}

/// Returns the request to write a dump, if the launcher has not got it.
pub(super) fn request(observed: &Observed) -> Option<DumpMemoryRequest> {
    let alive = observed.report.as_ref().filter(|_| observed.domain().is_alive() && is_supported(&observed.link))?;
    let entries = observed.vmi.status.iter().flat_map(|status| &status.volume_status);
    let mut dumping = entries.filter(|entry| entry.phase.as_deref() == Some(hotplug::DUMPING));
    let entry = dumping.find(|entry| is_wanted(&observed.vmi, &entry.name))?;
    let file = file_of(entry)?;
    let is_known = |dump: &protocol::MemoryDump| dump.volume == entry.name && dump.file == file;
    let is_mounted = observed.volumes.as_ref().is_some_and(|state| state.volumes.mounted.contains(&entry.name));
    (is_mounted && !alive.memory_dump.as_ref().is_some_and(is_known))
        .then(|| DumpMemoryRequest { volume: entry.name.clone(), file: file.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use protocol::{Lifecycle, MemoryDump};
    use serde_json::{Value, json};

    use super::*;

    const FILE: &str = "m-dump-20300101-000000.memory.dump";

    fn observed(phase: &str, file: Option<&str>, dump: Option<(&str, bool, &str)>) -> Observed {
        let info: Value = file.map_or(Value::Null, |file| json!({"claimName": "dump", "targetFileName": file}));
        let entry = json!({
            "name": "dump", "target": "", "phase": phase, "memoryDumpVolume": info,
            "hotplugVolume": {"attachPodName": "hp", "attachPodUID": "0b1a6a41-0000-4000-8000-000000000001"},
        });
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m", "uid": "u"},
            "spec": {"domain": {"devices": {}}, "volumes": [{"name": "dump", "memoryDump": {"claimName": "dump"}}]},
            "status": {"phase": "Running", "nodeName": "n", "volumeStatus": [entry]},
        }))
        .unwrap();
        let mut observed = Observed::new(Arc::new(vmi), "n");
        let dump = dump.map(|(file, ended, failure)| MemoryDump {
            volume: "dump".into(),
            file: file.into(),
            ended,
            failure: failure.into(),
        });
        let mut report = LauncherState { memory_dump: dump, ..LauncherState::default() };
        report.set_lifecycle(Lifecycle::Running);
        observed.report = Some(report);
        observed
    }

    #[test]
    fn phases_of_a_dump_follow_its_file_and_its_launcher() {
        let time = Time("2030-01-01T00:00:00Z".parse().unwrap());
        for (phase, file, dump, handled, after) in [
            ("Pending", None, None, false, "Pending"),
            ("AttachedToNode", None, None, true, "AttachedToNode"),
            ("AttachedToNode", Some(FILE), None, false, "AttachedToNode"),
            ("MountedToPod", Some(FILE), None, true, "MemoryDumpInProgress"),
            ("MemoryDumpInProgress", Some(FILE), None, true, "MemoryDumpInProgress"),
            ("MemoryDumpInProgress", Some(FILE), Some((FILE, false, "")), true, "MemoryDumpInProgress"),
            ("MemoryDumpInProgress", Some(FILE), Some(("former", true, "")), true, "MemoryDumpInProgress"),
            ("MemoryDumpInProgress", Some(FILE), Some((FILE, true, "")), true, "MemoryDumpCompleted"),
            ("MemoryDumpInProgress", Some(FILE), Some((FILE, true, "full")), true, "MemoryDumpFailed"),
            ("MemoryDumpCompleted", Some(FILE), Some((FILE, true, "")), true, "MemoryDumpCompleted"),
        ] {
            let observed = observed(phase, file, dump);
            let mut entry = observed.vmi.status.as_ref().unwrap().volume_status[0].clone();
            assert_eq!(apply(&mut entry, true, &observed, &time), handled, "{phase} {dump:?}");
            assert_eq!(entry.phase.as_deref(), Some(after), "{phase} {dump:?}");
            assert_eq!(file_of(&entry), if phase == "Pending" { None } else { Some(FILE) }, "{phase}");
        }
    }

    #[test]
    fn launcher_is_asked_once_for_each_file() {
        for (phase, dump, asked) in [
            ("MountedToPod", None, false),
            ("MemoryDumpInProgress", None, true),
            ("MemoryDumpInProgress", Some(("former", true, "")), true),
            ("MemoryDumpInProgress", Some((FILE, false, "")), false),
            ("MemoryDumpCompleted", None, false),
        ] {
            let mut observed = observed(phase, Some(FILE), dump);
            assert_eq!(request(&observed), None, "not mounted");
            let mut volumes = crate::vmi::launcher_volumes::LauncherVolumes::default();
            volumes.volumes.mounted.insert("dump".into());
            observed.volumes = Some(volumes);
            assert_eq!(request(&observed).is_some(), asked, "{phase} {dump:?}");
        }
        for name in [
            "",
            "a/b.memory.dump",
            "..",
            ".memory.dump",
            ".a.memory.dump",
            "disk.img",
            &format!("{}{}", "x".repeat(300), hotplug::DUMP_SUFFIX),
        ] {
            assert_eq!(request(&observed("MemoryDumpInProgress", Some(name), None)), None, "{name}");
        }
    }
}
