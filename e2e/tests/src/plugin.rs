//! Streams of the plugin next to the console: forwarded ports and displays; and what the servers count of them.

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
    time::{Instant, sleep, timeout},
};

use crate::Story;

/// Most that is kept of what the plugin says about failures.
const SAID: u64 = 64 * 1024;

/// How the plugin ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code.
    pub status: ExitStatus,
    /// What it said on standard error.
    pub said: String,
}

/// Collects what the plugin says on standard error.
pub(crate) fn listen(stderr: ChildStderr) -> JoinHandle<String> {
    tokio::spawn(async move {
        let mut said = Vec::new();
        let _ = stderr.take(SAID).read_to_end(&mut said).await;
        String::from_utf8_lossy(&said).into_owned()
    })
}

/// A plugin that serves a local port.
pub struct Served {
    process: Child,
    said: JoinHandle<String>,
    /// The local port.
    pub port: u16,
}

impl Served {
    /// Starts the plugin and waits for the line in which it says its port.
    async fn start(mut command: Command, port_in: impl Fn(&str) -> Option<u16>) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl-virt")?;
        let said = listen(process.stderr.take().context("no standard error")?);
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().context("no output")?);
        timeout(Duration::from_secs(20), output.read_line(&mut line)).await.context("no local port in time")??;
        match port_in(&line) {
            Some(port) => Ok(Self { process, said, port }),
            None => bail!("no local port in {line:?}: {}", said.await.unwrap_or_default()),
        }
    }

    /// Connects to the local port.
    ///
    /// # Errors
    /// When nobody listens any more.
    pub async fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.context("the local port")?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Ends the plugin; returns what it has said on standard error.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub async fn stop(mut self) -> Result<String> {
        self.process.kill().await?;
        Ok(self.said.await?)
    }

    /// Waits until the plugin ends by itself.
    ///
    /// # Errors
    /// When it does not in time.
    pub async fn wait_end(mut self, within: Duration) -> Result<Ended> {
        let status = timeout(within, self.process.wait()).await.context("the plugin did not end")??;
        Ok(Ended { status, said: self.said.await? })
    }
}

/// Sends a word and waits for it to come back, as it does from a guest that sends everything back.
///
/// # Errors
/// When it does not come back.
pub async fn echo(stream: &mut TcpStream, word: &str) -> Result<()> {
    stream.write_all(word.as_bytes()).await?;
    let mut back = vec![0; word.len()];
    timeout(Duration::from_secs(60), stream.read_exact(&mut back)).await.context("nothing came back")??;
    ensure!(back == word.as_bytes(), "{word:?} came back as {:?}", String::from_utf8_lossy(&back));
    Ok(())
}

/// Waits until the other side ends a connection.
///
/// # Errors
/// When it does not in time.
pub async fn ends(mut stream: TcpStream, within: Duration) -> Result<()> {
    let rest = async {
        let mut buffer = vec![0; 16 * 1024];
        // A reset is an end as well.
        while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {}
    };
    timeout(within, rest).await.context("the connection did not end")
}

/// Streams that the servers count as open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenStreams {
    /// Of the story's machines, in all pods of virt-api.
    pub api: u64,
    /// Of any machine, in all pods of virt-handler.
    pub handler: u64,
}

impl Story {
    /// Starts `kubectl virt port-forward` to a port of a machine (`vmi/NAME`).
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn forward(&self, machine: &str, port: u16) -> Result<Served> {
        let command = self.virt_command(&["port-forward", machine, &format!("0:{port}")]);
        let bound = |line: &str| line.split("127.0.0.1:").nth(1)?.split(' ').next()?.parse().ok();
        Served::start(command, bound).await.with_context(|| format!("forward port {port} of {machine}"))
    }

    /// Opens the display of a machine; a viewer's connection that was greeted comes with it.
    ///
    /// # Errors
    /// When there is no display, or it does not greet.
    pub async fn display(&self, vmi: &str) -> Result<(Served, TcpStream)> {
        let port = |line: &str| {
            let said: serde_json::Value = serde_json::from_str(line).ok()?;
            u16::try_from(said["port"].as_u64()?).ok()
        };
        let plugin = Served::start(self.virt_command(&["vnc", vmi, "--proxy-only"]), port).await?;
        let mut viewer = plugin.connect().await?;
        let mut greeting = [0_u8; 12];
        timeout(Duration::from_secs(20), viewer.read_exact(&mut greeting)).await.context("no greeting in time")??;
        ensure!(greeting.starts_with(b"RFB 003."), "{:?}", String::from_utf8_lossy(&greeting));
        Ok((plugin, viewer))
    }

    /// Streams that are open now.
    ///
    /// # Errors
    /// When the servers cannot be asked.
    pub async fn open_streams(&self) -> Result<OpenStreams> {
        let own = format!("namespace=\"{}\"", self.namespace);
        let api = self.count("virt-api", |line| {
            line.starts_with("kubevirt_") && line.contains("_active_") && line.contains(&own)
        });
        let handler = self.count("virt-handler", |line| line.starts_with("ferrovirt_handler_streams{"));
        Ok(OpenStreams { api: api.await?, handler: handler.await? })
    }

    /// Waits until virt-api counts no stream of the story's machines any more, and virt-handler none at all if `alone`.
    ///
    /// # Errors
    /// When some stay.
    pub async fn no_streams_left(&self, alone: bool) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            // A pod that has just been replaced cannot be asked.
            let open = self.open_streams().await;
            match &open {
                Ok(open) if open.api == 0 && (open.handler == 0 || !alone) => return Ok(()),
                _ if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
                Ok(open) => bail!("{open:?} are open after their clients went"),
                Err(error) => bail!("streams cannot be counted: {error:#}"),
            }
        }
    }

    /// The sum of the values of some lines of the metrics of a component's pods.
    async fn count(&self, component: &str, wanted: impl Fn(&str) -> bool) -> Result<u64> {
        let lines = self.metrics(component).await?;
        let values =
            lines.iter().filter(|line| wanted(line)).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(values.map(|value| value as u64).sum())
    }
}
