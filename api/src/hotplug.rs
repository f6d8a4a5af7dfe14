//! Hot-plugged volumes: claims that an attachment pod holds and that virt-handler hands to the launcher pod.

use crate::{
    VirtualMachineInstance,
    vmi::{spec::UtilityVolume, status::VolumeStatus, volumes::Volume},
};

/// Directory of hot-plugged volumes in the launcher pod.
pub const DIRECTORY: &str = "/var/run/kubevirt/hotplug-disks";
/// Name of the pod volumes in launcher and attachment pods.
pub const POD_VOLUME: &str = "hotplug-disks";
/// Socket in the attachment pod's volume. Its listener identifies the pod's processes.
pub const SOCKET: &str = "hp.sock";
/// Phase of a volume that the launcher pod has, without a disk in the guest.
pub const MOUNTED: &str = "MountedToPod";
/// Phase of a volume with a disk in the guest.
pub const READY: &str = "Ready";
/// Phase of a volume to which the guest's memory is written.
pub const DUMPING: &str = "MemoryDumpInProgress";
/// Phase of a volume with a memory dump.
pub const DUMPED: &str = "MemoryDumpCompleted";
/// Phase of a volume whose memory dump failed.
pub const DUMP_FAILED: &str = "MemoryDumpFailed";
/// End of the names of files with memory dumps.
pub const DUMP_SUFFIX: &str = ".memory.dump";
/// Phase of a volume that was taken from the launcher pod.
pub const UNMOUNTED: &str = "UnMountedFromPod";

/// Returns true if the claim of a volume may be plugged into a running VMI.
#[must_use]
pub fn is_hotpluggable(volume: &Volume) -> bool {
    volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.hotpluggable)
        || volume.data_volume.as_ref().is_some_and(|source| source.hotpluggable)
}

/// Returns the claim of a volume for memory dumps.
#[must_use]
pub fn dump_claim(volume: &Volume) -> Option<&str> {
    volume.memory_dump.as_ref().map(|dump| dump.claim_name.as_str())
}

/// Returns the utility volume of the VMI with this name: a claim in the launcher pod that is no disk.
#[must_use]
pub fn utility_volume<'a>(vmi: &'a VirtualMachineInstance, volume: &str) -> Option<&'a UtilityVolume> {
    vmi.spec.utility_volumes.iter().find(|known| known.name == volume)
}

/// Returns the status of a volume.
#[must_use]
pub fn status_of<'a>(vmi: &'a VirtualMachineInstance, volume: &str) -> Option<&'a VolumeStatus> {
    vmi.status.iter().flat_map(|status| &status.volume_status).find(|status| status.name == volume)
}

/// Returns true if a volume of the VMI does not come with the launcher pod.
#[must_use]
pub fn is_hotplugged(vmi: &VirtualMachineInstance, volume: &Volume) -> bool {
    is_hotpluggable(volume)
        || volume.memory_dump.is_some()
        || status_of(vmi, &volume.name).is_some_and(|status| status.hotplug_volume.is_some())
}

/// Returns true if the launcher pod has the hot-plugged volume.
#[must_use]
pub fn is_handed_over(status: &VolumeStatus) -> bool {
    matches!(status.phase.as_deref(), Some(MOUNTED | READY))
}

/// Returns true if the volume's claim is a block device.
#[must_use]
pub fn is_block(status: &VolumeStatus) -> bool {
    let mode = status.persistent_volume_claim_info.as_ref().and_then(|info| info.volume_mode.as_deref());
    mode == Some("Block")
}

/// Returns the name of a volume in [`DIRECTORY`].
#[must_use]
pub fn file_name(volume: &str, block: bool) -> String {
    if block { volume.to_owned() } else { format!("{volume}.img") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_is_hot_plugged_by_its_spec_or_its_status() {
        let vmi = |volume: serde_json::Value, status: serde_json::Value| -> VirtualMachineInstance {
            let spec = json!({"domain": {"devices": {}}, "volumes": [volume]});
            serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": {"volumeStatus": [status]}})).unwrap()
        };
        let claim = json!({"name": "d", "persistentVolumeClaim": {"claimName": "c"}});
        let flagged = json!({"name": "d", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}});
        let data_volume = json!({"name": "d", "dataVolume": {"name": "c", "hotpluggable": true}});
        let plain = json!({"name": "d", "target": "", "phase": "Bound"});
        let attached = json!({"name": "d", "target": "", "phase": "MountedToPod", "hotplugVolume": {}});
        for (volume, status, plugged, handed_over) in [
            (&claim, &plain, false, false),
            (&claim, &attached, true, true),
            (&flagged, &plain, true, false),
            (&data_volume, &plain, true, false),
        ] {
            let vmi = vmi(volume.clone(), status.clone());
            assert_eq!(is_hotplugged(&vmi, &vmi.spec.volumes[0]), plugged, "{volume} {status}");
            assert_eq!(status_of(&vmi, "d").is_some_and(is_handed_over), handed_over, "{volume} {status}");
        }
    }

    #[test]
    fn block_devices_and_images_have_different_names() {
        let status = |mode: Option<&str>| -> VolumeStatus {
            let info = json!({"claimName": "c", "volumeMode": mode});
            serde_json::from_value(json!({"name": "d", "target": "", "persistentVolumeClaimInfo": info})).unwrap()
        };
        for (mode, name) in [(Some("Block"), "d"), (Some("Filesystem"), "d.img"), (None, "d.img")] {
            assert_eq!(file_name("d", is_block(&status(mode))), name, "{mode:?}");
        }
    }
}
