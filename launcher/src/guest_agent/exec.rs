//! Runs programs in the guest, and pings the guest agent.

use std::{sync::atomic::Ordering, time::Duration};

use base64::Engine;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};

use super::{GuestAgent, GuestAgentError, answers::returned};

/// Shortest pause between two status queries of a program.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
/// Limit of the output that is kept, in bytes.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// Added to a signal's number in the exit code, as shells do.
const BY_SIGNAL: i32 = 128;

/// Result of a program in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Executed {
    /// Its exit code.
    pub(crate) exit_code: i32,
    /// Its standard output.
    pub(crate) output: Vec<u8>,
}

#[derive(Deserialize)]
struct Started {
    pid: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ExecStatus {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    #[serde(default)]
    out_data: String,
}

impl GuestAgent {
    /// Sets whether probes succeed without a query.
    pub(crate) fn pause_probes(&self, pause: bool) {
        self.inner.probes_paused.store(pause, Ordering::Relaxed);
    }

    /// Reports whether probes succeed without a query.
    pub(crate) fn probes_paused(&self) -> bool {
        self.inner.probes_paused.load(Ordering::Relaxed)
    }

    /// Records the result of a probe. A series of unanswered probes counts once.
    pub(crate) fn record_probe(&self, answered: bool) {
        let was_silent = self.inner.silent.swap(!answered, Ordering::Relaxed);
        if !answered && !was_silent {
            self.inner.facts.send_modify(|facts| facts.silences = facts.silences.saturating_add(1));
        }
    }

    /// Pings the guest agent.
    pub(crate) async fn ping(&self, within: Duration) -> Result<(), GuestAgentError> {
        self.order("guest-ping", None, within).await.map(drop)
    }

    /// Runs a program in the guest.
    pub(crate) async fn exec(
        &self,
        path: &str,
        arguments: &[String],
        within: Duration,
    ) -> Result<Executed, GuestAgentError> {
        const EXEC: &str = "guest-exec";
        const STATUS: &str = "guest-exec-status";
        let limit = Instant::now() + within;
        let program = json!({"path": path, "arg": arguments, "capture-output": true});
        let answer = self.order(EXEC, Some(program), within).await?;
        let Some(Started { pid: pid @ 1.. }) = returned(&answer) else { return Err(GuestAgentError::Answer(EXEC)) };
        let pause = (within / 10).max(SHORTEST_PAUSE);
        loop {
            let answer = self.order(STATUS, Some(json!({"pid": pid})), within).await?;
            let status: ExecStatus = returned(&answer).ok_or(GuestAgentError::Answer(STATUS))?;
            if status.exited {
                let by_signal = status.signal.map(|signal| signal.saturating_add(BY_SIGNAL));
                let output = base64::engine::general_purpose::STANDARD.decode(status.out_data);
                let mut output = output.map_err(|_| GuestAgentError::Answer(STATUS))?;
                output.truncate(OUTPUT_LIMIT);
                return Ok(Executed { exit_code: status.exitcode.or(by_signal).unwrap_or(0), output });
            }
            if Instant::now() + pause >= limit {
                return Err(GuestAgentError::TooLong { pid, command: path.to_owned() });
            }
            sleep(pause).await;
        }
    }

    /// Sends a command and returns the guest agent's answer.
    pub(super) async fn order(
        &self,
        command: &'static str,
        arguments: Option<Value>,
        within: Duration,
    ) -> Result<String, GuestAgentError> {
        let limit = Instant::now() + within;
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| GuestAgentError::Busy)?;
        if !self.state().connected {
            return Err(GuestAgentError::NotConnected);
        }
        let mut text = json!({"execute": command});
        if let Some(arguments) = arguments {
            text["arguments"] = arguments;
        }
        self.inner.send(command, text.to_string(), limit).await
    }
}
