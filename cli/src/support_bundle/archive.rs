//! The archive of a bundle: files up to a total size, and a list of the errors.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use tar::{Builder, EntryType, Header};

use crate::Error;

/// Largest file. The end of a longer one is cut off.
const MAX_FILE: usize = 8 << 20;
/// Largest sum of all files before compression.
pub(super) const MAX_TOTAL: usize = 256 << 20;
/// The list of errors.
const ERRORS: &str = "errors.txt";

/// An archive in the making.
pub(super) struct Archive<W: Write> {
    builder: Builder<GzEncoder<W>>,
    directory: String,
    time: u64,
    room: usize,
    files: usize,
    errors: Vec<String>,
}

impl<W: Write> Archive<W> {
    /// Starts an archive whose files are in one directory, with this time in seconds.
    pub(super) fn new(output: W, directory: &str, time: u64) -> Self {
        let builder = Builder::new(GzEncoder::new(output, Compression::default()));
        Self { builder, directory: directory.to_owned(), time, room: MAX_TOTAL, files: 0, errors: Vec::new() }
    }

    /// Adds a file, or the error in its place.
    pub(super) fn add(&mut self, path: &str, content: Result<Vec<u8>, Error>) -> Result<(), Error> {
        let mut content = match content {
            Ok(content) => content,
            Err(error) => {
                self.fail(path, &error);
                return Ok(());
            }
        };
        if content.len() > MAX_FILE {
            content.truncate(MAX_FILE);
            self.errors.push(format!("{path}: only the first {MAX_FILE} bytes"));
        }
        if content.len() > self.room {
            self.errors.push(format!("{path}: left out, since the bundle has {MAX_TOTAL} bytes"));
            return Ok(());
        }
        self.room -= content.len();
        self.append(path, &content)
    }

    /// Records the error of a file.
    pub(super) fn fail(&mut self, path: &str, error: &Error) {
        let text: String = error.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.errors.push(format!("{path}: {text}"));
    }

    fn append(&mut self, path: &str, content: &[u8]) -> Result<(), Error> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        header.set_size(content.len() as u64);
        let path = format!("{}/{path}", self.directory);
        self.builder.append_data(&mut header, path, content).map_err(Error::io("cannot write the archive"))?;
        self.files += 1;
        Ok(())
    }

    /// Returns true while nothing could be read.
    pub(super) fn is_empty(&self) -> bool {
        self.files == 0
    }

    /// Adds the list of errors and ends the archive. Returns the numbers of files and of errors.
    pub(super) fn finish(mut self) -> Result<(usize, usize), Error> {
        let errors = self.errors.len();
        if errors > 0 {
            let list = self.errors.join("\n") + "\n";
            self.append(ERRORS, list.as_bytes())?;
        }
        let failed = || Error::io("cannot write the archive");
        let mut output = self.builder.into_inner().and_then(GzEncoder::finish).map_err(failed())?;
        output.flush().map_err(failed())?;
        Ok((self.files, errors))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn archive_contains_files_and_the_errors_of_others() {
        let mut output = Vec::new();
        let mut archive = Archive::new(&mut output, "bundle", 7);
        assert!(archive.is_empty());
        archive.add("a/b.yaml", Ok(b"a: 1\n".to_vec())).unwrap();
        archive.add("c.log", Err(Error::Refused { code: 403, message: "c is\nforbidden".into() })).unwrap();
        archive.add("long.log", Ok(vec![b'x'; MAX_FILE + 1])).unwrap();
        archive.room = 3;
        archive.add("late.log", Ok(b"late".to_vec())).unwrap();
        assert_eq!(archive.finish().unwrap(), (3, 3));
        let mut found = Vec::new();
        let mut read = tar::Archive::new(GzDecoder::new(output.as_slice()));
        for entry in read.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            assert_eq!((entry.header().mode().unwrap(), entry.header().mtime().unwrap()), (0o600, 7));
            found.push((entry.path().unwrap().display().to_string(), content));
        }
        assert_eq!(found.remove(1).1.len(), MAX_FILE);
        let errors = format!(
            "c.log: c is forbidden\nlong.log: only the first {MAX_FILE} bytes\n\
             late.log: left out, since the bundle has {MAX_TOTAL} bytes\n"
        );
        assert_eq!(found, [("bundle/a/b.yaml".into(), "a: 1\n".into()), ("bundle/errors.txt".into(), errors)]);
    }
}
