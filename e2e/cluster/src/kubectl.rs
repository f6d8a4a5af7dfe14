//! kubectl towards one cluster.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::{
    command::{output, program, run, run_with_input},
    error::Result,
};

/// A kubectl with its kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// The kubectl in the folder `bin`; the one on the PATH if that is empty.
    #[must_use]
    pub fn new(bin: &Path, kubeconfig: PathBuf) -> Self {
        Self {
            program: if bin.as_os_str().is_empty() { PathBuf::from("kubectl") } else { bin.join("kubectl") },
            kubeconfig,
        }
    }

    /// A call with these arguments. Bounded: no call hangs on a server that does not answer.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(&self.program, ["--request-timeout=30s"]);
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs a call and returns what it printed.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, step: &str, arguments: &[&str]) -> Result<String> {
        run(step, &mut self.command(arguments))
    }

    /// Runs a call, whatever its end.
    ///
    /// # Errors
    /// When kubectl cannot be started.
    pub fn output(&self, step: &str, arguments: &[&str]) -> Result<Output> {
        output(step, &mut self.command(arguments))
    }

    /// What a call printed, or none when it failed.
    ///
    /// # Errors
    /// When kubectl cannot be started.
    pub fn answer(&self, step: &str, arguments: &[&str]) -> Result<Option<String>> {
        let output = self.output(step, arguments)?;
        Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// When the server refuses it.
    pub fn apply(&self, step: &str, manifest: &str) -> Result<String> {
        run_with_input(step, &mut self.command(&["apply", "-f", "-"]), manifest)
    }
}
