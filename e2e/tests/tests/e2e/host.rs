//! Processes of the test cluster, whose nodes and control plane run on this host. A signal reaches them at once, and also those that
//! no pod of a node sees.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, own_cluster};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::time::sleep;

use crate::kills::uid;

/// Time for components that are started again.
const MINUTES: Duration = Duration::from_secs(180);
/// Length of the name of a process in the kernel.
const COMM: usize = 15;

/// A process on this host.
struct Process {
    pid: Pid,
    /// The command line, with spaces.
    command: String,
    cgroup: String,
}

/// Returns the processes of a program.
fn processes(program: &str) -> Result<Vec<Process>> {
    let name: String = program.chars().take(COMM).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| Pid::from_raw(name.to_str()?.parse().ok()?));
        let Some(pid) = pid.filter(|_| fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name))
        else {
            continue;
        };
        // It may have ended meanwhile.
        let (command, cgroup) = (fs::read(path.join("cmdline")), fs::read_to_string(path.join("cgroup")));
        if let (Ok(command), Ok(cgroup)) = (command, cgroup) {
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            found.push(Process { pid, command, cgroup });
        }
    }
    Ok(found)
}

/// Sends a signal to some processes of a program. Fails without one.
fn send(program: &str, signal: Signal, is_meant: impl Fn(&Process) -> bool) -> Result<()> {
    let meant: Vec<Process> = processes(program)?.into_iter().filter(is_meant).collect();
    ensure!(!meant.is_empty(), "no process of {program} to send {signal:?} to");
    for process in meant {
        kill_process(process.pid, signal).with_context(|| format!("send {signal:?} to {program}"))?;
    }
    Ok(())
}

/// Kills a program in a pod.
pub(crate) fn kill(program: &str, pod: &Value) -> Result<()> {
    let pod = uid(pod)?;
    send(program, Signal::KILL, |process| process.cgroup.contains(&pod))
}

/// Returns the number of guests of a VMI that live: its processes of QEMU.
pub(crate) fn guests(s: &Story, vmi: &str) -> Result<usize> {
    let name = format!("guest={}_{vmi},", s.namespace);
    Ok(processes("qemu-system-x86_64")?.iter().filter(|process| process.command.contains(&name)).count())
}

/// Stops the snapshot-controller, which gives a VolumeSnapshot its content.
pub(crate) fn stop_snapshots() -> Result<()> {
    signal_snapshots(Signal::STOP)
}

/// Lets the snapshot-controller go on.
pub(crate) fn resume_snapshots() -> Result<()> {
    signal_snapshots(Signal::CONT)
}

fn signal_snapshots(signal: Signal) -> Result<()> {
    let plan = own_cluster()?.context("the snapshot-controller of another cluster")?;
    let control = plan.control().display().to_string();
    send("snapshot-controller", signal, |process| process.command.contains(&control))
}

/// Kills the leading virt-controller and removes its pod, which kubelet would start again with a delay.
pub(crate) async fn kill_leader(s: &Story) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
    let deadline = Instant::now() + MINUTES;
    loop {
        let leader = leases.get("virt-controller").await?.spec.and_then(|spec| spec.holder_identity);
        let leader = leader.context("virt-controller never had a leader")?;
        let pod = s.installation_api("Pod").get_opt(&leader).await?.map(serde_json::to_value).transpose()?;
        // The lease names a leader that was killed before until another one leads.
        match pod.filter(|pod| kill("virt-controller", pod).is_ok()) {
            Some(_) => return remove(s, &leader).await,
            None => ensure!(Instant::now() < deadline, "virt-controller {leader} does not run, and no other one leads"),
        }
        sleep(Duration::from_millis(250)).await;
    }
}

/// Kills all virt-handlers and removes their pods.
pub(crate) async fn kill_handlers(s: &Story) -> Result<()> {
    for pod in s.installation_api("Pod").list(&ListParams::default().labels("kubevirt.io=virt-handler")).await? {
        kill("virt-handler", &serde_json::to_value(&pod)?)?;
        remove(s, &pod.metadata.name.unwrap_or_default()).await?;
    }
    Ok(())
}

async fn remove(s: &Story, name: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(s.client.clone(), "kubevirt");
    pods.delete(name, &DeleteParams::default().grace_period(0)).await.with_context(|| format!("delete pod {name}"))?;
    Ok(())
}
