//! Preferences: what a guest system works best with.

use std::{collections::BTreeMap, ops::Deref};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::{
    clock::{ClockOffsetUtc, Timer},
    cpu::CpuFeature,
    devices::{Rng, TpmDevice, VgpuOptions},
    disks::BlockSize,
    features::{FeatureApic, FeatureHyperv, FeatureKvm, FeatureState},
    firmware::Efi,
    network::InterfaceMasquerade,
    security::LaunchSecurity,
};

/// What a guest system works best with. Only what a machine leaves open is filled in.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "instancetype.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachinePreference",
    plural = "virtualmachinepreferences",
    singular = "virtualmachinepreference",
    shortname = "vmpref",
    shortname = "vmprefs",
    shortname = "vmp",
    shortname = "vmps",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "What a guest system works best with, for the VMs of its namespace."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePreferenceSpec {
    /// Annotations put on the machine where it has none of the same key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Clock base and timers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockPreferences>,
    /// CPU topology and features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuPreferences>,
    /// Buses, models and other traits of devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<DevicePreferences>,
    /// Hypervisor features shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<FeaturePreferences>,
    /// Boot firmware.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware: Option<FirmwarePreferences>,
    /// Emulated board.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachinePreferences>,
    /// Old form of `cpu.spreadOptions.ratio`; 2 when neither is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefer_spread_socket_to_core_ratio: Option<u32>,
    /// CPU architecture (`amd64`, `arm64`, `s390x`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_architecture: Option<String>,
    /// Memory encryption of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_launch_security: Option<LaunchSecurity>,
    /// Subdomain of the pod's and guest's fully qualified name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_subdomain: Option<String>,
    /// Seconds between the ACPI shutdown request and the forced stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_termination_grace_period_seconds: Option<i64>,
    /// Least a machine must have; one with less is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requirements: Option<PreferenceRequirements>,
    /// Storage of volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<VolumePreferences>,
}

/// What a guest system works best with, for all namespaces.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "instancetype.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineClusterPreference",
    plural = "virtualmachineclusterpreferences",
    singular = "virtualmachineclusterpreference",
    shortname = "vmcp",
    shortname = "vmcps",
    derive = "Default",
    derive = "PartialEq",
    doc = "What a guest system works best with, for the VMs of all namespaces."
)]
#[serde(transparent)]
pub struct VirtualMachineClusterPreferenceSpec(pub VirtualMachinePreferenceSpec);

impl Deref for VirtualMachineClusterPreferenceSpec {
    type Target = VirtualMachinePreferenceSpec;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Preferred clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockPreferences {
    /// Base of the clock; for machines that give neither time zone nor UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_clock_offset: Option<ClockOffset>,
    /// Timers; for machines that give none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_timer: Option<Timer>,
}

/// Base of a clock; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockOffset {
    /// Time zone name the clock follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    /// UTC base, optionally shifted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utc: Option<ClockOffsetUtc>,
}

/// Preferred CPU.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuPreferences {
    /// Feature flags added where the machine does not name them.
    #[serde(rename = "preferredCPUFeatures", default, skip_serializing_if = "Vec::is_empty")]
    pub preferred_cpu_features: Vec<CpuFeature>,
    /// What the instance type's virtual CPUs become: `sockets` (default), `cores`, `threads`, `spread` or `any`.
    #[serde(rename = "preferredCPUTopology", skip_serializing_if = "Option::is_none")]
    pub preferred_cpu_topology: Option<String>,
    /// How topology `spread` divides the virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread_options: Option<SpreadOptions>,
}

/// How virtual CPUs are divided.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpreadOptions {
    /// Parts they are divided over: `SocketsCores` (default), `CoresThreads` or `SocketsCoresThreads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub across: Option<String>,
    /// Cores to each socket, or threads to each core with `CoresThreads`; 2 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<u32>,
}

/// Preferred devices.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DevicePreferences {
    /// Whether a VNC display with video is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_graphics_device: Option<bool>,
    /// Whether a tablet is added when no input device is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_input_device: Option<bool>,
    /// Whether a memory balloon is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_mem_balloon: Option<bool>,
    /// Whether the pod network is attached when no interface is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_pod_interface: Option<bool>,
    /// Whether serial console ttyS0 is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_serial_console: Option<bool>,
    /// One virtio-blk queue per virtual CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_block_multi_queue: Option<bool>,
    /// Bus of CD-ROMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_cdrom_bus: Option<String>,
    /// Keep the machine free of controllers kept ready for hot-plug. Takes the place of the machine's own value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_disable_hotplug: Option<bool>,
    /// Sector sizes of hard disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_disk_block_size: Option<BlockSize>,
    /// Bus of hard disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_disk_bus: Option<String>,
    /// Host cache mode of hard disks: `none`, `writethrough` or `writeback`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_disk_cache: Option<String>,
    /// Give each virtio hard disk an IO thread of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_disk_dedicated_io_thread: Option<bool>,
    /// Asynchronous IO mode of hard disks: `native` or `threads`.
    #[serde(rename = "preferredDiskIO", skip_serializing_if = "Option::is_none")]
    pub preferred_disk_io: Option<String>,
    /// Bus of input devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_input_bus: Option<String>,
    /// Kind of input devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_input_type: Option<String>,
    /// Masquerade binding, for interfaces on the pod network without a binding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_interface_masquerade: Option<InterfaceMasquerade>,
    /// Emulated card of interfaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_interface_model: Option<String>,
    /// Bus of LUNs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_lun_bus: Option<String>,
    /// One queue pair per virtual CPU on virtio interfaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_network_interface_multi_queue: Option<bool>,
    /// Model of the panic device; one is added when there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_panic_device_model: Option<String>,
    /// Virtio entropy source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_rng: Option<Rng>,
    /// Model of a sound card the machine has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_sound_model: Option<String>,
    /// Emulated TPM.
    #[serde(rename = "preferredTPM", skip_serializing_if = "Option::is_none")]
    pub preferred_tpm: Option<TpmDevice>,
    /// Offer virtio devices in their transitional form for old guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_virtio_transitional: Option<bool>,
    /// Video adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_video_type: Option<String>,
    /// Display settings of virtual GPUs.
    #[serde(rename = "preferredVirtualGPUOptions", skip_serializing_if = "Option::is_none")]
    pub preferred_virtual_gpu_options: Option<VgpuOptions>,
}

/// Preferred hypervisor features.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeaturePreferences {
    /// ACPI tables. Takes the place of the machine's own value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_acpi: Option<FeatureState>,
    /// Local APIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_apic: Option<FeatureApic>,
    /// Hyper-V enlightenments, each for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_hyperv: Option<FeatureHyperv>,
    /// What is told about KVM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_kvm: Option<FeatureKvm>,
    /// Paravirtual spinlocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_pvspinlock: Option<FeatureState>,
    /// System management mode; needed for secure boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_smm: Option<FeatureState>,
}

/// Preferred boot firmware, for machines that choose none.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FirmwarePreferences {
    /// OVMF with these settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_efi: Option<Efi>,
    /// SeaBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_bios: Option<bool>,
    /// Show BIOS output on the serial console.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_bios_serial: Option<bool>,
    /// OVMF. Deprecated: `preferredEfi` is the place for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_efi: Option<bool>,
    /// Secure boot of OVMF. Deprecated: `preferredEfi` is the place for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_secure_boot: Option<bool>,
}

/// Preferred board.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachinePreferences {
    /// libvirt machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_machine_type: Option<String>,
}

/// Least a machine must have.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferenceRequirements {
    /// CPU architecture the guest is made for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuPreferenceRequirement>,
    /// Guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryPreferenceRequirement>,
}

/// Least virtual CPUs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuPreferenceRequirement {
    /// Number of virtual CPUs, counted in the preferred topology.
    pub guest: u32,
}

/// Least memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryPreferenceRequirement {
    /// Memory the guest sees.
    pub guest: Quantity,
}

/// Preferred storage.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumePreferences {
    /// Storage class of DataVolume templates that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_storage_class_name: Option<String>,
}
