//! Grants host devices to launchers.
//!
//! kubelet decides which device nodes a container contains, and the kernel's device control group which of them can be
//! opened. The launcher runs as an unprivileged user, so the container's own copies of the nodes are given to that user.
//! Each copy must be the same device as the node's own of this name; another device under the name is rejected.

use api::{VirtualMachineInstance, kubevirt::network::PermittedHostDevices, quantity};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::is_granted;
use crate::safe_dir::{Error, Kind, SafeDir};

/// Most entries of one device directory of a container.
const MAX_NODES: usize = 256;
/// Memory that QEMU locks besides the guest's, as libvirt counts it for devices, doubled.
const LOCKED_BESIDE_GUEST: u64 = 2 << 30;

/// Returns the resources of the host devices that a VMI requests.
fn resources(vmi: &VirtualMachineInstance) -> impl Iterator<Item = &str> {
    let devices = &vmi.spec.domain.devices;
    let gpus = devices.gpus.iter().filter_map(|gpu| gpu.device_name.as_deref());
    gpus.chain(devices.host_devices.iter().filter_map(|device| device.device_name.as_deref()))
}

/// Returns true if a VMI requests host devices.
pub(crate) fn uses_any(vmi: &VirtualMachineInstance) -> bool {
    resources(vmi).next().is_some()
}

/// Returns the memory that the launcher of a VMI must be able to lock, because the VMI requires it, or because a device behind the
/// IOMMU can access the guest's memory at any time. `None` if nothing locks memory.
pub(crate) fn locked_memory(vmi: &VirtualMachineInstance, permitted: Option<&PermittedHostDevices>) -> Option<u64> {
    let usb = |resource: &str| {
        permitted.is_some_and(|permitted| permitted.usb.iter().any(|device| device.resource_name == resource))
    };
    let domain = &vmi.spec.domain;
    if resources(vmi).all(usb) && !domain.locks_memory() {
        return None;
    }
    let memory = domain.memory.as_ref();
    let guest = memory.and_then(|memory| memory.guest.as_ref());
    let resources = &domain.resources;
    let guest = guest.or_else(|| resources.requests.get("memory")).or_else(|| resources.limits.get("memory"));
    let bytes = |amount: &Quantity| quantity::units(amount).ok().and_then(|bytes| u64::try_from(bytes).ok());
    let most = memory.and_then(|memory| memory.max_guest.as_ref()).and_then(bytes);
    let added = memory.and_then(|memory| memory.reserved_overhead.as_ref()?.added_overhead.as_ref()).and_then(bytes);
    let guest = guest.and_then(bytes).max(most).unwrap_or(0);
    Some(guest.saturating_add(added.unwrap_or(0)).saturating_add(LOCKED_BESIDE_GUEST))
}

/// Gives the host devices in a container's `dev` to a user. `node` is the node's own `/dev`. Returns the names of the
/// devices.
pub(crate) fn grant(dev: &SafeDir, node: &SafeDir, user: u32) -> Result<Vec<String>, Error> {
    let mut granted = Vec::new();
    for path in paths(dev)? {
        let number = match node.stat(&path) {
            Ok(stat) if stat.kind == Kind::CharacterDevice => stat.rdev,
            Ok(_) => continue,
            Err(error) if error.is_not_found() => continue,
            Err(error) => return Err(error),
        };
        if is_granted(&path, dev.chown_device(&path, number, user, user))? {
            granted.push(path);
        }
    }
    Ok(granted)
}

/// Lists the nodes of IOMMU groups and of USB devices.
fn paths(dev: &SafeDir) -> Result<Vec<String>, Error> {
    let is_number =
        |name: &str, most: usize| (1..=most).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_digit());
    let groups = list(dev, "vfio", |name| name == "vfio" || is_number(name, 10))?;
    let mut paths: Vec<String> = groups.iter().map(|name| format!("vfio/{name}")).collect();
    for bus in list(dev, "bus/usb", |name| is_number(name, 3))? {
        let directory = format!("bus/usb/{bus}");
        let devices = list(dev, &directory, |name| is_number(name, 3))?;
        paths.extend(devices.iter().map(|name| format!("{directory}/{name}")));
    }
    Ok(paths)
}

/// Lists the entries with matching names; none without the directory.
fn list(dev: &SafeDir, path: &str, is_name: impl Fn(&str) -> bool) -> Result<Vec<String>, Error> {
    let directory = match dev.open_dir(path) {
        Ok(directory) => directory,
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let entries = directory.list(MAX_NODES)?;
    Ok(entries.into_iter().filter_map(|entry| entry.name.into_string().ok()).filter(|name| is_name(name)).collect())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
        path::Path,
    };

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    use serde_json::{Value, json};

    use super::*;

    fn vmi_with(devices: Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"memory": {"guest": "1Gi"}, "devices": devices}},
        }))
        .unwrap()
    }

    #[test]
    fn memory_is_locked_for_devices_behind_the_iommu() {
        let permitted: PermittedHostDevices = serde_json::from_value(json!({
            "pciHostDevices": [{"pciVendorSelector": "10de:1eb8", "resourceName": "v.org/gpu"}],
            "usb": [{"resourceName": "v.org/stick", "selectors": [{"vendor": "1", "product": "2"}]}],
        }))
        .unwrap();
        let host = |resource: &str| json!({"hostDevices": [{"name": "d", "deviceName": resource}]});
        let gigabyte = 1u64 << 30;
        for (devices, locked) in [
            (json!({}), None),
            (host("v.org/stick"), None),
            (host("v.org/gpu"), Some(3 * gigabyte)),
            // Of another device plugin: unknown.
            (host("v.org/other"), Some(3 * gigabyte)),
            (json!({"gpus": [{"name": "g", "deviceName": "v.org/gpu"}]}), Some(3 * gigabyte)),
            (
                json!({"hostDevices": [{"name": "a", "deviceName": "v.org/stick"}, {"name": "b", "deviceName": "v.org/gpu"}]}),
                Some(3 * gigabyte),
            ),
        ] {
            let vmi = vmi_with(devices.clone());
            assert_eq!(locked_memory(&vmi, Some(&permitted)), locked, "{devices}");
            assert_eq!(uses_any(&vmi), devices != json!({}), "{devices}");
        }
        assert_eq!(locked_memory(&vmi_with(host("v.org/stick")), None), Some(3 * gigabyte));
        let locked = |memory: Value| {
            let mut vmi = vmi_with(json!({}));
            vmi.spec.domain.memory = serde_json::from_value(memory).unwrap();
            locked_memory(&vmi, None)
        };
        for (memory, expected) in [
            (json!({"guest": "1Gi", "reservedOverhead": {"memLock": "NotRequired"}}), None),
            (json!({"guest": "1Gi", "reservedOverhead": {"addedOverhead": "1Gi"}}), None),
            (json!({"guest": "1Gi", "reservedOverhead": {"memLock": "Required"}}), Some(3 * gigabyte)),
            (
                json!({"guest": "1Gi", "maxGuest": "4Gi", "reservedOverhead": {"memLock": "Required", "addedOverhead": "1Gi"}}),
                Some(7 * gigabyte),
            ),
        ] {
            assert_eq!(locked(memory.clone()), expected, "{memory}");
        }
    }

    fn node(path: &Path, major: u32, minor: u32) -> bool {
        let mode = Mode::from_raw_mode(0o600);
        if mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor)).is_ok() {
            return true;
        }
        skips::skip("permission to make device nodes: root");
        false
    }

    #[test]
    fn only_devices_that_the_node_has_under_the_same_name_are_granted() {
        let root = std::env::temp_dir().join(format!("ferrovirt-hostdev-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let (pod, host) = (root.join("pod"), root.join("host"));
        for dev in [&pod, &host] {
            fs::create_dir_all(dev.join("vfio")).unwrap();
            fs::create_dir_all(dev.join("bus/usb/001")).unwrap();
        }
        let mut made = true;
        for (name, major, minor) in [("vfio/vfio", 10, 196), ("vfio/12", 241, 0), ("bus/usb/001/004", 189, 3)] {
            made = made && node(&pod.join(name), major, minor) && node(&host.join(name), major, minor);
        }
        if made {
            let grant = || grant(&SafeDir::trusted(&pod).unwrap(), &SafeDir::trusted(&host).unwrap(), 107);
            let owner = |name: &str| fs::symlink_metadata(pod.join(name)).unwrap().uid();
            // Names that the node does not have, or that are not those of devices.
            node(&pod.join("vfio/99"), 241, 9);
            node(&pod.join("vfio/devices"), 241, 0);
            node(&host.join("vfio/devices"), 241, 0);
            symlink("12", pod.join("vfio/link")).unwrap();
            assert_eq!(grant().unwrap(), ["vfio/12", "vfio/vfio", "bus/usb/001/004"]);
            assert_eq!((owner("vfio/12"), owner("vfio/99"), owner("vfio/devices")), (107, 0, 0));
            assert_eq!(fs::metadata(host.join("vfio/12")).unwrap().uid(), 0);
            // Another device under the name of a group.
            fs::remove_file(pod.join("vfio/12")).unwrap();
            node(&pod.join("vfio/12"), 1, 1);
            assert!(matches!(grant(), Err(Error::WrongDevice { .. })));
            // A link to a device.
            fs::remove_file(pod.join("vfio/12")).unwrap();
            symlink("/dev/null", pod.join("vfio/12")).unwrap();
            assert!(matches!(grant(), Err(Error::WrongKind { found: Kind::Link, .. })));
            // A link instead of the directory.
            fs::remove_dir_all(pod.join("vfio")).unwrap();
            symlink(host.join("vfio"), pod.join("vfio")).unwrap();
            assert!(matches!(grant(), Err(Error::Escape(_))));
            assert_eq!(fs::metadata(host.join("vfio/12")).unwrap().uid(), 0);
        }
        // No devices.
        fs::create_dir_all(root.join("empty")).unwrap();
        let empty = SafeDir::trusted(&root.join("empty")).unwrap();
        assert_eq!(super::grant(&empty, &empty, 107).unwrap(), Vec::<String>::new());
        fs::remove_dir_all(root).unwrap();
    }
}
