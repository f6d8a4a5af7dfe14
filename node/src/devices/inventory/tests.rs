#![allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]

use std::{fs, os::unix::fs::symlink};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::{Value, json};

use super::*;

/// A temporary copy of a node's device trees.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Tree {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrovirt-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        for directory in ["sys/bus/pci/devices", "sys/bus/usb/devices", "dev/vfio", "dev/bus/usb/001"] {
            fs::create_dir_all(path.join(directory)).unwrap();
        }
        Self(path)
    }

    fn inventory(&self, permitted: Value) -> Inventory {
        let inventory = Inventory::new(self.0.join("sys"), self.0.join("dev"));
        inventory.permit(&serde_json::from_value(permitted).unwrap());
        inventory
    }

    /// Creates a device like the kernel: a directory, and a link on the bus.
    fn device(&self, bus: &str, name: &str, files: &[(&str, &str)], links: &[(&str, &str)]) {
        let home = self.0.join("sys/devices").join(name);
        fs::create_dir_all(&home).unwrap();
        for (file, content) in files {
            fs::write(home.join(file), format!("{content}\n")).unwrap();
        }
        for (link, target) in links {
            let _ = fs::remove_file(home.join(link));
            symlink(target, home.join(link)).unwrap();
        }
        let _ = symlink(&home, self.0.join("sys/bus").join(bus).join("devices").join(name));
    }

    fn function(&self, address: &str, product: &str, driver: &str, group: u32) {
        let files = [("vendor", "0x10de"), ("device", product), ("numa_node", "-1")];
        let (driver, group) = (format!("../../bus/pci/drivers/{driver}"), format!("../../kernel/iommu_groups/{group}"));
        self.device("pci", address, &files, &[("driver", driver.as_str()), ("iommu_group", group.as_str())]);
    }

    /// Creates a node in `/dev`; false without permission.
    fn node(&self, path: &str) -> bool {
        let mode = Mode::from_raw_mode(0o600);
        let made = mknodat(CWD, self.0.join("dev").join(path), FileType::CharacterDevice, mode, makedev(10, 229));
        if made.is_err() {
            skips::skip("permission to make device nodes: root");
        }
        made.is_ok()
    }
}

/// A resource with the health of its units.
type Shown<'a> = (Kind, &'a str, Vec<(&'a str, bool)>);

fn shown(found: &Found) -> Vec<Shown<'_>> {
    found
        .iter()
        .map(|((kind, resource), units)| {
            (*kind, resource.as_str(), units.iter().map(|unit| (unit.id.as_str(), unit.healthy)).collect())
        })
        .collect()
}

#[test]
fn devices_of_a_node_are_found_by_what_is_permitted() {
    let tree = Tree::new("inventory");
    tree.function("0000:01:00.0", "0x1eb8", "vfio-pci", 7);
    tree.function("0000:02:00.0", "0x1eb8", "nouveau", 8);
    tree.function("0000:03:00.0", "0x2204", "vfio-pci", 9);
    let stick = [("idVendor", "46f4"), ("idProduct", "0001"), ("busnum", "1"), ("devnum", "4")];
    tree.device("usb", "1-2", &stick, &[]);
    tree.device("usb", "1-2:1.0", &stick, &[]);
    let hub = [("idVendor", "46f4"), ("idProduct", "0001"), ("busnum", "1"), ("devnum", "1")];
    tree.device("usb", "usb1", &hub, &[]);
    let inventory = tree.inventory(json!({
        "pciHostDevices": [
            {"pciVendorSelector": "10DE:1EB8", "resourceName": "nvidia.com/T4"},
            {"pciVendorSelector": "10de:2204", "resourceName": "nvidia.com/other", "externalResourceProvider": true},
            {"pciVendorSelector": "10de:*", "resourceName": "nvidia.com/any"},
            {"pciVendorSelector": "10de:2204", "resourceName": "no domain"},
        ],
        "usb": [
            {"resourceName": "kubevirt.io/stick", "selectors": [{"vendor": "46f4", "product": "0001"}]},
            {"resourceName": "kubevirt.io/stick", "selectors": [{"vendor": "46f4", "product": "0002"}]},
            {"resourceName": "nvidia.com/T4", "selectors": [{"vendor": "46f4", "product": "0001"}]},
            {"resourceName": "kubevirt.io/nothing"},
        ],
    }));
    let expected = |healthy| {
        vec![
            (Kind::Pci, "nvidia.com/T4", vec![("7", healthy)]),
            (Kind::Usb, "kubevirt.io/stick", vec![("1-2", healthy)]),
        ]
    };
    assert_eq!(shown(&inventory.units()), expected(false));
    // A regular file is no device.
    fs::write(tree.0.join("dev/vfio/7"), "").unwrap();
    assert_eq!(shown(&inventory.units()), expected(false));
    fs::remove_file(tree.0.join("dev/vfio/7")).unwrap();
    if tree.node("vfio/vfio") && tree.node("vfio/7") && tree.node("bus/usb/001/004") {
        assert_eq!(shown(&inventory.units()), expected(true));
    }
    // The second card is bound to vfio-pci as well.
    tree.function("0000:02:00.0", "0x1eb8", "vfio-pci", 8);
    let found = inventory.units();
    assert_eq!(found[&(Kind::Pci, "nvidia.com/T4".to_owned())].len(), 2);
    assert_eq!(inventory.directories().len(), 3, "of groups, of buses, and of the one bus");
    // Nothing is permitted.
    inventory.permit(&PermittedHostDevices::default());
    assert!(inventory.units().is_empty() && inventory.is_idle() && inventory.directories().is_empty());
}

#[test]
fn a_node_without_such_buses_has_no_devices() {
    let tree = Tree::new("no-buses");
    fs::remove_dir_all(tree.0.join("sys")).unwrap();
    fs::remove_dir_all(tree.0.join("dev")).unwrap();
    let inventory = tree.inventory(json!({
        "pciHostDevices": [{"pciVendorSelector": "10de:1eb8", "resourceName": "nvidia.com/T4"}],
        "usb": [{"resourceName": "kubevirt.io/stick", "selectors": [{"vendor": "46f4", "product": "0001"}]}],
    }));
    let expected = [(Kind::Pci, "nvidia.com/T4", vec![]), (Kind::Usb, "kubevirt.io/stick", vec![])];
    assert_eq!(shown(&inventory.units()), expected);
    assert!(!inventory.is_idle() && inventory.directories().is_empty());
}
