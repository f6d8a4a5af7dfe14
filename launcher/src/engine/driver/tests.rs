//! The engine over the fake hypervisor.

use std::{path::PathBuf, time::Duration};

use api::VirtualMachineInstance;
use protocol::{ItemKind, Lifecycle, VmiOptions};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::*;
use crate::{
    domain::unsupported::Unsupported,
    engine::model::{Action, JobName, Request, RequestError, Wanted},
    hypervisor::{HypervisorError, fake::Fake},
};

/// A pod with its files, removed at the end.
pub(super) struct TestPod {
    root: PathBuf,
    pub(super) fake: Fake,
}

/// A worker of the pod.
pub(super) struct Worker {
    pub(super) engine: EngineHandle,
    pub(super) outcome: JoinHandle<Result<Outcome, TaskFailure>>,
}

impl Drop for TestPod {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

impl TestPod {
    pub(super) fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("launcher-engine-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("libvirt")).unwrap();
        Self { root, fake: Fake::default() }
    }

    pub(super) fn worker_with(&self, simulate_crash: bool) -> Worker {
        let paths = Paths {
            private: self.root.clone(),
            sockets: self.root.clone(),
            runtime: self.root.clone(),
            dev: self.root.clone(),
            ephemeral: self.root.clone(),
            container_disks: self.root.clone(),
            hotplug_disks: self.root.join("hotplug"),
            ..Paths::default()
        };
        let args = VmiArgs {
            name: "m".into(),
            uid: "u".into(),
            namespace: "d".into(),
            grace_period_seconds: 45,
            allow_emulation: true,
            libvirt_log_filters: None,
            ovmf_path: "/nowhere".into(),
            await_limits: false,
            simulate_crash,
        };
        let (tasks, failures) = Tasks::new();
        let (driver, engine) = Driver::new(args, paths, Box::new(self.fake.clone()), &tasks);
        let outcome = tokio::spawn(async move {
            let _failures = failures;
            driver.run().await
        });
        Worker { engine, outcome }
    }

    /// Starts a worker and sends Hello.
    pub(super) async fn worker(&self) -> Worker {
        let worker = self.worker_with(false);
        worker.engine.ask(Request::Hello { cache: Vec::new(), allow_emulation: true }).await.unwrap();
        worker
    }

    /// Starts a worker with a running domain.
    pub(super) async fn running(&self) -> Worker {
        let worker = self.worker().await;
        assert_eq!(worker.sync(json!({})).await, Ok(true));
        worker
    }
}

impl Worker {
    /// Syncs a VMI whose domain has these further fields.
    pub(super) async fn sync(&self, domain: Value) -> Result<bool, RequestError> {
        sync(self.engine.clone(), domain, json!([])).await
    }

    pub(super) async fn reaches(&self, lifecycle: Lifecycle) -> LauncherState {
        let mut state = self.engine.watch();
        let reached = state.wait_for(|state| state.lifecycle() == lifecycle);
        tokio::time::timeout(Duration::from_secs(5), reached).await.unwrap().unwrap().clone()
    }

    pub(super) async fn finish(self) -> Outcome {
        self.engine.ask(Request::Act(Action::Finish)).await.unwrap();
        self.outcome.await.unwrap().unwrap()
    }
}

async fn sync(engine: EngineHandle, domain: Value, volumes: Value) -> Result<bool, RequestError> {
    let mut spec = json!({"memory": {"guest": "64Mi"}, "devices": {"autoattachSerialConsole": false}});
    spec.as_object_mut().unwrap().extend(domain.as_object().unwrap().clone());
    let object = json!({
        "metadata": {"name": "m", "namespace": "d", "uid": "u"},
        "spec": {"domain": spec, "volumes": volumes},
    });
    let unsupported = Unsupported::find(&object);
    let vmi: VirtualMachineInstance = serde_json::from_value(object).unwrap();
    engine.ask(Request::Sync(Arc::new(Wanted { vmi, unsupported, options: VmiOptions::default() }))).await
}

/// Syncs a VMI with hot-plugged volumes and a disk for each: the name, and the phase if the volume is in the spec.
async fn plugged(engine: &EngineHandle, disks: Value, volumes: &[(&str, &str)]) -> Result<bool, RequestError> {
    let claim = json!({"claimName": "c", "hotpluggable": true});
    let spec = |(name, _): &(&str, &str)| json!({"name": name, "persistentVolumeClaim": claim});
    let status =
        |(name, phase): &(&str, &str)| json!({"name": name, "phase": phase, "target": "", "hotplugVolume": {}});
    let object = json!({
        "metadata": {"name": "m", "namespace": "d", "uid": "u"},
        "spec": {
            "domain": {"memory": {"guest": "64Mi"}, "devices": {"autoattachSerialConsole": false, "disks": disks}},
            "volumes": volumes.iter().map(spec).collect::<Vec<_>>(),
        },
        "status": {"volumeStatus": volumes.iter().map(status).collect::<Vec<_>>()},
    });
    let unsupported = Unsupported::find(&object);
    let vmi = serde_json::from_value(object).unwrap();
    engine.ask(Request::Sync(Arc::new(Wanted { vmi, unsupported, options: VmiOptions::default() }))).await
}

/// Returns the disks of the published state.
fn disks(engine: &EngineHandle) -> Vec<(String, String)> {
    let state = engine.watch();
    let disks = state.borrow().disks.clone();
    disks.into_iter().map(|disk| (disk.volume, disk.target)).collect()
}

/// Returns the items of the published state.
fn items(engine: &EngineHandle) -> Vec<(String, bool)> {
    let state = engine.watch();
    let items = state.borrow().items.clone();
    items.into_iter().map(|item| (format!("{}: {}", item.name, item.message), item.needs_restart)).collect()
}

#[tokio::test]
async fn disks_of_hot_plugged_volumes_come_and_go() {
    let pod = TestPod::new("plugged");
    let hotplug = pod.root.join("hotplug");
    std::fs::create_dir_all(&hotplug).unwrap();
    let engine = pod.running().await.engine;
    pod.fake.take_calls();
    let changes = || -> Vec<String> {
        pod.fake
            .take_calls()
            .into_iter()
            .filter(|call| ["attach", "detach", "update"].contains(&call.as_str()))
            .collect()
    };
    let (one, two) =
        (json!({"name": "one", "disk": {"bus": "virtio"}}), json!({"name": "two", "disk": {"bus": "scsi"}}));
    let both = json!([one, two]);
    // Neither volume is in the pod; one of them should be.
    let volumes = [("one", "Bound"), ("two", "MountedToPod")];
    assert_eq!(plugged(&engine, both.clone(), &volumes).await, Ok(false));
    assert_eq!(changes(), [""; 0]);
    let missing = "two: the volume cannot be opened in the pod of virt-launcher yet";
    assert_eq!(items(&engine), [(missing.to_owned(), false)]);
    // One fails, the other is attached.
    for name in ["one.img", "two.img"] {
        std::fs::write(hotplug.join(name), [0; 512]).unwrap();
    }
    let volumes = [("one", "MountedToPod"), ("two", "MountedToPod")];
    pod.fake.fail("attach", HypervisorError::Libvirt { code: 1, message: "no".into() });
    assert_eq!(plugged(&engine, both.clone(), &volumes).await, Ok(false));
    assert_eq!(changes(), ["attach", "attach"]);
    assert_eq!(items(&engine), [("one: cannot attach the disk: no".to_owned(), false)]);
    assert_eq!(disks(&engine), [("two".to_owned(), "sda".to_owned())]);
    assert_eq!(plugged(&engine, both.clone(), &volumes).await, Ok(false));
    assert_eq!((changes(), items(&engine)), (vec!["attach".to_owned()], vec![]));
    assert_eq!(disks(&engine).len(), 2);
    // In line; also while the status is behind.
    assert_eq!(plugged(&engine, both, &[("one", "Ready"), ("two", "Bound")]).await, Ok(false));
    assert_eq!(changes(), [""; 0]);
    // The guest keeps a disk, and releases it without a request.
    pod.fake.keep_disks(true);
    assert_eq!(plugged(&engine, json!([two]), &[("two", "Ready")]).await, Ok(false));
    assert_eq!((changes(), disks(&engine).len()), (vec!["detach".to_owned()], 2));
    assert_eq!(items(&engine), [("one: the guest has not released the disk yet".to_owned(), false)]);
    pod.fake.keep_disks(false);
    pod.fake.release_disk("vda");
    settle().await;
    assert_eq!((disks(&engine), items(&engine)), (vec![("two".to_owned(), "sda".to_owned())], vec![]));
    assert_eq!(plugged(&engine, json!([]), &[]).await, Ok(false));
    assert_eq!((changes(), disks(&engine)), (vec!["detach".to_owned()], vec![]));
}

#[tokio::test]
async fn guest_gets_vcpus_and_memory_and_gives_memory_back() {
    let pod = TestPod::new("resize");
    let size = |sockets: u32, guest: &str| json!({"cpu": {"sockets": sockets, "maxSockets": 4}, "memory": {"guest": guest, "maxGuest": "4Gi"}});
    let mut worker = pod.worker().await;
    assert_eq!(worker.sync(size(1, "1Gi")).await, Ok(true));
    pod.fake.take_calls();
    let changes = || -> Vec<String> {
        let is_change = |call: &String| ["plug vCPUs", "attach", "update"].contains(&call.as_str());
        pod.fake.take_calls().into_iter().filter(is_change).collect()
    };
    let published = |worker: &Worker| {
        let state = worker.engine.watch();
        let state = state.borrow();
        (state.vcpus, state.memory_requested >> 30)
    };
    assert_eq!(published(&worker), (1, 1));
    // Sockets and memory; the calls, vCPUs and memory that follow, failed items.
    for (sockets, guest, calls, expected) in [
        (1, "1Gi", "", (1, 1)),
        (3, "2Gi", "plug vCPUs, attach", (3, 2)),
        (3, "4Gi", "update", (3, 4)),
        (3, "1Gi", "update", (3, 1)),
        // Fewer vCPUs need a restart.
        (2, "3Gi", "update", (3, 3)),
        (4, "3Gi", "plug vCPUs", (4, 3)),
    ] {
        assert_eq!(worker.sync(size(sockets, guest)).await, Ok(false));
        assert_eq!((changes().join(", ").as_str(), published(&worker)), (calls, expected));
        assert_eq!(items(&worker.engine).len(), usize::from(sockets == 2), "{sockets} {guest}");
    }
    // A restarted worker finds what the domain has.
    worker = pod.worker().await;
    assert_eq!(worker.sync(size(4, "3Gi")).await, Ok(false));
    assert_eq!((changes(), published(&worker)), (Vec::new(), (4, 3)));
    // A refusal of the hypervisor is an item, and the other part follows.
    pod.fake.fail("update", HypervisorError::Libvirt { code: 1, message: "no".into() });
    assert_eq!(worker.sync(size(4, "2Gi")).await, Ok(false));
    assert_eq!(items(&worker.engine), [(": cannot change the memory: no".to_owned(), false)]);
}

#[tokio::test]
async fn the_medium_of_a_drive_is_inserted_and_ejected() {
    let pod = TestPod::new("drive");
    let worker = pod.worker().await;
    let engine = &worker.engine;
    let drive = json!([{"name": "cd", "cdrom": {"bus": "sata"}}]);
    assert_eq!(plugged(engine, drive.clone(), &[]).await, Ok(true));
    assert_eq!(disks(engine), []);
    std::fs::create_dir_all(pod.root.join("hotplug")).unwrap();
    std::fs::write(pod.root.join("hotplug/cd.img"), [0; 512]).unwrap();
    pod.fake.take_calls();
    for (volumes, known) in [(vec![("cd", "MountedToPod")], 1), (vec![], 0)] {
        assert_eq!(plugged(engine, drive.clone(), &volumes).await, Ok(false));
        assert_eq!(pod.fake.take_calls().iter().filter(|call| *call == "update").count(), 1, "{volumes:?}");
        assert_eq!((disks(engine).len(), items(engine)), (known, vec![]), "{volumes:?}");
    }
}

#[tokio::test]
async fn a_start_takes_the_volumes_that_the_pod_has() {
    let pod = TestPod::new("boot");
    std::fs::create_dir_all(pod.root.join("hotplug")).unwrap();
    std::fs::write(pod.root.join("hotplug/here.img"), [0; 512]).unwrap();
    let worker = pod.worker().await;
    let disk = |name: &str| json!({"name": name, "disk": {"bus": "virtio"}});
    let both = json!([disk("absent"), disk("here")]);
    let volumes = [("absent", "Bound"), ("here", "MountedToPod")];
    assert_eq!(plugged(&worker.engine, both.clone(), &volumes).await, Ok(true));
    assert_eq!(disks(&worker.engine), [("here".to_owned(), "vda".to_owned())]);
    // The other follows, under a free name.
    std::fs::write(pod.root.join("hotplug/absent.img"), [0; 512]).unwrap();
    let volumes = [("absent", "MountedToPod"), ("here", "Ready")];
    assert_eq!(plugged(&worker.engine, both, &volumes).await, Ok(false));
    let expected = [("here", "vda"), ("absent", "vdb")];
    assert_eq!(disks(&worker.engine), expected.map(|(volume, target)| (volume.to_owned(), target.to_owned())));
}

/// Lets all tasks run until none is ready.
pub(super) async fn settle() {
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_domain_starts_with_few_calls_and_ends_with_its_guest() {
    let pod = TestPod::new("start");
    let worker = pod.running().await;
    assert_eq!(pod.fake.take_calls(), ["cache", "warm up", "read", "define", "definition", "define", "create", "read"]);
    let state = worker.reaches(Lifecycle::Running).await;
    assert_eq!((state.reason.as_str(), state.machine_type.as_str()), ("booted", "q35"));
    assert_eq!(worker.sync(json!({})).await, Ok(false));
    assert!(matches!(worker.engine.ask(Request::Act(Action::Finish)).await, Err(RequestError::NotEnded)));
    pod.fake.set_domain(Lifecycle::Shutoff, "shutdown");
    worker.reaches(Lifecycle::Shutoff).await;
    assert_eq!(worker.finish().await, Outcome { success: true, message: "shutdown".into() });
}

#[tokio::test]
async fn a_crash_of_qemu_fails_the_pod() {
    let pod = TestPod::new("crash");
    let worker = pod.running().await;
    pod.fake.set_domain(Lifecycle::Shutoff, "crashed");
    assert_eq!(worker.reaches(Lifecycle::Shutoff).await.reason, "crashed");
    assert!(matches!(worker.engine.ask(Request::Act(Action::Pause)).await, Err(RequestError::NoDomain)));
    assert_eq!(worker.finish().await, Outcome { success: false, message: "crashed".into() });
}

#[tokio::test]
async fn the_domain_stays_while_libvirts_daemon_is_away() {
    let pod = TestPod::new("away");
    let worker = pod.running().await;
    pod.fake.end_daemon();
    settle().await;
    let paused = worker.engine.ask(Request::Act(Action::Pause)).await;
    assert!(matches!(paused, Err(RequestError::Hypervisor(HypervisorError::Disconnected(_)))), "{paused:?}");
    assert_eq!(worker.engine.watch().borrow().lifecycle(), Lifecycle::Running);
    // The new connection shows a change that came without an event.
    pod.fake.set_domain(Lifecycle::Paused, "ioError");
    pod.fake.listen();
    assert_eq!(worker.reaches(Lifecycle::Paused).await.reason, "ioError");
    assert_eq!(worker.sync(json!({})).await, Ok(false));
    assert_eq!(worker.reaches(Lifecycle::Running).await.reason, "unpaused");
}

#[tokio::test]
async fn a_restarted_worker_adopts_the_domain_before_it_prepares_anything() {
    let pod = TestPod::new("adopt");
    let first = pod.running().await;
    first.outcome.abort();
    pod.fake.take_calls();
    pod.fake.end_daemon();
    let second = pod.worker_with(false);
    // Preparing this disk would fail, since its image is missing.
    let disk =
        json!({"devices": {"autoattachSerialConsole": false, "disks": [{"name": "root", "disk": {"bus": "virtio"}}]}});
    let volumes = json!([{"name": "root", "containerDisk": {"image": "i"}}]);
    let adopting = tokio::spawn(sync(second.engine.clone(), disk, volumes));
    settle().await;
    pod.fake.listen();
    assert_eq!(adopting.await.unwrap(), Ok(false));
    let calls = pod.fake.take_calls();
    assert!(!calls.iter().any(|call| call == "define" || call == "create"), "{calls:?}");
    let state = second.reaches(Lifecycle::Running).await;
    let items: Vec<(ItemKind, &str, bool)> =
        state.items.iter().map(|item| (item.kind(), item.name.as_str(), item.needs_restart)).collect();
    assert_eq!(items, [(ItemKind::Volume, "root", true)]);
}

#[tokio::test]
async fn a_restarted_worker_starts_the_domain_that_the_former_did_not() {
    let pod = TestPod::new("adopt-nothing");
    std::fs::create_dir_all(pod.root.join("u")).unwrap();
    let worker = pod.worker_with(false);
    assert_eq!(worker.sync(json!({})).await, Ok(true));
}

#[tokio::test]
async fn differences_of_a_running_domain_are_items_until_they_are_gone() {
    let pod = TestPod::new("items");
    let worker = pod.running().await;
    assert_eq!(worker.sync(json!({"cpu": {"cores": 2}, "memory": {"guest": "96Mi"}})).await, Ok(false));
    let items = worker.engine.watch().borrow().items.clone();
    let messages: Vec<&str> = items.iter().map(|item| item.message.as_str()).collect();
    let expected = [
        "the number of vCPUs cannot be changed in the running VMI",
        "the amount of memory cannot be changed in the running VMI",
    ];
    assert_eq!(messages, expected);
    assert!(items.iter().all(|item| item.needs_restart));
    assert_eq!(worker.sync(json!({})).await, Ok(false));
    assert_eq!(worker.engine.watch().borrow().items, []);
}

#[tokio::test]
async fn a_request_that_conflicts_with_the_start_is_refused_with_its_name() {
    let pod = TestPod::new("conflict");
    let worker = pod.worker().await;
    pod.fake.hold("create");
    let start = tokio::spawn(sync(worker.engine.clone(), json!({}), json!([])));
    settle().await;
    let refused = worker.engine.ask(Request::Act(Action::Pause)).await;
    assert_eq!(refused, Err(RequestError::Conflict { job: JobName::Start, progress: "starting QEMU" }));
    assert_eq!(refused.unwrap_err().to_string(), "the domain is busy: start is in progress (starting QEMU)");
    // A second Sync shares the start; a kill waits for QEMU.
    let second = tokio::spawn(sync(worker.engine.clone(), json!({}), json!([])));
    settle().await;
    let engine = worker.engine.clone();
    let kill = tokio::spawn(async move { engine.ask(Request::Act(Action::Kill)).await });
    settle().await;
    assert!(!kill.is_finished() && !second.is_finished());
    pod.fake.release("create");
    assert_eq!(start.await.unwrap(), Ok(true));
    assert_eq!(kill.await.unwrap(), Ok(false));
    assert!(second.await.unwrap().is_err() || worker.engine.watch().borrow().lifecycle() == Lifecycle::Shutoff);
    assert_eq!(worker.reaches(Lifecycle::Shutoff).await.reason, "destroyed");
}

#[tokio::test]
async fn a_kill_aborts_a_start_that_has_not_reached_qemu() {
    let pod = TestPod::new("abort");
    let worker = pod.worker().await;
    pod.fake.hold("define");
    let start = tokio::spawn(sync(worker.engine.clone(), json!({}), json!([])));
    settle().await;
    assert_eq!(worker.engine.ask(Request::Act(Action::Kill)).await, Ok(false));
    assert_eq!(start.await.unwrap(), Err(RequestError::Ending));
    pod.fake.release("define");
    settle().await;
    assert!(!pod.fake.take_calls().contains(&"create".to_owned()));
    assert_eq!(worker.finish().await, Outcome { success: true, message: "destroyed".into() });
}

#[tokio::test]
async fn a_held_call_does_not_delay_other_requests() {
    let pod = TestPod::new("held");
    let worker = pod.running().await;
    pod.fake.hold("reset");
    let engine = worker.engine.clone();
    let reset = tokio::spawn(async move { engine.ask(Request::Act(Action::Reset)).await });
    settle().await;
    assert_eq!(worker.engine.ask(Request::Act(Action::Pause)).await, Ok(false));
    assert_eq!(worker.engine.watch().borrow().lifecycle(), Lifecycle::Paused);
    assert_eq!(worker.engine.ask(Request::Act(Action::Unpause)).await, Ok(false));
    pod.fake.release("reset");
    assert_eq!(reset.await.unwrap(), Ok(false));
}

#[tokio::test(start_paused = true)]
async fn qemu_is_forced_to_end_after_the_grace_period() {
    let pod = TestPod::new("force");
    let worker = pod.running().await;
    pod.fake.fail("shutdown", HypervisorError::Timeout("shutdown"));
    pod.fake.take_calls();
    assert_eq!(worker.engine.ask(Request::Act(Action::Shutdown { grace: 3 })).await, Ok(false));
    pod.fake.fail("destroy gently", HypervisorError::Timeout("destroy"));
    assert_eq!(worker.reaches(Lifecycle::Shutoff).await.reason, "destroyed");
    let calls: Vec<String> = pod.fake.take_calls().into_iter().filter(|call| call != "read").collect();
    assert_eq!(calls, ["shutdown", "destroy gently", "destroy"]);
}

#[tokio::test]
async fn a_simulated_failure_is_published_before_the_launcher_ends() {
    let pod = TestPod::new("fails");
    let worker = pod.worker_with(true);
    let mut state = worker.engine.watch();
    let failure = state.wait_for(|state| !state.failure.is_empty()).await.unwrap().failure.clone();
    worker.engine.ask(Request::Hello { cache: Vec::new(), allow_emulation: false }).await.unwrap();
    assert_eq!(worker.finish().await, Outcome { success: false, message: failure });
}

#[tokio::test]
async fn a_vmi_with_unsupported_fields_fails_with_their_names() {
    let pod = TestPod::new("unsupported");
    let worker = pod.worker_with(false);
    let error = worker
        .sync(json!({"devices": {"hostDevices": [{"name": "d", "claimName": "c"}]}, "launchSecurity": {"sev": {}}}))
        .await
        .unwrap_err();
    let failure = worker.engine.watch().borrow().failure.clone();
    assert!(matches!(worker.sync(json!({})).await, Err(RequestError::Ended)));
    assert_eq!(
        failure,
        "VMI uses fields that virt-launcher does not support: spec.domain.devices.hostDevices[0].claimName, spec.domain.launchSecurity"
    );
    assert_eq!(error.to_string(), failure);
    assert_eq!(worker.finish().await, Outcome { success: false, message: failure });
}
