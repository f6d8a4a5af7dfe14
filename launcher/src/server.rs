//! The launcher's end of the protocol: a gRPC server on a unix socket, called by the node agent alone.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use api::VirtualMachineInstance;
use futures::{Stream, StreamExt};
use protocol::{
    Chunk, ConsoleInput, Done, FileSystemsReply, FileSystemsRequest, FinishRequest, FreezeRequest, GuestExecReply,
    GuestExecRequest, GuestPingRequest, GuestReportReply, GuestReportRequest, HelloReply, HelloRequest, KillRequest,
    MAX_MESSAGE_SIZE, MachineState, PauseRequest, ResetRequest, ScreenshotReply, ScreenshotRequest, ShutdownRequest,
    SoftRebootRequest, StatsReply, StatsRequest, SyncReply, SyncRequest, UnfreezeRequest, UnpauseRequest, UsbInput,
    UsersReply, UsersRequest, WatchRequest,
    launcher_server::{Launcher, LauncherServer},
};
use tokio::{net::UnixListener, sync::Semaphore};
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    agent::{AgentError, Executed},
    display,
    domain::unsupported::Unsupported,
    libvirt::Error,
    machine::{MachineHandle, RequestError, queue::Action, state::excuses_silence},
    stream::{self, USB_CHANNELS},
};

/// VNC connections at a time.
const VNC_CONNECTIONS: usize = 8;
/// Longest probe of a guest by its agent, in seconds.
const LONGEST_PROBE: u32 = 3600;
/// Users and file systems in a report; asked for alone there are more.
const REPORT_LIST: usize = 10;

/// The time that a probe gives the guest: a second at least.
fn seconds(asked: u32) -> Duration {
    Duration::from_secs(u64::from(asked.clamp(1, LONGEST_PROBE)))
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Opens the socket. It appears under its name when it listens: a client never meets one that refuses.
///
/// # Errors
/// When the socket cannot be made.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let staging = path.with_file_name("launcher-init-sock");
    match std::fs::remove_file(&staging) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&staging)?;
    std::fs::rename(&staging, path)?;
    Ok(listener)
}

/// Serves the protocol until `end` is done.
///
/// # Errors
/// When the server fails.
pub async fn serve(
    listener: UnixListener,
    machine: MachineHandle,
    end: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let own = rustix::process::getuid().as_raw();
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener).filter(move |stream| {
        // The agent runs as root; nothing else of this pod has business here.
        let accepted = match stream {
            Ok(stream) => stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own),
            Err(_) => true,
        };
        std::future::ready(accepted)
    });
    let usb = std::array::from_fn(|_| Semaphore::new(1).into());
    let service = LauncherServer::new(Service { machine, vnc: Semaphore::new(VNC_CONNECTIONS).into(), usb })
        .max_decoding_message_size(MAX_MESSAGE_SIZE)
        .max_encoding_message_size(MAX_MESSAGE_SIZE);
    tonic::transport::Server::builder()
        .max_concurrent_streams(64)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, end)
        .await
}

struct Service {
    machine: MachineHandle,
    vnc: Arc<Semaphore>,
    usb: [Arc<Semaphore>; USB_CHANNELS],
}

impl From<AgentError> for Status {
    fn from(error: AgentError) -> Self {
        let message = error.to_string();
        match error {
            AgentError::NotConnected | AgentError::Unsupported(_) => Self::failed_precondition(message),
            AgentError::Busy => Self::unavailable(message),
            AgentError::TooLong { .. } => Self::deadline_exceeded(message),
            AgentError::Libvirt(Error::NoDomain) => Self::not_found(message),
            AgentError::Libvirt(error) if error.is_transient() => Self::unavailable(message),
            AgentError::Answer(_) | AgentError::Libvirt(_) => Self::internal(message),
        }
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::NoDomain | RequestError::Libvirt(Error::NoDomain) => Self::not_found(message),
            RequestError::Ended
            | RequestError::Ending
            | RequestError::NotEnded
            | RequestError::NoHello
            | RequestError::NoWayToReboot
            | RequestError::Unsupported(_)
            | RequestError::Start { lasting: true, .. } => Self::failed_precondition(message),
            RequestError::OtherMachine(_) => Self::invalid_argument(message),
            RequestError::Busy => Self::resource_exhausted(message),
            RequestError::Gone => Self::unavailable(message),
            RequestError::Libvirt(error) if error.is_transient() => Self::unavailable(message),
            RequestError::Libvirt(_) | RequestError::Start { .. } => Self::internal(message),
        }
    }
}

impl Service {
    async fn act(&self, action: Action) -> Result<Response<Done>, Status> {
        self.machine.act(action).await?;
        Ok(Response::new(Done {}))
    }
}

#[tonic::async_trait]
impl Launcher for Service {
    type WatchStream = BoxStream<MachineState>;
    type ConsoleStream = BoxStream<Chunk>;
    type VncStream = BoxStream<Chunk>;
    type UsbRedirectionStream = BoxStream<Chunk>;

    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let request = request.into_inner();
        if request.uid != self.machine.args().uid {
            return Err(Status::invalid_argument("this launcher runs another machine"));
        }
        self.machine.hello(request.capabilities_cache, request.allow_emulation).await?;
        Ok(Response::new(HelloReply { launcher_version: env!("CARGO_PKG_VERSION").into() }))
    }

    async fn sync(&self, request: Request<SyncRequest>) -> Result<Response<SyncReply>, Status> {
        let request = request.into_inner();
        let unreadable = |error: serde_json::Error| Status::invalid_argument(format!("cannot read the VMI: {error}"));
        let object: serde_json::Value = serde_json::from_slice(&request.vmi).map_err(unreadable)?;
        let unsupported = Unsupported::find(&object);
        let vmi: VirtualMachineInstance = serde_json::from_value(object).map_err(unreadable)?;
        let started = self.machine.sync(vmi, unsupported, request.options.unwrap_or_default()).await?;
        Ok(Response::new(SyncReply { started }))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(WatchStream::new(self.machine.watch()).map(Ok).boxed()))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Shutdown { grace: request.into_inner().grace_period_seconds }).await
    }

    async fn kill(&self, _: Request<KillRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Kill).await
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Pause).await
    }

    async fn unpause(&self, _: Request<UnpauseRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Unpause).await
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Reset).await
    }

    async fn soft_reboot(&self, _: Request<SoftRebootRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::SoftReboot).await
    }

    async fn finish(&self, _: Request<FinishRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Finish).await
    }

    async fn console(
        &self,
        request: Request<Streaming<ConsoleInput>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let console =
            self.machine.console().ok_or_else(|| Status::failed_precondition("the machine has no serial console"))?;
        Ok(Response::new(stream::console(console, request.into_inner()).boxed()))
    }

    async fn vnc(&self, request: Request<Streaming<Chunk>>) -> Result<Response<Self::VncStream>, Status> {
        let permit =
            self.vnc.clone().try_acquire_owned().map_err(|_| Status::resource_exhausted("too many VNC connections"))?;
        let display = stream::connect(&self.machine.paths().vnc(&self.machine.args().uid), "display").await?;
        Ok(Response::new(stream::pipe(display, request.into_inner(), |chunk| chunk.data, permit).boxed()))
    }

    async fn usb_redirection(
        &self,
        request: Request<Streaming<UsbInput>>,
    ) -> Result<Response<Self::UsbRedirectionStream>, Status> {
        let mut input = request.into_inner();
        let first = match tokio::time::timeout(stream::FIRST_INPUT, input.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(Err(status)) => return Err(status),
            Ok(Ok(None)) | Err(_) => return Err(Status::invalid_argument("no channel was named")),
        };
        let channel = usize::try_from(first.channel).unwrap_or(usize::MAX);
        let place = self.usb.get(channel).ok_or_else(|| Status::invalid_argument("there is no such channel"))?;
        let permit = place
            .clone()
            .try_acquire_owned()
            .map_err(|_| Status::resource_exhausted("the channel for USB redirection is in use"))?;
        let path = self.machine.paths().usb_redirection(&self.machine.args().uid, channel);
        let socket = stream::connect(&path, "channel for USB redirection").await?;
        Ok(Response::new(stream::pipe(socket, input, |chunk| chunk.data, permit).boxed()))
    }

    async fn guest_report(&self, _: Request<GuestReportRequest>) -> Result<Response<GuestReportReply>, Status> {
        let mut report = self.machine.agent().report().await?;
        report.users.truncate(REPORT_LIST);
        report.file_systems.truncate(REPORT_LIST);
        Ok(Response::new(report))
    }

    async fn users(&self, _: Request<UsersRequest>) -> Result<Response<UsersReply>, Status> {
        Ok(Response::new(UsersReply { users: self.machine.agent().users().await? }))
    }

    async fn file_systems(&self, _: Request<FileSystemsRequest>) -> Result<Response<FileSystemsReply>, Status> {
        Ok(Response::new(FileSystemsReply { file_systems: self.machine.agent().file_systems().await? }))
    }

    async fn freeze(&self, request: Request<FreezeRequest>) -> Result<Response<Done>, Status> {
        self.machine.agent().freeze(request.into_inner().unfreeze_timeout_seconds).await?;
        Ok(Response::new(Done {}))
    }

    async fn unfreeze(&self, _: Request<UnfreezeRequest>) -> Result<Response<Done>, Status> {
        self.machine.agent().unfreeze().await?;
        Ok(Response::new(Done {}))
    }

    async fn guest_ping(&self, request: Request<GuestPingRequest>) -> Result<Response<Done>, Status> {
        let agent = self.machine.agent();
        if agent.probes_paused() {
            return Ok(Response::new(Done {}));
        }
        let pinged = agent.ping(seconds(request.into_inner().timeout_seconds)).await;
        let state = self.machine.watch().borrow().clone();
        match pinged {
            Err(error) if !excuses_silence(state.lifecycle(), &state.reason) => {
                agent.note_probe(false);
                Err(error.into())
            }
            Err(_) => Ok(Response::new(Done {})),
            Ok(()) => {
                agent.note_probe(true);
                Ok(Response::new(Done {}))
            }
        }
    }

    async fn guest_exec(&self, request: Request<GuestExecRequest>) -> Result<Response<GuestExecReply>, Status> {
        let GuestExecRequest { path, arguments, timeout_seconds } = request.into_inner();
        let Executed { exit_code, output } =
            self.machine.agent().exec(&path, &arguments, seconds(timeout_seconds)).await?;
        Ok(Response::new(GuestExecReply { exit_code, output }))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        Ok(Response::new(self.machine.stats().await?))
    }

    async fn screenshot(&self, _: Request<ScreenshotRequest>) -> Result<Response<ScreenshotReply>, Status> {
        let (_, picture) = self.machine.screenshot().await?;
        let png = tokio::task::spawn_blocking(move || display::to_png(picture))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ScreenshotReply { png }))
    }
}
