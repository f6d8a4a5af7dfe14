//! Redirected USB devices.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::Child,
    time::{Instant, sleep, timeout},
};

use crate::manifests;

/// Number of channels for redirected devices.
const CHANNELS: usize = 4;
/// Length of a greeting's text.
const VERSION: usize = 64;

#[test]
fn usb_devices_are_redirected_one_to_a_channel() {
    story("usb", async |s| {
        s.apply(&manifests::kernel_vmi("box").replace("devices: {}", "devices: {clientPassthrough: {}}")).await?;
        s.apply(&manifests::kernel_vmi("plain")).await?;
        s.wait_running("box").await?;
        let mut clients = Vec::new();
        for channel in 0..CHANNELS {
            let mut client = Client::start(s).await.with_context(|| format!("client {channel}"))?;
            let greeting = client.greeting().await.with_context(|| format!("client {channel}"))?;
            ensure!(greeting.starts_with("qemu usb-redir"), "QEMU greets {greeting:?}");
            client.greet().await?;
            clients.push(client);
        }
        let refused = s.virt(&["usbredir", "--no-launch", "box"]).await.err().map(|e| e.to_string());
        let refused = refused.context("one client more than there are channels")?;
        ensure!(refused.contains("503"), "the fifth client gets {refused:?}");

        // The channel of a closed client can be reused.
        clients.swap_remove(1).stop().await?;
        let deadline = Instant::now() + TIMEOUT;
        while let Err(error) = served_later(s).await {
            ensure!(Instant::now() < deadline, "the channel was not given back: {error:#}");
            sleep(Duration::from_millis(500)).await;
        }
        for client in clients {
            client.stop().await?;
        }

        s.wait_running("plain").await?;
        let refused = s.virt(&["usbredir", "--no-launch", "plain"]).await.err().map(|e| e.to_string());
        ensure!(refused.is_some_and(|text| text.contains("Not configured with USB Redirection")));
        ensure!(s.get("vmi", "box").await?["status"]["phase"] == "Running", "the VMI does not run");
        Ok(())
    });
}

/// Uses the channel of a former client.
async fn served_later(s: &Story) -> Result<()> {
    let mut client = Client::start(s).await?;
    client.greeting().await.context("the client that came later")?;
    client.stop().await
}

/// A client of the usbredir protocol, behind `kubectl virt usbredir`.
struct Client {
    plugin: Child,
    stream: TcpStream,
}

impl Client {
    async fn start(s: &Story) -> Result<Self> {
        let mut plugin = s
            .virt_command(&["usbredir", "--no-launch", "box"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start kubectl virt usbredir")?;
        let mut lines = BufReader::new(plugin.stdout.take().context("no output")?).lines();
        let line = timeout(TIMEOUT, lines.next_line()).await.context("no address was printed")??;
        let line = line.context("kubectl virt usbredir ended")?;
        let address = line.rsplit(' ').next().unwrap_or_default();
        Ok(Self { plugin, stream: TcpStream::connect(address).await.with_context(|| line.clone())? })
    }

    /// Reads the hello of the peer: type, length and number, a text, and capabilities.
    async fn greeting(&mut self) -> Result<String> {
        let mut head = [0_u8; 12];
        let read = async {
            self.stream.read_exact(&mut head).await?;
            let mut version = [0_u8; VERSION];
            self.stream.read_exact(&mut version).await?;
            Ok::<_, std::io::Error>(version)
        };
        let version = timeout(TIMEOUT, read).await.context("QEMU does not greet")??;
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        ensure!(head[..4] == [0; 4] && length as usize >= VERSION, "no hello: {head:?}");
        Ok(String::from_utf8_lossy(&version).trim_end_matches('\0').to_owned())
    }

    /// Returns a hello without capabilities.
    async fn greet(&mut self) -> Result<()> {
        let mut hello = Vec::new();
        for word in [0, u32::try_from(VERSION + 4)?, 0] {
            hello.extend(word.to_le_bytes());
        }
        let mut version = b"story".to_vec();
        version.resize(VERSION + 4, 0);
        hello.extend(version);
        Ok(self.stream.write_all(&hello).await?)
    }

    async fn stop(mut self) -> Result<()> {
        drop(self.stream);
        timeout(TIMEOUT, self.plugin.wait()).await.context("the plugin goes on without its client")??;
        Ok(())
    }
}
