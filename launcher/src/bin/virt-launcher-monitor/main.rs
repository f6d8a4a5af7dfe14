//! virt-launcher-monitor: the first process of a launcher pod.

mod daemon_log;
mod proxy;
mod supervisor;

use std::process::ExitCode;

fn main() -> ExitCode {
    supervisor::run(std::env::args_os().skip(1).collect())
}
