//! Disks.

use std::collections::BTreeSet;

use api::{
    VirtualMachineInstanceSpec,
    config::ClusterConfig,
    vmi::disks::{BlockSize, Disk},
};

use super::{gates, network::is_pci_address};
use crate::context::{FieldErrors, PathText, accepted, names};

const BUSES: [&str; 4] = ["virtio", "scsi", "sata", "usb"];
const CACHES: [&str; 3] = ["none", "writethrough", "writeback"];
const ERROR_POLICIES: [&str; 4] = ["stop", "ignore", "report", "enospace"];
const SERIAL_MAX: usize = 256;
const SECTOR_MIN: u64 = 512;
const SECTOR_MAX: u64 = 2 << 20;

/// Validates the mapping of disks to volumes, and the boot order.
pub(super) fn validate_mapping(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let devices = &spec.domain.devices;
    let mut orders = BTreeSet::new();
    for (index, disk) in devices.disks.iter().enumerate() {
        let path = format_args!("{root}.domain.devices.disks[{index}]");
        let volume = spec.volumes.iter().find(|volume| volume.name == disk.name);
        if volume.is_none() && disk.cdrom.is_none() {
            let message = format!("{path}.Name '{}' not found. No volume has this name.", disk.name);
            errors.invalid(format!("{path}.name"), message);
        } else if volume.is_none() {
            gates::are_on("domain.devices.disks[].cdrom.bus", format_args!("{path}.name"), config, errors);
        }
        let claim =
            volume.is_some_and(|volume| volume.persistent_volume_claim.is_some() || volume.data_volume.is_some());
        if disk.lun.is_some() && volume.is_some() && !claim {
            errors.invalid(
                format!("{path}.lun"),
                format!("{path}.lun can only be mapped to a DataVolume or PersistentVolumeClaim volume."),
            );
        }
        if volume.is_some_and(|volume| volume.downward_metrics.is_some()) {
            validate_metrics(path, disk, errors);
        }
        if disk.boot_order.is_some_and(|order| !orders.insert(order)) {
            reject_second_target(path, errors);
        }
    }
    for (index, interface) in devices.interfaces.iter().enumerate() {
        let Some(order) = interface.boot_order else { continue };
        if order < 1 {
            errors.invalid(
                format!("{root}[{index}].bootOrder"),
                format!("{root}[{index}] must have a boot order > 0, if supplied"),
            );
        } else if !orders.insert(order) {
            reject_second_target(format_args!("{root}.domain.devices.interfaces[{index}]"), errors);
        }
    }
}

fn reject_second_target(device: PathText<'_>, errors: &mut FieldErrors) {
    let field = format!("{device}.bootOrder");
    let message = format!("Boot order for {field} already set for a different device.");
    errors.invalid(field, message);
}

/// Validates the disk of host metrics, which needs a certain bus.
fn validate_metrics(path: PathText<'_>, disk: &Disk, errors: &mut FieldErrors) {
    let field = format!("{path}.disk");
    match &disk.disk {
        None => {
            let message = format!("DownwardMetrics volume must be mapped to a disk, but disk is not set on {field}.");
            errors.required(field, message);
        }
        Some(target) => {
            let bus = target.bus.as_deref().unwrap_or_default();
            if !["", "virtio"].contains(&bus) {
                let field = format!("{field}.bus");
                let message =
                    format!("DownwardMetrics volume must be mapped to virtio bus, but {field} is set to {bus}");
                errors.invalid(field, message);
            }
        }
    }
}

/// Validates the disks of a VMI or a preset.
pub(crate) fn validate(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let list = format_args!("{root}.domain.devices.disks");
    let disks = &spec.domain.devices.disks;
    for (index, disk) in disks.iter().enumerate() {
        for (other, _) in disks.iter().enumerate().take(index).filter(|(_, other)| other.name == disk.name) {
            errors.invalid(
                format!("{list}[{index}].name"),
                format!("{list}[{index}] and {list}[{other}] must not have the same Name."),
            );
        }
        validate_disk(list, index, disk, errors);
    }
}

fn validate_disk(list: PathText<'_>, index: usize, disk: &Disk, errors: &mut FieldErrors) {
    // The reference reports a few of these fields with a path that contains the list twice.
    let doubled = format_args!("{list}.domain.devices.disks");
    let path = format_args!("{list}[{index}]");
    let targets = [
        ("disk", disk.disk.as_ref().map(|target| target.bus.as_deref())),
        ("lun", disk.lun.as_ref().map(|target| target.bus.as_deref())),
        ("cdrom", disk.cdrom.as_ref().map(|target| target.bus.as_deref())),
    ];
    if targets.iter().filter(|(_, bus)| bus.is_some()).count() > 1 {
        errors.invalid(path, format!("{path} can only have a single target type defined"));
    }
    let address = disk.disk.as_ref().and_then(|target| target.pci_address.as_deref()).unwrap_or_default();
    let bus_of_disk = disk.disk.as_ref().and_then(|target| target.bus.as_deref()).unwrap_or_default();
    if !address.is_empty() {
        let name = format!("{doubled}.disk[{index}].name");
        let field = format!("{doubled}.disk[{index}].pciAddress");
        if bus_of_disk != "virtio" {
            errors.invalid(
                field.clone(),
                format!("disk {name} - setting a PCI address is only possible with bus type virtio."),
            );
        }
        if !is_pci_address(address) {
            errors.invalid(field, format!("disk {name} has malformed PCI address ({address})."));
        }
    }
    if disk.boot_order.is_some_and(|order| order < 1) {
        errors.invalid(format!("{path}.bootOrder"), format!("{path} must have a boot order > 0, if supplied"));
    }
    // A disk with several targets is rejected above; only the first target is validated.
    let (target, bus) = targets.into_iter().find_map(|(name, bus)| Some((name, bus?))).unwrap_or_default();
    if let Some(bus) = bus.filter(|bus| !bus.is_empty()) {
        let field = format_args!("{path}.{target}.bus");
        if bus == "ide" {
            errors.invalid(field, "IDE bus is not supported");
        } else if !BUSES.contains(&bus) {
            errors.invalid(
                field,
                format!("{path} is set with an unrecognized bus {bus}, must be one of: [{}]", BUSES.join(" ")),
            );
        }
        if target == "cdrom" && bus == "virtio" {
            errors.invalid(field, "Bus type virtio is invalid for CD-ROM device");
        }
        if target == "disk" && bus == "sata" && disk.disk.as_ref().is_some_and(|disk| disk.readonly) {
            errors.invalid(field, "sata hard-disks do not support read-only.");
        }
        if disk.dedicated_io_thread == Some(true) && bus != "virtio" {
            errors.not_supported(
                format!("{doubled}[{index}]"),
                format!("IOThreads are not supported for disks on a {bus} bus"),
            );
        }
    }
    validate_enumerated_values(list, index, disk, errors);
    for error in names::label_errors(&disk.name) {
        errors.invalid(format!("{doubled}[{index}].name"), error);
    }
    if let Some(size) = &disk.block_size {
        validate_block_size(path, size, bus == Some("sata"), errors);
    }
}

fn validate_enumerated_values(list: PathText<'_>, index: usize, disk: &Disk, errors: &mut FieldErrors) {
    let path = format_args!("{list}[{index}]");
    let text = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    if let Some(serial) = text(&disk.serial) {
        if !serial.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte)) {
            errors.invalid(
                format!("{path}.serial"),
                format!("{path} must be made up of the following characters [A-Za-z0-9_.+-], if specified"),
            );
        }
        if serial.chars().count() > SERIAL_MAX {
            errors.invalid(
                format!("{path}.serial"),
                format!("{path} must be less than or equal to {SERIAL_MAX} in length, if specified"),
            );
        }
    }
    if let Some(cache) = text(&disk.cache).filter(|cache| !CACHES.contains(&cache.as_str())) {
        let message = format!("{path}.cache has invalid value {cache}, {}", accepted(&CACHES));
        errors.invalid(format!("{path}.cache"), message);
    }
    if disk.shareable == Some(true) && text(&disk.cache).is_some_and(|cache| cache != "none") {
        errors.invalid(format!("{path}.cache"), format!("{path}.cache must be none for a shareable disk"));
    }
    if text(&disk.io).is_some_and(|io| !["native", "threads"].contains(&io.as_str())) {
        errors.not_supported(
            format!("{list}.domain.devices.disks[{index}].io"),
            format!("Disk IO mode for {list} is not supported. Supported modes are: native, threads."),
        );
    }
    if let Some(policy) = disk.error_policy.as_deref().filter(|policy| !ERROR_POLICIES.contains(policy)) {
        let message = format!("{path}.errorPolicy has invalid value \"{policy}\", {}", accepted(&ERROR_POLICIES));
        errors.invalid(format!("{path}.errorPolicy"), message);
    }
    let tray = disk.cdrom.as_ref().and_then(|cdrom| cdrom.tray.as_deref()).unwrap_or_default();
    if !["", "open", "closed"].contains(&tray) {
        let message = format!("{path}.cdrom.tray has invalid value {tray}, {}", accepted(&["open", "closed"]));
        errors.invalid(format!("{path}.cdrom.tray"), message);
    }
}

fn validate_block_size(path: PathText<'_>, size: &BlockSize, sata: bool, errors: &mut FieldErrors) {
    let Some(custom) = &size.custom else { return };
    if size.match_volume.as_ref().is_some_and(|matching| matching.is_enabled()) {
        errors
            .invalid(format!("{path}.blockSize"), "Block size matching can't be enabled together with a custom value");
        return;
    }
    let field = |name: &str| format!("{path}.blockSize.custom.{name}");
    let (logical, physical) = (custom.logical.unwrap_or(0), custom.physical.unwrap_or(0));
    let discard = custom.discard_granularity.unwrap_or(0);
    if logical > physical {
        let message = format!("Logical size {logical} must be the same or less than the physical size of {physical}");
        return errors.invalid(field("logical"), message);
    }
    if sata && logical != SECTOR_MIN {
        return errors.invalid(field("logical"), format!("Logical size {logical} must be 512 for SATA devices"));
    }
    if logical != 0 && discard % logical != 0 {
        let message = format!("Discard granularity {discard} must be multiples of logical size {logical}");
        return errors.invalid(field("discardGranularity"), message);
    }
    for (name, value) in [("logical", logical), ("physical", physical)] {
        let problem = if value < SECTOR_MIN {
            format!("is less than the supported minimum size of {SECTOR_MIN}")
        } else if value > SECTOR_MAX {
            format!("is greater than the supported maximum size of {SECTOR_MAX}")
        } else if !value.is_power_of_two() {
            "is not a power of 2".to_owned()
        } else {
            continue;
        };
        errors.invalid(field(name), format!("Provided size of {value} {problem}"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    const DISK: &str = "spec.domain.devices.disks[0]";

    fn disk(extra: Value) -> Value {
        let mut disk = json!({"name": "root"});
        for (key, value) in extra.as_object().unwrap() {
            disk[key] = value.clone();
        }
        json!({"domain": {"devices": {"disks": [disk]}}})
    }

    #[test]
    fn disk_has_its_volume() {
        refuses(
            disk(json!({"name": "missing"})),
            "spec.domain.devices.disks[0].name",
            "spec.domain.devices.disks[0].Name 'missing' not found.",
        );
        refuses(
            disk(json!({"lun": {}})),
            &format!("{DISK}.lun"),
            "can only be mapped to a DataVolume or PersistentVolumeClaim",
        );
    }

    #[test]
    fn names_are_unique_labels() {
        refuses(
            json!({"domain": {"devices": {"disks": [{"name": "root"}, {"name": "root"}]}}}),
            "spec.domain.devices.disks[1].name",
            "must not have the same Name.",
        );
        refuses(
            disk(json!({"name": "Root_1", "cdrom": {}})),
            "spec.domain.devices.disks.domain.devices.disks[0].name",
            "RFC 1123 label",
        );
    }

    #[test]
    fn disk_has_one_target_on_a_known_bus() {
        for bus in ["virtio", "sata", "scsi", "usb"] {
            accepts(disk(json!({"disk": {"bus": bus}})));
        }
        accepts(disk(json!({"cdrom": {"bus": "sata"}})));
        refuses(disk(json!({"disk": {}, "cdrom": {}})), DISK, "can only have a single target type defined");
        let two = messages(disk(json!({"disk": {"bus": "virtio"}, "cdrom": {"bus": "ide"}})));
        assert_eq!(two, [format!("{DISK} can only have a single target type defined")]);
        refuses(disk(json!({"disk": {"bus": "ide"}})), &format!("{DISK}.disk.bus"), "IDE bus is not supported");
        refuses(
            disk(json!({"disk": {"bus": "floppy"}})),
            &format!("{DISK}.disk.bus"),
            "unrecognized bus floppy, must be one of: [virtio scsi sata usb]",
        );
        refuses(disk(json!({"cdrom": {"bus": "virtio"}})), &format!("{DISK}.cdrom.bus"), "invalid for CD-ROM device");
        refuses(
            disk(json!({"disk": {"bus": "sata", "readonly": true}})),
            &format!("{DISK}.disk.bus"),
            "do not support read-only",
        );
    }

    #[test]
    fn pci_address_is_for_virtio_disks() {
        let field = "spec.domain.devices.disks.domain.devices.disks.disk[0].pciAddress";
        accepts(disk(json!({"disk": {"bus": "virtio", "pciAddress": "0000:04:10.0"}})));
        refuses(
            disk(json!({"disk": {"bus": "scsi", "pciAddress": "0000:04:10.0"}})),
            field,
            "only possible with bus type virtio",
        );
        refuses(disk(json!({"disk": {"bus": "virtio", "pciAddress": "4:10"}})), field, "malformed PCI address (4:10)");
    }

    #[test]
    fn boot_orders_are_positive_and_unique() {
        accepts(disk(json!({"bootOrder": 1})));
        refuses(disk(json!({"bootOrder": 0})), &format!("{DISK}.bootOrder"), "must have a boot order > 0");
        let neither = json!({"domain": {"devices": {
            "disks": [{"name": "root", "bootOrder": 0}],
            "interfaces": [{"name": "default", "masquerade": {}, "bootOrder": 0}],
        }}});
        assert!(!messages(neither).iter().any(|text| text.contains("already set")));
        refuses(
            json!({"domain": {"devices": {
                "disks": [{"name": "root", "bootOrder": 1}],
                "interfaces": [{"name": "default", "masquerade": {}, "bootOrder": 1}],
            }}}),
            "spec.domain.devices.interfaces[0].bootOrder",
            "already set for a different device",
        );
    }

    #[test]
    fn enumerated_values_are_known() {
        accepts(disk(json!({"serial": "CVLY-62.3_+", "cache": "none", "io": "native", "errorPolicy": "report"})));
        refuses(disk(json!({"serial": "a b"})), &format!("{DISK}.serial"), "following characters");
        refuses(disk(json!({"serial": "x".repeat(257)})), &format!("{DISK}.serial"), "256 in length");
        refuses(disk(json!({"cache": "lots"})), &format!("{DISK}.cache"), "has invalid value lots");
        refuses(disk(json!({"cache": "writeback", "shareable": true})), &format!("{DISK}.cache"), "must be none");
        refuses(
            disk(json!({"io": "uring"})),
            "spec.domain.devices.disks.domain.devices.disks[0].io",
            "Supported modes are: native, threads.",
        );
        refuses(disk(json!({"errorPolicy": "pray"})), &format!("{DISK}.errorPolicy"), "has invalid value \"pray\"");
        refuses(disk(json!({"cdrom": {"tray": "ajar"}})), &format!("{DISK}.cdrom.tray"), "has invalid value ajar");
        refuses(
            disk(json!({"dedicatedIOThread": true, "disk": {"bus": "sata"}})),
            "spec.domain.devices.disks.domain.devices.disks[0]",
            "IOThreads are not supported for disks on a sata bus",
        );
    }

    #[test]
    fn block_sizes_are_powers_of_two() {
        let custom = |logical: u64, physical: u64| {
            disk(
                json!({"disk": {"bus": "virtio"}, "blockSize": {"custom": {"logical": logical, "physical": physical}}}),
            )
        };
        let field = |name: &str| format!("{DISK}.blockSize.custom.{name}");
        accepts(custom(512, 4096));
        refuses(custom(4096, 512), &field("logical"), "must be the same or less than the physical size");
        refuses(custom(256, 4096), &field("logical"), "less than the supported minimum size of 512");
        refuses(custom(1000, 1000), &field("physical"), "is not a power of 2");
        refuses(custom(512, 4 << 20), &field("physical"), "greater than the supported maximum size of 2097152");
        refuses(
            disk(json!({"disk": {"bus": "sata"}, "blockSize": {"custom": {"logical": 4096, "physical": 4096}}})),
            &field("logical"),
            "must be 512 for SATA devices",
        );
        refuses(
            disk(json!({"blockSize": {"custom": {"logical": 512, "physical": 512, "discardGranularity": 700}}})),
            &field("discardGranularity"),
            "must be multiples of logical size 512",
        );
        refuses(
            disk(json!({"blockSize": {"custom": {"logical": 512, "physical": 512}, "matchVolume": {}}})),
            &format!("{DISK}.blockSize"),
            "can't be enabled together with a custom value",
        );
    }
}
