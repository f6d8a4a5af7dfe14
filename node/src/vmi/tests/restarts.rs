//! Restarts of virt-handler, of a launcher and of a task.

use protocol::Lifecycle;
use tonic::Status;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_is_resolved_with_the_newest_object() {
    let stage = Stage::new();
    *stage.records.conflicts.lock().unwrap() = 2;
    stage.host.serve(&stage.launcher);
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    stage.until_phase(&Phase::Running).await;
    assert_eq!(stage.records.patches.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_virt_handler_finds_its_vmi_and_changes_nothing() {
    let stage = Stage::running().await;
    let before = stage.records.get("m");
    stage.stop.cancel();
    stage.vmis.stopped().await;
    let stop = CancellationToken::new();
    let vmis = Stage::handler(&stage.host, &stage.records, &stop);
    vmis.apply(Arc::new(stage.records.get("m")));
    let wait = async {
        while stage.launcher.calls().len() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(stage.launcher.calls(), ["hello 1", "sync m nics=1", "hello 1", "sync m nics=1"]);
    assert_eq!(stage.records.get("m"), before, "nothing is written about an unchanged VMI");
    assert_eq!(stage.launcher.state.borrow().lifecycle(), Lifecycle::Running);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_guest_is_reached_although_its_launcher_rejects_sync() {
    let stage = Stage::running().await;
    stage.stop.cancel();
    stage.vmis.stopped().await;
    *stage.launcher.refuse_sync.lock().unwrap() = Some(Status::internal("a claim is broken"));
    let vmis = Stage::handler(&stage.host, &stage.records, &CancellationToken::new());
    vmis.apply(Arc::new(stage.records.get("m")));
    let reached = async {
        while vmis.get("ns", "m").is_none_or(|handle| handle.launcher().is_err()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.expect("the launcher was not reached");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_launcher_keeps_its_vmi() {
    let stage = Stage::running().await;
    stage.launcher.exit();
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
async fn a_task_that_panics_is_restarted_and_keeps_its_vmi() {
    let stage = Stage::new();
    stage.vmis.apply(Arc::new(stage.records.put(&vmi("m", "u1"))));
    let handle = stage.vmis.get("ns", "m").unwrap();
    // In the task itself, when it starts the Sync.
    stage.host.panics.store(true, Ordering::Relaxed);
    stage.host.serve(&stage.launcher);
    stage.until_phase(&Phase::Running).await;
    assert!(!stage.host.panics.load(Ordering::Relaxed));
    assert!(Arc::ptr_eq(&handle, &stage.vmis.get("ns", "m").unwrap()), "streams and requests keep their handle");
    // In a call.
    stage.records.panics.store(true, Ordering::Relaxed);
    stage.vmis.remove("ns", "m");
    let panicked = async {
        while stage.records.panics.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, panicked).await.expect("the object was not read");
    stage.change(|_| {});
    stage.launcher.become_(Lifecycle::Shutoff, "shutdown");
    stage.until_phase(&Phase::Succeeded).await;
}
