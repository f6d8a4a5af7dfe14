//! virt-handler.

use std::{net::IpAddr, path::PathBuf};

use clap::Parser;

/// The Ferrovirt agent of one node.
#[derive(Parser)]
#[command(name = "virt-handler", version)]
struct Arguments {
    /// Name of the node.
    #[arg(long, alias = "hostname-override", env = "NODE_NAME")]
    node_name: String,
    /// Address to serve on: the pod's.
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
    /// The node's `/dev`: a container's own is a copy that devices which come later are not in.
    #[arg(long, default_value = "/dev")]
    device_dir: PathBuf,
    /// Port for metrics and health.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Port for consoles and lifecycle requests.
    #[arg(long, default_value_t = 8186)]
    console_server_port: u16,
    /// Devices of each kind that may be handed out.
    #[arg(long, default_value_t = 1000)]
    max_devices: u32,
    /// Verbosity of the log; the cluster configuration overrides it.
    #[arg(short, default_value_t = process::logging::DEFAULT_VERBOSITY)]
    v: u32,
}

fn main() -> anyhow::Result<()> {
    if let Some(sampled) = process::profiler::sample_parent() {
        return Ok(sampled?);
    }
    let arguments = Arguments::parse();
    let verbosity = process::logging::init("virt-handler", arguments.v);
    let options = node::Options {
        node_name: arguments.node_name,
        listen: arguments.pod_ip,
        namespace: arguments.namespace,
        kubelet_root: arguments.kubelet_root,
        capabilities_dir: arguments.capabilities_dir,
        device_dir: arguments.device_dir,
        metrics_port: arguments.port,
        console_port: arguments.console_server_port,
        max_devices: arguments.max_devices,
    };
    Ok(node::runtime()?.block_on(node::run(options, verbosity))?)
}
