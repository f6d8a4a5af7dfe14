//! Command line of the worker, written by virt-controller.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Worker of a launcher pod.
#[derive(Clone, Debug, Parser)]
#[command(name = "virt-launcher", version, args_conflicts_with_subcommands = true)]
pub struct CommandLine {
    /// A task other than running a VMI.
    #[command(subcommand)]
    pub task: Option<Task>,
    /// The VMI.
    #[command(flatten)]
    pub vmi: Option<VmiArgs>,
}

/// Tasks other than running a VMI.
#[derive(Clone, Debug, Subcommand)]
pub enum Task {
    /// Collects the capabilities of libvirt and QEMU on this node.
    NodeCapabilities {
        /// Directory that receives the files.
        #[arg(long)]
        output: PathBuf,
    },
    /// Holds the volumes of an attachment pod until it is terminated.
    HoldVolumes {
        /// Socket that identifies this pod to virt-handler.
        #[arg(long)]
        socket: PathBuf,
        /// UID of the VirtualMachineInstance.
        #[arg(long)]
        vmi_uid: String,
        /// Names of the volumes.
        #[arg(long = "volume")]
        volumes: Vec<String>,
    },
    /// Ends at once. A pod with this program lets the scheduler bind its claims.
    BindClaims,
    /// Finds the mark of a migration that took the state of a VMI to another claim. Ends with code 0 if it is there, and 42 if not.
    FindMigrated {
        /// Mount of the claim from which the migration took the state.
        #[arg(long)]
        directory: PathBuf,
        /// UID of the migration.
        #[arg(long)]
        migration: String,
    },
    /// One probing run in its own process; started by `node-capabilities`.
    #[command(hide = true)]
    ProbeCapabilities {
        /// Scratch directory.
        #[arg(long)]
        scratch: PathBuf,
        /// Show /dev/kvm to QEMU.
        #[arg(long)]
        kvm: bool,
        /// Repeat in the same scratch directory, to verify that libvirt accepts the cache.
        #[arg(long)]
        verify: bool,
    },
}

/// The VMI to run.
#[derive(Args, Clone, Debug)]
pub struct VmiArgs {
    /// Name of the VirtualMachineInstance.
    #[arg(long)]
    pub name: String,
    /// UID of the VirtualMachineInstance.
    #[arg(long)]
    pub uid: String,
    /// Namespace of the VirtualMachineInstance.
    #[arg(long)]
    pub namespace: String,
    /// Seconds from the request to shut down until the domain is destroyed.
    #[arg(long, default_value_t = 45)]
    pub grace_period_seconds: u64,
    /// Run without hardware virtualization if /dev/kvm is missing.
    #[arg(long)]
    pub allow_emulation: bool,
    /// Log filters of libvirt's daemon besides warnings, in the syntax of `LIBVIRT_LOG_FILTERS`.
    #[arg(long)]
    pub libvirt_log_filters: Option<String>,
    /// Directory of UEFI firmware images.
    #[arg(long, default_value = "/usr/share/OVMF")]
    pub ovmf_path: PathBuf,
    /// Start libvirt's daemon after virt-handler has raised limits of this process, which the daemon and QEMU inherit.
    #[arg(long)]
    pub await_limits: bool,
    /// Fail at once, for tests.
    #[arg(long)]
    pub simulate_crash: bool,
}
