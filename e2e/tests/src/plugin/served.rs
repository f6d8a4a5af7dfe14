//! Commands of the plugin that serve a local port: forwarded ports and displays.

use std::{
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::{Child, ChildStderr, Command},
    task::JoinHandle,
    time::timeout,
};

use crate::environment::TIMEOUT;

/// Limit of kept standard error.
const STDERR_LIMIT: u64 = 64 * 1024;

/// Result of a plugin that has exited.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard error.
    pub stderr: String,
}

/// Collects standard error.
pub(super) fn collect(stderr: ChildStderr) -> JoinHandle<String> {
    tokio::spawn(async move {
        let mut bytes = Vec::new();
        let _ = stderr.take(STDERR_LIMIT).read_to_end(&mut bytes).await;
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A plugin that serves a local port.
pub struct Served {
    process: Child,
    stderr: JoinHandle<String>,
    /// The local port.
    pub port: u16,
}

impl Served {
    /// Starts the plugin and waits for the line with its port.
    pub(crate) async fn start(mut command: Command, port_in: impl Fn(&str) -> Option<u16>) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl-virt")?;
        let stderr = collect(process.stderr.take().context("no standard error")?);
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().context("no output")?);
        timeout(TIMEOUT, output.read_line(&mut line)).await.context("no local port in time")??;
        match port_in(&line) {
            Some(port) => Ok(Self { process, stderr, port }),
            None => bail!("no local port in {line:?}: {}", stderr.await.unwrap_or_default()),
        }
    }

    /// Connects to the local port.
    ///
    /// # Errors
    /// Fails if the plugin has exited.
    pub async fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.context("the local port")?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Kills the plugin and returns its standard error.
    ///
    /// # Errors
    /// Fails if it cannot be killed.
    pub async fn stop(mut self) -> Result<String> {
        self.process.kill().await?;
        Ok(self.stderr.await?)
    }

    /// Waits until the plugin exits.
    ///
    /// # Errors
    /// Fails after the time limit.
    pub async fn wait_end(mut self, within: Duration) -> Result<Ended> {
        let status = timeout(within, self.process.wait()).await.context("the plugin did not end")??;
        Ok(Ended { status, stderr: self.stderr.await? })
    }
}

/// Sends a word to a guest that echoes, and waits for the echo.
///
/// # Errors
/// Fails without the echo.
pub async fn echo(stream: &mut TcpStream, word: &str) -> Result<()> {
    stream.write_all(word.as_bytes()).await?;
    let mut back = vec![0; word.len()];
    timeout(TIMEOUT, stream.read_exact(&mut back)).await.context("nothing came back")??;
    ensure!(back == word.as_bytes(), "{word:?} came back as {:?}", String::from_utf8_lossy(&back));
    Ok(())
}

/// Waits until the peer ends a connection.
///
/// # Errors
/// Fails after the time limit.
pub async fn ends(mut stream: TcpStream, within: Duration) -> Result<()> {
    let rest = async {
        let mut buffer = vec![0; 16 * 1024];
        // A reset ends it, too.
        while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {}
    };
    timeout(within, rest).await.context("the connection did not end")
}
