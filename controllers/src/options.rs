//! Command line of virt-controller.

use clap::{Parser, ValueEnum};

/// Use of the importer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ImporterMode {
    /// It fills DataVolumes while CDI is not installed.
    #[default]
    Auto,
    /// The same, and each DataVolume that is left to CDI gets an event.
    On,
    /// It begins nothing.
    Off,
}

/// The cluster-wide controllers.
#[derive(Clone, Debug, Parser)]
#[command(name = "virt-controller", version)]
pub struct Options {
    /// Image of the launcher.
    #[arg(long, env = "LAUNCHER_IMAGE")]
    pub launcher_image: String,
    /// Image of the launcher of guests of arm64. Without it there are none.
    #[arg(long, env = "LAUNCHER_IMAGE_ARM64", default_value = "")]
    pub launcher_image_arm64: String,
    /// Image with which tools inspect disks; by default they use `libguestfs-tools` beside the launcher image.
    #[arg(long, env = "GUESTFS_IMAGE", default_value = "")]
    pub guestfs_image: String,
    /// Use of the importer, which fills DataVolumes in clusters without CDI.
    #[arg(long, value_enum, default_value_t, requires_ifs = [("auto", "importer_image"), ("on", "importer_image")])]
    pub importer: ImporterMode,
    /// Image of import pods.
    #[arg(long, env = "IMPORTER_IMAGE", default_value = "")]
    pub importer_image: String,
    /// Carries out `roleAggregationStrategy`. The API server lets virt-controller change the labels of the cluster roles only
    /// with the right to `escalate` them, which the chart grants together with this flag.
    #[arg(long)]
    pub manage_role_aggregation: bool,
    /// Number of parts into which the VMs are divided among the replicas. 1: one replica decides about all of them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(api::constants::MAX_SHARDS)))]
    pub shards: u32,
    /// Install namespace.
    #[arg(long, env = "POD_NAMESPACE", default_value = "kubevirt")]
    pub namespace: String,
    /// Name of this replica in the election.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,
    /// Address of the server for metrics and health.
    #[arg(long, default_value = "[::]:8443")]
    pub listen: std::net::SocketAddr,
    /// Verbosity: 2 is normal; the configuration of the cluster overrides it.
    #[arg(short = 'v', long, default_value_t = daemon::logging::DEFAULT_VERBOSITY)]
    pub verbosity: u32,
}
