//! Running other programs, with their output kept for the error message.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use crate::error::{Error, Result};

/// Runs a command to its end and returns what it wrote to standard output.
///
/// `hint` says where the program comes from, for the case that it is missing.
pub fn run(command: &mut Command, hint: &str) -> Result<Vec<u8>> {
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

/// A command for a program inside a Debian root, run on this host by the root's own dynamic loader and libraries:
/// no chroot, and the host's versions of the tools do not matter.
pub fn from_root(root: &Path, program: &str) -> Command {
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
