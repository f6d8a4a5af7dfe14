//! Scale: thousands of VMIs on simulated nodes.
//!
//! kube-apiserver, etcd, scheduler, virt-api and virt-controller are real. KWOK simulates nodes and kubelets (`nodes.rs`),
//! and `handlers.rs` simulates the virt-handler of each node. Bare pods on the same nodes are the baseline. The entry point is
//! [`measure`].

mod handlers;
mod load;
mod nodes;
mod process;

use std::time::Duration;

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::Story;
use tokio::time::{Instant, sleep};

use self::{
    handlers::Handlers,
    load::{Load, Times},
    nodes::Nodes,
    process::Controller,
};
use crate::{Figures, writes::AuditLog};

/// Numbers of VMIs at which start and memory are measured, and those at which the cost of a change is.
const SIZES: [usize; 2] = [1000, 4000];
const CHANGE_SIZES: [usize; 3] = [100, 1000, 4000];
/// Objects created each second.
const RATE: f64 = 10.0;
/// Status changes whose cost is measured.
const CHANGES: u32 = 200;
/// VMIs created at once for the rate of saturation.
const BURST: usize = 500;
/// Time without changes in which writes are counted.
const REST: Duration = Duration::from_secs(60);
/// Time in which the controllers settle before a measurement.
const SETTLE: Duration = Duration::from_secs(15);

/// Targets of figures.
pub(crate) const TARGETS: [(&str, f64); 5] = [
    ("vmis_1000_p50_over_pods", 1.5),
    ("vmis_4000_p50_over_pods", 1.5),
    ("controller_rss_kib_per_vmi", 20.0),
    ("change_cost_ratio", 1.5),
    ("writes_at_rest", 0.0),
];

/// Creates pods, then VMIs, at a fixed rate and takes all figures. `divisor` divides every number, for a quick check.
pub(crate) async fn measure(story: &Story, kwok: &str, divisor: usize, figures: &mut Figures) -> Result<()> {
    let smaller = |number: usize| (number / divisor.max(1)).max(10);
    let nodes = Nodes::start(story, kwok, smaller(SIZES[1]) + smaller(BURST)).await?;
    let pods = Load::pods(story);
    for size in SIZES {
        println!("{size} pods");
        let times = pods.create(0..smaller(size), RATE).await.context("bare pods")?;
        times.report(&format!("pods_{size}"), figures)?;
        pods.delete().await.context("deletion of bare pods")?;
    }
    drop(pods);

    let handlers = Handlers::start(story, &nodes).await?;
    let vmis = Load::vmis(story);
    let controller = Controller::leader(story).await?;
    figures.insert("controller_rss_kib_at_0".into(), controller.rss_kib().await?);
    let log = AuditLog::from_now()?;
    let (mut created, mut changes) = (0, 0);
    let (mut times, mut cpu, mut memory) = (Times::default(), Duration::ZERO, Vec::new());
    for size in CHANGE_SIZES {
        println!("{size} VMIs");
        let start = controller.cpu().await?;
        times.extend(vmis.create(created..smaller(size), RATE).await.with_context(|| format!("{size} VMIs"))?);
        created = smaller(size);
        sleep(SETTLE).await;
        cpu += controller.cpu().await? - start;
        let cost = change_cost(&controller, &handlers, &mut changes).await?;
        figures.insert(format!("change_cost_ms_at_{size}"), cost);
        if SIZES.contains(&size) {
            times.report(&format!("vmis_{size}"), figures)?;
            memory.push((created as f64, controller.rss_kib().await?));
        }
    }
    let count = created as f64;
    figures.insert("controller_cpu_ms_per_vmi".into(), cpu.as_secs_f64() * 1000.0 / count);
    if let [(fewer, less), (more, most)] = memory[..] {
        figures.insert("controller_rss_kib_per_vmi".into(), (most - less) / (more - fewer));
    }
    let writes = log.writes_in(&story.namespace)? - f64::from(changes);
    figures.insert("writes_per_vmi".into(), writes / count);
    let log = AuditLog::from_now()?;
    sleep(REST).await;
    figures.insert("writes_at_rest".into(), log.writes_at_rest()?);

    println!("{BURST} VMIs at once");
    let burst = vmis.create(created..created + smaller(BURST), f64::INFINITY).await.context("VMIs at once")?;
    figures.insert("saturation_vmis_per_s".into(), burst.rate()?);
    controller.check().await?;
    vmis.delete().await.context("deletion of VMIs")?;
    drop(handlers);
    nodes.remove(story).await?;
    ratios(figures)
}

/// Adds the figures that compare others.
fn ratios(figures: &mut Figures) -> Result<()> {
    let get = |figures: &Figures, name: String| figures.get(&name).copied().with_context(|| format!("no {name}"));
    for size in SIZES {
        let vmis = get(figures, format!("vmis_{size}_p50_running_s"))?;
        let pods = get(figures, format!("pods_{size}_p50_running_s"))?;
        figures.insert(format!("vmis_{size}_p50_over_pods"), vmis / pods);
    }
    let costs = CHANGE_SIZES.map(|size| get(figures, format!("change_cost_ms_at_{size}")));
    let costs = costs.into_iter().collect::<Result<Vec<_>>>()?;
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
        handlers.change("vmi-0", *changes).await?;
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
            ("vmis_1000_p50_running_s", 3.0),
            ("pods_1000_p50_running_s", 2.0),
            ("vmis_4000_p50_running_s", 8.0),
            ("pods_4000_p50_running_s", 4.0),
            ("change_cost_ms_at_100", 0.5),
            ("change_cost_ms_at_1000", 1.0),
            ("change_cost_ms_at_4000", 0.4),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        ratios(&mut figures).unwrap();
        assert_eq!(figures["vmis_1000_p50_over_pods"], 1.5);
        assert_eq!(figures["vmis_4000_p50_over_pods"], 2.0);
        assert_eq!(figures["change_cost_ratio"], 2.5);
        figures.remove("pods_1000_p50_running_s");
        assert!(ratios(&mut figures).is_err());
    }
}
