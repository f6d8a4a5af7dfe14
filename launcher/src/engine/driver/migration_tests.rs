//! Migrations between two pods over fake hypervisors, with their channels.

use std::{path::PathBuf, sync::Arc, time::Duration};

use protocol::{
    MigrateRequest, MigrationReport, MigrationStep, VmiOptions,
    channels::{AWAIT, CONNECTED, Channel},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::UnixStream,
    task::AbortHandle,
};

use super::tests::{TestPod, Worker};
use crate::{
    domain::unsupported::Unsupported,
    engine::model::{Action, Request, RequestError, Wanted},
    hypervisor::{HypervisorError, Progress},
    migration, socket,
};

/// Serves the migration socket of a worker.
fn serve(worker: &Worker) -> PathBuf {
    let path = worker.engine.paths.migration_socket();
    let listener = socket::listen(&path).unwrap();
    tokio::spawn(migration::serve(listener, worker.engine.clone()));
    path
}

/// Relays channels as the virt-handlers of both nodes do.
fn relay(source: PathBuf, target: PathBuf) -> AbortHandle {
    let relay = async move {
        loop {
            let Ok(mut one) = UnixStream::connect(&source).await else { return };
            one.write_all(&[AWAIT]).await.unwrap();
            let Ok(channel) = one.read_u8().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let mut other = UnixStream::connect(&target).await.unwrap();
            other.write_all(&[channel]).await.unwrap();
            tokio::spawn(async move {
                if other.read_u8().await.is_ok_and(|answer| answer == CONNECTED) {
                    let _ = copy_bidirectional(&mut one, &mut other).await;
                }
            });
        }
    };
    tokio::spawn(relay).abort_handle()
}

async fn prepare(worker: &Worker) -> Result<(), RequestError> {
    let object = json!({
        "metadata": {"name": "m", "namespace": "d", "uid": "u"},
        "spec": {"domain": {"memory": {"guest": "64Mi"}, "devices": {"autoattachSerialConsole": false}}},
    });
    let unsupported = Unsupported::find(&object);
    let vmi = serde_json::from_value(object).unwrap();
    let wanted = Arc::new(Wanted { vmi, unsupported, options: VmiOptions::default() });
    worker.engine.ask(Request::PrepareMigration { migration: "a".into(), wanted }).await.map(drop)
}

async fn migrate(worker: &Worker, name: &str) -> Result<(), RequestError> {
    let request = MigrateRequest { migration: name.into(), ..MigrateRequest::default() };
    worker.engine.ask(Request::Migrate(Arc::new(request))).await.map(drop)
}

async fn reaches(worker: &Worker, step: MigrationStep) -> MigrationReport {
    let mut state = worker.engine.watch();
    let reached = state.wait_for(|state| state.migration.as_ref().is_some_and(|report| report.step() == step));
    let state = tokio::time::timeout(Duration::from_secs(10), reached).await.unwrap().unwrap().clone();
    state.migration.unwrap()
}

#[tokio::test]
async fn a_domain_moves_between_two_launchers() {
    let (one, two) = (TestPod::new("move-source"), TestPod::new("move-target"));
    one.fake.set_target(&two.fake);
    let (source, target) = (one.running().await, two.worker().await);
    prepare(&target).await.unwrap();
    reaches(&target, MigrationStep::Prepared).await;
    let relayed = relay(serve(&source), serve(&target));
    one.fake.set_progress(Some(Progress { total: 10, remaining: 5, ..Progress::default() }));
    one.fake.hold("migrate");
    migrate(&source, "a").await.unwrap();
    let mut state = source.engine.watch();
    state.wait_for(|state| state.migration.as_ref().is_some_and(|report| report.total == 10)).await.unwrap();
    assert!(source.engine.paths.migration_channel(Channel::Memory).exists());
    one.fake.release("migrate");
    reaches(&source, MigrationStep::Moved).await;
    reaches(&target, MigrationStep::Moved).await;
    assert_eq!(target.engine.watch().borrow().lifecycle(), protocol::Lifecycle::Running);
    assert!(two.fake.take_calls().contains(&"resume".to_owned()));
    assert!(!two.fake.take_calls().contains(&"define".to_owned()));
    // From now on the target changes it.
    assert_eq!(target.sync(json!({})).await, Ok(false));
    let outcome = source.finish().await;
    assert!(outcome.success && outcome.message == "migrated", "{outcome:?}");
    // A worker that is restarted there keeps it, and one that is restarted here knows that it has gone.
    target.outcome.abort();
    let again = two.worker().await;
    reaches(&again, MigrationStep::Moved).await;
    assert_eq!(again.reaches(protocol::Lifecycle::Running).await.reason, "unpaused");
    let restarted = one.worker_with(false);
    assert_eq!(restarted.reaches(protocol::Lifecycle::Shutoff).await.reason, "migrated");
    assert!(restarted.finish().await.success);
    relayed.abort();
}

#[tokio::test]
async fn a_restarted_source_releases_the_guest() {
    let (one, two) = (TestPod::new("restart-source"), TestPod::new("restart-target"));
    one.fake.set_target(&two.fake);
    let (source, target) = (one.running().await, two.worker().await);
    prepare(&target).await.unwrap();
    // Nobody relays channels, and the worker ends before the release.
    migrate(&source, "a").await.unwrap();
    reaches(&source, MigrationStep::Releasing).await;
    assert_eq!(target.engine.watch().borrow().lifecycle(), protocol::Lifecycle::Paused);
    source.outcome.abort();
    let restarted = one.worker().await;
    let relayed = relay(serve(&restarted), serve(&target));
    reaches(&restarted, MigrationStep::Moved).await;
    assert_eq!(target.engine.watch().borrow().lifecycle(), protocol::Lifecycle::Running);
    relayed.abort();
}

#[tokio::test]
async fn a_failed_migration_leaves_the_guest_here() {
    let pod = TestPod::new("move-fails");
    let source = pod.running().await;
    pod.fake.fail("migrate", HypervisorError::Libvirt { code: 1, message: "broken".into() });
    migrate(&source, "a").await.unwrap();
    let report = reaches(&source, MigrationStep::NotMoved).await;
    let failure = "Live migration failed error encountered during MigrateToURI3 libvirt api call: broken";
    assert_eq!((report.failure.as_str(), report.aborted), (failure, false));
    assert_eq!(source.sync(json!({})).await, Ok(false));
    migrate(&source, "a").await.unwrap();
    assert_eq!(pod.fake.take_calls().iter().filter(|call| *call == "migrate").count(), 1);
    source.engine.ask(Request::Act(Action::Pause)).await.unwrap();
    source.outcome.abort();
    // The worker that follows knows its result.
    let restarted = pod.worker().await;
    assert_eq!(reaches(&restarted, MigrationStep::NotMoved).await.failure, failure);
    migrate(&restarted, "a").await.unwrap();
    assert!(!pod.fake.take_calls().contains(&"migrate".to_owned()));
}
