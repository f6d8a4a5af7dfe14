//! Streams between virt-handler and QEMU's sockets.
//!
//! Bytes pass at the pace of the slower side. A stream ends when virt-handler's side breaks or QEMU closes. When only
//! virt-handler's input ends, pending input still arrives and QEMU has a moment to answer.

pub(crate) mod console;
pub(crate) mod display;
mod replay;

use std::{io, path::Path, time::Duration};

use bytes::Bytes;
use protocol::{Chunk, ConsoleInput, MAX_CHUNK};
use tokio::{
    io::AsyncWriteExt,
    net::UnixStream,
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use self::console::{Console, CutOff};

/// Number of channels for USB redirection.
pub(crate) const USB_CHANNELS: usize = 4;
/// Limit of chunks queued for a client.
const STREAM_QUEUE: usize = 4;
/// Time limit of a stream's first message.
pub(crate) const FIRST_INPUT: Duration = Duration::from_secs(5);
/// Time that QEMU's side stays open after the input has ended.
const HALF_OPEN: Duration = Duration::from_secs(3);
/// Time for which output of a console is gathered after a small message. Guests write single bytes, and each message takes the time of
/// virt-handler, virt-api and the client.
const GATHER: Duration = Duration::from_millis(5);
/// Time limit of a connection to a socket of QEMU: a socket with a client does not accept another.
const CONNECT: Duration = Duration::from_secs(5);

/// virt-handler's end of a stream.
pub(crate) type Output = ReceiverStream<Result<Chunk, Status>>;

/// Connects to a socket of QEMU, which `what` names in the error.
pub(crate) async fn connect(path: &Path, what: &str) -> Result<UnixStream, Status> {
    match timeout(CONNECT, UnixStream::connect(path)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(Status::failed_precondition(format!("VMI has no {what}: {error}"))),
        Err(_) => Err(Status::unavailable(format!("the {what} of the VMI does not answer"))),
    }
}

/// Copies bytes between virt-handler and a socket. Drops `guard` when the stream ends.
pub(crate) fn pipe<T: Send + 'static>(
    socket: UnixStream,
    mut input: Streaming<T>,
    data: fn(T) -> Vec<u8>,
    guard: impl Send + 'static,
) -> Output {
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    let (reader, mut writer) = socket.into_split();
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
            // There is no buffer while QEMU is silent.
            while reader.readable().await.is_ok() {
                let mut data = Vec::with_capacity(MAX_CHUNK / 2);
                match reader.try_read_buf(&mut data) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Ok(0) | Err(_) => return,
                    Ok(_) => data.shrink_to_fit(),
                }
                if sender.send(Ok(Chunk { data })).await.is_err() {
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
        drop(guard);
    });
    ReceiverStream::new(receiver)
}

/// Copies bytes between virt-handler and the console.
pub(crate) fn console(console: Console, mut input: Streaming<ConsoleInput>) -> Output {
    // Answers at once: the client may wait for the response before it sends.
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    tokio::spawn(async move {
        // Without a first message no earlier output is sent.
        let first = match timeout(FIRST_INPUT, input.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(_) => return,
            Err(_) => ConsoleInput::default(),
        };
        let Some(attachment) = console.attach(first.replay).await else { return };
        let (mut output, to_guest, cut_off) = (attachment.output, attachment.input, attachment.cut_off);
        // Owns the sender of input: when the input ends, the console detaches the client once all input has arrived.
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
                    // The console reports the reason.
                    std::future::pending::<()>().await;
                }
            }
        };
        let mut to_agent = std::pin::pin!(async {
            while let Some(chunk) = output.recv().await {
                let mut data = chunk.to_vec();
                while data.len() < MAX_CHUNK / 2
                    && let Ok(chunk) = output.try_recv()
                {
                    data.extend_from_slice(&chunk);
                }
                let is_small = data.len() < MAX_CHUNK / 8;
                if sender.send(Ok(Chunk { data })).await.is_err() {
                    return;
                }
                if is_small {
                    sleep(GATHER).await;
                }
            }
            let why = match cut_off.await {
                Ok(CutOff::Replaced) => Status::aborted("another client has taken the console"),
                Ok(CutOff::Slow) => Status::resource_exhausted("the client was too slow for the console's output"),
                Err(_) => Status::unavailable("the serial console has ended"),
            };
            // The client itself may be the one that does not read.
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
