//! The process virt-api.

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Serves the subresources of virtual machines and their admission webhooks.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Port of the HTTPS server.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Verbosity of the log until the cluster configuration is known, 0 to 9.
    #[arg(short = 'v', long, global = true, default_value_t = process::logging::DEFAULT_VERBOSITY)]
    verbosity: u32,
    /// A step of installing or uninstalling, in place of serving.
    #[command(subcommand)]
    step: Option<Step>,
}

/// Steps that the chart's hooks take.
#[derive(Clone, Subcommand)]
enum Step {
    /// Bring the definitions of the kinds up to date.
    ApplyDefinitions {
        /// The configuration that the installation is to have, as JSON; it is checked first
        #[arg(long)]
        configuration: Option<String>,
    },
    /// Fail while machines run.
    CheckUninstall {
        /// The command that keeps the installation, told in a refusal
        #[arg(long, default_value = "helm rollback")]
        keep: String,
    },
    /// Remove what the processes made and kept.
    CleanUp,
}

fn main() -> anyhow::Result<()> {
    if let Some(sampled) = process::profiler::sample_parent() {
        return Ok(sampled?);
    }
    serve()
}

#[tokio::main(worker_threads = 2)]
async fn serve() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let verbosity = process::logging::init("virt-api", arguments.verbosity);
    match arguments.step {
        None => apiserver::run(arguments.port, verbosity).await.context("virt-api cannot serve"),
        Some(Step::ApplyDefinitions { configuration }) => {
            if let Some(configuration) = &configuration {
                apiserver::installation::check_configuration(configuration)?;
            }
            Ok(apiserver::installation::apply_definitions().await?)
        }
        Some(Step::CheckUninstall { keep }) => Ok(apiserver::installation::check_uninstall(keep).await?),
        Some(Step::CleanUp) => Ok(apiserver::installation::clean_up().await?),
    }
}
