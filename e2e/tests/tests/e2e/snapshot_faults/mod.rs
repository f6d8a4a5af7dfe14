//! Faults during snapshots, restores and clones.
//!
//! ```text
//! VM counts ── (snapshot, stop, other class) ── operation ── held in its phase ── victim is killed ── released ── end
//! ```
//! In the end the operation has the result of its row, the guest was not frozen for longer than the limit, its data is there, and nothing
//! is left. `rows.rs` has the table, `guest.rs` the guest, `steps.rs` the operations.

mod guest;
mod rows;
mod steps;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, Story, signal, story_alone};
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use self::{
    guest::Numbers,
    rows::{End, Operation, Phase, Row, Trouble, Victim, table},
    steps::{COPY, NAME, SOURCE},
};
use crate::{data_volumes::with_driver, host, kills::silence, rows::chosen};

/// The VM of the rows.
const VM: &str = "box";
/// Time for a step, under emulation and while components are started again.
const MINUTES: Duration = Duration::from_secs(300);
/// Time for the end of an operation: the default deadline of a snapshot, and three minutes.
const LIMIT: Duration = Duration::from_secs(480);
/// Longest time between two writes of the guest in seconds: the limit of a freeze, and time for a thaw that is repeated.
const LONGEST_GAP: f64 = 90.0;
/// Seconds for which a lost node is silent. The control plane notices that after 50.
const LOST_SECONDS: u64 = 75;
/// A sample has every so many rows.
const SAMPLE: usize = 13;

#[test]
fn snapshots_restores_and_clones_end_well_whatever_fails() {
    story_alone("snapshot-faults", async |s| {
        with_driver(s, async |s| {
            for (number, row) in chosen(table(std::env::var_os("KILLS").is_some()), SAMPLE)?.into_iter().enumerate() {
                eprintln!("{row}");
                let begun = Instant::now();
                let class = format!("{}-{number}", s.namespace);
                make_class(s, &class, row.parameters()).await?;
                let outcome = run(s, row, &class).await.with_context(|| row.to_string());
                if let Err(error) = &outcome {
                    s.explain(error).await;
                }
                // Later stories need it, also after a failure.
                host::resume_snapshots()?;
                delete_class(s, &class).await?;
                outcome?;
                eprintln!("{row}: {:.0?}", begun.elapsed());
            }
            Ok(())
        })
        .await
    });
}

/// Makes a class of the test cluster's storage driver.
async fn make_class(s: &Story, name: &str, parameters: Value) -> Result<()> {
    make_class_of(s, name, "csi.test.ferrovirt.io", parameters).await
}

async fn make_class_of(s: &Story, name: &str, provisioner: &str, parameters: Value) -> Result<()> {
    let object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
        "provisioner": provisioner, "volumeBindingMode": "Immediate", "parameters": parameters,
    });
    let created = s.cluster_api("StorageClass").create(&PostParams::default(), &serde_json::from_value(object)?).await;
    created.map(drop).with_context(|| format!("create storage class {name}"))
}

/// Deletes a class, which may be gone.
async fn delete_class(s: &Story, name: &str) -> Result<()> {
    match s.cluster_api("StorageClass").delete(name, &DeleteParams::background()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        outcome => drop(outcome.with_context(|| format!("delete storage class {name}"))?),
    }
    // The provisioner notices that with a delay.
    sleep(Duration::from_secs(2)).await;
    Ok(())
}

/// The numbers that the disks of a row may have.
struct Known {
    /// Before the operation.
    count: u64,
    /// In the snapshot that is restored or cloned.
    source: u64,
}

async fn run(s: &Story, row: Row, class: &str) -> Result<()> {
    guest::start(s, class).await?;
    let known = prepare(s, row, class).await?;
    let agent_is_held = matches!(
        row,
        Row::Kill(Phase::Freezing, _)
            | Row::Trouble(Trouble::AgentLate | Trouble::AgentHangs | Trouble::AgentNeverAnswers)
    );
    if row.later().is_none() {
        guest::prepare(s, agent_is_held).await?;
    }
    let is_same_guest = match row {
        Row::Kill(phase, victim) => {
            disturbed(s, phase, victim, class).await?;
            victim != Victim::Qemu
        }
        Row::Trouble(trouble) => {
            troubled(s, row, trouble, class).await?;
            true
        }
    };
    ended(s, row).await?;
    steps::wait_free(s).await?;
    s.components_are_ready().await?;
    check_data(s, row, &known, is_same_guest).await?;
    steps::remove_all(s).await
}

/// Takes the snapshot that is restored or cloned, and puts another class in the place of the VM's.
async fn prepare(s: &Story, row: Row, class: &str) -> Result<Known> {
    let needs_source = matches!(row.operation(), Operation::Restore { .. }) || row.later().is_some();
    let mut known = Known { count: guest::look(s).await?.count, source: 0 };
    if needs_source {
        steps::take(s, SOURCE).await?;
        let numbers = guest::goes_on(s, known.count).await?;
        ensure!(numbers.at_freeze >= known.count, "the guest was not frozen: {numbers:?}, before {}", known.count);
        known = Known { count: numbers.count, source: numbers.at_freeze };
    }
    if let Some(faults) = row.later() {
        s.virt(&["stop", VM]).await?;
        s.wait_gone("vmi", VM, MINUTES).await?;
        delete_class(s, class).await?;
        match faults {
            Some(faults) => make_class(s, class, json!({"faults": faults})).await?,
            // A restore would not begin without the class.
            None => make_class_of(s, class, "nobody.test.ferrovirt.io", json!({})).await?,
        }
    }
    Ok(known)
}

/// Begins the operation, waits for its phase, kills the victim, checks that it did not miss, and lets the operation go on.
async fn disturbed(s: &Story, phase: Phase, victim: Victim, class: &str) -> Result<()> {
    let row = Row::Kill(phase, victim);
    if phase.stops_snapshots() {
        host::stop_snapshots()?;
    }
    if phase == Phase::Waiting {
        steps::begin_snapshot(s, "former", row).await?;
        steps::wait_frozen(s).await?;
    }
    steps::begin(s, row).await?;
    steps::wait_held(s, phase).await?;
    let node = match victim {
        Victim::Node => Some(s.enter_node(&s.node_of(VM).await?).await?),
        _ => None,
    };
    kill(s, row, victim, node.as_ref()).await?;
    if victim != Victim::Object {
        let state = steps::state(s, row).await?;
        eprintln!("{row}: {}", state.as_ref().map_or(&Value::Null, |state| &state["status"]));
        let may_end = phase == Phase::Freezing && victim == Victim::Qemu;
        ensure!(may_end || state.is_some_and(|state| !steps::is_final(row, &state)), "the kill missed");
    }
    if phase.stops_snapshots() {
        host::resume_snapshots()?;
    }
    match phase {
        Phase::Freezing if victim != Victim::Qemu => {
            // The console needs virt-handler.
            s.components_are_ready().await?;
            guest::release(s).await?;
        }
        Phase::Running if victim != Victim::Object => steps::stop(s).await?,
        Phase::Making | Phase::Replacing | Phase::CloneMaking => {
            delete_class(s, class).await?;
            make_class(s, class, json!({})).await?;
        }
        _ => {}
    }
    if let Some(node) = node {
        sleep(Duration::from_secs(LOST_SECONDS)).await;
        s.components_are_ready().await?;
        node.leave().await?;
    }
    Ok(())
}

async fn kill(s: &Story, row: Row, victim: Victim, node: Option<&Node>) -> Result<()> {
    let launcher = async |program: &str| host::kill(program, &s.launcher_pod(VM).await?);
    match victim {
        Victim::Leader => host::kill_leader(s).await,
        Victim::VirtHandler => host::kill_handlers(s).await,
        Victim::Worker => launcher("virt-launcher").await,
        Victim::Libvirtd => launcher("libvirtd").await,
        Victim::Qemu => launcher("qemu-system-x86_64").await,
        Victim::Node => {
            let node = node.context("no node")?;
            silence(node, LOST_SECONDS, &signal("virt-handler", "", "KILL"), "true").await
        }
        Victim::Object => s.delete(steps::kind(row), NAME).await,
        Victim::Claim => s.delete("PersistentVolumeClaim", &steps::claim(s, row).await?).await,
    }
}

/// Begins an operation in trouble, and ends the trouble if it would not end by itself.
async fn troubled(s: &Story, row: Row, trouble: Trouble, class: &str) -> Result<()> {
    if trouble == Trouble::ControllerAway {
        host::stop_snapshots()?;
    }
    steps::begin(s, row).await?;
    match trouble {
        Trouble::AgentLate => {
            steps::wait_held(s, Phase::Freezing).await?;
            sleep(Duration::from_secs(15)).await;
            guest::release(s).await
        }
        Trouble::AgentHangs | Trouble::AgentNeverAnswers => {
            steps::wait_final(s, row).await?;
            guest::release(s).await
        }
        Trouble::ControllerAway => {
            steps::wait_final(s, row).await?;
            host::resume_snapshots()
        }
        Trouble::RestoreFull | Trouble::RestoreRefused => {
            steps::wait_held(s, Phase::Making).await?;
            let told = s.wait_event(&steps::claim(s, row).await?, "ProvisioningFailed", MINUTES).await?;
            let cause = if trouble == Trouble::RestoreFull { "no space left" } else { "refused" };
            ensure!(told.contains(cause), "{told}");
            delete_class(s, class).await?;
            make_class(s, class, json!({})).await
        }
        _ => Ok(()),
    }
}

/// Waits for the end of the operation and checks its status. A failed one has left nothing.
async fn ended(s: &Story, row: Row) -> Result<()> {
    let failed = match row.end() {
        End::Gone => {
            s.wait_gone(steps::kind(row), NAME, MINUTES).await?;
            true
        }
        End::Failed(text) => {
            let state = steps::wait_final(s, row).await?;
            ensure!(!steps::is_done(row, &state), "it has succeeded: {}", state["status"]);
            ensure!(state["status"].to_string().contains(text), "no {text:?}: {}", state["status"]);
            true
        }
        End::Done => {
            let state = steps::wait_final(s, row).await?;
            ensure!(steps::is_done(row, &state), "it has failed: {}", state["status"]);
            check_indications(row, &state)?;
            false
        }
    };
    if failed { steps::wait_undone(s, row).await } else { Ok(()) }
}

/// Checks how a snapshot reports the guest.
fn check_indications(row: Row, state: &Value) -> Result<()> {
    let shown = state["status"]["indications"].to_string();
    let has = |name: &str| shown.contains(name);
    let is_right = match row {
        Row::Trouble(Trouble::AgentLate) => has("GuestAgent") && !has("Quiesce"),
        Row::Trouble(Trouble::AgentNeverAnswers) => has("QuiesceFailed"),
        Row::Trouble(Trouble::SnapshotSlow) => has("QuiesceTimeout"),
        _ => true,
    };
    ensure!(is_right, "indications: {shown}");
    Ok(())
}

/// Checks the guest and what was made of its disk.
async fn check_data(s: &Story, row: Row, known: &Known, is_same_guest: bool) -> Result<()> {
    let is_restored = matches!(row.operation(), Operation::Restore { .. }) && row.end() == End::Done;
    if is_restored || row == Row::Kill(Phase::Replacing, Victim::Object) {
        // A restore in place that is deleted has replaced the claim.
        steps::start(s, VM).await?;
        let number = guest::number(s, VM).await?;
        ensure!(number == known.source, "the restored disk has {number}, its snapshot {}", known.source);
        return Ok(());
    }
    let high = if row.later().is_some() || !is_same_guest {
        // A new guest does not count.
        steps::start(s, VM).await?;
        let number = guest::number(s, VM).await?;
        ensure!(number >= known.count, "the disk has {number}, and had {}", known.count);
        Numbers { count: number, at_freeze: 0, gap: 0.0 }
    } else {
        steps::wait_thawed(s).await?;
        let now = guest::look(s).await?;
        let now = guest::goes_on(s, now.count.max(known.count)).await?;
        eprintln!("{row}: {now:?}");
        ensure!(now.gap < LONGEST_GAP, "the guest wrote nothing for {} s", now.gap);
        now
    };
    if row.end() != End::Done {
        return Ok(());
    }
    let (low, copied) = match row.operation() {
        Operation::Clone => {
            steps::start(s, COPY).await?;
            (if row.later().is_some() { known.source } else { known.count }, guest::number(s, COPY).await?)
        }
        _ => (known.count, steps::number_of_snapshot(s).await?),
    };
    ensure!(low <= copied && copied <= high.count, "the copy has {copied}, the disk had {low} to {}", high.count);
    let is_frozen = steps::was_frozen(s, row).await? && is_same_guest && row.later().is_none();
    ensure!(!is_frozen || copied == high.at_freeze, "the copy has {copied}, and the guest was frozen at {high:?}");
    ensure!(row.later().is_none() || copied == known.source, "the copy has {copied}, its source {}", known.source);
    Ok(())
}
