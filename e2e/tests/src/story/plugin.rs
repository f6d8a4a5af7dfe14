//! Commands of kubectl and of the plugin.

use std::{ffi::OsStr, process::Stdio, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
    time::{Instant, sleep, timeout},
};

use super::Story;
use crate::{
    environment::{TIMEOUT, kubeconfig, kubectl_virt, with_images},
    plugin::{Console, Served},
};

impl Story {
    /// Runs `kubectl virt` with these arguments and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command fails, with its standard error.
    pub async fn virt(&self, args: &[&str]) -> Result<String> {
        let output = self.virt_command(args).stdin(Stdio::null()).output().await.context("cannot run kubectl-virt")?;
        ensure!(
            output.status.success(),
            "kubectl virt {}: {} {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `kubectl` with these arguments and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command fails, with its standard error.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let output = self.command("kubectl", args).stdin(Stdio::null()).output().await.context("cannot run kubectl")?;
        ensure!(
            output.status.success(),
            "kubectl {}: {} {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a line that a person types, such as `kubectl virt start box`, with this input. `PATH=` before it hides the programs of
    /// this host, and `$NAMESPACE` is that of the story. Returns true if it succeeded, and its output and errors. A command that does not end has failed.
    ///
    /// # Errors
    /// Fails if it cannot be run.
    pub async fn command_line(&self, line: &str, input: &str) -> Result<(bool, String)> {
        let line = line.replace("$NAMESPACE", &self.namespace);
        let mut words: Vec<&str> = line.split_whitespace().collect();
        let is_hidden = words.first() == Some(&"PATH=");
        words.drain(..usize::from(is_hidden));
        let mut command = match words.as_slice() {
            ["kubectl", "virt", args @ ..] => self.virt_command(args),
            ["kubectl", args @ ..] => self.command("kubectl", args),
            _ => bail!("not a command of kubectl: {line}"),
        };
        if is_hidden {
            command.env("PATH", "");
        }
        let run = async {
            let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
            if let Some(mut stdin) = process.stdin.take() {
                stdin.write_all(with_images(input).as_bytes()).await?;
            }
            process.wait_with_output().await
        };
        let Ok(output) = timeout(TIMEOUT, run).await else { return Ok((false, format!("{line} does not end"))) };
        let output = output.with_context(|| format!("cannot run {line}"))?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
    }

    /// Returns the command `kubectl virt` with these arguments, not started.
    #[must_use]
    pub fn virt_command(&self, args: &[&str]) -> Command {
        self.command(kubectl_virt(), args)
    }

    fn command(&self, program: impl AsRef<OsStr>, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(kubeconfig()).arg("--namespace").arg(&self.namespace).args(args);
        command.kill_on_drop(true);
        command
    }

    /// Opens the serial console of a VMI, without earlier output: prompts of then are no prompts of now.
    ///
    /// # Errors
    /// Fails if the plugin cannot be started.
    pub fn console(&self, vmi: &str) -> Result<Console> {
        Console::open(self.virt_command(&["console", "--no-replay", vmi]))
    }

    /// Opens the console after a fault, with retries, and logs in unless the guest has a shell.
    ///
    /// # Errors
    /// Fails after two minutes without success.
    pub async fn reopen_console(&self, vmi: &str, user: &str, password: &str) -> Result<Console> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut console = self.console(vmi)?;
            match console.login_or_shell(user, password).await {
                Ok(()) => return Ok(console),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => sleep(Duration::from_secs(1)).await,
            }
        }
    }

    /// Starts `kubectl virt port-forward` to a port of an object (`vmi/NAME`).
    ///
    /// # Errors
    /// Fails if it does not start.
    pub async fn forward(&self, object: &str, port: u16) -> Result<Served> {
        self.forward_as(object, &format!("0:{port}")).await
    }

    /// Starts as [`Self::forward`] for datagrams (UDP).
    ///
    /// # Errors
    /// Fails if it does not start.
    pub async fn forward_datagrams(&self, object: &str, port: u16) -> Result<Served> {
        self.forward_as(object, &format!("udp/0:{port}")).await
    }

    async fn forward_as(&self, object: &str, port: &str) -> Result<Served> {
        let bound = |line: &str| line.split("127.0.0.1:").nth(1)?.split(' ').next()?.parse().ok();
        let forwarded = Served::start(self.virt_command(&["port-forward", object, port]), bound).await;
        forwarded.with_context(|| format!("forward {port} of {object}"))
    }

    /// Opens the display of a VMI. Returns the plugin and a connection of a viewer that has read the greeting.
    ///
    /// # Errors
    /// Fails without a display or greeting.
    pub async fn display(&self, vmi: &str) -> Result<(Served, TcpStream)> {
        let port = |line: &str| {
            let parsed: serde_json::Value = serde_json::from_str(line).ok()?;
            u16::try_from(parsed["port"].as_u64()?).ok()
        };
        let plugin = Served::start(self.virt_command(&["vnc", vmi, "--proxy-only"]), port).await?;
        let mut viewer = plugin.connect().await?;
        let mut greeting = [0_u8; 12];
        timeout(TIMEOUT, viewer.read_exact(&mut greeting)).await.context("no greeting in time")??;
        ensure!(greeting.starts_with(b"RFB 003."), "{:?}", String::from_utf8_lossy(&greeting));
        Ok((plugin, viewer))
    }

    /// Starts `kubectl virt ui` for the namespace of the story. Returns the plugin and the URL that it printed.
    ///
    /// # Errors
    /// Fails if it does not start.
    pub async fn web_console(&self) -> Result<(Served, String)> {
        let url = std::cell::RefCell::new(String::new());
        let port = |line: &str| {
            let printed = line.split_whitespace().find(|word| word.starts_with("http://127.0.0.1:"))?;
            *url.borrow_mut() = printed.to_owned();
            printed.strip_prefix("http://127.0.0.1:")?.split('/').next()?.parse().ok()
        };
        let plugin = Served::start(self.virt_command(&["ui", "--no-open"]), port).await?;
        Ok((plugin, url.into_inner()))
    }
}
