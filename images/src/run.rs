//! Runs programs of the host and of Debian roots. Errors contain their output.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use crate::error::{Error, Result};

/// Runs a command and returns its standard output. `hint` names the package of the program for the error message.
pub(crate) fn run(command: &mut Command, hint: &str) -> Result<Vec<u8>> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|source| Error::ToolMissing {
        tool: tool.clone(),
        hint: hint.to_owned(),
        source,
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stdout));
    let start = text.char_indices().rev().nth(4000).map_or(0, |(index, _)| index);
    Err(Error::ToolFailed { tool, status: output.status.to_string(), output: text[start..].trim().to_owned() })
}

/// Returns a command for a program in a Debian root. It runs with the dynamic loader and the libraries of that root, without
/// chroot, and is independent of the versions on the host.
pub(crate) fn from_root(root: &Path, program: &str) -> Command {
    let mut command = Command::new(root.join("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"));
    let name = program.rsplit('/').next().unwrap_or(program);
    command
        .arg("--inhibit-cache")
        .arg("--library-path")
        .arg(root.join("usr/lib/x86_64-linux-gnu"))
        .arg("--argv0")
        .arg(name)
        .arg(root.join(program));
    command
}
