//! Cuts the frames of a client into small ones.
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
//! The boundaries of messages in a stream of bytes mean nothing, and clients send messages of any size: client-go sends one for
//! each write. So only the headers of frames are rewritten. The masked payload passes unchanged, and a stream takes the memory
//! of one small message for client messages of any size. A message without bytes has a meaning: it stays one, and no other
//! message becomes one. Text has no meaning in this protocol; the pongs show that the client is alive.
//!
//! The library validates frames. A frame that it would refuse passes unchanged, with all that follows. Only a message that
//! begins within another one would pass its validation, once both look complete; that ends the stream here.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clients::websocket::PIECE;

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

/// Contents of a stream's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Bytes: messages are cut anywhere.
    Bytes,
    /// One datagram each: messages are not cut.
    Datagrams,
}

/// A connection whose frames are cut when they are read. Writes pass unchanged.
#[derive(Debug)]
pub(crate) struct Frames<S> {
    inner: S,
    cutter: Cutter,
    /// An error of the connection after bytes that have to be returned first.
    failed: Option<io::Error>,
}

impl<S> Frames<S> {
    /// Reads frames from `inner`, from the first byte after the handshake.
    pub(crate) fn new(inner: S, content: Content) -> Self {
        Self { inner, cutter: Cutter { untouched: content == Content::Datagrams, ..Cutter::default() }, failed: None }
    }
}

impl<S: AsyncRead + Unpin> Frames<S> {
    /// Reads one step and returns the number of bytes that were read or written to the buffer, which is not full.
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
                // The next read returns the end.
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

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Return the bytes in `out`.
    Give,
    /// Read the header of the client's frame up to this length.
    Header(usize),
    /// Read at most this number of bytes and return them.
    Pass(usize),
    /// Read at most this number of bytes and discard them.
    Drop(usize),
}

/// State of the reader.
#[derive(Debug, Default)]
struct Cutter {
    /// All bytes pass unchanged.
    untouched: bool,
    /// The client's incomplete message.
    open: Option<Open>,
    /// Received part of the header of the client's next frame.
    head: Part,
    /// Unreturned part of a rewritten header.
    out: Part,
    /// Treatment of the client's frame.
    treatment: Treatment,
    /// Unread bytes of the current piece.
    piece: usize,
    /// Bytes of the frame after that piece.
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
                return Ok(if self.treatment == Treatment::Pongs {
                    Next::Drop(self.piece)
                } else {
                    Next::Pass(self.piece)
                });
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

    /// Records the number of bytes that were read for the last step.
    fn moved(&mut self, read: usize) {
        self.piece = self.piece.saturating_sub(read);
    }

    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        let head = std::mem::take(&mut self.head);
        self.treatment = treatment(&mut self.open, header)?;
        self.mask = header.mask;
        match self.treatment {
            Treatment::Messages | Treatment::Pongs => {
                self.rest = header.length;
                self.begin_piece();
            }
            // At most as long as a control frame.
            Treatment::Same => {
                self.out = head;
                self.rest = 0;
                self.piece = usize::try_from(header.length).unwrap_or_default();
            }
            Treatment::Gone => {}
            Treatment::Untouched => {
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
        let (opcode, length) = if self.treatment == Treatment::Pongs { (PONG, 0) } else { (BINARY, length) };
        self.out = Header { first: FINAL | opcode, length, mask: self.mask }.bytes();
    }
}

/// An incomplete message of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    text: bool,
    /// None of its frames had bytes.
    empty: bool,
}

/// Treatment of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Treatment {
    /// It becomes messages.
    Messages,
    /// It becomes pongs.
    Pongs,
    /// It passes unchanged.
    #[default]
    Same,
    /// It is dropped: it has no bytes, and its message has other frames.
    Gone,
    /// It passes unchanged with all that follows; the library refuses it.
    Untouched,
}

/// Decides the treatment of a frame. `open`: the incomplete message before it, and after it.
fn treatment(open: &mut Option<Open>, header: &Header) -> io::Result<Treatment> {
    let last = header.first & FINAL != 0;
    if header.first & RESERVED != 0 || header.length >> 63 != 0 {
        return Ok(Treatment::Untouched);
    }
    let empty = header.length == 0;
    let message = match (header.first & OPCODE, *open) {
        (opcode @ (TEXT | BINARY), None) => Open { text: opcode == TEXT, empty },
        (TEXT | BINARY, Some(_)) => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message begins within another"));
        }
        (CONTINUATION, Some(message)) => Open { empty: message.empty && empty, ..message },
        (CLOSE..=PONG, _) if last && header.length <= CONTROL => return Ok(Treatment::Same),
        _ => return Ok(Treatment::Untouched),
    };
    *open = (!last).then_some(message);
    Ok(if message.text {
        Treatment::Pongs
    } else if empty && !(last && message.empty) {
        Treatment::Gone
    } else {
        Treatment::Messages
    })
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    /// The bit of a message's last frame, reserved bits, and opcode.
    first: u8,
    length: u64,
    mask: Option<[u8; 4]>,
}

impl Header {
    /// Parses the first bytes of a frame, or returns the required number of bytes.
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

    /// Writes the header with the shortest form of the length.
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

    /// Removes and returns the first bytes, at most this number.
    fn take(&mut self, most: usize) -> &[u8] {
        let start = self.start;
        self.start = self.end.min(start.saturating_add(most));
        &self.data[start..self.start]
    }

    /// Returns the unfilled part up to this length.
    fn space(&mut self, wanted: usize) -> &mut [u8] {
        &mut self.data[self.end..wanted]
    }
}

#[cfg(test)]
mod tests;
