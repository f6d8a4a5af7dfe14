//! Hot-pluggable volumes of a VM's template: the running VMI follows them.
//!
//! A changed volume is first taken from the VMI. It returns once nothing of the former volume is left in the status. A CD-ROM
//! drive stays when its volume leaves: its medium is ejected.

use api::{
    FeatureGate, VirtualMachineInstance, VirtualMachineInstanceSpec, VmiPhase,
    config::ClusterConfig,
    hotplug::is_hotpluggable,
    vmi::{disks::Disk, volumes::Volume},
};
use serde_json::Value;

/// Volumes and disks of a template.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Storage {
    volumes: Vec<Volume>,
    disks: Vec<Disk>,
}

impl Storage {
    pub(super) fn of(spec: &VirtualMachineInstanceSpec) -> Self {
        Self { volumes: spec.volumes.clone(), disks: spec.domain.devices.disks.clone() }
    }

    fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    fn disk(&self, name: &str) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    pub(super) fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// Writes the storage into a spec.
    pub(super) fn put(self, spec: &mut VirtualMachineInstanceSpec) {
        spec.volumes = self.volumes;
        spec.domain.devices.disks = self.disks;
    }

    /// Returns true if the VMI has the hot-pluggable volumes of the template and no others.
    pub(super) fn has_same_hotpluggable_volumes(&self, vmi: &VirtualMachineInstance) -> bool {
        let hotpluggable = |volumes: &[Volume]| -> Vec<Volume> {
            let mut volumes: Vec<Volume> = volumes.iter().filter(|volume| is_hotpluggable(volume)).cloned().collect();
            volumes.sort_by(|left, right| left.name.cmp(&right.name));
            volumes
        };
        hotpluggable(&self.volumes) == hotpluggable(&vmi.spec.volumes)
    }

    /// Returns true if the VMI has all settings of the template's hot-plugged disks. A disk that is plugged in cannot change.
    pub(super) fn is_plugged_as_written(&self, vmi: &VirtualMachineInstance) -> bool {
        let plugged = Self::of(&vmi.spec);
        self.volumes.iter().filter(|volume| is_hotpluggable(volume)).all(|volume| {
            if plugged.volume(&volume.name) != Some(volume) {
                return true;
            }
            let Some((written, plugged)) = self.disk(&volume.name).zip(plugged.disk(&volume.name)) else { return true };
            let json = |disk: &Disk| serde_json::to_value(disk).unwrap_or_default();
            contains(&json(plugged), &json(written))
        })
    }
}

/// Returns true if `whole` has every member of `part`. Defaults add members.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part)))
        }
        // Defaults replace an empty text.
        (_, Value::String(part)) if part.is_empty() => true,
        (whole, part) => whole == part,
    }
}

/// Returns true if running VMIs follow the hot-pluggable volumes of their templates. With the deprecated gate of the reference
/// the status of the VM holds requests instead, which admission refuses here.
pub(super) fn is_on(config: &ClusterConfig) -> bool {
    config.enabled(FeatureGate::DeclarativeHotplugVolumes) || config.enabled(FeatureGate::HotplugVolumes)
}

/// Returns the storage that the VMI must get, or `None` if it has it. `keeps_claims`: another claim of a volume does not
/// exchange it, because data must move to it.
pub(super) fn reconcile(template: &Storage, vmi: &VirtualMachineInstance, keeps_claims: bool) -> Option<Storage> {
    if *vmi.phase() != VmiPhase::Running {
        return None;
    }
    let present = Storage::of(&vmi.spec);
    let has_entry = |name: &str| vmi.status.iter().flat_map(|status| &status.volume_status).any(|e| e.name == name);
    let is_kept = |volume: &&Volume| {
        let wanted = template.volume(&volume.name);
        !is_hotpluggable(volume) || wanted == Some(*volume) || (keeps_claims && wanted.is_some_and(is_hotpluggable))
    };
    let mut volumes: Vec<Volume> = present.volumes.iter().filter(is_kept).cloned().collect();
    let left = |name: &str| present.volume(name).is_some() && !volumes.iter().any(|volume| volume.name == name);
    let is_cdrom = |disk: &Disk| disk.cdrom.is_some();
    // Disks whose volume leaves, except drives.
    let mut disks: Vec<Disk> =
        present.disks.iter().filter(|disk| is_cdrom(disk) || !left(&disk.name)).cloned().collect();
    let added: Vec<&Volume> = template
        .volumes
        .iter()
        .filter(|volume| is_hotpluggable(volume))
        .filter(|volume| present.volume(&volume.name).is_none() && !has_entry(&volume.name))
        .collect();
    for volume in added {
        if !disks.iter().any(|disk| disk.name == volume.name) {
            match template.disk(&volume.name) {
                // A drive is added at the next start.
                Some(disk) if is_cdrom(disk) => continue,
                disk => disks.extend(disk.cloned()),
            }
        }
        volumes.push(volume.clone());
    }
    let wanted = Storage { volumes, disks };
    (wanted != present).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(volumes: &Value, disks: &Value) -> VirtualMachineInstanceSpec {
        serde_json::from_value(json!({"volumes": volumes, "domain": {"devices": {"disks": disks}}})).unwrap()
    }

    fn vmi(volumes: &Value, disks: &Value, entries: &Value) -> VirtualMachineInstance {
        let mut vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"devices": {}}}, "status": {"phase": "Running", "volumeStatus": entries},
        }))
        .unwrap();
        vmi.spec = spec(volumes, disks);
        vmi
    }

    fn claim(name: &str, claim: &str) -> Value {
        json!({"name": name, "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}})
    }

    fn disk(name: &str) -> Value {
        json!({"name": name, "disk": {"bus": "scsi"}})
    }

    #[test]
    fn vmi_follows_the_hot_pluggable_volumes_of_the_template() {
        let root = json!({"name": "root", "containerDisk": {"image": "i"}});
        let drive = json!({"name": "cd", "cdrom": {"bus": "sata"}});
        let entry = |name: &str| json!({"name": name, "target": "", "hotplugVolume": {}});
        // Volumes and disks of the template and of the VMI, entries of the status; volumes and disks of the VMI after.
        let rows = [
            // Added.
            (
                json!([root, claim("a", "c")]),
                json!([disk("root"), disk("a")]),
                json!([root]),
                json!([disk("root")]),
                json!([entry("root")]),
                Some((json!([root, claim("a", "c")]), json!([disk("root"), disk("a")]))),
            ),
            // Unchanged.
            (
                json!([claim("a", "c")]),
                json!([disk("a")]),
                json!([claim("a", "c")]),
                json!([disk("a")]),
                json!([entry("a")]),
                None,
            ),
            // Removed.
            (
                json!([root]),
                json!([disk("root")]),
                json!([root, claim("a", "c")]),
                json!([disk("root"), disk("a")]),
                json!([entry("a")]),
                Some((json!([root]), json!([disk("root")]))),
            ),
            // Its former volume is still being detached.
            (json!([claim("a", "c")]), json!([disk("a")]), json!([]), json!([]), json!([entry("a")]), None),
            // Another claim: removed first.
            (
                json!([claim("a", "new")]),
                json!([disk("a")]),
                json!([claim("a", "c")]),
                json!([disk("a")]),
                json!([entry("a")]),
                Some((json!([]), json!([]))),
            ),
            (
                json!([claim("a", "new")]),
                json!([disk("a")]),
                json!([]),
                json!([]),
                json!([]),
                Some((json!([claim("a", "new")]), json!([disk("a")]))),
            ),
            // A CD is ejected, inserted, and exchanged.
            (
                json!([]),
                json!([drive]),
                json!([claim("cd", "c")]),
                json!([drive]),
                json!([entry("cd")]),
                Some((json!([]), json!([drive]))),
            ),
            (
                json!([claim("cd", "c")]),
                json!([drive]),
                json!([]),
                json!([drive]),
                json!([]),
                Some((json!([claim("cd", "c")]), json!([drive]))),
            ),
            (
                json!([claim("cd", "new")]),
                json!([drive]),
                json!([claim("cd", "c")]),
                json!([drive]),
                json!([entry("cd")]),
                Some((json!([]), json!([drive]))),
            ),
            // A drive comes and goes with a start only.
            (json!([claim("cd", "c")]), json!([drive]), json!([]), json!([]), json!([]), None),
            (json!([]), json!([]), json!([]), json!([drive]), json!([]), None),
            // Other volumes need a restart.
            (json!([]), json!([]), json!([root]), json!([disk("root")]), json!([]), None),
            (json!([root]), json!([disk("root")]), json!([]), json!([]), json!([]), None),
        ];
        for (index, (volumes, disks, has_volumes, has_disks, entries, expected)) in rows.into_iter().enumerate() {
            let template = Storage::of(&spec(&volumes, &disks));
            let expected = expected.map(|(volumes, disks)| Storage::of(&spec(&volumes, &disks)));
            let vmi = vmi(&has_volumes, &has_disks, &entries);
            assert_eq!(reconcile(&template, &vmi, false), expected, "row {index}");
        }
    }

    #[test]
    fn volume_whose_data_must_move_is_not_exchanged() {
        let template = Storage::of(&spec(&json!([claim("a", "new")]), &json!([disk("a")])));
        let vmi = vmi(&json!([claim("a", "c")]), &json!([disk("a")]), &json!([]));
        assert_eq!(reconcile(&template, &vmi, true), None);
        assert!(reconcile(&template, &vmi, false).is_some());
        assert!(reconcile(&Storage::default(), &vmi, true).is_some());
    }

    #[test]
    fn changed_settings_of_a_plugged_disk_are_noticed() {
        let plugged = vmi(
            &json!([claim("a", "c")]),
            &json!([{"name": "a", "cache": "none", "disk": {"bus": "scsi"}}]),
            &json!([]),
        );
        for (disk, as_written) in [
            (json!({"name": "a", "disk": {"bus": "scsi"}}), true),
            (json!({"name": "a", "disk": {}}), true),
            (json!({"name": "a", "disk": {"bus": ""}}), true),
            (json!({"name": "a", "disk": {"bus": "virtio"}}), false),
            (json!({"name": "a", "cache": "writeback", "disk": {}}), false),
            (json!({"name": "a", "serial": "s", "disk": {}}), false),
        ] {
            let template = Storage::of(&spec(&json!([claim("a", "c")]), &json!([disk])));
            assert_eq!(template.is_plugged_as_written(&plugged), as_written, "{disk}");
        }
        let exchanged =
            Storage::of(&spec(&json!([claim("a", "new")]), &json!([{"name": "a", "disk": {"bus": "virtio"}}])));
        assert!(exchanged.is_plugged_as_written(&plugged));
    }
}
