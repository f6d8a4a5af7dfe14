//! One user floods virt-api with streams, and streams with frames.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Socket, Story, connect_without_retries, story_alone};
use futures::future::{join_all, try_join_all};
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Streams that are requested at once, the quota of one user at one virt-api, and a bound above the quotas of all virt-apis.
const ASKED: usize = 250;
const SHARE: usize = 200;
const MOST: usize = 2048;
/// Streams that are flooded with frames, and the flood.
const FLOODED: usize = 32;
const FRAMES: usize = 20_000;
const FLOOD: Duration = Duration::from_secs(4);
/// Expected time of an answer on an idle host, and its time limit on a busy one.
const SOON: Duration = Duration::from_secs(120);
/// Time limit for the release of all streams.
const AGAIN: Duration = Duration::from_secs(240);
/// Limit of virt-api's memory growth in KiB.
const GROWTH: u64 = 64 * 1024;

#[test]
fn cve_2026_35469_flood_of_streams_and_frames_of_one_user_does_not_affect_others() {
    story_alone("cve-streams", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let (greedy, newcomer) = (format!("greedy-{}", s.namespace), format!("newcomer-{}", s.namespace));
        bind(s, &[&greedy, &newcomer]).await?;
        let client = connect_without_retries().await?;
        // Datagrams to a port without a listener cost the guest nothing.
        let path = s.subresource("v1", "virtualmachineinstances/box", "portforward/9/udp");
        let (before, memory) = (s.open_streams().await?.api, s.virt_api_memory().await?);
        // The API server caches bindings and may not know this one yet.
        let deadline = Instant::now() + AGAIN;
        let mut taken = loop {
            match Socket::open(&client, &path, Some(&greedy)).await? {
                Ok(stream) => break vec![stream],
                Err(answer) if Instant::now() > deadline => bail!("refused: {} {}", answer.code, answer.message()),
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
                        ensure!(answer.code == 429, "refused with {} {}", answer.code, answer.message());
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
        // Streams without a flood still work.
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
