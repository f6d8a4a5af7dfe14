//! Streams between the node agent and sockets of QEMU.
//!
//! Bytes are passed on as they come, at the pace of the slower side. A stream ends as a whole when the agent's side breaks
//! or QEMU closes; when only the agent's input ends, what it sent still arrives, and QEMU has a moment to answer.

use std::{path::Path, time::Duration};

use bytes::Bytes;
use protocol::{Chunk, ConsoleInput, MAX_CHUNK};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::console::{Console, CutOff};

/// Channels of a machine for USB redirection.
pub const USB_CHANNELS: usize = 4;
/// Chunks of a stream that may wait for a client.
const STREAM_QUEUE: usize = 4;
/// How long a stream's first message may take.
pub const FIRST_INPUT: Duration = Duration::from_secs(5);
/// How long QEMU's side may go on when the input has ended.
const HALF_OPEN: Duration = Duration::from_secs(3);
/// How long a connection to a socket of QEMU may take: one that serves somebody else does not accept.
const CONNECT: Duration = Duration::from_secs(5);

/// The agent's end of a stream.
pub type Output = ReceiverStream<Result<Chunk, Status>>;

/// Connects to a socket of QEMU.
///
/// # Errors
/// When there is none, or it does not answer; `what` names it.
pub async fn connect(path: &Path, what: &str) -> Result<UnixStream, Status> {
    match timeout(CONNECT, UnixStream::connect(path)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(Status::failed_precondition(format!("the machine has no {what}: {error}"))),
        Err(_) => Err(Status::unavailable(format!("the machine's {what} does not answer"))),
    }
}

/// Carries bytes between the agent and a socket. `held` is given up when the stream ends.
pub fn pipe<T: Send + 'static>(
    socket: UnixStream,
    mut input: Streaming<T>,
    data: fn(T) -> Vec<u8>,
    held: impl Send + 'static,
) -> Output {
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    let (mut reader, mut writer) = socket.into_split();
    tokio::spawn(async move {
        let from_agent = async {
            loop {
                match input.message().await {
                    Ok(Some(message)) => {
                        let data = data(message);
                        if data.len() > MAX_CHUNK {
                            return false;
                        }
                        if writer.write_all(&data).await.is_err() {
                            return true;
                        }
                    }
                    Ok(None) => return writer.shutdown().await.is_ok(),
                    Err(_) => return false,
                }
            }
        };
        let mut to_agent = std::pin::pin!(async {
            let mut buffer = vec![0; MAX_CHUNK / 2];
            while let Ok(n) = reader.read(&mut buffer).await {
                let data = buffer.get(..n).unwrap_or_default().to_vec();
                if n == 0 || sender.send(Ok(Chunk { data })).await.is_err() {
                    return;
                }
            }
        });
        let orderly = tokio::select! {
            () = &mut to_agent => false,
            orderly = from_agent => orderly,
        };
        if orderly {
            let _ = timeout(HALF_OPEN, to_agent).await;
        }
        drop(held);
    });
    ReceiverStream::new(receiver)
}

/// Carries bytes between the agent and the console.
pub fn console(console: Console, mut input: Streaming<ConsoleInput>) -> Output {
    // Answers at once: the client may wait for the stream before it sends.
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    tokio::spawn(async move {
        // Without a first message no kept output is sent.
        let first = match timeout(FIRST_INPUT, input.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(_) => return,
            Err(_) => ConsoleInput::default(),
        };
        let Some(attachment) = console.attach(first.replay).await else { return };
        let (mut output, to_guest, cut_off) = (attachment.output, attachment.input, attachment.cut_off);
        // Owns the way to the guest: when the input ends, the console sees that, and lets go once all has arrived.
        let from_agent = async move {
            let mut next = Some(first.data);
            loop {
                let data = match next.take() {
                    Some(data) => data,
                    None => match input.message().await {
                        Ok(Some(message)) => message.data,
                        Ok(None) => return true,
                        Err(_) => return false,
                    },
                };
                if data.len() > MAX_CHUNK {
                    return false;
                }
                if !data.is_empty() && to_guest.send(Bytes::from(data)).await.is_err() {
                    // The console tells why.
                    std::future::pending::<()>().await;
                }
            }
        };
        let mut to_agent = std::pin::pin!(async {
            while let Some(chunk) = output.recv().await {
                if sender.send(Ok(Chunk { data: chunk.to_vec() })).await.is_err() {
                    return;
                }
            }
            let why = match cut_off.await {
                Ok(CutOff::Replaced) => Status::aborted("another client has taken the console"),
                Ok(CutOff::Slow) => Status::resource_exhausted("the client was too slow for the console's output"),
                Err(_) => Status::unavailable("the serial console has ended"),
            };
            // The client may be the one that does not take what it gets.
            let _ = timeout(HALF_OPEN, sender.send(Err(why))).await;
        });
        let orderly = tokio::select! {
            () = &mut to_agent => false,
            orderly = from_agent => orderly,
        };
        if orderly {
            let _ = timeout(HALF_OPEN, to_agent).await;
        }
    });
    ReceiverStream::new(receiver)
}
