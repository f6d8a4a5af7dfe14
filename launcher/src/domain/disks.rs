//! Disks.

use std::collections::BTreeSet;

use api::{
    VirtualMachineInstance, hotplug, quantity,
    vmi::{disks::Disk, domain::DomainSpec, volumes::Volume},
};

use super::{DomainError, Environment, alias, check, given, pci_address, virtio_model, xml::Element};
use crate::storage::{Backend, DiskSource, Prepared};

/// Cache modes.
const CACHES: [&str; 3] = ["none", "writethrough", "writeback"];

/// Returns the bus of a disk of any kind.
pub(super) fn bus(disk: &Disk) -> &str {
    let bus = if let Some(cdrom) = &disk.cdrom {
        &cdrom.bus
    } else if let Some(lun) = &disk.lun {
        &lun.bus
    } else if let Some(disk) = &disk.disk {
        &disk.bus
    } else {
        &None
    };
    given(bus).unwrap_or("sata")
}

/// I/O threads and their assignment to disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct IoThreads {
    total: u32,
    shared: u32,
    pool: bool,
}

impl IoThreads {
    /// Renders the `<iothreads>` element, if there are any.
    pub(super) fn element(&self) -> Option<Element> {
        (self.total > 0).then(|| Element::new("iothreads").text(self.total.to_string()))
    }

    /// Returns the numbers of threads with a CPU of their own, if CPUs are dedicated, and of others.
    pub(super) fn own_and_shared(&self) -> (u32, u32) {
        if self.pool { (self.total, 0) } else { (0, self.total) }
    }

    /// Returns the next shared thread, round-robin.
    fn after(&self, thread: u32) -> u32 {
        thread % self.shared.max(1) + 1
    }
}

/// Counts the threads of the VMI's policy.
pub(super) fn io_threads(spec: &DomainSpec) -> IoThreads {
    let disks = u32::try_from(spec.devices.disks.len()).unwrap_or(u32::MAX);
    let dedicated = spec.devices.disks.iter().filter(|disk| disk.dedicated_io_thread == Some(true)).count();
    let dedicated = u32::try_from(dedicated).unwrap_or(u32::MAX);
    match spec.io_threads_policy.as_deref() {
        Some("supplementalPool") => {
            let total = spec.io_threads.as_ref().and_then(|pool| pool.supplemental_pool_thread_count).unwrap_or(1);
            IoThreads { total, shared: 0, pool: true }
        }
        Some("auto") => {
            let cpus = spec.resources.requests.get("cpu").or_else(|| spec.resources.limits.get("cpu"));
            let cpus = cpus.and_then(|q| quantity::units(q).ok()).and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
            // All of them share the CPU of an isolated emulator.
            let is_isolated =
                spec.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement && cpu.isolate_emulator_thread);
            let limit = if is_isolated { 1 } else { cpus.max(1).saturating_mul(2) };
            let plain = disks.saturating_sub(dedicated);
            let shared =
                if plain.saturating_add(dedicated) > limit { limit.saturating_sub(dedicated).max(1) } else { plain };
            IoThreads { total: shared + dedicated, shared, pool: false }
        }
        Some("shared") => IoThreads { total: 1 + dedicated, shared: 1, pool: false },
        _ if dedicated > 0 => IoThreads { total: 1 + dedicated, shared: 1, pool: false },
        _ => IoThreads::default(),
    }
}

/// The disks of a domain.
pub(super) struct Disks {
    /// The `<disk>` elements.
    pub(crate) elements: Vec<Element>,
    /// Target device of each disk.
    pub(crate) targets: Vec<protocol::DiskTarget>,
    /// Disks of hot-plugged volumes.
    pub(crate) plugged: Vec<String>,
    /// I/O thread of the SCSI controller, shared by its disks.
    pub(crate) scsi_thread: Option<u32>,
}

/// Renders the VMI's disks.
pub(super) fn disks(
    vmi: &VirtualMachineInstance,
    env: &Environment<'_>,
    vcpus: u32,
    threads: &IoThreads,
) -> Result<Disks, DomainError> {
    let devices = &vmi.spec.domain.devices;
    // Of the running domain first: the status may be behind it.
    let active = env.prepared.targets.iter().map(|(name, target)| (name.as_str(), target.as_str()));
    let in_status = vmi.status.iter().flat_map(|status| &status.volume_status);
    let in_status = in_status.filter(|status| !status.target.is_empty());
    let known: Vec<(&str, &str)> =
        active.chain(in_status.map(|status| (status.name.as_str(), status.target.as_str()))).collect();
    let mut taken: BTreeSet<String> = known.iter().map(|(_, target)| (*target).to_owned()).collect();
    let mut elements = Vec::new();
    let (mut targets, mut plugged) = (Vec::new(), Vec::new());
    let (mut next_shared, mut next_dedicated) = (0, threads.shared);
    for disk in &devices.disks {
        let volume = vmi.spec.volumes.iter().find(|volume| volume.name == disk.name);
        let source = env.prepared.sources.get(&disk.name);
        let is_hotplugged = volume.is_some_and(|volume| hotplug::is_hotplugged(vmi, volume));
        if source.is_none() && is_hotplugged && disk.cdrom.is_none() {
            continue;
        }
        if source.is_none() && !is_hotplugged && (volume.is_some() || disk.cdrom.is_none()) {
            return Err(DomainError::NoVolume(disk.name.clone()));
        }
        if is_hotplugged {
            plugged.push(disk.name.clone());
        }
        let prefix = if bus(disk) == "virtio" { "vd" } else { "sd" };
        let target = match known.iter().find(|(name, target)| *name == disk.name && target.starts_with(prefix)) {
            Some((_, target)) => (*target).to_owned(),
            None => first_free(prefix, &taken),
        };
        taken.insert(target.clone());
        let thread = if bus(disk) != "virtio" || threads.total == 0 || threads.pool {
            None
        } else if disk.dedicated_io_thread == Some(true) {
            next_dedicated += 1;
            Some(next_dedicated)
        } else {
            next_shared = threads.after(next_shared);
            Some(next_shared)
        };
        let queues = (devices.block_multi_queue == Some(true)).then_some(vcpus);
        let changeable = disk.cdrom.is_some() && (is_hotplugged || volume.is_none());
        let media = if changeable { Media::Changeable } else { Media::Fixed(source) };
        let format = source.map_or("raw", format);
        let driver = driver(disk, media, format, discards(vmi, disk, volume), queues, thread, threads)?;
        let read_only = disk.is_read_only() || volume.is_some_and(|volume| volume.downward_metrics.is_some());
        elements.push(one((vmi, disk, read_only), source, &target, driver, block_io(disk, env.prepared))?);
        targets.push(protocol::DiskTarget {
            volume: disk.name.clone(),
            target,
            size: source.map_or(0, |source| source.made_size),
        });
    }
    let on_scsi = |disk: &Disk| bus(disk) == "scsi" && disk.dedicated_io_thread == Some(true);
    let scsi_thread = (threads.shared > 0 && devices.disks.iter().any(on_scsi)).then(|| threads.after(next_shared));
    Ok(Disks { elements, targets, plugged, scsi_thread })
}

fn one(
    (vmi, disk, read_only): (&VirtualMachineInstance, &Disk, bool),
    source: Option<&DiskSource>,
    target: &str,
    driver: Element,
    block_io: Option<Element>,
) -> Result<Element, DomainError> {
    let bus = bus(disk);
    let device = match (&disk.cdrom, &disk.lun) {
        (Some(_), _) => "cdrom",
        (None, Some(_)) => "lun",
        (None, None) => "disk",
    };
    check("spec.domain.devices.disks.bus", bus, &["virtio", "sata", "scsi", "usb"])?;
    // An empty drive takes a block device later.
    let kind = match source.map(|source| &source.backend) {
        Some(Backend::Block { .. }) | None => "block",
        Some(Backend::File { .. }) => "file",
    };
    let mut element = Element::new("disk")
        .with("type", kind)
        .with("device", device)
        .with_some("model", (bus == "virtio" && device == "disk").then(|| virtio_model(vmi)))
        .child(driver);
    if let Some(source) = source {
        element = element.child(match &source.backend {
            Backend::File { path, .. } => Element::new("source").with("file", path.to_string_lossy()),
            Backend::Block { path } => Element::new("source").with("dev", path.to_string_lossy()),
        });
        if let Some((path, format)) = &source.backing {
            let (kind, attribute) = if path.starts_with("/dev") { ("block", "dev") } else { ("file", "file") };
            // End the backing chain here, whatever the image's header says: QEMU opens nothing further.
            element = element.child(
                Element::new("backingStore")
                    .with("type", kind)
                    .child(Element::new("format").with("type", format.as_str()))
                    .child(Element::new("source").with(attribute, path.to_string_lossy()))
                    .child(Element::new("backingStore")),
            );
        }
    }
    let tray = disk.cdrom.as_ref().and_then(|cdrom| given(&cdrom.tray));
    // A LUN has the serial number of its device, and libvirt refuses another one. virtctl always requests one.
    let serial = given(&disk.serial).filter(|_| disk.lun.is_none());
    element = element
        .child(Element::new("target").with("dev", target).with("bus", bus).with_some("tray", tray))
        .children(block_io)
        .children(read_only.then(|| Element::new("readonly")))
        .children((disk.shareable == Some(true)).then(|| Element::new("shareable")))
        .children(serial.map(|serial| Element::new("serial").text(serial)))
        .children(disk.boot_order.map(|order| Element::new("boot").with("order", order.to_string())))
        .child(alias(&disk.name));
    if let Some(address) = disk.disk.as_ref().and_then(|disk| given(&disk.pci_address)) {
        if bus != "virtio" {
            return Err(DomainError::PciAddressOfDisk(disk.name.clone()));
        }
        element = element.child(pci_address(address)?);
    } else if bus == "scsi" {
        element = element.children(position(target).map(|unit| {
            Element::new("address")
                .with("type", "drive")
                .with("controller", "0")
                .with("bus", "0")
                .with("unit", unit.to_string())
        }));
    }
    Ok(element)
}

/// Renders the block sizes of a disk, if specified.
fn block_io(disk: &Disk, prepared: &Prepared) -> Option<Element> {
    let element = Element::new("blockio");
    if let Some(custom) = &disk.block_size.as_ref()?.custom {
        let text = |value: Option<u64>| value.filter(|v| *v > 0).map(|v| v.to_string());
        return Some(
            element
                .with_some("logical_block_size", text(custom.logical))
                .with_some("physical_block_size", text(custom.physical))
                .with_some("discard_granularity", text(custom.discard_granularity)),
        );
    }
    let sizes = prepared.block_sizes.get(&disk.name)?;
    Some(
        element
            .with("logical_block_size", sizes.logical.to_string())
            .with("physical_block_size", sizes.physical.to_string())
            .with("discard_granularity", sizes.discard.to_string()),
    )
}

/// Enables discard, except for preallocated claims and for read-only images of files in a CD-ROM.
fn discards(vmi: &VirtualMachineInstance, disk: &Disk, volume: Option<&Volume>) -> bool {
    let Some(volume) = volume else { return true };
    let mut claims = vmi
        .status
        .iter()
        .flat_map(|status| &status.volume_status)
        .filter(|status| status.name == volume.name)
        .filter_map(|status| status.persistent_volume_claim_info.as_ref());
    if claims.any(|claim| claim.preallocated == Some(true)) {
        return false;
    }
    disk.cdrom.is_none()
        || volume.container_disk.is_some()
        || volume.empty_disk.is_some()
        || volume.ephemeral.is_some()
        || volume.persistent_volume_claim.is_some()
        || volume.data_volume.is_some()
}

/// Media of a disk over the life of a domain.
#[derive(Clone, Copy)]
enum Media<'a> {
    /// One image or device.
    Fixed(Option<&'a DiskSource>),
    /// A drive whose medium changes while the domain runs. libvirt refuses a change of the cache mode, so that it does not
    /// follow the medium.
    Changeable,
}

fn format(source: &DiskSource) -> &'static str {
    match &source.backend {
        Backend::File { format, .. } => format.as_str(),
        Backend::Block { .. } => "raw",
    }
}

fn driver(
    disk: &Disk,
    media: Media<'_>,
    format: &'static str,
    discard: bool,
    queues: Option<u32>,
    thread: Option<u32>,
    threads: &IoThreads,
) -> Result<Element, DomainError> {
    let virtio = bus(disk) == "virtio";
    let asked = given(&disk.io);
    check("spec.domain.devices.disks.io", asked.unwrap_or("native"), &["native", "threads", "io_uring"])?;
    let mut driver = Element::new("driver").with("name", "qemu").with("type", format);
    match media {
        Media::Fixed(None) => {}
        Media::Fixed(Some(source)) => {
            let cache = cache(disk, source)?;
            let steady = matches!(source.backend, Backend::Block { .. }) || source.preallocated;
            let io = asked.or_else(|| (cache == "none" && steady).then_some("native"));
            driver = driver.with("cache", cache).with_some("io", io);
        }
        Media::Changeable => {
            let cache = given(&disk.cache);
            check("spec.domain.devices.disks.cache", cache.unwrap_or("none"), &CACHES)?;
            driver = driver.with_some("cache", cache).with_some("io", asked);
        }
    }
    let policy = given(&disk.error_policy).unwrap_or("stop");
    check("spec.domain.devices.disks.errorPolicy", policy, &["stop", "ignore", "report", "enospace"])?;
    driver = driver.with("error_policy", policy).with_some("discard", discard.then_some("unmap"));
    if virtio {
        driver = driver
            .with_some("iothread", thread.map(|thread| thread.to_string()))
            .with_some("queues", queues.map(|queues| queues.to_string()));
        if threads.pool {
            let list = (1..=threads.total).map(|id| Element::new("iothread").with("id", id.to_string()));
            driver = driver.child(Element::new("iothreads").children(list));
        }
    }
    Ok(driver)
}

fn cache<'a>(disk: &'a Disk, source: &DiskSource) -> Result<&'a str, DomainError> {
    let path = match &source.backend {
        Backend::File { path, .. } | Backend::Block { path } => path,
    };
    let asked = match disk.cache.as_deref().unwrap_or_default() {
        // This node's page cache must not hide writes of other VMIs to the disk.
        "" if disk.shareable == Some(true) => "none",
        asked => asked,
    };
    if disk.shareable == Some(true) && asked != "none" {
        return Err(DomainError::ShareableCache(asked.to_owned()));
    }
    match asked {
        "" if source.direct_io => Ok("none"),
        "" => Ok("writethrough"),
        "none" if !source.direct_io => Err(DomainError::DirectIo(path.clone())),
        asked => check("spec.domain.devices.disks.cache", asked, &CACHES).map(|()| asked),
    }
}

/// Returns the first free device name with this prefix: a, b, ... z, aa, ab, ...
fn first_free(prefix: &str, taken: &BTreeSet<String>) -> String {
    let mut index: u32 = 0;
    loop {
        let name = format!("{prefix}{}", letters(index));
        if !taken.contains(&name) {
            return name;
        }
        index += 1;
    }
}

/// Returns the index of a device name: 0 for `sda`.
fn position(target: &str) -> Option<u32> {
    let mut letters = target.get(2..)?.bytes();
    let place = letters.try_fold(0_u32, |place, letter| {
        let digit = letter.checked_sub(b'a').filter(|digit| *digit < 26)?;
        place.checked_mul(26)?.checked_add(u32::from(digit) + 1)
    });
    place?.checked_sub(1)
}

fn letters(mut index: u32) -> String {
    let mut name = Vec::new();
    loop {
        name.push(char::from(b'a' + u8::try_from(index % 26).unwrap_or_default()));
        if index < 26 {
            break;
        }
        index = index / 26 - 1;
    }
    name.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_go_on_after_z() {
        for (index, name) in [(0, "a"), (25, "z"), (26, "aa"), (27, "ab"), (51, "az"), (52, "ba"), (702, "aaa")] {
            assert_eq!(letters(index), name);
            assert_eq!(position(&format!("sd{name}")), Some(index));
        }
        for name in ["", "sd", "sda1", "sdA", "s\u{e9}", "sdaaaaaaaaaaaa"] {
            assert_eq!(position(name), None, "{name}");
        }
    }
}
