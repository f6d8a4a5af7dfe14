//! The serial console.
//!
//! One task stays connected to QEMU's socket of the serial port. It keeps the last output, copies it to the pod's log
//! and passes it to at most one client. A slow client slows the guest's output down, as a slow terminal does; a client
//! that reads nothing for some seconds is disconnected.

use std::{collections::VecDeque, path::PathBuf, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use super::replay::replayable;
use crate::tasks::Tasks;

/// Amount of earlier output that a client gets, in bytes.
pub(crate) const KEPT_OUTPUT: usize = 64 * 1024;
/// Limit of chunks queued for a client, each at most [`READ_SIZE`].
const CLIENT_QUEUE: usize = 64;
/// Limit of input chunks queued for the guest.
const INPUT_QUEUE: usize = 16;
/// Size of one read from the guest, in bytes.
const READ_SIZE: usize = 4096;
/// Pause between attempts to connect while QEMU starts or after it closed the socket.
const RETRY: Duration = Duration::from_millis(20);
/// Time limit of a write to the guest.
const INPUT_DEADLINE: Duration = Duration::from_secs(5);
/// Time after which a client that reads nothing is disconnected.
const OUTPUT_DEADLINE: Duration = Duration::from_secs(3);

/// A client's side of the console.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Output of the guest; ends when another client attaches, or this one is too slow.
    pub(crate) output: mpsc::Receiver<Bytes>,
    /// Input for the guest.
    pub(crate) input: mpsc::Sender<Bytes>,
    /// Reason of the end of output; empty if the console itself has ended.
    pub(crate) cut_off: oneshot::Receiver<CutOff>,
}

/// Reason to disconnect a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutOff {
    /// Another client has attached.
    Replaced,
    /// It did not read the guest's output.
    Slow,
}

struct Attach {
    replay: bool,
    reply: oneshot::Sender<Attachment>,
}

/// Handle of the console's task.
#[derive(Clone, Debug)]
pub(crate) struct Console {
    attach: mpsc::Sender<Attach>,
}

impl Console {
    /// Starts the task. With `log` the guest's output goes to the pod's log line by line.
    pub(crate) fn start(socket: PathBuf, log: bool, tasks: &Tasks) -> Self {
        let (attach, requests) = mpsc::channel(4);
        let log = log.then(|| {
            // A log that nobody reads loses chunks instead of blocking the guest.
            let (sender, receiver) = mpsc::channel::<Bytes>(256);
            tasks.keep("serial log", copy_to_stdout(receiver));
            sender
        });
        let broker = Broker { socket, requests, log, kept: VecDeque::new(), is_cut: false, client: None };
        tasks.keep("serial console", broker.run());
        Self { attach }
    }

    /// Attaches a client and disconnects the one before. `None` if the console has ended.
    pub(crate) async fn attach(&self, replay: bool) -> Option<Attachment> {
        let (reply, answer) = oneshot::channel();
        self.attach.send(Attach { replay, reply }).await.ok()?;
        answer.await.ok()
    }
}

struct Client {
    output: mpsc::Sender<Bytes>,
    input: mpsc::Receiver<Bytes>,
    cut_off: oneshot::Sender<CutOff>,
    /// A chunk that did not fit the queue, and the time at which the client is disconnected.
    waiting: Option<(Bytes, Instant)>,
}

impl Client {
    fn cut_off(self, why: CutOff) {
        // The client may be gone.
        let _ = self.cut_off.send(why);
    }

    /// Queues a chunk, or keeps it until the queue has room. A client that stopped reading is kept for its input.
    fn output(&mut self, chunk: Bytes) {
        if let Err(mpsc::error::TrySendError::Full(chunk)) = self.output.try_send(chunk) {
            self.waiting = Some((chunk, Instant::now() + OUTPUT_DEADLINE));
        }
    }
}

/// An event of the attached client.
enum ClientEvent {
    Input(Bytes),
    InputEnded,
    /// The queue has room for the pending chunk, or the client has stopped reading.
    Taken,
    TooSlow,
}

struct Broker {
    socket: PathBuf,
    requests: mpsc::Receiver<Attach>,
    log: Option<mpsc::Sender<Bytes>>,
    kept: VecDeque<u8>,
    /// Output before that in `kept` is lost.
    is_cut: bool,
    client: Option<Client>,
}

impl Broker {
    async fn run(mut self) {
        let mut retry = tokio::time::interval(RETRY);
        retry.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.attach(request),
                    None => return,
                },
                _ = retry.tick() => {
                    if let Ok(stream) = UnixStream::connect(&self.socket).await
                        && !self.connected(stream).await
                    {
                        return;
                    }
                }
            }
        }
    }

    /// Serves one connection to QEMU. Returns false when no handle of the console is left.
    async fn connected(&mut self, stream: UnixStream) -> bool {
        let (mut reader, mut writer) = stream.into_split();
        let mut buffer = [0; READ_SIZE];
        loop {
            let held_up = self.client.as_ref().is_some_and(|client| client.waiting.is_some());
            tokio::select! {
                read = reader.read(&mut buffer), if !held_up => match read {
                    Ok(0) | Err(_) => return true,
                    Ok(n) => self.output(Bytes::copy_from_slice(buffer.get(..n).unwrap_or_default())),
                },
                request = self.requests.recv() => match request {
                    Some(request) => self.attach(request),
                    None => return false,
                },
                event = client_event(&mut self.client) => match event {
                    ClientEvent::Input(input) => {
                        if !write_input(&mut writer, &input).await {
                            return true;
                        }
                    }
                    ClientEvent::InputEnded => self.client = None,
                    ClientEvent::Taken => {
                        if let Some(client) = &mut self.client
                            && let Some((chunk, _)) = client.waiting.take()
                        {
                            client.output(chunk);
                        }
                    }
                    ClientEvent::TooSlow => {
                        if let Some(client) = self.client.take() {
                            client.cut_off(CutOff::Slow);
                        }
                    }
                },
            }
        }
    }

    fn attach(&mut self, request: Attach) {
        let (output, output_receiver) = mpsc::channel(CLIENT_QUEUE);
        let (input_sender, input) = mpsc::channel(INPUT_QUEUE);
        let (cut_off, cut_off_receiver) = oneshot::channel();
        if request.replay {
            for chunk in replayable(self.kept.make_contiguous(), self.is_cut).chunks(READ_SIZE) {
                if output.try_send(Bytes::copy_from_slice(chunk)).is_err() {
                    break;
                }
            }
        }
        let attachment = Attachment { output: output_receiver, input: input_sender, cut_off: cut_off_receiver };
        if request.reply.send(attachment).is_ok()
            && let Some(former) = self.client.replace(Client { output, input, cut_off, waiting: None })
        {
            former.cut_off(CutOff::Replaced);
        }
    }

    fn output(&mut self, chunk: Bytes) {
        let excess = (self.kept.len() + chunk.len()).saturating_sub(KEPT_OUTPUT);
        self.kept.drain(..excess.min(self.kept.len()));
        self.is_cut |= excess > 0;
        self.kept.extend(chunk.iter());
        if let Some(log) = &self.log {
            let _ = log.try_send(chunk.clone());
        }
        if let Some(client) = &mut self.client {
            client.output(chunk);
        }
    }
}

/// Waits for the client's next event; pending forever without a client.
async fn client_event(client: &mut Option<Client>) -> ClientEvent {
    let Some(client) = client else { return std::future::pending().await };
    let waiting = client.waiting.as_ref().map(|(_, until)| *until);
    tokio::select! {
        input = client.input.recv() => input.map_or(ClientEvent::InputEnded, ClientEvent::Input),
        _ = client.output.reserve(), if waiting.is_some() => ClientEvent::Taken,
        () = sleep_until(waiting.unwrap_or_else(Instant::now)), if waiting.is_some() => ClientEvent::TooSlow,
    }
}

async fn write_input(writer: &mut OwnedWriteHalf, input: &[u8]) -> bool {
    // If the guest does not read its serial port, the input is dropped, as on a real line.
    match tokio::time::timeout(INPUT_DEADLINE, writer.write_all(input)).await {
        Ok(Ok(())) | Err(_) => true,
        Ok(Err(_)) => false,
    }
}

async fn copy_to_stdout(mut chunks: mpsc::Receiver<Bytes>) {
    let mut stdout = tokio::io::stdout();
    while let Some(chunk) = chunks.recv().await {
        // Without a reader of the log the guest's output is dropped.
        if stdout.write_all(&chunk).await.is_ok() {
            let _ = stdout.flush().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    fn socket(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("launcher-console-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    async fn read_some(attachment: &mut Attachment) -> Option<Bytes> {
        tokio::time::timeout(Duration::from_secs(5), attachment.output.recv()).await.unwrap()
    }

    #[tokio::test]
    async fn a_late_client_gets_the_kept_output_and_a_new_client_ends_the_former() {
        let path = socket("replay");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::start(path, false, &Tasks::new().0);
        let (mut guest, _) = listener.accept().await.unwrap();
        guest.write_all(b"boot").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut first = console.attach(true).await.unwrap();
        assert_eq!(read_some(&mut first).await.unwrap(), "boot");
        let second = console.attach(false).await.unwrap();
        assert_eq!(read_some(&mut first).await, None);
        assert_eq!(first.cut_off.await, Ok(CutOff::Replaced));
        second.input.send(Bytes::from_static(b"ls")).await.unwrap();
        let mut buffer = [0; 2];
        guest.read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ls");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_cut_off_and_the_guest_goes_on() {
        let path = socket("slow");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::start(path, false, &Tasks::new().0);
        let (mut guest, _) = listener.accept().await.unwrap();
        let slow = console.attach(false).await.unwrap();
        let written = tokio::time::timeout(Duration::from_secs(20), async {
            for _ in 0..1000 {
                guest.write_all(&[b'x'; READ_SIZE]).await.unwrap();
            }
        });
        written.await.unwrap();
        assert_eq!(slow.cut_off.await, Ok(CutOff::Slow));
        let mut fresh = console.attach(true).await.unwrap();
        assert!(read_some(&mut fresh).await.is_some());
    }

    #[tokio::test]
    async fn a_slow_client_gets_everything() {
        const CHUNKS: usize = 400;
        let path = socket("patient");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::start(path, false, &Tasks::new().0);
        let (mut guest, _) = listener.accept().await.unwrap();
        let mut client = console.attach(false).await.unwrap();
        tokio::spawn(async move {
            for number in 0..CHUNKS {
                guest.write_all(&[number as u8; READ_SIZE]).await.unwrap();
            }
            // Stays open until all is read.
            let _ = guest.read(&mut [0]).await;
        });
        // Far more than the queue and the socket's buffer hold is under way before the client reads at all.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut bytes = Vec::new();
        while bytes.len() < CHUNKS * READ_SIZE {
            bytes.extend_from_slice(&read_some(&mut client).await.unwrap());
        }
        let expected: Vec<u8> = (0..CHUNKS).flat_map(|number| [number as u8; READ_SIZE]).collect();
        assert!(bytes == expected);
    }

    #[tokio::test]
    async fn input_arrives_although_the_client_has_gone_and_its_output_is_unwanted() {
        let path = socket("half");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::start(path, false, &Tasks::new().0);
        let (mut guest, _) = listener.accept().await.unwrap();
        let Attachment { output, input, .. } = console.attach(false).await.unwrap();
        drop(output);
        for part in ["power", "off", "\n"] {
            guest.write_all(b"echo").await.unwrap();
            input.send(Bytes::from(part)).await.unwrap();
        }
        drop(input);
        let mut buffer = [0; 9];
        tokio::time::timeout(Duration::from_secs(5), guest.read_exact(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer, b"poweroff\n");
    }
}
