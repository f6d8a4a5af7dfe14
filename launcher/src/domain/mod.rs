//! Renders a VirtualMachineInstance as libvirt's domain XML, parses such XML ([`parse`]) and compares domains ([`diff`]).
//!
//! Pure: facts of the pod (devices, images, firmware files) are in [`Environment`]. A value that the XML cannot express
//! is an error, so that no setting is lost silently; admission rejects it first. Fields that no component carries out
//! are found by [`unsupported`].

mod cpu;
pub(crate) mod destination;
mod devices;
pub(crate) mod diff;
mod disks;
mod features;
mod file_systems;
mod firmware;
mod host_devices;
pub(crate) mod host_topology;
mod memory;
mod network;
pub(crate) mod numa;
pub(crate) mod parse;
pub(crate) mod pinning;
mod ports;
pub(crate) mod resumed;
mod root_complex;
mod tags;
pub(crate) mod unsupported;
pub(crate) mod xml;

use std::path::{Path, PathBuf};

use api::{StartStrategy, VirtualMachineInstance, names, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use thiserror::Error;

pub(crate) use self::{
    firmware::{Uefi, select_uefi},
    host_devices::AllocatedDevices,
    pinning::HostCpus,
    ports::FreePorts,
    tags::tagged_devices,
};
use self::{
    numa::{Numa, NumaError},
    pinning::{Pinning, PinningError},
    xml::Element,
};
use crate::storage::Prepared;

/// Failure to render a VMI as a domain.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum DomainError {
    /// The pod has no hardware virtualization and software emulation is off.
    #[error("kvm not present and emulation is not allowed")]
    NoKvm,
    /// The VMI has no memory size.
    #[error("VMI has no memory size")]
    NoMemory,
    /// The size of huge pages is invalid.
    #[error("{0:?} is no size of huge pages")]
    PageSize(String),
    /// A quantity is invalid.
    #[error("Memory size '{0}' must be greater than or equal to 0")]
    Memory(String),
    /// virt-handler set up no network device for an interface.
    #[error("no network device was set up for interface {0}")]
    NoNic(String),
    /// A disk without a volume.
    #[error("no matching volume with name {0} found")]
    NoVolume(String),
    /// A PCI address on a device that has none.
    #[error("setting a pci address is not allowed for non-virtio bus types, for disk {0}")]
    PciAddressOfDisk(String),
    /// Not a PCI address.
    #[error("{0:?} is not a PCI address")]
    PciAddress(String),
    /// An unknown value.
    #[error("{field}: {value:?} is not supported")]
    Unsupported {
        /// Path of the field.
        field: &'static str,
        value: String,
    },
    /// A shared disk with another cache mode than `none`.
    #[error("a sharable disk requires cache = none got: {0}")]
    ShareableCache(String),
    /// The storage does not support direct I/O.
    #[error("Unable to use 'none' cache mode, file system where {0} is stored does not support direct I/O")]
    DirectIo(PathBuf),
    /// No firmware image matches the bootloader. Encrypted guests are rejected earlier.
    #[error(
        "EFI OVMF roms missing for booting in EFI mode with SecureBoot={0}, SEV/SEV-ES=false, SEV-SNP=false, TDX=false"
    )]
    NoFirmware(bool),
    /// The volume of an ACPI table is missing or not a secret.
    #[error("firmware's volume for {0} was not found")]
    AcpiTable(&'static str),
    /// An environment variable does not hold device addresses.
    #[error("variable {0} does not hold device addresses")]
    HostAddress(String),
    /// The pod has no device of a resource left for the VMI.
    #[error("the pod has no device of resource {resource} left for {kind} {name}")]
    NoHostDevice {
        /// `HostDevice` or `GPU`.
        kind: &'static str,
        /// The device's name in the VMI.
        name: String,
        /// The device's resource.
        resource: String,
    },
    /// A VSOCK device without a valid context ID.
    #[error("VMI has no VSOCK context ID")]
    NoCid,
    /// The annotation of the ports for interfaces is no number.
    #[error("invalid kubevirt.io/pci-interface-slot-count annotation value \"{0}\": not a number")]
    SlotCount(String),
    /// More devices than the root complex has slots.
    #[error("No space left on the root PCI bus.")]
    RootComplexFull,
    /// libvirt completed a definition to text that cannot be read.
    #[error("the definition of the domain cannot be read")]
    Definition,
    /// A value holds a control character.
    #[error("VMI has a value with a control character")]
    ControlCharacter,
    /// The pod has too few CPUs for the threads of the domain.
    #[error("cannot pin the CPUs of the VMI: {0}")]
    Pinning(#[from] PinningError),
    /// The domain was not rendered in time. The next attempt may succeed.
    #[error("the domain cannot be rendered yet")]
    Late,
    /// The NUMA nodes of the CPUs of the pod cannot be those of the guest.
    #[error("cannot map the NUMA nodes of the host: {0}")]
    Numa(#[from] NumaError),
}

impl DomainError {
    /// Reports an error that fails the VMI at once: missing firmware as in the reference, and CPUs, which a pod keeps. Other
    /// errors are retried for some minutes.
    pub(crate) const fn is_permanent(&self) -> bool {
        matches!(self, Self::NoFirmware(_) | Self::Pinning(_) | Self::Numa(_))
    }
}

/// Facts of the pod that a domain needs.
#[derive(Clone, Debug)]
pub(crate) struct Environment<'a> {
    /// /dev/kvm is usable.
    pub(crate) kvm: bool,
    /// Software emulation is allowed.
    pub(crate) allow_emulation: bool,
    /// Socket of the serial console.
    pub(crate) serial: &'a Path,
    /// Socket of the display.
    pub(crate) vnc: &'a Path,
    /// Socket of the channel for metrics.
    pub(crate) metrics: &'a Path,
    /// Sockets of the channels for USB redirection.
    pub(crate) usb_redirection: &'a [PathBuf],
    /// File of UEFI variables.
    pub(crate) nvram: &'a Path,
    /// Socket of the TPM emulator.
    pub(crate) tpm: &'a Path,
    /// Directory of mounted secrets.
    pub(crate) secrets: &'a Path,
    /// Directory of the sockets of virtiofsd.
    pub(crate) virtiofs: &'a Path,
    /// Images.
    pub(crate) prepared: &'a Prepared,
    /// UEFI firmware, if the VMI uses it and it was found.
    pub(crate) uefi: Option<&'a Uefi>,
    /// Directory of QEMU's time zones.
    pub(crate) zones: &'a Path,
    /// Host devices allocated to the pod.
    pub(crate) host_devices: &'a AllocatedDevices,
    /// Options from virt-handler.
    pub(crate) options: &'a protocol::VmiOptions,
    /// CPUs of the pod, if the VMI has dedicated ones.
    pub(crate) cpus: Option<&'a HostCpus>,
}

/// A rendered domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Domain {
    /// Name: namespace and name joined by `_`.
    pub(crate) name: String,
    pub(crate) xml: String,
    /// Target device of each disk.
    pub(crate) disks: Vec<protocol::DiskTarget>,
    /// Start without running the guest.
    pub(crate) start_paused: bool,
    /// The guest has ACPI.
    pub(crate) acpi: bool,
    /// Free ports that the definition gets.
    pub(crate) ports: FreePorts,
    /// Disks of hot-plugged volumes.
    pub(crate) plugged: Vec<String>,
    /// Hot-plugged volumes without a disk, and why they cannot be opened.
    pub(crate) left_out: Vec<(String, String)>,
    /// CPUs of the emulator, which the processes beside QEMU use as well. None: all of the pod.
    pub(crate) housekeeping: Vec<u32>,
    /// CPUs of the pod, if they are dedicated.
    pub(crate) cpus: Option<HostCpus>,
}

/// Longest name of a domain: libvirt appends up to eight characters (`.xml.new`) for the names of its files.
const DOMAIN_NAME_LIMIT: usize = 247;

/// Returns the name of a VMI's domain.
pub(crate) fn domain_name(namespace: &str, name: &str) -> String {
    names::shortened(&format!("{namespace}_{name}"), DOMAIN_NAME_LIMIT)
}

/// Renders a VMI as a domain.
pub(crate) fn convert(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> Result<Domain, DomainError> {
    let is_arm64 = vmi.spec.is_arm64();
    let kvm = env.kvm && !is_arm64;
    if !kvm && !is_arm64 && !env.allow_emulation {
        return Err(DomainError::NoKvm);
    }
    let spec = &vmi.spec.domain;
    let name = domain_name(
        vmi.metadata.namespace.as_deref().unwrap_or_default(),
        vmi.metadata.name.as_deref().unwrap_or_default(),
    );
    let vcpus = cpu::vcpus(spec);
    let threads = disks::io_threads(spec);
    let pinning = cpu::pinning(vmi, env.cpus, &threads)?;
    let disks = disks::disks(vmi, env, vcpus, &threads)?;
    let scsi_driver = disks
        .scsi_thread
        .map(|thread| Element::new("driver").with("queues", vcpus.to_string()).with("iothread", thread.to_string()));
    let memory = memory(vmi)?;
    let most_memory = most_memory(vmi, memory)?;
    let page = memory::page_size(vmi)?;
    let numa = memory::numa(vmi, env.cpus, pinning.as_ref(), memory, page)?;
    let cells = numa.as_ref().map(Numa::cells).or_else(|| most_memory.map(|_| cpu::cell(spec, memory)));
    let acpi = spec.features.as_ref().is_some_and(|features| features.acpi.is_enabled());

    let mut domain = Element::new("domain")
        .with("type", if kvm { "kvm" } else { "qemu" })
        .child(Element::new("name").text(name.clone()));
    let uuid = spec.firmware.as_ref().and_then(|firmware| given(&firmware.uuid));
    // Memory grows by one device of type virtio-mem, which needs no slot.
    let grown = |most: u64| Element::new("maxMemory").with("unit", "b").with("slots", "0").text(most.to_string());
    domain = domain
        .children(uuid.map(|uuid| Element::new("uuid").text(uuid)))
        .children(most_memory.map(grown))
        .child(Element::new("memory").with("unit", "b").text(memory.to_string()))
        .children(memory::backing(vmi, page, most_memory.is_some(), numa.as_ref()))
        .child(cpu::vcpu(spec))
        .children(threads.element())
        .children(pinning.as_ref().map(Pinning::element))
        .children(numa.as_ref().map(Numa::tune))
        .child(firmware::os(vmi, env)?)
        .child(firmware::sysinfo(vmi, env.options))
        .children(firmware::ignition(env.prepared))
        .child(features::features(vmi, kvm)?)
        .children(features::clock(vmi, env.zones, kvm)?)
        .child(cpu::cpu(spec, kvm, cells)?);
    if let Some(policy) = given(&spec.reboot_policy) {
        check("spec.domain.rebootPolicy", policy, &["Reboot", "Terminate"])?;
        let action = if policy == "Reboot" { "restart" } else { "destroy" };
        domain = domain.child(Element::new("on_reboot").text(action));
    }
    let interfaces = network::interfaces(vmi, env, vcpus)?;
    let count = interfaces.len();
    let mut devices = interfaces;
    devices.extend(devices::devices(vmi, env, scsi_driver)?);
    devices.extend(host_devices::host_devices(vmi, env.host_devices)?);
    devices.extend(file_systems::file_systems(vmi, env));
    devices.extend(disks.elements);
    let ports = ports::free_ports(vmi, memory, count, &devices)?;
    devices.splice(count..count, ports::placeholders(vmi, ports.placeholders));
    if root_complex::is_wanted(vmi) {
        devices = root_complex::place(devices)?;
    }
    let domain = domain.child(Element::new("devices").children(devices));
    if domain.has_forbidden_character() {
        return Err(DomainError::ControlCharacter);
    }
    Ok(Domain {
        name,
        xml: domain.to_xml(),
        disks: disks.targets,
        start_paused: vmi.spec.start_strategy == Some(StartStrategy::Paused),
        acpi,
        ports,
        plugged: disks.plugged,
        left_out: env.prepared.left_out.clone(),
        housekeeping: pinning.map(|pinning| pinning.emulator).unwrap_or_default(),
        cpus: env.cpus.cloned(),
    })
}

/// Assigns CPUs and NUMA nodes of the pod to which a VMI migrates. `None` if its CPUs are not dedicated.
pub(crate) fn pinning_of_target(vmi: &VirtualMachineInstance) -> Result<Option<Pinning>, DomainError> {
    let cpus = HostCpus::of_target(vmi)?;
    let Some(pinning) = cpu::pinning(vmi, Some(&cpus), &disks::io_threads(&vmi.spec.domain))? else { return Ok(None) };
    let numa = memory::numa(vmi, Some(&cpus), Some(&pinning), memory(vmi)?, memory::page_size(vmi)?)?;
    Ok(Some(Pinning { numa, ..pinning }))
}

fn memory(vmi: &VirtualMachineInstance) -> Result<u64, DomainError> {
    let spec = &vmi.spec.domain;
    let quantity = spec
        .memory
        .as_ref()
        .and_then(|memory| memory.guest.as_ref())
        .or_else(|| spec.resources.requests.get("memory"))
        .or_else(|| spec.resources.limits.get("memory"))
        .ok_or(DomainError::NoMemory)?;
    let bytes = quantity::units(quantity).ok().and_then(|bytes| u64::try_from(bytes).ok());
    match bytes {
        Some(0) => Err(DomainError::NoMemory),
        Some(bytes) => Ok(bytes),
        None => Err(DomainError::Memory(quantity.0.clone())),
    }
}

/// Returns the memory to which the domain can grow, if it can.
fn most_memory(vmi: &VirtualMachineInstance, memory: u64) -> Result<Option<u64>, DomainError> {
    let most = vmi.spec.domain.memory.as_ref().and_then(|memory| memory.max_guest.as_ref());
    let bytes = |most: &Quantity| quantity::units(most).ok().and_then(|bytes| u64::try_from(bytes).ok());
    let most = most.map(|most| bytes(most).ok_or_else(|| DomainError::Memory(most.0.clone()))).transpose()?;
    Ok(most.filter(|most| *most > memory))
}

fn annotation<'a>(vmi: &'a VirtualMachineInstance, key: &str) -> Option<&'a str> {
    vmi.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Returns true if the machine type has PCI Express, behind whose ports devices are plugged.
fn is_pcie(vmi: &VirtualMachineInstance) -> bool {
    let machine_type = vmi.spec.domain.machine.as_ref().map_or("", |machine| machine.type_.as_str());
    machine_type.is_empty() || machine_type.contains("q35") || machine_type.starts_with("virt")
}

/// Returns the model of virtio devices.
fn virtio_model(vmi: &VirtualMachineInstance) -> &'static str {
    if vmi.spec.domain.devices.use_virtio_transitional == Some(true) {
        "virtio-transitional"
    } else {
        "virtio-non-transitional"
    }
}

/// Renders the alias of a device with the user's name.
fn alias(name: &str) -> Element {
    Element::new("alias").with("name", format!("ua-{name}"))
}

/// Renders a PCI address of the form `dddd:bb:ss.f`.
fn pci_address(text: &str) -> Result<Element, DomainError> {
    let invalid = || DomainError::PciAddress(text.to_owned());
    let (domain, rest) = text.split_once(':').ok_or_else(invalid)?;
    let (bus, rest) = rest.split_once(':').ok_or_else(invalid)?;
    let (slot, function) = rest.split_once('.').ok_or_else(invalid)?;
    let mut address = Element::new("address").with("type", "pci");
    for (name, value, length) in [("domain", domain, 4), ("bus", bus, 2), ("slot", slot, 2), ("function", function, 1)]
    {
        if value.len() > length || u32::from_str_radix(value, 16).is_err() {
            return Err(invalid());
        }
        address = address.with(name, format!("0x{value}"));
    }
    Ok(address)
}

/// Rejects the value of a field that is none of these.
fn check(field: &'static str, value: &str, known: &[&str]) -> Result<(), DomainError> {
    if known.contains(&value) { Ok(()) } else { Err(DomainError::Unsupported { field, value: value.to_owned() }) }
}

/// Returns a text that is not empty.
fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn yes_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

#[cfg(test)]
mod tests;
