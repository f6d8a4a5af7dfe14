//! Consoles of many machines, all open at once.
//!
//! Makes machines that take next to nothing: paused before their first instruction, with so little memory, and so little
//! asked of the scheduler, that as many fit as kubelet takes pods (110 a node). Then, through the API server and as one
//! user:
//!
//! 1. a console of each is opened at the same moment,
//! 2. all are held for a minute, in which the time of other requests is measured: reading a machine, and a creation that is
//!    reviewed by both webhooks but not stored,
//! 3. each has to answer a ping, and virt-api has to count them all,
//! 4. some of the machines are unpaused: what they print while they boot has to come through consoles that are open since long,
//! 5. all are closed, virt-api and virt-handler have to count none any more, and the machines are deleted.
//!
//! Memory of the three processes is the largest of each, as they tell it themselves: before, with, and after the consoles.
//! What fails is printed and counted (`failures`); the rest goes on.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Socket, Story, connect_without_retries};
use futures::{StreamExt, future::join_all, stream};
use serde_json::json;
use tokio::time::sleep;

use crate::{Figures, actions::is, webhook::percentile};

/// Machines that are started, or deleted, at a time.
const AT_ONCE: usize = 4;
/// Machines that have something to boot.
const BOOTING: usize = 5;
/// Longest that one machine may take to start, and to go.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long other requests are measured without consoles, and with them.
const QUIET: Duration = Duration::from_secs(10);
const HOLD: Duration = Duration::from_secs(60);
/// Pause between two of these requests.
const PAUSE: Duration = Duration::from_millis(250);
/// Longest that an answer to a ping may take.
const SIGN: Duration = Duration::from_secs(30);
/// Failures that are printed.
const SHOWN: usize = 20;

struct Machine {
    name: String,
    boots: bool,
}

impl Machine {
    fn number(number: usize) -> Self {
        Self { name: format!("machine-{number:03}"), boots: number < BOOTING }
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
        let done = |vmi: &serde_json::Value| vmi["status"]["phase"] == "Running" && is(vmi, "Paused");
        story.wait("vmi", &self.name, "be Running and paused", PATIENCE, done).await?;
        Ok(())
    }

    async fn boot(&self, story: &Story, console: &mut Socket) -> Result<()> {
        story.put(&self.object(), "unpause", &json!({})).await?;
        console.expect("tiny: up", PATIENCE).await
    }
}

/// Part of a machine's `domain`: it boots, and says so.
const KERNEL: &str = "    firmware:
      kernelBoot:
        kernelArgs: console=ttyS0 quiet
        container:
          image: ferrovirt.io/guests/tiny-kernel:devel
          imagePullPolicy: IfNotPresent
          kernelPath: /boot/vmlinuz
          initrdPath: /boot/initrd
";

/// Measures once.
pub async fn measure(story: &Story, count: usize, figures: &mut Figures) -> Result<()> {
    let mut failures = Vec::new();
    memory(story, "before", figures).await?;
    let machines = make(story, count, figures, &mut failures).await?;
    let first = machines.first().context("no machine runs")?.name.clone();
    latencies(story, &first, "before", QUIET, figures).await?;

    let mut consoles = open(story, machines, figures, &mut failures).await?;
    latencies(story, &first, "with", HOLD, figures).await?;
    let signs = consoles.iter_mut().map(|(machine, console)| async move {
        let sign = console.ping(SIGN).await;
        (machine.name.clone(), sign)
    });
    for (name, sign) in join_all(signs).await {
        note(&mut failures, "after a minute, console of", &name, sign);
    }
    let counted = story.open_streams().await?.api;
    figures.insert("consoles_counted".into(), counted as f64);
    if counted != consoles.len() as u64 {
        failures.push(format!("virt-api counts {counted} streams, and {} are open", consoles.len()));
    }
    memory(story, "with", figures).await?;

    let began = Instant::now();
    let booting = consoles.iter_mut().filter(|(machine, _)| machine.boots);
    let boots = booting.map(|(machine, console)| async move {
        let booted = machine.boot(story, console).await;
        (machine.name.clone(), booted)
    });
    for (name, booted) in join_all(boots).await {
        note(&mut failures, "boot of", &name, booted);
    }
    figures.insert("boot_text_s".into(), began.elapsed().as_secs_f64());

    drop(consoles);
    let began = Instant::now();
    let gone = story.no_streams_left(true).await;
    note(&mut failures, "streams after", "closing", gone);
    figures.insert("streams_gone_s".into(), began.elapsed().as_secs_f64());
    memory(story, "after", figures).await?;
    delete(story, figures, &mut failures).await?;

    figures.insert("failures".into(), failures.len() as f64);
    for failure in failures.iter().take(SHOWN) {
        println!("FAILED: {failure}");
    }
    Ok(())
}

/// Starts the machines, some at a time; returns those that run.
async fn make(story: &Story, count: usize, figures: &mut Figures, failures: &mut Vec<String>) -> Result<Vec<Machine>> {
    let began = Instant::now();
    let mut starts = stream::iter(0..count)
        .map(|number| async move {
            let machine = Machine::number(number);
            let started = machine.start(story).await;
            (machine, started)
        })
        .buffer_unordered(AT_ONCE);
    let mut machines = Vec::new();
    while let Some((machine, started)) = starts.next().await {
        if started.is_ok() {
            machines.push(machine);
        } else {
            note(failures, "start of", &machine.name, started);
        }
    }
    figures.insert("machines_made_s".into(), began.elapsed().as_secs_f64());
    figures.insert("machines".into(), machines.len() as f64);
    let mut nodes = BTreeMap::<String, usize>::new();
    for vmi in story.list("vmi", "").await? {
        *nodes.entry(vmi["status"]["nodeName"].as_str().unwrap_or("no node").to_owned()).or_default() += 1;
    }
    println!("machines: {nodes:?}");
    Ok(machines)
}

/// Opens a console of each machine, all at the same moment; returns those that are open.
async fn open(
    story: &Story,
    machines: Vec<Machine>,
    figures: &mut Figures,
    failures: &mut Vec<String>,
) -> Result<Vec<(Machine, Socket)>> {
    let client = &connect_without_retries().await?;
    let began = Instant::now();
    let asked = join_all(machines.iter().map(|machine| async move {
        let path = story.subresource("v1", &machine.object(), "console");
        let asked = Socket::open(client, &path, None).await;
        (asked, began.elapsed().as_secs_f64() * 1000.0)
    }))
    .await;
    let took = began.elapsed().as_secs_f64();
    let (mut consoles, mut times) = (Vec::new(), Vec::new());
    for (machine, (asked, time)) in machines.into_iter().zip(asked) {
        match asked {
            Ok(Ok(console)) => {
                times.push(time);
                consoles.push((machine, console));
            }
            Ok(Err(answer)) => {
                failures.push(format!("console of {}: {} {}", machine.name, answer.code, answer.said()));
            }
            Err(error) => failures.push(format!("console of {}: {error:#}", machine.name)),
        }
    }
    ensure!(!consoles.is_empty(), "no console was opened: {failures:?}");
    figures.insert("consoles_open".into(), consoles.len() as f64);
    figures.insert("consoles_opened_per_s".into(), consoles.len() as f64 / took);
    figures.insert("console_opened_p50_ms".into(), percentile(&times, 50).context("no console")?);
    figures.insert("console_opened_p99_ms".into(), percentile(&times, 99).context("no console")?);
    Ok(consoles)
}

/// Times of requests that have nothing to do with consoles.
async fn latencies(story: &Story, name: &str, when: &str, during: Duration, figures: &mut Figures) -> Result<()> {
    let new = Machine { name: "new".into(), boots: false }.manifest();
    let (mut reads, mut reviews) = (Vec::new(), Vec::new());
    let began = Instant::now();
    while began.elapsed() < during {
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

/// Memory of the three processes.
async fn memory(story: &Story, when: &str, figures: &mut Figures) -> Result<()> {
    for daemon in ["virt-api", "virt-controller", "virt-handler"] {
        let lines = story.metrics(daemon).await?;
        let sizes = lines.iter().filter_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        let largest = sizes.filter_map(|size| size.trim().parse::<f64>().ok()).reduce(f64::max);
        let mib = largest.with_context(|| format!("{daemon} does not tell its memory"))? / f64::from(1 << 20);
        figures.insert(format!("{}_rss_mib_{when}", daemon.replace('-', "_")), mib);
    }
    Ok(())
}

/// Deletes all machines, some at a time, and waits until they are gone.
async fn delete(story: &Story, figures: &mut Figures, failures: &mut Vec<String>) -> Result<()> {
    let began = Instant::now();
    let machines = story.list("vmi", "").await?;
    let names = machines.iter().filter_map(|vmi| vmi["metadata"]["name"].as_str());
    let mut deletions = stream::iter(names)
        .map(|name| async move {
            let gone = async {
                story.delete("vmi", name).await?;
                story.wait_gone("vmi", name, PATIENCE).await
            };
            (name, gone.await)
        })
        .buffer_unordered(AT_ONCE);
    while let Some((name, gone)) = deletions.next().await {
        note(failures, "deletion of", name, gone);
    }
    figures.insert("machines_gone_s".into(), began.elapsed().as_secs_f64());
    Ok(())
}

/// Notes what has failed.
fn note(failures: &mut Vec<String>, what: &str, name: &str, outcome: Result<()>) {
    if let Err(error) = outcome {
        failures.push(format!("{what} {name}: {error:#}"));
    }
}
