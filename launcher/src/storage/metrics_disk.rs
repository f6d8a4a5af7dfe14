//! The disk with metrics of the node, in the form of vhostmd: a header, and a document behind it.
//!
//! ```text
//!   0       4      8          12       16
//!   "mvbd"  busy   checksum   length   document
//! ```
//! Numbers are big-endian. The header says busy while the document changes: a guest reads again then.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// Size of the disk.
const SIZE: u64 = 256 << 10;
/// Size of the header.
const HEADER: u64 = 16;
/// Longest document.
const MAX_DOCUMENT: usize = 262_120;
const SIGNATURE: [u8; 4] = *b"mvbd";

/// Creates the disk without a document, if it is missing.
pub(super) fn create(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o640).open(path)?;
    if file.metadata()?.len() == SIZE {
        return Ok(());
    }
    file.set_len(SIZE)?;
    write_document(&file, b"")
}

/// Replaces the document of an existing disk.
pub(crate) fn write(path: &Path, document: &str) -> io::Result<()> {
    write_document(&OpenOptions::new().write(true).open(path)?, document.as_bytes())
}

fn write_document(file: &File, document: &[u8]) -> io::Result<()> {
    if document.len() > MAX_DOCUMENT {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the metrics do not fit the disk"));
    }
    file.write_all_at(&header(true, document), 0)?;
    file.sync_data()?;
    file.write_all_at(document, HEADER)?;
    file.write_all_at(&header(false, document), 0)
}

fn header(is_busy: bool, document: &[u8]) -> Vec<u8> {
    let sum = document.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    let length = u32::try_from(document.len()).unwrap_or(0);
    [SIGNATURE, u32::from(is_busy).to_be_bytes(), sum.to_be_bytes(), length.to_be_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_has_a_header_and_the_document() {
        let path = std::env::temp_dir().join(format!("launcher-metrics-{}", std::process::id()));
        create(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap().get(..17), Some(&b"mvbd\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]));
        for document in ["<metrics>long</metrics>", "<metrics/>"] {
            write(&path, document).unwrap();
            let content = std::fs::read(&path).unwrap();
            assert_eq!(content.len(), 262_144);
            let number = |at: usize| u32::from_be_bytes(content[at..at + 4].try_into().unwrap());
            assert_eq!((&content[..4], number(4)), (&b"mvbd"[..], 0));
            assert_eq!(number(8), document.bytes().map(u32::from).sum::<u32>());
            let length = usize::try_from(number(12)).unwrap();
            assert_eq!(&content[16..16 + length], document.as_bytes());
        }
        // A restarted worker finds the disk of the running guest.
        create(&path).unwrap();
        assert_eq!(&std::fs::read(&path).unwrap()[16..26], b"<metrics/>");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_busy_disk_says_so_and_a_long_document_is_refused() {
        assert_eq!(header(true, b"\x01\x02"), *b"mvbd\0\0\0\x01\0\0\0\x03\0\0\0\x02");
        let file = File::open("/dev/null").unwrap();
        assert!(write_document(&file, &vec![0; MAX_DOCUMENT + 1]).is_err());
    }
}
