//! Frames of a client, made small as they pass.
//!
//! ```text
//!   connection ──▶ Frames ──▶ WebSocketStream
//!
//!   binary, 3 MiB                ──▶ 48 binary messages of 64 KiB
//!   binary, begun                ──▶ a binary message
//!   ping                         ──▶ the same
//!   continuation without bytes   ──▶ nothing
//!   continuation, the last       ──▶ a binary message
//!   text                         ──▶ a pong for each 64 KiB
//! ```
//!
//! Where the bytes of a stream are carried, the boundaries of messages mean nothing, and clients make messages of any
//! size: client-go one of all that it is given. Nobody needs them whole. So only the headers of frames are written anew:
//! what follows a header passes as it came, masked as it is, and a stream takes the memory of one small message, however
//! large the client's are. Two things are kept: a message without bytes stays one, since it has a meaning, and no other
//! becomes one. Text has no meaning in this protocol; the pongs show that the client is there.
//!
//! Nothing is judged here that the library judges. A frame that it would refuse, and all that follows, passes as it is.
//! Only a message that begins within another would escape it, once both look whole; that ends the stream here.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Most bytes in a frame that is passed on. A multiple of the length of a mask, so that each part of a frame begins with
/// the first byte of the mask.
pub const PIECE: usize = 64 << 10;

/// Longest header of a frame: two bytes, a length of eight, a mask of four.
const HEADER: usize = 14;
/// Longest payload of a control frame.
const CONTROL: u64 = 125;

const FINAL: u8 = 0x80;
const RESERVED: u8 = 0x70;
const OPCODE: u8 = 0x0f;
const MASKED: u8 = 0x80;
const LENGTH: u8 = 0x7f;
const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PONG: u8 = 10;

/// What the messages of a stream carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes: messages are cut where it suits.
    Bytes,
    /// A datagram each: messages stay as they are.
    Datagrams,
}

/// A connection whose frames are made small when they are read. What is written passes as it is.
#[derive(Debug)]
pub struct Frames<S> {
    inner: S,
    cutter: Cutter,
    /// An error of the connection that came after bytes that have to be handed on first.
    failed: Option<io::Error>,
}

impl<S> Frames<S> {
    /// Reads frames from `inner`, from the first byte after the handshake.
    pub fn new(inner: S, content: Content) -> Self {
        Self { inner, cutter: Cutter { untouched: content == Content::Datagrams, ..Cutter::default() }, failed: None }
    }
}

impl<S: AsyncRead + Unpin> Frames<S> {
    /// One step of reading; how many bytes were read, or given. Not called without room.
    fn step(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        let room = buffer.remaining();
        let next = self.cutter.next()?;
        match next {
            Next::Give => {
                let bytes = self.cutter.out.take(room);
                buffer.put_slice(bytes);
                Poll::Ready(Ok(bytes.len()))
            }
            Next::Header(wanted) => {
                let read = ready!(read(&mut self.inner, context, self.cutter.head.space(wanted)))?;
                self.cutter.head.end += read;
                Poll::Ready(Ok(read))
            }
            Next::Pass(length) | Next::Drop(length) => {
                let space = buffer.initialize_unfilled_to(length.min(room));
                let read = ready!(read(&mut self.inner, context, space))?;
                self.cutter.moved(read);
                if matches!(next, Next::Pass(_)) {
                    buffer.advance(read);
                }
                Poll::Ready(Ok(read))
            }
        }
    }
}

fn read<S: AsyncRead + Unpin>(inner: &mut S, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(into);
    ready!(Pin::new(inner).poll_read(context, &mut buffer))?;
    Poll::Ready(Ok(buffer.filled().len()))
}

impl<S: AsyncRead + Unpin> AsyncRead for Frames<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(error) = this.failed.take() {
            return Poll::Ready(Err(error));
        }
        let before = buffer.filled().len();
        while buffer.remaining() > 0 {
            let step = this.step(context, buffer);
            let something = buffer.filled().len() > before;
            match step {
                // The end is told again, when it is all that there is.
                Poll::Ready(Ok(0)) => break,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) if something => {
                    this.failed = Some(error);
                    break;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending if something => break,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Frames<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Give what stands in `out`.
    Give,
    /// Read the header of the client's frame until so many bytes of it are there.
    Header(usize),
    /// Read so many bytes, at most, and give them.
    Pass(usize),
    /// Read so many bytes, at most, and forget them.
    Drop(usize),
}

/// Where in a frame the reader is.
#[derive(Debug, Default)]
struct Cutter {
    /// All passes as it is.
    untouched: bool,
    /// The client's message of which more is to come.
    open: Option<Open>,
    /// What is there of the header of the client's next frame.
    head: Part,
    /// What is still to be given of a header of ours.
    out: Part,
    /// What becomes of the client's frame.
    fate: Fate,
    /// Bytes of the present piece of it that have not been read.
    piece: usize,
    /// Bytes of it after that piece.
    rest: u64,
    /// Its mask.
    mask: Option<[u8; 4]>,
}

impl Cutter {
    fn next(&mut self) -> io::Result<Next> {
        loop {
            if !self.out.is_empty() {
                return Ok(Next::Give);
            }
            if self.untouched {
                return Ok(Next::Pass(usize::MAX));
            }
            if self.piece > 0 {
                return Ok(if self.fate == Fate::Pongs { Next::Drop(self.piece) } else { Next::Pass(self.piece) });
            }
            if self.rest > 0 {
                self.begin_piece();
                continue;
            }
            match Header::parse(self.head.bytes()) {
                Err(wanted) => return Ok(Next::Header(wanted)),
                Ok(header) => self.begin_frame(&header)?,
            }
        }
    }

    /// So many bytes of what was asked for have been read.
    fn moved(&mut self, read: usize) {
        self.piece = self.piece.saturating_sub(read);
    }

    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        let head = std::mem::take(&mut self.head);
        self.fate = fate(&mut self.open, header)?;
        self.mask = header.mask;
        match self.fate {
            Fate::Messages | Fate::Pongs => {
                self.rest = header.length;
                self.begin_piece();
            }
            // At most as long as a control frame.
            Fate::Same => {
                self.out = head;
                self.rest = 0;
                self.piece = usize::try_from(header.length).unwrap_or_default();
            }
            Fate::Gone => {}
            Fate::Untouched => {
                self.out = head;
                self.untouched = true;
            }
        }
        Ok(())
    }

    fn begin_piece(&mut self) {
        self.piece = usize::try_from(self.rest).unwrap_or(usize::MAX).min(PIECE);
        let length = u64::try_from(self.piece).unwrap_or_default();
        self.rest -= length;
        let (opcode, length) = if self.fate == Fate::Pongs { (PONG, 0) } else { (BINARY, length) };
        self.out = Header { first: FINAL | opcode, length, mask: self.mask }.bytes();
    }
}

/// A client's message that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    text: bool,
    /// None of its frames had bytes.
    empty: bool,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fate {
    /// It passes as messages.
    Messages,
    /// Pongs pass in its stead.
    Pongs,
    /// It passes as it is.
    #[default]
    Same,
    /// Nothing of it passes: it has no bytes, and its message has others or more to come.
    Gone,
    /// It passes as it is with all that follows, for the library to refuse it.
    Untouched,
}

/// Decides what becomes of a frame. `open`: the message that has begun before it, and after it.
fn fate(open: &mut Option<Open>, header: &Header) -> io::Result<Fate> {
    let last = header.first & FINAL != 0;
    if header.first & RESERVED != 0 || header.length >> 63 != 0 {
        return Ok(Fate::Untouched);
    }
    let empty = header.length == 0;
    let message = match (header.first & OPCODE, *open) {
        (opcode @ (TEXT | BINARY), None) => Open { text: opcode == TEXT, empty },
        (TEXT | BINARY, Some(_)) => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message begins within another"));
        }
        (CONTINUATION, Some(message)) => Open { empty: message.empty && empty, ..message },
        (CLOSE..=PONG, _) if last && header.length <= CONTROL => return Ok(Fate::Same),
        _ => return Ok(Fate::Untouched),
    };
    *open = (!last).then_some(message);
    Ok(if message.text {
        Fate::Pongs
    } else if empty && !(last && message.empty) {
        Fate::Gone
    } else {
        Fate::Messages
    })
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    /// Whether it is the last of its message, reserved bits, and opcode.
    first: u8,
    length: u64,
    mask: Option<[u8; 4]>,
}

impl Header {
    /// From the first bytes of a frame; or how many have to be there.
    fn parse(bytes: &[u8]) -> Result<Self, usize> {
        let Some(([first, second], rest)) = bytes.split_first_chunk::<2>() else { return Err(2) };
        let long = match second & LENGTH {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let masked = second & MASKED != 0;
        let wanted = 2 + long + if masked { 4 } else { 0 };
        let Some((length, rest)) = rest.split_at_checked(long) else { return Err(wanted) };
        let length = match long {
            0 => u64::from(second & LENGTH),
            _ => length.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        };
        let mask = if masked { Some(*rest.first_chunk::<4>().ok_or(wanted)?) } else { None };
        Ok(Self { first: *first, length, mask })
    }

    /// With the length in its shortest form.
    fn bytes(&self) -> Part {
        let mut part = Part::default();
        let masked = if self.mask.is_some() { MASKED } else { 0 };
        match (u8::try_from(self.length), u16::try_from(self.length)) {
            (Ok(length @ ..=125), _) => part.push(&[self.first, masked | length]),
            (_, Ok(length)) => {
                part.push(&[self.first, masked | 126]);
                part.push(&length.to_be_bytes());
            }
            _ => {
                part.push(&[self.first, masked | 127]);
                part.push(&self.length.to_be_bytes());
            }
        }
        part.push(&self.mask.unwrap_or_default()[..if self.mask.is_some() { 4 } else { 0 }]);
        part
    }
}

/// Some bytes of a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Part {
    data: [u8; HEADER],
    start: usize,
    end: usize,
}

impl Part {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn bytes(&self) -> &[u8] {
        &self.data[self.start..self.end]
    }

    fn push(&mut self, bytes: &[u8]) {
        self.data[self.end..][..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    /// The first bytes of it, at most so many, which are gone with that.
    fn take(&mut self, most: usize) -> &[u8] {
        let start = self.start;
        self.start = self.end.min(start.saturating_add(most));
        &self.data[start..self.start]
    }

    /// Room for what it lacks of so many bytes.
    fn space(&mut self, wanted: usize) -> &mut [u8] {
        &mut self.data[self.end..wanted]
    }
}

#[cfg(test)]
mod tests;
