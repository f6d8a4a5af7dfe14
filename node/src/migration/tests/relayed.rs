//! Channels that are relayed.

use std::io::{Read as _, Write as _};

use super::*;

/// Relays `sent` and `returned` over one channel and half-closes each direction.
async fn exchange(source: &mut UnixStream, target: &mut UnixStream, sent: &[u8], returned: &[u8]) {
    let (mut source_read, mut source_write) = source.split();
    let (mut target_read, mut target_write) = target.split();
    let (mut arrived, mut came_back) = (Vec::new(), Vec::new());
    let source = async {
        source_write.write_all(sent).await.unwrap();
        source_write.shutdown().await.unwrap();
    };
    let target = async {
        target_read.read_to_end(&mut arrived).await.unwrap();
        // The other direction is open after the end of this one.
        target_write.write_all(returned).await.unwrap();
        target_write.shutdown().await.unwrap();
    };
    let back = async { source_read.read_to_end(&mut came_back).await.unwrap() };
    soon(async { tokio::join!(source, target, back) }).await;
    assert!(arrived == sent, "{} of {} bytes", arrived.len(), sent.len());
    assert!(came_back == returned, "{} of {} bytes", came_back.len(), returned.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_relay_megabytes_both_ways_unchanged() {
    let Moving { source_end, target_end, mut leaves, mut arrives, source, target } = Moving::start(&Authority::new());
    let mut pairs = Vec::new();
    // Several connections of one channel at a time, as multifd opens them.
    for channel in
        [Channel::Control, Channel::Disks, Channel::Memory, Channel::Memory, Channel::Memory, Channel::Release]
    {
        let near = leaves.open(channel).await;
        pairs.push((channel, near, arrives.connect(channel).await));
    }
    eventually("all channels are counted", || (source.metrics.open_now(), target.metrics.open_now()) == (6, 6)).await;
    let exchanges = pairs.into_iter().enumerate().map(|(number, (channel, mut near, mut far))| {
        let seed = u32::try_from(number).unwrap();
        let length = if channel == Channel::Memory { 5_000_003 } else { 300_001 };
        async move { exchange(&mut near, &mut far, &data(length, seed), &data(length / 3, seed + 100)).await }
    });
    futures::future::join_all(exchanges).await;
    drop((target_end, source_end));
    source.nothing_left().await;
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_bytes_pass_at_once() {
    let mut moving = Moving::start(&Authority::new());
    let mut near = moving.leaves.open(Channel::Release).await;
    let mut far = moving.arrives.connect(Channel::Release).await;
    near.write_all(b"r").await.unwrap();
    assert_eq!(soon(far.read_u8()).await.unwrap(), b'r');
    far.write_all(b"k").await.unwrap();
    assert_eq!(soon(near.read_u8()).await.unwrap(), b'k');
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_pauses_stops_the_writer() {
    let mut moving = Moving::start(&Authority::new());
    let mut near = moving.leaves.open(Channel::Memory).await;
    let mut far = moving.arrives.connect(Channel::Memory).await;
    let sent = data(64 << 20, 7);
    let (mut written, block) = (0, 1 << 16);
    while let Ok(result) =
        tokio::time::timeout(Duration::from_secs(1), near.write(&sent[written..written + block])).await
    {
        written += result.unwrap();
        assert!(written < sent.len() - block, "all bytes are taken without a reader");
    }
    // A guest stands still until they have arrived.
    assert!(written < 4 << 20, "{written} bytes are queued");
    let mut arrived = vec![0; written];
    soon(far.read_exact(&mut arrived)).await.unwrap();
    assert!(arrived == sent[..written]);
}

/// Makes the calling thread wait for a stream.
fn blocking(stream: UnixStream) -> std::os::unix::net::UnixStream {
    let stream = stream.into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[tokio::test]
async fn channels_go_on_while_the_runtime_of_the_vmis_is_busy() {
    let (authority, threads) = (Authority::new(), Threads::start().unwrap());
    let (source, target) = {
        let _entered = threads.enter();
        (Node::start(&authority, SOURCE), Node::start(&authority, TARGET))
    };
    let mut moving = Moving::between(source, target);
    let mut near = blocking(moving.leaves.open(Channel::Memory).await);
    let mut far = blocking(moving.arrives.connect(Channel::Memory).await);
    // The only thread of this runtime is busy from here on.
    let sent = data(1 << 20, 3);
    let mut arrived = vec![0; sent.len()];
    for (sent, arrived) in sent.chunks(1 << 16).zip(arrived.chunks_mut(1 << 16)) {
        near.write_all(sent).unwrap();
        far.read_exact(arrived).unwrap();
    }
    assert!(arrived == sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_end_with_the_guards_of_both_ends() {
    let authority = Authority::new();
    let (source, target) = (Node::start(&authority, SOURCE), Node::start(&authority, TARGET));
    for ends_at_source in [true, false] {
        let (mut leaves, leaves_socket) = Launcher::new();
        let (mut arrives, arrives_socket) = Launcher::new();
        let mut target_end = Some(target.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket));
        let mut source_end = Some(source.channels.send(migration("v", "m"), target.as_target(TARGET), leaves_socket));
        let mut near = leaves.open(Channel::Control).await;
        let mut far = arrives.connect(Channel::Control).await;
        if ends_at_source {
            drop(source_end.take())
        } else {
            drop(target_end.take())
        }
        closed(&mut near).await;
        closed(&mut far).await;
        drop((target_end, source_end));
        source.nothing_left().await;
        target.nothing_left().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_registration_replaces_the_earlier_one() {
    let authority = Authority::new();
    let (source, target) = (Node::start(&authority, SOURCE), Node::start(&authority, TARGET));
    let (_first, first_socket) = Launcher::new();
    let (mut second, second_socket) = Launcher::new();
    let (mut leaves, leaves_socket) = Launcher::new();
    let first_target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), first_socket);
    let second_target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), second_socket);
    drop(first_target_end);
    let source_end = source.channels.send(migration("v", "m"), target.as_target(TARGET), leaves_socket);
    let _near = leaves.open(Channel::Control).await;
    let _far = second.connect(Channel::Control).await;
    drop((second_target_end, source_end));
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_restarts_is_dialled_again() {
    let mut moving = Moving::start(&Authority::new());
    for _ in 0..5 {
        let (stream, byte) = moving.leaves.accept().await;
        assert_eq!(byte, AWAIT);
        drop(stream);
    }
    let mut near = moving.leaves.open(Channel::Memory).await;
    let mut far = moving.arrives.connect(Channel::Memory).await;
    near.write_all(b"x").await.unwrap();
    assert_eq!(soon(far.read_u8()).await.unwrap(), b'x');
}
