//! Disks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::features::FeatureState;

/// One disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    /// Sector sizes of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<Box<BlockSize>>,
    /// Position in the boot order, counted from 1; devices without one come last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u64>,
    /// Host cache mode: `none`, `writethrough` or `writeback`; default: depends on the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// Attach as CD-ROM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<Box<CdromTarget>>,
    /// Track changed blocks for incremental backups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_block_tracking: Option<bool>,
    /// Use a dedicated IO thread for the disk.
    #[serde(rename = "dedicatedIOThread", skip_serializing_if = "Option::is_none")]
    pub dedicated_io_thread: Option<bool>,
    /// Attach as hard disk (default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskTarget>,
    /// Reaction of QEMU to an IO error: `stop`, `ignore`, `report` or `enospace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_policy: Option<String>,
    /// Asynchronous IO mode: `native` or `threads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<String>,
    /// Attach as SCSI LUN with command passthrough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lun: Option<Box<LunTarget>>,
    /// Name of the volume behind the disk.
    pub name: String,
    /// Serial number shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Permit several VMIs to write to the volume; disables the host cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shareable: Option<bool>,
    /// Role of the device, passed to the guest in cloud-init metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl Disk {
    /// Returns true if the guest cannot write to it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.cdrom.is_some()
            || self.disk.as_ref().is_some_and(|disk| disk.readonly)
            || self.lun.as_ref().is_some_and(|lun| lun.readonly)
    }
}

/// Sector sizes; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockSize {
    /// Explicit sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomBlockSize>,
    /// Use the sizes of the volume's block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_volume: Option<FeatureState>,
}

/// Explicit sector sizes in bytes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomBlockSize {
    /// Discard granularity in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard_granularity: Option<u64>,
    /// Logical sector size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logical: Option<u64>,
    /// Physical sector size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub physical: Option<u64>,
}

/// CD-ROM drive.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CdromTarget {
    /// Bus of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// No effect: a CD-ROM is always read-only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readonly: Option<bool>,
    /// Tray state at boot: `open` or `closed` (default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tray: Option<String>,
}

/// Hard disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskTarget {
    /// `virtio`, `sata`, `scsi` or `usb`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// PCI address in the guest, `dddd:bb:ss.f`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<String>,
    /// Attach the disk read-only.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub readonly: bool,
}

/// SCSI LUN.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LunTarget {
    /// Bus of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// Attach the LUN read-only.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub readonly: bool,
    /// Permit SCSI persistent reservations by the guest.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub reservation: bool,
}
