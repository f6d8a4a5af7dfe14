//! A live migration between two nodes with the same API server.

use protocol::{Lifecycle, MigrationStep};

use super::*;

const TARGET: &str = "n2";
const TARGET_POD: &str = "0b2c7a9e-target";

/// Both ends of a migration.
struct Move {
    source: Stage,
    target: Stage,
}

impl Move {
    /// Returns a running VMI on one node, and a launcher on the other one.
    async fn new() -> Self {
        let source = Stage::running().await;
        let target = Stage::on(TARGET, TARGET_POD, source.records.clone());
        Self::between(source, target)
    }

    /// Hands the VMI of a node over to another one.
    fn between(source: Stage, target: Stage) -> Self {
        target.host.serve(&target.launcher);
        let (records, ends) = (source.records.clone(), [(NODE, source.vmis.clone()), (TARGET, target.vmis.clone())]);
        let mut changes = records.changed.subscribe();
        tokio::spawn(async move {
            // The watches of both nodes, by label.
            while changes.changed().await.is_ok() {
                let vmi = Arc::new(records.get("m"));
                for (node, vmis) in &ends {
                    let names =
                        |label: &str| vmi.metadata.labels.as_ref().unwrap().get(label).is_some_and(|v| v == node);
                    if names("kubevirt.io/nodeName") || names("kubevirt.io/migrationTargetNodeName") {
                        vmis.apply(vmi.clone());
                    } else {
                        vmis.remove("ns", "m");
                    }
                }
            }
        });
        let both = Self { source, target };
        both.change(|vmi| {
            vmi["metadata"]["labels"]["kubevirt.io/migrationTargetNodeName"] = json!(TARGET);
            vmi["status"]["evacuationNodeName"] = json!(NODE);
            vmi["status"]["activePods"] = json!({POD: NODE, TARGET_POD: TARGET});
            vmi["status"]["migrationState"] =
                json!({"migrationUid": "m1", "sourceNode": NODE, "targetNode": TARGET, "targetPod": "launcher-2"});
        });
        both
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        self.source.change(change);
        self.source.records.changed.send_modify(|count| *count += 1);
    }

    async fn until(&self, what: &str, holds: impl Fn(&VirtualMachineInstance) -> bool) -> VirtualMachineInstance {
        self.source.records.until("m", what, holds).await
    }

    async fn begun(&self) {
        self.source.until_called("migrate m1").await;
        self.until("start", |vmi| state(vmi).start_timestamp.is_some()).await;
    }
}

fn state(vmi: &VirtualMachineInstance) -> &api::vmi::migration::VirtualMachineInstanceMigrationState {
    vmi.status.as_ref().unwrap().migration_state.as_ref().unwrap()
}

fn label<'a>(vmi: &'a VirtualMachineInstance, name: &str) -> Option<&'a str> {
    vmi.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmi_moves_to_another_node_and_its_old_launcher_ends() {
    let both = Move::new().await;
    both.target.until_called("prepare m1 nics=1").await;
    let ready = both.until("address", |vmi| state(vmi).target_node_address.is_some()).await;
    assert_eq!(state(&ready).target_direct_migration_node_ports, [("8188".to_owned(), 0)].into());
    both.begun().await;
    both.source.launcher.report(|state| state.migration.as_mut().unwrap().total = 100);
    both.until("progress", |vmi| {
        vmi.metadata.annotations.as_ref().is_some_and(|known| known.contains_key("ferrovirt.io/migration-progress"))
    })
    .await;
    both.target.launcher.move_("m1", MigrationStep::Copying);
    both.target.launcher.become_(Lifecycle::Paused, "migration");
    both.until("arrival", |vmi| state(vmi).target_node_domain_detected).await;
    both.source.launcher.move_("m1", MigrationStep::Releasing);
    both.source.launcher.become_(Lifecycle::Paused, "migration");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(both.source.records.get("m").phase(), &Phase::Running, "the guest has not ended");
    both.target.launcher.report(|state| state.nics = vec!["default".to_owned()]);
    both.target.launcher.move_("m1", MigrationStep::Moved);
    both.target.launcher.become_(Lifecycle::Running, "migrated");
    both.source.launcher.move_("m1", MigrationStep::Moved);
    both.source.launcher.become_(Lifecycle::Shutoff, "migrated");
    let moved = both.until("ownership", |vmi| label(vmi, "kubevirt.io/nodeName") == Some(TARGET)).await;
    let status = moved.status.as_ref().unwrap();
    assert_eq!((status.node_name.as_deref(), status.evacuation_node_name.as_ref()), (Some(TARGET), None));
    assert!(!moved.metadata.annotations.unwrap_or_default().contains_key("ferrovirt.io/migration-progress"));
    both.source.until_called("finish").await;
    both.source.until_left().await;
    both.target.until_called("sync m nics=1").await;
    let completed = both.until("completion", |vmi| state(vmi).completed).await;
    assert_eq!(label(&completed, "kubevirt.io/migrationTargetNodeName"), None);
    assert_eq!((completed.phase(), state(&completed).failed), (&Phase::Running, false));
    let calls = both.target.launcher.calls();
    assert!(!calls.iter().any(|call| call == "kill" || call == "finish"), "{calls:?}");
    assert!(!both.source.launcher.calls().contains(&"kill".to_owned()));
    for reason in ["PreparingTarget", "Migrating", "Migrated"] {
        both.source.until_event(reason).await;
    }
    assert_eq!(both.source.host.routes.lock().unwrap().len(), 1);
    assert_eq!(both.target.host.routes.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_fails_leaves_the_vmi_and_ends_the_launcher_of_the_target() {
    let both = Move::new().await;
    both.begun().await;
    both.source.launcher.report(|state| state.migration.as_mut().unwrap().failure = "no route".into());
    both.source.launcher.move_("m1", MigrationStep::NotMoved);
    let failed = both.until("failure", |vmi| state(vmi).failed).await;
    assert_eq!(state(&failed).failure_reason.as_deref(), Some("no route"));
    both.target.until_called("finish").await;
    both.target.until_left().await;
    let over = both.until("label", |vmi| label(vmi, "kubevirt.io/migrationTargetNodeName").is_none()).await;
    assert_eq!((over.phase(), label(&over, "kubevirt.io/nodeName")), (&Phase::Running, Some(NODE)));
    // The domain follows its spec again.
    let synced = || both.source.launcher.calls().iter().filter(|call| call.starts_with("sync")).count();
    let before = synced();
    both.change(|vmi| vmi["metadata"]["labels"]["a"] = json!("b"));
    let wait = async {
        while synced() == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("no Sync after the migration");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_is_aborted_once() {
    let both = Move::new().await;
    both.begun().await;
    both.change(|vmi| vmi["status"]["migrationState"]["abortRequested"] = json!(true));
    let aborted = both.until("abort", |vmi| state(vmi).abort_status.is_some()).await;
    let shown = state(&aborted);
    assert_eq!((shown.abort_status.as_deref(), shown.completed), (Some("Succeeded"), true));
    assert_eq!(shown.failure_reason.as_deref(), Some("Live migration has been aborted"));
    assert_eq!(both.source.launcher.calls().iter().filter(|call| *call == "abort m1").count(), 1);
}

/// Replaces the virt-handler of a node.
async fn restart(stage: &mut Stage) {
    stage.stop.cancel();
    stage.vmis.stopped().await;
    stage.stop = CancellationToken::new();
    *stage.host.draining.lock().unwrap() = CancellationToken::new();
    stage.vmis = Stage::handler(&stage.host, &stage.records, &stage.stop);
    stage.vmis.apply(Arc::new(stage.records.get("m")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_virt_handler_that_is_about_to_stop_leaves_the_migration_to_the_next_one() {
    let source = Stage::running().await;
    source.host.draining().cancel();
    let target = Stage::on(TARGET, TARGET_POD, source.records.clone());
    let mut both = Move::between(source, target);
    both.until("address", |vmi| state(vmi).target_node_address.is_some()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!both.source.launcher.calls().contains(&"migrate m1".to_owned()));
    assert_eq!(both.source.host.routes.lock().unwrap().len(), 0);
    restart(&mut both.source).await;
    both.begun().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_virt_handler_continues_at_either_end() {
    let mut both = Move::new().await;
    both.begun().await;
    for stage in [&mut both.source, &mut both.target] {
        restart(stage).await;
    }
    both.target.launcher.move_("m1", MigrationStep::Copying);
    both.target.launcher.become_(Lifecycle::Paused, "migration");
    both.target.launcher.move_("m1", MigrationStep::Moved);
    both.target.launcher.become_(Lifecycle::Running, "migrated");
    both.until("ownership", |vmi| vmi.status.as_ref().unwrap().node_name.as_deref() == Some(TARGET)).await;
    let calls = both.source.launcher.calls();
    assert_eq!(calls.iter().filter(|call| *call == "migrate m1").count(), 1, "{calls:?}");
    for stage in [&both.source, &both.target] {
        let calls = stage.launcher.calls();
        assert_eq!(calls.iter().filter(|call| call.starts_with("hello")).count(), 2, "{calls:?}");
    }
}
