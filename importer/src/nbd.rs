//! Serves an image read-only by the NBD protocol on a socket, so that QEMU converts it while it is downloaded.
//!
//! The part of the protocol that QEMU's client needs: fixed newstyle negotiation without TLS, simple replies. See
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

use std::{
    fs,
    io::{self, BufWriter, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use crate::{format::ReadAt, meter::Meter};

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// Fixed newstyle, no zeroes after the export.
const HANDSHAKE_FLAGS: u16 = 0b11;
/// The export has flags, and is read-only.
const EXPORT_FLAGS: u16 = 0b11;
const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = (1 << 31) | 1;
const COMMAND_READ: u16 = 0;
const COMMAND_DISCONNECT: u16 = 2;
const ERROR_PERMISSION: u32 = 1;
const ERROR_IO: u32 = 5;
const ERROR_INVALID: u32 = 22;
/// Limits the data of an option, and of a read.
const OPTION_LIMIT: u32 = 4096;
const READ_LIMIT: u32 = 32 << 20;
/// Data of a read that is in memory at once.
const BUFFER: usize = 256 << 10;

/// A server, until it is dropped.
pub(crate) struct Server {
    socket: PathBuf,
    ended: Arc<AtomicBool>,
}

impl Server {
    /// Serves an image of this length on a new socket.
    pub(crate) fn start(
        socket: &Path,
        image: Arc<impl ReadAt + Send + Sync + 'static>,
        length: u64,
        meter: Arc<Meter>,
    ) -> io::Result<Self> {
        let _ = fs::remove_file(socket);
        let listener = UnixListener::bind(socket)?;
        let ended = Arc::new(AtomicBool::new(false));
        let server = Self { socket: socket.to_owned(), ended: ended.clone() };
        thread::Builder::new().name("nbd".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Relaxed) {
                    return;
                }
                // A failure concerns the client, which reports it.
                let _ = stream.and_then(|stream| Connection { stream, length, meter: &meter }.serve(&*image));
            }
        })?;
        Ok(server)
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        // Wakes the thread.
        let _ = UnixStream::connect(&self.socket);
        let _ = fs::remove_file(&self.socket);
    }
}

struct Connection<'a> {
    stream: UnixStream,
    length: u64,
    meter: &'a Meter,
}

impl Connection<'_> {
    fn serve(mut self, image: &impl ReadAt) -> io::Result<()> {
        self.stream.write_all(b"NBDMAGIC")?;
        self.stream.write_all(OPTION_MAGIC)?;
        self.stream.write_all(&HANDSHAKE_FLAGS.to_be_bytes())?;
        let no_zeroes = u32::from_be_bytes(self.read()?) & 2 != 0;
        if self.negotiate(no_zeroes)? { self.transmit(image) } else { Ok(()) }
    }

    /// Answers options. Returns true if the client wants to read.
    fn negotiate(&mut self, no_zeroes: bool) -> io::Result<bool> {
        loop {
            if &self.read::<8>()? != OPTION_MAGIC {
                return Ok(false);
            }
            let (option, size) = (u32::from_be_bytes(self.read()?), u32::from_be_bytes(self.read()?));
            if size > OPTION_LIMIT {
                return Ok(false);
            }
            // The name of the export and its wanted facts; there is one export.
            io::copy(&mut (&self.stream).take(size.into()), &mut io::sink())?;
            let export = [&self.length.to_be_bytes()[..], &EXPORT_FLAGS.to_be_bytes()].concat();
            match option {
                OPTION_EXPORT_NAME => {
                    self.stream.write_all(&export)?;
                    if !no_zeroes {
                        self.stream.write_all(&[0; 124])?;
                    }
                    return Ok(true);
                }
                OPTION_INFO | OPTION_GO => {
                    self.reply(option, REPLY_INFO, &[&[0, 0], &export[..]].concat())?;
                    self.reply(option, REPLY_ACK, &[])?;
                    if option == OPTION_GO {
                        return Ok(true);
                    }
                }
                OPTION_ABORT => {
                    self.reply(option, REPLY_ACK, &[])?;
                    return Ok(false);
                }
                _ => self.reply(option, REPLY_UNSUPPORTED, &[])?,
            }
        }
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let size = u32::try_from(data.len()).unwrap_or_default();
        let mut reply = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        for number in [option, kind, size] {
            reply.extend(number.to_be_bytes());
        }
        reply.extend(data);
        self.stream.write_all(&reply)
    }

    fn transmit(&mut self, image: &impl ReadAt) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let magic = u32::from_be_bytes(self.read()?);
            let (_, command) = (self.read::<2>()?, u16::from_be_bytes(self.read()?));
            let cookie: [u8; 8] = self.read()?;
            let (offset, size) = (u64::from_be_bytes(self.read()?), u32::from_be_bytes(self.read()?));
            if magic != REQUEST_MAGIC || command == COMMAND_DISCONNECT {
                return Ok(());
            }
            let inside = offset.checked_add(size.into()).is_some_and(|end| end <= self.length);
            let error = match command {
                COMMAND_READ if !inside || size > READ_LIMIT => ERROR_INVALID,
                // After the header of the reply a failure cannot be told, so that the last byte must be there.
                COMMAND_READ if size > 0 && !has(image, offset + u64::from(size) - 1) => ERROR_IO,
                COMMAND_READ => 0,
                _ => ERROR_PERMISSION,
            };
            let mut writer = BufWriter::new(&self.stream);
            writer.write_all(&REPLY_MAGIC.to_be_bytes())?;
            writer.write_all(&error.to_be_bytes())?;
            writer.write_all(&cookie)?;
            if error == 0 {
                send(image, offset, u64::from(size), &mut buffer, &mut writer)?;
            }
            writer.flush()?;
            self.meter.moved();
        }
    }

    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

fn has(image: &impl ReadAt, offset: u64) -> bool {
    matches!(image.read_at(offset, &mut [0]), Ok(1))
}

fn send(image: &impl ReadAt, offset: u64, size: u64, buffer: &mut [u8], writer: &mut impl Write) -> io::Result<()> {
    let mut sent = 0;
    while sent < size {
        let part = usize::try_from(size - sent).unwrap_or(BUFFER).min(BUFFER);
        let count = image.read_at(offset + sent, &mut buffer[..part])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        writer.write_all(&buffer[..count])?;
        sent += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_negotiated_and_read() {
        let socket = std::env::temp_dir().join(format!("importer-nbd-{}", std::process::id()));
        let image: &[u8] = b"0123456789";
        let server = Server::start(&socket, Arc::new(image), 10, Arc::default()).unwrap();
        let mut client = UnixStream::connect(server.socket()).unwrap();
        let take = |client: &mut UnixStream, count: usize| {
            let mut bytes = vec![0; count];
            client.read_exact(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(take(&mut client, 18), b"NBDMAGICIHAVEOPT\0\x03");
        let option = |number: u8| [b"IHAVEOPT", &[0, 0, 0, number, 0, 0, 0, 2, 0, 0][..]].concat();
        client.write_all(&3_u32.to_be_bytes()).unwrap();
        client.write_all(&option(8)).unwrap();
        assert_eq!(take(&mut client, 20)[12..16], REPLY_UNSUPPORTED.to_be_bytes());
        client.write_all(&option(7)).unwrap();
        assert_eq!(take(&mut client, 32)[22..], [0, 0, 0, 0, 0, 0, 0, 10, 0, 3]);
        assert_eq!(take(&mut client, 20)[12..16], [0, 0, 0, 1]);
        let request = |command: u8, offset: u8, size: u8| {
            let head = [&REQUEST_MAGIC.to_be_bytes()[..], &[0, 0, 0, command], b"cookie!!"].concat();
            [head, vec![0, 0, 0, 0, 0, 0, 0, offset, 0, 0, 0, size]].concat()
        };
        client.write_all(&request(0, 3, 4)).unwrap();
        assert_eq!(take(&mut client, 20), [&REPLY_MAGIC.to_be_bytes()[..], &[0; 4], b"cookie!!3456"].concat());
        for (command, offset, error) in [(0, 7, ERROR_INVALID), (1, 0, ERROR_PERMISSION)] {
            client.write_all(&request(command, offset, 4)).unwrap();
            if command == 1 {
                // A client that writes in spite of the flags.
                assert_eq!(take(&mut client, 16)[4..8], error.to_be_bytes());
                break;
            }
            assert_eq!(take(&mut client, 16)[4..8], error.to_be_bytes());
        }
    }
}
