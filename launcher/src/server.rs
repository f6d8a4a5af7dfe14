//! The launcher's end of the protocol: a gRPC server on a unix socket with virt-handler as its only client.

use std::{pin::Pin, sync::Arc, time::Duration};

use api::traceparent::TraceParent;
use futures::{Stream, StreamExt};
use protocol::{
    AbortJobRequest, AbortMigrationRequest, Chunk, ConsoleInput, Done, DumpMemoryRequest, FileSystemsReply,
    FileSystemsRequest, FinishRequest, FreezeRequest, GuestExecReply, GuestExecRequest, GuestPingRequest,
    GuestReportReply, GuestReportRequest, HelloReply, HelloRequest, KillRequest, LauncherState, MAX_MESSAGE_SIZE,
    MigrateRequest, PauseRequest, PrepareMigrationRequest, ResetRequest, SaveMemoryRequest, ScreenshotReply,
    ScreenshotRequest, ShutdownRequest, SoftRebootRequest, StartJobRequest, StatsReply, StatsRequest, SyncReply,
    SyncRequest, TRACEPARENT, UnfreezeRequest, UnpauseRequest, UsbInput, UsersReply, UsersRequest, VmiOptions,
    WatchRequest, abort_job_request,
    launcher_server::{Launcher, LauncherServer},
    start_job_request::Job,
};
use tokio::{net::UnixListener, sync::Semaphore};
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    domain::unsupported::Unsupported,
    engine::{Action, EngineHandle, Request as EngineRequest, RequestError, Wanted, may_be_silent},
    guest_agent::{Executed, GuestAgentError},
    hypervisor::HypervisorError,
    socket,
    streaming::display,
    streaming::{self, USB_CHANNELS},
};

/// HTTP/2 flow-control window of a stream, as virt-handler's. `h2` closes a connection with many small unread messages, such as
/// the keys that are pressed while a guest reads none.
const STREAM_WINDOW: u32 = 16 * 1024;
/// Limit of concurrent VNC connections.
const VNC_CONNECTIONS: usize = 8;
/// Longest time limit of a probe through the guest agent, in seconds.
const LONGEST_PROBE: u32 = 3600;
/// Limit of users and file systems in a report; their own calls return more.
const REPORT_LIST: usize = 10;

/// Returns the time limit of a probe: at least a second.
fn seconds(asked: u32) -> Duration {
    Duration::from_secs(u64::from(asked.clamp(1, LONGEST_PROBE)))
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves the protocol until `end` completes.
pub(crate) async fn serve(
    listener: UnixListener,
    engine: EngineHandle,
    end: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener).filter(move |stream| {
        let accepted = match stream {
            Ok(stream) => socket::is_trusted(stream),
            Err(_) => true,
        };
        std::future::ready(accepted)
    });
    let usb = std::array::from_fn(|_| Semaphore::new(1).into());
    let service = LauncherServer::new(Service { engine, vnc: Semaphore::new(VNC_CONNECTIONS).into(), usb })
        .max_decoding_message_size(MAX_MESSAGE_SIZE)
        .max_encoding_message_size(MAX_MESSAGE_SIZE);
    tonic::transport::Server::builder()
        .max_concurrent_streams(64)
        .initial_stream_window_size(STREAM_WINDOW)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, end)
        .await
}

struct Service {
    engine: EngineHandle,
    vnc: Arc<Semaphore>,
    usb: [Arc<Semaphore>; USB_CHANNELS],
}

impl From<GuestAgentError> for Status {
    fn from(error: GuestAgentError) -> Self {
        let message = error.to_string();
        match error {
            GuestAgentError::NotConnected | GuestAgentError::Unsupported(_) => Self::failed_precondition(message),
            GuestAgentError::Busy => Self::unavailable(message),
            GuestAgentError::TooLong { .. } => Self::deadline_exceeded(message),
            GuestAgentError::Hypervisor(HypervisorError::NoDomain) => Self::not_found(message),
            GuestAgentError::Hypervisor(error) if error.is_transient() => Self::unavailable(message),
            GuestAgentError::Answer(_) | GuestAgentError::Hypervisor(_) => Self::internal(message),
        }
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::NoDomain
            | RequestError::NoMigration(_)
            | RequestError::Hypervisor(HypervisorError::NoDomain) => Self::not_found(message),
            RequestError::Ended
            | RequestError::Ending
            | RequestError::NotEnded
            | RequestError::NoHello
            | RequestError::Conflict { .. }
            | RequestError::Frozen
            | RequestError::NoWayToReboot
            | RequestError::MigrationEnded(_)
            | RequestError::Runs
            | RequestError::Unsupported(_)
            | RequestError::Start { permanent: true, .. } => Self::failed_precondition(message),
            RequestError::OtherVmi(_) | RequestError::NoVolume(_) => Self::invalid_argument(message),
            RequestError::Busy => Self::resource_exhausted(message),
            RequestError::Gone | RequestError::Arriving => Self::unavailable(message),
            RequestError::Hypervisor(error) if error.is_transient() => Self::unavailable(message),
            RequestError::Hypervisor(_) | RequestError::Start { .. } => Self::internal(message),
        }
    }
}

/// Parses a VMI and finds its fields that no component carries out.
fn parse_wanted(json: &[u8], options: Option<VmiOptions>) -> Result<Arc<Wanted>, Status> {
    let unreadable = |error: serde_json::Error| Status::invalid_argument(format!("cannot read the VMI: {error}"));
    let object: serde_json::Value = serde_json::from_slice(json).map_err(unreadable)?;
    let unsupported = Unsupported::find(&object);
    let vmi = serde_json::from_value(object).map_err(unreadable)?;
    Ok(Arc::new(Wanted { vmi, unsupported, options: options.unwrap_or_default() }))
}

/// Rejects a migration without name.
fn named(migration: &str) -> Result<(), Status> {
    if migration.is_empty() { Err(Status::invalid_argument("the migration has no name")) } else { Ok(()) }
}

/// Returns the status of a request for a job of a later release.
fn unknown_job() -> Status {
    Status::unimplemented("virt-launcher does not know this job")
}

impl Service {
    /// Passes a request on that has no content in its answer.
    async fn ask(&self, request: EngineRequest) -> Result<Response<Done>, Status> {
        self.engine.ask(request).await?;
        Ok(Response::new(Done {}))
    }

    async fn start(&self, job: Job) -> Result<Response<Done>, Status> {
        let request = match job {
            Job::Shutdown(ShutdownRequest { grace_period_seconds: grace }) => {
                EngineRequest::Act(Action::Shutdown { grace })
            }
            Job::MemoryDump(DumpMemoryRequest { volume, file }) => EngineRequest::DumpMemory { volume, file },
            Job::MemorySave(SaveMemoryRequest { volume, file }) => EngineRequest::SaveMemory { volume, file },
            Job::MigrationIn(PrepareMigrationRequest { migration, vmi, options }) => {
                named(&migration)?;
                EngineRequest::PrepareMigration { migration, wanted: parse_wanted(&vmi, options)? }
            }
            Job::MigrationOut(request) => {
                named(&request.migration)?;
                EngineRequest::Migrate(Arc::new(request))
            }
        };
        self.ask(request).await
    }
}

#[tonic::async_trait]
impl Launcher for Service {
    type WatchStream = BoxStream<LauncherState>;
    type ConsoleStream = BoxStream<Chunk>;
    type VncStream = BoxStream<Chunk>;
    type UsbRedirectionStream = BoxStream<Chunk>;

    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let request = request.into_inner();
        if request.uid != self.engine.args.uid {
            return Err(Status::invalid_argument("this launcher runs another VMI"));
        }
        let HelloRequest { capabilities_cache: cache, allow_emulation, .. } = request;
        self.engine.ask(EngineRequest::Hello { cache, allow_emulation }).await?;
        Ok(Response::new(HelloReply {
            launcher_version: env!("CARGO_PKG_VERSION").into(),
            features: protocol::features::own(),
        }))
    }

    async fn sync(&self, request: Request<SyncRequest>) -> Result<Response<SyncReply>, Status> {
        let trace = request.metadata().get(TRACEPARENT).and_then(|value| value.to_str().ok());
        let trace = trace.and_then(|text| text.parse::<TraceParent>().ok()).filter(|trace| trace.sampled);
        let request = request.into_inner();
        let started = self.engine.ask(EngineRequest::Sync(parse_wanted(&request.vmi, request.options)?)).await?;
        if let Some(trace) = trace {
            tracing::info!(%trace, "the start is traced");
        }
        let timings = trace.map(|_| self.engine.timings.report()).unwrap_or_default();
        // The engine publishes the results before it answers.
        let state_sequence = self.engine.watch().borrow().sequence;
        Ok(Response::new(SyncReply { started, state_sequence, timings }))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(WatchStream::new(self.engine.watch()).map(Ok).boxed()))
    }

    async fn start_job(&self, request: Request<StartJobRequest>) -> Result<Response<Done>, Status> {
        self.start(request.into_inner().job.ok_or_else(unknown_job)?).await
    }

    async fn abort_job(&self, request: Request<AbortJobRequest>) -> Result<Response<Done>, Status> {
        match request.into_inner().job.ok_or_else(unknown_job)? {
            abort_job_request::Job::Migration(request) => self.abort_migration(Request::new(request)).await,
        }
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Result<Response<Done>, Status> {
        self.start(Job::Shutdown(request.into_inner())).await
    }

    async fn kill(&self, _: Request<KillRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::Kill)).await
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::Pause)).await
    }

    async fn unpause(&self, _: Request<UnpauseRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::Unpause)).await
    }

    async fn dump_memory(&self, request: Request<DumpMemoryRequest>) -> Result<Response<Done>, Status> {
        self.start(Job::MemoryDump(request.into_inner())).await
    }

    async fn prepare_migration(&self, request: Request<PrepareMigrationRequest>) -> Result<Response<Done>, Status> {
        self.start(Job::MigrationIn(request.into_inner())).await
    }

    async fn migrate(&self, request: Request<MigrateRequest>) -> Result<Response<Done>, Status> {
        self.start(Job::MigrationOut(request.into_inner())).await
    }

    async fn abort_migration(&self, request: Request<AbortMigrationRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::AbortMigration(request.into_inner().migration)).await
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::Reset)).await
    }

    async fn soft_reboot(&self, _: Request<SoftRebootRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::SoftReboot)).await
    }

    async fn finish(&self, _: Request<FinishRequest>) -> Result<Response<Done>, Status> {
        self.ask(EngineRequest::Act(Action::Finish)).await
    }

    async fn console(
        &self,
        request: Request<Streaming<ConsoleInput>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let console = self.engine.console().ok_or_else(|| Status::failed_precondition("VMI has no serial console"))?;
        Ok(Response::new(streaming::console(console, request.into_inner()).boxed()))
    }

    async fn vnc(&self, request: Request<Streaming<Chunk>>) -> Result<Response<Self::VncStream>, Status> {
        let permit =
            self.vnc.clone().try_acquire_owned().map_err(|_| Status::resource_exhausted("too many VNC connections"))?;
        let display = streaming::connect(&self.engine.paths.vnc(&self.engine.args.uid), "display").await?;
        Ok(Response::new(streaming::pipe(display, request.into_inner(), |chunk| chunk.data, permit).boxed()))
    }

    async fn usb_redirection(
        &self,
        request: Request<Streaming<UsbInput>>,
    ) -> Result<Response<Self::UsbRedirectionStream>, Status> {
        let mut input = request.into_inner();
        let first = match tokio::time::timeout(streaming::FIRST_INPUT, input.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(Err(status)) => return Err(status),
            Ok(Ok(None)) | Err(_) => return Err(Status::invalid_argument("the first message must name a channel")),
        };
        let channel = usize::try_from(first.channel).unwrap_or(usize::MAX);
        let semaphore = self.usb.get(channel).ok_or_else(|| Status::invalid_argument("unknown channel"))?;
        let permit = semaphore
            .clone()
            .try_acquire_owned()
            .map_err(|_| Status::resource_exhausted("the channel for USB redirection is in use"))?;
        let path = self.engine.paths.usb_redirection(&self.engine.args.uid, channel);
        let socket = streaming::connect(&path, "channel for USB redirection").await?;
        Ok(Response::new(streaming::pipe(socket, input, |chunk| chunk.data, permit).boxed()))
    }

    async fn guest_report(&self, _: Request<GuestReportRequest>) -> Result<Response<GuestReportReply>, Status> {
        let mut report = self.engine.guest_agent.report().await?;
        report.users.truncate(REPORT_LIST);
        report.file_systems.truncate(REPORT_LIST);
        Ok(Response::new(report))
    }

    async fn users(&self, _: Request<UsersRequest>) -> Result<Response<UsersReply>, Status> {
        Ok(Response::new(UsersReply { users: self.engine.guest_agent.users().await? }))
    }

    async fn file_systems(&self, _: Request<FileSystemsRequest>) -> Result<Response<FileSystemsReply>, Status> {
        Ok(Response::new(FileSystemsReply { file_systems: self.engine.guest_agent.file_systems().await? }))
    }

    async fn freeze(&self, request: Request<FreezeRequest>) -> Result<Response<Done>, Status> {
        self.engine.vm_state.sync().await.map_err(|error| Status::unavailable(error.to_string()))?;
        self.engine.guest_agent.freeze(request.into_inner().unfreeze_timeout_seconds).await?;
        Ok(Response::new(Done {}))
    }

    async fn unfreeze(&self, _: Request<UnfreezeRequest>) -> Result<Response<Done>, Status> {
        self.engine.guest_agent.unfreeze().await?;
        Ok(Response::new(Done {}))
    }

    async fn guest_ping(&self, request: Request<GuestPingRequest>) -> Result<Response<Done>, Status> {
        let guest_agent = &self.engine.guest_agent;
        if guest_agent.probes_paused() || guest_agent.may_be_frozen() {
            return Ok(Response::new(Done {}));
        }
        let pinged = guest_agent.ping(seconds(request.into_inner().timeout_seconds)).await;
        let state = self.engine.watch().borrow().clone();
        match pinged {
            Err(error) if !may_be_silent(&state) => {
                guest_agent.record_probe(false);
                Err(error.into())
            }
            Err(_) => Ok(Response::new(Done {})),
            Ok(()) => {
                guest_agent.record_probe(true);
                Ok(Response::new(Done {}))
            }
        }
    }

    async fn guest_exec(&self, request: Request<GuestExecRequest>) -> Result<Response<GuestExecReply>, Status> {
        let GuestExecRequest { path, arguments, timeout_seconds } = request.into_inner();
        let guest_agent = &self.engine.guest_agent;
        // Only probes run programs, and a frozen guest runs none.
        if guest_agent.may_be_frozen() {
            return Ok(Response::new(GuestExecReply::default()));
        }
        let Executed { exit_code, output } = guest_agent.exec(&path, &arguments, seconds(timeout_seconds)).await?;
        Ok(Response::new(GuestExecReply { exit_code, output }))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        Ok(Response::new(self.engine.stats().await?))
    }

    async fn screenshot(&self, _: Request<ScreenshotRequest>) -> Result<Response<ScreenshotReply>, Status> {
        let (_, picture) = self.engine.screenshot().await?;
        let png = tokio::task::spawn_blocking(move || display::to_png(picture))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ScreenshotReply { png }))
    }
}
