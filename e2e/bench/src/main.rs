//! Benchmarks on the real cluster: start and deletion of a VMI compared with a bare pod on the same node in the same run,
//! actions, changes of a running VM, memory of a VMI outside of QEMU, calls to the API server, and latency of admission
//! reviews. Each module documents its method, the README the figures.
//!
//! Prints a table and writes `build/bench.json`, a flat object with one number per key. Keys contain the unit.
//!
//! `consoles.rs` runs only on request, because it needs a cluster of its own.

mod actions;
mod changes;
mod consoles;
mod hibernation;
mod imports;
mod lane;
mod memory;
mod migration;
mod pools;
mod scale;
mod snapshots;
mod start;
mod state;
mod throughput;
mod webhook;
mod writes;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use clap::Parser;
use ferrovirt_e2e_tests::{repository, story, webhook::Endpoint};

/// Measured values by name.
type Figures = BTreeMap<String, f64>;

/// Measure starts, memory and API calls on the cluster of KUBECONFIG, or on the test cluster
#[derive(Parser)]
struct Options {
    /// Number of starts of each kind; the median is reported
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure only admission reviews, at WEBHOOK_URL if set (see the example `webhooks` of the API server)
    #[arg(long)]
    reviews: bool,
    /// Measure only consoles, of N VMIs at once; about a hundred VMIs fit on a node
    #[arg(long, value_name = "N", conflicts_with = "reviews", value_parser = clap::value_parser!(u16).range(1..=1000))]
    consoles: Option<u16>,
    /// Measure only migrations, which need a cluster of two nodes
    #[arg(long, conflicts_with_all = ["reviews", "consoles"])]
    migrations: bool,
    /// Measure only imports and clones of disks
    #[arg(long, conflicts_with_all = ["reviews", "consoles", "migrations"])]
    imports: bool,
    /// Measure only a pool of VMs beside a replica set
    #[arg(long, conflicts_with_all = ["reviews", "consoles", "migrations", "imports"])]
    pools: bool,
    /// Measure only the stall of a guest by snapshots
    #[arg(long, conflicts_with_all = ["reviews", "consoles", "migrations", "imports", "pools"])]
    snapshots: bool,
    /// Measure only VMs with kept state and file systems
    #[arg(long, conflicts_with_all = ["reviews", "consoles", "migrations", "imports", "pools", "snapshots"])]
    state: bool,
    /// Measure only hibernated guests
    #[arg(long, conflicts_with_all = ["reviews", "consoles", "migrations", "imports", "pools", "snapshots", "state"])]
    hibernation: bool,
    /// Measure only thousands of VMIs on nodes that the program KWOK simulates; writes build/bench-scale.json
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["reviews", "consoles", "migrations", "imports", "pools", "snapshots", "state", "hibernation"])]
    scale: Option<String>,
    /// Divide the numbers of VMIs of --scale, for a quick check
    #[arg(long, default_value_t = 1, requires = "scale")]
    scale_divisor: usize,
}

/// Targets of figures.
const TARGETS: [(&str, f64); 25] = [
    ("vmi_running_over_pod", 1.5),
    ("vmi_ready_after_running_s", 0.05),
    ("delete_less_pod_delete_s", 0.5),
    ("restart_less_stop_and_start_s", 0.3),
    ("restart_less_full_stop_and_start_s", 0.3),
    ("volume_in_guest_over_pod_with_claim", 2.0),
    ("import_registry_over_convert", 1.3),
    ("import_http_over_wget", 1.5),
    ("vm_with_clone_over_claim", 1.5),
    ("snapshot_stall_over_freeze_and_thaw", 1.3),
    ("hibernate_over_plain_save", 1.3),
    ("resume_over_start_and_plain_restore", 1.3),
    ("import_pod_rss_mib", 64.0),
    ("outside_qemu_pss_mib", 25.0),
    ("start_with_state_over_without", 1.2),
    ("swtpm_pss_mib", 5.0),
    ("virtiofsd_pss_mib", 6.0),
    ("launcher_supervisor_pss_mib", 3.0),
    ("virt_api_rss_mib", 23.8),
    ("virt_controller_rss_mib", 23.8),
    ("virt_handler_rss_mib", 19.1),
    ("webhook_p99_ms", 10.0),
    ("migration_over_plain", 1.3),
    ("migration_begin_over_pod", 1.5),
    ("migration_blackout_over_plain", 2.0),
];

fn main() -> Result<()> {
    let options = Options::parse();
    let mut figures = Figures::new();
    if options.reviews {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { webhook::measure(&Endpoint::from_environment().await?, &mut figures).await })?;
        print(&figures);
        return Ok(());
    }
    if let Some(count) = options.consoles {
        story("consoles", async |s| consoles::measure(s, count.into(), &mut figures).await);
        print(&figures);
        return Ok(());
    }
    if options.migrations {
        story("migrations", async |s| migration::measure(s, options.rounds, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if options.imports {
        story("imports", async |s| imports::measure(s, options.rounds, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if options.pools {
        story("pools", async |s| pools::measure(s, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if options.snapshots {
        story("snapshots", async |s| snapshots::measure(s, options.rounds, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if options.state {
        story("state", async |s| state::measure(s, options.rounds, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if options.hibernation {
        story("hibernation", async |s| hibernation::measure(s, options.rounds, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if let Some(kwok) = options.scale {
        story("scale", async |s| {
            let result = scale::measure(s, &kwok, options.scale_divisor, &mut figures).await;
            if result.is_err() {
                print(&figures);
            }
            result
        });
        print(&figures);
        return write(&figures, "bench-scale.json");
    }
    story("bench", async |s| {
        start::measure(s, options.rounds, &mut figures).await?;
        let vmi = start::StartedVmi::start(s, "memory").await?;
        // The worker and libvirtd need some time to settle after the guest has booted.
        tokio::time::sleep(Duration::from_secs(10)).await;
        memory::measure(s, &vmi, &mut figures).await?;
        writes::measure(s, &vmi, &mut figures).await?;
        writes::measure_rest(&mut figures).await?;
        vmi.delete().await?;
        // After the memory of the processes, which such a load raises.
        start::measure_ten(s, &mut figures).await?;
        actions::measure(s, options.rounds, &mut figures).await?;
        changes::measure(s, options.rounds, &mut figures).await?;
        state::measure(s, options.rounds, &mut figures).await?;
        imports::measure(s, options.rounds, &mut figures).await?;
        snapshots::measure(s, options.rounds, &mut figures).await?;
        hibernation::measure(s, options.rounds, &mut figures).await?;
        throughput::measure(s, &mut figures).await?;
        pools::measure(s, &mut figures).await?;
        migration::measure(s, options.rounds, &mut figures).await?;
        // Remaining VMIs are deleted meanwhile: removing a pod costs more CPU time than the reviews.
        tokio::time::sleep(Duration::from_secs(10)).await;
        let endpoint = Endpoint::of_cluster(&s.client).await?;
        webhook::measure(&endpoint, &mut figures).await?;
        webhook::measure_attacked(s, &endpoint, &mut figures).await
    });
    compare(&mut figures);
    print(&figures);
    write(&figures, "bench.json")
}

/// Adds the figures that compare others with a floor of the same run.
fn compare(figures: &mut Figures) {
    let get = |name: &str| figures.get(name).copied();
    let ratio = |a: &str, b: &str| Some(get(a)? / get(b)?);
    let restart_less = |stop: &str| Some(get("restart_s")? - get(stop)? - get("start_s")?);
    let compared = [
        ("vmi_running_over_pod", ratio("vmi_running_s", "pod_running_s")),
        ("vmi_running_over_pod_without_volumes", ratio("vmi_running_s", "pod_without_volumes_running_s")),
        ("ten_vmis_over_ten_pods", ratio("ten_vmis_running_s", "ten_pods_running_s")),
        ("delete_less_pod_delete_s", get("delete_s").zip(get("pod_delete_s")).map(|(vmi, pod)| vmi - pod)),
        ("restart_less_stop_and_start_s", restart_less("stop_s")),
        ("restart_less_full_stop_and_start_s", restart_less("stop_until_startable_s")),
        ("volume_in_guest_over_pod_with_claim", ratio("volume_in_guest_s", "pod_with_claim_running_s")),
        ("start_with_state_over_without", ratio("start_with_state_s", "start_without_state_s")),
        ("import_registry_over_convert", ratio("import_registry_s", "convert_s")),
        ("import_http_over_wget", ratio("import_http_s", "wget_s")),
        ("vm_with_clone_over_claim", ratio("vm_with_clone_running_s", "vm_with_claim_running_s")),
        ("snapshot_stall_over_freeze_and_thaw", ratio("snapshot_stall_s", "freeze_and_thaw_stall_s")),
        ("hibernate_over_plain_save", ratio("hibernate_save_s", "plain_save_s")),
        ("resume_over_start_and_plain_restore", ratio("resume_s", "start_and_plain_restore_s")),
        ("pool_up_over_replica_set", ratio("pool_up_per_s", "replica_set_up_per_s")),
        ("pool_down_over_replica_set", ratio("pool_down_per_s", "replica_set_down_per_s")),
        ("portforward_over_kubectl", ratio("portforward_mib_s", "portforward_pod_mib_s")),
        ("migration_over_plain", ratio("migration_s", "plain_migration_s")),
        ("migration_begin_over_pod", ratio("migration_begin_s", "pod_beside_migration_running_s")),
        ("migration_blackout_over_plain", ratio("migration_blackout_ms", "plain_blackout_ms")),
        ("webhook_attacked_over_quiet", ratio("webhook_attacked_p99_ms", "webhook_p99_ms")),
    ];
    figures.extend(compared.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
}

/// Writes the figures into a file of the build folder.
fn write(figures: &Figures, name: &str) -> Result<()> {
    let file = repository().join("build").join(name);
    let rounded: BTreeMap<&String, f64> = figures.iter().map(|(k, v)| (k, (v * 1000.0).round() / 1000.0)).collect();
    std::fs::create_dir_all(repository().join("build"))?;
    std::fs::write(&file, serde_json::to_string_pretty(&rounded)?)
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Prints the figures with their targets.
fn print(figures: &Figures) {
    println!("\n{:<40} {:>10}  target", "figure", "value");
    for (name, value) in figures {
        let target =
            TARGETS.iter().chain(&scale::TARGETS).find(|(of, _)| of == name).map_or(String::new(), |(_, most)| {
                format!("<= {most}  {}", if value > most { "MISSED" } else { "met" })
            });
        println!("{name:<40} {value:>10.3}  {target}");
    }
}

/// Returns the median, or the lower of the two middle values.
fn median(values: &[f64]) -> Option<f64> {
    percentile(values, 50)
}

/// Returns a percentile (nearest rank).
fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentile_is_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 99), Some(198.0));
        assert_eq!(percentile(&values, 50), Some(100.0));
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 50), Some(2.0));
        assert_eq!(percentile(&[4.0, 1.0, 2.0, 3.0], 50), Some(2.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
        assert_eq!(percentile(&[], 99), None);
    }
}
