//! `virt-probe`: the command that kubelet runs in a launcher's container to probe the guest through the guest agent.
//! The probes of launcher pods fix its name and options.

use std::{io::Write, path::Path, time::Duration};

use clap::Parser;
use protocol::{GuestExecRequest, GuestPingRequest, launcher_client::LauncherClient};
use tonic::transport::Endpoint;

use crate::{freezer::Error, paths::Paths};

/// Name under which virt-launcher's program acts as this command.
pub const NAME: &str = "virt-probe";
/// Time limit of the connection to the worker, and time for its answer after the guest's time limit.
const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// Probes this pod's guest.
#[derive(Clone, Debug, Parser)]
#[command(name = NAME, version)]
pub struct Options {
    /// Name of the domain, for messages.
    #[arg(long = "domainName")]
    pub domain_name: String,
    /// Time limit of the guest, in seconds.
    #[arg(long = "timeoutSeconds", default_value_t = 1)]
    pub timeout_seconds: u32,
    /// Ping the guest agent.
    #[arg(long = "guestAgentPing", conflicts_with = "command")]
    pub guest_agent_ping: bool,
    /// Run this program in the guest.
    #[arg(long, required_unless_present = "guest_agent_ping")]
    pub command: Option<String>,
    /// Its arguments.
    #[arg(last = true)]
    pub arguments: Vec<String>,
}

/// Runs the probe and returns the exit code.
///
/// # Errors
/// When the guest does not answer.
pub fn run(options: &Options, paths: &Paths) -> Result<u8, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(act(options, &paths.launcher_socket()))
}

async fn act(options: &Options, socket: &Path) -> Result<u8, Error> {
    let timeout_seconds = options.timeout_seconds;
    let limit = Duration::from_secs(u64::from(timeout_seconds)) + HELLO_LIMIT;
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect_timeout(HELLO_LIMIT).timeout(limit).connect().await?;
    let mut launcher = LauncherClient::new(channel);
    tracing::debug!(domain = options.domain_name, "probing the guest");
    let Some(path) = options.command.clone() else {
        launcher.guest_ping(GuestPingRequest { timeout_seconds }).await?;
        return Ok(0);
    };
    let request = GuestExecRequest { path, arguments: options.arguments.clone(), timeout_seconds };
    let reply = launcher.guest_exec(request).await?.into_inner();
    std::io::stdout().write_all(&reply.output)?;
    // Codes beyond 255 count as failure.
    Ok(u8::try_from(reply.exit_code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once(NAME).chain(line.split_whitespace()))
    }

    #[test]
    fn options_are_those_of_the_probes() {
        let ping = parse("--domainName ns_vm --timeoutSeconds 3 --guestAgentPing").unwrap();
        assert!(ping.guest_agent_ping && ping.command.is_none() && ping.timeout_seconds == 3);
        let exec = parse("--domainName ns_vm --timeoutSeconds 1 --command cat -- -n /proc/uptime").unwrap();
        assert_eq!(exec.command.as_deref(), Some("cat"));
        assert_eq!(exec.arguments, ["-n", "/proc/uptime"]);
        for wrong in ["--domainName ns_vm", "--guestAgentPing", "--domainName ns_vm --guestAgentPing --command a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
