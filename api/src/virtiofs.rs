//! Volumes of a VMI that the guest mounts as file systems: virtiofsd serves their directories.

use crate::{
    hotplug,
    vmi::{spec::VirtualMachineInstanceSpec, volumes::Volume},
};

/// Longest name of a file system: the guest mounts it by this name, for which the device has 36 bytes.
pub const NAME_LIMIT: usize = 36;

/// Returns true if the VMI shares the volume as a file system.
#[must_use]
pub fn is_shared(spec: &VirtualMachineInstanceSpec, volume: &str) -> bool {
    spec.domain.devices.filesystems.iter().any(|known| known.name == volume)
}

/// Returns true if the volume is a directory of the launcher pod from its start, and so can be shared. Admission and the renderer
/// of the pod see no path of the container: the launcher checks it.
#[must_use]
pub fn is_shareable(volume: &Volume) -> bool {
    let is_configuration = volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.service_account.is_some()
        || volume.container_path.is_some();
    is_configuration || is_claim(volume) && !hotplug::is_hotpluggable(volume)
}

/// Returns true for a claim, also that of a DataVolume.
#[must_use]
pub fn is_claim(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some() || volume.data_volume.is_some()
}

/// Returns the first file system whose volume cannot be shared.
#[must_use]
pub fn unshareable(spec: &VirtualMachineInstanceSpec) -> Option<&str> {
    let mut names = spec.domain.devices.filesystems.iter().map(|filesystem| filesystem.name.as_str());
    names.find(|name| !spec.volumes.iter().any(|volume| volume.name == *name && is_shareable(volume)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn configuration_and_claims_of_the_pod_can_be_shared() {
        let unshareable = |mut volume: Value| {
            volume["name"] = json!("v");
            let spec =
                json!({"domain": {"devices": {"filesystems": [{"name": "v", "virtiofs": {}}]}}, "volumes": [volume]});
            unshareable(&serde_json::from_value(spec).unwrap()).map(str::to_owned)
        };
        for source in [
            json!({"configMap": {"name": "c"}}),
            json!({"secret": {"secretName": "s"}}),
            json!({"downwardAPI": {}}),
            json!({"serviceAccount": {"serviceAccountName": "a"}}),
            json!({"persistentVolumeClaim": {"claimName": "c"}}),
            json!({"dataVolume": {"name": "d"}}),
            json!({"containerPath": {"path": "/p", "readOnly": true}}),
        ] {
            assert_eq!(unshareable(source.clone()), None, "{source}");
        }
        for source in [
            json!({"persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}),
            json!({"dataVolume": {"name": "d", "hotpluggable": true}}),
            json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}),
            json!({"containerDisk": {"image": "i"}}),
            json!({"emptyDisk": {"capacity": "1Gi"}}),
            json!({"hostDisk": {"path": "/d", "type": "Disk"}}),
            json!({"cloudInitNoCloud": {"userData": "x"}}),
        ] {
            assert_eq!(unshareable(source.clone()).as_deref(), Some("v"), "{source}");
        }
    }

    #[test]
    fn file_system_needs_a_volume() {
        let spec = json!({"domain": {"devices": {"filesystems": [{"name": "v", "virtiofs": {}}]}}});
        let spec = serde_json::from_value(spec).unwrap();
        assert_eq!(unshareable(&spec), Some("v"));
        assert!(is_shared(&spec, "v") && !is_shared(&spec, "w"));
    }
}
