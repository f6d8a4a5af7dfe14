//! Benchmarks on the real cluster: start and deletion of a VMI compared with a bare pod on the same node in the same run,
//! actions, changes of a running VM, memory of a VMI outside of QEMU, calls to the API server, recovery after failures, and
//! latency of admission reviews. Each module documents its method, the README the figures.
//!
//! Prints a table and writes `build/bench.json`, a flat object with one number per key. Keys contain the unit.
//!
//! `parts.rs` lists what one run measures. `consoles.rs`, `cold.rs`, `soak.rs` and `scale/` run only on request: the first and the last
//! need a cluster of their own, `cold.rs` removes images, and `soak.rs` takes long.

mod actions;
mod answers;
mod changes;
mod channels;
mod cold;
mod consoles;
mod drain;
mod etcd;
mod exposition;
mod figures;
mod handler;
mod hibernation;
mod imports;
mod lane;
mod leader;
mod memory;
mod migration;
mod netns;
mod parts;
mod policies;
mod pools;
mod round_trips;
mod scale;
mod snapshots;
mod soak;
mod start;
mod state;
mod throughput;
mod webhook;
mod writes;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use ferrovirt_e2e_tests::{story, webhook::Endpoint};

use crate::{
    figures::{Figures, add_medians, compare, median, percentile, print, write},
    parts::{Part, Sizes},
};

/// Measure starts, memory and API calls on the cluster of KUBECONFIG, or on the test cluster
#[derive(Parser)]
struct Options {
    /// Measure only these parts, and write no file
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    #[command(flatten)]
    sizes: Sizes,
    /// Measure only admission reviews, at WEBHOOK_URL if set (see the example `webhooks` of the API server)
    #[arg(long, conflicts_with = "only")]
    reviews: bool,
    /// Measure only consoles, of N VMIs at once; about a hundred VMIs fit on a node
    #[arg(long, value_name = "N", conflicts_with_all = ["only", "reviews"], value_parser = clap::value_parser!(u16).range(1..=1000))]
    consoles: Option<u16>,
    /// Measure only the first VMI on a node without images, which come from the registry PROGRAM
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["only", "reviews", "consoles"])]
    cold: Option<String>,
    /// Measure only the channels of migrations, with the example `channels` of the crate of virt-handler; needs no cluster
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["only", "reviews", "consoles", "cold"])]
    channels: Option<PathBuf>,
    /// Compare --channels with the example of an earlier build
    #[arg(long, value_name = "PROGRAM", requires = "channels")]
    channels_before: Option<PathBuf>,
    /// Measure only thousands of VMs on nodes that the program KWOK simulates; writes build/bench-scale.json
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["only", "reviews", "consoles", "cold", "channels"])]
    scale: Option<String>,
    #[command(flatten)]
    scale_sizes: scale::ScaleSizes,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut figures = Figures::new();
    if options.reviews {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { webhook::measure(&Endpoint::from_environment().await?, &mut figures).await })?;
        print(&figures);
        return Ok(());
    }
    if let Some(program) = &options.channels {
        channels::measure(program, options.channels_before.as_deref(), options.sizes.rounds, &mut figures)?;
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if let Some(count) = options.consoles {
        story("consoles", async |s| consoles::measure(s, count.into(), &mut figures).await);
        print(&figures);
        return Ok(());
    }
    if let Some(registry) = options.cold {
        story("cold", async |s| cold::measure(s, &registry, &mut figures).await);
        compare(&mut figures);
        print(&figures);
        return Ok(());
    }
    if let Some(kwok) = options.scale {
        story("scale", async |s| {
            let result = scale::measure(s, &kwok, &options.scale_sizes, &mut figures).await;
            if result.is_err() {
                print(&figures);
            }
            result
        });
        print(&figures);
        return write(&figures, "bench-scale.json");
    }
    let parts = if options.only.is_empty() { Part::usual() } else { options.only.clone() };
    story("bench", async |s| {
        for part in &parts {
            let result = part.measure(s, &options.sizes, &mut figures).await;
            if result.is_err() {
                print(&figures);
            }
            result?;
        }
        Ok(())
    });
    compare(&mut figures);
    print(&figures);
    if options.only.is_empty() { write(&figures, "bench.json") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn options_are_consistent() {
        Options::command().debug_assert();
        let parsed = |line: &str| Options::try_parse_from(line.split(' '));
        let options = parsed("bench --only drain,round-trips --drain-vms 5").unwrap();
        assert!(matches!(options.only[..], [Part::Drain, Part::RoundTrips]));
        assert!(parsed("bench --scale kwok --sizes 100,8000 --watchers 0,2000 --burst 500 --shards 4").is_ok());
        assert!(parsed("bench --watchers 0").is_err());
        assert!(parsed("bench --only soak --soak-seconds 60").is_ok());
        assert!(!Part::usual().iter().any(|part| matches!(part, Part::Soak)));
        assert!(parsed("bench --only drain --reviews").is_err());
    }
}
