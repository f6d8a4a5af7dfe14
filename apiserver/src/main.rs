//! The process virt-api.

use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Serves the subresources of virtual machines and the admission webhooks
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Port of the HTTPS server
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Verbosity of the log until the cluster configuration is known, 0 to 9
    #[arg(short = 'v', long, global = true, default_value_t = daemon::logging::DEFAULT_VERBOSITY)]
    verbosity: u32,
    /// A hook of the chart, instead of serving
    #[command(subcommand)]
    step: Option<Step>,
}

/// Hooks of the chart.
#[derive(Clone, Subcommand)]
enum Step {
    /// Update the custom resource definitions
    ApplyDefinitions {
        /// Cluster configuration of the installation as JSON, checked before the update
        #[arg(long)]
        configuration: Option<String>,
        /// Also those of the importer, where nobody else has brought them
        #[arg(long)]
        importer: bool,
    },
    /// Delete the KubeVirt object, and with it the workloads; fail while workloads block it
    Uninstall {
        /// Command that keeps the installation, for the error message
        #[arg(long, default_value = "helm rollback")]
        keep: String,
    },
    /// Remove the objects, labels and finalizers of the processes
    CleanUp {
        /// Also delete the custom resource definitions that have no objects
        #[arg(long)]
        delete_definitions: bool,
    },
    /// Boot a VMI and delete it
    TestVm {
        /// Namespace of the VMI
        #[arg(long)]
        namespace: String,
        /// Seconds until it must run
        #[arg(long, default_value_t = 180)]
        timeout: u64,
    },
}

fn main() -> anyhow::Result<()> {
    if let Some(sampled) = daemon::profiler::sample_parent() {
        return Ok(sampled?);
    }
    serve()
}

#[tokio::main(worker_threads = 2)]
async fn serve() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let verbosity = daemon::logging::init("virt-api", arguments.verbosity);
    match arguments.step {
        None => apiserver::run(arguments.port, verbosity).await.context("virt-api cannot serve"),
        Some(Step::ApplyDefinitions { configuration, importer }) => {
            if let Some(configuration) = &configuration {
                apiserver::helm_hooks::check_configuration(configuration)?;
            }
            apiserver::helm_hooks::apply_definitions().await?;
            if importer {
                apiserver::helm_hooks::apply_importer_definitions().await?;
            }
            Ok(())
        }
        Some(Step::Uninstall { keep }) => Ok(apiserver::helm_hooks::uninstall(keep).await?),
        Some(Step::CleanUp { delete_definitions }) => Ok(apiserver::helm_hooks::clean_up(delete_definitions).await?),
        Some(Step::TestVm { namespace, timeout }) => {
            Ok(apiserver::helm_hooks::test_vm(&namespace, Duration::from_secs(timeout)).await?)
        }
    }
}
