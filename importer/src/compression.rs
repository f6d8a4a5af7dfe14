//! Decompression of streams. The compression is found by the first bytes.

use std::io::{self, BufReader, Cursor, Read};

/// Memory limit of a decompressor: the dictionary of `xz -9`, and a little more. 64 MiB are the largest window of zstd.
const XZ_MEMORY_KIB: u32 = 66 << 10;
const ZSTD_WINDOW_LOG: u32 = 26;
/// Bytes by which formats are found.
pub(crate) const PREFIX: usize = 512;
const BUFFER: usize = 128 << 10;

/// Compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    /// Finds a compression by the first bytes of a file.
    pub(crate) fn find(prefix: &[u8]) -> Option<Self> {
        let known: [(&[u8], Self); 3] =
            [(b"\x1f\x8b\x08", Self::Gzip), (b"\xfd7zXZ\0", Self::Xz), (b"\x28\xb5\x2f\xfd", Self::Zstd)];
        known.into_iter().find(|(magic, _)| prefix.starts_with(magic)).map(|(_, compression)| compression)
    }
}

/// A stream whose first bytes are known.
pub(crate) struct Stream<'a> {
    /// The first [`PREFIX`] bytes, or all.
    pub(crate) prefix: Vec<u8>,
    /// All bytes, from the first on.
    pub(crate) all: Box<dyn Read + Send + 'a>,
}

/// Reads the first [`PREFIX`] bytes of a stream, or all.
pub(crate) fn read_prefix(reader: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut prefix = Vec::with_capacity(PREFIX);
    reader.take(PREFIX as u64).read_to_end(&mut prefix)?;
    Ok(prefix)
}

impl<'a> Stream<'a> {
    /// Reads the first bytes of a stream.
    pub(crate) fn new(mut reader: impl Read + Send + 'a) -> io::Result<Self> {
        Ok(Self::with_prefix(read_prefix(&mut reader)?, reader))
    }

    /// Returns a stream whose first bytes were read.
    pub(crate) fn with_prefix(prefix: Vec<u8>, rest: impl Read + Send + 'a) -> Self {
        let all = Box::new(Cursor::new(prefix.clone()).chain(rest));
        Self { prefix, all }
    }

    /// Decompresses the stream if it is compressed.
    pub(crate) fn decompressed(self) -> io::Result<Self> {
        let Some(compression) = Compression::find(&self.prefix) else { return Ok(self) };
        let source = BufReader::with_capacity(BUFFER, self.all);
        match compression {
            Compression::Gzip => Self::new(flate2::bufread::MultiGzDecoder::new(source)),
            Compression::Xz => Self::new(lzma_rust2::XzReader::new_mem_limit(source, true, XZ_MEMORY_KIB)),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                Self::new(decoder)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// `printf 'disk%.0s' $(seq 1000) | xz`
    const XZ: &[u8] = &[
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x04, 0xe6, 0xd6, 0xb4, 0x46, 0x02, 0x00, 0x21, 0x01, 0x16, 0x00,
        0x00, 0x00, 0x74, 0x2f, 0xe5, 0xa3, 0xe0, 0x0f, 0x9f, 0x00, 0x1e, 0x5d, 0x00, 0x32, 0x1a, 0x4a, 0xcd, 0x6e,
        0xd5, 0x6d, 0xdc, 0x49, 0x77, 0x22, 0x38, 0x7d, 0x28, 0xc7, 0x80, 0x82, 0x0f, 0xfb, 0x10, 0xd4, 0xa6, 0x2d,
        0x59, 0x38, 0x06, 0x9d, 0xdb, 0x1d, 0x00, 0x00, 0x00, 0x00, 0x14, 0x0f, 0xbc, 0x44, 0xd7, 0x97, 0x0e, 0xf8,
        0x00, 0x01, 0x3a, 0xa0, 0x1f, 0x00, 0x00, 0x00, 0x49, 0x28, 0xe9, 0x1e, 0xb1, 0xc4, 0x67, 0xfb, 0x02, 0x00,
        0x00, 0x00, 0x00, 0x04, 0x59, 0x5a,
    ];

    #[test]
    fn streams_of_several_members_are_decompressed_and_others_pass() {
        let text = b"disk".repeat(1000);
        let gzip = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let gzipped = [gzip(&text[..1500]), gzip(&text[1500..])].concat();
        let zstd = [zstd::encode_all(&text[..7], 1).unwrap(), zstd::encode_all(&text[7..], 1).unwrap()].concat();
        for (stream, compression) in [
            (gzipped, Some(Compression::Gzip)),
            (zstd, Some(Compression::Zstd)),
            (XZ.to_vec(), Some(Compression::Xz)),
            (text.clone(), None),
        ] {
            assert_eq!(Compression::find(&stream), compression);
            let mut decompressed = Stream::new(&stream[..]).unwrap().decompressed().unwrap();
            let mut all = vec![];
            decompressed.all.read_to_end(&mut all).unwrap();
            assert!(all == text && decompressed.prefix == text[..PREFIX], "{compression:?}");
        }
    }

    #[test]
    fn damaged_and_cut_streams_fail() {
        let whole = zstd::encode_all(&b"disk".repeat(1000)[..], 1).unwrap();
        let cut = &whole[..whole.len() - 3];
        let read = |bytes: &[u8]| -> io::Result<u64> {
            io::copy(&mut Stream::new(bytes)?.decompressed()?.all, &mut io::sink())
        };
        assert!(read(&whole).is_ok() && read(cut).is_err());
        assert!(read(&XZ[..XZ.len() - 8]).is_err());
        assert!(read(b"\x1f\x8b\x08 nothing of gzip").is_err());
    }
}
