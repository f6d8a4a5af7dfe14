//! Sparse files of archives in the pax format: keys in the header of the entry, and a map at the start of its data.
//!
//! bsdtar writes this form 1.0 for each file with holes, GNU tar with `--sparse --format=posix`. The crate `tar` expands the older form
//! of GNU tar only, which has an entry type of its own.

use std::{ffi::OsStr, io::Read, os::unix::ffi::OsStrExt, path::PathBuf};

use tar::PaxExtensions;

use crate::error::ImportError;

const KEYS: &[u8] = b"GNU.sparse.";
/// The map is padded to a multiple of this.
const BLOCK: usize = 512;
/// Extents of a file, which take 16 MiB of memory.
const EXTENTS: u64 = 1 << 20;
/// Digits of the largest number.
const DIGITS: usize = 20;

/// The keys of a sparse file.
#[derive(Default)]
pub(crate) struct Sparse {
    /// Name of the file. That of the entry contains `GNUSparseFile`.
    pub(crate) name: Option<PathBuf>,
    major: Option<u64>,
    minor: Option<u64>,
    /// Size with the holes.
    size: Option<u64>,
}

/// Data of a file between holes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Sparse {
    /// Returns the keys of a sparse file, if there are any. The crate reports values with line feeds, such as those of extended
    /// attributes, as malformed: these are skipped. Both programs write the keys before attributes.
    pub(crate) fn find(extensions: PaxExtensions<'_>) -> Option<Self> {
        let mut sparse: Option<Self> = None;
        for extension in extensions.flatten() {
            let Some(key) = extension.key_bytes().strip_prefix(KEYS) else { continue };
            let sparse = sparse.get_or_insert_default();
            let value = extension.value_bytes();
            match key {
                b"name" => sparse.name = Some(PathBuf::from(OsStr::from_bytes(value))),
                b"major" => sparse.major = number(value),
                b"minor" => sparse.minor = number(value),
                b"realsize" => sparse.size = number(value),
                _ => {}
            }
        }
        sparse
    }

    /// Returns the size with the holes, or why the file cannot be expanded.
    pub(crate) fn size(&self) -> Result<u64, &'static str> {
        if (self.major, self.minor) != (Some(1), Some(0)) {
            return Err(
                "is a sparse file of an unsupported form: create the archive without --sparse, or with --sparse --format=gnu",
            );
        }
        self.size.ok_or("is a sparse file without a valid size")
    }
}

/// Reads the map of a file of a size, and leaves the source at the first extent. The entry has `stored` bytes.
pub(crate) fn read_map(
    source: &mut impl Read,
    stored: u64,
    size: u64,
    refused: impl Fn(&str) -> ImportError,
) -> Result<Vec<Extent>, ImportError> {
    let mut map = Map { source, block: [0; BLOCK], at: BLOCK, unread: stored, refused };
    let count = map.number()?;
    if count > EXTENTS {
        return Err((map.refused)(&format!("is a sparse file of more than {EXTENTS} extents")));
    }
    let (mut extents, mut end, mut sum) = (vec![], 0_u64, 0_u64);
    for _ in 0..count {
        let (offset, length) = (map.number()?, map.number()?);
        end = offset
            .checked_add(length)
            .filter(|next| offset >= end && *next <= size)
            .ok_or_else(|| (map.refused)("is a sparse file whose extents overlap or are outside of it"))?;
        if length == 0 {
            continue;
        }
        // GNU tar pads each extent to a block and bsdtar does not. File systems have no such holes.
        if !sum.is_multiple_of(BLOCK as u64) {
            return Err((map.refused)("is a sparse file with a hole that does not begin at a multiple of 512 bytes"));
        }
        // At most `end`.
        sum += length;
        extents.push(Extent { offset, length });
    }
    if sum != map.unread {
        return Err((map.refused)("is a sparse file whose extents are not as long as its data"));
    }
    Ok(extents)
}

struct Map<'a, S, F> {
    source: &'a mut S,
    block: [u8; BLOCK],
    at: usize,
    /// Bytes of the entry after the block.
    unread: u64,
    refused: F,
}

impl<S: Read, F: Fn(&str) -> ImportError> Map<'_, S, F> {
    fn number(&mut self) -> Result<u64, ImportError> {
        let mut line = [0; DIGITS];
        let mut length = 0;
        loop {
            let byte = self.byte()?;
            if byte == b'\n' {
                break;
            }
            let place = line.get_mut(length).ok_or_else(|| self.invalid())?;
            *place = byte;
            length += 1;
        }
        number(&line[..length]).ok_or_else(|| self.invalid())
    }

    fn byte(&mut self) -> Result<u8, ImportError> {
        if self.at == BLOCK {
            self.unread = self.unread.checked_sub(BLOCK as u64).ok_or_else(|| self.invalid())?;
            self.source.read_exact(&mut self.block).map_err(ImportError::of_stream)?;
            self.at = 0;
        }
        let byte = self.block[self.at];
        self.at += 1;
        Ok(byte)
    }

    fn invalid(&self) -> ImportError {
        (self.refused)("is a sparse file with an invalid map")
    }
}

/// Parses a decimal number without a sign.
fn number(text: &[u8]) -> Option<u64> {
    if text.len() > DIGITS || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Vec<u8> {
        let mut map = text.as_bytes().to_vec();
        map.resize(map.len().next_multiple_of(BLOCK), 0);
        map
    }

    fn read(text: &str, data: u64, size: u64) -> Result<(Vec<(u64, u64)>, usize), ImportError> {
        let map = map(text);
        let mut source = &map[..];
        let extents = read_map(&mut source, map.len() as u64 + data, size, |why| ImportError::Refused(why.to_owned()))?;
        Ok((extents.into_iter().map(|extent| (extent.offset, extent.length)).collect(), source.len()))
    }

    #[test]
    fn maps_of_both_programs_are_read() {
        for (text, data, size, expected) in [
            // GNU tar has an empty extent at the end, bsdtar only after a hole.
            ("3\n40960\n4096\n299008\n992\n300000\n0\n", 5088, 300_000, vec![(40_960, 4096), (299_008, 992)]),
            ("2\n40960\n4096\n299008\n992\n", 5088, 300_000, vec![(40_960, 4096), (299_008, 992)]),
            ("2\n0\n0\n1048576\n0\n", 0, 1 << 20, vec![]),
            ("0\n", 0, 0, vec![]),
            ("2\n0\n512\n512\n512\n", 1024, 1024, vec![(0, 512), (512, 512)]),
        ] {
            assert_eq!(read(text, data, size).unwrap(), (expected, 0), "{text:?}");
        }
        // Numbers continue in the next block.
        let many: String = (0..200).map(|number| format!("{}\n512\n", number * 1024)).collect();
        let (extents, rest) = read(&format!("200\n{many}"), 200 * 512, 200 * 1024).unwrap();
        assert_eq!((extents.len(), extents[199], rest), (200, (199 * 1024, 512), 0));
    }

    #[test]
    fn invalid_maps_are_refused() {
        for (text, data, size) in [
            ("", 0, 0),
            ("\n", 0, 0),
            ("x\n", 0, 0),
            ("-1\n", 0, 0),
            ("+1\n0\n0\n", 0, 0),
            // Without an end.
            ("0", 0, 0),
            ("1\n0\n", 0, 0),
            // Too long, too large, too many.
            ("000000000000000000000\n", 0, 0),
            ("18446744073709551616\n", 0, 0),
            ("1048577\n", 0, 0),
            ("1\n18446744073709551615\n1\n", 1, u64::MAX),
            ("1\n0\n1001\n", 1001, 1000),
            ("1\n1001\n0\n", 0, 1000),
            ("2\n0\n512\n511\n512\n", 1024, 4096),
            ("2\n512\n512\n0\n512\n", 1024, 4096),
            ("2\n0\n100\n1024\n512\n", 612, 4096),
            ("1\n0\n512\n", 511, 4096),
            ("1\n0\n512\n", 513, 4096),
        ] {
            let result = read(text, data, size);
            assert!(matches!(result, Err(ImportError::Refused(_))), "{text:?}: {result:?}");
        }
        let cut = read_map(&mut &b"1\n0\n"[..], 1024, 512, |why| ImportError::Refused(why.to_owned()));
        assert!(matches!(cut, Err(ImportError::Content(_))), "{cut:?}");
    }

    #[test]
    fn only_form_1_0_has_a_size() {
        // A record begins with its length.
        let record = |text: &str| format!("{} {text}\n", text.len() + 4);
        for (records, expected) in [
            (&["GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=8192"][..], Some(Some(8192))),
            (&["GNU.sparse.major=1", "GNU.sparse.minor=0"], Some(None)),
            (&["GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=-1"], Some(None)),
            (&["GNU.sparse.major=1", "GNU.sparse.minor=1", "GNU.sparse.realsize=8192"], Some(None)),
            (&["GNU.sparse.major=2", "GNU.sparse.minor=0", "GNU.sparse.realsize=8192"], Some(None)),
            // 0.0 and 0.1.
            (&["GNU.sparse.size=8192", "GNU.sparse.numblocks=0"], Some(None)),
            (&["GNU.sparse.size=8192", "GNU.sparse.map=0,512", "GNU.sparse.name=disk.img"], Some(None)),
            (&["mtime=1796014227.5", "SCHILY.xattr.user.a=GNU.sparse.major=1"], None),
            (&[], None),
        ] {
            let text: String = records.iter().map(|text| record(text)).collect();
            let sparse = Sparse::find(PaxExtensions::new(text.as_bytes()));
            assert_eq!(sparse.map(|sparse| sparse.size().ok()), expected, "{text}");
        }
    }
}
