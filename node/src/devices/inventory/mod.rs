//! Inventory of the host devices that the cluster configuration permits to VMIs.
//!
//! It is read from the kernel's tree below `/sys`, which no pod can write, after each change of the configuration or of
//! devices, and when kubelet allocates a device. A device belongs to the first resource that selects it, so that none is
//! allocated twice.

mod pci;
mod usb;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Mutex,
};

use api::{host_devices, kubevirt::network::PermittedHostDevices};
use daemon::lock;

use crate::safe_dir::{Kind as FileKind, SafeDir};

/// Most USB buses that are watched.
const MAX_BUSES: usize = 64;

/// Vendor and product id.
type Ids = (u16, u16);

/// Attachment of the devices of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// PCI devices bound to vfio-pci.
    Pci,
    /// Sets of USB devices.
    Usb,
}

impl Kind {
    /// Returns the prefix of the environment variable that holds the addresses of a container's devices.
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Self::Pci => host_devices::PCI_VARIABLE,
            Self::Usb => host_devices::USB_VARIABLE,
        }
    }
}

/// A unit that kubelet allocates: the devices of an IOMMU group, or a set of USB devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Its id, the same whenever the same devices are found.
    pub id: String,
    /// It can be used now.
    pub healthy: bool,
    /// Its NUMA node.
    pub numa: Option<i64>,
    /// Device nodes beneath `/dev`.
    pub nodes: Vec<String>,
    /// Addresses of its devices, as the launcher expects them.
    pub addresses: Vec<String>,
}

/// Units by kind and name of their resource.
pub(crate) type Found = BTreeMap<(Kind, String), Vec<Unit>>;

/// Permitted devices that can be offered.
#[derive(Debug, Default, PartialEq)]
struct Rules {
    pci: Vec<(String, Ids)>,
    usb: Vec<(String, Vec<Ids>)>,
}

impl Rules {
    /// Leaves out resources of other device plugins, and invalid ones, which admission rejects.
    fn new(permitted: &PermittedHostDevices) -> Self {
        let mut rules = Self::default();
        for device in permitted.pci_host_devices.iter().filter(|device| !device.external_resource_provider) {
            match device.ids().filter(|_| host_devices::is_resource_name(&device.resource_name)) {
                Some(ids) => rules.pci.push((device.resource_name.clone(), ids)),
                None => tracing::warn!(
                    resource = %device.resource_name, selector = %device.pci_vendor_selector,
                    "permitted PCI devices cannot be offered"
                ),
            }
        }
        let mut names: BTreeSet<&str> = rules.pci.iter().map(|(resource, _)| resource.as_str()).collect();
        for device in permitted.usb.iter().filter(|device| !device.external_resource_provider) {
            let ids = device.ids().filter(|_| host_devices::is_resource_name(&device.resource_name));
            match ids.filter(|_| names.insert(&device.resource_name)) {
                Some(ids) => rules.usb.push((device.resource_name.clone(), ids)),
                None => {
                    tracing::warn!(resource = %device.resource_name, "permitted USB devices cannot be offered");
                }
            }
        }
        rules
    }
}

#[derive(Debug, Default)]
struct State {
    permitted: PermittedHostDevices,
    rules: Rules,
    sets: usb::Sets,
}

/// The permitted devices of the node.
#[derive(Debug)]
pub(crate) struct Inventory {
    sys: PathBuf,
    dev: PathBuf,
    state: Mutex<State>,
}

impl Inventory {
    /// Returns the inventory of the trees `sys` and `dev`. Nothing is permitted yet.
    pub(crate) fn new(sys: PathBuf, dev: PathBuf) -> Self {
        Self { sys, dev, state: Mutex::default() }
    }

    /// Replaces the permitted devices.
    pub(crate) fn permit(&self, permitted: &PermittedHostDevices) {
        let mut state = lock(&self.state);
        if state.permitted != *permitted {
            state.rules = Rules::new(permitted);
            state.permitted.clone_from(permitted);
        }
    }

    /// Returns every resource to offer with its current units.
    pub(crate) fn units(&self) -> Found {
        let mut state = lock(&self.state);
        let State { rules, sets, .. } = &mut *state;
        let dev = SafeDir::trusted(&self.dev).ok();
        let has_node = |node: &str| {
            let stat = dev.as_ref().and_then(|dev| dev.stat(node).ok());
            stat.is_some_and(|stat| stat.kind == FileKind::CharacterDevice)
        };
        let mut found = Found::new();
        if !rules.pci.is_empty() {
            let units = pci::units(&rules.pci, &pci::functions(&self.sys, &rules.pci), has_node);
            found.extend(units.into_iter().map(|(resource, units)| ((Kind::Pci, resource), units)));
        }
        if !rules.usb.is_empty() {
            let units = sets.units(&rules.usb, &usb::devices(&self.sys), has_node);
            found.extend(units.into_iter().map(|(resource, units)| ((Kind::Usb, resource), units)));
        }
        found
    }

    /// Returns the directories that change when devices are plugged or unplugged.
    pub(crate) fn directories(&self) -> Vec<SafeDir> {
        let state = lock(&self.state);
        let Ok(dev) = SafeDir::trusted(&self.dev) else { return Vec::new() };
        let mut directories = Vec::new();
        if !state.rules.pci.is_empty() {
            directories.push(dev.open_dir("vfio").unwrap_or_else(|_| dev.clone()));
        }
        if !state.rules.usb.is_empty() {
            let buses = dev.open_dir(Path::new("bus").join("usb")).unwrap_or(dev);
            let listed = buses.list(MAX_BUSES).unwrap_or_default();
            let is_bus = |name: &str| name.len() == 3 && name.bytes().all(|byte| byte.is_ascii_digit());
            let numbered = listed.iter().filter_map(|entry| entry.name.to_str()).filter(|name| is_bus(name));
            directories.extend(numbered.filter_map(|name| buses.open_dir(name).ok()));
            directories.push(buses);
        }
        directories
    }

    /// Returns true if nothing is permitted that this node could have.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.state).rules == Rules::default()
    }
}

/// Lists the entries of a kernel directory whose names `is_name` accepts.
fn names(directory: &Path, limit: usize, is_name: impl Fn(&str) -> bool) -> Vec<String> {
    match SafeDir::trusted(directory).and_then(|directory| directory.list(limit)) {
        Ok(entries) => {
            entries.into_iter().filter_map(|entry| entry.name.into_string().ok()).filter(|name| is_name(name)).collect()
        }
        // The node has no such bus.
        Err(error) if error.is_not_found() => Vec::new(),
        Err(error) => {
            tracing::warn!(directory = %directory.display(), %error, "devices of the node cannot be listed");
            Vec::new()
        }
    }
}

/// Reads a small file of the kernel.
fn text(directory: &SafeDir, name: &str) -> Option<String> {
    Some(directory.read_text(name, 256).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests;
