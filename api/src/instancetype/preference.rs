//! Preferences: preferred settings of a guest operating system.

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

/// Preferred settings of a guest operating system. They apply only to fields that a VM does not set.
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
    doc = "Preferred settings of a guest operating system, for VMs in its namespace."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePreferenceSpec {
    /// Annotations added to the VMI unless it has the same keys.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Clock base and timers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockPreferences>,
    /// CPU topology and features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuPreferences>,
    /// Buses, models and other properties of devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<DevicePreferences>,
    /// Hypervisor features of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<FeaturePreferences>,
    /// Boot firmware.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware: Option<FirmwarePreferences>,
    /// Machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachinePreferences>,
    /// Old form of `cpu.spreadOptions.ratio`; default: 2.
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
    /// Minimum resources of a VM; a VM with less is rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requirements: Option<PreferenceRequirements>,
    /// Storage of volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<VolumePreferences>,
}

/// Preferred settings of a guest operating system, for VMs in all namespaces.
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
    doc = "Preferred settings of a guest operating system, for VMs in all namespaces."
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
    /// Base of the clock, for VMIs without time zone and UTC offset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_clock_offset: Option<ClockOffset>,
    /// Timers, for VMIs without timers.
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
    /// CPU features added unless the VMI lists them.
    #[serde(rename = "preferredCPUFeatures", default, skip_serializing_if = "Vec::is_empty")]
    pub preferred_cpu_features: Vec<CpuFeature>,
    /// Topology of the instance type's vCPUs: `sockets` (default), `cores`, `threads`, `spread` or `any`.
    #[serde(rename = "preferredCPUTopology", skip_serializing_if = "Option::is_none")]
    pub preferred_cpu_topology: Option<String>,
    /// Options of topology `spread`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread_options: Option<SpreadOptions>,
}

/// Division of vCPUs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpreadOptions {
    /// Parts of the topology: `SocketsCores` (default), `CoresThreads` or `SocketsCoresThreads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub across: Option<String>,
    /// Cores per socket, or threads per core for `CoresThreads`; default: 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<u32>,
}

/// Preferred devices.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DevicePreferences {
    /// Attach a VNC display with video.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_graphics_device: Option<bool>,
    /// Add a tablet if there is no input device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_input_device: Option<bool>,
    /// Attach a memory balloon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_mem_balloon: Option<bool>,
    /// Attach the pod network if there is no interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_pod_interface: Option<bool>,
    /// Attach serial console ttyS0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_autoattach_serial_console: Option<bool>,
    /// Use one virtio-blk queue per vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_block_multi_queue: Option<bool>,
    /// Bus of CD-ROMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_cdrom_bus: Option<String>,
    /// Omit the controllers for hotplug. Overrides the value of the VMI.
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
    /// Use a dedicated IO thread for each virtio hard disk.
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
    /// Use masquerade binding for interfaces on the pod network without a binding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_interface_masquerade: Option<InterfaceMasquerade>,
    /// Model of network interfaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_interface_model: Option<String>,
    /// Bus of LUNs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_lun_bus: Option<String>,
    /// Use one queue pair per vCPU for virtio interfaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_network_interface_multi_queue: Option<bool>,
    /// Model of the panic device, which is added if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_panic_device_model: Option<String>,
    /// Virtio entropy source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_rng: Option<Rng>,
    /// Model of the sound card, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_sound_model: Option<String>,
    /// Emulated TPM.
    #[serde(rename = "preferredTPM", skip_serializing_if = "Option::is_none")]
    pub preferred_tpm: Option<TpmDevice>,
    /// Use transitional virtio devices for old guests.
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
    /// ACPI tables. Overrides the value of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_acpi: Option<FeatureState>,
    /// Local APIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_apic: Option<FeatureApic>,
    /// Hyper-V enlightenments, merged one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_hyperv: Option<FeatureHyperv>,
    /// KVM features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_kvm: Option<FeatureKvm>,
    /// Paravirtual spinlocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_pvspinlock: Option<FeatureState>,
    /// System management mode; needed for secure boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_smm: Option<FeatureState>,
}

/// Preferred boot firmware, for VMIs without boot firmware.
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
    /// OVMF. Deprecated: use `preferredEfi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_efi: Option<bool>,
    /// Secure boot of OVMF. Deprecated: use `preferredEfi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_use_secure_boot: Option<bool>,
}

/// Preferred machine type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachinePreferences {
    /// libvirt machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_machine_type: Option<String>,
}

/// Minimum resources of a VM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferenceRequirements {
    /// Required CPU architecture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuPreferenceRequirement>,
    /// Guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryPreferenceRequirement>,
}

/// Minimum vCPUs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuPreferenceRequirement {
    /// Number of vCPUs, counted in the preferred topology.
    pub guest: u32,
}

/// Minimum memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryPreferenceRequirement {
    /// Guest memory.
    pub guest: Quantity,
}

/// Preferred storage.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumePreferences {
    /// Storage class of DataVolume templates without a storage class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_storage_class_name: Option<String>,
}
