//! The process virt-api.

use anyhow::Context;
use clap::Parser;

/// Serves the subresources of virtual machines and their admission webhooks.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Port of the HTTPS server.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Verbosity of the log until the cluster configuration is known, 0 to 9.
    #[arg(short = 'v', long, default_value_t = process::logging::DEFAULT_VERBOSITY)]
    verbosity: u32,
}

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let verbosity = process::logging::init("virt-api", arguments.verbosity);
    apiserver::run(arguments.port, verbosity).await.context("virt-api cannot serve")
}
