//! Moves the bytes between two sockets through a pipe, so that the kernel need not copy them.

use std::{io::Result, os::fd::OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::{
        UnixStream,
        unix::{ReadHalf, WriteHalf},
    },
};

/// Most bytes that move at a time. The pipe holds 16 pieces of a socket, each of at most 32 KiB.
const STEP: usize = 512 << 10;

/// Relays both directions until both have ended; an end is passed on. Returns the bytes of each.
pub(super) async fn relay(mut one: UnixStream, mut other: UnixStream) -> Result<(u64, u64)> {
    let (from_one, to_one) = one.split();
    let (from_other, to_other) = other.split();
    tokio::try_join!(forward(from_one, to_other), forward(from_other, to_one))
}

async fn forward(from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> Result<u64> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let mut total = 0;
    loop {
        let taken = take(&from, &into).await?;
        if taken == 0 {
            to.shutdown().await?;
            return Ok(total);
        }
        total += taken as u64;
        give(&out, &to, taken).await?;
    }
}

/// Moves bytes of a socket into the pipe, which is empty.
async fn take(from: &ReadHalf<'_>, into: &OwnedFd) -> Result<usize> {
    let socket: &UnixStream = from.as_ref();
    let step = || Ok(splice(socket, None, into, None, STEP, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)?);
    socket.async_io(Interest::READABLE, step).await
}

/// Moves bytes of the pipe to a socket.
async fn give(out: &OwnedFd, to: &WriteHalf<'_>, mut bytes: usize) -> Result<()> {
    let socket: &UnixStream = to.as_ref();
    while bytes > 0 {
        let step = || Ok(splice(out, None, socket, None, bytes, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)?);
        bytes -= socket.async_io(Interest::WRITABLE, step).await?;
    }
    Ok(())
}
