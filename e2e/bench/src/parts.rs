//! The parts of a run, in their order.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use ferrovirt_e2e_tests::{Story, webhook::Endpoint};
use tokio::time::sleep;

use crate::{
    Figures, actions, answers, changes, drain, handler, hibernation, imports, leader, memory, migration, policies,
    pools, round_trips, snapshots, soak, start, state, throughput, webhook, writes,
};

/// A part of the benchmark.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Part {
    /// Starts and deletions, memory, writes
    Starts,
    /// Start, stop, restart, pause of a VM
    Actions,
    /// First byte of a console, first answer through a Service
    Answers,
    /// Changes of a running VM
    Changes,
    /// VMs with kept state and file systems
    State,
    /// Imports and clones of disks
    Imports,
    /// Stall of a guest by snapshots
    Snapshots,
    /// Hibernated guests
    Hibernation,
    /// Throughput of forwarded ports
    Throughput,
    /// A pool of VMs beside a replica set
    Pools,
    /// Writes of plain pods with the policies of the chart and without
    Policies,
    /// virt-handler killed beside many VMIs
    Handler,
    /// Leader of virt-controller killed
    Leader,
    /// Migrations; needs two nodes
    Migrations,
    /// Round trips of a console during migrations; needs two nodes
    RoundTrips,
    /// Drain of a node; needs two nodes
    Drain,
    /// Admission reviews, also during an attack
    Reviews,
    /// Memory of a VM that is used for a long time; only on request
    Soak,
}

/// Sizes of the parts.
#[derive(Args)]
pub(crate) struct Sizes {
    /// Number of starts of each kind; the median is reported
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// Number of migrations
    #[arg(long, default_value_t = 10)]
    moves: usize,
    /// Number of VMs on the drained node
    #[arg(long, default_value_t = 20)]
    drain_vms: usize,
    /// Number of VMIs beside which virt-handler is killed
    #[arg(long, default_value_t = 20)]
    handler_vms: usize,
    /// Number of pods that are created with the policies of the chart, and without
    #[arg(long, default_value_t = 300)]
    pods: usize,
    /// Seconds for which the part `soak` uses its VM
    #[arg(long, default_value_t = 1800)]
    soak_seconds: u64,
}

impl Part {
    /// Returns the parts of a run without a choice.
    pub(crate) fn usual() -> Vec<Self> {
        Self::value_variants().iter().copied().filter(|part| !matches!(part, Self::Soak)).collect()
    }

    /// Measures the part.
    pub(crate) async fn measure(self, s: &Story, sizes: &Sizes, figures: &mut Figures) -> Result<()> {
        let rounds = sizes.rounds;
        match self {
            Self::Starts => starts(s, rounds, figures).await,
            Self::Actions => actions::measure(s, rounds, figures).await,
            Self::Answers => answers::measure(s, rounds, figures).await,
            Self::Changes => changes::measure(s, rounds, figures).await,
            Self::State => state::measure(s, rounds, figures).await,
            Self::Imports => imports::measure(s, rounds, figures).await,
            Self::Snapshots => snapshots::measure(s, rounds, figures).await,
            Self::Hibernation => hibernation::measure(s, rounds, figures).await,
            Self::Throughput => throughput::measure(s, figures).await,
            Self::Pools => pools::measure(s, figures).await,
            Self::Policies => policies::measure(s, sizes.pods, figures).await,
            Self::Handler => handler::measure(s, sizes.handler_vms, figures).await,
            Self::Leader => leader::measure(s, figures).await,
            Self::Migrations => migration::measure(s, rounds, sizes.moves, figures).await,
            Self::RoundTrips => round_trips::measure(s, figures).await,
            Self::Drain => drain::measure(s, sizes.drain_vms, figures).await,
            Self::Reviews => reviews(s, figures).await,
            Self::Soak => soak::measure(s, Duration::from_secs(sizes.soak_seconds), figures).await,
        }
    }
}

async fn starts(s: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    start::measure(s, rounds, figures).await?;
    let vmi = start::StartedVmi::start(s, "memory").await?;
    // The worker and libvirtd need some time to settle after the guest has booted.
    sleep(Duration::from_secs(10)).await;
    memory::measure(s, &vmi, figures).await?;
    writes::measure(s, &vmi, figures).await?;
    writes::measure_rest(figures).await?;
    vmi.delete().await?;
    // After the memory of the processes, which such a load raises.
    start::measure_ten(s, figures).await
}

async fn reviews(s: &Story, figures: &mut Figures) -> Result<()> {
    // Remaining VMIs are deleted meanwhile: removing a pod costs more CPU time than the reviews.
    sleep(Duration::from_secs(10)).await;
    let endpoint = Endpoint::of_cluster(&s.client).await?;
    webhook::measure(&endpoint, figures).await?;
    webhook::measure_attacked(s, &endpoint, figures).await
}
