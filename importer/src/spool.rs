//! A file in the scratch space that is read while it is written.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, PoisonError},
};

use crate::{
    error::{At, ImportError},
    format::ReadAt,
    meter::Meter,
};

const NAME: &str = "image";
const BUFFER: usize = 256 << 10;

/// A file in the scratch space. Reads wait until their bytes are written.
pub(crate) struct Spool {
    file: File,
    path: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct State {
    written: u64,
    /// Nothing more is written.
    ended: bool,
    /// The end is missing.
    failed: bool,
}

impl Spool {
    /// Creates an empty file, without a name.
    pub(crate) fn create(scratch: &Path) -> Result<Self, ImportError> {
        let path = scratch.join(NAME);
        // Of a container that was killed.
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.at("create in the scratch space", &path)?;
        fs::remove_file(&path).at("remove the name of", &path)?;
        Ok(Self { file, path, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Writes a stream to its end, or up to a limit that no accepted image exceeds.
    pub(crate) fn fill(&self, stream: &mut dyn Read, limit: u64, meter: &Meter) -> Result<u64, ImportError> {
        let result = self.fill_until_end(stream, limit, meter);
        self.update(|state| (state.ended, state.failed) = (true, result.is_err()));
        result
    }

    fn fill_until_end(&self, stream: &mut dyn Read, limit: u64, meter: &Meter) -> Result<u64, ImportError> {
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        loop {
            let count = match stream.read(&mut buffer) {
                Ok(0) => return Ok(at),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ImportError::of_stream(error)),
            };
            if at + count as u64 > limit {
                return Err(ImportError::Full { written: at, available: limit });
            }
            self.file.write_all_at(&buffer[..count], at).at("write to the scratch space", &self.path)?;
            at += count as u64;
            meter.moved();
            self.update(|state| state.written = at);
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl ReadAt for Spool {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let end = offset.saturating_add(buffer.len() as u64);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |state: &mut State| state.written < end && !state.ended;
        let state = self.changed.wait_while(state, missing).unwrap_or_else(PoisonError::into_inner);
        // Not the end of the image, which would be taken for a damaged one.
        if state.failed && state.written < end {
            return Err(io::Error::other("the download has failed"));
        }
        drop(state);
        ReadAt::read_at(&self.file, offset, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_not_the_end_of_the_image() {
        let scratch = std::env::temp_dir().join(format!("importer-spool-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        for (limit, expected) in [(10, Some(3)), (2, None)] {
            let spool = Spool::create(&scratch).unwrap();
            assert_eq!(spool.fill(&mut &b"abc"[..], limit, &Meter::default()).is_ok(), expected.is_some());
            assert_eq!(spool.read_at(0, &mut [0; 5]).ok(), expected);
        }
        fs::remove_dir_all(&scratch).unwrap();
    }
}
