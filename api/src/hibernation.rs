//! Hibernated guests: which can be saved, and the names of their files and claims.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::{Schema, SchemaGenerator, json_schema};

use crate::{
    VirtualMachineInstance,
    constants::annotation::INTERFACES_CHANGED,
    vmi::{network::Interface, status::SavedMemory, volumes::Volume},
};

/// End of the names of files with the memory of a guest.
pub const SUFFIX: &str = ".memory.save";
/// Begin of the names of the claims that are made for saved memory, before the name of the VM.
pub const CLAIM_PREFIX: &str = "hibernation-of-";
/// Bytes of a file beside the memory: the state of the devices, among it that of video memory.
const OVERHEAD: i64 = 256 << 20;
/// Part of a claim, in thousandths, that its file system is assumed to take.
const FILE_SYSTEM: i64 = 55;
/// Longest name of a file, with margin.
const NAME_LIMIT: usize = 240;

/// Accepts one component of a path that has the name of saved memory: no other file of a claim is read or written.
#[must_use]
pub fn is_file_name(name: &str) -> bool {
    let stem = name.strip_suffix(SUFFIX).unwrap_or_default();
    !stem.is_empty() && name.len() <= NAME_LIMIT && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// Returns the saved memory of a VMI whose volume has this name.
#[must_use]
pub fn memory_in<'a>(vmi: &'a VirtualMachineInstance, volume: &str) -> Option<&'a SavedMemory> {
    vmi.status.as_ref()?.hibernation.as_ref().filter(|memory| memory.claim_name == volume)
}

/// Returns the bytes that a claim must have for the memory of a guest, in whole MiB.
#[must_use]
pub fn claim_size(memory: i64) -> i64 {
    let bytes = memory.saturating_add(OVERHEAD).saturating_mul(1000) / (1000 - FILE_SYSTEM);
    bytes.saturating_add((1 << 20) - 1) >> 20 << 20
}

/// Returns the bytes of memory of the guest of a VMI.
#[must_use]
pub fn guest_memory(vmi: &VirtualMachineInstance) -> Option<i64> {
    let domain = &vmi.spec.domain;
    let status = vmi.status.as_ref().and_then(|status| status.memory.as_ref());
    let sizes = [
        status.and_then(|memory| memory.guest_current.as_ref()),
        status.and_then(|memory| memory.guest_requested.as_ref()),
        domain.memory.as_ref().and_then(|memory| memory.guest.as_ref()),
        domain.resources.requests.get("memory"),
    ];
    sizes.into_iter().flatten().filter_map(bytes).max()
}

/// Returns why the guest of a VMI cannot be saved, or could not continue where it starts again. `None` if it can.
#[must_use]
pub fn obstacle(vmi: &VirtualMachineInstance) -> Option<String> {
    let (spec, devices) = (&vmi.spec, &vmi.spec.domain.devices);
    let named = |kind: &str, name: &str| format!("{kind} {name}");
    if let Some(device) = devices.host_devices.first() {
        return Some(named("host device", &device.name));
    }
    if let Some(gpu) = devices.gpus.first() {
        return Some(named("GPU", &gpu.name));
    }
    if let Some(filesystem) = devices.filesystems.first() {
        return Some(named("file system", &filesystem.name));
    }
    if spec.domain.launch_security.is_some() {
        return Some("encrypted memory (launchSecurity)".to_owned());
    }
    if devices.disable_hotplug {
        return Some("disableHotplug: the claim for its memory cannot be attached".to_owned());
    }
    if devices.autoattach_vsock == Some(true) {
        return Some("a VSOCK device".to_owned());
    }
    if devices.client_passthrough.is_some() {
        return Some("USB redirection (clientPassthrough)".to_owned());
    }
    let memory = vmi.status.as_ref().and_then(|status| status.memory.as_ref());
    let plugged = memory
        .and_then(|memory| Some(bytes(memory.guest_requested.as_ref()?)? != bytes(memory.guest_at_boot.as_ref()?)?));
    if plugged == Some(true) {
        return Some("memory that was plugged".to_owned());
    }
    // PCI addresses follow from the interfaces at a start.
    if vmi.metadata.annotations.iter().flatten().any(|(key, _)| key == INTERFACES_CHANGED) {
        return Some("interfaces that were plugged or unplugged: restart the VM first".to_owned());
    }
    if let Some(interface) = devices.interfaces.iter().find(|interface| is_bound_to_host(interface)) {
        return Some(named("interface", &interface.name));
    }
    if let Some(volume) = spec.volumes.iter().find(|volume| is_lost_with_pod(vmi, volume)) {
        return Some(format!("volume {}, whose content does not outlive the pod", volume.name));
    }
    let plugged = |volume: &&Volume| crate::hotplug::is_hotplugged(vmi, volume) && volume.memory_dump.is_none();
    let volume = spec.volumes.iter().find(plugged).map(|volume| &volume.name);
    let volume = volume.or_else(|| spec.utility_volumes.first().map(|volume| &volume.name));
    volume.map(|volume| named("hot-plugged volume", volume))
}

fn bytes(quantity: &Quantity) -> Option<i64> {
    crate::quantity::units(quantity).ok()
}

/// Returns true for an interface of a device of the node, or with a process beside QEMU.
fn is_bound_to_host(interface: &Interface) -> bool {
    interface.sriov.is_some() || interface.passt_binding.is_some() || interface.binding.is_some()
}

/// Returns true for a volume that the guest writes and that is made anew for each pod, or is on one node.
fn is_lost_with_pod(vmi: &VirtualMachineInstance, volume: &Volume) -> bool {
    let disk = vmi.spec.domain.devices.disks.iter().find(|disk| disk.name == volume.name);
    let is_written = disk.is_some_and(|disk| disk.cdrom.is_none());
    volume.host_disk.is_some()
        || volume.empty_disk.is_some()
        || volume.ephemeral.is_some()
        || (volume.container_disk.is_some() && is_written)
}

/// Returns the schema of any object.
pub(crate) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(domain: &Value, rest: &Value) -> VirtualMachineInstance {
        let mut spec = json!({"domain": {"devices": {}}});
        spec["domain"].as_object_mut().unwrap().extend(domain.as_object().unwrap().clone());
        spec.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        serde_json::from_value(json!({"metadata": {"name": "v"}, "spec": spec})).unwrap()
    }

    #[test]
    fn guests_that_cannot_continue_are_refused_by_name() {
        let devices = |devices: Value| json!({"devices": devices});
        let volume = |source: Value| {
            let mut volume = json!({"name": "d"});
            volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            json!({"volumes": [volume]})
        };
        let disk = || devices(json!({"disks": [{"name": "d", "disk": {}}]}));
        let image = json!({"containerDisk": {"image": "i"}});
        for (domain, rest, expected) in [
            (json!({}), json!({}), None),
            (disk(), volume(json!({"persistentVolumeClaim": {"claimName": "c"}})), None),
            (disk(), volume(json!({"cloudInitNoCloud": {"userData": "x"}})), None),
            (devices(json!({"disks": [{"name": "d", "cdrom": {}}]})), volume(image.clone()), None),
            (disk(), volume(image), Some("volume d, whose content does not outlive the pod")),
            (
                disk(),
                volume(json!({"emptyDisk": {"capacity": "1Gi"}})),
                Some("volume d, whose content does not outlive the pod"),
            ),
            (
                disk(),
                volume(json!({"persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}})),
                Some("hot-plugged volume d"),
            ),
            (devices(json!({"hostDevices": [{"name": "h", "deviceName": "x/y"}]})), json!({}), Some("host device h")),
            (devices(json!({"gpus": [{"name": "g", "deviceName": "x/y"}]})), json!({}), Some("GPU g")),
            (devices(json!({"filesystems": [{"name": "f", "virtiofs": {}}]})), json!({}), Some("file system f")),
            (devices(json!({"autoattachVSOCK": true})), json!({}), Some("a VSOCK device")),
            (devices(json!({"interfaces": [{"name": "n", "sriov": {}}]})), json!({}), Some("interface n")),
            (devices(json!({"interfaces": [{"name": "n", "masquerade": {}}]})), json!({}), None),
            (json!({"launchSecurity": {"sev": {}}}), json!({}), Some("encrypted memory (launchSecurity)")),
        ] {
            let vmi = vmi(&domain, &rest);
            assert_eq!(obstacle(&vmi).as_deref(), expected, "{domain} {rest}");
        }
        let mut vmi = vmi(&json!({}), &json!({}));
        vmi.metadata.annotations = Some([(INTERFACES_CHANGED.to_owned(), "true".to_owned())].into());
        let expected = Some("interfaces that were plugged or unplugged: restart the VM first");
        assert_eq!(obstacle(&vmi).as_deref(), expected);
    }

    #[test]
    fn only_files_of_saved_memory_are_named() {
        for (name, accepted) in [
            ("a.memory.save", true),
            ("", false),
            (".memory.save", false),
            ("a/b.memory.save", false),
            ("disk.img", false),
        ] {
            assert_eq!(is_file_name(name), accepted, "{name}");
        }
    }

    #[test]
    fn a_claim_has_room_for_memory_devices_and_file_system() {
        assert_eq!(claim_size(1 << 30) >> 20, 1355);
        assert_eq!(claim_size(i64::MAX) % (1 << 20), 0);
    }
}
