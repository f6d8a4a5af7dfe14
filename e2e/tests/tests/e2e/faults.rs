//! Recovery from failures of components.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_alone};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    kills::{Ends, Faults, GUEST, Holder, Phase, Process, Row, Victim, all, run_at, uid},
    manifests,
    moves::{MINUTES, arrived, begin, has_ended, slow, two_nodes, with_policy},
    post_copy::{busy, goes_on},
    virt_handlers,
};

type Pods = Api<k8s_openapi::api::core::v1::Pod>;

#[test]
fn vmi_runs_while_virt_handler_is_replaced() {
    story_alone("handler", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        let before = s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        console.run("echo kept > /tmp/mark").await?;

        let agents: Pods = Api::namespaced(s.client.clone(), "kubevirt");
        let labels = ListParams::default().labels("kubevirt.io=virt-handler");
        for pod in agents.list(&labels).await? {
            agents.delete(&pod.metadata.name.unwrap_or_default(), &DeleteParams::default().grace_period(0)).await?;
        }
        let end = console.wait_end(TIMEOUT).await?;
        ensure!(!end.status.success(), "a console without virt-handler must end with an error");

        let mut console = s.reopen_console("box", "root", "story").await?;
        let (mark, _) = console.run("cat /tmp/mark").await?;
        ensure!(mark.contains("kept"), "the guest is another one: {mark:?}");
        console.leave().await?;
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        // The new virt-handler manages the VMI.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", TIMEOUT).await
    });
}

#[test]
fn virt_handlers_wait_for_a_migration_before_they_stop() {
    story_alone("handler-waits", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let witness = busy(s).await?;
        with_policy(s, slow(25, json!({"allowWorkloadDisruption": true})), async |_| {
            let before = s.get("vmi", GUEST).await?;
            let migration = begin(s, GUEST).await?;
            let runs = |vmim: &Value| vmim["status"]["phase"] == "Running" || has_ended(vmim);
            s.wait("vmim", &migration, "be Running", MINUTES, runs).await?;
            let state = s.get("vmi", GUEST).await?["status"]["migrationState"].clone();
            let ends = [state["sourceNode"].as_str(), state["targetNode"].as_str()];
            let mut stopped = s.pods_of("virt-handler").await?;
            stopped.retain(|pod| ends.contains(&pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref())));
            ensure!(stopped.len() == 2, "virt-handlers of {state}: {}", stopped.len());
            let agents: Pods = Api::namespaced(s.client.clone(), "kubevirt");
            for pod in &stopped {
                agents.delete(pod.metadata.name.as_deref().unwrap_or_default(), &DeleteParams::default()).await?;
            }
            let mut rounds = 0;
            while !has_ended(&s.get("vmim", &migration).await?) {
                let live = s.pods_of("virt-handler").await?;
                let missing = stopped.iter().filter(|pod| live.iter().all(|one| one.metadata.uid != pod.metadata.uid));
                let missing = missing.count();
                // The migration can end between the two answers.
                ensure!(
                    missing == 0 || has_ended(&s.get("vmim", &migration).await?),
                    "{missing} stopped before the end"
                );
                rounds += 1;
                sleep(Duration::from_secs(1)).await;
            }
            ensure!(rounds > 3, "the migration ended too early to show anything");
            arrived(s, &before, &migration).await?;
            s.components_are_ready().await
        })
        .await?;
        goes_on(s, &witness).await.map(drop)
    });
}

#[test]
fn killed_qemu_fails_the_vmi_and_run_strategy_always_restarts_it() {
    story("qemu", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        let first = s.wait_running("box").await?;
        let pod = s.launcher_pod("box").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        s.kill_in_launcher(&pod, "qemu-system-x86").await?;
        let uid = first["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", 2 * TIMEOUT, |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;
        Ok(())
    });
}

const PHASES: &[Phase<()>] = &[Phase::new("Running", Holder::Nothing, (), |vmi| vmi["status"]["phase"] == "Running")];

#[test]
fn guest_runs_on_when_libvirtd_and_the_worker_are_killed() {
    story("launcher", async |s| {
        let (node, hostname) = s.one_node().await?;
        s.apply(&manifests::kernel_vmi_on(&hostname, GUEST)).await?;
        s.wait_running(GUEST).await?;
        let victims = [Process::Libvirtd, Process::Worker].map(Victim::Source);
        run_at(s, &node, all(PHASES, &victims), &mut Nothing).await?;
        s.delete("vmi", GUEST).await?;
        s.wait_gone("vmi", GUEST, TIMEOUT).await
    });
}

/// Nothing changes but for the fault.
struct Nothing;

impl Faults for Nothing {
    type Change = ();

    async fn change(&mut self, _: &Story, (): ()) -> Result<()> {
        Ok(())
    }

    /// Checks that VMI and pod have not noticed, and that actions have effect.
    async fn end(&mut self, ends: &Ends<'_>, _: Row<()>, former: &Value) -> Result<()> {
        let s = ends.story;
        virt_handlers::serves(s, GUEST).await?;
        s.virt(&["vnc", GUEST, "--screenshot", "/dev/null"]).await?;
        let now = s.get("vmi", GUEST).await?;
        ensure!(uid(&now)? == uid(former)?, "the VMI was recreated");
        let phases = |vmi: &Value| vmi["status"]["phaseTransitionTimestamps"].clone();
        ensure!(phases(&now) == phases(former), "the VMI has left its phase: {}", phases(&now));
        ensure!(now["status"]["phase"] == "Running", "the VMI is {}", now["status"]["phase"]);
        let pod = s.launcher_pod(GUEST).await?;
        ensure!(uid(&pod)? == ends.pod, "the VMI has another pod");
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == 0, "the launcher's container was restarted {restarts} times");
        Ok(())
    }
}

#[test]
fn another_controller_leads_within_fifteen_seconds_of_the_last_renewal_of_a_killed_leader() {
    story_alone("leader", async |s| {
        let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
        let mut last = changed(&leases, |lease| !holder(lease).is_empty()).await?;
        let leader = holder(&last).to_owned();
        // The last renewal is seen although the next leader can come before the kill has returned.
        let followed = async {
            loop {
                let next = changed(&leases, |next| next.spec != last.spec).await?;
                // Killed, the leader does not release its lease.
                ensure!(!holder(&next).is_empty(), "{leader} has released its lease: {next:?}");
                if holder(&next) != leader {
                    return anyhow::Ok(next);
                }
                last = next;
            }
        };
        let ((), next) = tokio::try_join!(s.kill_installed(&leader, "virt-controller"), followed)?;
        // Both times are those that the replicas wrote.
        let renewed = last.spec.and_then(|spec| spec.renew_time).context("a lease without renewal")?;
        let taken = next.spec.clone().and_then(|spec| spec.acquire_time).context("a lease that was not acquired")?;
        let pause = taken.0.duration_since(renewed.0);
        eprintln!("{} leads {pause:#} after the last renewal of {leader}", holder(&next));
        ensure!(pause.as_secs() < 15, "the next leader has taken the lease {pause:#} after its last renewal");

        // The new leader creates the VMI.
        s.apply(&manifests::kernel_vmi("later")).await?;
        s.wait_running("later").await?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let deployment = serde_json::to_value(s.installation_api("Deployment").get("virt-controller").await?)?;
            if deployment["status"]["readyReplicas"] == deployment["spec"]["replicas"] {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the killed replica was not replaced");
            sleep(Duration::from_millis(250)).await;
        }
    });
}

/// Name of virt-controller's Lease.
const LEASE: &str = "virt-controller";

/// Waits until this is true for the lease.
async fn changed(leases: &Api<Lease>, done: impl Fn(&Lease) -> bool) -> Result<Lease> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let lease = leases.get(LEASE).await?;
        if done(&lease) {
            return Ok(lease);
        }
        ensure!(Instant::now() < deadline, "the lease does not change: {:?}", lease.spec);
        sleep(Duration::from_millis(250)).await;
    }
}

fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}
