//! Runs programs. Each error contains the step, the command line and the last lines of output.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::error::{Error, FileContext, Result};

/// Number of output lines in an error.
const TAIL_LINES: usize = 15;
/// Bytes of a log file that are searched for its last lines.
const TAIL_BYTES: u64 = 16 * 1024;

/// Returns a command for a program with arguments.
pub(crate) fn program<A: AsRef<OsStr>>(name: impl AsRef<OsStr>, arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(name);
    command.args(arguments).env("PATH", system_path());
    command
}

/// Returns PATH with the folders of system programs, which a plain `su` leaves out.
fn system_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/local/sbin:/usr/sbin:/sbin");
    path
}

/// Runs a program and returns its standard output.
///
/// # Errors
/// Fails if it cannot be started or fails.
pub(crate) fn run(step: &str, command: &mut Command) -> Result<String> {
    let output = output(step, command)?;
    check(step, command, &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program and returns its output, also after a failure.
///
/// # Errors
/// Fails if it cannot be started.
pub(crate) fn output(step: &str, command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|source| start_error(step, command, source))
}

/// Runs a program with `input` as standard input.
///
/// # Errors
/// Fails if it cannot be started or fails.
pub(crate) fn run_with_input(step: &str, command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| start_error(step, command, source))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits early reports the reason by its exit status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(|source| start_error(step, command, source))?;
    check(step, command, &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program that writes to our standard output and error.
///
/// # Errors
/// Fails if it cannot be started or fails.
pub(crate) fn run_visibly(step: &str, command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().map_err(|source| start_error(step, command, source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Command {
        step: step.to_owned(),
        command: line(command),
        status: status.to_string(),
        output: String::new(),
    })
}

/// Returns the error for a program that cannot be started.
#[must_use]
pub(crate) fn start_error(step: &str, command: &Command, source: std::io::Error) -> Error {
    Error::Start { step: step.to_owned(), command: line(command), source }
}

fn check(step: &str, command: &Command, output: &Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    Err(Error::Command {
        step: step.to_owned(),
        command: line(command),
        status: output.status.to_string(),
        output: last_lines(&String::from_utf8_lossy(&text)),
    })
}

/// Returns the command line as typed in a shell.
#[must_use]
pub(crate) fn line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| part.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the last lines of a text, indented.
#[must_use]
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).map(|line| format!("    {line}\n")).collect()
}

/// Returns the name of a log file and its last lines for an error message.
#[must_use]
pub(crate) fn log_tail(path: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => format!("\n  last lines of {}:\n{}", path.display(), last_lines(&text)),
        Err(_) => format!("\n  (no log at {})", path.display()),
    }
}

/// Waits until `done` returns true.
///
/// # Errors
/// Fails after `limit`, with `detail` in the message, and with any error of `done`.
pub(crate) fn wait(
    step: &str,
    limit: Duration,
    pause: Duration,
    mut done: impl FnMut() -> Result<bool>,
    detail: impl FnOnce() -> String,
) -> Result<()> {
    let started = Instant::now();
    loop {
        if done()? {
            return Ok(());
        }
        if started.elapsed() > limit {
            return Err(Error::Timeout { step: step.to_owned(), seconds: limit.as_secs(), detail: detail() });
        }
        thread::sleep(pause);
    }
}

/// Opens a log file for appending.
///
/// # Errors
/// Fails if it cannot be created.
pub(crate) fn open_log(path: &Path) -> Result<fs::File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).at("create", folder)?;
    }
    fs::OpenOptions::new().create(true).append(true).open(path).at("open", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_names_step_command_and_last_lines() {
        let error = run("trying", &mut program("sh", ["-c", "echo out; echo broken >&2; exit 3"])).unwrap_err();
        let text = error.to_string();
        for part in ["trying", "sh -c", "exit status: 3", "broken"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn only_the_last_lines_are_shown() {
        let text = (0..100).map(|line| format!("{line}\n")).collect::<String>();
        let shown = last_lines(&text);
        assert_eq!(shown.lines().count(), TAIL_LINES);
        assert!(shown.contains("99") && !shown.contains("    84\n"));
    }

    #[test]
    fn waiting_ends_with_the_given_detail() {
        let error = wait("sleep", Duration::ZERO, Duration::ZERO, || Ok(false), || " because".into()).unwrap_err();
        assert_eq!(error.to_string(), "sleep: not done after 0 s because");
    }
}
