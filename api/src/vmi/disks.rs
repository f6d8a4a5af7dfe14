//! Disks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::features::FeatureState;

/// One disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    /// Sector sizes shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
    /// Place in the boot order, from 1; unset devices come last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u64>,
    /// Host cache mode: `none`, `writethrough` or `writeback`; chosen by what the volume supports when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// Attach as CD-ROM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<CdromTarget>,
    /// Track changed blocks for incremental backups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_block_tracking: Option<bool>,
    /// Give the disk an IO thread of its own.
    #[serde(rename = "dedicatedIOThread", skip_serializing_if = "Option::is_none")]
    pub dedicated_io_thread: Option<bool>,
    /// Attach as hard disk (the default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskTarget>,
    /// What QEMU does on an IO error: `stop`, `ignore`, `report` or `enospace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_policy: Option<String>,
    /// Asynchronous IO mode: `native` or `threads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<String>,
    /// Attach as SCSI LUN, commands passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lun: Option<LunTarget>,
    /// Name of the volume behind the disk.
    pub name: String,
    /// Serial number shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Allow several machines to open the volume for writing; host cache off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shareable: Option<bool>,
    /// Role of the device, handed to the guest in cloud-init metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Sector sizes; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockSize {
    /// Explicit sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomBlockSize>,
    /// Take the sizes of the block device behind the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_volume: Option<FeatureState>,
}

/// Explicit sector sizes in bytes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomBlockSize {
    /// Smallest discard in bytes.
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
    /// Always true in effect; a CD-ROM cannot be written.
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
    /// Whether the guest is kept from writing.
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
    /// Whether the guest is kept from writing.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub readonly: bool,
    /// Let the guest use SCSI persistent reservations.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub reservation: bool,
}
