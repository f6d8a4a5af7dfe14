//! virt-launcher: the worker of a launcher pod.

use std::{io::IsTerminal, path::Path, process::ExitCode};

use anyhow::Context;
use api::persistent_state::NOT_MIGRATED;
use clap::Parser;
use ferrovirt_launcher::{
    find_migrated, freezer, hold_volumes,
    hypervisor::libvirt::capabilities,
    options::{CommandLine, Task},
    paths::Paths,
    probe, worker,
};
use protocol::holder::Held;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

fn main() -> anyhow::Result<ExitCode> {
    // Standard output is the guest's serial console in the pod's log; the launcher logs to standard error.
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_filter(log_filter(std::env::var("VIRT_LAUNCHER_LOG_VERBOSITY").ok().as_deref()));
    tracing_subscriber::registry().with(lines).init();
    let called = std::env::args_os().next().unwrap_or_default();
    if Path::new(&called).file_name().is_some_and(|name| name == freezer::NAME) {
        freezer::run(&freezer::Options::parse(), &Paths::default()).context("freezing or thawing the guest")?;
        return Ok(ExitCode::SUCCESS);
    }
    if Path::new(&called).file_name().is_some_and(|name| name == probe::NAME) {
        let code = probe::run(&probe::Options::parse(), &Paths::default()).context("probing the guest")?;
        return Ok(ExitCode::from(code));
    }
    let command = CommandLine::parse();
    match (command.task, command.vmi) {
        (Some(Task::NodeCapabilities { output }), _) => {
            capabilities::collect(&output).context("collecting the node's capabilities")?;
            Ok(ExitCode::SUCCESS)
        }
        (Some(Task::HoldVolumes { socket, vmi_uid, volumes }), _) => {
            hold_volumes::run(&socket, &Held { vmi: vmi_uid, volumes }).context("holding the volumes")?;
            Ok(ExitCode::SUCCESS)
        }
        (Some(Task::BindClaims), _) => Ok(ExitCode::SUCCESS),
        (Some(Task::FindMigrated { directory, migration }), _) => {
            let found = find_migrated::run(&directory, &migration).context("reading the mark of the migration")?;
            Ok(if found { ExitCode::SUCCESS } else { ExitCode::from(NOT_MIGRATED) })
        }
        (Some(Task::ProbeCapabilities { scratch, kvm, verify }), _) => {
            capabilities::probe(&scratch, kvm, verify).context("probing libvirt and QEMU")?;
            Ok(ExitCode::SUCCESS)
        }
        (None, Some(vmi)) => worker::run(vmi, Paths::default()).context("running the VMI"),
        (None, None) => anyhow::bail!("missing arguments of the VMI; see --help"),
    }
}

/// Returns the log filter of a verbosity, with the levels of the other components. virt-controller passes the verbosity
/// if it is not 2.
///
/// A filter with patterns, as in the other components, would cost half a megabyte of code in each pod.
fn log_filter(verbosity: Option<&str>) -> Targets {
    let (own, libraries) = match verbosity.and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(2) {
        0 | 1 => (LevelFilter::WARN, LevelFilter::ERROR),
        2 => (LevelFilter::INFO, LevelFilter::WARN),
        3 | 4 => (LevelFilter::DEBUG, LevelFilter::WARN),
        5 | 6 => (LevelFilter::DEBUG, LevelFilter::INFO),
        7 | 8 => (LevelFilter::TRACE, LevelFilter::DEBUG),
        _ => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    let targets = Targets::new().with_default(libraries);
    ["ferrovirt_launcher", "virt_launcher", "api", "protocol"]
        .iter()
        .fold(targets, |all, own_crate| all.with_target(*own_crate, own))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::log_filter;

    #[test]
    fn verbosity_raises_levels_and_an_invalid_one_is_the_default() {
        let shows = |verbosity, target, level| log_filter(verbosity).would_enable(target, &level);
        for default in [None, Some("2"), Some("x"), Some("")] {
            assert!(shows(default, "ferrovirt_launcher::worker", Level::INFO));
            assert!(!shows(default, "ferrovirt_launcher::worker", Level::DEBUG));
            assert!(!shows(default, "h2", Level::INFO));
        }
        assert!(shows(Some("4"), "ferrovirt_launcher::engine::driver", Level::DEBUG));
        assert!(!shows(Some("1"), "ferrovirt_launcher::engine::driver", Level::INFO));
        assert!(shows(Some("9"), "h2", Level::TRACE));
    }
}
