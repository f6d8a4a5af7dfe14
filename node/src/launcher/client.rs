//! Calls to one launcher, each with a deadline and bounded messages.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use protocol::{
    CacheFile, Chunk, ConsoleInput, FileSystemsRequest, FinishRequest, FreezeRequest, GuestFileSystem,
    GuestReportReply, GuestReportRequest, GuestUser, HelloRequest, KillRequest, MAX_CHUNK, MAX_MESSAGE_SIZE,
    MachineOptions, MachineState, PauseRequest, ResetRequest, ScreenshotRequest, ShutdownRequest, SoftRebootRequest,
    StatsReply, StatsRequest, SyncRequest, UnfreezeRequest, UnpauseRequest, UsbInput, UsersRequest, WatchRequest,
    launcher_client::LauncherClient,
};
use tokio::{net::UnixStream, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Response, Status, Streaming,
    transport::{Channel, Endpoint, Uri},
};

use super::paced::Paced;

/// Longest wait for a call that only passes something on.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for a synchronization: libvirtd may still be starting and the guest's disks have to be made.
pub const SYNC_TIMEOUT: Duration = Duration::from_secs(90);
/// Longest wait for what the guest agent tells; virt-api waits 10 s for the answer.
const GUEST_TIMEOUT: Duration = Duration::from_secs(8);
/// Longest wait for metrics.
const STATS_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a freeze: the guest writes out what it has in memory first.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(65);
/// Longest wait for the connection's HTTP/2 preface.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Silence after which the launcher is asked for a sign of life, and the time it has to answer. A launcher that
/// does not answer is treated like one whose connection broke.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// HTTP/2 flow-control windows: what a launcher may send unread, a stream and a connection. Screenshots and states are
/// the largest messages; consoles are paced by their readers.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// Chunks of a console or VNC stream under way towards the launcher.
const STREAM_QUEUE: usize = 4;
/// Largest answer and state that is read. An entry of a list takes two bytes in a message and a hundred in memory, so a
/// message as large as a picture would be half a gibibyte. What a launcher says about its guest stays far below.
const ANSWER_LIMIT: usize = 512 * 1024;
/// Most entries of a list that are kept: as many as a launcher takes from its guest.
pub(super) const LIST_LIMIT: usize = 256;

/// Why a call to a launcher failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LauncherError {
    /// No connection came up.
    #[error("cannot connect to the launcher: {0}")]
    Connect(String),
    /// The connection broke or was closed.
    #[error("the connection to the launcher was lost: {0}")]
    Lost(String),
    /// No answer in time.
    #[error("the launcher did not answer {call} within {} s", after.as_secs())]
    Deadline {
        /// The call.
        call: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// The launcher answered that it could not do it.
    #[error("{message}")]
    Refused {
        /// The call.
        call: &'static str,
        /// What it said.
        message: String,
        /// Trying again cannot help.
        irrecoverable: bool,
    },
}

impl LauncherError {
    /// The connection itself is of no more use.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Lost(_))
    }

    /// What the end of a call or of its stream means.
    pub(crate) fn from_status(call: &'static str, status: &Status) -> Self {
        // What the connection itself reports carries its cause; what the launcher answers does not.
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

/// Text from a launcher goes into conditions and events: bounded and without control characters.
pub(crate) fn bounded(text: &str) -> String {
    const MAX: usize = 1024;
    text.chars().take(MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A connection to one launcher. Cheap to clone; all clones share the connection.
#[derive(Clone, Debug)]
pub struct Launcher {
    client: LauncherClient<Channel>,
}

impl Launcher {
    /// Speaks the protocol over `stream`, a checked connection to a launcher's socket. The connection is never made
    /// anew: when it is lost, a new socket has to be found and checked.
    pub async fn connect(stream: UnixStream) -> Result<Self, LauncherError> {
        let stream = Arc::new(Mutex::new(Some(stream)));
        let connector = tower::service_fn(move |_: Uri| {
            let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
            let paced = |stream| TokioIo::new(Paced::new(stream));
            async move { stream.map(paced).ok_or_else(|| std::io::Error::other("the connection is used up")) }
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
            .map_err(|error| LauncherError::Connect(bounded(&with_causes(&error))))?;
        let client = LauncherClient::new(channel)
            .max_decoding_message_size(ANSWER_LIMIT)
            .max_encoding_message_size(MAX_MESSAGE_SIZE);
        Ok(Self { client })
    }

    /// Says hello to the launcher of the machine `uid` and hands over what the node knows; the launcher starts libvirtd.
    /// The launcher of another machine refuses.
    pub async fn hello(
        &self,
        uid: &str,
        capabilities_cache: Vec<CacheFile>,
        allow_emulation: bool,
    ) -> Result<String, LauncherError> {
        let mut client = self.client.clone();
        let request = HelloRequest { capabilities_cache, allow_emulation, uid: uid.to_owned() };
        let reply = call("Hello", CALL_TIMEOUT, client.hello(request)).await?;
        Ok(bounded(&reply.launcher_version))
    }

    /// Brings the machine to what `vmi` (JSON) says. True when this started it.
    pub async fn sync(&self, vmi: Vec<u8>, options: MachineOptions) -> Result<bool, LauncherError> {
        let mut client = self.client.clone();
        let request = SyncRequest { vmi, options: Some(options) };
        Ok(call("Sync", SYNC_TIMEOUT, client.sync(request)).await?.started)
    }

    /// The machine's state now and after each change.
    pub async fn watch(&self) -> Result<Streaming<MachineState>, LauncherError> {
        let mut client = self.client.clone();
        call("Watch", CALL_TIMEOUT, client.watch(WatchRequest {})).await
    }

    /// Asks the guest to power off; the launcher stops it by force after `grace_period_seconds`.
    pub async fn shutdown(&self, grace_period_seconds: u64) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Shutdown", CALL_TIMEOUT, client.shutdown(ShutdownRequest { grace_period_seconds })).await.map(drop)
    }

    /// Stops the machine at once.
    pub async fn kill(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Kill", CALL_TIMEOUT, client.kill(KillRequest {})).await.map(drop)
    }

    /// Pauses the machine's processors.
    pub async fn pause(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Pause", CALL_TIMEOUT, client.pause(PauseRequest {})).await.map(drop)
    }

    /// Lets a paused machine run on.
    pub async fn unpause(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Unpause", CALL_TIMEOUT, client.unpause(UnpauseRequest {})).await.map(drop)
    }

    /// Presses the reset button.
    pub async fn reset(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Reset", CALL_TIMEOUT, client.reset(ResetRequest {})).await.map(drop)
    }

    /// Asks the guest to reboot.
    pub async fn soft_reboot(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("SoftReboot", CALL_TIMEOUT, client.soft_reboot(SoftRebootRequest {})).await.map(drop)
    }

    /// Tells the launcher that the final state was recorded and that it may exit.
    pub async fn finish(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Finish", CALL_TIMEOUT, client.finish(FinishRequest {})).await.map(drop)
    }

    /// A picture of the first display, PNG.
    pub async fn screenshot(&self) -> Result<Vec<u8>, LauncherError> {
        let mut client = self.client.clone().max_decoding_message_size(MAX_MESSAGE_SIZE);
        Ok(call("Screenshot", CALL_TIMEOUT, client.screenshot(ScreenshotRequest {})).await?.png)
    }

    /// Opens the serial console. With `replay` the kept output comes first.
    pub async fn console(&self, replay: bool) -> Result<(mpsc::Sender<ConsoleInput>, Streaming<Chunk>), LauncherError> {
        let mut client = self.stream_client();
        let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
        // The first message says what is wanted; it must be there before the launcher answers.
        let first = ConsoleInput { data: Vec::new(), replay };
        sender.send(first).await.map_err(|_| LauncherError::Lost("the stream was closed".into()))?;
        let output = call("Console", CALL_TIMEOUT, client.console(ReceiverStream::new(receiver))).await?;
        Ok((sender, output))
    }

    /// Opens a connection to the machine's display.
    pub async fn vnc(&self) -> Result<(mpsc::Sender<Chunk>, Streaming<Chunk>), LauncherError> {
        let mut client = self.stream_client();
        let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
        let output = call("Vnc", CALL_TIMEOUT, client.vnc(ReceiverStream::new(receiver))).await?;
        Ok((sender, output))
    }

    /// Opens a channel for USB redirection.
    pub async fn usb_redirection(
        &self,
        channel: u32,
    ) -> Result<(mpsc::Sender<UsbInput>, Streaming<Chunk>), LauncherError> {
        let mut client = self.stream_client();
        let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
        // The launcher answers when it knows the channel.
        let first = UsbInput { data: Vec::new(), channel };
        sender.send(first).await.map_err(|_| LauncherError::Lost("the stream was closed".into()))?;
        let output =
            call("UsbRedirection", CALL_TIMEOUT, client.usb_redirection(ReceiverStream::new(receiver))).await?;
        Ok((sender, output))
    }

    /// What the guest agent tells about its guest.
    pub async fn guest_report(&self) -> Result<GuestReportReply, LauncherError> {
        let mut client = self.client.clone();
        let mut report = call("GuestReport", GUEST_TIMEOUT, client.guest_report(GuestReportRequest {})).await?;
        report.agent.iter_mut().for_each(|agent| cut(&mut agent.commands));
        cut(&mut report.users);
        cut_file_systems(&mut report.file_systems);
        Ok(report)
    }

    /// Who is logged in to the guest.
    pub async fn users(&self) -> Result<Vec<GuestUser>, LauncherError> {
        let mut client = self.client.clone();
        let mut users = call("Users", GUEST_TIMEOUT, client.users(UsersRequest {})).await?.users;
        cut(&mut users);
        Ok(users)
    }

    /// The guest's file systems.
    pub async fn file_systems(&self) -> Result<Vec<GuestFileSystem>, LauncherError> {
        let mut client = self.client.clone();
        let reply = call("FileSystems", GUEST_TIMEOUT, client.file_systems(FileSystemsRequest {})).await?;
        let mut systems = reply.file_systems;
        cut_file_systems(&mut systems);
        Ok(systems)
    }

    /// Freezes the guest's file systems; after so many seconds they thaw by themselves, unless that is 0.
    pub async fn freeze(&self, unfreeze_timeout_seconds: u32) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Freeze", FREEZE_TIMEOUT, client.freeze(FreezeRequest { unfreeze_timeout_seconds })).await.map(drop)
    }

    /// Thaws the guest's file systems.
    pub async fn unfreeze(&self) -> Result<(), LauncherError> {
        let mut client = self.client.clone();
        call("Unfreeze", CALL_TIMEOUT, client.unfreeze(UnfreezeRequest {})).await.map(drop)
    }

    /// What libvirt counts about the machine.
    pub async fn stats(&self) -> Result<StatsReply, LauncherError> {
        let mut client = self.client.clone();
        call("Stats", STATS_TIMEOUT, client.stats(StatsRequest {})).await
    }

    /// A client whose messages are chunks of a stream, and bounded as such.
    fn stream_client(&self) -> LauncherClient<Channel> {
        self.client.clone().max_decoding_message_size(MAX_CHUNK + 64).max_encoding_message_size(MAX_CHUNK + 64)
    }
}

async fn call<T>(
    name: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, LauncherError> {
    match tokio::time::timeout(limit, answer).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(LauncherError::from_status(name, &status)),
        Err(_) => Err(LauncherError::Deadline { call: name, after: limit }),
    }
}

/// Keeps the first entries of a launcher's list, and gives back the room of the others.
pub(super) fn cut<T>(list: &mut Vec<T>) {
    list.truncate(LIST_LIMIT);
    list.shrink_to_fit();
}

fn cut_file_systems(list: &mut Vec<GuestFileSystem>) {
    cut(list);
    list.iter_mut().for_each(|system| cut(&mut system.disks));
}

/// An error with its causes on one line: what was attempted, and what the kernel or the library said.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_business_failure_is_told_from_a_lost_connection() {
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
    fn an_invalid_argument_cannot_be_helped_by_trying_again() {
        let error = LauncherError::from_status("Sync", &Status::invalid_argument("bad"));
        assert!(matches!(error, LauncherError::Refused { irrecoverable: true, .. }));
    }
}
