//! Processes that are killed during a change of a running VMI.
//!
//! A row of a table of kills stops one process, so that the change stays in an observed phase, kills another and lets the first
//! continue. A kill that missed the phase is a failure. The guest is the witness: it is restarted if QEMU was killed, and else not.
//!
//! `make test` runs a sample of each table, `make test-long` all rows (`KILLS=all`). The sample is printed with its seed, and
//! `KILL_SEED` repeats it. `KILLS=3,8-11` runs the rows with these numbers.

use std::{
    fmt::Debug,
    ops::RangeInclusive,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Node, Story, TIMEOUT};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::live_resize::run;

/// Time for a step of a change, under emulation and while a process of Kubernetes starts again.
pub(crate) const MINUTES: Duration = Duration::from_secs(180);
/// The VMI of the rows.
pub(crate) const GUEST: &str = "guest";
/// A sample has every so many rows of a table.
const SAMPLE: usize = 5;

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    VirtHandler,
    Worker,
    Libvirtd,
    ControllerLeader,
    AttachmentPod,
    Kubelet,
    Qemu,
}

/// The process that is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    VirtHandler,
    Libvirtd,
}

impl Holder {
    /// Returns the program, and a part of its control group.
    fn program(self, launcher: &str) -> (&'static str, &str) {
        match self {
            Self::VirtHandler => ("virt-handler", ""),
            Self::Libvirtd => ("libvirtd", launcher),
        }
    }

    fn is(self, victim: Victim) -> bool {
        matches!((self, victim), (Self::VirtHandler, Victim::VirtHandler) | (Self::Libvirtd, Victim::Libvirtd))
    }
}

/// Returns each phase with each victim, or a sample of these rows.
pub(crate) fn table<D: Copy + Debug>(during: &[D], victims: &[Victim]) -> Result<Vec<(D, Victim)>> {
    let rows = during.iter().flat_map(|during| victims.iter().map(|victim| (*during, *victim)));
    sample(rows, SAMPLE)
}

/// Returns the rows, or a sample with every so many of them. `KILLS` may be `all`, or numbers and ranges (`3,8-11`) of rows.
pub(crate) fn sample<R: Debug>(rows: impl Iterator<Item = R>, every: usize) -> Result<Vec<R>> {
    if let Ok(kills) = std::env::var("KILLS") {
        let numbers = numbers(&kills)?;
        return Ok(rows.enumerate().filter(|(number, _)| numbers(number)).map(|(_, row)| row).collect());
    }
    let seed = match std::env::var("KILL_SEED") {
        Ok(seed) => seed.parse().with_context(|| format!("KILL_SEED is {seed:?}"))?,
        // Another sample each day.
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400,
    };
    // A step without a common divisor with the number of victims reaches each of them.
    let first = usize::try_from(seed)? % every;
    let sample: Vec<_> = rows.skip(first).step_by(every).collect();
    eprintln!("KILL_SEED={seed}: {sample:?}");
    Ok(sample)
}

/// Returns whether `KILLS` contains the number of a row.
fn numbers(kills: &str) -> Result<impl Fn(&usize) -> bool> {
    let range = |text: &str| -> Result<RangeInclusive<usize>> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Ok(first.parse()?..=last.parse()?)
    };
    let ranges: Result<Vec<_>> = match kills {
        "all" => Ok(vec![0..=usize::MAX]),
        _ => kills.split(',').map(range).collect(),
    };
    let ranges = ranges.with_context(|| format!("KILLS is {kills:?}"))?;
    Ok(move |number: &usize| ranges.iter().any(|range| range.contains(number)))
}

#[test]
fn rows_are_selected_by_numbers_and_ranges() -> Result<()> {
    let selected = |kills| Ok::<Vec<_>, anyhow::Error>((0..6).filter(numbers(kills)?).collect());
    anyhow::ensure!(selected("all")? == [0, 1, 2, 3, 4, 5] && selected("1,3-4,9")? == [1, 3, 4]);
    anyhow::ensure!(numbers("").is_err() && numbers("some").is_err());
    Ok(())
}

/// The rows of a table on one node.
pub(crate) struct Kills<'a> {
    pub(crate) story: &'a Story,
    pub(crate) node: &'a Node,
}

impl Kills<'_> {
    /// Runs the rows one after another, and lets a process continue that a failed row has stopped.
    pub(crate) async fn rows<D: Copy + Debug>(
        &self,
        table: &[(D, Victim)],
        mut row: impl AsyncFnMut(D, Victim) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for (during, victim) in table {
            let row = async {
                let boot = self.boot().await?;
                row(*during, *victim).await?;
                let is_restarted = self.boot().await? != boot;
                ensure!(is_restarted == (*victim == Victim::Qemu), "the guest was restarted: {is_restarted}");
                Ok(())
            };
            outcome = row.await.with_context(|| format!("{victim:?} killed during {during:?}"));
            if outcome.is_err() {
                break;
            }
        }
        let uid = launcher_uid(self.story).await.unwrap_or_default();
        for (program, cgroup) in [Holder::VirtHandler, Holder::Libvirtd].map(|holder| holder.program(&uid)) {
            self.node.run(&format!("{}; true", signal(program, cgroup, "CONT"))).await?;
        }
        outcome
    }

    async fn boot(&self) -> Result<String> {
        in_guest(self.story, "cat /proc/sys/kernel/random/boot_id").await
    }

    /// Stops a process, makes a change, waits for its phase, kills the victim and lets the stopped process continue.
    pub(crate) async fn during(
        &self,
        phase: &str,
        holder: Option<Holder>,
        victim: Victim,
        change: impl AsyncFnOnce() -> Result<()>,
        is_observed: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        let uid = launcher_uid(self.story).await?;
        let stopped = holder.map(|holder| holder.program(&uid));
        if let Some((program, cgroup)) = stopped {
            self.node.run(&signal(program, cgroup, "STOP")).await.with_context(|| format!("stop {program}"))?;
        }
        change().await?;
        self.story.wait("vmi", GUEST, &format!("be held in {phase}"), MINUTES, &is_observed).await?;
        self.kill(victim, &uid).await?;
        let is_held = is_observed(&self.story.get("vmi", GUEST).await?);
        // A killed process does not hold the change any more.
        let was_holder = holder.is_some_and(|holder| holder.is(victim));
        // Without its pod, a volume that the guest does not have falls back to an earlier phase. Without QEMU the VMI ends.
        let may_leave = was_holder || matches!(victim, Victim::AttachmentPod | Victim::Qemu);
        eprintln!("{phase}: killed {victim:?}, the change is {}", if is_held { "held" } else { "under way" });
        ensure!(is_held || may_leave, "the kill missed");
        if let Some((program, cgroup)) = stopped.filter(|_| !was_holder) {
            self.node.run(&signal(program, cgroup, "CONT")).await.with_context(|| format!("continue {program}"))?;
        }
        Ok(())
    }

    /// Kills a process, of the launcher pod with this UID where it is one of its own.
    async fn kill(&self, victim: Victim, launcher: &str) -> Result<()> {
        let (program, cgroup) = match victim {
            Victim::VirtHandler => ("virt-handler", ""),
            Victim::Worker => ("virt-launcher", launcher),
            Victim::Libvirtd => ("libvirtd", launcher),
            Victim::Qemu => ("qemu-system-x86_64", launcher),
            Victim::Kubelet => return kill_kubelet(self.node).await,
            Victim::ControllerLeader => return kill_leader(self.story).await,
            Victim::AttachmentPod => {
                let pods = attachment_pods(self.story).await?;
                let [pod] = pods.as_slice() else { bail!("attachment pods: {pods:?}") };
                self.story.api("Pod").delete(pod, &DeleteParams::default().grace_period(0)).await?;
                return self.story.wait_gone("Pod", pod, TIMEOUT).await;
            }
        };
        self.node.run(&signal(program, cgroup, "KILL")).await.map(drop).with_context(|| format!("kill {program}"))
    }

    /// Waits until the VM has started a new VMI after the end of the former one.
    pub(crate) async fn started_again(&self, former: &str) -> Result<()> {
        let is_new = |vmi: &Value| vmi["metadata"]["uid"] != former && vmi["status"]["phase"] == "Running";
        self.story.wait("vmi", GUEST, "be started again", MINUTES, is_new).await.map(drop)
    }
}

/// Kills the leading virt-controller.
pub(crate) async fn kill_leader(s: &Story) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
    let leader = leases.get("virt-controller").await?.spec.and_then(|spec| spec.holder_identity);
    s.kill_installed(&leader.context("no leader")?, "virt-controller").await
}

/// Kills kubelet and waits until another one runs on the node.
pub(crate) async fn kill_kubelet(node: &Node) -> Result<()> {
    const FIND: &str = "for p in /proc/[0-9]*; do [ \"$(cat $p/comm 2>/dev/null)\" = kubelet ] && echo $p; done; true";
    let before = node.run(FIND).await?;
    ensure!(before.lines().count() == 1, "kubelet on the node: {before:?}");
    // The command itself runs by kubelet.
    let kill = signal("kubelet", "", "KILL");
    node.run(&format!("( sleep 1; {kill} ) </dev/null >/dev/null 2>&1 &")).await.context("kill kubelet")?;
    let deadline = Instant::now() + MINUTES;
    loop {
        sleep(Duration::from_millis(500)).await;
        // The connection of a command may outlive kubelet.
        match timeout(Duration::from_secs(10), node.run(FIND)).await {
            Ok(Ok(now)) if !now.is_empty() && now != before => return Ok(()),
            outcome => ensure!(Instant::now() < deadline, "kubelet is not started again: {outcome:?}"),
        }
    }
}

/// Returns the UID of the VMI.
pub(crate) async fn vmi_uid(s: &Story) -> Result<String> {
    s.get("vmi", GUEST).await?["metadata"]["uid"].as_str().map(str::to_owned).context("VMI without UID")
}

/// Returns a script that sends a signal to the processes of a program whose cgroup contains `cgroup`. It fails without one.
pub(crate) fn signal(program: &str, cgroup: &str, signal: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "sent=1; for p in /proc/[0-9]*; do \
           if grep -qs -e '{cgroup}' $p/cgroup && [ \"$(cat $p/comm 2>/dev/null)\" = '{name}' ]; then \
             kill -{signal} ${{p#/proc/}} && sent=0; fi; \
         done; [ $sent = 0 ]"
    )
}

/// Returns the UID of the launcher pod of the VMI.
pub(crate) async fn launcher_uid(s: &Story) -> Result<String> {
    let pod = s.launcher_pod(GUEST).await?;
    pod["metadata"]["uid"].as_str().map(str::to_owned).context("pod without uid")
}

/// Returns the names of the attachment pods.
pub(crate) async fn attachment_pods(s: &Story) -> Result<Vec<String>> {
    let pods = s.api("Pod").list(&ListParams::default().labels("kubevirt.io=hotplug-disk")).await?;
    Ok(pods.items.into_iter().filter_map(|pod| pod.metadata.name).collect())
}

/// Runs a command that must succeed in the guest and returns its output.
pub(crate) async fn in_guest(s: &Story, command: &str) -> Result<String> {
    let mut console = s.reopen_console(GUEST, "root", "ferrovirt").await?;
    let output = run(&mut console, command).await?;
    console.leave().await?;
    Ok(output)
}
