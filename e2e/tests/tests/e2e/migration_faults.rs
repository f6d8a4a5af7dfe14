//! Processes that are killed while a VM migrates: see [`kills`](crate::kills).
//!
//! In the end one guest lives, at the node of the VMI, unless its own QEMU was killed: then the VM starts another. Nothing is left
//! behind. The guest writes to a claim that both nodes share and notices a second copy of itself.

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{
    Node, Story, TIMEOUT,
    storage::{Backing, Storage, delete_vmis, delete_vmis_after, on_host},
    story, story_alone,
};
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    kills::{GUEST, MINUTES, kill_kubelet, kill_leader, sample, signal},
    live_resize::{condition, run},
    moves::{alone, begin, console, ended, has_ended, two_nodes, vm, with_claims, with_policy},
    virt_handlers,
    witness::{Witness, write_alone, written},
};

/// A sample has every so many rows of the table.
const SAMPLE: usize = 23;

/// A busy host can be too late to stop what holds a migration in its phase. A row is repeated then.
const ATTEMPTS: usize = 6;

/// The phase in which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum During {
    /// A quota refuses the target pod.
    Pending,
    /// The target's node takes no new pods.
    Scheduling,
    /// libvirt's daemon of the target is stopped.
    PreparingTarget,
    /// The source's virt-handler is stopped.
    TargetReady,
    /// Data flows slowly.
    Running,
    /// The source's QEMU has ended.
    Switchover,
}

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    ControllerLeader,
    SourceHandler,
    TargetHandler,
    SourceWorker,
    TargetWorker,
    SourceLibvirtd,
    TargetLibvirtd,
    SourceQemu,
    TargetQemu,
    SourceKubelet,
    TargetKubelet,
    TargetPod,
}

const DURING: [During; 6] = [
    During::Pending,
    During::Scheduling,
    During::PreparingTarget,
    During::TargetReady,
    During::Running,
    During::Switchover,
];
const VICTIMS: [Victim; 12] = [
    Victim::ControllerLeader,
    Victim::SourceHandler,
    Victim::TargetHandler,
    Victim::SourceWorker,
    Victim::TargetWorker,
    Victim::SourceLibvirtd,
    Victim::TargetLibvirtd,
    Victim::SourceQemu,
    Victim::TargetQemu,
    Victim::SourceKubelet,
    Victim::TargetKubelet,
    Victim::TargetPod,
];

impl Victim {
    /// Returns true if the process exists in the phase. The pod is deleted in three phases.
    const fn exists(self, during: During) -> bool {
        match self {
            Self::TargetWorker | Self::TargetLibvirtd => !matches!(during, During::Pending | During::Scheduling),
            Self::SourceQemu => !matches!(during, During::Switchover),
            Self::TargetQemu => matches!(during, During::Running | During::Switchover),
            Self::TargetPod => matches!(during, During::Scheduling | During::PreparingTarget | During::Running),
            _ => true,
        }
    }

    /// Returns true if the guest itself is killed.
    const fn is_guest(self, during: During) -> bool {
        matches!((self, during), (Self::SourceQemu, _) | (Self::TargetQemu, During::Switchover))
    }

    /// Returns true if the migration cannot succeed.
    const fn is_fatal(self) -> bool {
        matches!(self, Self::SourceQemu | Self::TargetPod)
    }
}

fn rows() -> impl Iterator<Item = (During, Victim)> {
    let all = DURING.into_iter().flat_map(|during| VICTIMS.into_iter().map(move |victim| (during, victim)));
    all.filter(|(during, victim)| victim.exists(*during))
}

#[test]
fn table_has_sixty_rows() {
    assert_eq!(rows().count(), 60);
}

#[test]
fn one_guest_lives_whatever_is_killed_during_its_migration() {
    story_alone("migration-faults", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        let Some(storage) = Storage::make_for_many(s, "data", Backing::Directory).await? else { return Ok(()) };
        let result = all(s, &storage, &nodes).await;
        let gone = delete_vmis_after(s, &result).await;
        storage.remove(s).await?;
        result.and(gone)
    });
}

#[test]
fn migration_to_a_daemon_that_does_not_answer_ends() {
    story("migration-dead-peer", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        s.apply(&vm(GUEST, "Always")).await?;
        s.wait_running(GUEST).await?;
        let mut guest = console(s, GUEST).await?;
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;
        let before = s.get("vmi", GUEST).await?;
        let result = with_policy(s, json!({"bandwidthPerMigration": "2Mi"}), async |_| dead_peer(s).await).await;
        result?;
        let after = s.get("vmi", GUEST).await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(after["status"]["nodeName"] == before["status"]["nodeName"], "the VMI is elsewhere");
        alone(s, GUEST).await?;
        let mut guest = console(s, GUEST).await?;
        Witness::goes_on(&mut guest, &witness).await?;
        guest.leave().await?;
        delete_vmis(s).await
    });
}

/// Stops the target's libvirtd while data flows, without an end of its connections, and waits for the end of the migration.
async fn dead_peer(s: &Story) -> Result<()> {
    let migration = begin(s, GUEST).await?;
    let runs = |vmim: &Value| vmim["status"]["phase"] == "Running" || has_ended(vmim);
    let running = s.wait("vmim", &migration, "be running", MINUTES, runs).await?;
    ensure!(!has_ended(&running), "the stop missed: the migration is {}", running["status"]);
    let job = running["metadata"]["uid"].as_str().context("migration without UID")?;
    let pods = s.list("Pod", &format!("kubevirt.io/migrationJobUID={job}")).await?;
    let [pod] = pods.as_slice() else { bail!("{} target pods", pods.len()) };
    let node = s.enter_node(pod["spec"]["nodeName"].as_str().context("pod without node")?).await?;
    let stopped = node.run(&signal("libvirtd", &uid(pod)?, "STOP")).await;
    node.leave().await?;
    stopped.context("stop libvirtd")?;
    let migration = ended(s, &migration).await?;
    ensure!(migration["status"]["phase"] == "Failed", "{}", migration["status"]);
    let reason = migration["status"]["migrationState"]["failureReason"].as_str().unwrap_or_default().to_owned();
    // The keepalive of libvirt ends it, long before the limits of migrations do.
    ensure!(!reason.is_empty() && !reason.contains("has been aborted"), "reason {reason:?}: {}", migration["status"]);
    eprintln!("the migration failed: {reason}");
    Ok(())
}

async fn all(s: &Story, storage: &Storage, nodes: &[String; 2]) -> Result<()> {
    let image = format!("{0}/disk.img && chown 107:107 {0}/disk.img", storage.directory);
    on_host(s, &storage.node, &format!("truncate -s 8M {image}")).await?;
    s.apply(&with_claims(&vm(GUEST, "Always"), &["data"])).await?;
    s.wait_running(GUEST).await?;
    prepare(s).await?;
    with_policy(s, json!({"bandwidthPerMigration": "24Mi"}), async |_| {
        for (during, victim) in sample(rows(), SAMPLE)? {
            let row = Row { s, nodes, during, victim };
            let mut attempts = 0;
            while !row.run().await.with_context(|| format!("{victim:?} killed during {during:?}"))? {
                attempts += 1;
                ensure!(attempts < ATTEMPTS, "{during:?} was missed {attempts} times");
                eprintln!("{during:?}: missed, the row is repeated");
            }
        }
        Ok(())
    })
    .await
}

/// Starts the witnesses in a new guest.
pub(crate) async fn prepare(s: &Story) -> Result<()> {
    let mut guest = console(s, GUEST).await?;
    run(&mut guest, "modprobe -qa virtio_blk; true").await?;
    Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    guest.leave().await
}

struct Row<'s> {
    s: &'s Story,
    nodes: &'s [String; 2],
    during: During,
    victim: Victim,
}

/// Both ends of a migration.
struct Ends {
    source: Node,
    target: Node,
    target_name: String,
    source_pod: String,
    migration: String,
}

impl Row<'_> {
    /// Returns false if the phase was missed and nothing was killed.
    async fn run(&self) -> Result<bool> {
        let Self { s, nodes, .. } = self;
        let former = s.get("vmi", GUEST).await?;
        let source_name = s.node_of(GUEST).await?;
        let target_name = nodes.iter().find(|node| **node != source_name).context("no other node")?.clone();
        let source_pod = uid(&alone(s, GUEST).await?)?;
        let mut guest = console(s, GUEST).await?;
        let (witness, records) = (Witness::look(&mut guest).await?, written(&mut guest, 0).await?);
        guest.leave().await?;
        let (source, target) = (s.enter_node(&source_name).await?, s.enter_node(&target_name).await?);
        let mut ends = Ends { source, target, target_name, source_pod, migration: String::new() };
        let killed = self.killed(&mut ends).await;
        // Also after a failure.
        let released = self.release(&ends).await;
        let ended = async {
            let is_killed = killed?;
            released?;
            if is_killed {
                self.outcome(&ends, &former, &witness, records).await?;
            } else {
                // This cancels a migration that runs.
                s.delete("vmim", &ends.migration).await?;
                s.wait_gone("vmim", &ends.migration, MINUTES).await?;
                alone(s, GUEST).await?;
            }
            Ok(is_killed)
        };
        let outcome = ended.await;
        ends.source.leave().await?;
        ends.target.leave().await?;
        outcome
    }

    /// Begins a migration, waits for its phase and kills the victim. Returns false if the phase was missed.
    async fn killed(&self, ends: &mut Ends) -> Result<bool> {
        let s = self.s;
        match self.during {
            During::Pending => {
                s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: full}, spec: {hard: {pods: 1}}}")
                    .await?;
                let full = |quota: &Value| quota["status"]["used"]["pods"] == "1";
                s.wait("ResourceQuota", "full", "count the pod", TIMEOUT, full).await?;
            }
            During::Scheduling => drop(s.kubectl(&["cordon", &ends.target_name]).await?),
            During::PreparingTarget => drop(ends.target.run(STOP_DAEMON).await?),
            During::TargetReady => drop(ends.source.run(&signal("virt-handler", "", "STOP")).await?),
            During::Running | During::Switchover => {}
        }
        ends.migration = begin(s, GUEST).await?;
        let phase = format!("be in {:?}", self.during);
        let is_over = |vmim: &Value| self.is_reached(vmim) || self.is_past(vmim) || has_ended(vmim);
        let at = s.wait("vmim", &ends.migration, &phase, MINUTES, is_over).await?;
        if self.is_past(&at) {
            return Ok(false);
        }
        let mut is_killed = false;
        if self.during == During::Switchover {
            // On the node, since the moment is short.
            let qemu = living("qemu-system-x86_64", &ends.source_pod);
            let gone = format!("(for i in $(seq 9000); do [ -z \"$({qemu})\" ] && exit; usleep 10000; done; exit 1)");
            let program = match self.victim {
                Victim::SourceWorker => Some("virt-launcher"),
                Victim::SourceLibvirtd => Some("libvirtd"),
                _ => None,
            };
            // The launcher that the guest has left ends soon.
            let kill = program.map_or_else(String::new, |program| {
                format!(" && {{ {}; }} && echo killed; true", signal(program, &ends.source_pod, "KILL"))
            });
            let shown = ends.source.run(&format!("{gone}{kill}")).await.context("the source's QEMU does not end")?;
            is_killed = shown.contains("killed");
            if program.is_some() && !is_killed {
                return Ok(false);
            }
        }
        let at = s.get("vmim", &ends.migration).await?;
        ensure!(self.is_reached(&at), "the kill missed: the migration is {}", at["status"]);
        if !is_killed {
            self.kill(ends, &at).await?;
        }
        let (now, vmi) = (s.get("vmim", &ends.migration).await?, s.get("vmi", GUEST).await?);
        eprintln!(
            "{:?}: killed {:?}, the migration was {} and is {}, the VMI is at {}",
            self.during, self.victim, at["status"]["phase"], now["status"]["phase"], vmi["status"]["nodeName"]
        );
        Ok(true)
    }

    /// Returns true if the migration runs although it was to be held in an earlier phase.
    fn is_past(&self, migration: &Value) -> bool {
        let is_held = matches!(self.during, During::PreparingTarget | During::TargetReady);
        let phase = migration["status"]["phase"].as_str().unwrap_or_default();
        is_held && (phase == "Running" || (phase == "TargetReady" && self.during == During::PreparingTarget))
    }

    /// Returns true if the migration is in the phase.
    fn is_reached(&self, migration: &Value) -> bool {
        let phase = migration["status"]["phase"].as_str().unwrap_or_default();
        match self.during {
            During::Pending => phase == "Pending" && condition(migration, "migrationRejectedByResourceQuota").is_some(),
            During::Scheduling => phase == "Scheduling",
            During::PreparingTarget => phase == "PreparingTarget",
            During::TargetReady => phase == "TargetReady",
            During::Running => phase == "Running",
            During::Switchover => phase == "Running" || phase == "Succeeded",
        }
    }

    async fn kill(&self, ends: &Ends, migration: &Value) -> Result<()> {
        let s = self.s;
        let (node, program) = match self.victim {
            Victim::ControllerLeader => return kill_leader(s).await,
            Victim::SourceKubelet => return kill_kubelet(&ends.source).await,
            Victim::TargetKubelet => return kill_kubelet(&ends.target).await,
            Victim::TargetPod => {
                let pod = self.target_pod(migration).await?;
                let name = pod["metadata"]["name"].as_str().context("pod without name")?;
                s.api("Pod").delete(name, &DeleteParams::default().grace_period(0)).await?;
                return s.wait_gone("Pod", name, TIMEOUT).await;
            }
            Victim::SourceHandler | Victim::TargetHandler => {
                let node = if self.victim == Victim::SourceHandler { &ends.source } else { &ends.target };
                return node.run(&signal("virt-handler", "", "KILL")).await.map(drop).context("kill virt-handler");
            }
            Victim::SourceWorker => (&ends.source, "virt-launcher"),
            Victim::SourceLibvirtd => (&ends.source, "libvirtd"),
            Victim::SourceQemu => (&ends.source, "qemu-system-x86_64"),
            Victim::TargetWorker => (&ends.target, "virt-launcher"),
            Victim::TargetLibvirtd => (&ends.target, "libvirtd"),
            Victim::TargetQemu => (&ends.target, "qemu-system-x86_64"),
        };
        let pod = match self.victim {
            Victim::SourceWorker | Victim::SourceLibvirtd | Victim::SourceQemu => ends.source_pod.clone(),
            _ => uid(&self.target_pod(migration).await?)?,
        };
        // The migration is in the phase before libvirt starts the target's QEMU.
        let tries = if self.victim == Victim::TargetQemu { 1000 } else { 1 };
        let script = format!(
            "for i in $(seq {tries}); do {} && exit; usleep 10000; done; exit 1",
            signal(program, &pod, "KILL")
        );
        node.run(&script).await.map(drop).with_context(|| format!("kill {program}: it missed"))
    }

    async fn target_pod(&self, migration: &Value) -> Result<Value> {
        let job = migration["metadata"]["uid"].as_str().context("migration without UID")?;
        let mut pods = self.s.list("Pod", &format!("kubevirt.io/migrationJobUID={job}")).await?;
        match pods.len() {
            1 => pods.pop().context("no pod"),
            count => bail!("{count} target pods"),
        }
    }

    /// Lets the migration go on.
    async fn release(&self, ends: &Ends) -> Result<()> {
        // A killed virt-handler is started again by kubelet and does not need it.
        let proceed = format!("{}; true", signal("virt-handler", "", "CONT"));
        match self.during {
            During::Pending => self.s.delete("ResourceQuota", "full").await,
            During::Scheduling => self.s.kubectl(&["uncordon", &ends.target_name]).await.map(drop),
            // A killed daemon does not need it either.
            During::PreparingTarget => {
                ends.target.run(&format!("{}; true", signal("libvirtd", "", "CONT"))).await.map(drop)
            }
            During::TargetReady => ends.source.run(&proceed).await.map(drop),
            During::Running | During::Switchover => Ok(()),
        }
    }

    async fn outcome(&self, ends: &Ends, former: &Value, witness: &Witness, records: u64) -> Result<()> {
        let s = self.s;
        let migration = ended(s, &ends.migration).await?;
        let phase = migration["status"]["phase"].as_str().unwrap_or_default();
        ensure!(phase == "Failed" || !self.victim.is_fatal(), "the migration has {phase}");
        if self.victim.is_guest(self.during) {
            let former = &former["metadata"]["uid"];
            let is_new = |vmi: &Value| vmi["metadata"]["uid"] != *former && vmi["status"]["phase"] == "Running";
            s.wait("vmi", GUEST, "be started again", MINUTES, is_new).await?;
            one_lives(s, [&ends.source, &ends.target]).await?;
            prepare(s).await?;
        } else {
            let vmi = s.get("vmi", GUEST).await?;
            ensure!(vmi["metadata"]["uid"] == former["metadata"]["uid"], "the VMI was recreated");
            ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
            let has_left = vmi["status"]["nodeName"] != former["status"]["nodeName"];
            ensure!(
                has_left == (phase == "Succeeded"),
                "it is at {}, and the migration has {phase}",
                vmi["status"]["nodeName"]
            );
            one_lives(s, [&ends.source, &ends.target]).await?;
            let mut guest = console(s, GUEST).await?;
            Witness::goes_on(&mut guest, witness).await?;
            written(&mut guest, records).await?;
            guest.leave().await?;
        }
        let unmarked = |vmi: &Value| vmi["metadata"]["labels"]["kubevirt.io/migrationTargetNodeName"].is_null();
        s.wait("vmi", GUEST, "have no target", MINUTES, unmarked).await?;
        let left = s.list("vmim", "").await?;
        let open: Vec<_> = left.iter().filter(|one| !has_ended(one)).map(|one| &one["metadata"]["name"]).collect();
        ensure!(open.is_empty(), "migrations that have not ended: {open:?}");
        // The next row needs all virt-handlers.
        let deadline = Instant::now() + MINUTES;
        while let Err(error) = virt_handlers::restarts(s).await {
            ensure!(Instant::now() < deadline, "{error:#}");
            sleep(Duration::from_millis(500)).await;
        }
        // Pause and resume reach the guest.
        virt_handlers::serves(s, GUEST).await
    }
}

/// Waits until one pod and one QEMU of the VMI are left on these nodes, at the node of the VMI.
pub(crate) async fn one_lives(s: &Story, nodes: [&Node; 2]) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let pod = alone(s, GUEST).await?;
        let vmi = s.get("vmi", GUEST).await?;
        let mut found = vec![];
        for (number, node) in nodes.into_iter().enumerate() {
            for pod in s.launcher_pods(&vmi).await? {
                let lives = node.run(&living("qemu-system-x86_64", &uid(&pod)?)).await?;
                found.extend(lives.lines().map(|_| (number, pod["metadata"]["uid"].clone())));
            }
        }
        let is_one = matches!(found.as_slice(), [(_, of)] if *of == pod["metadata"]["uid"]);
        if is_one && pod["spec"]["nodeName"] == vmi["status"]["nodeName"] {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "QEMU lives {} times: {found:?}", found.len());
        sleep(Duration::from_millis(500)).await;
    }
}

/// Stops the next daemon of libvirt as soon as it has started. It is ready soon: few processes are started for this, outside the
/// control group of the pod, with precedence over other processes.
pub(crate) const STOP_DAEMON: &str = "renice -n -20 -p $$ >/dev/null; \
     for group in cpu/ ''; do echo $$ >/host/sys/fs/cgroup/${group}cgroup.procs && break; done 2>/dev/null; \
     list() { grep -lsx libvirtd /proc/[0-9]*/comm; }; known=\" $(list | tr '\\n' ' ') \"; \
     { (for i in $(seq 9000); do for c in $(list); do case \"$known\" in *\" $c \"*) ;; *) \
       p=${c%/comm}; kill -STOP ${p#/proc/} && exit;; esac; done; usleep 5000; done) </dev/null >/dev/null 2>&1 & }";

/// Returns a script that prints the processes of a program in a pod.
fn living(program: &str, pod: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "for p in /proc/[0-9]*; do grep -qs -e {pod} $p/cgroup && [ \"$(cat $p/comm 2>/dev/null)\" = {name} ] && echo $p; done; true"
    )
}

fn uid(pod: &Value) -> Result<String> {
    pod["metadata"]["uid"].as_str().map(str::to_owned).context("pod without UID")
}
