//! What becomes of streams when something between client and guest dies.

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Served, Story, echo, ends, story_alone};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::manifests;

/// How soon a client learns that its stream is over: within five seconds, on a machine that is not busy.
const SOON: Duration = Duration::from_secs(15);
/// How long a user tries to open a stream again.
const AGAIN: Duration = Duration::from_secs(90);
/// Where the guest sends back what it gets.
const ECHO: u16 = 7000;

#[test]
fn streams_end_clearly_with_what_carries_them_and_can_be_opened_again() {
    story_alone("streamfaults", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        let machine = s.wait_running("box").await?;
        let forward = s.forward("vm/box", ECHO).await?;

        let mut streams = Streams::open(s, &forward).await?;
        streams.console.run("echo kept > /tmp/mark").await?;
        s.kill_on_node("virt-handler").await?;
        let mut tunnel = streams.end("connection to virt-handler was lost").await.context("virt-handler killed")?;
        // It does not lead through the agent.
        echo(&mut tunnel, "still here").await.context("virt-handler killed: a forwarded port")?;
        drop(tunnel);
        s.no_streams_left(true).await?;

        let streams = Streams::open(s, &forward).await?;
        let pod = s.launcher_pod("box").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        s.kill_in_launcher(&pod, "virt-launcher").await?;
        let mut tunnel = streams.end("launcher was lost").await.context("virt-launcher killed")?;
        echo(&mut tunnel, "still here").await.context("virt-launcher killed: a forwarded port")?;
        drop(tunnel);
        s.no_streams_left(true).await?;

        let mut streams = Streams::open(s, &forward).await?;
        let (mark, _) = streams.console.run("cat /tmp/mark").await?;
        ensure!(mark.contains("kept"), "the guest is another one: {mark:?}");
        s.kill_on_node("virt-api").await?;
        let tunnel = streams.end("connection was lost").await.context("virt-api killed")?;
        ends(tunnel, SOON).await.context("virt-api killed: a forwarded port")?;
        s.no_streams_left(true).await?;

        // The supervisor is the pod's first process: the machine ends with it, and its VM starts another.
        let streams = Streams::open(s, &forward).await?;
        s.kill_in_launcher(&pod, "virt-launcher-monitor").await?;
        let tunnel = streams.end("launcher was lost").await.context("virt-launcher-monitor killed")?;
        ends(tunnel, SOON).await.context("virt-launcher-monitor killed: a forwarded port")?;
        s.no_streams_left(true).await?;
        let uid = machine["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", Duration::from_secs(120), |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;
        let streams = Streams::open(s, &forward).await?;
        streams.close().await?;
        s.no_streams_left(true).await?;

        let said = forward.stop().await?;
        for reason in ["the connection was lost", "the machine has stopped"] {
            ensure!(said.contains(reason), "{reason:?} was not said: {said}");
        }
        // The machine is driven by what came after those that died.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", Duration::from_secs(60)).await
    });
}

/// One stream of each kind.
struct Streams {
    console: Console,
    display: Served,
    viewer: TcpStream,
    tunnel: TcpStream,
}

impl Streams {
    async fn open(s: &Story, forward: &Served) -> Result<Self> {
        let mut console = s.console_again("box", "root", "story").await?;
        console.serve(&format!("nc -ll -p {ECHO} -e cat"), ECHO).await?;
        let (display, viewer) = again(|| s.display("box")).await.context("display")?;
        let tunnel = again(|| async {
            let mut tunnel = forward.connect().await?;
            echo(&mut tunnel, "hello").await?;
            Ok(tunnel)
        });
        Ok(Self { console, display, viewer, tunnel: tunnel.await.context("forwarded port")? })
    }

    /// Waits until console and display have ended and said so; gives the forwarded connection back.
    async fn end(self, reason: &str) -> Result<TcpStream> {
        let began = Instant::now();
        let console = self.console.wait_end(SOON).await?;
        ensure!(!console.status.success() && console.said.contains(reason), "console: {console:?}");
        let display = self.display.wait_end(SOON).await.context("display")?;
        ensure!(!display.status.success() && display.said.contains(reason), "display: {display:?}");
        ends(self.viewer, SOON).await.context("display")?;
        eprintln!("{reason}: said within {:.1} s", began.elapsed().as_secs_f64());
        Ok(self.tunnel)
    }

    async fn close(self) -> Result<()> {
        drop((self.viewer, self.tunnel));
        self.display.wait_end(SOON).await?;
        self.console.leave().await
    }
}

/// Tries as long as a user would.
async fn again<T, F>(mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = Instant::now() + AGAIN;
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => sleep(Duration::from_secs(1)).await,
        }
    }
}
