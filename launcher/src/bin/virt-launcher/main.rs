//! virt-launcher: the worker of a launcher pod.

use std::{io::IsTerminal, path::Path, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use ferrovirt_launcher::{
    capabilities, freezer,
    options::{CommandLine, Task},
    paths::Paths,
    probe, worker,
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

fn main() -> anyhow::Result<ExitCode> {
    // The pod's log is the guest's serial console on standard output; the launcher's own words go to standard error.
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

/// What is logged at a verbosity, by the scale of the other processes. The virt-controller names it where it is not 2.
///
/// Filters with patterns, as other programs have them, would cost half a megabyte of code in each pod.
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
    fn verbosity_shows_more_and_what_cannot_be_read_is_the_default() {
        let shows = |verbosity, target, level| log_filter(verbosity).would_enable(target, &level);
        for default in [None, Some("2"), Some("x"), Some("")] {
            assert!(shows(default, "ferrovirt_launcher::worker", Level::INFO));
            assert!(!shows(default, "ferrovirt_launcher::worker", Level::DEBUG));
            assert!(!shows(default, "h2", Level::INFO));
        }
        assert!(shows(Some("4"), "ferrovirt_launcher::machine::driver", Level::DEBUG));
        assert!(!shows(Some("1"), "ferrovirt_launcher::machine::driver", Level::INFO));
        assert!(shows(Some("9"), "h2", Level::TRACE));
    }
}
