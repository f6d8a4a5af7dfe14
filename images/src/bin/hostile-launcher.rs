//! A malicious launcher on a unix socket. For tests; part of the toolbox image.
//!
//! ```text
//! hostile-launcher count SOCKET    accepts connections and stays silent
//! hostile-launcher endless SOCKET  answers each call with an endless message
//! hostile-launcher pings SOCKET    answers no call, and sends endless PING frames
//! hostile-launcher bytes SOCKET    opens a channel of a migration, and sends endless bytes
//! hostile-launcher passes SOCKET   the same, and passes a descriptor whose end takes an hour
//! ```
//!
//! It prints a line at the start and end of each connection. HTTP/2 (RFC 9113) is implemented here because libraries follow
//! the protocol.

use std::{
    collections::HashMap,
    io::{IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::{Context, Result, bail};
use nix::{
    libc,
    sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg, setsockopt, sockopt},
};

/// Length of the client's connection preface.
const PREFACE: usize = 24;
/// Default frame size limit of a peer.
const FRAME: usize = 16 << 10;
/// Initial size of both windows of a client.
const WINDOW: i64 = 65_535;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: [u8; 2] = [0, 4];

/// `:status: 200` and `content-type: application/grpc`, by numbers of the static table (RFC 7541, appendix A).
const RESPONSE: &[u8] = b"\x88\x0f\x10\x10application/grpc";
/// Byte of a channel for the memory of a guest (`protocol::channels`).
const MEMORY: u8 = b'M';
/// Header of an uncompressed gRPC message of maximum length.
const MESSAGE: [u8; 5] = [0, 0xff, 0xff, 0xff, 0xff];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, socket] = arguments.as_slice() else {
        bail!("usage: hostile-launcher count|endless|pings|bytes|passes SOCKET")
    };
    let serve: fn(UnixStream) -> Result<()> = match mode.as_str() {
        "count" => hold,
        "endless" => |stream| speak(stream, false),
        "pings" => |stream| speak(stream, true),
        "bytes" => open_channel,
        "passes" => pass,
        other => bail!("{other} is not known"),
    };
    // As in the launcher, the socket gets its name when it listens.
    let staging = Path::new(socket).with_extension("new");
    let listener = UnixListener::bind(&staging).with_context(|| format!("cannot listen on {}", staging.display()))?;
    std::fs::rename(&staging, socket)?;
    for stream in listener.incoming() {
        let stream = stream?;
        println!("connected");
        thread::spawn(move || match serve(stream) {
            Ok(()) => println!("ended"),
            Err(error) => println!("ended: {error:#}"),
        });
    }
    Ok(())
}

/// Reads until the client closes.
fn hold(mut stream: UnixStream) -> Result<()> {
    std::io::copy(&mut stream, &mut std::io::sink())?;
    Ok(())
}

/// Passes a TCP connection whose end takes an hour, and opens a channel.
fn pass(stream: UnixStream) -> Result<()> {
    // Connections to 127.0.0.1 reach the guest of a VMI with masquerade.
    let listener = TcpListener::bind("127.0.0.2:0")?;
    let mut passed = TcpStream::connect(listener.local_addr()?)?;
    passed.set_nonblocking(true)?;
    // Nobody reads.
    while passed.write(&[0; FRAME]).is_ok() {}
    setsockopt(&passed, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 3600 })?;
    let descriptors = [passed.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    match sendmsg::<UnixAddr>(stream.as_raw_fd(), &[IoSlice::new(&[MEMORY])], &rights, MsgFlags::empty(), None) {
        Ok(_) => println!("passed a descriptor"),
        Err(error) => println!("the descriptor is refused: {error}"),
    }
    // The other side has the last descriptor, if it has one.
    drop(passed);
    open_channel(stream)
}

/// Opens a channel of a migration and sends bytes without end.
fn open_channel(mut stream: UnixStream) -> Result<()> {
    stream.write_all(&[MEMORY])?;
    loop {
        stream.write_all(&[b'x'; FRAME])?;
    }
}

/// Shared state of the threads of a connection.
struct Shared {
    writer: Mutex<UnixStream>,
    windows: Mutex<Windows>,
    changed: Condvar,
}

/// Flow control windows of the client.
struct Windows {
    connection: i64,
    initial: i64,
    streams: HashMap<u32, i64>,
    ended: bool,
}

impl Shared {
    fn write(&self, frame: &[u8]) -> Result<()> {
        Ok(lock(&self.writer).write_all(frame)?)
    }

    fn change(&self, change: impl FnOnce(&mut Windows)) {
        change(&mut lock(&self.windows));
        self.changed.notify_all();
    }

    /// Waits for window of a stream and returns the number of bytes to send, or `None` if the stream is closed.
    fn take(&self, stream: u32) -> Option<usize> {
        let mut windows = lock(&self.windows);
        loop {
            if windows.ended {
                return None;
            }
            let room = (*windows.streams.get(&stream)?).min(windows.connection);
            if let Ok(room) = usize::try_from(room)
                && room > 0
            {
                let taken = room.min(FRAME);
                let amount = i64::try_from(taken).unwrap_or_default();
                windows.connection -= amount;
                windows.streams.entry(stream).and_modify(|window| *window -= amount);
                return Some(taken);
            }
            windows = self.changed.wait(windows).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Serves HTTP/2 until the client closes.
fn speak(mut stream: UnixStream, pings: bool) -> Result<()> {
    stream.read_exact(&mut [0; PREFACE])?;
    let windows = Windows { connection: WINDOW, initial: WINDOW, streams: HashMap::new(), ended: false };
    let shared = Arc::new(Shared {
        writer: Mutex::new(stream.try_clone()?),
        windows: Mutex::new(windows),
        changed: Condvar::new(),
    });
    shared.write(&frame(SETTINGS, 0, 0, &[]))?;
    if pings {
        let shared = shared.clone();
        thread::spawn(move || {
            let flood = frame(PING, 0, 0, b"hostile!").repeat(200);
            while shared.write(&flood).is_ok() {
                // The thread that answers the client needs the socket, too.
                thread::yield_now();
            }
        });
    }
    let ended = listen(&mut stream, &shared, pings);
    shared.change(|windows| windows.ended = true);
    ended
}

/// Handles the frames of the client.
fn listen(stream: &mut UnixStream, shared: &Arc<Shared>, pings: bool) -> Result<()> {
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header)?;
        let [high, middle, low, kind, flags, id @ ..] = header;
        let id = u32::from_be_bytes(id) & 0x7fff_ffff;
        let mut payload = vec![0; usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)];
        stream.read_exact(&mut payload)?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, |bytes| i64::from(u32::from_be_bytes(bytes)));
        match kind {
            SETTINGS if flags & ACK == 0 => {
                for setting in payload.chunks_exact(6).filter(|setting| setting[..2] == INITIAL_WINDOW_SIZE) {
                    shared.change(|windows| {
                        let grown = number(&setting[2..]) - windows.initial;
                        windows.initial += grown;
                        windows.streams.values_mut().for_each(|window| *window += grown);
                    });
                }
                shared.write(&frame(SETTINGS, ACK, 0, &[]))?;
            }
            PING if flags & ACK == 0 => shared.write(&frame(PING, ACK, 0, &payload))?,
            WINDOW_UPDATE => shared.change(|windows| match id {
                0 => windows.connection += number(&payload),
                id => _ = windows.streams.entry(id).and_modify(|window| *window += number(&payload)),
            }),
            RST_STREAM => shared.change(|windows| _ = windows.streams.remove(&id)),
            HEADERS if !pings => {
                shared.change(|windows| _ = windows.streams.insert(id, windows.initial));
                shared.write(&frame(HEADERS, END_HEADERS, id, RESPONSE))?;
                let shared = shared.clone();
                thread::spawn(move || answer(&shared, id));
            }
            _ => {}
        }
    }
}

/// Sends an endless message.
fn answer(shared: &Shared, stream: u32) {
    let mut begun = false;
    while let Some(length) = shared.take(stream) {
        let mut payload = vec![0; length];
        if !std::mem::replace(&mut begun, true) {
            let start = length.min(MESSAGE.len());
            payload[..start].copy_from_slice(&MESSAGE[..start]);
        }
        if shared.write(&frame(DATA, 0, stream, &payload)).is_err() {
            return;
        }
    }
}
