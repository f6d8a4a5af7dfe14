//! Sizes of claims and of disks in them.

use std::path::Path;

use api::{VirtualMachineInstance, quantity, vmi::status::PersistentVolumeClaimInfo};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::DiskError;

/// Unit of the sizes of created disks.
pub(super) const MEBIBYTE: u64 = 1024 * 1024;
/// File name of the disk image in a claim with a file system.
pub(super) const CLAIM_IMAGE: &str = "disk.img";

/// Returns what the VMI's status says about a volume's claim.
pub(super) fn claim_info<'a>(volume: &str, vmi: &'a VirtualMachineInstance) -> Option<&'a PersistentVolumeClaimInfo> {
    vmi.status
        .iter()
        .flat_map(|status| &status.volume_status)
        .find(|status| status.name == volume)
        .and_then(|status| status.persistent_volume_claim_info.as_ref())
}

/// Returns the capacity of a volume's claim in bytes.
pub(super) fn capacity(volume: &str, vmi: &VirtualMachineInstance) -> Result<Option<u64>, DiskError> {
    let capacity = claim_info(volume, vmi).and_then(|info| info.capacity.get("storage"));
    capacity.map(|capacity| disk_size(volume, capacity)).transpose()
}

/// Returns the size of a new image in a claim: the request, or the capacity if that is less.
pub(super) fn claim_size(volume: &str, info: &PersistentVolumeClaimInfo) -> Result<Option<u64>, DiskError> {
    let read = |quantity: Option<&Quantity>| quantity.map(|q| disk_size(volume, q)).transpose();
    let capacity = read(info.capacity.get("storage"))?;
    let request = read(info.requests.get("storage"))?;
    Ok(match (capacity, request) {
        (Some(capacity), Some(request)) => Some(capacity.min(request)),
        (one, other) => one.or(other),
    })
}

/// Returns a size that the disk of a volume that moves has at least in its present claim. The size of an image in a file system is not
/// known.
pub(super) fn least_size(volume: &str, vmi: &VirtualMachineInstance) -> Result<u64, DiskError> {
    let moved = vmi.status.iter().flat_map(|status| &status.migrated_volumes);
    let claim = moved.filter(|moved| moved.volume_name == volume).find_map(|moved| moved.source_pvc_info.as_ref());
    let device = claim.filter(|claim| claim.volume_mode.as_deref() == Some("Block"));
    Ok(device.map(|claim| claim_size(volume, claim)).transpose()?.flatten().unwrap_or(0))
}

/// Returns a quantity in bytes, rounded down to MiB.
pub(super) fn disk_size(volume: &str, quantity: &Quantity) -> Result<u64, DiskError> {
    let bytes = quantity::units(quantity).map_err(|_| DiskError::Quantity(volume.to_owned()))?;
    let size = u64::try_from(bytes).unwrap_or_default() / MEBIBYTE * MEBIBYTE;
    if size == 0 { Err(DiskError::TooSmall(volume.to_owned())) } else { Ok(size) }
}

/// Returns the size of a file or block device in bytes.
pub(super) fn device_size(path: &Path) -> std::io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    std::fs::File::open(path)?.seek(SeekFrom::End(0))
}
