//! Command line of the worker. virt-controller writes it; arguments that this launcher has no use for are not passed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Worker of a launcher pod.
#[derive(Clone, Debug, Parser)]
#[command(name = "virt-launcher", version, args_conflicts_with_subcommands = true)]
pub struct CommandLine {
    /// Another task than running a machine.
    #[command(subcommand)]
    pub task: Option<Task>,
    /// The machine.
    #[command(flatten)]
    pub machine: Option<MachineArgs>,
}

/// Tasks other than running a machine.
#[derive(Clone, Debug, Subcommand)]
pub enum Task {
    /// Writes down what libvirt and QEMU can do on this node.
    NodeCapabilities {
        /// Directory that receives the files.
        #[arg(long)]
        output: PathBuf,
    },
    /// One probing run, in a process of its own; started by `node-capabilities`.
    #[command(hide = true)]
    ProbeCapabilities {
        /// Scratch directory.
        #[arg(long)]
        scratch: PathBuf,
        /// Let QEMU see /dev/kvm.
        #[arg(long)]
        kvm: bool,
        /// A second start in the same scratch directory, to see that the cache is accepted.
        #[arg(long)]
        verify: bool,
    },
}

/// The machine to run.
#[derive(Args, Clone, Debug)]
pub struct MachineArgs {
    /// Name of the VirtualMachineInstance.
    #[arg(long)]
    pub name: String,
    /// UID of the VirtualMachineInstance.
    #[arg(long)]
    pub uid: String,
    /// Namespace of the VirtualMachineInstance.
    #[arg(long)]
    pub namespace: String,
    /// Seconds between the request to end and the machine being stopped by force.
    #[arg(long, default_value_t = 45)]
    pub grace_period_seconds: u64,
    /// Run without hardware virtualization where /dev/kvm is missing.
    #[arg(long)]
    pub allow_emulation: bool,
    /// What libvirt's daemon logs besides warnings, as `LIBVIRT_LOG_FILTERS` has it.
    #[arg(long)]
    pub libvirt_log_filters: Option<String>,
    /// Directory of UEFI firmware images.
    #[arg(long, default_value = "/usr/share/OVMF")]
    pub ovmf_path: PathBuf,
    /// Fail at once, for tests.
    #[arg(long)]
    pub simulate_crash: bool,
}
