//! Devices other than disks and interfaces.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::disks::Disk;
use crate::vmi::features::FeatureState;
use crate::vmi::network::Interface;

/// Devices of the VMI.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Devices {
    /// Attach a VNC display with video; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoattach_graphics_device: Option<bool>,
    /// Add a tablet if there is no input device; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoattach_input_device: Option<bool>,
    /// Attach a memory balloon; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoattach_mem_balloon: Option<bool>,
    /// Attach the pod network if there is no interface; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoattach_pod_interface: Option<bool>,
    /// Attach serial console ttyS0; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoattach_serial_console: Option<bool>,
    /// Attach a VSOCK device; default: false.
    #[serde(rename = "autoattachVSOCK", skip_serializing_if = "Option::is_none")]
    pub autoattach_vsock: Option<bool>,
    /// Use one virtio-blk queue per vCPU; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_multi_queue: Option<bool>,
    /// Slots for redirected USB devices of a client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_passthrough: Option<ClientPassthroughDevices>,
    /// Omit the controllers for hotplug.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub disable_hotplug: bool,
    /// Disks, each backed by the volume of the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// Virtio channel with host metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downward_metrics: Option<DownwardMetrics>,
    /// Volumes shared as virtiofs file systems.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filesystems: Vec<Filesystem>,
    /// GPUs of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// PCI, USB or mediated devices of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_devices: Vec<HostDevice>,
    /// Input devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<Input>,
    /// Network interfaces, each on the network of the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// Copy the serial console to the pod's log; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_serial_console: Option<bool>,
    /// Use one queue pair per vCPU for virtio interfaces; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_interface_multiqueue: Option<bool>,
    /// Devices that report a guest kernel panic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub panic_devices: Vec<PanicDevice>,
    /// Virtio entropy source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rng: Option<Rng>,
    /// Sound card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sound: Option<SoundDevice>,
    /// Emulated TPM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpm: Option<TpmDevice>,
    /// Use transitional virtio devices for old guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_virtio_transitional: Option<bool>,
    /// Video adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub video: Option<VideoDevice>,
    /// Watchdog timer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
}

/// Marker for USB redirection slots.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct ClientPassthroughDevices {}

/// Marker for the host-metrics channel.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DownwardMetrics {}

/// One shared file system.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Filesystem {
    /// Name of the volume, and mount tag in the guest.
    pub name: String,
    /// Share with virtiofs.
    pub virtiofs: FilesystemVirtiofs,
}

/// Marker for virtiofs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct FilesystemVirtiofs {}

/// One GPU of the host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Entry of `resourceClaims` that provides the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// Extended resource name of the device plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// Name of the device, unique in the VMI.
    pub name: String,
    /// Request inside the resource claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_name: Option<String>,
    /// Role of the device, passed to the guest in cloud-init metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Display settings of a virtual GPU.
    #[serde(rename = "virtualGPUOptions", skip_serializing_if = "Option::is_none")]
    pub virtual_gpu_options: Option<VgpuOptions>,
}

/// Settings of a virtual GPU.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuOptions {
    /// Display of the virtual GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display: Option<VgpuDisplayOptions>,
}

/// Display of a virtual GPU.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuDisplayOptions {
    /// Enables the display; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Frame buffer until the guest's driver is loaded.
    #[serde(rename = "ramFB", skip_serializing_if = "Option::is_none")]
    pub ram_fb: Option<FeatureState>,
}

/// One device of the host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostDevice {
    /// Entry of `resourceClaims` that provides the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// Extended resource name of the device plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// Name of the device, unique in the VMI.
    pub name: String,
    /// Request inside the resource claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_name: Option<String>,
    /// Role of the device, passed to the guest in cloud-init metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// One input device.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Input {
    /// `usb` or `virtio`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// Name of the device.
    pub name: String,
    /// Kind of device; only `tablet`.
    pub type_: String,
}

/// A device that reports guest panics.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PanicDevice {
    /// `isa`, `hyperv` or `pvpanic`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// Marker for the entropy source.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Rng {}

/// Sound card.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SoundDevice {
    /// `ich9` (default) or `ac97`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Name of the device.
    pub name: String,
}

/// Emulated TPM 2.0.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TpmDevice {
    /// Enables the TPM; default: true if the object is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Keep the TPM's state across restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
}

/// Video adapter.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VideoDevice {
    /// `virtio`, `vga`, `bochs`, `cirrus` or `ramfb`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
}

/// Watchdog timer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Watchdog {
    /// Watchdog of s390x.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diag288: Option<Diag288Watchdog>,
    /// PCI watchdog of amd64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub i6300esb: Option<I6300EsbWatchdog>,
    /// Name of the device.
    pub name: String,
}

/// Watchdog of s390x.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diag288Watchdog {
    /// Action on expiry: `poweroff`, `reset` (default) or `shutdown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
}

/// PCI watchdog.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct I6300EsbWatchdog {
    /// Action on expiry: `poweroff`, `reset` (default) or `shutdown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
}
