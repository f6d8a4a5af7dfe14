//! Scale: thousands of VMs on simulated nodes.
//!
//! kube-apiserver, etcd, scheduler, virt-api and virt-controller are real. KWOK simulates nodes and kubelets (`nodes.rs`),
//! and `handlers.rs` simulates the virt-handler of each node; `watchers.rs` adds the watches of others. Bare pods on the same nodes are
//! the baseline. `cost.rs` reads the counters of the cluster. The entry point is [`measure`].

mod cost;
mod handlers;
mod load;
mod nodes;
mod storm;
mod watchers;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use ferrovirt_e2e_tests::{Story, own_cluster};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use self::{
    cost::{Growth, Meter},
    handlers::Handlers,
    load::{Load, Times},
    nodes::{Nodes, SIMULATED},
    watchers::Watchers,
};
use crate::{
    Figures,
    etcd::Etcd,
    leader::{Controller, killed_to_write},
    policies::PodWrites,
    writes::AuditLog,
};

/// Objects created each second.
const RATE: f64 = 10.0;
/// VMs created beside each number of watchers.
const BATCH: usize = 100;
/// Status changes whose cost is measured.
const CHANGES: u32 = 200;
/// Time without changes in which writes are counted.
const REST: Duration = Duration::from_secs(60);
/// Time in which the controllers settle before a measurement.
const SETTLE: Duration = Duration::from_secs(15);

/// Sizes of the measurement.
#[derive(Args)]
pub(crate) struct ScaleSizes {
    /// Numbers of VMs at which --scale measures, ascending
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100, 400], requires = "scale")]
    sizes: Vec<usize>,
    /// Numbers of further virt-handlers whose watches --scale opens, ascending
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [0, 500], requires = "scale")]
    watchers: Vec<usize>,
    /// Number of VMs that --scale creates at once
    #[arg(long, value_name = "N", default_value_t = 100, requires = "scale")]
    burst: usize,
    /// Number of shards with which --scale measures a second storm of --burst VMs; 1: none
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16), requires = "scale")]
    shards: u32,
}

impl ScaleSizes {
    /// Returns the largest size.
    fn most(&self) -> Result<usize> {
        ensure!(self.sizes.is_sorted() && self.sizes.first() > Some(&0), "--sizes must ascend: {:?}", self.sizes);
        ensure!(self.watchers.is_sorted(), "--watchers must ascend: {:?}", self.watchers);
        self.sizes.last().copied().context("no size")
    }
}

/// Creates pods, then VMs, at a fixed rate and takes all figures.
pub(crate) async fn measure(story: &Story, kwok: &str, sizes: &ScaleSizes, figures: &mut Figures) -> Result<()> {
    let most = sizes.most()?;
    let nodes = Nodes::start(story, kwok, (most + sizes.burst).max(BATCH)).await?;
    let pods = Load::pods(story);
    for &size in &sizes.sizes {
        println!("{size} pods");
        let times = pods.create(0..size, RATE).await.context("bare pods")?;
        times.report(&format!("pods_{size}"), figures)?;
        pods.delete().await.context("deletion of bare pods")?;
    }
    drop(pods);

    let handlers = Handlers::start(story, &nodes).await?;
    let cluster = Cluster {
        story,
        handlers,
        vms: Load::vms(story).await?,
        meter: Meter::of(story, own_cluster()?.as_ref().map(Etcd::of)),
    };
    cluster.measure_kill(0, figures).await?;
    cluster.measure_watchers(&sizes.watchers, figures).await?;
    let controller = Controller::leader(story).await?;
    cluster.measure_growth(&controller, &sizes.sizes, figures).await?;
    cluster.measure_burst(most, sizes.burst, figures).await?;
    controller.check().await?;
    cluster.measure_kill(most, figures).await?;
    cluster.vms.delete().await.context("deletion of VMs")?;
    if sizes.shards > 1 {
        storm::measure(story, &cluster.vms, sizes.burst, sizes.shards, figures).await?;
    }
    drop(cluster);
    nodes.remove(story).await?;
    ratios(&sizes.sizes, figures)
}

/// The cluster with simulated virt-handlers.
struct Cluster<'a> {
    story: &'a Story,
    handlers: Handlers,
    vms: Load,
    meter: Meter<'a>,
}

impl Cluster<'_> {
    /// Measures the end of virt-controller's leader beside this number of VMs.
    async fn measure_kill(&self, vms: usize, figures: &mut Figures) -> Result<()> {
        println!("leader killed beside {vms} VMs");
        let seconds = killed_to_write(self.story, &format!("after-kill-at-{vms}"), &vmi_spec()).await?;
        figures.insert(format!("leader_killed_to_write_at_{vms}_s"), seconds);
        Ok(())
    }

    /// Measures the cost of VMs beside the watches of further virt-handlers.
    async fn measure_watchers(&self, counts: &[usize], figures: &mut Figures) -> Result<()> {
        let mut watchers = Watchers::of(self.story);
        for &count in counts {
            println!("{BATCH} VMs beside {count} further virt-handlers");
            watchers.grow(count).await?;
            let suffix = format!("_with_{count}_watchers");
            let mut growth = Growth::default();
            sleep(SETTLE).await;
            self.rest(&mut growth, SETTLE).await?;
            let times = self.create(0, BATCH, &mut growth).await?;
            times.report(&format!("vms{suffix}"), figures)?;
            growth.report(BATCH, &suffix, figures);
            growth.report_rest(&suffix, figures);
            self.vms.delete().await.context("deletion of VMs")?;
        }
        Ok(())
    }

    /// Measures times and costs while VMs are added, and then at rest.
    async fn measure_growth(&self, controller: &Controller<'_>, sizes: &[usize], figures: &mut Figures) -> Result<()> {
        figures.insert("controller_rss_kib_at_0".into(), controller.rss_kib().await?);
        let empty = self.meter.kept_kib().await?;
        let log = AuditLog::from_now()?;
        let (mut created, mut changes) = (0, 0);
        let (mut cpu, mut memory, mut growth) = (Duration::ZERO, Vec::new(), Growth::default());
        let mut times = Times::default();
        for &size in sizes {
            println!("{size} VMs");
            let start = controller.cpu().await?;
            times.extend(self.create(created, size, &mut growth).await.with_context(|| format!("{size} VMs"))?);
            created = size;
            cpu += controller.cpu().await? - start;
            let cost = change_cost(controller, &self.handlers, &mut changes).await?;
            figures.insert(format!("change_cost_ms_at_{size}"), cost);
            times.report(&format!("vms_{size}"), figures)?;
            memory.push((size as f64, controller.rss_kib().await?));
        }
        let count = created as f64;
        figures.insert("controller_cpu_ms_per_vm".into(), cpu.as_secs_f64() * 1000.0 / count);
        if let [(fewer, less), .., (more, most)] = memory[..] {
            figures.insert("controller_rss_kib_per_vm".into(), (most - less) / (more - fewer));
        }
        if let Some((empty, full)) = empty.zip(self.meter.kept_kib().await?) {
            figures.insert("etcd_kept_kib_per_vm".into(), (full - empty) / count);
        }
        println!("writes per VM:");
        let writes = log.writes(&self.story.namespace, count)?;
        for (name, number) in [
            ("writes_per_vm", writes.own - f64::from(changes)),
            ("events_per_vm", writes.own_events),
            ("writes_of_all_per_vm", writes.all - f64::from(changes)),
            ("events_of_all_per_vm", writes.all_events),
        ] {
            figures.insert(name.into(), number / count);
        }
        let log = AuditLog::from_now()?;
        self.rest(&mut growth, REST).await?;
        figures.insert("writes_at_rest".into(), log.writes_at_rest()?);
        println!("writes of all per minute at rest:");
        let minutes = REST.as_secs_f64() / 60.0;
        let writes = log.writes("", minutes)?;
        figures.insert("writes_of_all_at_rest_per_min".into(), writes.all / minutes);
        figures.insert("events_of_all_at_rest_per_min".into(), writes.all_events / minutes);
        growth.report(created, "", figures);
        growth.report_rest("", figures);
        Ok(())
    }

    /// Measures VMs that are created at once, and writes of plain pods meanwhile.
    async fn measure_burst(&self, from: usize, count: usize, figures: &mut Figures) -> Result<()> {
        println!("{count} VMs at once");
        let mut pods = PodWrites::new(self.story);
        let burst = pods.during(self.vms.create(from..from + count, f64::INFINITY)).await.context("VMs at once")?;
        figures.insert("saturation_vms_per_s".into(), burst.rate()?);
        pods.report("_in_storm", figures)
    }

    /// Creates VMs at the fixed rate and adds their cost.
    async fn create(&self, from: usize, to: usize, growth: &mut Growth) -> Result<Times> {
        let (before, started) = (self.meter.read().await?, Instant::now());
        let times = self.vms.create(from..to, RATE).await?;
        sleep(SETTLE).await;
        growth.add_busy(&before, &self.meter.read().await?, started.elapsed().as_secs_f64());
        Ok(times)
    }

    /// Adds the cost of a time without changes.
    async fn rest(&self, growth: &mut Growth, time: Duration) -> Result<()> {
        let (before, started) = (self.meter.read().await?, Instant::now());
        sleep(time).await;
        growth.add_rest(&before, &self.meter.read().await?, started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Returns the spec of a VMI on a simulated node.
fn vmi_spec() -> Value {
    json!({
        "nodeSelector": {SIMULATED: "true"},
        "tolerations": [{"key": SIMULATED, "operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
        "domain": {"memory": {"guest": "64Mi"}, "devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
        "networks": [{"name": "default", "pod": {}}],
    })
}

/// Adds the figures that compare others.
fn ratios(sizes: &[usize], figures: &mut Figures) -> Result<()> {
    let get = |figures: &Figures, name: String| figures.get(&name).copied().with_context(|| format!("no {name}"));
    for size in sizes {
        let vms = get(figures, format!("vms_{size}_p50_running_s"))?;
        let pods = get(figures, format!("pods_{size}_p50_running_s"))?;
        figures.insert(format!("vms_{size}_p50_over_pods"), vms / pods);
    }
    let costs = sizes.iter().map(|size| get(figures, format!("change_cost_ms_at_{size}")));
    let costs = costs.collect::<Result<Vec<_>>>()?;
    let (least, most) = (costs.iter().copied().fold(f64::MAX, f64::min), costs.iter().copied().fold(0.0, f64::max));
    figures.insert("change_cost_ratio".into(), most / least);
    Ok(())
}

/// Returns the CPU time in milliseconds that virt-controller uses for one status change of one VMI, less its usage at rest.
async fn change_cost(controller: &Controller<'_>, handlers: &Handlers, changes: &mut u32) -> Result<f64> {
    let before = controller.cpu().await?;
    let started = Instant::now();
    for _ in 0..CHANGES {
        *changes += 1;
        handlers.change("vm-0", *changes).await?;
    }
    // The last change needs some time to arrive.
    sleep(Duration::from_secs(1)).await;
    let took = started.elapsed();
    let changed = controller.cpu().await?;
    sleep(took).await;
    let rested = controller.cpu().await?;
    let (busy, idle) = (changed.saturating_sub(before), rested.saturating_sub(changed));
    Ok(busy.saturating_sub(idle).as_secs_f64() * 1000.0 / f64::from(CHANGES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_with_pods_and_take_the_extremes_of_all_sizes() {
        let mut figures: Figures = [
            ("vms_1000_p50_running_s", 3.0),
            ("pods_1000_p50_running_s", 2.0),
            ("vms_4000_p50_running_s", 8.0),
            ("pods_4000_p50_running_s", 4.0),
            ("change_cost_ms_at_1000", 1.0),
            ("change_cost_ms_at_4000", 0.4),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        ratios(&[1000, 4000], &mut figures).unwrap();
        assert_eq!(figures["vms_1000_p50_over_pods"], 1.5);
        assert_eq!(figures["vms_4000_p50_over_pods"], 2.0);
        assert_eq!(figures["change_cost_ratio"], 2.5);
        figures.remove("pods_1000_p50_running_s");
        assert!(ratios(&[1000, 4000], &mut figures).is_err());
    }

    #[test]
    fn sizes_ascend() {
        let most = |sizes: &[usize], watchers: &[usize]| {
            ScaleSizes { sizes: sizes.to_vec(), watchers: watchers.to_vec(), burst: 10, shards: 1 }.most()
        };
        assert_eq!(most(&[100, 400], &[0, 500]).unwrap(), 400);
        for (sizes, watchers) in [(&[][..], &[0][..]), (&[0, 10], &[0]), (&[400, 100], &[0]), (&[100], &[500, 0])] {
            assert!(most(sizes, watchers).is_err(), "{sizes:?} {watchers:?}");
        }
    }
}
