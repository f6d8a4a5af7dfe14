//! Calls to one launcher, each with a deadline and bounded messages.

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use daemon::{errors, lock};
use hyper_util::rt::TokioIo;
use protocol::{
    Chunk, Client, ConsoleInput, Done, FileSystemsReply, GuestFileSystem, GuestReportReply, HelloReply, LauncherState,
    MAX_CHUNK, MAX_MESSAGE_SIZE, ScreenshotReply, StatsReply, SyncReply, Unary, UsbInput, UsersReply, WatchRequest,
};
use tokio::{net::UnixStream, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, IntoRequest, Response, Status, Streaming,
    transport::{Endpoint, Uri},
};

use super::paced::Paced;

/// Limit of a call without much work. Shorter than that of virt-api (25 s).
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Limit of calls to the guest agent. The launcher answers within 8 s, with what it knows: 6 s for the guest agent, and 2 s more
/// while libvirt waits for another command.
pub(crate) const GUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of the HTTP/2 preface.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle time before a keep-alive ping, and the limit of its answer. Without an answer the connection counts as lost.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// HTTP/2 flow-control window of a stream: bytes that a launcher can send unread.
const STREAM_WINDOW: u32 = 16 * 1024;
/// The same of a connection. It never limits the few streams of a launcher. `h2` (0.4.16 and later) closes a connection whose
/// unread messages are too small: each adds what it lacks of 256 bytes, up to half of this window. A guest writes bytes one by
/// one to a console that nobody reads; a full stream of them adds 0.5 MiB, so that four fit.
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
/// Chunks of a console or VNC stream that wait to be sent to the launcher.
const STREAM_QUEUE: usize = 4;
/// Largest answer and state. An entry of a list takes two bytes in a message and a hundred in memory, so that a message of the
/// size of a screenshot could take half a gibibyte. Real answers are far smaller.
const ANSWER_LIMIT: usize = 512 * 1024;
/// Most entries of a list that are kept: as many as a launcher accepts from its guest.
pub(super) const LIST_LIMIT: usize = 256;
/// The same of statistics of devices and vCPUs: more than a domain can have.
const DEVICE_LIMIT: usize = 4096;

/// Reason why a call to a launcher failed.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LauncherError {
    /// No connection was established.
    #[error("cannot connect to the launcher: {0}")]
    Connect(String),
    /// The connection broke or was closed.
    #[error("the connection to the launcher was lost: {0}")]
    Lost(String),
    /// No answer in time.
    #[error("the launcher did not answer {call} within {} s", after.as_secs())]
    Deadline {
        call: &'static str,
        /// The limit.
        after: Duration,
    },
    /// The launcher returned an error.
    #[error("{message}")]
    Refused {
        call: &'static str,
        message: String,
        /// No attempt can succeed.
        irrecoverable: bool,
    },
}

impl LauncherError {
    /// Names the call that was asked for, if another carried it.
    pub(crate) fn of(mut self, name: &'static str) -> Self {
        if let Self::Deadline { call, .. } | Self::Refused { call, .. } = &mut self {
            *call = name;
        }
        self
    }

    /// Returns true if the connection cannot be used any more.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Lost(_))
    }

    /// Converts the status with which a call or its stream ended.
    pub(crate) fn from_status(call: &'static str, status: &Status) -> Self {
        // Errors of the connection have a source; answers of the launcher have none.
        if std::error::Error::source(status).is_some() {
            return Self::Lost(bounded(status.message()));
        }
        match status.code() {
            Code::DeadlineExceeded => Self::Deadline { call, after: CALL_TIMEOUT },
            code => Self::Refused {
                call,
                message: if status.message().is_empty() {
                    format!("command {call} failed with {code}")
                } else {
                    bounded(status.message())
                },
                irrecoverable: matches!(code, Code::InvalidArgument | Code::Unimplemented),
            },
        }
    }
}

/// Bounds text of a launcher and replaces control characters: it is written to conditions and events.
pub(crate) fn bounded(text: &str) -> String {
    const MAX: usize = 1024;
    text.chars().take(MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// An answer of a launcher. It is brought within bounds before anything reads it.
pub(crate) trait Reply {
    /// Largest message.
    const SIZE: usize = ANSWER_LIMIT;

    /// Cuts the lists.
    fn bound(&mut self) {}
}

impl Reply for Done {}
// `features::common` bounds the list.
impl Reply for HelloReply {}

impl Reply for StatsReply {
    fn bound(&mut self) {
        // Each device of the spec is looked for in them.
        self.vcpus.truncate(DEVICE_LIMIT);
        self.interfaces.truncate(DEVICE_LIMIT);
        self.disks.truncate(DEVICE_LIMIT);
        cut_file_systems(&mut self.file_systems);
    }
}

impl Reply for SyncReply {
    fn bound(&mut self) {
        cut(&mut self.timings);
    }
}

impl Reply for ScreenshotReply {
    const SIZE: usize = MAX_MESSAGE_SIZE;
}

impl Reply for GuestReportReply {
    fn bound(&mut self) {
        self.agent.iter_mut().for_each(|agent| cut(&mut agent.commands));
        cut(&mut self.users);
        cut_file_systems(&mut self.file_systems);
    }
}

impl Reply for UsersReply {
    fn bound(&mut self) {
        cut(&mut self.users);
    }
}

impl Reply for FileSystemsReply {
    fn bound(&mut self) {
        cut_file_systems(&mut self.file_systems);
    }
}

/// A connection to one launcher. Cheap to clone; all clones share the connection.
#[derive(Clone, Debug)]
pub(crate) struct Launcher {
    client: Client,
}

impl Launcher {
    /// Uses `stream`, a checked connection to a launcher's socket. A lost connection is never reopened here, because a new
    /// socket has to be found and checked.
    pub(crate) async fn connect(stream: UnixStream) -> Result<Self, LauncherError> {
        let stream = Arc::new(Mutex::new(Some(stream)));
        let connector = tower::service_fn(move |_: Uri| {
            let stream = lock(&stream).take();
            let paced = |stream| TokioIo::new(Paced::new(stream));
            async move { stream.map(paced).ok_or_else(|| std::io::Error::other("the connection was used")) }
        });
        let endpoint = Endpoint::from_static("http://launcher.invalid")
            .http2_keep_alive_interval(KEEP_ALIVE.0)
            .keep_alive_timeout(KEEP_ALIVE.1)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .buffer_size(16usize);
        let channel = tokio::time::timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector))
            .await
            .map_err(|_| LauncherError::Connect("no answer in time".into()))?
            .map_err(|error| LauncherError::Connect(bounded(&errors::chain(&error))))?;
        let client =
            Client::new(channel).max_decoding_message_size(ANSWER_LIMIT).max_encoding_message_size(MAX_MESSAGE_SIZE);
        Ok(Self { client })
    }

    /// Sends a request and returns the answer, or fails after the limit.
    pub(crate) async fn call<R: Unary<Reply: Reply>>(
        &self,
        request: impl IntoRequest<R>,
        limit: Duration,
    ) -> Result<R::Reply, LauncherError> {
        let mut client = self.client.clone().max_decoding_message_size(R::Reply::SIZE);
        let mut answer = within(R::NAME, limit, R::send(&mut client, request.into_request())).await?;
        answer.bound();
        Ok(answer)
    }

    /// Streams the current state and each change.
    pub(crate) async fn watch(&self) -> Result<Streaming<LauncherState>, LauncherError> {
        let mut client = self.client.clone();
        within("Watch", CALL_TIMEOUT, client.watch(WatchRequest {})).await
    }

    /// Opens the serial console. With `replay` the retained output comes first.
    pub(crate) async fn console(
        &self,
        replay: bool,
    ) -> Result<(mpsc::Sender<ConsoleInput>, Streaming<Chunk>), LauncherError> {
        // The first message holds the options; the launcher waits for it before it answers.
        let (sender, input) = stream([ConsoleInput { data: Vec::new(), replay }]);
        Ok((sender, within("Console", CALL_TIMEOUT, self.stream_client().console(input)).await?))
    }

    /// Opens a connection to the display.
    pub(crate) async fn vnc(&self) -> Result<(mpsc::Sender<Chunk>, Streaming<Chunk>), LauncherError> {
        let (sender, input) = stream([]);
        Ok((sender, within("Vnc", CALL_TIMEOUT, self.stream_client().vnc(input)).await?))
    }

    /// Opens a USB redirection channel.
    pub(crate) async fn usb_redirection(
        &self,
        channel: u32,
    ) -> Result<(mpsc::Sender<UsbInput>, Streaming<Chunk>), LauncherError> {
        // The launcher waits for the channel before it answers.
        let (sender, input) = stream([UsbInput { data: Vec::new(), channel }]);
        Ok((sender, within("UsbRedirection", CALL_TIMEOUT, self.stream_client().usb_redirection(input)).await?))
    }

    /// Returns a client for streams, whose messages are chunks.
    fn stream_client(&self) -> Client {
        self.client.clone().max_decoding_message_size(MAX_CHUNK + 64).max_encoding_message_size(MAX_CHUNK + 64)
    }
}

/// Returns the input of a stream, with its first messages: fewer than the queue holds.
fn stream<T, const N: usize>(first: [T; N]) -> (mpsc::Sender<T>, ReceiverStream<T>) {
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    first.into_iter().for_each(|message| drop(sender.try_send(message)));
    (sender, ReceiverStream::new(receiver))
}

async fn within<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, LauncherError> {
    match tokio::time::timeout(limit, answer).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(LauncherError::from_status(call, &status)),
        Err(_) => Err(LauncherError::Deadline { call, after: limit }),
    }
}

/// Keeps the first entries of a launcher's list and frees the memory of the others.
pub(super) fn cut<T>(list: &mut Vec<T>) {
    list.truncate(LIST_LIMIT);
    list.shrink_to_fit();
}

fn cut_file_systems(list: &mut Vec<GuestFileSystem>) {
    cut(list);
    list.iter_mut().for_each(|system| cut(&mut system.disks));
}

#[cfg(test)]
mod tests {
    use protocol::{DiskStats, InterfaceStats, VcpuStats};

    use super::*;
    use crate::launcher::fake::{FLOOD, FLOOD_LENGTH, FakeLauncher};

    #[test]
    fn errors_of_the_launcher_differ_from_a_lost_connection() {
        let failed = LauncherError::from_status("Sync", &Status::internal("no such disk"));
        assert!(!failed.is_lost());
        assert_eq!(failed.to_string(), "no such disk");
        let broken = Status::from_error(Box::new(std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        assert!(LauncherError::from_status("Sync", &broken).is_lost());
        assert!(!LauncherError::from_status("Sync", &Status::unavailable("busy")).is_lost());
    }

    #[test]
    fn text_of_a_launcher_is_bounded_and_printable() {
        let hostile = format!("a\nb\u{1b}[31m{}", "x".repeat(5000));
        let text = bounded(&hostile);
        assert_eq!(text.chars().count(), 1024);
        assert!(!text.chars().any(char::is_control));
    }

    #[test]
    fn cve_2026_13322_long_statistics_of_a_launcher_are_cut() {
        const MANY: usize = 10_000;
        let mut stats = StatsReply {
            vcpus: vec![VcpuStats::default(); MANY],
            interfaces: vec![InterfaceStats::default(); MANY],
            disks: vec![DiskStats::default(); MANY],
            file_systems: vec![GuestFileSystem::default(); MANY],
            ..StatsReply::default()
        };
        stats.bound();
        let devices = [stats.vcpus.len(), stats.interfaces.len(), stats.disks.len()];
        assert_eq!((devices, stats.file_systems.len()), ([DEVICE_LIMIT; 3], LIST_LIMIT));
    }

    #[tokio::test]
    async fn unread_bytes_of_a_console_do_not_cost_the_connection() {
        let fake = FakeLauncher::new();
        let launcher = fake.connect().await;
        let (input, mut output) = launcher.console(false).await.unwrap();
        input.send(ConsoleInput { data: FLOOD.into(), replay: false }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        launcher.call(protocol::StatsRequest {}, CALL_TIMEOUT).await.unwrap();
        let mut read = 0;
        while read < FLOOD_LENGTH {
            read += output.message().await.unwrap().unwrap().data.iter().filter(|byte| **byte == b'x').count();
        }
    }

    #[test]
    fn an_invalid_argument_is_irrecoverable() {
        let error = LauncherError::from_status("Sync", &Status::invalid_argument("bad"));
        assert!(matches!(error, LauncherError::Refused { irrecoverable: true, .. }));
    }
}
