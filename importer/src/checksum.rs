//! Checksums of downloads.

use std::io::{self, Read};

use sha2::digest::DynDigest;

use crate::error::ImportError;

type State = Box<dyn DynDigest + Send>;
/// Name of an algorithm, bytes of its checksums, and its initial state.
type Algorithm = (&'static str, usize, fn() -> State);

/// A checksum that a file must have.
pub(crate) struct Checksum {
    algorithm: &'static str,
    expected: String,
    state: State,
}

impl Checksum {
    /// Parses `algorithm:hex`.
    pub(crate) fn parse(text: &str) -> Result<Self, ImportError> {
        let known: [Algorithm; 4] = [
            ("md5", 16, || Box::new(md5::Md5::default())),
            ("sha1", 20, || Box::new(sha1::Sha1::default())),
            ("sha256", 32, || Box::new(sha2::Sha256::default())),
            ("sha512", 64, || Box::new(sha2::Sha512::default())),
        ];
        let invalid =
            || ImportError::Task(format!("checksum {text:?} is not algorithm:hex with md5, sha1, sha256 or sha512"));
        let (name, hex) = text.split_once(':').ok_or_else(invalid)?;
        let hex = hex.trim().to_ascii_lowercase();
        let (algorithm, length, new) =
            known.into_iter().find(|(known, ..)| known.eq_ignore_ascii_case(name.trim())).ok_or_else(invalid)?;
        if hex.len() != 2 * length || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        Ok(Self { algorithm, expected: hex, state: new() })
    }

    fn verify(self, source_name: &str) -> Result<(), ImportError> {
        let actual: String = self.state.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let Self { algorithm, expected, .. } = self;
        if actual == expected {
            return Ok(());
        }
        Err(ImportError::Checksum { algorithm, source_name: source_name.to_owned(), actual, expected })
    }
}

/// A reader that computes the checksum of all bytes.
pub(crate) struct Checked<R> {
    inner: R,
    checksum: Option<Checksum>,
}

impl<R: Read> Checked<R> {
    pub(crate) fn new(inner: R, checksum: Option<Checksum>) -> Self {
        Self { inner, checksum }
    }

    /// Reads the rest of the stream, and compares the checksum.
    pub(crate) fn verify(mut self, source_name: &str) -> Result<(), ImportError> {
        io::copy(&mut self, &mut io::sink()).map_err(ImportError::of_stream)?;
        self.checksum.map_or(Ok(()), |checksum| checksum.verify(source_name))
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let (Some(checksum), Some(bytes)) = (&mut self.checksum, buffer.get(..count)) {
            checksum.state.update(bytes);
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_cover_bytes_that_nobody_read() {
        for (checksum, right) in [
            ("md5:900150983cd24fb0d6963f7d28e17f72", true),
            ("sha1:A9993E364706816ABA3E25717850C26C9CD0D89D", true),
            ("sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", true),
            ("md5:900150983cd24fb0d6963f7d28e17f73", false),
        ] {
            let mut checked = Checked::new(&b"abc"[..], Some(Checksum::parse(checksum).unwrap()));
            checked.read_exact(&mut [0; 2]).unwrap();
            assert_eq!(checked.verify("http://a/b").is_ok(), right, "{checksum}");
        }
        Checked::new(&b"abc"[..], None).verify("a").unwrap();
    }

    #[test]
    fn unknown_algorithms_and_short_values_are_rejected() {
        for text in ["", "abc", "crc32:00000000", "md5:00", "md5:900150983cd24fb0d6963f7d28e17f7x"] {
            assert!(Checksum::parse(text).is_err(), "{text}");
        }
    }
}
