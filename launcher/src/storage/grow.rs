//! Grows images with their claims: before a start the image, in a running guest its disk.

use std::{
    fs::OpenOptions,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use api::{VirtualMachineInstance, hotplug, vmi::volumes::Volume};
use rustix::fs::{FallocateFlags, OFlags};

use super::{
    Backend, DiskError,
    claims::{CLAIM_IMAGE, MEBIBYTE, claim_info, claim_size, device_size},
    hotplug::hotplugged_source,
    image,
};
use crate::{files::UntrustedDir, paths::Paths};

/// Size of a block in `stat`, in bytes.
const BLOCK: u64 = 512;
/// Default overhead of a claim's file system, in millionths.
const OVERHEAD: u64 = 55_000;
const MILLION: u64 = 1_000_000;

/// Returns the volumes whose disks can grow with their claims in a running guest.
pub(crate) fn growable(vmi: &VirtualMachineInstance) -> Vec<String> {
    let writable = |name: &str| {
        vmi.spec.domain.devices.disks.iter().any(|disk| disk.name == name && disk.cdrom.is_none())
            && Paths::is_single_component(name)
    };
    let own = |volume: &&Volume| match &volume.persistent_volume_claim {
        Some(claim) => !claim.read_only,
        None => volume.data_volume.is_some(),
    };
    let volumes = vmi.spec.volumes.iter().filter(own).filter(|volume| writable(&volume.name));
    volumes.map(|volume| volume.name.clone()).collect()
}

/// Returns the size in bytes that the disk of a running domain could have; `None` if it visibly has its full size. An error is logged:
/// the guest keeps its size. `is_slice`: the guest sees a part of the volume.
pub(crate) fn possible_size(volume: &str, vmi: &VirtualMachineInstance, paths: &Paths, is_slice: bool) -> Option<u64> {
    let is_hotplugged = |known: &Volume| known.name == volume && hotplug::is_hotplugged(vmi, known);
    let size = if vmi.spec.volumes.iter().any(is_hotplugged) {
        hotplugged_room(volume, vmi, paths)
    } else {
        volume_room(volume, vmi, paths, is_slice)
    };
    size.unwrap_or_else(|error| {
        tracing::warn!(volume, %error, "cannot read the claim's size");
        None
    })
}

fn volume_room(
    volume: &str,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    is_slice: bool,
) -> Result<Option<u64>, DiskError> {
    let failed = |path: PathBuf| move |source| DiskError::Write { path, source };
    let device = paths.block_volume(volume);
    if image::is_block_device(&device) {
        return device_size(&device).map(Some).map_err(failed(device));
    }
    let Some(info) = claim_info(volume, vmi) else { return Ok(None) };
    let Some(claim) = claim_size(volume, info)? else { return Ok(None) };
    let directory = UntrustedDir::open(&paths.filesystem_volume(volume))
        .map_err(|source| DiskError::File { volume: volume.to_owned(), source })?;
    let image = directory
        .regular_file(Path::new(CLAIM_IMAGE))
        .map_err(|source| DiskError::File { volume: volume.to_owned(), source })?;
    let sizes = more(&image, claim, info.filesystem_overhead.as_deref()).map_err(failed(image.clone()))?;
    if let Some((_, size)) = sizes {
        return Ok(Some(size));
    }
    // The image has its full size, the guest's disk may not.
    let size = if is_slice { device_size(&image).map(Some) } else { Ok(None) };
    Ok(size.map_err(failed(image))?.map(|size| size / BLOCK * BLOCK))
}

/// Returns the possible size of a hot-plugged disk; `None` if the pod does not have the volume.
fn hotplugged_room(volume: &str, vmi: &VirtualMachineInstance, paths: &Paths) -> Result<Option<u64>, DiskError> {
    let failed = |path: PathBuf| move |source| DiskError::Write { path, source };
    match hotplugged_source(volume, paths).map(|source| source.backend) {
        None => Ok(None),
        Some(Backend::Block { path }) => device_size(&path).map(Some).map_err(failed(path)),
        Some(Backend::File { path, .. }) => {
            let Some(info) = claim_info(volume, vmi) else { return Ok(None) };
            let Some(claim) = claim_size(volume, info)? else { return Ok(None) };
            let sizes = more(&path, claim, info.filesystem_overhead.as_deref()).map_err(failed(path))?;
            Ok(sizes.map(|(_, size)| size))
        }
    }
}

/// Grows a raw image to its claim's capacity. It never shrinks, and allocates new blocks only if the old ones are
/// allocated.
pub(super) fn grow(path: &Path, claim: u64, overhead: Option<&str>, preallocated: bool) -> std::io::Result<()> {
    let Some((known, size)) = more(path, claim, overhead)? else { return Ok(()) };
    let no_follow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let file = OpenOptions::new().write(true).custom_flags(no_follow).open(path)?;
    if preallocated {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), known, size - known)?;
    } else {
        file.set_len(size)?;
    }
    tracing::info!(path = %path.display(), from = known, to = size, "resized the image to its claim");
    Ok(())
}

/// Returns the size of a raw image and its possible size in a claim; `None` if it cannot grow.
fn more(path: &Path, claim: u64, overhead: Option<&str>) -> std::io::Result<Option<(u64, u64)>> {
    let known = std::fs::symlink_metadata(path)?;
    let stat = rustix::fs::statvfs(path)?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let size = grown(claim, known.blocks().saturating_mul(BLOCK).saturating_add(free), share(overhead));
    Ok((known.is_file() && size > known.len()).then_some((known.len(), size)))
}

/// Returns the size of an image in a file system with `room` bytes for it and this overhead, in millionths.
fn grown(claim: u64, room: u64, share: u64) -> u64 {
    let bytes = u128::from(claim.min(room)) * u128::from(MILLION.saturating_sub(share)) / u128::from(MILLION);
    u64::try_from(bytes).unwrap_or_default() / MEBIBYTE * MEBIBYTE
}

/// Parses the overhead of a file system, a fraction such as `0.055`, to millionths.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and a million")]
fn share(overhead: Option<&str>) -> u64 {
    let fraction = overhead.and_then(|text| text.parse::<f64>().ok()).filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.map_or(OVERHEAD, |fraction| (fraction * 1e6).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_leaves_the_overhead_of_the_file_system() {
        const GIBIBYTE: u64 = 1 << 30;
        for (claim, room, overhead, size) in [
            (GIBIBYTE, 10 * GIBIBYTE, None, 1_013_972_992),
            (GIBIBYTE, 10 * GIBIBYTE, Some("0.055"), 1_013_972_992),
            (10 * GIBIBYTE, GIBIBYTE, Some("0.055"), 1_013_972_992),
            (GIBIBYTE, GIBIBYTE, Some("0"), GIBIBYTE),
            (GIBIBYTE, GIBIBYTE, Some("1"), 0),
            (GIBIBYTE, GIBIBYTE, Some("-1"), 1_013_972_992),
            (GIBIBYTE, GIBIBYTE, Some("NaN"), 1_013_972_992),
            (u64::MAX, u64::MAX, Some("0"), u64::MAX / MEBIBYTE * MEBIBYTE),
        ] {
            assert_eq!(grown(claim, room, share(overhead)), size, "{claim} {room} {overhead:?}");
        }
    }

    #[test]
    fn images_grow_and_never_shrink() {
        let path = std::env::temp_dir().join(format!("launcher-grow-{}", std::process::id()));
        std::fs::write(&path, "kept").unwrap();
        for (claim, preallocated, size) in [(8, false, 8), (4, false, 8), (9, true, 9)] {
            let sizes = more(&path, claim * MEBIBYTE, Some("0")).unwrap();
            assert_eq!(sizes.is_some(), claim > 4, "{sizes:?}");
            grow(&path, claim * MEBIBYTE, Some("0"), preallocated).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), size * MEBIBYTE);
        }
        assert!(std::fs::read(&path).unwrap().starts_with(b"kept"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn disks_of_a_running_domain_may_grow_to_their_claims() {
        let root = std::env::temp_dir().join(format!("launcher-room-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let paths = Paths {
            private: root.join("private"),
            sockets: root.join("sockets"),
            runtime: root.join("run"),
            ephemeral: root.join("ephemeral"),
            container_disks: root.join("images"),
            kernel_boot: root.join("kernel"),
            hotplug_disks: root.join("hotplug"),
            dev: root.join("dev"),
            ..Paths::default()
        };
        let directory = paths.filesystem_volume("data");
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::File::create(directory.join(CLAIM_IMAGE)).unwrap().set_len(2 * MEBIBYTE).unwrap();
        let vmi = |disk: serde_json::Value, read_only: bool, size: &str| -> VirtualMachineInstance {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "vm", "namespace": "ns", "uid": "u"},
                "spec": {
                    "domain": {"devices": {"disks": [disk]}},
                    "volumes": [
                        {"name": "data", "persistentVolumeClaim": {"claimName": "c", "readOnly": read_only}},
                        {"name": "scratch", "emptyDisk": {"capacity": "1Gi"}},
                    ],
                },
                "status": {"volumeStatus": [{"name": "data", "target": "vda", "persistentVolumeClaimInfo": {
                    "requests": {"storage": size}, "capacity": {"storage": "1Gi"}, "filesystemOverhead": "0"}}]},
            }))
            .unwrap()
        };
        let (disk, cdrom) =
            (serde_json::json!({"name": "data", "disk": {}}), serde_json::json!({"name": "data", "cdrom": {}}));
        // Disk, read-only, size of the claim; possible sizes of the disk, and of one that is a slice of its image.
        for (disk, read_only, size, whole, slice) in [
            (&disk, false, "8Mi", Some(8), Some(8)),
            (&disk, false, "2Mi", None, Some(2)),
            (&disk, false, "1Mi", None, Some(2)),
            (&disk, true, "8Mi", None, None),
            (&cdrom, false, "8Mi", None, None),
        ] {
            let vmi = vmi(disk.clone(), read_only, size);
            for (is_slice, expected) in [(false, whole), (true, slice)] {
                let sizes = growable(&vmi).into_iter();
                let sizes = sizes.filter_map(|volume| possible_size(&volume, &vmi, &paths, is_slice));
                let expected = Vec::from_iter(expected.map(|size| size * MEBIBYTE));
                assert_eq!(Vec::from_iter(sizes), expected, "{disk} {read_only} {size} {is_slice}");
            }
        }
        std::fs::remove_dir_all(&root).unwrap();
    }
}
