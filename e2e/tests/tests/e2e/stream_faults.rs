//! What becomes of streams when one user wants all of them, and when something between client and guest dies.

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Answer, Console, Served, Socket, Story, connect_without_retries, echo, ends, story_alone};
use futures::future::{join_all, try_join_all};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::manifests;

/// How soon a client learns that its stream is over: within five seconds, on a machine that is not busy.
const SOON: Duration = Duration::from_secs(30);
/// How long a user tries to open a stream again.
const AGAIN: Duration = Duration::from_secs(90);
/// Where the guest sends back what it gets.
const ECHO: u16 = 7000;
/// Streams that one user alone gets of any virt-api, and more than those of several together.
const SHARE: usize = 200;
const MOST: usize = 2048;
/// Streams that the user asks for at once.
const LANES: usize = 8;

#[test]
fn streams_leave_room_for_others_end_clearly_with_what_carries_them_and_can_be_opened_again() {
    story_alone("streamfaults", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        let machine = s.wait_running("box").await?;
        let forward = s.forward("vm/box", ECHO).await?;

        let mut streams = Streams::open(s, &forward).await?;
        leave_room(s, &mut streams).await.context("one user wants all streams")?;
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

/// One user opens streams until there are no more for this user: the streams of others go on, there is a place for who
/// comes next, and what is closed is free again.
async fn leave_room(s: &Story, streams: &mut Streams) -> Result<()> {
    let client = connect_without_retries().await?;
    let (greedy, newcomer) = (format!("greedy-{}", s.namespace), format!("newcomer-{}", s.namespace));
    s.apply(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: streams}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects:
- {{apiGroup: rbac.authorization.k8s.io, kind: User, name: {greedy}}}
- {{apiGroup: rbac.authorization.k8s.io, kind: User, name: {newcomer}}}
"
    ))
    .await?;
    // Datagrams to a port where nobody listens: the guest has no work with them.
    let path = s.subresource("v1", "virtualmachineinstances/box", "portforward/9/udp");
    let before = s.open_streams().await?.api;
    // Bindings are cached by the API server, which may not know this one yet.
    let first = again(|| async { opened(Socket::open(&client, &path, Some(&greedy)).await?) }).await?;
    let mut taken = vec![first];
    let refused = loop {
        ensure!(taken.len() < MOST, "{} streams of one user are open, and none was refused", taken.len());
        let mut refused = None;
        for asked in join_all((0..LANES).map(|_| Socket::open(&client, &path, Some(&greedy)))).await {
            match asked? {
                Ok(stream) => taken.push(stream),
                Err(answer) => refused = Some(answer),
            }
        }
        if let Some(answer) = refused {
            break answer;
        }
    };
    let (headers, status) = (&refused.headers, refused.json());
    ensure!(
        refused.code == 429
            && headers.get("Retry-After").is_some_and(|seconds| seconds == "1")
            && status["kind"] == "Status"
            && status["reason"] == "TooManyRequests"
            && status["details"]["retryAfterSeconds"] == 1
            && refused.said().contains("too many streams of this user"),
        "refused with {} {headers:?} {status}",
        refused.code
    );
    ensure!(taken.len() >= SHARE, "one user alone gets {} streams only", taken.len());

    let mut other = opened(Socket::open(&client, &path, Some(&newcomer)).await?).context("another user")?;
    other.ping(SOON).await.context("another user")?;
    try_join_all(taken.iter_mut().map(|stream| stream.ping(SOON))).await?;
    echo(&mut streams.tunnel, "still here").await?;
    let (said, _) = streams.console.run("echo $((6 * 7))").await?;
    ensure!(said.trim() == "42", "the console answers {said:?}");
    let open = s.open_streams().await?.api;
    ensure!(open > taken.len() as u64, "{open} streams are counted, and {} of one user are open", taken.len());

    drop((taken, other));
    let deadline = Instant::now() + AGAIN;
    loop {
        let open = s.open_streams().await?.api;
        // Fewer where an attempt at the first streams was still counted.
        if open <= before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{open} streams are counted after all but {before} were closed");
        sleep(Duration::from_millis(500)).await;
    }
}

/// The stream, or what the server said instead.
fn opened(asked: Result<Socket, Box<Answer>>) -> Result<Socket> {
    match asked {
        Ok(stream) => Ok(stream),
        Err(answer) => bail!("refused: {} {}", answer.code, answer.said()),
    }
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
