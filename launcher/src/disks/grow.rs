//! Images in claims grow with their claims.

use std::{
    fs::OpenOptions,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{FallocateFlags, OFlags};

const MEBIBYTE: u64 = 1024 * 1024;
/// Bytes in a block as `stat` counts them.
const BLOCK: u64 = 512;
/// Millionths that the file system of a claim takes where nobody has said so.
const OVERHEAD: u64 = 55_000;
const MILLION: u64 = 1_000_000;

/// Grows a raw image to what a claim of this size has room for. It never shrinks, and allocates the new blocks only if the
/// old ones are.
pub(super) fn grow(path: &Path, claim: u64, overhead: Option<&str>, preallocated: bool) -> std::io::Result<()> {
    let known = std::fs::symlink_metadata(path)?;
    let stat = rustix::fs::statvfs(path)?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let size = grown(claim, known.blocks().saturating_mul(BLOCK).saturating_add(free), share(overhead));
    if !known.is_file() || size <= known.len() {
        return Ok(());
    }
    let no_follow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let file = OpenOptions::new().write(true).custom_flags(no_follow).open(path)?;
    if preallocated {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), known.len(), size - known.len())?;
    } else {
        file.set_len(size)?;
    }
    tracing::info!(path = %path.display(), from = known.len(), to = size, "the image was grown to its claim");
    Ok(())
}

/// Size of an image in a claim whose file system has room for `room` bytes of it and takes this share, in millionths.
fn grown(claim: u64, room: u64, share: u64) -> u64 {
    let bytes = u128::from(claim.min(room)) * u128::from(MILLION.saturating_sub(share)) / u128::from(MILLION);
    u64::try_from(bytes).unwrap_or_default() / MEBIBYTE * MEBIBYTE
}

/// The share that a file system takes, in millionths; the text is a fraction such as `0.055`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and a million")]
fn share(overhead: Option<&str>) -> u64 {
    let fraction = overhead.and_then(|text| text.parse::<f64>().ok()).filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.map_or(OVERHEAD, |fraction| (fraction * 1e6).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_gets_what_the_file_system_leaves_of_its_claim() {
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
            grow(&path, claim * MEBIBYTE, Some("0"), preallocated).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), size * MEBIBYTE);
        }
        assert!(std::fs::read(&path).unwrap().starts_with(b"kept"));
        std::fs::remove_file(&path).unwrap();
    }
}
