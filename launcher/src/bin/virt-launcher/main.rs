//! virt-launcher: the worker of a launcher pod.

use std::{io::IsTerminal, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use ferrovirt_launcher::{
    capabilities,
    options::{CommandLine, Task},
    paths::Paths,
    worker,
};

fn main() -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("VIRT_LAUNCHER_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // The pod's log is the guest's serial console on standard output; the launcher's own words go to standard error.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let command = CommandLine::parse();
    match (command.task, command.machine) {
        (Some(Task::NodeCapabilities { output }), _) => {
            capabilities::collect(&output).context("collecting the node's capabilities")?;
            Ok(ExitCode::SUCCESS)
        }
        (Some(Task::ProbeCapabilities { scratch, kvm, verify }), _) => {
            capabilities::probe(&scratch, kvm, verify).context("probing libvirt and QEMU")?;
            Ok(ExitCode::SUCCESS)
        }
        (None, Some(machine)) => worker::run(machine, Paths::default()).context("running the machine"),
        (None, None) => anyhow::bail!("no machine given; see --help"),
    }
}
