//! Serial consoles of guests.

use std::{
    process::Stdio,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, ChildStdout, Command},
    task::JoinHandle,
};

use super::served::{Ended, collect};
use crate::environment::patient;

/// Limit of kept output in bytes.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// Time limit until there is a prompt: the guest agent of a distribution connects minutes before one under emulation, beside
/// other guests. On slow nodes, which have small guests alone, it is long enough, too.
const LOGIN_LIMIT: Duration = Duration::from_secs(900);
/// Attempts of a login, and to run the first command after it.
const LOGIN_ATTEMPTS: u32 = 4;
/// Time limit until a shell begins a command, where a prompt may stand instead.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);
/// Time limits until the shell of a guest on a busy host begins a command, and until the command ends.
const SHELL_LIMIT: Duration = Duration::from_secs(60);
const COMMAND_LIMIT: Duration = Duration::from_secs(180);

/// An open console.
pub struct Console {
    process: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
    seen: String,
    stderr: Option<JoinHandle<String>>,
}

impl Console {
    /// Starts the plugin's `console` command.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub fn open(mut command: Command) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl-virt")?;
        let input = process.stdin.take();
        let output = process.stdout.take().context("no output")?;
        let stderr = collect(process.stderr.take().context("no standard error")?);
        Ok(Self { process, input, output, seen: String::new(), stderr: Some(stderr) })
    }

    /// Sends text.
    ///
    /// # Errors
    /// Fails if the plugin has exited.
    pub async fn send(&mut self, text: &str) -> Result<()> {
        let input = self.input.as_mut().context("the console is closed")?;
        let sent = async {
            input.write_all(text.as_bytes()).await?;
            input.flush().await
        };
        if let Err(error) = sent.await {
            let stderr = self.stderr().await;
            bail!("the console has ended: {error}: {stderr}; printed: {:?}", self.seen);
        }
        Ok(())
    }

    /// Waits for `text` and returns the output before it. Output after it is kept.
    ///
    /// # Errors
    /// Fails after the time limit, with the output.
    pub async fn expect(&mut self, text: &str, within: Duration) -> Result<String> {
        Ok(self.expect_one(&[text], within).await?.1)
    }

    /// Waits for one of the texts and returns it with the output before it.
    ///
    /// # Errors
    /// Fails after the time limit, with the output.
    pub async fn expect_one<'t>(&mut self, texts: &[&'t str], within: Duration) -> Result<(&'t str, String)> {
        let within = patient(within);
        let deadline = tokio::time::Instant::now() + within;
        let mut buffer = vec![0_u8; 4096];
        loop {
            let found = texts.iter().filter_map(|text| Some((self.seen.find(text)?, *text))).min();
            if let Some((at, text)) = found {
                let before = self.seen[..at].to_owned();
                self.seen.drain(..at + text.len());
                return Ok((text, before));
            }
            match tokio::time::timeout_at(deadline, self.output.read(&mut buffer)).await {
                Err(_) => bail!("none of {texts:?} was printed within {within:?}; printed: {:?}", self.seen),
                Ok(read) => match read? {
                    0 => {
                        let stderr = self.stderr().await;
                        bail!(
                            "the console ended before one of {texts:?} was printed: {stderr}; printed: {:?}",
                            self.seen
                        )
                    }
                    length => self.seen.push_str(&String::from_utf8_lossy(&buffer[..length])),
                },
            }
            if self.seen.len() > OUTPUT_LIMIT {
                let mut cut = self.seen.len() - OUTPUT_LIMIT;
                while !self.seen.is_char_boundary(cut) {
                    cut += 1;
                }
                self.seen.drain(..cut);
            }
        }
    }

    /// Logs in at the prompt of the guest, which may still boot. `login` of a slow guest may discard the password: a login that
    /// fails is repeated.
    ///
    /// # Errors
    /// Fails without a prompt in time, or if the password is wrong.
    pub async fn login(&mut self, user: &str, password: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + LOGIN_LIMIT;
        let mut attempts = 1;
        while let Err(error) = self.try_login(user, password, deadline).await {
            let has_exited = matches!(self.process.try_wait(), Ok(Some(_)));
            if has_exited || attempts == LOGIN_ATTEMPTS || tokio::time::Instant::now() > deadline {
                return Err(error);
            }
            attempts += 1;
            if self.run_within("true", BEGIN_LIMIT).await.is_ok() {
                break;
            }
        }
        Ok(())
    }

    async fn try_login(&mut self, user: &str, password: &str, deadline: tokio::time::Instant) -> Result<()> {
        // Enter repeats a prompt from before the console was opened.
        loop {
            self.send("\n").await?;
            match self.expect("login: ", Duration::from_secs(3)).await {
                Ok(_) => break,
                Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
                Err(_) => {}
            }
        }
        // There may be several prompts.
        self.send(&format!("{user}\n")).await?;
        self.expect("assword: ", SHELL_LIMIT).await?;
        // login discards input until it has turned the echo off, after the prompt.
        tokio::time::sleep(patient(Duration::from_secs(1))).await;
        self.send(&format!("{password}\n")).await?;
        // Input before the prompt of the shell is lost: login and shell both set up the terminal.
        let (text, _) = self.expect_one(&["# ", "$ ", "incorrect"], SHELL_LIMIT).await.context("log in")?;
        if text == "incorrect" {
            bail!("the password is wrong");
        }
        // Messages of the boot may look like a prompt, such as the picture of a host key that cloud-init prints. Input before
        // the real one is lost, so the first command is repeated. It keeps the kernel of a guest on a busy host from reporting
        // stalls in the midst of later output.
        let mut attempts = 1;
        let (_, status) = loop {
            match self.run_within("dmesg -n 1 2>/dev/null; true", BEGIN_LIMIT).await {
                Err(error) if attempts == LOGIN_ATTEMPTS => return Err(error.context("log in")),
                Err(_) => attempts += 1,
                Ok(answer) => break answer,
            }
        };
        if status == 0 { Ok(()) } else { bail!("no shell after login") }
    }

    /// Logs in unless the guest has a shell of an earlier console.
    ///
    /// # Errors
    /// Fails if neither a prompt nor a shell answers.
    pub async fn login_or_shell(&mut self, user: &str, password: &str) -> Result<()> {
        match self.run_within("true", BEGIN_LIMIT).await {
            Ok(_) => Ok(()),
            // The plugin has exited.
            Err(error) if matches!(self.process.try_wait(), Ok(Some(_))) => Err(error),
            Err(_) => self.login(user, password).await,
        }
    }

    /// Runs a shell command in the guest and returns its output and exit code.
    ///
    /// # Errors
    /// Fails after the time limit.
    pub async fn run(&mut self, command: &str) -> Result<(String, i32)> {
        self.run_within(command, SHELL_LIMIT).await
    }

    /// Runs as [`Self::run`] a command that the shell begins within `limit`.
    async fn run_within(&mut self, command: &str, limit: Duration) -> Result<(String, i32)> {
        static COMMANDS: AtomicU32 = AtomicU32::new(0);
        // Unique: the output of an earlier console may still follow.
        let n = COMMANDS.fetch_add(1, Ordering::Relaxed);
        // The terminal echoes the line, which therefore must not contain the marks themselves.
        self.send(&format!("printf '<%s>' begin-{n}; {command}; printf '<%s:%s>' end-{n} $?\n")).await?;
        self.expect(&format!("<begin-{n}>"), limit).await.with_context(|| format!("run {command:?}"))?;
        let output = self.expect(&format!("<end-{n}:"), COMMAND_LIMIT).await?;
        let status = self.expect(">", SHELL_LIMIT).await?;
        Ok((output.replace("\r\n", "\n"), status.parse().context("no exit code")?))
    }

    /// Runs a shell command that must succeed, and returns its output without space around it.
    ///
    /// # Errors
    /// Fails after the time limit, and with any exit code but 0.
    pub async fn output(&mut self, command: &str) -> Result<String> {
        let (output, code) = self.run(command).await?;
        ensure!(code == 0, "{command:?} ended with {code}: {output}");
        Ok(output.trim().to_owned())
    }

    /// Starts a server in the guest unless the port has a listener, and waits until it listens.
    ///
    /// # Errors
    /// Fails if it does not listen in time.
    pub async fn serve(&mut self, server: &str, port: u16) -> Result<()> {
        let listens = format!("grep -qi ':{port:04x} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6");
        self.run(&format!("{listens} || {{ {server} & }}")).await?;
        let deadline = tokio::time::Instant::now() + patient(COMMAND_LIMIT);
        while self.run(&listens).await?.1 != 0 {
            ensure!(tokio::time::Instant::now() < deadline, "the guest's server does not listen: {server}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Ok(())
    }

    /// Returns the standard error of a plugin that has exited.
    async fn stderr(&mut self) -> String {
        match self.stderr.take() {
            Some(stderr) => stderr.await.unwrap_or_default(),
            None => String::new(),
        }
    }

    /// Sends the escape character and waits until the plugin exits.
    ///
    /// # Errors
    /// Fails if it does not exit or fails.
    pub async fn leave(mut self) -> Result<()> {
        self.send("\u{1d}").await?;
        let status =
            tokio::time::timeout(SHELL_LIMIT, self.process.wait()).await.context("the console does not end")??;
        if status.success() { Ok(()) } else { bail!("kubectl virt console ended with {status}") }
    }

    /// Waits until the plugin exits, as it does when the VMI stops.
    ///
    /// # Errors
    /// Fails after the time limit.
    pub async fn wait_end(mut self, within: Duration) -> Result<Ended> {
        let mut rest = Vec::new();
        tokio::time::timeout(within, async {
            self.output.read_to_end(&mut rest).await?;
            Ok(Ended { status: self.process.wait().await?, stderr: self.stderr().await })
        })
        .await
        .context("the console did not end")?
    }
}
