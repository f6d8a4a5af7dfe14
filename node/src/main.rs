//! virt-handler.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::Parser;

/// Manages the VMIs of one node.
#[derive(Parser)]
#[command(name = "virt-handler", version)]
struct Arguments {
    /// Name of the node.
    #[arg(long, alias = "hostname-override", env = "NODE_NAME")]
    node_name: String,
    /// Address for consoles and lifecycle requests, beside the loopback address: the pod's. Metrics and health are served on all
    /// addresses.
    #[arg(long, alias = "pod-ip-address", env = "MY_POD_IP", default_value = "0.0.0.0")]
    pod_ip: IpAddr,
    /// Namespace of the installation.
    #[arg(long, env = "POD_NAMESPACE", default_value = "kubevirt")]
    namespace: String,
    /// kubelet's directory.
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_root: PathBuf,
    /// Directory with the node's virtualization capabilities.
    #[arg(long, default_value = "/var/lib/kubevirt-node-labeller")]
    capabilities_dir: PathBuf,
    /// The node's `/dev`. A container's own is a copy without devices that are plugged in later.
    #[arg(long, default_value = "/dev")]
    device_dir: PathBuf,
    /// Port for metrics and health.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Port for consoles and lifecycle requests.
    #[arg(long, default_value_t = 8186)]
    console_server_port: u16,
    /// Port for migrations from other nodes.
    #[arg(long, default_value_t = 8187)]
    migration_port: u16,
    /// Devices of each kind that kubelet may allocate.
    #[arg(long, default_value_t = 1000)]
    max_devices: u32,
    /// Seconds for which the process waits for migrations in progress when it is asked to stop.
    #[arg(long, default_value_t = 300)]
    graceful_shutdown_seconds: u64,
    /// Verbosity of the log; the cluster configuration overrides it.
    #[arg(short, default_value_t = daemon::logging::DEFAULT_VERBOSITY)]
    v: u32,
}

fn main() -> anyhow::Result<()> {
    if let Some(sampled) = daemon::profiler::sample_parent() {
        return Ok(sampled?);
    }
    let arguments = Arguments::parse();
    let verbosity = daemon::logging::init("virt-handler", arguments.v);
    let options = node::Options {
        node_name: arguments.node_name,
        listen: arguments.pod_ip,
        namespace: arguments.namespace,
        kubelet_root: arguments.kubelet_root,
        capabilities_dir: arguments.capabilities_dir,
        device_dir: arguments.device_dir,
        metrics_port: arguments.port,
        console_port: arguments.console_server_port,
        migration_port: arguments.migration_port,
        max_devices: arguments.max_devices,
        graceful_shutdown: Duration::from_secs(arguments.graceful_shutdown_seconds),
    };
    Ok(node::runtime()?.block_on(node::run(options, verbosity))?)
}
