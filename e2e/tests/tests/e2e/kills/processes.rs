//! Processes that are stopped and killed.

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Node, Story, TIMEOUT, signal};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, api::DeleteParams};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep, timeout};

use super::{GUEST, MINUTES, uid};
use crate::moves::alone;

/// Seconds for which a lost node is silent: in post-copy the target of a migration waits for it twice for a minute.
pub(crate) const LOST_SECONDS: u64 = 170;

/// A process on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    VirtHandler,
    Worker,
    Libvirtd,
    Qemu,
    /// The emulator of the guest's TPM, without which it ends.
    Swtpm,
    Kubelet,
    /// All of the node for the control plane: kubelet is silent for [`LOST_SECONDS`], and virt-handler is killed meanwhile.
    Node,
}

impl Process {
    const fn program(self) -> &'static str {
        match self {
            Self::VirtHandler => "virt-handler",
            Self::Worker => "virt-launcher",
            Self::Libvirtd => "libvirtd",
            Self::Qemu => "qemu-system-x86_64",
            Self::Swtpm => "swtpm",
            Self::Kubelet | Self::Node => "kubelet",
        }
    }
}

/// The process that is killed, or the pod that is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    /// At the node of the VMI, which is the source of its migration.
    Source(Process),
    /// At the target of the VMI's migration.
    Target(Process),
    TargetPod,
    AttachmentPod,
    /// The leading virt-controller.
    Leader,
}

/// Keeps a change in its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Nothing: the change stays in the phase for long enough.
    Nothing,
    /// virt-handler at the node of the VMI is stopped.
    VirtHandler,
    /// libvirtd of the launcher pod is stopped.
    Libvirtd,
    /// The next libvirtd at the target of the migration is stopped as soon as it has started.
    TargetLibvirtd,
    /// The next QEMU at the node of the VMI is stopped as soon as it has started.
    NextQemu,
    /// virt-handler at the node of the VMI is stopped as soon as the next QEMU has started.
    VirtHandlerAtQemu,
    /// A quota refuses new pods.
    Quota,
    /// The target of the migration takes no new pods.
    Cordon,
}

impl Holder {
    /// Returns true if the victim does not hold the change any more.
    pub(super) const fn is(self, victim: Victim) -> bool {
        use Process::{Libvirtd, Node, Qemu, VirtHandler};
        match self {
            Self::VirtHandler | Self::VirtHandlerAtQemu => matches!(victim, Victim::Source(VirtHandler | Node)),
            Self::Libvirtd => matches!(victim, Victim::Source(Libvirtd)),
            // Another libvirtd ends a QEMU that was starting.
            Self::NextQemu => matches!(victim, Victim::Source(Libvirtd | Qemu)),
            _ => false,
        }
    }
}

/// Nodes of a VMI and of its migration.
pub(crate) struct Ends<'a> {
    pub(crate) story: &'a Story,
    pub(crate) source: &'a Node,
    /// Without a migration the source.
    pub(crate) target: &'a Node,
    pub(crate) target_name: &'a str,
    /// UID of the launcher pod at the source.
    pub(crate) pod: String,
}

impl<'a> Ends<'a> {
    pub(crate) async fn of(story: &'a Story, source: &'a Node, target: &'a Node, target_name: &'a str) -> Result<Self> {
        let pod = uid(&alone(story, GUEST).await?)?;
        Ok(Self { story, source, target, target_name, pod })
    }

    pub(super) async fn hold(&self, holder: Holder) -> Result<()> {
        let s = self.story;
        match holder {
            Holder::Nothing => Ok(()),
            Holder::VirtHandler | Holder::Libvirtd => self.send(holder, "STOP", "").await,
            Holder::TargetLibvirtd => self.target.run(&stop_daemon()).await.map(drop),
            Holder::NextQemu => {
                self.source.run(&at_next(Process::Qemu.program(), "kill -STOP ${p#/proc/}")).await.map(drop)
            }
            Holder::VirtHandlerAtQemu => {
                self.source.run(&at_next(Process::Qemu.program(), &signal("virt-handler", "", "STOP"))).await.map(drop)
            }
            Holder::Cordon => s.kubectl(&["cordon", self.target_name]).await.map(drop),
            Holder::Quota => {
                s.apply("{apiVersion: v1, kind: ResourceQuota, metadata: {name: full}, spec: {hard: {pods: 1}}}")
                    .await?;
                let full = |quota: &Value| quota["status"]["used"]["pods"] == "1";
                s.wait("ResourceQuota", "full", "count the pod", TIMEOUT, full).await.map(drop)
            }
        }
    }

    /// Lets the change continue. `killed`: the victim, or `None` after a failure.
    pub(super) async fn release(&self, holder: Holder, killed: Option<Victim>) -> Result<()> {
        match holder {
            Holder::Nothing => Ok(()),
            // The process that is started instead does not hold it.
            Holder::VirtHandler | Holder::VirtHandlerAtQemu | Holder::Libvirtd
                if killed.is_some_and(|victim| holder.is(victim)) =>
            {
                Ok(())
            }
            Holder::VirtHandler | Holder::Libvirtd if killed.is_some() => self.send(holder, "CONT", "").await,
            // It may be gone.
            Holder::VirtHandler
            | Holder::VirtHandlerAtQemu
            | Holder::Libvirtd
            | Holder::TargetLibvirtd
            | Holder::NextQemu => self.send(holder, "CONT", "; true").await,
            Holder::Cordon => self.story.kubectl(&["uncordon", self.target_name]).await.map(drop),
            Holder::Quota => self.story.delete("ResourceQuota", "full").await,
        }
    }

    async fn send(&self, holder: Holder, sent: &str, then: &str) -> Result<()> {
        let (node, program, cgroup) = match holder {
            Holder::Libvirtd => (self.source, "libvirtd", self.pod.as_str()),
            Holder::TargetLibvirtd => (self.target, "libvirtd", ""),
            Holder::NextQemu => (self.source, Process::Qemu.program(), ""),
            _ => (self.source, "virt-handler", ""),
        };
        let script = format!("{}{then}", signal(program, cgroup, sent));
        node.run(&script).await.map(drop).with_context(|| format!("send {sent} to {program}"))
    }

    /// Kills the victim. `migration` is the one of the VMI, for a victim of its target.
    pub(crate) async fn kill(&self, victim: Victim, migration: &Value) -> Result<()> {
        let s = self.story;
        // The pod that attaches volumes to the target has the label of the migration, too.
        let job = || {
            let uid = uid(migration).unwrap_or_default();
            format!("kubevirt.io=virt-launcher,kubevirt.io/migrationJobUID={uid}")
        };
        let (node, process) = match victim {
            Victim::Leader => return kill_leader(s).await,
            Victim::AttachmentPod => return delete(s, &one_pod(s, ATTACHMENT_POD).await?).await,
            Victim::TargetPod => return delete(s, &one_pod(s, &job()).await?).await,
            Victim::Source(process) => (self.source, process),
            Victim::Target(process) => (self.target, process),
        };
        let cgroup = match (process, victim) {
            (Process::Kubelet, _) => return kill_kubelet(node).await,
            (Process::Node, _) => {
                let kill = signal(Process::VirtHandler.program(), "", "KILL");
                return silence(node, LOST_SECONDS, &kill, "true").await;
            }
            (Process::VirtHandler, _) => String::new(),
            (_, Victim::Source(_)) => self.pod.clone(),
            _ => uid(&one_pod(s, &job()).await?)?,
        };
        let program = process.program();
        // A migration is in its phase before libvirt starts the target's QEMU.
        let tries = if victim == Victim::Target(Process::Qemu) { 1000 } else { 1 };
        let kill = signal(program, &cgroup, "KILL");
        let script = format!("for i in $(seq {tries}); do {kill} && exit; usleep 10000; done; exit 1");
        node.run(&script).await.map(drop).with_context(|| format!("kill {program}: it missed"))
    }

    /// Waits until the QEMU of the source has ended, and kills a process of its launcher pod, which ends soon. Returns true if there
    /// was one.
    pub(crate) async fn kill_after_qemu(&self, victim: Option<Process>) -> Result<bool> {
        let qemu = living("qemu-system-x86_64", &self.pod);
        let gone = format!("(for i in $(seq 9000); do [ -z \"$({qemu})\" ] && exit; usleep 10000; done; exit 1)");
        // On the node, since the moment is short.
        let kill = victim.map_or_else(String::new, |victim| {
            format!(" && {{ {}; }} && echo killed; true", signal(victim.program(), &self.pod, "KILL"))
        });
        let shown = self.source.run(&format!("{gone}{kill}")).await.context("the source's QEMU does not end")?;
        Ok(shown.contains("killed"))
    }
}

/// Kills the leading virt-controller.
pub(crate) async fn kill_leader(s: &Story) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
    let leader = leases.get("virt-controller").await?.spec.and_then(|spec| spec.holder_identity);
    s.kill_installed(&leader.context("no leader")?, "virt-controller").await
}

/// Kills kubelet and waits until another one runs on the node.
async fn kill_kubelet(node: &Node) -> Result<()> {
    let find = living("kubelet", "");
    let before = node.run(&find).await?;
    ensure!(before.lines().count() == 1, "kubelet on the node: {before:?}");
    // The command itself runs by kubelet.
    let kill = signal("kubelet", "", "KILL");
    node.run(&format!("( sleep 1; {kill} ) </dev/null >/dev/null 2>&1 &")).await.context("kill kubelet")?;
    let deadline = Instant::now() + MINUTES;
    loop {
        sleep(Duration::from_millis(500)).await;
        // The connection of a command may outlive kubelet.
        match timeout(Duration::from_secs(10), node.run(&find)).await {
            Ok(Ok(now)) if !now.is_empty() && now != before => return Ok(()),
            outcome => ensure!(Instant::now() < deadline, "kubelet is not started again: {outcome:?}"),
        }
    }
}

/// Stops kubelet of a node for some seconds, with a script at the begin and one at the end. The node is silent on return.
pub(crate) async fn silence(node: &Node, seconds: u64, begin: &str, end: &str) -> Result<()> {
    let [stop, proceed] = ["STOP", "CONT"].map(|sent| signal("kubelet", "", sent));
    // The command itself runs by kubelet.
    let script =
        format!("( sleep 1; {stop}; {begin}; sleep {seconds}; {end}; {proceed} ) </dev/null >/dev/null 2>&1 &");
    node.run(&script).await?;
    sleep(Duration::from_secs(2)).await;
    Ok(())
}

/// Selects attachment pods.
pub(crate) const ATTACHMENT_POD: &str = "kubevirt.io=hotplug-disk";

/// Returns the only pod with these labels.
pub(crate) async fn one_pod(s: &Story, labels: &str) -> Result<Value> {
    let mut pods = s.list("Pod", labels).await?;
    match pods.len() {
        1 => pods.pop().context("no pod"),
        count => bail!("{count} pods with {labels}"),
    }
}

async fn delete(s: &Story, pod: &Value) -> Result<()> {
    let name = pod["metadata"]["name"].as_str().context("pod without name")?;
    s.api("Pod").delete(name, &DeleteParams::default().grace_period(0)).await?;
    s.wait_gone("Pod", name, TIMEOUT).await
}

/// Stops the next daemon of libvirt as soon as it has started.
pub(crate) fn stop_daemon() -> String {
    at_next("libvirtd", "kill -STOP ${p#/proc/}")
}

/// Returns a script that runs `then` as soon as the next process of a program has started, which is `$p`. It is ready soon: few processes
/// are started for this, outside the control group of the pod, with precedence over other processes.
fn at_next(program: &str, then: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "renice -n -20 -p $$ >/dev/null; \
         for group in cpu/ ''; do echo $$ >/host/sys/fs/cgroup/${{group}}cgroup.procs && break; done 2>/dev/null; \
         list() {{ grep -lsx {name} /proc/[0-9]*/comm; }}; known=\" $(list | tr '\\n' ' ') \"; \
         {{ (for i in $(seq 9000); do for c in $(list); do case \"$known\" in *\" $c \"*) ;; *) \
           p=${{c%/comm}}; {{ {then}; }} && exit;; esac; done; usleep 5000; done) </dev/null >/dev/null 2>&1 & }}"
    )
}

/// Returns a script that prints the processes of a program in a pod.
pub(super) fn living(program: &str, pod: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "for p in /proc/[0-9]*; do grep -qs -e '{pod}' $p/cgroup && [ \"$(cat $p/comm 2>/dev/null)\" = {name} ] && echo $p; done; true"
    )
}
