//! A guest's serial console, through the plugin that users use.

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

use crate::plugin::{Ended, listen};

/// Output kept for looking at, in bytes; older output is dropped.
const KEPT: usize = 256 * 1024;

/// An open console.
pub struct Console {
    process: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
    seen: String,
    /// What the plugin says on standard error.
    said: Option<JoinHandle<String>>,
}

impl Console {
    /// Starts the plugin's `console` command.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn open(mut command: Command) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl-virt")?;
        let input = process.stdin.take();
        let output = process.stdout.take().context("no output")?;
        let said = listen(process.stderr.take().context("no standard error")?);
        Ok(Self { process, input, output, seen: String::new(), said: Some(said) })
    }

    /// Sends these bytes.
    ///
    /// # Errors
    /// When the plugin has ended.
    pub async fn send(&mut self, text: &str) -> Result<()> {
        let input = self.input.as_mut().context("the console was left")?;
        input.write_all(text.as_bytes()).await.context("the console has ended")?;
        Ok(input.flush().await?)
    }

    /// Waits until `text` was printed and returns all that was printed before it; what follows it is kept.
    ///
    /// # Errors
    /// When it does not come in time, with what came instead.
    pub async fn expect(&mut self, text: &str, within: Duration) -> Result<String> {
        Ok(self.expect_one(&[text], within).await?.1)
    }

    /// Waits until one of the texts was printed, and returns it and all that was printed before it.
    ///
    /// # Errors
    /// When none comes in time, with what came instead.
    pub async fn expect_one<'t>(&mut self, texts: &[&'t str], within: Duration) -> Result<(&'t str, String)> {
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
                        let said = self.said().await;
                        bail!("the console ended before one of {texts:?} was printed: {said}; printed: {:?}", self.seen)
                    }
                    length => self.seen.push_str(&String::from_utf8_lossy(&buffer[..length])),
                },
            }
            if self.seen.len() > KEPT {
                let mut cut = self.seen.len() - KEPT;
                while !self.seen.is_char_boundary(cut) {
                    cut += 1;
                }
                self.seen.drain(..cut);
            }
        }
    }

    /// Logs in at the prompt of the guest; waits for it while the guest boots.
    ///
    /// # Errors
    /// When there is no prompt in time, or the password is wrong.
    pub async fn login(&mut self, user: &str, password: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(120);
        // A prompt printed before the console was opened comes again after Enter.
        loop {
            self.send("\n").await?;
            match self.expect("login: ", Duration::from_secs(3)).await {
                Ok(_) => break,
                Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
                Err(_) => {}
            }
        }
        // The Enters of above may have made more prompts.
        self.send(&format!("{user}\n")).await?;
        self.expect("assword: ", Duration::from_secs(20)).await?;
        // login throws away what was typed before it has turned the echo off, which it does after the prompt.
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.send(&format!("{password}\n")).await?;
        // What is typed before the shell prompts is lost: log-in and shell both set up the terminal.
        let (said, _) = self.expect_one(&["# ", "$ ", "incorrect"], Duration::from_secs(60)).await.context("log in")?;
        if said == "incorrect" {
            bail!("the password was not taken");
        }
        let (_, status) = self.run("true").await.context("log in")?;
        if status == 0 { Ok(()) } else { bail!("no shell after the log-in") }
    }

    /// Logs in, or goes on with the shell that a former console left logged in.
    ///
    /// # Errors
    /// When neither a prompt nor a shell answers.
    pub async fn login_or_shell(&mut self, user: &str, password: &str) -> Result<()> {
        match self.run("true").await {
            Ok(_) => Ok(()),
            // Nobody answers a console that has ended.
            Err(error) if matches!(self.process.try_wait(), Ok(Some(_))) => Err(error),
            Err(_) => self.login(user, password).await,
        }
    }

    /// Runs a shell command in the guest; returns what it printed and its exit code.
    ///
    /// # Errors
    /// When it does not end in time.
    pub async fn run(&mut self, command: &str) -> Result<(String, i32)> {
        static COMMANDS: AtomicU32 = AtomicU32::new(0);
        // Unlike any of a former console, whose end may still stand on the screen.
        let n = COMMANDS.fetch_add(1, Ordering::Relaxed);
        // The terminal echoes the line, which therefore must not contain the marks themselves.
        self.send(&format!("printf '<%s>' begin-{n}; {command}; printf '<%s:%s>' end-{n} $?\n")).await?;
        self.expect(&format!("<begin-{n}>"), Duration::from_secs(20))
            .await
            .with_context(|| format!("run {command:?}"))?;
        let output = self.expect(&format!("<end-{n}:"), Duration::from_secs(60)).await?;
        let status = self.expect(">", Duration::from_secs(5)).await?;
        Ok((output.replace("\r\n", "\n"), status.parse().context("no exit code")?))
    }

    /// Starts a server in the guest, unless one listens at the port already, and waits until it listens.
    ///
    /// # Errors
    /// When it does not.
    pub async fn serve(&mut self, server: &str, port: u16) -> Result<()> {
        let listens = format!("grep -qi ':{port:04x} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6");
        self.run(&format!("{listens} || {{ {server} & }}")).await?;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        while self.run(&listens).await?.1 != 0 {
            ensure!(tokio::time::Instant::now() < deadline, "the guest's server does not listen: {server}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Ok(())
    }

    /// What the plugin has said on standard error when it has ended.
    async fn said(&mut self) -> String {
        match self.said.take() {
            Some(said) => said.await.unwrap_or_default(),
            None => String::new(),
        }
    }

    /// Types the escape character and waits until the plugin ends.
    ///
    /// # Errors
    /// When it does not end, or not with success.
    pub async fn leave(mut self) -> Result<()> {
        self.send("\u{1d}").await?;
        let status = tokio::time::timeout(Duration::from_secs(10), self.process.wait()).await??;
        if status.success() { Ok(()) } else { bail!("kubectl virt console ended with {status}") }
    }

    /// Waits until the plugin ends by itself, as it does when the machine stops.
    ///
    /// # Errors
    /// When it does not end in time.
    pub async fn wait_end(mut self, within: Duration) -> Result<Ended> {
        let mut rest = Vec::new();
        tokio::time::timeout(within, async {
            self.output.read_to_end(&mut rest).await?;
            Ok(Ended { status: self.process.wait().await?, said: self.said().await })
        })
        .await
        .context("the console did not end")?
    }
}
