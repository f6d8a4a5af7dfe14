//! Compares the active domain with the wanted one. Pure.
//!
//! Only properties that libvirt keeps as they were defined are compared: what libvirt adds or normalizes is no difference.

use std::{cmp::Reverse, ops::Range, path::Path};

use protocol::{ItemKind, ItemResult};

use super::parse::{DiskConfig, DomainConfig, InterfaceConfig};
use crate::storage::Backend;

/// Unit to which libvirt rounds the memory of a domain up.
const MEMORY_UNIT: u64 = 1 << 20;

/// Smallest unit in which a guest gets memory and gives it back: a huge page of the processor.
const MEMORY_BLOCK: u64 = 2 << 20;

/// A change that brings the active domain closer to the wanted one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Attach a device.
    Attach(Item),
    /// Detach a device.
    Detach(Item),
    /// Change a property of a device that hypervisors can change live.
    Update(Item, &'static str),
    /// Attach, detach or change a hot-plugged disk or an interface.
    Device {
        change: DeviceChange,
        /// The device.
        item: Item,
        /// Its element: of the active domain to detach it, as it is to become otherwise.
        xml: String,
    },
    /// Plug vCPUs: so many are to be plugged.
    Vcpus(u32),
    /// Attach the memory device, or request another size of the guest.
    Memory {
        change: DeviceChange,
        /// Memory in bytes that the guest is to have.
        size: u64,
        /// The device's element.
        xml: String,
    },
    /// Resize a disk.
    Resize {
        /// The disk.
        volume: String,
        /// Its device name.
        target: String,
        /// Its size in bytes.
        size: u64,
    },
}

/// A live change of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChange {
    Attach,
    /// Request the guest to release it.
    Detach,
    /// Change its medium or the state of its link.
    Update,
}

/// A part of the domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Item {
    pub(crate) kind: ItemKind,
    /// Name in the VMI's spec; empty for CPU and memory.
    pub(crate) name: String,
}

/// Differences between two domains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Changes of the running domain.
    pub(crate) steps: Vec<Step>,
    /// Properties that change with the next start only.
    pub(crate) at_restart: Vec<(Item, &'static str)>,
}

impl Item {
    pub(crate) fn new(kind: ItemKind, name: &str) -> Self {
        Self { kind, name: name.to_owned() }
    }

    /// Returns the result of a change that the next Sync attempts again.
    pub(crate) fn failed(&self, message: String) -> ItemResult {
        ItemResult { kind: self.kind.into(), name: self.name.clone(), message, needs_restart: false }
    }

    /// Returns the result for a change that takes effect at the next start.
    pub(crate) fn at_restart(&self, message: String) -> ItemResult {
        ItemResult { kind: self.kind.into(), name: self.name.clone(), message, needs_restart: true }
    }
}

impl Step {
    /// Returns the result of a step that the launcher does not carry out in a running domain.
    pub(crate) fn at_restart(&self) -> Option<ItemResult> {
        let (item, message) = match self {
            Self::Attach(item) => (item, "cannot be attached to the running VMI".to_owned()),
            Self::Detach(item) => (item, "cannot be detached from the running VMI".to_owned()),
            Self::Update(item, property) => (item, cannot_change(property)),
            Self::Device { .. } | Self::Resize { .. } | Self::Vcpus(_) | Self::Memory { .. } => return None,
        };
        Some(item.at_restart(message))
    }
}

impl Difference {
    /// Returns the results of everything that takes effect at the next start.
    pub(crate) fn results(&self) -> Vec<ItemResult> {
        let properties = self.at_restart.iter().map(|(item, property)| item.at_restart(cannot_change(property)));
        self.steps.iter().filter_map(Step::at_restart).chain(properties).collect()
    }
}

fn cannot_change(property: &str) -> String {
    format!("the {property} cannot be changed in the running VMI")
}

/// Compares two domains. `sizes` are the sizes in bytes that disks can have, by volume.
/// `hotplugged` is the directory of hot-plugged volumes: disks behind others change with the next start only.
pub(crate) fn diff(
    active: &DomainConfig,
    wanted: &DomainConfig,
    sizes: &[(String, u64)],
    hotplugged: &Path,
) -> Difference {
    let mut difference = Difference { steps: resizes(active, sizes), at_restart: Vec::new() };
    difference.compare_cpu_and_memory(active, wanted);
    difference.compare_disks(active, wanted, hotplugged);
    difference.compare_interfaces(active, wanted);
    difference.pair(ItemKind::Device, &active.devices, &wanted.devices, |device| &device.name);
    difference
}

/// Returns the step that gives the guest `wanted` bytes of memory, if its memory device can.
fn memory_step(active: &DomainConfig, wanted: u64) -> Option<Step> {
    let boot = active.memory?;
    let block = active.page_size.unwrap_or(0).max(MEMORY_BLOCK);
    let added = wanted.checked_sub(boot).filter(|added| added.is_multiple_of(block))?;
    let requested = format!("<requested unit='b'>{added}</requested>");
    let (change, xml) = match &active.memory_device {
        Some(device) if added <= device.size => {
            let mut xml = device.xml.clone();
            xml.get(device.requested_at.clone())?;
            xml.replace_range(device.requested_at.clone(), &requested);
            (DeviceChange::Update, xml)
        }
        Some(_) => return None,
        None => {
            // libvirt accepts a device whose size is no multiple of its blocks, and QEMU does not.
            let size = active.most_memory?.checked_sub(boot);
            let size = size.filter(|size| added <= *size && size.is_multiple_of(block))?;
            let xml = format!(
                "<memory model='virtio-mem'><target><size unit='b'>{size}</size><node>0</node>\
                 <block unit='b'>{block}</block>{requested}</target></memory>"
            );
            (DeviceChange::Attach, xml)
        }
    };
    Some(Step::Memory { change, size: wanted, xml })
}

/// Returns the steps that give disks their sizes. The hypervisor compares the size with the present one.
fn resizes(active: &DomainConfig, sizes: &[(String, u64)]) -> Vec<Step> {
    let step = |(volume, size): &(String, u64)| {
        let disk = active.disks.iter().find(|disk| disk.name == *volume)?;
        Some(Step::Resize { volume: volume.clone(), target: disk.target.clone(), size: *size })
    };
    sizes.iter().filter_map(step).collect()
}

impl Difference {
    fn needs_restart(&mut self, kind: ItemKind, name: &str, property: &'static str) {
        self.at_restart.push((Item::new(kind, name), property));
    }

    fn compare_cpu_and_memory(&mut self, active: &DomainConfig, wanted: &DomainConfig) {
        if differ(active.topology, wanted.topology) {
            let property =
                if differ(active.most_vcpus, wanted.most_vcpus) { "number of vCPUs" } else { "CPU topology" };
            self.needs_restart(ItemKind::Cpu, "", property);
        } else if differ(active.vcpus, wanted.vcpus) {
            match active.vcpus.zip(wanted.vcpus).filter(|(active, wanted)| active < wanted) {
                Some((_, wanted)) if active.most_vcpus.is_some_and(|most| wanted <= most) => {
                    self.steps.push(Step::Vcpus(wanted));
                }
                // A guest releases a vCPU only of its own accord.
                _ => self.needs_restart(ItemKind::Cpu, "", "number of vCPUs"),
            }
        }
        let rounded = |memory: Option<u64>| memory.map(|memory| memory.div_ceil(MEMORY_UNIT));
        if differ(rounded(active.memory_requested()), rounded(wanted.memory)) {
            match wanted.memory.and_then(|wanted| memory_step(active, wanted)) {
                Some(step) => self.steps.push(step),
                None => self.needs_restart(ItemKind::Memory, "", "amount of memory"),
            }
        }
    }

    /// Adds a step for each device that only one of the domains has, and returns the devices that both have.
    fn pair<'a, T>(
        &mut self,
        kind: ItemKind,
        active: &'a [T],
        wanted: &'a [T],
        name: fn(&T) -> &str,
    ) -> Vec<(&'a T, &'a T)> {
        let find = |list: &'a [T], device: &T| list.iter().find(|other| name(other) == name(device));
        let gone = active.iter().filter(|device| find(wanted, device).is_none());
        self.steps.extend(gone.map(|device| Step::Detach(Item::new(kind, name(device)))));
        let mut both = Vec::new();
        for device in wanted {
            match find(active, device) {
                Some(known) => both.push((known, device)),
                None => self.steps.push(Step::Attach(Item::new(kind, name(device)))),
            }
        }
        both
    }

    /// Compares the disks of two domains. Disks are detached first, so that their ports and names are free.
    fn compare_disks(&mut self, active: &DomainConfig, wanted: &DomainConfig, hotplugged: &Path) {
        let both = self.pair(ItemKind::Volume, &active.disks, &wanted.disks, |disk| &disk.name);
        for (active, wanted) in both {
            self.compare_disk(active, wanted, hotplugged);
        }
        let find = |config: &DomainConfig, name: &str| config.disks.iter().find(|disk| disk.name == name).cloned();
        for step in &mut self.steps {
            let (change, disk) = match step {
                Step::Attach(item) if item.kind == ItemKind::Volume => (DeviceChange::Attach, find(wanted, &item.name)),
                Step::Detach(item) if item.kind == ItemKind::Volume => (DeviceChange::Detach, find(active, &item.name)),
                _ => continue,
            };
            if let Some(disk) = disk.filter(|disk| disk.can_be_plugged(hotplugged)) {
                let xml = if change == DeviceChange::Attach { disk.on_threads_of(active) } else { disk.xml };
                *step = Step::Device { change, item: Item::new(ItemKind::Volume, &disk.name), xml };
            }
        }
    }

    fn compare_disk(&mut self, active: &DiskConfig, wanted: &DiskConfig, hotplugged: &Path) {
        // An image is known by its volume's name, so only an empty drive differs from one with a medium.
        if active.source.is_some() != wanted.source.is_some() {
            let drives = active.device == "cdrom" && wanted.device == "cdrom";
            self.steps.push(if drives && active.is_within(hotplugged) && wanted.is_within(hotplugged) {
                // The drive keeps its device name, by which the hypervisor finds it, and its address.
                let (item, xml) = (Item::new(ItemKind::Volume, &wanted.name), wanted.in_drive(active));
                Step::Device { change: DeviceChange::Update, item, xml }
            } else {
                Step::Update(Item::new(ItemKind::Volume, &wanted.name), "medium")
            });
        }
        let changed = [
            (active.device != wanted.device, "kind of device"),
            (active.bus != wanted.bus, "bus"),
            (active.readonly != wanted.readonly, "read-only mode"),
            (active.shareable != wanted.shareable, "sharing"),
            (active.serial != wanted.serial, "serial number"),
            (active.boot_order != wanted.boot_order, "boot order"),
        ];
        if let Some((_, property)) = changed.into_iter().find(|(changed, _)| *changed) {
            self.needs_restart(ItemKind::Volume, &wanted.name, property);
        }
    }

    /// Compares the interfaces of two domains.
    fn compare_interfaces(&mut self, active: &DomainConfig, wanted: &DomainConfig) {
        let kind = ItemKind::Interface;
        let both = self.pair(kind, &active.interfaces, &wanted.interfaces, |interface| &interface.name);
        both.into_iter().for_each(|(active, wanted)| self.compare_interface(active, wanted));
        let xml = |config: &DomainConfig, name: &str| {
            config.interfaces.iter().find(|interface| interface.name == name).map(|interface| interface.xml.clone())
        };
        for step in &mut self.steps {
            let (change, item, xml) = match step {
                Step::Attach(item) if item.kind == kind => (DeviceChange::Attach, &*item, xml(wanted, &item.name)),
                Step::Detach(item) if item.kind == kind => (DeviceChange::Detach, &*item, xml(active, &item.name)),
                _ => continue,
            };
            if let Some(xml) = xml {
                *step = Step::Device { change, item: item.clone(), xml };
            }
        }
    }

    fn compare_interface(&mut self, active: &InterfaceConfig, wanted: &InterfaceConfig) {
        if active.link_up != wanted.link_up {
            let item = Item::new(ItemKind::Interface, &wanted.name);
            let xml = active.with_link(wanted.link_up);
            self.steps.push(Step::Device { change: DeviceChange::Update, item, xml });
        }
        let changed = [
            (differ(active.mac.as_ref(), wanted.mac.as_ref()), "MAC address"),
            (active.model != wanted.model, "model"),
            (active.boot_order != wanted.boot_order, "boot order"),
        ];
        if let Some((_, property)) = changed.into_iter().find(|(changed, _)| *changed) {
            self.needs_restart(ItemKind::Interface, &wanted.name, property);
        }
    }
}

impl InterfaceConfig {
    /// Returns the element with another state of the link.
    fn with_link(&self, up: bool) -> String {
        let mut xml = self.xml.clone();
        if xml.get(self.link_at.clone()).is_some() {
            xml.replace_range(self.link_at.clone(), &format!("<link state='{}'/>", if up { "up" } else { "down" }));
        }
        xml
    }
}

impl DiskConfig {
    /// Returns true if the disk can be attached to a running domain, and detached from it.
    fn can_be_plugged(&self, hotplugged: &Path) -> bool {
        self.source.is_some()
            && self.is_within(hotplugged)
            && self.device != "cdrom"
            && ["virtio", "scsi"].contains(&self.bus.as_str())
    }

    /// Returns the element with the address of a drive: launchers of other versions give drives other addresses. The drive keeps
    /// its mode of discards, which depends on the medium of the start: libvirt refuses another one, but none is no change.
    fn in_drive(&self, drive: &Self) -> String {
        let mut edits = vec![(self.discard_at.clone(), "")];
        let address = drive.xml.get(drive.address_at.clone()).filter(|address| !address.is_empty());
        edits.extend(address.map(|address| (self.address_at.clone(), address)));
        self.edited(edits)
    }

    /// Returns the element for a running domain: it gets no further I/O threads, and libvirt refuses one that it lacks.
    fn on_threads_of(&self, domain: &DomainConfig) -> String {
        let thread = self.io_thread.and_then(|thread| thread.saturating_sub(1).checked_rem(domain.io_threads));
        let attribute = thread.map(|thread| format!(" iothread='{}'", thread + 1)).unwrap_or_default();
        self.edited(vec![(self.io_thread_at.clone(), attribute.as_str())])
    }

    /// Returns the element with other text in these ranges. An empty range is a part that the element does not have.
    fn edited(&self, mut edits: Vec<(Range<usize>, &str)>) -> String {
        let mut xml = self.xml.clone();
        // From the last one: the others stay at their places.
        edits.sort_by_key(|(at, _)| Reverse(at.start));
        for (at, text) in edits {
            if xml.get(at.clone()).is_some_and(|former| !former.is_empty()) {
                xml.replace_range(at, text);
            }
        }
        xml
    }

    /// Returns true for a disk with a hot-plugged volume, and for an empty drive.
    fn is_within(&self, hotplugged: &Path) -> bool {
        self.source.as_ref().is_none_or(|source| match &source.backend {
            Backend::File { path, .. } | Backend::Block { path } => path.starts_with(hotplugged),
        })
    }
}

/// Compares two values that are both known.
fn differ<T: PartialEq>(active: Option<T>, wanted: Option<T>) -> bool {
    active.zip(wanted).is_some_and(|(active, wanted)| active != wanted)
}
