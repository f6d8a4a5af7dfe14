//! One user who floods virt-api with streams, and the streams with frames.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Socket, Story, connect_without_retries, story_alone};
use futures::future::{join_all, try_join_all};
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Streams asked for at once, how many of them one user alone gets of any virt-api, and more than of several together.
const ASKED: usize = 250;
const SHARE: usize = 200;
const MOST: usize = 2048;
/// Streams that are flooded with frames, and how.
const FLOODED: usize = 32;
const FRAMES: usize = 20_000;
const FLOOD: Duration = Duration::from_secs(4);
/// How soon an answer comes on a machine that is not busy, and how long it is waited for on one that is.
const SOON: Duration = Duration::from_secs(30);
/// How long it may take until all is free again.
const AGAIN: Duration = Duration::from_secs(90);
/// Most that a virt-api may grow by it, in KiB.
const GROWTH: u64 = 64 * 1024;

#[test]
fn cve_2026_35469_a_flood_of_streams_and_frames_of_one_user_leaves_others_theirs() {
    story_alone("cve-streams", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let (greedy, newcomer) = (format!("greedy-{}", s.namespace), format!("newcomer-{}", s.namespace));
        bind(s, &[&greedy, &newcomer]).await?;
        let client = connect_without_retries().await?;
        // Datagrams to a port where nobody listens: the guest has no work with them.
        let path = s.subresource("v1", "virtualmachineinstances/box", "portforward/9/udp");
        let (before, memory) = (s.open_streams().await?.api, s.virt_api_memory().await?);
        // Bindings are cached by the API server, which may not know this one yet.
        let deadline = Instant::now() + AGAIN;
        let mut taken = loop {
            match Socket::open(&client, &path, Some(&greedy)).await? {
                Ok(stream) => break vec![stream],
                Err(answer) if Instant::now() > deadline => bail!("refused: {} {}", answer.code, answer.said()),
                Err(_) => sleep(Duration::from_secs(1)).await,
            }
        };

        let mut refused = 0;
        while refused == 0 {
            ensure!(taken.len() < MOST, "{} streams of one user are open, and none was refused", taken.len());
            for asked in join_all((0..ASKED).map(|_| Socket::open(&client, &path, Some(&greedy)))).await {
                match asked? {
                    Ok(stream) => taken.push(stream),
                    Err(answer) => {
                        ensure!(answer.code == 429, "refused with {} {}", answer.code, answer.said());
                        refused += 1;
                    }
                }
            }
        }
        eprintln!("{} streams of one user are open, {refused} were refused", taken.len());
        ensure!(taken.len() >= SHARE, "one user alone gets {} streams only", taken.len());

        let flood = join_all(taken.iter_mut().take(FLOODED).map(|stream| stream.flood(FRAMES, FLOOD)));
        let others = async {
            let opened = Socket::open(&client, &path, Some(&newcomer)).await?;
            let Ok(mut stream) = opened else { bail!("another user gets no stream") };
            stream.ping(SOON).await.context("another user")?;
            let mut console = s.console("box")?;
            console.login_or_shell("root", "ferrovirt").await.context("a console during the flood")?;
            console.leave().await
        };
        let (frames, others) = futures::join!(flood, others);
        others?;
        let grown = s.virt_api_memory().await?.saturating_sub(memory);
        eprintln!("{} frames were taken; virt-api grew by {grown} KiB", frames.iter().sum::<usize>());
        ensure!(grown < GROWTH, "virt-api takes {grown} KiB more");
        // Those that nobody has flooded are as they were.
        try_join_all(taken.iter_mut().skip(FLOODED).map(|stream| stream.ping(SOON))).await?;

        drop(taken);
        let deadline = Instant::now() + AGAIN;
        loop {
            let open = s.open_streams().await?.api;
            if open <= before {
                break;
            }
            ensure!(Instant::now() < deadline, "{open} streams are counted after all but {before} were closed");
            sleep(Duration::from_millis(500)).await;
        }
        s.no_streams_left(true).await
    });
}

async fn bind(s: &Story, users: &[&str]) -> Result<()> {
    for (number, user) in users.iter().enumerate() {
        s.apply(&format!(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: streams-{number}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {user}}}]
"
        ))
        .await?;
    }
    Ok(())
}
