//! Programs that the guest agent runs in the guest, and its sign of life.

use std::{sync::atomic::Ordering, time::Duration};

use base64::Engine;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};

use super::{AgentError, GuestAgent, answers::returned};

/// Shortest pause between two looks at a program.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
/// Most output that is kept, in bytes.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// What shells add to the number of the signal that ended a program.
const BY_SIGNAL: i32 = 128;

/// How a program in the guest has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Its exit code.
    pub exit_code: i32,
    /// What it wrote to its standard output.
    pub output: Vec<u8>,
}

#[derive(Deserialize)]
struct Started {
    pid: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Standing {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    #[serde(default)]
    out_data: String,
}

impl GuestAgent {
    /// Has probes of the agent succeed without asking it, or not.
    pub fn pause_probes(&self, pause: bool) {
        self.inner.probes_paused.store(pause, Ordering::Relaxed);
    }

    /// Whether probes of the agent succeed without asking it.
    pub fn probes_paused(&self) -> bool {
        self.inner.probes_paused.load(Ordering::Relaxed)
    }

    /// Notes how a probe of the agent went. Only the first of several that meet silence counts.
    pub fn note_probe(&self, answered: bool) {
        let was_silent = self.inner.silent.swap(!answered, Ordering::Relaxed);
        if !answered && !was_silent {
            self.inner.told.send_modify(|told| told.silences = told.silences.saturating_add(1));
        }
    }

    /// Asks the agent for a sign of life.
    ///
    /// # Errors
    /// When there is none in time.
    pub async fn ping(&self, within: Duration) -> Result<(), AgentError> {
        self.order("guest-ping", None, within).await.map(drop)
    }

    /// Runs a program in the guest.
    ///
    /// # Errors
    /// When the agent does not do it, or the program has not ended in time.
    pub async fn exec(&self, path: &str, arguments: &[String], within: Duration) -> Result<Executed, AgentError> {
        const EXEC: &str = "guest-exec";
        const STATUS: &str = "guest-exec-status";
        let limit = Instant::now() + within;
        let program = json!({"path": path, "arg": arguments, "capture-output": true});
        let answer = self.order(EXEC, Some(program), within).await?;
        let Some(Started { pid: pid @ 1.. }) = returned(&answer) else { return Err(AgentError::Answer(EXEC)) };
        let pause = (within / 10).max(SHORTEST_PAUSE);
        loop {
            let answer = self.order(STATUS, Some(json!({"pid": pid})), within).await?;
            let standing: Standing = returned(&answer).ok_or(AgentError::Answer(STATUS))?;
            if standing.exited {
                let by_signal = standing.signal.map(|signal| signal.saturating_add(BY_SIGNAL));
                let output = base64::engine::general_purpose::STANDARD.decode(standing.out_data);
                let mut output = output.map_err(|_| AgentError::Answer(STATUS))?;
                output.truncate(OUTPUT_LIMIT);
                return Ok(Executed { exit_code: standing.exitcode.or(by_signal).unwrap_or(0), output });
            }
            if Instant::now() + pause >= limit {
                return Err(AgentError::TooLong { pid, command: path.to_owned() });
            }
            sleep(pause).await;
        }
    }

    /// Sends a command and gives the agent's answer.
    pub(super) async fn order(
        &self,
        command: &'static str,
        arguments: Option<Value>,
        within: Duration,
    ) -> Result<String, AgentError> {
        let limit = Instant::now() + within;
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| AgentError::Busy)?;
        if !self.state().connected {
            return Err(AgentError::NotConnected);
        }
        let mut text = json!({"execute": command});
        if let Some(arguments) = arguments {
            text["arguments"] = arguments;
        }
        self.inner.send(command, text.to_string(), limit).await
    }
}
