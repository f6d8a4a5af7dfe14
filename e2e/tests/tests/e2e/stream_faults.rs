//! Streams of one user at the quota, and failures between client and guest.

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Answer, Console, Served, Socket, Story, connect_without_retries, echo, ends, story_alone};
use futures::future::{join_all, try_join_all};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::manifests;

/// Time limit for the end of a stream at the client: five seconds on an idle host.
const SOON: Duration = Duration::from_secs(120);
/// Time limit for reopening a stream.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(240);
/// Port of the echo server in the guest.
const ECHO: u16 = 7000;
/// Quota of one user at one virt-api, and a bound above the quotas of all virt-apis.
const SHARE: usize = 200;
const MOST: usize = 2048;
/// Streams that the user requests at once.
const LANES: usize = 8;

#[test]
fn streams_have_a_quota_end_with_their_components_and_can_be_reopened() {
    story_alone("streamfaults", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        let vmi = s.wait_running("box").await?;
        let forward = s.forward("vm/box", ECHO).await?;

        let mut streams = Streams::open(s, &forward).await?;
        leave_room(s, &mut streams).await.context("one user wants all streams")?;
        streams.console.run("echo kept > /tmp/mark").await?;
        s.kill_component("virt-handler").await?;
        let mut tunnel = streams.end("connection to virt-handler was lost").await.context("virt-handler killed")?;
        // This stream does not pass virt-handler.
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
        s.kill_component("virt-api").await?;
        let tunnel = streams.end("connection was lost").await.context("virt-api killed")?;
        ends(tunnel, SOON).await.context("virt-api killed: a forwarded port")?;
        s.no_streams_left(true).await?;

        // The supervisor is the pod's first process: the VMI ends with it, and its VM starts another.
        let streams = Streams::open(s, &forward).await?;
        s.kill_in_launcher(&pod, "virt-launcher-monitor").await?;
        let tunnel = streams.end("launcher was lost").await.context("virt-launcher-monitor killed")?;
        ends(tunnel, SOON).await.context("virt-launcher-monitor killed: a forwarded port")?;
        s.no_streams_left(true).await?;
        let uid = vmi["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", REOPEN_TIMEOUT, |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;
        let streams = Streams::open(s, &forward).await?;
        streams.close().await?;
        s.no_streams_left(true).await?;

        let message = forward.stop().await?;
        for reason in ["the connection was lost", "the VMI has stopped"] {
            ensure!(message.contains(reason), "{reason:?} was not message: {message}");
        }
        // The replacements manage the VMI.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", SOON).await
    });
}

/// Checks the quota: one user opens streams until a refusal, other users are not affected, and closed streams are released.
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
    let first = retry(|| async { opened(Socket::open(&client, &path, Some(&greedy)).await?) }).await?;
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
            && refused.message().contains("too many streams of this user"),
        "refused with {} {headers:?} {status}",
        refused.code
    );
    ensure!(taken.len() >= SHARE, "one user alone gets {} streams only", taken.len());

    let mut other = opened(Socket::open(&client, &path, Some(&newcomer)).await?).context("another user")?;
    other.ping(SOON).await.context("another user")?;
    try_join_all(taken.iter_mut().map(|stream| stream.ping(SOON))).await?;
    echo(&mut streams.tunnel, "still here").await?;
    let (message, _) = streams.console.run("echo $((6 * 7))").await?;
    ensure!(message.trim() == "42", "the console answers {message:?}");
    let open = s.open_streams().await?.api;
    ensure!(open > taken.len() as u64, "{open} streams are counted, and {} of one user are open", taken.len());

    drop((taken, other));
    let deadline = Instant::now() + REOPEN_TIMEOUT;
    loop {
        let open = s.open_streams().await?.api;
        // One less if an earlier attempt was still counted.
        if open <= before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{open} streams are counted after all but {before} were closed");
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns the stream, or fails with the server's message.
pub(crate) fn opened(asked: Result<Socket, Box<Answer>>) -> Result<Socket> {
    match asked {
        Ok(stream) => Ok(stream),
        Err(answer) => bail!("refused: {} {}", answer.code, answer.message()),
    }
}

/// A stream of each kind.
struct Streams {
    console: Console,
    display: Served,
    viewer: TcpStream,
    tunnel: TcpStream,
}

impl Streams {
    async fn open(s: &Story, forward: &Served) -> Result<Self> {
        let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
        console.serve(&format!("nc -ll -p {ECHO} -e cat"), ECHO).await?;
        let (display, viewer) = retry(|| s.display("box")).await.context("display")?;
        let tunnel = retry(|| async {
            let mut tunnel = forward.connect().await?;
            echo(&mut tunnel, "hello").await?;
            Ok(tunnel)
        });
        Ok(Self { console, display, viewer, tunnel: tunnel.await.context("forwarded port")? })
    }

    /// Waits until console and display have ended with an error. Returns the forwarded connection.
    async fn end(self, reason: &str) -> Result<TcpStream> {
        let began = Instant::now();
        let console = self.console.wait_end(SOON).await?;
        ensure!(!console.status.success() && console.stderr.contains(reason), "console: {console:?}");
        let display = self.display.wait_end(SOON).await.context("display")?;
        ensure!(!display.status.success() && display.stderr.contains(reason), "display: {display:?}");
        ends(self.viewer, SOON).await.context("display")?;
        eprintln!("{reason}: message within {:.1} s", began.elapsed().as_secs_f64());
        Ok(self.tunnel)
    }

    async fn close(self) -> Result<()> {
        drop((self.viewer, self.tunnel));
        self.display.wait_end(SOON).await?;
        self.console.leave().await
    }
}

/// Retries until [`REOPEN_TIMEOUT`].
async fn retry<T, F>(mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = Instant::now() + REOPEN_TIMEOUT;
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => sleep(Duration::from_secs(1)).await,
        }
    }
}
