//! Streams through the whole chain: plugin, API server, virt-api, agent, launcher, guest.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Console, Story, story};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Child,
    time::{Instant, sleep, timeout},
};

use crate::manifests;

/// What is sent each way over a forwarded port.
const SENT: usize = 10 * 1024 * 1024;

#[test]
fn forwarded_port_carries_ten_mebibytes_each_way_unchanged() {
    story("forward", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;

        let sent = pattern();
        // A server that has nothing to say but does not say so: the end of its input would be that of its stream.
        console.run("mkfifo /tmp/silence; { sleep 600 >/tmp/silence & }").await?;
        listen(&mut console, "(nc -l -p 7000 </tmp/silence >/tmp/in; echo done >/tmp/received)", 7000).await?;
        let (mut forward, port) = forward(s, "vmi/box", 7000).await?;
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(&sent).await.context("sending")?;
        stream.shutdown().await?;
        // The end of what the client sends reaches the guest: its server ends.
        let deadline = Instant::now() + Duration::from_secs(60);
        while console.run("test -e /tmp/received").await?.1 != 0 {
            ensure!(Instant::now() < deadline, "the guest's server did not see the end of the stream");
            sleep(Duration::from_millis(500)).await;
        }
        let (size, _) = console.run("wc -c < /tmp/in").await?;
        ensure!(size.trim() == SENT.to_string(), "the guest received {size:?} bytes of {SENT}");
        forward.kill().await?;

        listen(&mut console, "nc -l -p 7001 </tmp/in", 7001).await?;
        let (mut forward, port) = self::forward(s, "vm/box", 7001).await?;
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let mut received = vec![0_u8; SENT];
        timeout(Duration::from_secs(120), stream.read_exact(&mut received))
            .await
            .context("the guest's file did not come in time")??;
        // What came back went both ways: a difference would be in either.
        let differs = sent.iter().zip(&received).position(|(a, b)| a != b);
        ensure!(differs.is_none(), "byte {differs:?} is another one");
        forward.kill().await?;
        console.leave().await
    });
}

#[test]
fn later_console_takes_the_place_of_the_former() {
    story("consoles", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut first = s.console("box")?;
        first.login("root", "ferrovirt").await?;
        let mut second = s.console("box")?;
        // Whoever comes later finds the shell of the former.
        second.login_or_shell("root", "ferrovirt").await?;
        let (answer, _) = second.run("echo here").await?;
        ensure!(answer.contains("here"), "{answer:?}");
        first.wait_end(Duration::from_secs(15)).await.context("the first console goes on beside the second")?;
        second.leave().await
    });
}

#[test]
fn many_streams_leave_nothing_behind() {
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
        // A machine has one console, and it answers the next user.
        let mut console = s.console_again("box", "root", "ferrovirt").await?;
        console.run("true").await?;
        console.leave().await?;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let open = open_streams(s).await?;
            if open == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{open} streams are open after their clients went");
            sleep(Duration::from_secs(1)).await;
        }
    });
}

/// Streams of this story's machines that virt-api counts as open, in all its pods.
async fn open_streams(s: &Story) -> Result<u64> {
    let of_story = format!("namespace=\"{}\"", s.namespace);
    let lines = s.metrics("virt-api").await?;
    let open = lines.iter().filter(|line| line.starts_with("kubevirt_") && line.contains(&of_story));
    let open =
        open.filter(|line| line.contains("active")).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    Ok(open.sum())
}

/// Starts a server in the guest and waits until it listens.
async fn listen(console: &mut Console, server: &str, port: u16) -> Result<()> {
    console.run(&format!("{{ {server} & }}")).await?;
    let deadline = Instant::now() + Duration::from_secs(30);
    while console.run(&format!("grep -qi ':{port:04x} ' /proc/net/tcp /proc/net/tcp6")).await?.1 != 0 {
        ensure!(Instant::now() < deadline, "the guest's server does not listen: {server}");
        sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// Starts `kubectl virt port-forward` to the port of a machine, and waits until it listens.
async fn forward(s: &Story, machine: &str, port: u16) -> Result<(Child, u16)> {
    let local = TcpListener::bind(("127.0.0.1", 0)).await?.local_addr()?.port();
    let mapping = format!("{local}:{port}");
    let mut child = s
        .virt_command(&["port-forward", machine, &mapping])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .context("cannot start kubectl virt port-forward")?;
    let mut output = child.stdout.take().context("no output")?;
    let mut said = Vec::new();
    let mut buffer = [0_u8; 512];
    // It says where it listens once it does.
    while !String::from_utf8_lossy(&said).contains(&local.to_string()) {
        match timeout(Duration::from_secs(20), output.read(&mut buffer)).await?? {
            0 => bail!("kubectl virt port-forward ended: {}", String::from_utf8_lossy(&said)),
            length => said.extend_from_slice(&buffer[..length]),
        }
    }
    Ok((child, local))
}

/// Bytes that repeat at no power of two, so that a lost or doubled block shows.
fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..SENT)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}
