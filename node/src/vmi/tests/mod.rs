//! Tasks of VMIs with a launcher that speaks the real protocol over a real socket. This module holds the fixtures: a node, an
//! API server and a VMI.

mod hostile;
mod lifecycle;
mod migration;
mod restarts;

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use daemon::CancellationToken;
use protocol::{CacheFile, Nic};
use serde_json::{Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::async_trait;

use super::{
    Vmis,
    effects::Executor,
    event::Event,
    host::{ConnectError, Host, NetworkFailure, PodError, Relay, Settings},
    migration_facts::Route,
    records::{Records, WriteError},
};
use crate::{
    launcher::fake::FakeLauncher,
    metrics::VmiMetrics,
    network::{PodInterface, PodNetwork},
    safe_dir::{self, Peer},
    volumes::{Volumes, Work},
};

const NODE: &str = "n1";
const POD: &str = "0b2c7a9e-pod";
const PATIENCE: Duration = Duration::from_secs(10);

/// A directory for the socket of one test.
struct Directory(PathBuf);

#[allow(clippy::disallowed_methods, reason = "a test's own directory")]
impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ferrovirt-vmi-{}-{number}", std::process::id()));
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
    /// Hot-plugged volumes of the launcher.
    mounted: Mutex<BTreeSet<String>>,
    /// Another process that listens on the socket and has no devices.
    stranger: Mutex<Option<Arc<Peer>>>,
    /// The next look at the settings panics.
    panics: AtomicBool,
    /// Name of the node.
    name: &'static str,
    /// UID of the launcher's pod.
    pod: &'static str,
    /// Connections of migrations that were relayed.
    routes: Mutex<Vec<Route>>,
    /// Cancelled once the present virt-handler is about to stop.
    draining: Mutex<CancellationToken>,
}

impl FakeHost {
    fn socket(&self) -> PathBuf {
        self.directory.0.join("launcher-sock")
    }

    /// Serves the launcher on the socket.
    #[allow(clippy::disallowed_methods, reason = "a test's own socket")]
    fn serve(&self, launcher: &Arc<FakeLauncher>) {
        let _ = std::fs::remove_file(self.socket());
        let listener = std::os::unix::net::UnixListener::bind(self.socket()).unwrap();
        listener.set_nonblocking(true).unwrap();
        launcher.serve(|| UnixListenerStream::new(UnixListener::from_std(listener).unwrap()));
    }
}

#[async_trait]
impl Host for FakeHost {
    fn name(&self) -> &str {
        self.name
    }

    fn settings(&self) -> Settings {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "a panic of the test");
        Settings::default()
    }

    #[allow(clippy::disallowed_methods, reason = "a test's own socket")]
    async fn connect(&self, pod: &str, within: Duration) -> Result<(UnixStream, Arc<Peer>), ConnectError> {
        assert_eq!(pod, self.pod);
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

    async fn equip(&self, _: &Arc<Peer>, _: &VirtualMachineInstance) -> Result<Vec<CacheFile>, PodError> {
        if self.stranger.lock().unwrap().is_some() {
            return Err(safe_dir::Error::NoPeerProcess.into());
        }
        Ok(vec![CacheFile { name: "a.xml".into(), content: b"<a/>".to_vec() }])
    }

    async fn hand_volumes(
        &self,
        _: &Arc<Peer>,
        pod: &str,
        _: &VirtualMachineInstance,
        work: Work,
    ) -> Result<Volumes, PodError> {
        assert_eq!(pod, self.pod);
        let mut mounted = self.mounted.lock().unwrap();
        mounted.extend(work.attach.into_iter().map(|handover| handover.volume));
        mounted.retain(|volume| !work.detach.contains(volume));
        Ok(Volumes { mounted: mounted.clone(), ..Volumes::default() })
    }

    async fn create_host_disks(&self, _: &Arc<Peer>, _: &VirtualMachineInstance) -> Result<Vec<String>, PodError> {
        Ok(Vec::new())
    }

    fn migration_endpoint(&self) -> Option<(IpAddr, u16)> {
        Some(([10, 0, 0, 2].into(), 8188))
    }

    fn draining(&self) -> CancellationToken {
        self.draining.lock().unwrap().clone()
    }

    fn relay(&self, vmi: &str, route: Route) -> Relay {
        assert_eq!(vmi, "u1");
        self.routes.lock().unwrap().push(route);
        Box::new(())
    }

    async fn set_up_network(
        &self,
        _: &Arc<Peer>,
        _: &Arc<VirtualMachineInstance>,
        _: &[String],
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
                ..PodNetwork::default()
            }),
        }
    }
}

/// Objects by name, with resource versions.
#[derive(Default)]
pub(crate) struct FakeRecords {
    objects: Mutex<HashMap<String, Value>>,
    patches: Mutex<Vec<Value>>,
    events: Mutex<Vec<Event>>,
    conflicts: Mutex<u32>,
    /// The next read panics.
    panics: AtomicBool,
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
                // Another writer was faster.
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
        assert!(!self.panics.swap(false, Ordering::Relaxed), "a panic of the test");
        let objects = self.objects.lock().unwrap();
        Ok(objects
            .get(vmi.metadata.name.as_deref().unwrap())
            .map(|object| Arc::new(serde_json::from_value(object.clone()).unwrap())))
    }

    fn publish(&self, _: &VirtualMachineInstance, event: Event) {
        self.events.lock().unwrap().push(event);
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

/// A node, an API server and a launcher that does not listen yet.
pub(crate) struct Stage {
    host: Arc<FakeHost>,
    pub(crate) records: Arc<FakeRecords>,
    pub(crate) launcher: Arc<FakeLauncher>,
    pub(crate) vmis: Vmis,
    pub(crate) stop: CancellationToken,
}

impl Stage {
    /// Returns an executor for this stage.
    pub(super) fn executor(&self, metrics: VmiMetrics) -> Executor {
        let (reports, _) = tokio::sync::mpsc::channel(1);
        Executor::new(self.host.clone(), self.records.clone(), metrics, reports)
    }

    pub(super) fn new() -> Self {
        Self::on(NODE, POD, Arc::default())
    }

    /// Returns a stage on a node with the API server of another one.
    fn on(name: &'static str, pod: &'static str, records: Arc<FakeRecords>) -> Self {
        let host = Arc::new(FakeHost {
            directory: Directory::new(),
            network: Mutex::default(),
            mounted: Mutex::default(),
            stranger: Mutex::default(),
            panics: AtomicBool::default(),
            name,
            pod,
            routes: Mutex::default(),
            draining: Mutex::default(),
        });
        let stop = CancellationToken::new();
        let vmis = Self::handler(&host, &records, &stop);
        Self { host, records, launcher: FakeLauncher::new(), vmis, stop }
    }

    fn handler(host: &Arc<FakeHost>, records: &Arc<FakeRecords>, stop: &CancellationToken) -> Vmis {
        let metrics = VmiMetrics::new(&prometheus::Registry::new()).unwrap();
        Vmis::new(host.clone(), records.clone(), metrics, stop.clone())
    }

    /// Returns a stage with a running VMI `ns/m`.
    pub(crate) async fn running() -> Self {
        let stage = Self::new();
        stage.host.serve(&stage.launcher);
        stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
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

    async fn until_event(&self, reason: &'static str) {
        let wait = async {
            while !self.records.reasons().contains(&reason) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let published = tokio::time::timeout(PATIENCE, wait).await;
        assert!(published.is_ok(), "{reason} was not published: {:?}", self.records.reasons());
    }

    async fn until_left(&self) {
        let wait = async {
            while self.vmis.get("ns", "m").is_some() {
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
        self.vmis.apply(Arc::new(self.records.put(&object)));
    }
}
