//! The header of a connection between two nodes.
//!
//! ```text
//!   length of the VMI's UID │ length of the migration's UID │ channel │ UID of the VMI │ UID of the migration
//!           1 byte          │            1 byte             │ 1 byte  │                │
//! ```
//! The target answers with [`CONNECTED`](protocol::channels::CONNECTED), or closes the connection.

use std::io;

use protocol::channels::Channel;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::Migration;

/// Longest UID. UIDs of Kubernetes have 36 characters.
const MAX_UID: usize = 64;

/// The header of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) migration: Migration,
    pub(super) channel: Channel,
}

impl Header {
    /// Returns the bytes of the header.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let Migration { vmi, migration } = &self.migration;
        let length = |uid: &str| u8::try_from(uid.len()).ok().filter(|_| is_uid(uid.as_bytes()));
        let (Some(first), Some(second)) = (length(vmi), length(migration)) else {
            return Err(io::Error::other("the UID of the VMI or of the migration is no UID"));
        };
        Ok([&[first, second, self.channel.byte()], vmi.as_bytes(), migration.as_bytes()].concat())
    }

    /// Reads a header. Reads no byte beyond it.
    pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let mut lengths = [0; 3];
        stream.read_exact(&mut lengths).await?;
        let [vmi, migration, channel] = lengths;
        let channel = Channel::of(channel).ok_or_else(malformed)?;
        let vmi = uid(stream, vmi).await?;
        let migration = uid(stream, migration).await?;
        Ok(Self { migration: Migration { vmi, migration }, channel })
    }
}

async fn uid(stream: &mut (impl AsyncRead + Unpin), length: u8) -> io::Result<String> {
    let mut buffer = [0; MAX_UID];
    let bytes = buffer.get_mut(..usize::from(length)).ok_or_else(malformed)?;
    stream.read_exact(bytes).await?;
    if !is_uid(bytes) {
        return Err(malformed());
    }
    String::from_utf8(bytes.to_vec()).map_err(|_| malformed())
}

fn is_uid(text: &[u8]) -> bool {
    (1..=MAX_UID).contains(&text.len()) && text.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
}

fn malformed() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(vmi: &str, migration: &str) -> Header {
        Header { migration: Migration { vmi: vmi.into(), migration: migration.into() }, channel: Channel::Memory }
    }

    #[tokio::test]
    async fn header_is_read_as_it_was_written_and_nothing_beyond_it() {
        let header = header("9a1e5a66-0c4b-4d0b-8a53-1f0e3a3f7a11", &"m".repeat(MAX_UID));
        let mut bytes = header.encode().unwrap();
        bytes.extend_from_slice(b"data");
        let mut rest = bytes.as_slice();
        assert_eq!(Header::read(&mut rest).await.unwrap(), header);
        assert_eq!(rest, b"data");
    }

    #[tokio::test]
    async fn malformed_headers_are_refused() {
        let long = "a".repeat(MAX_UID + 1);
        for (vmi, migration) in [("", "m"), ("v", ""), (long.as_str(), "m"), ("v", &long), ("v\n", "m"), ("../v", "m")]
        {
            assert!(header(vmi, migration).encode().is_err(), "{vmi:?} {migration:?}");
        }
        for bytes in [
            [&[1, 1, b'X'], b"vm".as_slice()].concat(),
            [&[65, 1, b'M'], [b'v'; 70].as_slice()].concat(),
            [&[1, 255, b'M'], [b'v'; 300].as_slice()].concat(),
            [&[0, 1, b'M'], b"m".as_slice()].concat(),
            [&[1, 1, b'M'], b"\xff\n".as_slice()].concat(),
            vec![1, 1, b'M', b'v'],
            Vec::new(),
        ] {
            assert!(Header::read(&mut bytes.as_slice()).await.is_err(), "{bytes:?}");
        }
    }
}
