//! virt-controller: the cluster-wide controllers.

use anyhow::Context;
use clap::Parser;
use controllers::options::Options;

fn main() -> anyhow::Result<()> {
    if let Some(sampled) = daemon::profiler::sample_parent() {
        return Ok(sampled?);
    }
    control()
}

/// One thread serves all: decisions are short, and memory counts more than parallel work.
#[tokio::main(flavor = "current_thread")]
async fn control() -> anyhow::Result<()> {
    controllers::run(Options::parse()).await.context("virt-controller ended")
}
