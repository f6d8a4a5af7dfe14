//! Peers and launchers that break the rules. Each is refused and counted, and nothing of it is left.

use api::tls::{API_CLIENT_CN, GUEST_CLIENT_CN};
use daemon::tls::{Accepted, Callers, Limits, MutualTls, TlsStream, serve_streams};
use tokio::{net::TcpStream, time::Instant};

use super::{frame::Header, server::HEADER_LIMIT, target::CHANNELS, *};

/// Connects to the target as a process with this identity.
async fn dial(node: &Node, authority: &Authority, identity: &Identity) -> TlsStream {
    dial_with(node, authority, identity, PROTOCOL).await.unwrap()
}

async fn dial_with(
    node: &Node,
    authority: &Authority,
    identity: &Identity,
    protocol: &'static str,
) -> io::Result<TlsStream> {
    let tls = MutualTls::new(identity, &authority.roots(), HANDLER_CN, protocol).unwrap();
    tls.connect(TcpStream::connect(node.endpoint()).await?, handler_server_name(TARGET)).await
}

/// Sends bytes as a header and waits until the connection is closed without an answer.
async fn unanswered(mut stream: TlsStream, header: &[u8]) {
    let _ = stream.write_all(header).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    let _ = soon(stream.read_to_end(&mut answer)).await;
    assert!(answer.is_empty(), "{answer:?}");
}

fn header(vmi: &str, uid: &str) -> Vec<u8> {
    Header { migration: migration(vmi, uid), channel: Channel::Memory }.encode().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn virt_handler_of_a_third_node_opens_no_channel() {
    let authority = Authority::new();
    let (third, target) = (Node::start(&authority, "node-3.example"), Node::start(&authority, TARGET));
    let (arrives, arrives_socket) = Launcher::new();
    let (mut leaves, leaves_socket) = Launcher::new();
    let target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket);
    let source_end = third.channels.send(migration("v", "m"), target.as_target(TARGET), leaves_socket);
    let mut near = leaves.open(Channel::Control).await;
    closed(&mut near).await;
    target.refused(Refusal::Node).await;
    assert_eq!(arrives.opened(), 0);
    drop((target_end, source_end));
    third.nothing_left().await;
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_other_roles_and_authorities_open_no_channel() {
    let (authority, other) = (Authority::new(), Authority::new());
    let target = Node::start(&authority, TARGET);
    let (arrives, arrives_socket) = Launcher::new();
    let _target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket);
    let name = handler_server_name(SOURCE);
    for (number, identity) in [
        authority.identity(API_CLIENT_CN, std::slice::from_ref(&name)),
        authority.identity(GUEST_CLIENT_CN, std::slice::from_ref(&name)),
        other.handler(SOURCE),
    ]
    .iter()
    .enumerate()
    {
        unanswered(dial(&target, &authority, identity).await, &header("v", "m")).await;
        let refused = || target.refusals(Refusal::Handshake) == number as u64 + 1;
        eventually("the handshake is refused", refused).await;
    }
    // A certificate that could stand for two nodes stands for none.
    let both = authority.identity(HANDLER_CN, &[name, handler_server_name("node-3.example")]);
    unanswered(dial(&target, &authority, &both).await, &header("v", "m")).await;
    target.refused(Refusal::Certificate).await;
    // A client without TLS, and one of another protocol.
    let mut plain = TcpStream::connect(target.endpoint()).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let handler = authority.handler(SOURCE);
    assert!(dial_with(&target, &authority, &handler, "http/1.1").await.is_err());
    eventually("both are refused", || target.refusals(Refusal::Handshake) == 5).await;
    assert_eq!(arrives.opened(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_to_the_virt_handler_of_a_third_node() {
    let (authority, other) = (Authority::new(), Authority::new());
    let source = Node::start(&authority, SOURCE);
    // One with a certificate for its own node, and one whose certificate is not of this installation.
    for (authority, name) in [(&authority, "node-3.example"), (&other, TARGET)] {
        let third = Node::start(authority, name);
        let (arrives, arrives_socket) = Launcher::new();
        let (mut leaves, leaves_socket) = Launcher::new();
        let _target_end = third.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket);
        let source_end = source.channels.send(migration("v", "m"), third.as_target(TARGET), leaves_socket);
        let mut near = leaves.open(Channel::Memory).await;
        let _ = near.write_all(b"memory of the guest").await;
        closed(&mut near).await;
        third.refused(Refusal::Handshake).await;
        assert_eq!(arrives.opened(), 0, "{name}");
        drop(source_end);
        source.nothing_left().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_vmis_and_ended_migrations_are_refused() {
    let authority = Authority::new();
    let target = Node::start(&authority, TARGET);
    let (first, first_socket) = Launcher::new();
    let (second, second_socket) = Launcher::new();
    let source = authority.handler(SOURCE);
    let ended = target.channels.receive(migration("v", "m1"), SOURCE.into(), first_socket);
    drop(ended);
    unanswered(dial(&target, &authority, &source).await, &header("v", "m1")).await;
    assert_eq!(target.refusals(Refusal::UnknownVmi), 1);
    let target_end = target.channels.receive(migration("v", "m2"), SOURCE.into(), second_socket);
    // The migration of a replayed header, and one of another VMI.
    unanswered(dial(&target, &authority, &source).await, &header("v", "m1")).await;
    assert_eq!(target.refusals(Refusal::UnknownMigration), 1);
    unanswered(dial(&target, &authority, &source).await, &header("w", "m2")).await;
    assert_eq!(target.refusals(Refusal::UnknownVmi), 2);
    assert_eq!((first.opened(), second.opened()), (0, 0));
    drop(target_end);
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_reaches_no_launcher_of_another_vmi() {
    let authority = Authority::new();
    let (source, target) = (Node::start(&authority, SOURCE), Node::start(&authority, TARGET));
    let (mut own, own_socket) = Launcher::new();
    let (other, other_socket) = Launcher::new();
    let (mut hostile, hostile_socket) = Launcher::new();
    let _own = target.channels.receive(migration("hostile", "m1"), SOURCE.into(), own_socket);
    let _other = target.channels.receive(migration("victim", "m2"), SOURCE.into(), other_socket);
    let _source_end = source.channels.send(migration("hostile", "m1"), target.as_target(TARGET), hostile_socket);
    let (mut near, _) = hostile.accept().await;
    // A header after the byte of the channel is data for its own VMI.
    let forged = header("victim", "m2");
    near.write_all(&[&[Channel::Memory.byte()], forged.as_slice()].concat()).await.unwrap();
    let mut far = own.connect(Channel::Memory).await;
    let mut arrived = vec![0; forged.len()];
    soon(far.read_exact(&mut arrived)).await.unwrap();
    assert_eq!(arrived, forged);
    assert_eq!(other.opened(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_and_slow_headers_are_refused() {
    let authority = Authority::new();
    let target = Node::start(&authority, TARGET);
    let (arrives, arrives_socket) = Launcher::new();
    let target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket);
    let source = authority.handler(SOURCE);
    let oversized = [&[255, 255, Channel::Memory.byte()], data(1 << 20, 1).as_slice()].concat();
    for (number, header) in
        [oversized.as_slice(), &[1, 1, b'Z', b'v', b'm'], &[0, 0, Channel::Memory.byte()]].into_iter().enumerate()
    {
        unanswered(dial(&target, &authority, &source).await, header).await;
        assert_eq!(target.refusals(Refusal::Header), number as u64 + 1);
    }
    // One byte at a time does not extend the limit.
    let mut slow = dial(&target, &authority, &source).await;
    let began = Instant::now();
    for byte in header(&"v".repeat(64), &"m".repeat(64)) {
        if slow.write_all(&[byte]).await.is_err() || slow.flush().await.is_err() {
            break;
        }
        if tokio::time::timeout(Duration::from_millis(200), slow.read_u8()).await.is_ok() {
            break;
        }
    }
    target.refused(Refusal::Slow).await;
    assert!(began.elapsed() < HEADER_LIMIT * 2, "{:?}", began.elapsed());
    assert_eq!(arrives.opened(), 0);
    drop(target_end);
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_of_the_target_ends_the_channel() {
    let authority = Authority::new();
    let source = Node::start(&authority, SOURCE);
    let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
    let endpoint = listener.local_addr().unwrap();
    let tls = MutualTls::new(&authority.handler(TARGET), &authority.roots(), HANDLER_CN, PROTOCOL).unwrap();
    let stop = CancellationToken::new();
    let garbage = |accepted: Accepted| async move {
        let (mut stream, _kept) = accepted.keep();
        let _ = Header::read(&mut stream).await;
        let _ = stream.write_all(&data(1 << 20, 3)).await;
    };
    let (server, callers) = (tls.server(), Callers::default());
    tokio::spawn(serve_streams(listener, server, Limits::DEFAULT, callers, stop.clone(), |_, _| {}, garbage));
    let (mut leaves, leaves_socket) = Launcher::new();
    let target = Target { node: TARGET.into(), address: endpoint.ip(), port: endpoint.port() };
    let source_end = source.channels.send(migration("v", "m"), target, leaves_socket);
    for _ in 0..3 {
        let mut near = leaves.open(Channel::Control).await;
        closed(&mut near).await;
    }
    drop(source_end);
    source.nothing_left().await;
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_of_the_launcher_of_the_target_is_refused() {
    let Moving { source_end, target_end, mut leaves, mut arrives, source, target } = Moving::start(&Authority::new());
    let mut near = leaves.open(Channel::Control).await;
    let (mut far, _) = arrives.accept().await;
    far.write_all(b"garbage").await.unwrap();
    closed(&mut near).await;
    target.refused(Refusal::Launcher).await;
    drop((target_end, source_end));
    source.nothing_left().await;
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_channels_of_a_launcher_reach_no_other_node() {
    let mut moving = Moving::start(&Authority::new());
    for byte in [0, AWAIT, CONNECTED, 255] {
        let (mut near, _) = moving.leaves.accept().await;
        near.write_all(&[byte]).await.unwrap();
        closed(&mut near).await;
    }
    assert_eq!(moving.arrives.opened(), 0);
    drop(moving.source_end);
    moving.source.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_opens_channels_without_end_is_limited() {
    let authority = Authority::new();
    let Moving { source_end, target_end, mut leaves, mut arrives, source, target } = Moving::start(&authority);
    let mut open = Vec::new();
    for _ in 0..CHANNELS {
        let near = leaves.open(Channel::Memory).await;
        open.push((near, arrives.connect(Channel::Memory).await));
    }
    let next = tokio::time::timeout(Duration::from_millis(500), leaves.connections.recv()).await;
    assert!(next.is_err(), "no more connections at a time than the limit");
    // The target does not rely on the limit of the source.
    let hostile = authority.handler(SOURCE);
    unanswered(dial(&target, &authority, &hostile).await, &header("v", "m")).await;
    assert_eq!(target.refusals(Refusal::Full), 1);
    drop(open);
    // Channels that end at once are opened at a bounded rate.
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(2) {
        if let Ok(Some(mut near)) = tokio::time::timeout(Duration::from_millis(100), leaves.connections.recv()).await {
            let _ = near.read_u8().await;
            let _ = near.write_all(&[Channel::Memory.byte()]).await;
            count += 1;
        }
    }
    assert!(count < 60, "{count} channels in two seconds");
    drop((target_end, source_end, arrives));
    source.nothing_left().await;
    target.nothing_left().await;
}
