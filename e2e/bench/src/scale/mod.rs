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

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, audit_log};

use self::{handlers::Handlers, load::Load, nodes::Nodes, process::Controller};
use crate::{Figures, writes};

/// Numbers of VMIs at which figures are taken, in ascending order.
const SIZES: [usize; 2] = [1000, 4000];
/// Objects created each second.
const RATE: f64 = 10.0;
/// Numbers of VMIs at which the cost of one change is measured.
const CHANGE_SIZES: [usize; 3] = [100, 1000, 4000];
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

/// Creates pods, then VMIs, at a fixed rate and takes all figures. `scale` divides every number, for a quick check.
pub(crate) async fn measure(story: &Story, kwok: &str, scale: usize, figures: &mut Figures) -> Result<()> {
    let smaller = |number: usize| (number / scale.max(1)).max(10);
    let largest = smaller(SIZES[SIZES.len() - 1]) + smaller(BURST);
    let nodes = Nodes::start(story, kwok, largest).await?;
    let pods = Load::pods(story);
    for size in SIZES {
        let times = pods.create(0..smaller(size), RATE).await.context("bare pods")?;
        times.report(&format!("pods_{size}"), figures)?;
        pods.delete().await.context("deletion of bare pods")?;
    }

    let handlers = Handlers::start(story, &nodes).await?;
    let vmis = Load::vmis(story);
    let controller = Controller::leader(story).await?;
    let (cpu, rss) = (controller.cpu().await?, controller.rss_kib().await?);
    figures.insert("controller_rss_kib_at_0".into(), rss);
    let mut created = 0;
    let mut times = load::Times::default();
    let mut memory = Vec::new();
    for size in CHANGE_SIZES {
        times.extend(vmis.create(created..smaller(size), RATE).await.with_context(|| format!("{size} VMIs"))?);
        created = smaller(size);
        tokio::time::sleep(SETTLE).await;
        let cost = change_cost(&controller, &handlers, created).await?;
        figures.insert(format!("change_cost_ms_at_{size}"), cost);
        if SIZES.contains(&size) {
            times.report(&format!("vmis_{size}"), figures)?;
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            memory.push((created as f64, controller.rss_kib().await?));
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let count = created as f64;
    figures.insert("controller_cpu_ms_per_vmi".into(), (controller.cpu().await? - cpu).as_secs_f64() * 1000.0 / count);
    if let [(fewer, less), (more, most)] = memory[..] {
        figures.insert("controller_rss_kib_per_vmi".into(), (most - less) / (more - fewer));
    }
    controller.check().await?;

    let before = writes::of_ferrovirt(&audit_log(), &story.namespace)?;
    figures.insert("writes_per_vmi".into(), before.own / count);
    tokio::time::sleep(REST).await;
    let after = writes::of_ferrovirt(&audit_log(), &story.namespace)?;
    figures.insert("writes_at_rest".into(), after.all - before.all);

    let burst = vmis.create(created..created + smaller(BURST), f64::INFINITY).await.context("VMIs at once")?;
    figures.insert("saturation_vmis_per_s".into(), burst.rate()?);
    vmis.delete().await.context("deletion of VMIs")?;
    ratios(figures);
    drop(handlers);
    nodes.remove(story).await
}

/// Adds the figures that compare others.
fn ratios(figures: &mut Figures) {
    let ratio = |figures: &Figures, a: &str, b: &str| Some(figures.get(a)? / figures.get(b)?);
    for size in SIZES {
        if let Some(value) =
            ratio(figures, &format!("vmis_{size}_p50_running_s"), &format!("pods_{size}_p50_running_s"))
        {
            figures.insert(format!("vmis_{size}_p50_over_pods"), value);
        }
    }
    if let Some(value) = ratio(figures, "change_cost_ms_at_4000", "change_cost_ms_at_100") {
        figures.insert("change_cost_ratio".into(), value);
    }
}

/// Returns the CPU time in milliseconds that virt-controller uses for one status change of one VMI, less its usage at rest.
async fn change_cost(controller: &Controller<'_>, handlers: &Handlers, count: usize) -> Result<f64> {
    ensure!(count > 0, "there is no VMI to change");
    let before = controller.cpu().await?;
    let started = tokio::time::Instant::now();
    for round in 0..CHANGES {
        handlers.change("vmi-0", round).await?;
    }
    // The last change needs some time to arrive.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let took = started.elapsed();
    let busy = controller.cpu().await? - before;
    let before = controller.cpu().await?;
    tokio::time::sleep(took).await;
    let idle = controller.cpu().await? - before;
    Ok(busy.saturating_sub(idle).as_secs_f64() * 1000.0 / f64::from(CHANGES))
}
