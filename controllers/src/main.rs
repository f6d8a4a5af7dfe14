//! virt-controller: the cluster-wide controllers.

use anyhow::Context;
use clap::Parser;
use controllers::options::Options;

/// One thread serves all: decisions are short, and memory counts more than parallel work.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    controllers::run(Options::parse()).await.context("virt-controller ended")
}
