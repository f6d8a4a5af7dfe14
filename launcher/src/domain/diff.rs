//! Compares the active domain with the wanted one. Pure.
//!
//! Only properties that libvirt keeps as they were defined are compared: what libvirt adds or normalizes is no difference.

use std::path::Path;

use protocol::{ItemKind, ItemResult};

use super::parse::{DiskConfig, DomainConfig, InterfaceConfig};
use crate::storage::Backend;

/// Unit to which libvirt rounds the memory of a domain up.
const MEMORY_UNIT: u64 = 1 << 20;

/// Unit in which a guest gets memory and gives it back: a huge page of the processor.
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
        /// The change.
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
        /// The change.
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
    /// Attach it.
    Attach,
    /// Request the guest to release it.
    Detach,
    /// Change its medium or the state of its link.
    Update,
}

/// A part of the domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Item {
    /// Kind.
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
    let added = wanted.checked_sub(boot).filter(|added| added.is_multiple_of(MEMORY_BLOCK))?;
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
            let size = active.most_memory?.checked_sub(boot).filter(|size| added <= *size)?;
            let xml = format!(
                "<memory model='virtio-mem'><target><size unit='b'>{size}</size><node>0</node>\
                 <block unit='b'>{MEMORY_BLOCK}</block>{requested}</target></memory>"
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
                *step = Step::Device { change, item: Item::new(ItemKind::Volume, &disk.name), xml: disk.xml };
            }
        }
    }

    fn compare_disk(&mut self, active: &DiskConfig, wanted: &DiskConfig, hotplugged: &Path) {
        // An image is known by its volume's name, so only an empty drive differs from one with a medium.
        if active.source.is_some() != wanted.source.is_some() {
            let drives = active.device == "cdrom" && wanted.device == "cdrom";
            self.steps.push(if drives && active.is_within(hotplugged) && wanted.is_within(hotplugged) {
                // The drive keeps its device name, by which the hypervisor finds it.
                let (item, xml) = (Item::new(ItemKind::Volume, &wanted.name), wanted.xml.clone());
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

#[cfg(test)]
mod tests {
    use super::{super::parse::parse, *};

    const ACTIVE: &str = include_str!("recorded/active.xml");
    const PLAIN: &str = include_str!("recorded/plain.xml");

    /// A change of the wanted XML, and the steps and properties that follow.
    type Row = (&'static str, &'static str, Vec<Step>, Vec<(Item, &'static str)>);

    fn between(active: &str, wanted: &str) -> Difference {
        diff(&parse(active), &parse(wanted), &[], Path::new("/plugged"))
    }

    #[test]
    fn a_domain_as_it_was_defined_has_no_difference() {
        assert_eq!(between(ACTIVE, PLAIN), Difference::default());
        let full = include_str!("recorded/full.xml");
        assert_eq!(between(full, full), Difference::default());
        // Recorded from libvirt 11.3: a definition of the launcher, and the status that libvirt wrote after the start.
        let (started, active) = (include_str!("recorded/started.xml"), include_str!("recorded/started-active.xml"));
        assert_eq!(between(active, started), Difference::default());
        assert_eq!(parse(active).disks.len(), 5);
        assert_eq!(parse(active).devices.len(), 3);
    }

    #[test]
    fn each_change_of_the_wanted_domain_is_a_step_or_needs_a_restart() {
        let volume = |name: &str| Item::new(ItemKind::Volume, name);
        let (nic, cpu) = (Item::new(ItemKind::Interface, "default"), Item::new(ItemKind::Cpu, ""));
        let table: [Row; 11] = [
            ("placement='static'>1<", "placement='static'>2<", vec![], vec![(cpu.clone(), "number of vCPUs")]),
            ("sockets='1'", "sockets='2'", vec![], vec![(cpu, "CPU topology")]),
            (
                "<memory unit='b'>134217728",
                "<memory unit='b'>268435456",
                vec![],
                vec![(Item::new(ItemKind::Memory, ""), "amount of memory")],
            ),
            // libvirt rounds up to MiB.
            ("<memory unit='b'>134217728", "<memory unit='b'>134217000", vec![], vec![]),
            ("ua-ci", "ua-cloud", vec![Step::Detach(volume("ci")), Step::Attach(volume("cloud"))], vec![]),
            ("<source file='/eph/ci.iso'/>", "", vec![Step::Update(volume("ci"), "medium")], vec![]),
            ("dev='vdb' bus='virtio'", "dev='sdb' bus='sata'", vec![], vec![(volume("ci"), "bus")]),
            (
                "<alias name='ua-root'/>",
                "<boot order='1'/><alias name='ua-root'/>",
                vec![],
                vec![(volume("root"), "boot order")],
            ),
            ("02:00:00:00:00:01", "02:00:00:00:00:02", vec![], vec![(nic.clone(), "MAC address")]),
            ("model type='virtio-non-transitional'", "model type='e1000'", vec![], vec![(nic, "model")]),
            (
                "</devices>",
                "<sound model='ich9'><alias name='ua-snd'/></sound></devices>",
                vec![Step::Attach(Item::new(ItemKind::Device, "snd"))],
                vec![],
            ),
        ];
        for (from, to, steps, at_restart) in table {
            let wanted = PLAIN.replacen(from, to, 1);
            assert_ne!(wanted, PLAIN, "{from}");
            assert_eq!(between(ACTIVE, &wanted), Difference { steps, at_restart }, "{from} -> {to}");
        }
    }

    #[test]
    fn guest_grows_and_shrinks_as_far_as_its_definition_allows() {
        let domain = |vcpus: u32, memory: u64, device: &str| {
            format!(
                "<domain><maxMemory unit='b' slots='0'>{}</maxMemory><memory unit='b'>{memory}</memory>\
                 <vcpu current='{vcpus}'>8</vcpu><os><type machine='q35'/></os>\
                 <cpu><topology sockets='4' cores='2' threads='1'/></cpu><devices>{device}</devices></domain>",
                4_u64 << 30
            )
        };
        // libvirt counts the whole device in the memory of an active domain.
        let device = |requested: u64| {
            format!(
                "<memory model='virtio-mem'><target><size unit='KiB'>3145728</size><node>0</node>\
                 <block unit='KiB'>2048</block><requested unit='KiB'>{}</requested><current unit='KiB'>0</current></target>\
                 <alias name='virtiomem0'/></memory>",
                requested >> 10
            )
        };
        let (gib, cpu, memory) = (1_u64 << 30, Item::new(ItemKind::Cpu, ""), Item::new(ItemKind::Memory, ""));
        let update = |added: u64, size: u64| Step::Memory {
            change: DeviceChange::Update,
            size,
            xml: device(gib).replace(
                "<requested unit='KiB'>1048576</requested>",
                &format!("<requested unit='b'>{added}</requested>"),
            ),
        };
        let attach = Step::Memory {
            change: DeviceChange::Attach,
            size: 2 * gib,
            xml: format!(
                "<memory model='virtio-mem'><target><size unit='b'>{}</size><node>0</node>\
                 <block unit='b'>2097152</block><requested unit='b'>{gib}</requested></target></memory>",
                3 * gib
            ),
        };
        let plain = domain(2, gib, "");
        let grown = domain(2, 4 * gib, &device(gib));
        let at_restart =
            |item: &Item, property| Difference { steps: vec![], at_restart: vec![(item.clone(), property)] };
        let steps = |steps| Difference { steps, at_restart: vec![] };
        for (active, vcpus, wanted, expected) in [
            (&plain, 2, gib, steps(vec![])),
            (&plain, 8, gib, steps(vec![Step::Vcpus(8)])),
            (&plain, 1, gib, at_restart(&cpu, "number of vCPUs")),
            (&plain, 2, 2 * gib, steps(vec![attach])),
            (&plain, 2, 5 * gib, at_restart(&memory, "amount of memory")),
            (&plain, 2, gib / 2, at_restart(&memory, "amount of memory")),
            (&plain, 2, gib + (1 << 20), at_restart(&memory, "amount of memory")),
            (&grown, 2, 2 * gib, steps(vec![])),
            (&grown, 4, 4 * gib, steps(vec![Step::Vcpus(4), update(3 * gib, 4 * gib)])),
            (&grown, 2, gib, steps(vec![update(0, gib)])),
            (&grown, 2, gib / 2, at_restart(&memory, "amount of memory")),
        ] {
            assert_eq!(between(active, &domain(vcpus, wanted, "")), expected, "{vcpus} {wanted} of {active}");
        }
        assert_eq!(parse(&grown).memory_requested(), Some(2 * gib));
    }

    #[test]
    fn a_device_whose_name_libvirt_does_not_keep_is_no_difference() {
        let wanted = PLAIN.replacen(
            "</devices>",
            "<watchdog model='i6300esb'><alias name='ua-my.dog'/></watchdog></devices>",
            1,
        );
        let active = ACTIVE.replacen(
            "</devices>",
            "<watchdog model='i6300esb'><alias name='watchdog0'/></watchdog></devices>",
            1,
        );
        assert_eq!(between(&active, &wanted), Difference::default());
    }

    #[test]
    fn disks_grow_to_the_sizes_of_their_claims() {
        let active = parse(ACTIVE);
        let sizes = [("root".into(), 4096), ("unknown".into(), 1)];
        let difference = diff(&active, &active, &sizes, Path::new("/plugged"));
        let resize = Step::Resize { volume: "root".into(), target: "vda".into(), size: 4096 };
        assert_eq!(difference, Difference { steps: vec![resize], at_restart: vec![] });
        assert_eq!(difference.results(), []);
    }

    fn disk(name: &str, device: &str, bus: &str, source: &str) -> String {
        let source = if source.is_empty() { String::new() } else { format!("<source file='{source}'/>") };
        format!(
            "<disk type='file' device='{device}'>{source}<target dev='sdq' bus='{bus}'/><alias name='ua-{name}'/></disk>"
        )
    }

    #[test]
    fn disks_of_hot_plugged_volumes_are_attached_detached_and_their_media_changed() {
        use DeviceChange::{Attach, Detach, Update};
        let volume = |name: &str| Item::new(ItemKind::Volume, name);
        let step = |change, xml: &str| Step::Device { change, item: volume("new"), xml: xml.to_owned() };
        let (plugged, virtio) =
            (disk("new", "disk", "scsi", "/plugged/new.img"), disk("new", "lun", "virtio", "/plugged/new"));
        let (sata, boot) = (disk("new", "disk", "sata", "/plugged/new"), disk("new", "disk", "scsi", "/else/new.img"));
        let (drive, medium) = (disk("new", "cdrom", "sata", ""), disk("new", "cdrom", "sata", "/plugged/new.img"));
        let other = disk("new", "cdrom", "sata", "/else/new.iso");
        for (active, wanted, expected) in [
            ("", plugged.as_str(), vec![step(Attach, &plugged)]),
            ("", &virtio, vec![step(Attach, &virtio)]),
            (&plugged, "", vec![step(Detach, &plugged)]),
            (&plugged, &plugged, vec![]),
            ("", &sata, vec![Step::Attach(volume("new"))]),
            ("", &boot, vec![Step::Attach(volume("new"))]),
            (&boot, "", vec![Step::Detach(volume("new"))]),
            (&drive, &medium, vec![step(Update, &medium)]),
            (&medium, &drive, vec![step(Update, &drive)]),
            (&drive, &other, vec![Step::Update(volume("new"), "medium")]),
            (&other, &drive, vec![Step::Update(volume("new"), "medium")]),
            // The drive itself comes and goes with a restart.
            ("", &drive, vec![Step::Attach(volume("new"))]),
            ("", &medium, vec![Step::Attach(volume("new"))]),
        ] {
            let with = |xml: &str, disk: &str| xml.replacen("</devices>", &format!("{disk}</devices>"), 1);
            let difference = between(&with(ACTIVE, active), &with(PLAIN, wanted));
            assert_eq!(difference, Difference { steps: expected, at_restart: vec![] }, "{active} -> {wanted}");
        }
    }

    #[test]
    fn interfaces_come_and_go_and_their_links_change() {
        use DeviceChange::{Attach, Detach, Update};
        let lan = |link: &str| {
            format!(
                "<interface type='ethernet'><mac address='02:00:00:00:00:07'/>{link}<alias name='ua-lan'/></interface>"
            )
        };
        let (plain, up, down) = (lan(""), lan("<link state='up'/>"), lan("<link state='down'/>"));
        let moved = |state: &str| {
            let link = format!("<link state='{state}'/></interface>");
            plain.replace("</interface>", &link)
        };
        for (active, wanted, expected) in [
            ("", plain.as_str(), vec![(Attach, plain.clone())]),
            ("", &down, vec![(Attach, down.clone())]),
            (&plain, "", vec![(Detach, plain.clone())]),
            (&plain, &plain, vec![]),
            (&plain, &up, vec![]),
            (&plain, &down, vec![(Update, moved("down"))]),
            (&up, &down, vec![(Update, down.clone())]),
            (&down, &plain, vec![(Update, up.clone())]),
        ] {
            let with = |xml: &str, nic: &str| xml.replacen("</devices>", &format!("{nic}</devices>"), 1);
            let difference = between(&with(ACTIVE, active), &with(PLAIN, wanted));
            let item = Item::new(ItemKind::Interface, "lan");
            let steps = expected.into_iter().map(|(change, xml)| Step::Device { change, item: item.clone(), xml });
            assert_eq!(difference, Difference { steps: steps.collect(), at_restart: vec![] }, "{active} -> {wanted}");
        }
    }

    #[test]
    fn results_name_the_item_and_what_cannot_be_changed() {
        let wanted = PLAIN.replacen("ua-ci", "ua-cloud", 1).replacen("sockets='1'", "sockets='2'", 1);
        let results: Vec<String> = between(ACTIVE, &wanted)
            .results()
            .iter()
            .map(|item| format!("{:?} {:?}: {} {}", item.kind(), item.name, item.message, item.needs_restart))
            .collect();
        let expected = [
            "Volume \"ci\": cannot be detached from the running VMI true",
            "Volume \"cloud\": cannot be attached to the running VMI true",
            "Cpu \"\": the CPU topology cannot be changed in the running VMI true",
        ];
        assert_eq!(results, expected);
    }
}
