//! Streams through the whole chain: plugin, API server, virt-api, virt-handler, launcher, guest.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Socket, TIMEOUT, echo, story};
use futures::future::try_join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::{manifests, stream_faults::opened};

/// Time limit for what a guest under emulation receives, sends or prints.
const MINUTES: Duration = Duration::from_secs(300);
/// Bytes in each direction over a forwarded port.
const SENT: usize = 10 * 1024 * 1024;
/// Concurrent connections: number of plugins, connections of each ...
const PLUGINS: usize = 2;
const EACH: usize = 100;
/// ... connections opened at once ...
const LANES: usize = 4;
/// ... and connections whose clients do not read.
const IDLERS: usize = 8;

#[test]
fn forwarded_port_carries_ten_mebibytes_each_way_unchanged() {
    story("forward", async |s| {
        s.apply(&manifests::masqueraded("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;

        let sent = pattern();
        // The server closes its half before it reads.
        let forward = s.forward("vmi/box", 7000).await?;
        receive(&mut console, 7000, "nc -l -p 7000 </dev/null >/tmp/in", async || {
            let mut stream = forward.connect().await?;
            ensure!(timeout(TIMEOUT, stream.read(&mut [0])).await?? == 0, "the guest message something");
            stream.write_all(&sent).await.context("sending")?;
            stream.shutdown().await?;
            Ok(stream)
        })
        .await?;
        forward.stop().await?;

        console.serve("nc -l -p 7001 </tmp/in", 7001).await?;
        let forward = s.forward("vm/box", 7001).await?;
        let mut stream = forward.connect().await?;
        let mut received = vec![0_u8; SENT];
        timeout(MINUTES, stream.read_exact(&mut received)).await.context("the guest's file did not come in time")??;
        // The echo covers both directions.
        let differs = sent.iter().zip(&received).position(|(a, b)| a != b);
        ensure!(differs.is_none(), "byte {differs:?} is another one");
        forward.stop().await?;

        // A client without half-closed connections: after the server has closed its half, here after a megabyte, the stream
        // ends when it is idle.
        let server = "(sleep 600 & echo $! >/tmp/pid; wait) | nc -l -p 7002 | \
                      { dd bs=1000 count=1000 iflag=fullblock; kill $(cat /tmp/pid); cat; } >/tmp/in 2>/dev/null";
        receive(&mut console, 7002, server, async || {
            let mut plugin = s.virt_command(&["port-forward", "--stdio", "vmi/box", "7002"]);
            let mut plugin = plugin.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
            let mut input = plugin.stdin.take().context("no standard input")?;
            input.write_all(&sent).await.context("sending")?;
            let status = timeout(MINUTES, plugin.wait()).await.context("the plugin goes on")??;
            ensure!(status.success(), "the plugin ended with {status}");
            Ok(input)
        })
        .await?;
        console.leave().await
    });
}

/// Starts a server that reads to the end, runs `send`, and checks the received data.
async fn receive<T>(
    console: &mut Console,
    port: u16,
    server: &str,
    send: impl AsyncFnOnce() -> Result<T>,
) -> Result<()> {
    console.serve(&format!("(rm -f /tmp/received; {server}; echo done >/tmp/received)"), port).await?;
    let _open = send().await?;
    let deadline = Instant::now() + MINUTES;
    while console.run("test -e /tmp/received").await?.1 != 0 {
        ensure!(Instant::now() < deadline, "the guest's server did not see the end of the stream");
        sleep(Duration::from_millis(500)).await;
    }
    let (size, _) = console.run("wc -c < /tmp/in").await?;
    ensure!(size.trim() == SENT.to_string(), "the guest received {size:?} bytes of {SENT}");
    Ok(())
}

#[test]
fn later_console_replaces_the_former_and_can_request_its_output() {
    story("consoles", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut first = s.console("box")?;
        first.login("root", "ferrovirt").await?;
        first.run("echo seen-$((6 * 7))").await?;
        let mut second = s.console("box")?;
        let end = first.wait_end(TIMEOUT).await.context("the first console goes on beside the second")?;
        ensure!(!end.status.success() && end.stderr.contains("another client has taken"), "{end:?}");
        // The later console has the same shell without earlier output ...
        second.login_or_shell("root", "ferrovirt").await?;
        let (answer, _) = second.run("echo here").await?;
        ensure!(answer.contains("here") && !answer.contains("seen-42"), "{answer:?}");
        second.leave().await?;
        // ... unless it takes the default.
        let mut third = Console::open(s.virt_command(&["console", "box"]))?;
        third.expect("seen-42", TIMEOUT).await.context("replay")?;
        third.leave().await
    });
}

#[test]
fn console_shows_the_prompt_that_was_printed_before() {
    story("prompt", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        // As virtctl opens it, without any key.
        let open = async |query: &str| {
            let path = s.subresource("v1", "virtualmachineinstances/box", &format!("console{query}"));
            opened(Socket::open(&s.client, &path, None).await?)
        };
        let soon = Duration::from_secs(5);
        open("").await?.expect("login: ", MINUTES).await.context("boot")?;
        open("").await?.expect("login: ", TIMEOUT).await.context("later")?;
        let silent = open("?replay=false").await?.expect("login: ", soon).await;
        ensure!(silent.is_err(), "earlier output is shown although the client refuses it");
        Ok(())
    });
}

#[test]
fn two_hundred_concurrent_streams_and_forty_lost_clients_are_released() {
    story("many", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        for _ in 0..4 {
            let mut clients = Vec::new();
            for _ in 0..10 {
                clients.push(
                    s.virt_command(&["console", "box"])
                        .stdin(Stdio::piped())
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .spawn()?,
                );
            }
            sleep(Duration::from_secs(1)).await;
            for client in &mut clients {
                client.kill().await?;
            }
        }
        // A VMI has one console, which the next user can open.
        let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
        console.serve("nc -ll -p 7000 -e cat", 7000).await?;
        console.serve("nc -ll -p 7001 -e yes", 7001).await?;
        let (display, viewer) = s.display("box").await?;

        let before = s.virt_api_memory().await?;
        let (mut plugins, mut echoes) = (Vec::new(), Vec::new());
        for _ in 0..PLUGINS {
            let plugin = s.forward("vmi/box", 7000).await?;
            // The accept queue of the guest's server holds two connections.
            for lane in (0..EACH).step_by(LANES) {
                echoes.extend(
                    try_join_all((lane..EACH.min(lane + LANES)).map(async |number| {
                        let mut stream = plugin.connect().await?;
                        echo(&mut stream, &format!("first word of {number}")).await?;
                        anyhow::Ok(stream)
                    }))
                    .await?,
                );
            }
            plugins.push(plugin);
        }
        // Some do not read an endless stream.
        let endless = s.forward("vmi/box", 7001).await?;
        let idlers: Vec<TcpStream> = try_join_all((0..IDLERS).map(async |_| endless.connect().await)).await?;
        sleep(Duration::from_secs(10)).await;
        let expected = (PLUGINS * EACH + IDLERS + 2) as u64;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let open = s.open_streams().await?.api;
            if open == expected {
                break;
            }
            ensure!(Instant::now() < deadline, "{open} streams are open, not {expected}");
            sleep(Duration::from_millis(500)).await;
        }
        for (number, stream) in echoes.iter_mut().enumerate() {
            echo(stream, &format!("last word of {number}")).await?;
        }
        ensure!(console.run("echo $((6 * 7))").await?.0.trim() == "42", "the console does not answer");
        let grown = s.virt_api_memory().await?.saturating_sub(before);
        eprintln!("virt-api grew by {grown} KiB for {expected} streams");
        ensure!(grown < 64 * 1024, "virt-api takes {grown} KiB more for {expected} streams");

        console.leave().await?;
        drop((echoes, idlers, viewer));
        display.wait_end(TIMEOUT).await?;
        s.no_streams_left(false).await?;
        endless.stop().await?;
        for plugin in plugins {
            let message = plugin.stop().await?;
            ensure!(message.is_empty(), "connections failed: {message}");
        }
        Ok(())
    });
}

/// Returns bytes without a period of a power of two, so that lost or duplicate blocks are detected.
fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..SENT)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}
