//! Running other programs, with their output kept for the error message.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::error::{At, Error, Result};

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

/// Turns a program in assembler into the bytes that lie in memory from `address` on. `tools` is a Debian root with binutils;
/// `work` is a directory for intermediate files, which are named after the program.
pub fn assemble(tools: &Path, work: &Path, name: &str, source: &str, address: u32) -> Result<Vec<u8>> {
    const HINT: &str = "from Debian package binutils";
    let file = |extension: &str| work.join(format!("{name}.{extension}"));
    let (text, object, binary) = (file("S"), file("o"), file("bin"));
    fs::write(&text, source).at(&text)?;
    let mut command = from_root(tools, "usr/bin/x86_64-linux-gnu-as");
    run(command.arg("--32").arg("-o").arg(&object).arg(&text), HINT)?;
    let mut command = from_root(tools, "usr/bin/x86_64-linux-gnu-ld");
    command.args(["-m", "elf_i386", "--oformat", "binary", "-e", "_start", "-Ttext"]).arg(format!("{address:#x}"));
    run(command.arg("-o").arg(&binary).arg(&object), HINT)?;
    fs::read(&binary).at(&binary)
}
