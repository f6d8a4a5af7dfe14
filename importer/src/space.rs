//! The space of a claim for the files of an archive.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use crate::{error::ImportError, meter::Meter};

/// The space of a claim.
#[derive(Clone, Copy)]
pub(crate) struct Space {
    /// Bytes that the files may take.
    pub(crate) available: u64,
    /// Bytes of the files before.
    pub(crate) used: u64,
}

impl Space {
    pub(crate) fn left(self) -> u64 {
        self.available.saturating_sub(self.used)
    }

    /// Returns the error about an entry that does not fit, of which this much was written.
    fn full(self, written: u64) -> ImportError {
        ImportError::Full { written: self.used.saturating_add(written), available: self.available }
    }

    /// Writes an entry, or a part of it. Returns its size.
    pub(crate) fn write(
        self,
        source: &mut impl Read,
        file: &mut File,
        buffer: &mut [u8],
        path: &Path,
        meter: &Meter,
    ) -> Result<u64, ImportError> {
        let mut size = 0_u64;
        loop {
            let count = match source.read(buffer) {
                Ok(0) => return Ok(size),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ImportError::of_stream(error)),
            };
            let end = size.saturating_add(count as u64);
            if end > self.left() {
                return Err(self.full(size));
            }
            file.write_all(&buffer[..count]).map_err(|source| match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => self.full(size),
                _ => ImportError::Io { attempt: "write", path: path.to_owned(), source },
            })?;
            size = end;
            meter.moved();
        }
    }
}
