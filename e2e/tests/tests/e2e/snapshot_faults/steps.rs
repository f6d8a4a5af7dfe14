//! The operations of the rows, and their objects.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, storage::delete_vmis};
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use super::{
    LIMIT, MINUTES, VM, guest,
    rows::{End, Operation, Phase, Row, Victim},
};
use crate::data_volumes::{condition, look};

/// Name of the operation's object.
pub(super) const NAME: &str = "row";
/// The snapshot that is restored or cloned.
pub(super) const SOURCE: &str = "source";
/// The VM that a clone makes.
pub(super) const COPY: &str = "copy";

const SNAPSHOT: &str = "VirtualMachineSnapshot";
const RESTORE: &str = "VirtualMachineRestore";
const CLONE: &str = "VirtualMachineClone";
const CONTENT: &str = "VirtualMachineSnapshotContent";
const CLAIM: &str = "PersistentVolumeClaim";

/// Returns the kind of a row's object.
pub(super) fn kind(row: Row) -> &'static str {
    match row.operation() {
        Operation::Snapshot => SNAPSHOT,
        Operation::Restore { .. } => RESTORE,
        Operation::Clone => CLONE,
    }
}

/// Creates the object of a row.
pub(super) async fn begin(s: &Story, row: Row) -> Result<()> {
    let vm = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": VM});
    match row.operation() {
        Operation::Snapshot => begin_snapshot(s, NAME, row).await,
        Operation::Restore { in_place } => {
            let mut spec = json!({
                "target": vm, "virtualMachineSnapshotName": SOURCE, "targetReadinessPolicy": "WaitEventually",
            });
            if in_place {
                spec["volumeRestorePolicy"] = json!("InPlace");
            }
            create(s, "snapshot.kubevirt.io/v1beta1", RESTORE, NAME, spec).await
        }
        Operation::Clone => {
            let snapshot = json!({"apiGroup": "snapshot.kubevirt.io", "kind": SNAPSHOT, "name": SOURCE});
            let source = if row.later().is_some() { snapshot } else { vm };
            let target = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": COPY});
            create(s, "clone.kubevirt.io/v1beta1", CLONE, NAME, json!({"source": source, "target": target})).await
        }
    }
}

/// Creates a snapshot with the deadline of a row.
pub(super) async fn begin_snapshot(s: &Story, name: &str, row: Row) -> Result<()> {
    snapshot(s, name, row.deadline()).await
}

async fn snapshot(s: &Story, name: &str, deadline: &str) -> Result<()> {
    let source = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": VM});
    let spec = json!({"source": source, "failureDeadline": deadline});
    create(s, "snapshot.kubevirt.io/v1beta1", SNAPSHOT, name, spec).await
}

/// Applies an object. virt-api notices objects that it refers to with a delay.
async fn create(s: &Story, version: &str, kind: &str, name: &str, spec: Value) -> Result<()> {
    let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec});
    s.apply_when_accepted(&object.to_string()).await
}

/// Takes a snapshot of the VM.
pub(super) async fn take(s: &Story, name: &str) -> Result<()> {
    snapshot(s, name, "5m").await?;
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    s.wait(SNAPSHOT, name, "be ready", MINUTES, is_ready).await.map(drop)
}

/// Returns the object of a row, unless it is gone.
pub(super) async fn state(s: &Story, row: Row) -> Result<Option<Value>> {
    Ok(s.api(kind(row)).get_opt(NAME).await?.map(serde_json::to_value).transpose()?)
}

/// Returns true if the operation has succeeded.
pub(super) fn is_done(row: Row, state: &Value) -> bool {
    let status = &state["status"];
    match row.operation() {
        Operation::Snapshot => status["readyToUse"] == true,
        Operation::Restore { .. } => status["complete"] == true,
        Operation::Clone => status["phase"] == "Succeeded",
    }
}

/// Returns true if the operation has ended.
pub(super) fn is_final(row: Row, state: &Value) -> bool {
    let has_failed = condition(state, "Failure")["status"] == "True" || state["status"]["phase"] == "Failed";
    is_done(row, state) || has_failed
}

pub(super) async fn wait_final(s: &Story, row: Row) -> Result<Value> {
    s.wait(kind(row), NAME, "end", LIMIT, |state| is_final(row, state)).await
}

/// Waits until the operation is held in its phase.
pub(super) async fn wait_held(s: &Story, phase: Phase) -> Result<()> {
    let shows = |text: &'static str| move |object: &Value| object["status"]["conditions"].to_string().contains(text);
    match phase {
        Phase::Waiting => s.wait(SNAPSHOT, NAME, "name the holder", MINUTES, shows("former")).await.map(drop),
        Phase::Running => {
            s.wait(RESTORE, NAME, "wait for the guest", MINUTES, shows("to be powered off")).await.map(drop)
        }
        Phase::Freezing => wait_asked(s).await,
        Phase::Frozen | Phase::CloneTaking => wait_frozen(s).await,
        Phase::Making | Phase::Replacing | Phase::CloneMaking => wait_pending(s).await.map(drop),
    }
}

/// Waits until the guest agent is asked for a freeze.
async fn wait_asked(s: &Story) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    while !guest::is_asked(s).await? {
        ensure!(Instant::now() < deadline, "the guest agent is not asked for a freeze");
    }
    Ok(())
}

/// Waits until the guest is frozen, and its volume snapshot exists and is not taken.
pub(super) async fn wait_frozen(s: &Story) -> Result<()> {
    s.wait("vmi", VM, "be frozen", MINUTES, |vmi| vmi["status"]["fsFreezeStatus"] == "frozen").await?;
    let deadline = Instant::now() + MINUTES;
    loop {
        let snapshots = s.list("VolumeSnapshot", "").await?;
        let open = snapshots.iter().filter(|snapshot| snapshot["status"]["creationTime"].is_null());
        if open.count() > 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no volume snapshot is held: {snapshots:?}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Waits until the claim of a restore waits for its volume, and returns its name.
async fn wait_pending(s: &Story) -> Result<String> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let claims = s.list(CLAIM, "").await?;
        // Not that which holds a volume snapshot for a moment.
        let is_restored = |name: &&str| !name.starts_with("hold-");
        let mut pending = claims.iter().filter(|claim| claim["status"]["phase"] == "Pending");
        if let Some(name) = pending.find_map(|claim| claim["metadata"]["name"].as_str().filter(is_restored)) {
            return Ok(name.to_owned());
        }
        ensure!(Instant::now() < deadline, "no claim waits for its volume: {claims:?}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Returns the name of the claim that a row is about: that of the restore, or that of the VM.
pub(super) async fn claim(s: &Story, row: Row) -> Result<String> {
    match row.operation() {
        Operation::Snapshot => Ok(format!("{VM}-root")),
        _ => wait_pending(s).await,
    }
}

/// Waits until the guest is thawed.
pub(super) async fn wait_thawed(s: &Story) -> Result<()> {
    let is_thawed = |vmi: &Value| vmi["status"]["fsFreezeStatus"] != "frozen";
    s.wait("vmi", VM, "be thawed", MINUTES, is_thawed).await.map(drop)
}

/// Waits until no operation holds the VM.
pub(super) async fn wait_free(s: &Story) -> Result<()> {
    let is_free = |vm: &Value| {
        let status = &vm["status"];
        let fields = ["operation", "snapshotInProgress", "restoreInProgress"];
        let finalizers = vm["metadata"]["finalizers"].to_string();
        fields.iter().all(|field| status[field].is_null()) && !finalizers.contains("snapshot-source-protection")
    };
    s.wait("vm", VM, "be free", MINUTES, is_free).await.map(drop)
}

/// Stops the VM. A restore that has begun meanwhile keeps it from being changed until it is complete.
pub(super) async fn stop(s: &Story) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    while let Err(error) = s.virt(&["stop", VM]).await {
        if s.get("vm", VM).await?["spec"]["runStrategy"] == "Halted" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it is not stopped: {error:#}");
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Starts a VM unless it is started, and waits until it runs.
pub(super) async fn start(s: &Story, vm: &str) -> Result<()> {
    if s.get("vm", vm).await?["spec"]["runStrategy"] == "Halted" {
        s.virt(&["start", vm]).await?;
    }
    s.wait("vmi", vm, "run", MINUTES, |vmi| vmi["status"]["phase"] == "Running").await.map(drop)
}

/// Returns the number in the volume snapshot of the row's snapshot, by a claim that is made from it.
pub(super) async fn number_of_snapshot(s: &Story) -> Result<u64> {
    let content = s.get(SNAPSHOT, NAME).await?["status"]["virtualMachineSnapshotContentName"].clone();
    let content = s.get(CONTENT, content.as_str().context("a snapshot without content")?).await?;
    let backup = &content["spec"]["volumeBackups"][0];
    let of = s.get(CLAIM, &format!("{VM}-root")).await?["spec"].clone();
    let claim = json!({
        "apiVersion": "v1", "kind": CLAIM, "metadata": {"name": "taken"},
        "spec": {
            "storageClassName": of["storageClassName"], "accessModes": of["accessModes"],
            "volumeMode": of["volumeMode"], "resources": of["resources"],
            "dataSource": {
                "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": backup["volumeSnapshotName"],
            },
        },
    });
    s.apply(&claim.to_string()).await?;
    s.wait(CLAIM, "taken", "be bound", MINUTES, |claim| claim["status"]["phase"] == "Bound").await?;
    let seen = look(s, &["taken"], "head -c 16 /dev/taken | head -n 1 | tr -d '\\000'").await?;
    s.delete(CLAIM, "taken").await?;
    seen.trim().parse().with_context(|| format!("the volume snapshot has {seen:?}"))
}

/// Returns true if the row's snapshot was taken while the guest was frozen.
pub(super) async fn was_frozen(s: &Story, row: Row) -> Result<bool> {
    if row.operation() != Operation::Snapshot {
        return Ok(false);
    }
    let indications = s.get(SNAPSHOT, NAME).await?["status"]["indications"].to_string();
    Ok(indications.contains("GuestAgent") && !indications.contains("Quiesce") && !indications.contains("NoGuestAgent"))
}

/// Waits until nothing is left of an operation that has not succeeded.
pub(super) async fn wait_undone(s: &Story, row: Row) -> Result<()> {
    let kept = usize::from(s.api(SNAPSHOT).get_opt(SOURCE).await?.is_some());
    if row == Row::Kill(Phase::Waiting, Victim::Object) {
        // The former snapshot is taken nevertheless.
        return Ok(());
    }
    wait_count(s, CONTENT, kept).await?;
    wait_count(s, "VolumeSnapshot", kept).await?;
    wait_count(s, CLAIM, 1).await?;
    wait_count(s, "vm", 1).await?;
    let ends = usize::from(row.end() != End::Gone);
    wait_count(s, RESTORE, if kind(row) == RESTORE { ends } else { 0 }).await
}

/// Waits until there are so many objects of a kind.
async fn wait_count(s: &Story, kind: &str, count: usize) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let found = s.list(kind, "").await?;
        if found.len() == count {
            return Ok(());
        }
        let shown: Vec<String> =
            found.iter().map(|object| format!("{} {}", object["metadata"], object["status"])).collect();
        ensure!(Instant::now() < deadline, "{} of {kind} instead of {count}: {shown:?}", found.len());
        sleep(Duration::from_millis(250)).await;
    }
}

/// Deletes everything of a row as a user does, and waits until nothing is left.
pub(super) async fn remove_all(s: &Story) -> Result<()> {
    for kind in [CLONE, RESTORE, SNAPSHOT] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            match s.api(kind).delete(name, &DeleteParams::background()).await {
                // Those of a clone go with it.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                outcome => drop(outcome.with_context(|| format!("delete {kind} {name}"))?),
            }
        }
        wait_count(s, kind, 0).await?;
    }
    delete_vmis(s).await?;
    for kind in [CONTENT, "VolumeSnapshot", "DataVolume", CLAIM, "Pod"] {
        wait_count(s, kind, 0).await?;
    }
    Ok(())
}
