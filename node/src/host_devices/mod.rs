//! Devices of the node that the cluster's configuration permits to machines.
//!
//! What is there is read from the kernel's tree below `/sys`, which no pod can write to, each time that it matters: when
//! the configuration or a device changes, and when kubelet gives a device away. A device belongs to the first resource
//! that selects it, so that none is handed out twice.

pub mod access;
mod pci;
mod usb;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use api::{host_devices, kubevirt::network::PermittedHostDevices};

use crate::safe_dir::{Kind as FileKind, SafeDir};

/// Most buses of USB devices that are watched.
const MAX_BUSES: usize = 64;

/// Two numbers of 16 bits that say what a device is.
type Ids = (u16, u16);

/// How devices of a resource are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// PCI devices bound to vfio-pci.
    Pci,
    /// Sets of USB devices.
    Usb,
}

impl Kind {
    /// Beginning of the variable that tells a container where its devices are.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Pci => host_devices::PCI_VARIABLE,
            Self::Usb => host_devices::USB_VARIABLE,
        }
    }
}

/// What kubelet hands out as one: the devices of an IOMMU group, or a set of USB devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its name, the same for the same devices whenever they are found.
    pub id: String,
    /// Whether it can be used now.
    pub healthy: bool,
    /// The NUMA node it is attached to.
    pub numa: Option<i64>,
    /// Device nodes, beneath `/dev`.
    pub nodes: Vec<String>,
    /// Where its devices are, in the words of the launcher.
    pub addresses: Vec<String>,
}

/// Resources by kind and name with their units.
pub type Found = BTreeMap<(Kind, String), Vec<Unit>>;

/// What the configuration permits, as far as it can be offered.
#[derive(Debug, Default, PartialEq)]
struct Rules {
    pci: Vec<(String, Ids)>,
    usb: Vec<(String, Vec<Ids>)>,
}

impl Rules {
    /// Leaves out what other device plugins offer and what makes no sense, which admission refuses.
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

/// The node's devices, by what the configuration permits.
#[derive(Debug)]
pub struct Inventory {
    sys: PathBuf,
    dev: PathBuf,
    state: Mutex<State>,
}

impl Inventory {
    /// The devices of the trees `sys` and `dev`; nothing is permitted yet.
    #[must_use]
    pub fn new(sys: PathBuf, dev: PathBuf) -> Self {
        Self { sys, dev, state: Mutex::default() }
    }

    /// Takes over what is permitted from now on.
    pub fn permit(&self, permitted: &PermittedHostDevices) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.permitted != *permitted {
            state.rules = Rules::new(permitted);
            state.permitted.clone_from(permitted);
        }
    }

    /// Every resource that is to be offered, with the units that are there now.
    #[must_use]
    pub fn units(&self) -> Found {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// The directories that change when devices come and go.
    #[must_use]
    pub fn directories(&self) -> Vec<SafeDir> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Whether nothing is permitted that this node could have.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).rules == Rules::default()
    }
}

/// The entries of a directory of the kernel's, with the names that `is_name` knows.
fn names(directory: &Path, limit: usize, is_name: impl Fn(&str) -> bool) -> Vec<String> {
    match SafeDir::trusted(directory).and_then(|directory| directory.list(limit)) {
        Ok(entries) => {
            entries.into_iter().filter_map(|entry| entry.name.into_string().ok()).filter(|name| is_name(name)).collect()
        }
        // A node without such a bus.
        Err(error) if error.is_not_found() => Vec::new(),
        Err(error) => {
            tracing::warn!(directory = %directory.display(), %error, "devices of the node cannot be listed");
            Vec::new()
        }
    }
}

/// The text of one of the kernel's small files.
fn text(directory: &SafeDir, name: &str) -> Option<String> {
    Some(directory.read_text(name, 256).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests;
