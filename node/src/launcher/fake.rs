//! A virt-launcher for tests: it speaks the real protocol, and its domain is a variable.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use daemon::CancellationToken;
use futures::Stream;
use protocol::{
    AbortJobRequest, AbortMigrationRequest, Chunk, ConsoleInput, CpuStats, Done, DumpMemoryRequest, FileSystemsReply,
    FileSystemsRequest, FinishRequest, FreezeRequest, GuestAgent, GuestExecReply, GuestExecRequest, GuestFileSystem,
    GuestInfo, GuestPingRequest, GuestReportReply, GuestReportRequest, GuestUser, HelloReply, HelloRequest,
    KillRequest, LauncherState, Lifecycle, MemoryDump, MemoryFile, MigrateRequest, MigrationStep, PauseRequest,
    PrepareMigrationRequest, ResetRequest, SaveMemoryRequest, ScreenshotReply, ScreenshotRequest, ShutdownRequest,
    SoftRebootRequest, StartJobRequest, StartStep, StatsReply, StatsRequest, StepTiming, SyncReply, SyncRequest,
    TRACEPARENT, UnfreezeRequest, UnpauseRequest, UsbInput, UsersReply, UsersRequest, WatchRequest, abort_job_request,
    launcher_server::{Launcher as LauncherService, LauncherServer},
    start_job_request::Job,
};
use serde_json::Value;
use tokio::{net::UnixStream, sync::watch};
use tokio_stream::{StreamExt, wrappers::WatchStream};
use tonic::async_trait;
use tonic::{Request as Rpc, Response, Status, Streaming};

use super::Launcher;

/// Input of a console that causes so many chunks of one byte.
pub(crate) const FLOOD: &[u8] = b"flood";
pub(crate) const FLOOD_LENGTH: usize = 20_000;

/// A launcher whose domain is a variable.
pub(crate) struct FakeLauncher {
    pub(crate) state: watch::Sender<LauncherState>,
    calls: Mutex<Vec<String>>,
    pub(crate) refuse_sync: Mutex<Option<Status>>,
    pub(crate) refuse_migrate: Mutex<Option<Status>>,
    /// Input of consoles.
    typed: Mutex<Vec<u8>>,
    /// `Stats` succeeds.
    counts: AtomicBool,
    /// Features in the answer to Hello.
    pub(crate) features: Mutex<Vec<String>>,
    exit: CancellationToken,
}

impl FakeLauncher {
    pub(crate) fn new() -> Arc<Self> {
        let mut state = LauncherState::default();
        state.set_lifecycle(Lifecycle::NoDomain);
        Arc::new(Self {
            state: watch::Sender::new(state),
            calls: Mutex::default(),
            refuse_sync: Mutex::default(),
            refuse_migrate: Mutex::default(),
            typed: Mutex::default(),
            counts: AtomicBool::new(true),
            features: Mutex::new(protocol::features::own()),
            exit: CancellationToken::new(),
        })
    }

    fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }

    /// Ends the process.
    pub(crate) fn exit(&self) {
        self.exit.cancel();
    }

    /// Makes `Stats` succeed or fail.
    pub(crate) fn count(&self, counts: bool) {
        self.counts.store(counts, Ordering::Relaxed);
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    pub(crate) fn typed(&self) -> Vec<u8> {
        self.typed.lock().unwrap().clone()
    }

    /// Changes the reported state.
    pub(crate) fn report(&self, change: impl FnOnce(&mut LauncherState)) {
        self.state.send_modify(|state| {
            change(state);
            state.sequence += 1;
        });
    }

    /// Reports a step of a migration.
    pub(crate) fn move_(&self, migration: &str, step: MigrationStep) {
        self.report(|state| {
            let report = state.migration.get_or_insert_default();
            report.migration = migration.to_owned();
            report.begin = 1_000_000_000;
            report.set_step(step);
        });
    }

    pub(crate) fn become_(&self, lifecycle: Lifecycle, reason: &str) {
        self.state.send_modify(|state| {
            state.set_lifecycle(lifecycle);
            state.reason = reason.into();
            state.sequence += 1;
            state.acpi = true;
            state.machine_type = "pc-q35-10.0".into();
        });
    }
}

/// Text of a launcher without guest agent.
const NO_AGENT: &str =
    "LibvirtError(Code=86, Domain=10, Message='Guest agent is not responding: QEMU guest agent is not connected')";

#[derive(Clone)]
struct Served(Arc<FakeLauncher>);

type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait]
impl LauncherService for Served {
    type WatchStream = Output<LauncherState>;
    type ConsoleStream = Output<Chunk>;
    type VncStream = Output<Chunk>;
    type UsbRedirectionStream = Output<Chunk>;

    async fn hello(&self, request: Rpc<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let request = request.into_inner();
        if request.uid != "u1" {
            return Err(Status::invalid_argument("this launcher runs another VMI"));
        }
        self.0.note(format!("hello {}", request.capabilities_cache.len()));
        Ok(Response::new(HelloReply {
            launcher_version: "test".into(),
            features: self.0.features.lock().unwrap().clone(),
        }))
    }
    async fn sync(&self, request: Rpc<SyncRequest>) -> Result<Response<SyncReply>, Status> {
        let is_traced = request.metadata().contains_key(TRACEPARENT);
        let request = request.into_inner();
        let vmi: Value = serde_json::from_slice(&request.vmi).unwrap();
        let nics = request.options.unwrap().nics.len();
        self.0.note(format!("sync {} nics={nics}", vmi["metadata"]["name"].as_str().unwrap()));
        if let Some(status) = self.0.refuse_sync.lock().unwrap().clone() {
            return Err(status);
        }
        let started = self.0.state.borrow().lifecycle() == Lifecycle::NoDomain;
        if started {
            self.0.report(|state| state.nics = vec!["default".to_owned()]);
            self.0.become_(Lifecycle::Running, "booted");
        }
        let create = StepTiming { step: StartStep::Create.into(), begin: 0, end: u64::MAX };
        let timings = is_traced.then_some(create).into_iter().collect();
        Ok(Response::new(SyncReply { started, state_sequence: self.0.state.borrow().sequence, timings }))
    }
    async fn watch(&self, _: Rpc<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.0.state.subscribe()).map(Ok))))
    }
    async fn start_job(&self, request: Rpc<StartJobRequest>) -> Result<Response<Done>, Status> {
        self.0.note("job");
        match request.into_inner().job {
            Some(Job::Shutdown(request)) => self.shutdown(Rpc::new(request)).await,
            Some(Job::MemoryDump(request)) => self.dump_memory(Rpc::new(request)).await,
            Some(Job::MemorySave(SaveMemoryRequest { volume, file })) => {
                let save = MemoryFile { volume, file, ended: true, failure: String::new() };
                self.0.report(|state| state.memory_save = Some(save));
                self.0.become_(Lifecycle::Shutoff, "saved");
                Ok(Response::new(Done {}))
            }
            Some(Job::MigrationIn(request)) => self.prepare_migration(Rpc::new(request)).await,
            Some(Job::MigrationOut(request)) => self.migrate(Rpc::new(request)).await,
            None => Err(Status::unimplemented("no job")),
        }
    }
    async fn abort_job(&self, request: Rpc<AbortJobRequest>) -> Result<Response<Done>, Status> {
        match request.into_inner().job {
            Some(abort_job_request::Job::Migration(request)) => self.abort_migration(Rpc::new(request)).await,
            None => Err(Status::unimplemented("no job")),
        }
    }
    async fn shutdown(&self, request: Rpc<ShutdownRequest>) -> Result<Response<Done>, Status> {
        self.0.note(format!("shutdown {}", request.into_inner().grace_period_seconds));
        self.0.become_(Lifecycle::Shutoff, "shutdown");
        Ok(Response::new(Done {}))
    }
    async fn kill(&self, _: Rpc<KillRequest>) -> Result<Response<Done>, Status> {
        self.0.note("kill");
        self.0.become_(Lifecycle::Shutoff, "destroyed");
        Ok(Response::new(Done {}))
    }
    async fn dump_memory(&self, request: Rpc<DumpMemoryRequest>) -> Result<Response<Done>, Status> {
        let DumpMemoryRequest { volume, file } = request.into_inner();
        self.0.report(|state| {
            state.memory_dump = Some(MemoryDump { volume, file, ended: true, failure: String::new() });
        });
        Ok(Response::new(Done {}))
    }

    async fn prepare_migration(&self, request: Rpc<PrepareMigrationRequest>) -> Result<Response<Done>, Status> {
        let PrepareMigrationRequest { migration, options, .. } = request.into_inner();
        self.0.note(format!("prepare {migration} nics={}", options.unwrap().nics.len()));
        if self.0.state.borrow().migration.is_none() {
            self.0.move_(&migration, MigrationStep::Prepared);
        }
        Ok(Response::new(Done {}))
    }
    async fn migrate(&self, request: Rpc<MigrateRequest>) -> Result<Response<Done>, Status> {
        let migration = request.into_inner().migration;
        self.0.note(format!("migrate {migration}"));
        if let Some(status) = self.0.refuse_migrate.lock().unwrap().clone() {
            return Err(status);
        }
        self.0.move_(&migration, MigrationStep::Copying);
        Ok(Response::new(Done {}))
    }
    async fn abort_migration(&self, request: Rpc<AbortMigrationRequest>) -> Result<Response<Done>, Status> {
        let migration = request.into_inner().migration;
        self.0.note(format!("abort {migration}"));
        self.0.move_(&migration, MigrationStep::NotMoved);
        self.0.report(|state| state.migration.as_mut().unwrap().aborted = true);
        Ok(Response::new(Done {}))
    }

    async fn pause(&self, _: Rpc<PauseRequest>) -> Result<Response<Done>, Status> {
        self.0.become_(Lifecycle::Paused, "user");
        Ok(Response::new(Done {}))
    }
    async fn unpause(&self, _: Rpc<UnpauseRequest>) -> Result<Response<Done>, Status> {
        self.0.become_(Lifecycle::Running, "unpaused");
        Ok(Response::new(Done {}))
    }
    async fn reset(&self, _: Rpc<ResetRequest>) -> Result<Response<Done>, Status> {
        Err(Status::internal("no button"))
    }
    async fn soft_reboot(&self, _: Rpc<SoftRebootRequest>) -> Result<Response<Done>, Status> {
        Ok(Response::new(Done {}))
    }
    async fn finish(&self, _: Rpc<FinishRequest>) -> Result<Response<Done>, Status> {
        self.0.note("finish");
        self.0.exit.cancel();
        Ok(Response::new(Done {}))
    }
    async fn console(&self, request: Rpc<Streaming<ConsoleInput>>) -> Result<Response<Self::ConsoleStream>, Status> {
        let mut input = request.into_inner();
        let first = input.message().await?.map(|first| first.replay);
        let banner = tokio_stream::once(Ok(Chunk { data: format!("replay={first:?}\n").into_bytes() }));
        let launcher = self.0.clone();
        let echo = futures::StreamExt::flat_map(input, move |message| {
            let answer = message.and_then(|message| {
                launcher.typed.lock().unwrap().extend_from_slice(&message.data);
                match message.data.as_slice() {
                    b"fail" => Err(Status::resource_exhausted("the client was too slow")),
                    _ => Ok(Chunk { data: message.data }),
                }
            });
            let (answer, count) = match answer {
                Ok(chunk) if chunk.data == FLOOD => (Ok(Chunk { data: b"x".to_vec() }), FLOOD_LENGTH),
                answer => (answer, 1),
            };
            tokio_stream::iter(std::iter::repeat_n(answer, count))
        });
        Ok(Response::new(Box::pin(banner.chain(echo))))
    }
    async fn vnc(&self, _: Rpc<Streaming<Chunk>>) -> Result<Response<Self::VncStream>, Status> {
        Err(Status::failed_precondition("no display"))
    }
    async fn usb_redirection(
        &self,
        request: Rpc<Streaming<UsbInput>>,
    ) -> Result<Response<Self::UsbRedirectionStream>, Status> {
        let mut input = request.into_inner();
        let first = input.message().await?.map(|first| first.channel);
        let banner = tokio_stream::once(Ok(Chunk { data: format!("channel={first:?}\n").into_bytes() }));
        let echo = input.map(|message| message.map(|message| Chunk { data: message.data }));
        Ok(Response::new(Box::pin(banner.chain(echo))))
    }
    async fn guest_report(&self, _: Rpc<GuestReportRequest>) -> Result<Response<GuestReportReply>, Status> {
        let users = vec![GuestUser { name: "root".into(), domain: String::new(), login_time: 1.5 }];
        Ok(Response::new(GuestReportReply {
            guest: Some(GuestInfo { id: "debian".into(), hostname: "web".into(), ..GuestInfo::default() }),
            agent: Some(GuestAgent { version: "10.0".into(), commands: Vec::new() }),
            users,
            ..GuestReportReply::default()
        }))
    }
    async fn users(&self, _: Rpc<UsersRequest>) -> Result<Response<UsersReply>, Status> {
        Err(Status::failed_precondition(NO_AGENT))
    }
    async fn file_systems(&self, _: Rpc<FileSystemsRequest>) -> Result<Response<FileSystemsReply>, Status> {
        let root = GuestFileSystem { name: "vda1".into(), mount_point: "/".into(), ..GuestFileSystem::default() };
        Ok(Response::new(FileSystemsReply { file_systems: vec![root] }))
    }
    async fn freeze(&self, request: Rpc<FreezeRequest>) -> Result<Response<Done>, Status> {
        match request.into_inner().unfreeze_timeout_seconds {
            13 => Err(Status::failed_precondition(NO_AGENT)),
            seconds => {
                self.0.note(format!("freeze {seconds}"));
                Ok(Response::new(Done {}))
            }
        }
    }
    async fn stats(&self, _: Rpc<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        if !self.0.counts.load(Ordering::Relaxed) {
            return Err(Status::unavailable("the daemon is wedged"));
        }
        let cpu = CpuStats { time: 2_000_000_000, ..CpuStats::default() };
        Ok(Response::new(StatsReply { cpu: Some(cpu), ..StatsReply::default() }))
    }
    async fn guest_ping(&self, _: Rpc<GuestPingRequest>) -> Result<Response<Done>, Status> {
        Err(Status::unimplemented("called from within the pod only"))
    }
    async fn guest_exec(&self, _: Rpc<GuestExecRequest>) -> Result<Response<GuestExecReply>, Status> {
        Err(Status::unimplemented("called from within the pod only"))
    }
    async fn unfreeze(&self, _: Rpc<UnfreezeRequest>) -> Result<Response<Done>, Status> {
        Err(Status::internal("too cold"))
    }
    async fn screenshot(&self, _: Rpc<ScreenshotRequest>) -> Result<Response<ScreenshotReply>, Status> {
        Ok(Response::new(ScreenshotReply { png: b"\x89PNG".to_vec() }))
    }
}

impl FakeLauncher {
    /// Serves the connections of `incoming` until the process ends, in a runtime of its own that ends with all connections as a
    /// process would.
    pub(crate) fn serve<I>(self: &Arc<Self>, incoming: impl FnOnce() -> I + Send + 'static)
    where
        I: Stream<Item = std::io::Result<UnixStream>> + Send + 'static,
    {
        let (served, exit) = (Served(self.clone()), self.exit.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = tonic::transport::Server::builder()
                    .add_service(LauncherServer::new(served))
                    .serve_with_incoming(incoming());
                tokio::select! {
                    _ = server => {}
                    () = async { exit.cancelled().await; tokio::time::sleep(Duration::from_millis(50)).await } => {}
                }
            });
        });
    }

    /// Returns a connection to this launcher.
    pub(crate) async fn connect(self: &Arc<Self>) -> Launcher {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        self.serve(|| tokio_stream::once(UnixStream::from_std(far)).chain(tokio_stream::pending()));
        Launcher::connect(UnixStream::from_std(near).unwrap()).await.unwrap()
    }
}
