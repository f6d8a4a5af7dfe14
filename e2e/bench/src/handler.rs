//! Measures virt-handler's return beside many VMIs: from its end by `kill -9` until every status is right.
//!
//! The VMIs wait, paused, before their first instruction. virt-handler is stopped by a signal, libvirt resumes all guests without
//! it, and it is killed. Each status says paused until the new process has looked at the domain.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, is_true, signal};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::Figures;

/// Concurrent starts, and commands in launcher pods.
const AT_ONCE: usize = 4;
/// Time limit of a start, and of all statuses.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Pause between two looks at the statuses.
const PAUSE: Duration = Duration::from_millis(100);
/// Label of the VMIs.
const LABEL: &str = "app=resumed";
/// libvirt's socket in a launcher pod.
const URI: &str = "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock";

/// Measures one end of virt-handler beside `count` VMIs on one node.
pub(crate) async fn measure(story: &Story, count: usize, figures: &mut Figures) -> Result<()> {
    let (node, hostname) = story.one_node().await?;
    let names: Vec<String> = (0..count).map(|number| format!("resumed-{number}")).collect();
    let start = async |name: &str| {
        story.apply(&manifest(name, &hostname).to_string()).await?;
        let is_paused = |vmi: &Value| vmi["status"]["phase"] == "Running" && is_true(vmi, "Paused");
        story.wait("vmi", name, "be Running and paused", TIMEOUT, is_paused).await?;
        let pod = story.launcher_pod(name).await?;
        Ok::<_, anyhow::Error>((
            name.to_owned(),
            pod["metadata"]["name"].as_str().context("pod without name")?.to_owned(),
        ))
    };
    let started = stream::iter(&names).map(|name| start(name)).buffer_unordered(AT_ONCE);
    let pods: Vec<(String, String)> = started.try_collect().await?;
    let inside = story.enter_node(&node).await?;
    let measured = async {
        inside.run(&signal("virt-handler", "", "STOP")).await.context("stop virt-handler")?;
        let resumed = resume(story, &pods).await;
        let shown = statuses(story).await;
        let killed = Instant::now();
        inside.run(&signal("virt-handler", "", "KILL")).await.context("kill virt-handler")?;
        resumed?;
        ensure!(shown?.paused == count, "virt-handler was not stopped: statuses changed before its end");
        follow(story, count, killed).await
    };
    let measured = measured.await;
    inside.leave().await?;
    let (first, last) = measured?;
    println!("  virt-handler killed beside {count} VMIs: first status right after {first:.2?}, last after {last:.2?}");
    figures.insert("handler_killed_to_first_status_s".into(), first.as_secs_f64());
    figures.insert("handler_killed_to_all_statuses_s".into(), last.as_secs_f64());
    for name in &names {
        story.delete("vmi", name).await?;
    }
    for name in &names {
        story.wait_gone("vmi", name, TIMEOUT).await?;
    }
    Ok(())
}

fn manifest(name: &str, hostname: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "labels": {"app": "resumed"}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": hostname},
            "startStrategy": "Paused", "terminationGracePeriodSeconds": 0,
            "domain": {
                "memory": {"guest": "32Mi"},
                "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "overcommitGuestOverhead": true},
                "devices": {"autoattachGraphicsDevice": false, "autoattachPodInterface": false},
            },
        },
    })
}

/// Resumes the guests of these VMIs and pods by libvirt alone.
async fn resume(story: &Story, pods: &[(String, String)]) -> Result<()> {
    let resume = async |vmi: &str, pod: &str| {
        let domain = format!("{}_{vmi}", story.namespace);
        story.exec_in(pod, "compute", &["virsh", "-c", URI, "resume", &domain]).await.map(drop)
    };
    stream::iter(pods).map(|(vmi, pod)| resume(vmi, pod)).buffer_unordered(AT_ONCE).try_collect().await
}

/// Numbers of VMIs by their statuses.
#[derive(Debug, Default, PartialEq)]
struct Statuses {
    paused: usize,
    running: usize,
}

impl Statuses {
    fn of(vmis: &[Value]) -> Self {
        let paused = vmis.iter().filter(|vmi| is_true(vmi, "Paused")).count();
        let running = vmis.iter().filter(|vmi| vmi["status"]["phase"] == "Running" && !is_true(vmi, "Paused")).count();
        Self { paused, running }
    }
}

async fn statuses(story: &Story) -> Result<Statuses> {
    Ok(Statuses::of(&story.list("vmi", LABEL).await?))
}

/// Returns the times from `killed` until the first and the last status is right.
async fn follow(story: &Story, count: usize, killed: Instant) -> Result<(Duration, Duration)> {
    let mut first = None;
    loop {
        let now = statuses(story).await?;
        if now.running > 0 {
            first.get_or_insert_with(|| killed.elapsed());
        }
        if now.running == count {
            let last = killed.elapsed();
            return Ok((first.unwrap_or(last), last));
        }
        ensure!(killed.elapsed() < TIMEOUT, "{now:?} of {count} VMIs after the end of virt-handler");
        sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmi_is_right_when_it_runs_and_is_not_paused() {
        let vmi = |phase: &str, paused: &str| {
            let conditions = json!([{"type": "Paused", "status": paused}]);
            json!({"status": {"phase": phase, "conditions": conditions}})
        };
        let all = [
            vmi("Running", "True"),
            vmi("Running", "False"),
            json!({"status": {"phase": "Running"}}),
            vmi("Failed", "False"),
        ];
        assert_eq!(Statuses::of(&all), Statuses { paused: 1, running: 2 });
    }
}
