//! A client of QEMU's guest agent, which runs commands in the node in a VM.
//!
//! ```text
//! connect: guest-sync(id) ──▶ answers to former clients ... ──▶ answer with the id
//! run:     guest-exec ──▶ process ──▶ guest-exec-status ... ──▶ exited, with its output
//! ```

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{
    error::{Error, FileContext, Result},
    render::vm::AGENT_SOCKET,
};

/// Time limit of an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Time limit of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(400);
/// Interval of checks for the end of a command.
const INTERVAL: Duration = Duration::from_millis(200);
/// Longest answer: the agent keeps 16 MiB of output, which base64 makes longer.
const ANSWER_LENGTH: u64 = 48 << 20;

/// A connection to the agent.
pub(crate) struct Agent {
    stream: BufReader<UnixStream>,
}

/// The end of a command.
pub(crate) struct Ran {
    /// Exit status, or 128 and the signal.
    pub status: i64,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Agent {
    /// Connects to the agent of the VM below the node's first process on the host.
    ///
    /// # Errors
    /// Fails if the agent does not answer.
    pub(crate) fn connect(pid: i32) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/{pid}/root{AGENT_SOCKET}"));
        let stream = UnixStream::connect(&path).at("connect to", &path)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT)).at("set the time limit of", &path)?;
        let mut agent = Self { stream: BufReader::new(stream) };
        let id = Instant::now().elapsed().as_nanos() as u32 ^ std::process::id();
        agent.send(&json!({"execute": "guest-sync", "arguments": {"id": id}}))?;
        while agent.answer()?["return"] != id {}
        Ok(agent)
    }

    fn send(&mut self, request: &Value) -> Result<()> {
        writeln!(self.stream.get_mut(), "{request}").at("write to", AGENT_SOCKET)
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        (&mut self.stream).take(ANSWER_LENGTH).read_line(&mut line).at("read from", AGENT_SOCKET)?;
        serde_json::from_str(&line)
            .map_err(|source| Error::Document { what: "an answer of the guest agent".into(), source })
    }

    fn call(&mut self, name: &str, arguments: Value) -> Result<Value> {
        self.send(&json!({"execute": name, "arguments": arguments}))?;
        let mut answer = self.answer()?;
        match answer["error"]["desc"].as_str() {
            Some(error) => Err(Error::Refused(format!("{name} in the VM: {error}"))),
            None => Ok(answer["return"].take()),
        }
    }

    /// Runs a command.
    ///
    /// # Errors
    /// Fails if it cannot be started or does not end in time.
    pub(crate) fn run(&mut self, command: &[&str]) -> Result<Ran> {
        let (program, arguments) = command.split_first().unwrap_or((&"true", &[]));
        let started = Instant::now();
        let process = self.call("guest-exec", json!({"path": program, "arg": arguments, "capture-output": true}))?;
        loop {
            let status = self.call("guest-exec-status", json!({"pid": process["pid"]}))?;
            if status["exited"] == true {
                return Ok(ran(&status));
            }
            if started.elapsed() > COMMAND_LIMIT {
                let (step, seconds) = (format!("running {} in the VM", command.join(" ")), COMMAND_LIMIT.as_secs());
                return Err(Error::Timeout { step, seconds, detail: String::new() });
            }
            thread::sleep(INTERVAL);
        }
    }
}

/// Returns the end of a command from the agent's status.
fn ran(status: &Value) -> Ran {
    let text = |name: &str| {
        let bytes = STANDARD.decode(status[name].as_str().unwrap_or_default()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let code = status["exitcode"].as_i64().or_else(|| Some(128 + status["signal"].as_i64()?));
    Ran { status: code.unwrap_or(-1), stdout: text("out-data"), stderr: text("err-data") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_command_has_output_and_status() {
        let ran = super::ran(&json!({"exited": true, "exitcode": 3, "out-data": "b3V0", "err-data": "ZXJy"}));
        assert_eq!((ran.status, ran.stdout.as_str(), ran.stderr.as_str()), (3, "out", "err"));
        assert_eq!(super::ran(&json!({"exited": true, "signal": 9})).status, 137);
    }
}
