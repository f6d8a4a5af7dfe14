//! Saves of the guest's memory over the fake hypervisor.

use std::time::Duration;

use protocol::Lifecycle;

use super::tests::{TestPod, Worker, settle};
use crate::{engine::model::Request, hypervisor::HypervisorError};

async fn save(worker: &Worker) {
    let request = Request::SaveMemory { volume: "claim".into(), file: "a.memory.save".into() };
    assert_eq!(worker.engine.ask(request).await, Ok(false));
    settle().await;
}

/// Writes the file of the claim.
fn write(worker: &Worker, content: &str) {
    let path = worker.engine.paths.hotplugged("claim", false);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, content).unwrap();
}

#[tokio::test]
async fn a_guest_that_is_not_saved_goes_on() {
    let pod = TestPod::new("save");
    let worker = pod.running().await;
    write(&worker, "");
    pod.fake.fail("save", HypervisorError::Libvirt { code: 1, message: "no space".into() });
    save(&worker).await;
    let mut state = worker.engine.watch();
    let failed = state.wait_for(|state| state.memory_save.as_ref().is_some_and(|save| save.ended));
    let failed = tokio::time::timeout(Duration::from_secs(10), failed).await.unwrap().unwrap().clone();
    assert_eq!(failed.memory_save.unwrap().failure, "cannot save the guest's memory: no space");
    assert_eq!(worker.reaches(Lifecycle::Running).await.reason, "unpaused");
    assert!(!worker.engine.paths.save_record().exists());
}

#[tokio::test]
async fn a_later_worker_knows_a_saved_guest_by_its_file() {
    for (content, reason) in [("LibvirtQemudSave", "saved"), ("LibvirtQemudPart", "crashed")] {
        let pod = TestPod::new(&format!("save-{reason}"));
        let first = pod.running().await;
        write(&first, content);
        pod.fake.hold("save");
        save(&first).await;
        first.outcome.abort();
        pod.fake.set_domain(Lifecycle::Shutoff, "crashed");
        let second = pod.worker_with(false);
        let state = second.reaches(Lifecycle::Shutoff).await;
        assert_eq!(state.reason, reason);
        assert_eq!(state.memory_save.unwrap().failure.is_empty(), reason == "saved");
    }
}

#[tokio::test]
async fn the_pod_of_a_saved_guest_ends_well() {
    let pod = TestPod::new("save-ends");
    let worker = pod.running().await;
    write(&worker, "");
    save(&worker).await;
    assert_eq!(worker.reaches(Lifecycle::Shutoff).await.reason, "saved");
    let outcome = worker.finish().await;
    assert!(outcome.success, "{}", outcome.message);
    assert_eq!(outcome.message, "saved");
}
