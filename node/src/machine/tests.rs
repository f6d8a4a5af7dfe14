//! A machine's task against a launcher that speaks the real protocol over a real socket.

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use async_trait::async_trait;
use futures::Stream;
use process::CancellationToken;
use protocol::{
    CacheFile, Chunk, ConsoleInput, CpuStats, Done, FileSystemsReply, FileSystemsRequest, FinishRequest, FreezeRequest,
    GuestAgent, GuestExecReply, GuestExecRequest, GuestFileSystem, GuestInfo, GuestPingRequest, GuestReportReply,
    GuestReportRequest, GuestUser, HelloReply, HelloRequest, KillRequest, Lifecycle, MachineState, Nic, PauseRequest,
    ResetRequest, ScreenshotReply, ScreenshotRequest, ShutdownRequest, SoftRebootRequest, StatsReply, StatsRequest,
    SyncReply, SyncRequest, UnfreezeRequest, UnpauseRequest, UsbInput, UsersReply, UsersRequest, WatchRequest,
    launcher_server::{Launcher as LauncherService, LauncherServer},
};
use serde_json::{Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tokio_stream::{
    StreamExt,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::{Request as Rpc, Response, Status, Streaming};

use super::{
    Machines, Refusal, Request,
    host::{ConnectError, Host, NetworkFailure, Settings},
    records::{Records, WriteError},
    state::Announcement,
};
use crate::{
    network::{PodInterface, PodNetwork},
    safe_dir::Peer,
};

const NODE: &str = "n1";
const POD: &str = "0b2c7a9e-pod";
const PATIENCE: Duration = Duration::from_secs(10);

/// A launcher whose guest is a variable.
pub(crate) struct FakeLauncher {
    state: watch::Sender<MachineState>,
    calls: Mutex<Vec<String>>,
    refuse_sync: Mutex<Option<Status>>,
    /// What came in over consoles.
    typed: Mutex<Vec<u8>>,
    /// It tells what it counts.
    counts: AtomicBool,
    exit: CancellationToken,
}

impl FakeLauncher {
    fn new() -> Arc<Self> {
        let mut state = MachineState::default();
        state.set_lifecycle(Lifecycle::NoDomain);
        Arc::new(Self {
            state: watch::Sender::new(state),
            calls: Mutex::default(),
            refuse_sync: Mutex::default(),
            typed: Mutex::default(),
            counts: AtomicBool::new(true),
            exit: CancellationToken::new(),
        })
    }

    fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }

    /// The process ends.
    pub(crate) fn exit(&self) {
        self.exit.cancel();
    }

    /// It tells from now on what it counts, or does not.
    pub(crate) fn count(&self, counts: bool) {
        self.counts.store(counts, Ordering::Relaxed);
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    pub(crate) fn typed(&self) -> Vec<u8> {
        self.typed.lock().unwrap().clone()
    }

    /// The guest's state changes.
    pub(crate) fn report(&self, change: impl FnOnce(&mut MachineState)) {
        self.state.send_modify(|state| {
            change(state);
            state.sequence += 1;
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

#[derive(Clone)]
struct Served(Arc<FakeLauncher>);

type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait]
impl LauncherService for Served {
    type WatchStream = Output<MachineState>;
    type ConsoleStream = Output<Chunk>;
    type VncStream = Output<Chunk>;
    type UsbRedirectionStream = Output<Chunk>;

    async fn hello(&self, request: Rpc<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let request = request.into_inner();
        if request.uid != "u1" {
            return Err(Status::invalid_argument("this launcher runs another machine"));
        }
        self.0.note(format!("hello {}", request.capabilities_cache.len()));
        Ok(Response::new(HelloReply { launcher_version: "test".into() }))
    }
    async fn sync(&self, request: Rpc<SyncRequest>) -> Result<Response<SyncReply>, Status> {
        let request = request.into_inner();
        let vmi: Value = serde_json::from_slice(&request.vmi).unwrap();
        let nics = request.options.unwrap().nics.len();
        self.0.note(format!("sync {} nics={nics}", vmi["metadata"]["name"].as_str().unwrap()));
        if let Some(status) = self.0.refuse_sync.lock().unwrap().clone() {
            return Err(status);
        }
        let started = self.0.state.borrow().lifecycle() == Lifecycle::NoDomain;
        if started {
            self.0.become_(Lifecycle::Running, "booted");
        }
        Ok(Response::new(SyncReply { started }))
    }
    async fn watch(&self, _: Rpc<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.0.state.subscribe()).map(Ok))))
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
        let echo = input.map(move |message| {
            message.and_then(|message| {
                launcher.typed.lock().unwrap().extend_from_slice(&message.data);
                match message.data.as_slice() {
                    b"fail" => Err(Status::resource_exhausted("the client was too slow")),
                    _ => Ok(Chunk { data: message.data }),
                }
            })
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
        Err(Status::failed_precondition("VMI does not have guest agent connected"))
    }
    async fn file_systems(&self, _: Rpc<FileSystemsRequest>) -> Result<Response<FileSystemsReply>, Status> {
        let root = GuestFileSystem { name: "vda1".into(), mount_point: "/".into(), ..GuestFileSystem::default() };
        Ok(Response::new(FileSystemsReply { file_systems: vec![root] }))
    }
    async fn freeze(&self, request: Rpc<FreezeRequest>) -> Result<Response<Done>, Status> {
        match request.into_inner().unfreeze_timeout_seconds {
            13 => Err(Status::internal("no freeze today")),
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
        Err(Status::unimplemented("asked from within the pod only"))
    }
    async fn guest_exec(&self, _: Rpc<GuestExecRequest>) -> Result<Response<GuestExecReply>, Status> {
        Err(Status::unimplemented("asked from within the pod only"))
    }
    async fn unfreeze(&self, _: Rpc<UnfreezeRequest>) -> Result<Response<Done>, Status> {
        Err(Status::internal("too cold"))
    }
    async fn screenshot(&self, _: Rpc<ScreenshotRequest>) -> Result<Response<ScreenshotReply>, Status> {
        Ok(Response::new(ScreenshotReply { png: b"\x89PNG".to_vec() }))
    }
}

/// A directory of its own for one test's socket.
struct Directory(PathBuf);

#[allow(clippy::disallowed_methods, reason = "a test's own directory")]
impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ferrovirt-machine-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

#[allow(clippy::disallowed_methods, reason = "a test's own directory")]
impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A node with one pod, whose socket appears when its launcher is served.
struct FakeHost {
    directory: Directory,
    network: Mutex<Option<NetworkFailure>>,
    /// Listens in the place of the launcher, and has no devices that could be given to it.
    stranger: Mutex<Option<Arc<Peer>>>,
}

impl FakeHost {
    fn socket(&self) -> PathBuf {
        self.directory.0.join("launcher-sock")
    }

    /// Serves the launcher in a runtime of its own, which ends with all its connections as a process would.
    #[allow(clippy::disallowed_methods, reason = "a test's own socket")]
    fn serve(&self, launcher: &Arc<FakeLauncher>) {
        let _ = std::fs::remove_file(self.socket());
        let listener = std::os::unix::net::UnixListener::bind(self.socket()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (served, exit) = (Served(launcher.clone()), launcher.exit.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let incoming = UnixListenerStream::new(UnixListener::from_std(listener).unwrap());
                let server = tonic::transport::Server::builder()
                    .add_service(LauncherServer::new(served))
                    .serve_with_incoming(incoming);
                tokio::select! {
                    _ = server => {}
                    () = async { exit.cancelled().await; tokio::time::sleep(Duration::from_millis(50)).await } => {}
                }
            });
        });
    }
}

#[async_trait]
impl Host for FakeHost {
    fn name(&self) -> &str {
        NODE
    }

    fn settings(&self) -> Settings {
        Settings::default()
    }

    #[allow(clippy::disallowed_methods, reason = "a test's own socket")]
    async fn connect(&self, pod: &str, within: Duration) -> Result<(UnixStream, Arc<Peer>), ConnectError> {
        assert_eq!(pod, POD);
        let attempts = async {
            loop {
                if let Ok(stream) = UnixStream::connect(self.socket()).await {
                    return stream;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let stream = tokio::time::timeout(within, attempts).await.map_err(|_| ConnectError::NoSocket)?;
        let peer = self.stranger.lock().unwrap().clone().unwrap_or_else(|| Arc::new(Peer::of(&stream).unwrap()));
        Ok((stream, peer))
    }

    async fn security_context(&self, _: &Arc<Peer>, _: &VirtualMachineInstance) -> Option<String> {
        Some("none".to_owned())
    }

    async fn equip(&self, _: &Arc<Peer>, _: &VirtualMachineInstance) -> Result<Vec<CacheFile>, String> {
        if self.stranger.lock().unwrap().is_some() {
            return Err("no devices".to_owned());
        }
        Ok(vec![CacheFile { name: "a.xml".into(), content: b"<a/>".to_vec() }])
    }

    async fn set_up_network(
        &self,
        _: &Arc<Peer>,
        _: &Arc<VirtualMachineInstance>,
    ) -> Result<PodNetwork, NetworkFailure> {
        match self.network.lock().unwrap().clone() {
            Some(failure) => Err(failure),
            None => Ok(PodNetwork {
                nics: vec![Nic { name: "default".into(), tap: "tap0".into(), ..Nic::default() }],
                interfaces: vec![PodInterface {
                    name: "default".into(),
                    pod_interface_name: "eth0".into(),
                    ips: vec!["10.244.0.9".parse().unwrap()],
                }],
            }),
        }
    }
}

/// Objects by name, with resource versions.
#[derive(Default)]
pub(crate) struct FakeRecords {
    objects: Mutex<HashMap<String, Value>>,
    patches: Mutex<Vec<Value>>,
    events: Mutex<Vec<Announcement>>,
    conflicts: Mutex<u32>,
    /// The next read fails as no program should.
    trips: AtomicBool,
    changed: watch::Sender<u64>,
}

impl FakeRecords {
    fn put(&self, vmi: &Value) -> VirtualMachineInstance {
        self.objects.lock().unwrap().insert(vmi["metadata"]["name"].as_str().unwrap().into(), vmi.clone());
        serde_json::from_value(vmi.clone()).unwrap()
    }

    fn get(&self, name: &str) -> VirtualMachineInstance {
        serde_json::from_value(self.objects.lock().unwrap()[name].clone()).unwrap()
    }

    pub(crate) fn reasons(&self) -> Vec<&'static str> {
        self.events.lock().unwrap().iter().map(|event| event.reason).collect()
    }

    async fn until(
        &self,
        name: &str,
        what: &str,
        holds: impl Fn(&VirtualMachineInstance) -> bool,
    ) -> VirtualMachineInstance {
        let mut changes = self.changed.subscribe();
        let wait = async {
            loop {
                let vmi = self.get(name);
                if holds(&vmi) {
                    return vmi;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: {:#?}", self.get(name).status))
    }
}

#[async_trait]
impl Records for FakeRecords {
    async fn patch(
        &self,
        vmi: &VirtualMachineInstance,
        patch: Value,
    ) -> Result<Arc<VirtualMachineInstance>, WriteError> {
        let result = {
            let mut objects = self.objects.lock().unwrap();
            let Some(object) = objects.get_mut(vmi.metadata.name.as_deref().unwrap()) else {
                return Err(WriteError::Gone);
            };
            let mut conflicts = self.conflicts.lock().unwrap();
            if *conflicts > 0 {
                *conflicts -= 1;
                // Somebody else wrote meanwhile.
                let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
                object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
                return Err(WriteError::Conflict);
            }
            if patch["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                return Err(WriteError::Conflict);
            }
            json_merge(object, &patch);
            let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
            object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
            serde_json::from_value(object.clone()).unwrap()
        };
        self.patches.lock().unwrap().push(patch);
        self.changed.send_modify(|count| *count += 1);
        Ok(Arc::new(result))
    }

    async fn read(&self, vmi: &VirtualMachineInstance) -> Result<Option<Arc<VirtualMachineInstance>>, WriteError> {
        assert!(!self.trips.swap(false, Ordering::Relaxed), "as the test wants it");
        let objects = self.objects.lock().unwrap();
        Ok(objects
            .get(vmi.metadata.name.as_deref().unwrap())
            .map(|object| Arc::new(serde_json::from_value(object.clone()).unwrap())))
    }

    fn announce(&self, _: &VirtualMachineInstance, announcement: Announcement) {
        self.events.lock().unwrap().push(announcement);
    }
}

fn json_merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            json_merge(&mut target[key.as_str()], value);
        }
    }
}

fn vmi(name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name, "namespace": "ns", "uid": uid, "resourceVersion": "10",
            "labels": {"kubevirt.io/nodeName": NODE},
        },
        "spec": {
            "terminationGracePeriodSeconds": 30,
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {"phase": "Scheduling", "nodeName": NODE, "activePods": {POD: NODE}, "runtimeUser": 107},
    })
}

/// A node, an API server and a launcher that is not up yet.
pub(crate) struct Stage {
    host: Arc<FakeHost>,
    pub(crate) records: Arc<FakeRecords>,
    pub(crate) launcher: Arc<FakeLauncher>,
    pub(crate) machines: Machines,
    pub(crate) stop: CancellationToken,
}

impl Stage {
    fn new() -> Self {
        let host =
            Arc::new(FakeHost { directory: Directory::new(), network: Mutex::default(), stranger: Mutex::default() });
        let records = Arc::new(FakeRecords::default());
        let stop = CancellationToken::new();
        let machines = Self::agent(&host, &records, &stop);
        Self { host, records, launcher: FakeLauncher::new(), machines, stop }
    }

    fn agent(host: &Arc<FakeHost>, records: &Arc<FakeRecords>, stop: &CancellationToken) -> Machines {
        let count = prometheus::IntGauge::new("machines", "machines").unwrap();
        Machines::new(host.clone(), records.clone(), count, stop.clone())
    }

    /// A machine `ns/m` that runs.
    pub(crate) async fn running() -> Self {
        let stage = Self::new();
        stage.host.serve(&stage.launcher);
        stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
        stage.until_phase(&Phase::Running).await;
        stage
    }

    async fn until_phase(&self, phase: &Phase) -> VirtualMachineInstance {
        self.records.until("m", phase.as_str(), |vmi| vmi.phase() == phase).await
    }

    async fn until_called(&self, call: &str) {
        let wait = async {
            while !self.launcher.calls().iter().any(|known| known == call) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let called = tokio::time::timeout(PATIENCE, wait).await;
        assert!(called.is_ok(), "{call} was not called: {:?}", self.launcher.calls());
    }

    async fn until_announced(&self, reason: &'static str) {
        let wait = async {
            while !self.records.reasons().contains(&reason) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let announced = tokio::time::timeout(PATIENCE, wait).await;
        assert!(announced.is_ok(), "{reason} was not announced: {:?}", self.records.reasons());
    }

    async fn until_left(&self) {
        let wait = async {
            while self.machines.get("ns", "m").is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the task did not end");
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut object = self.records.objects.lock().unwrap()["m"].clone();
        change(&mut object);
        let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
        self.machines.see(Arc::new(self.records.put(&object)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_is_running_after_one_write() {
    let stage = Stage::new();
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    tokio::time::sleep(Duration::from_millis(30)).await;
    stage.host.serve(&stage.launcher);
    let vmi = stage.until_phase(&Phase::Running).await;
    assert_eq!(stage.launcher.calls(), ["hello 1", "sync m nics=1"]);
    assert_eq!(stage.records.patches.lock().unwrap().len(), 1);
    let status = vmi.status.unwrap();
    assert_eq!(status.interfaces[0].ip_address.as_deref(), Some("10.244.0.9"));
    assert!(status.interfaces[0].mac.as_deref().unwrap().starts_with("52:54:00:"));
    assert_eq!(status.machine.as_ref().unwrap().type_, "pc-q35-10.0");
    let phases: Vec<_> = status.phase_transition_timestamps.iter().map(|entry| entry.phase.clone().unwrap()).collect();
    assert_eq!(phases, [Phase::Scheduled, Phase::Running]);
    assert!(status.condition("LiveMigratable").unwrap().is_false());
    stage.until_announced("Created").await;
    stage.until_announced("Started").await;
    stage.stop.cancel();
    stage.machines.stopped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_machine_is_shut_down_recorded_and_released() {
    let stage = Stage::running().await;
    stage.change(|vmi| vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let vmi = stage.until_phase(&Phase::Succeeded).await;
    assert!(vmi.status.unwrap().condition("Paused").is_none());
    stage.until_called("finish").await;
    assert!(stage.launcher.calls().contains(&"shutdown 30".to_owned()));
    assert!(stage.records.reasons().contains(&"ShuttingDown"));
    stage.until_announced("Deleted").await;
    stage.records.objects.lock().unwrap().clear();
    stage.machines.miss("ns", "m");
    stage.until_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_is_gone_takes_its_machine_along() {
    let stage = Stage::running().await;
    stage.records.objects.lock().unwrap().clear();
    stage.machines.miss("ns", "m");
    stage.until_called("shutdown 30").await;
    stage.until_called("finish").await;
    stage.until_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_powers_off_by_itself_has_succeeded() {
    let stage = Stage::running().await;
    stage.launcher.become_(Lifecycle::Shutoff, "shutdown");
    stage.until_phase(&Phase::Succeeded).await;
    stage.until_called("finish").await;
    assert!(stage.records.events.lock().unwrap().iter().any(|event| {
        event.reason == "Stopped" && !event.warning && event.message == "The VirtualMachineInstance was shut down."
    }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_qemu_that_dies_fails_the_machine() {
    let stage = Stage::running().await;
    stage.launcher.become_(Lifecycle::Shutoff, "crashed");
    stage.until_phase(&Phase::Failed).await;
    stage.until_called("finish").await;
    assert!(stage.records.events.lock().unwrap().iter().any(|event| event.reason == "Stopped" && event.warning));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_is_settled_with_the_fresh_object() {
    let stage = Stage::new();
    *stage.records.conflicts.lock().unwrap() = 2;
    stage.host.serve(&stage.launcher);
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    stage.until_phase(&Phase::Running).await;
    assert_eq!(stage.records.patches.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_agent_finds_its_machine_and_leaves_it_alone() {
    let stage = Stage::running().await;
    let before = stage.records.get("m");
    stage.stop.cancel();
    stage.machines.stopped().await;
    let stop = CancellationToken::new();
    let machines = Stage::agent(&stage.host, &stage.records, &stop);
    machines.see(Arc::new(stage.records.get("m")));
    let wait = async {
        while stage.launcher.calls().len() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(stage.launcher.calls(), ["hello 1", "sync m nics=1", "hello 1", "sync m nics=1"]);
    assert_eq!(stage.records.get("m"), before, "nothing is written about a machine that has not changed");
    assert_eq!(stage.launcher.state.borrow().lifecycle(), Lifecycle::Running);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_runs_is_reached_although_its_launcher_refuses_what_it_is_told() {
    let stage = Stage::running().await;
    stage.stop.cancel();
    stage.machines.stopped().await;
    *stage.launcher.refuse_sync.lock().unwrap() = Some(Status::internal("a claim is broken"));
    let machines = Stage::agent(&stage.host, &stage.records, &CancellationToken::new());
    machines.see(Arc::new(stage.records.get("m")));
    let reached = async {
        while machines.get("ns", "m").is_none_or(|machine| machine.launcher().is_err()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.expect("the launcher was not reached");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_panics_takes_the_others_along_only_once() {
    let stage = Stage::new();
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    tokio::time::sleep(Duration::from_millis(50)).await;
    // While the launcher's socket is waited for.
    stage.records.trips.store(true, Ordering::Relaxed);
    stage.machines.miss("ns", "m");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!stage.records.trips.load(Ordering::Relaxed), "the object was read");
    stage.host.serve(&stage.launcher);
    stage.until_phase(&Phase::Running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_shows_and_is_tried_again() {
    let stage = Stage::new();
    *stage.launcher.refuse_sync.lock().unwrap() = Some(Status::internal("disk root: no such file"));
    stage.host.serve(&stage.launcher);
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let failed = stage.records.until("m", "Synchronized", |vmi| vmi.condition("Synchronized").is_some()).await;
    let condition = failed.condition("Synchronized").unwrap();
    assert_eq!((condition.status.as_str(), condition.message.as_deref()), ("False", Some("disk root: no such file")));
    assert_eq!(failed.phase(), &Phase::Scheduled);
    assert!(stage.records.reasons().contains(&"SyncFailed"));
    *stage.launcher.refuse_sync.lock().unwrap() = None;
    stage.until_phase(&Phase::Running).await;
    stage.records.until("m", "no Synchronized", |vmi| vmi.condition("Synchronized").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_cannot_be_served_fails() {
    let stage = Stage::new();
    let failure = NetworkFailure { message: "secondary networks are not supported".into(), permanent: true };
    *stage.host.network.lock().unwrap() = Some(failure);
    stage.host.serve(&stage.launcher);
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let failed = stage.until_phase(&Phase::Failed).await;
    assert_eq!(
        failed.condition("Synchronized").unwrap().message.as_deref(),
        Some("failed to configure vmi network: secondary networks are not supported")
    );
    stage.until_called("finish").await;
    assert!(!stage.launcher.calls().iter().any(|call| call.starts_with("sync")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_comes_back_keeps_its_machine() {
    let stage = Stage::running().await;
    stage.launcher.exit.cancel();
    let again = FakeLauncher::new();
    again.become_(Lifecycle::Running, "booted");
    tokio::time::sleep(Duration::from_millis(150)).await;
    stage.host.serve(&again);
    let wait = async {
        while again.calls().len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap();
    assert_eq!(again.calls(), ["hello 1", "sync m nics=1"]);
    assert_eq!(stage.records.get("m").phase(), &Phase::Running);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_may_pause_a_running_machine_and_hears_why_a_reset_failed() {
    let stage = Stage::running().await;
    let machine = stage.machines.get("ns", "m").unwrap();
    machine.ask(Request::Pause).await.unwrap();
    // The answer comes when the object shows it, so that the next request is not refused for what it says.
    assert_eq!(stage.records.get("m").condition("Paused").unwrap().reason.as_deref(), Some("PausedByUser"));
    machine.ask(Request::Unpause).await.unwrap();
    assert!(stage.records.get("m").condition("Paused").is_none());
    let refused = machine.ask(Request::Reset).await.unwrap_err();
    assert!(matches!(refused, Refusal::Launcher(_)));
    assert_eq!(refused.to_string(), "no button");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_object_of_the_same_name_gets_a_task_of_its_own() {
    let stage = Stage::running().await;
    let mut object = vmi("m", "u2");
    object["metadata"]["resourceVersion"] = json!("99");
    object["status"]["activePods"] = json!({});
    stage.machines.see(Arc::new(stage.records.put(&object)));
    stage.until_called("shutdown 30").await;
    stage.until_called("finish").await;
    assert_eq!(stage.machines.get("ns", "m").unwrap().uid, "u2");
}

#[tokio::test]
async fn a_vmi_of_another_node_is_not_worked_on_whatever_its_label_says() {
    for node in [json!("n2"), json!(""), json!(null)] {
        let stage = Stage::new();
        let mut object = vmi("m", "u1");
        object["status"]["nodeName"] = node.clone();
        stage.machines.see(Arc::new(stage.records.put(&object)));
        assert!(stage.machines.get("ns", "m").is_none(), "{node}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vmis_beyond_the_limit_are_left_out_until_there_is_a_place() {
    let stage = Stage::running().await;
    let see = |name: &str, uid: &str| stage.machines.see_up_to(1, Arc::new(stage.records.put(&vmi(name, uid))));
    for name in ["a", "b", "a"] {
        see(name, name);
        assert!(stage.machines.get("ns", name).is_none());
    }
    assert_eq!(stage.machines.left_out().len(), 2);
    // One that is worked on is fed as ever, and its successor takes its place.
    see("m", "u1");
    assert_eq!((stage.machines.all().len(), stage.machines.left_out().len()), (1, 2));
    stage.machines.miss("ns", "b");
    assert_eq!(stage.machines.left_out().len(), 1);
    stage.change(|object| object["metadata"]["labels"] = json!({}));
    stage.machines.miss("ns", "m");
    tokio::time::timeout(PATIENCE, stage.machines.freed.notified()).await.expect("nobody was told of the place");
    stage.until_left().await;
    see("a", "a");
    assert!(stage.machines.get("ns", "a").is_some() && stage.machines.left_out().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13208_an_object_that_names_the_pod_of_another_machine_reaches_nothing_of_it() {
    let stage = Stage::new();
    stage.launcher.become_(Lifecycle::Running, "booted");
    stage.host.serve(&stage.launcher);
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "intruder"))));
    let failed = stage.until_phase(&Phase::Failed).await;
    assert!(failed.status.unwrap().interfaces.is_empty());
    stage.change(|vmi| vmi["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(stage.launcher.calls().is_empty());
    assert!(stage.machines.get("ns", "m").unwrap().launcher().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_reports_all_the_time_is_written_rarely() {
    let stage = Stage::running().await;
    let writes = stage.records.patches.lock().unwrap().len();
    for number in 0..200_u32 {
        stage.launcher.state.send_modify(|state| {
            state.guest_agent_connected = true;
            state.memory_current = u64::from(number + 1) << 20;
            state.interfaces = vec![protocol::GuestInterface {
                name: format!("eth{number}"),
                mac: "02:00:00:00:00:09".into(),
                addresses: vec![format!("10.0.{number}.1")],
            }];
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let written = stage.records.patches.lock().unwrap().len() - writes;
    assert!(written <= 1, "{written} writes in two seconds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_file_systems_show_in_the_status_until_they_are_thawed() {
    let stage = Stage::running().await;
    stage.launcher.report(|state| {
        state.guest_agent_connected = true;
        state.file_systems = "frozen".into();
        state.guest = Some(GuestInfo { name: "Debian".into(), id: "debian".into(), ..GuestInfo::default() });
        state.agent = Some(GuestAgent { version: "10.0".into(), commands: Vec::new() });
    });
    let frozen = stage.records.until("m", "frozen", |vmi| {
        vmi.status.as_ref().is_some_and(|status| status.fs_freeze_status.as_deref() == Some("frozen"))
    });
    let status = frozen.await.status.unwrap();
    assert_eq!(status.guest_os_info.id.as_deref(), Some("debian"));
    assert!(status.condition("AgentConnected").is_some_and(|condition| condition.is_true()));
    assert!(status.condition("AgentVersionNotSupported").is_some_and(|condition| condition.is_true()));
    stage.launcher.report(|state| state.file_systems = "thawed".into());
    let thawed =
        stage.records.until("m", "thawed", |vmi| vmi.status.as_ref().is_some_and(|s| s.fs_freeze_status.is_none()));
    thawed.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13322_a_state_that_is_too_large_breaks_the_connection_it_came_over() {
    let stage = Stage::running().await;
    // Two bytes each in the message.
    stage.launcher.report(|state| state.interfaces = vec![protocol::GuestInterface::default(); 300_000]);
    let lost = async {
        while stage.machines.get("ns", "m").unwrap().launcher().is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, lost).await.expect("the state was read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_changes_its_mind_all_the_time_does_not_make_the_agent_write_all_the_time() {
    let stage = Stage::running().await;
    let writes = stage.records.patches.lock().unwrap().len();
    for number in 0..200_u32 {
        stage.launcher.report(|state| {
            state.machine_type = format!("pc-{number}");
            state.file_systems = if number % 2 == 0 { "frozen" } else { "thawed" }.into();
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let written = stage.records.patches.lock().unwrap().len() - writes;
    assert!(written <= 14, "{written} writes in two seconds");
}

/// Another VMI on the same node, whose launcher has not been met yet.
const OTHER: &str = "other";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2026_13208_all_that_a_launcher_says_counts_for_the_vmi_of_its_socket_alone() {
    let stage = Stage::running().await;
    let other = stage.records.put(&vmi(OTHER, "u2"));
    let before = serde_json::to_value(&other).unwrap();
    let claim = || format!("ns/{OTHER} u2");
    // Whatever can carry a text carries the name and the UID of the other one.
    stage.launcher.report(|state| {
        state.reason = claim();
        state.machine_type = claim();
        state.guest_agent_connected = true;
        state.guest =
            Some(GuestInfo { name: claim(), hostname: OTHER.into(), id: "u2".into(), ..GuestInfo::default() });
        state.agent = Some(GuestAgent { version: claim(), commands: Vec::new() });
        state.interfaces =
            vec![protocol::GuestInterface { name: claim(), mac: claim(), addresses: vec!["10.244.0.99".into()] }];
        state.disks = vec![protocol::DiskTarget { volume: claim(), target: claim(), size: 1 }];
        state.guest_panic = Some(protocol::GuestPanic { kind: claim(), values: vec![claim()] });
    });
    let told = stage.records.until("m", "the report", |vmi| {
        vmi.status.as_ref().is_some_and(|status| status.guest_os_info.id.as_deref() == Some("u2"))
    });
    let told = told.await;
    assert_eq!(told.metadata.uid.as_deref(), Some("u1"));
    let launcher = stage.machines.get("ns", "m").unwrap().launcher().unwrap();
    let report = launcher.guest_report().await.unwrap();
    assert_eq!(report.guest.unwrap().hostname, "web", "the answer of the socket that was asked");
    // It ends: that is the end of its own VMI.
    stage.launcher.become_(Lifecycle::Shutoff, &claim());
    stage.until_phase(&Phase::Failed).await;
    assert_eq!(serde_json::to_value(stage.records.get(OTHER)).unwrap(), before);
    let patches = stage.records.patches.lock().unwrap();
    let named = |patch: &Value| patch["metadata"].as_object().is_some_and(|metadata| metadata.len() > 1);
    assert!(!patches.iter().any(named), "a patch names more than the version it is for: {patches:?}");
    drop(patches);
    // Nothing of the other one's is reached through this launcher.
    assert!(stage.machines.get("ns", OTHER).is_none_or(|machine| machine.launcher().is_err()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_ends_before_hello_gives_way_to_the_launcher() {
    let stage = Stage::new();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let stranger = Peer::open(i32::try_from(child.id()).unwrap(), 107, 107).unwrap();
    *stage.host.stranger.lock().unwrap() = Some(Arc::new(stranger));
    stage.host.serve(&stage.launcher);
    stage.machines.see(Arc::new(stage.records.put(&vmi("m", "u1"))));
    stage.until_announced("SyncFailed").await;
    child.kill().unwrap();
    child.wait().unwrap();
    // The next connection is to the launcher; this one still fails, since the process that it was made to is gone.
    let connected = async {
        while stage.host.stranger.lock().unwrap().take_if(|stranger| Arc::strong_count(stranger) == 1).is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, connected).await.expect("the connection to a process that is gone is kept");
    stage.until_phase(&Phase::Running).await;
}
