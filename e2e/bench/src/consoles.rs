//! Measures many consoles that are open at once.
//!
//! Creates VMIs with minimal needs: paused before their first instruction, with little memory and small requests, so that a
//! node takes as many as kubelet allows pods (110). Then, through the API server and as one user:
//!
//! 1. opens a console of each VMI at the same moment,
//! 2. holds all consoles for a minute and measures other requests meanwhile: reading a VMI, and a dry-run creation that passes
//!    both webhooks,
//! 3. expects an answer to a ping on each console, and compares the number of streams that virt-api counts,
//! 4. unpauses some VMIs and expects their boot messages on the consoles,
//! 5. closes all consoles, waits until virt-api and virt-handler count none, and deletes the VMIs.
//!
//! The memory figure of a program is the maximum over its pods, from their metrics: before, with and after the consoles.
//! Failures are printed and counted (`failures`) and do not end the measurement.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Socket, Story, connect_without_retries, is_true};
use futures::{StreamExt, future::join_all, stream};
use serde_json::json;
use tokio::time::sleep;

use crate::{Figures, percentile};

/// Concurrent starts or deletions of VMIs.
const AT_ONCE: usize = 4;
/// Number of VMIs with a kernel to boot.
const BOOTING: usize = 5;
/// Time limit for the start or deletion of a VMI.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Duration of measuring other requests without consoles, and with them.
const QUIET: Duration = Duration::from_secs(10);
const HOLD: Duration = Duration::from_secs(60);
/// Pause between two of these requests.
const PAUSE: Duration = Duration::from_millis(250);
/// Time limit for the answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// Limits printed failures.
const MAX_PRINTED: usize = 20;

struct Vmi {
    name: String,
    boots: bool,
}

impl Vmi {
    fn number(number: usize) -> Self {
        Self { name: format!("vmi-{number:03}"), boots: number < BOOTING }
    }

    fn object(&self) -> String {
        format!("virtualmachineinstances/{}", self.name)
    }

    fn manifest(&self) -> String {
        let (memory, firmware) = if self.boots { ("128Mi", KERNEL) } else { ("32Mi", "") };
        format!(
            "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {}}}
spec:
  startStrategy: Paused
  terminationGracePeriodSeconds: 0
  domain:
    memory: {{guest: {memory}}}
    resources:
      requests: {{cpu: 1m, memory: 8Mi}}
      overcommitGuestOverhead: true
    devices: {{autoattachGraphicsDevice: false, autoattachPodInterface: false}}
{firmware}",
            self.name
        )
    }

    async fn start(&self, story: &Story) -> Result<()> {
        story.apply(&self.manifest()).await?;
        let done = |vmi: &serde_json::Value| vmi["status"]["phase"] == "Running" && is_true(vmi, "Paused");
        story.wait("vmi", &self.name, "be Running and paused", TIMEOUT, done).await?;
        Ok(())
    }

    async fn boot(&self, story: &Story, console: &mut Socket) -> Result<()> {
        story.put(&self.object(), "unpause", &json!({})).await?;
        console.expect("tiny: up", TIMEOUT).await
    }
}

/// Part of a VMI's `domain` that boots a kernel with console output.
const KERNEL: &str = "    firmware:
      kernelBoot:
        kernelArgs: console=ttyS0 quiet
        container:
          image: ferrovirt.io/guests/tiny-kernel:devel
          imagePullPolicy: IfNotPresent
          kernelPath: /boot/vmlinuz
          initrdPath: /boot/initrd
";

/// Runs the measurement once.
pub(crate) async fn measure(story: &Story, count: usize, figures: &mut Figures) -> Result<()> {
    let mut failures = Vec::new();
    memory(story, "before", figures).await?;
    let vmis = make(story, count, figures, &mut failures).await?;
    let first = vmis.first().context("no vmi runs")?.name.clone();
    latencies(story, &first, "before", QUIET, figures).await?;

    let mut consoles = open(story, vmis, figures, &mut failures).await?;
    latencies(story, &first, "with", HOLD, figures).await?;
    let pings = consoles.iter_mut().map(|(vmi, console)| async move {
        let pong = console.ping(PING_TIMEOUT).await;
        (vmi.name.clone(), pong)
    });
    for (name, pong) in join_all(pings).await {
        record_failure(&mut failures, "after a minute, console of", &name, pong);
    }
    let counted = story.open_streams().await?.api;
    figures.insert("consoles_counted".into(), counted as f64);
    if counted != consoles.len() as u64 {
        failures.push(format!("virt-api counts {counted} streams, and {} are open", consoles.len()));
    }
    memory(story, "with", figures).await?;

    let started_at = Instant::now();
    let booting = consoles.iter_mut().filter(|(vmi, _)| vmi.boots);
    let boots = booting.map(|(vmi, console)| async move {
        let booted = vmi.boot(story, console).await;
        (vmi.name.clone(), booted)
    });
    for (name, booted) in join_all(boots).await {
        record_failure(&mut failures, "boot of", &name, booted);
    }
    figures.insert("boot_text_s".into(), started_at.elapsed().as_secs_f64());

    drop(consoles);
    let started_at = Instant::now();
    let gone = story.no_streams_left(true).await;
    record_failure(&mut failures, "streams after", "closing", gone);
    figures.insert("streams_gone_s".into(), started_at.elapsed().as_secs_f64());
    memory(story, "after", figures).await?;
    delete(story, figures, &mut failures).await?;

    figures.insert("failures".into(), failures.len() as f64);
    for failure in failures.iter().take(MAX_PRINTED) {
        println!("FAILED: {failure}");
    }
    Ok(())
}

/// Starts the VMIs, some at a time, and returns those that run.
async fn make(story: &Story, count: usize, figures: &mut Figures, failures: &mut Vec<String>) -> Result<Vec<Vmi>> {
    let started_at = Instant::now();
    let mut starts = stream::iter(0..count)
        .map(|number| async move {
            let vmi = Vmi::number(number);
            let started = vmi.start(story).await;
            (vmi, started)
        })
        .buffer_unordered(AT_ONCE);
    let mut vmis = Vec::new();
    while let Some((vmi, started)) = starts.next().await {
        if started.is_ok() {
            vmis.push(vmi);
        } else {
            record_failure(failures, "start of", &vmi.name, started);
        }
    }
    figures.insert("vmis_created_s".into(), started_at.elapsed().as_secs_f64());
    figures.insert("vmis".into(), vmis.len() as f64);
    let mut nodes = BTreeMap::<String, usize>::new();
    for vmi in story.list("vmi", "").await? {
        *nodes.entry(vmi["status"]["nodeName"].as_str().unwrap_or("no node").to_owned()).or_default() += 1;
    }
    println!("VMIs: {nodes:?}");
    Ok(vmis)
}

/// Opens a console of each VMI at the same moment and returns the open ones.
async fn open(
    story: &Story,
    vmis: Vec<Vmi>,
    figures: &mut Figures,
    failures: &mut Vec<String>,
) -> Result<Vec<(Vmi, Socket)>> {
    let client = &connect_without_retries().await?;
    let started_at = Instant::now();
    let asked = join_all(vmis.iter().map(|vmi| async move {
        let path = story.subresource("v1", &vmi.object(), "console");
        let asked = Socket::open(client, &path, None).await;
        (asked, started_at.elapsed().as_secs_f64() * 1000.0)
    }))
    .await;
    let took = started_at.elapsed().as_secs_f64();
    let (mut consoles, mut times) = (Vec::new(), Vec::new());
    for (vmi, (asked, time)) in vmis.into_iter().zip(asked) {
        match asked {
            Ok(Ok(console)) => {
                times.push(time);
                consoles.push((vmi, console));
            }
            Ok(Err(answer)) => {
                failures.push(format!("console of {}: {} {}", vmi.name, answer.code, answer.message()));
            }
            Err(error) => failures.push(format!("console of {}: {error:#}", vmi.name)),
        }
    }
    ensure!(!consoles.is_empty(), "no console was opened: {failures:?}");
    figures.insert("consoles_open".into(), consoles.len() as f64);
    figures.insert("consoles_opened_per_s".into(), consoles.len() as f64 / took);
    figures.insert("console_opened_p50_ms".into(), percentile(&times, 50).context("no console")?);
    figures.insert("console_opened_p99_ms".into(), percentile(&times, 99).context("no console")?);
    Ok(consoles)
}

/// Measures requests unrelated to consoles.
async fn latencies(story: &Story, name: &str, when: &str, during: Duration, figures: &mut Figures) -> Result<()> {
    let new = Vmi { name: "new".into(), boots: false }.manifest();
    let (mut reads, mut reviews) = (Vec::new(), Vec::new());
    let started_at = Instant::now();
    while started_at.elapsed() < during {
        let asked = Instant::now();
        story.get("vmi", name).await?;
        reads.push(asked.elapsed().as_secs_f64() * 1000.0);
        let asked = Instant::now();
        story.dry_run(&new).await?;
        reviews.push(asked.elapsed().as_secs_f64() * 1000.0);
        sleep(PAUSE).await;
    }
    for (what, times) in [("get", reads), ("reviewed_creation", reviews)] {
        for percent in [50, 99] {
            let time = percentile(&times, percent).context("no request")?;
            figures.insert(format!("{what}_p{percent}_ms_{when}"), time);
        }
    }
    Ok(())
}

/// Reads the memory of the three programs.
async fn memory(story: &Story, when: &str, figures: &mut Figures) -> Result<()> {
    for daemon in ["virt-api", "virt-controller", "virt-handler"] {
        let lines = story.metrics(daemon).await?;
        let sizes = lines.iter().filter_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        let largest = sizes.filter_map(|size| size.trim().parse::<f64>().ok()).reduce(f64::max);
        let mib = largest.with_context(|| format!("{daemon} does not report its memory"))? / f64::from(1 << 20);
        figures.insert(format!("{}_rss_mib_{when}", daemon.replace('-', "_")), mib);
    }
    Ok(())
}

/// Deletes all VMIs, some at a time, and waits until they are deleted.
async fn delete(story: &Story, figures: &mut Figures, failures: &mut Vec<String>) -> Result<()> {
    let started_at = Instant::now();
    let vmis = story.list("vmi", "").await?;
    let names = vmis.iter().filter_map(|vmi| vmi["metadata"]["name"].as_str());
    let mut deletions = stream::iter(names)
        .map(|name| async move {
            let gone = async {
                story.delete("vmi", name).await?;
                story.wait_gone("vmi", name, TIMEOUT).await
            };
            (name, gone.await)
        })
        .buffer_unordered(AT_ONCE);
    while let Some((name, gone)) = deletions.next().await {
        record_failure(failures, "deletion of", name, gone);
    }
    figures.insert("vmis_deleted_s".into(), started_at.elapsed().as_secs_f64());
    Ok(())
}

/// Records a failure.
fn record_failure(failures: &mut Vec<String>, what: &str, name: &str, outcome: Result<()>) {
    if let Err(error) = outcome {
        failures.push(format!("{what} {name}: {error:#}"));
    }
}
