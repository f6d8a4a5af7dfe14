//! Calls kubectl for one cluster.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::{
    command::{output, program, run, run_with_input},
    error::Result,
};

/// kubectl with a kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// Returns the kubectl in folder `bin`, or the one on the PATH if `bin` is empty.
    #[must_use]
    pub fn new(bin: &Path, kubeconfig: PathBuf) -> Self {
        Self {
            program: if bin.as_os_str().is_empty() { PathBuf::from("kubectl") } else { bin.join("kubectl") },
            kubeconfig,
        }
    }

    /// Returns a command with these arguments and a request time limit.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(&self.program, ["--request-timeout=30s"]);
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Errors
    /// Fails if kubectl fails.
    pub fn run(&self, step: &str, arguments: &[&str]) -> Result<String> {
        run(step, &mut self.command(arguments))
    }

    /// Runs kubectl and returns its output, also after a failure.
    ///
    /// # Errors
    /// Fails if kubectl cannot be started.
    pub fn output(&self, step: &str, arguments: &[&str]) -> Result<Output> {
        output(step, &mut self.command(arguments))
    }

    /// Returns the standard output of kubectl, or `None` after a failure.
    ///
    /// # Errors
    /// Fails if kubectl cannot be started.
    pub fn answer(&self, step: &str, arguments: &[&str]) -> Result<Option<String>> {
        let output = self.output(step, arguments)?;
        Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// Fails if the API server rejects the manifest.
    pub fn apply(&self, step: &str, manifest: &str) -> Result<String> {
        run_with_input(step, &mut self.command(&["apply", "-f", "-"]), manifest)
    }
}
