//! Two virt-handlers over TLS on the loopback interface, with launchers made of sockets.

mod attacks;
mod draining;
mod relayed;

use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

use api::tls::handler_server_name;
use daemon::tls::listen;
use protocol::channels::{AWAIT, CONNECTED, Channel};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};

use super::{refusal::Refusal, *};
use crate::metrics::Metrics;

const PATIENCE: Duration = Duration::from_secs(20);
const SOURCE: &str = "node-1.example";
const TARGET: &str = "node-2.example";

/// The CA of an installation.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        Self { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    fn roots(&self) -> Roots {
        let roots = Roots::empty();
        roots.set_pem(self.pem.as_bytes()).unwrap();
        roots
    }

    fn identity(&self, common_name: &str, dns_names: &[String]) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(dns_names).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity::empty();
        identity.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
        identity
    }

    /// Returns the identity of a node's virt-handler.
    fn handler(&self, node: &str) -> Identity {
        self.identity(HANDLER_CN, &[handler_server_name(node)])
    }
}

/// A virt-handler that listens.
struct Node {
    channels: Channels,
    metrics: MigrationMetrics,
    _stop: DropGuard,
}

impl Node {
    fn start(authority: &Authority, name: &str) -> Self {
        let stop = CancellationToken::new();
        let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
        let metrics = Metrics::new().unwrap().migration;
        let endpoint = listener.local_addr().unwrap();
        let (identity, roots) = (authority.handler(name), authority.roots());
        let channels = Channels::new(endpoint, &identity, &roots, metrics.clone(), stop.clone()).unwrap();
        tokio::spawn(server::serve(channels.clone(), listener, stop.clone()));
        Self { channels, metrics, _stop: stop.drop_guard() }
    }

    /// Returns the address of this node, as the status of a VMI names it for `node`.
    fn as_target(&self, node: &str) -> Target {
        Target { node: node.to_owned(), address: self.endpoint().ip(), port: self.endpoint().port() }
    }

    fn endpoint(&self) -> SocketAddr {
        self.channels.endpoint()
    }

    /// Waits until channels were refused for a reason.
    async fn refused(&self, reason: Refusal) {
        eventually(&format!("refusal: {reason}"), || self.refusals(reason) > 0).await;
    }

    /// Returns the number of channels that were refused for a reason.
    fn refusals(&self, reason: Refusal) -> u64 {
        self.metrics.refused_so_far(reason.label())
    }

    /// Waits until no channel is left.
    async fn nothing_left(&self) {
        let is_empty = || {
            let targets = self.channels.0.targets.count();
            self.metrics.open_now() == 0
                && targets == 0
                && self.channels.0.source_places.available_permits() == SOURCE_CHANNELS
        };
        eventually("nothing is left", is_empty).await;
    }
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it takes too long")
}

/// A launcher: the other ends of the connections that virt-handler opens to it.
struct Launcher {
    connections: mpsc::UnboundedReceiver<UnixStream>,
    opened: Arc<AtomicUsize>,
}

struct Socket {
    connections: mpsc::UnboundedSender<UnixStream>,
    opened: Arc<AtomicUsize>,
}

#[async_trait]
impl LauncherSocket for Socket {
    async fn open(&self) -> io::Result<UnixStream> {
        self.opened.fetch_add(1, SeqCst);
        let (near, far) = UnixStream::pair()?;
        self.connections.send(far).map_err(io::Error::other)?;
        Ok(near)
    }

    async fn open_qemu(&self, _: Channel) -> io::Result<UnixStream> {
        self.open().await
    }
}

impl Launcher {
    fn new() -> (Self, Arc<dyn LauncherSocket>) {
        let (sender, connections) = mpsc::unbounded_channel();
        let opened = Arc::new(AtomicUsize::new(0));
        (Self { connections, opened: opened.clone() }, Arc::new(Socket { connections: sender, opened }))
    }

    /// Returns the next connection, with its first byte.
    async fn accept(&mut self) -> (UnixStream, u8) {
        let mut stream = soon(self.connections.recv()).await.unwrap();
        let byte = soon(stream.read_u8()).await.unwrap();
        (stream, byte)
    }

    /// Opens a channel, as the launcher of the source.
    async fn open(&mut self, channel: Channel) -> UnixStream {
        let (mut stream, byte) = self.accept().await;
        assert_eq!(byte, AWAIT);
        stream.write_all(&[channel.byte()]).await.unwrap();
        stream
    }

    /// Connects a channel, as the launcher of the target or its QEMU.
    async fn connect(&mut self, channel: Channel) -> UnixStream {
        if channel.is_bulk() {
            return soon(self.connections.recv()).await.unwrap();
        }
        let (mut stream, byte) = self.accept().await;
        assert_eq!(byte, channel.byte());
        stream.write_all(&[CONNECTED]).await.unwrap();
        stream
    }

    /// Returns the number of connections so far.
    fn opened(&self) -> usize {
        self.opened.load(SeqCst)
    }
}

/// A migration: the guards of both ends, its launchers and its nodes.
struct Moving {
    source_end: SourceEnd,
    target_end: TargetEnd,
    leaves: Launcher,
    arrives: Launcher,
    source: Node,
    target: Node,
}

impl Moving {
    fn start(authority: &Authority) -> Self {
        Self::between(Node::start(authority, SOURCE), Node::start(authority, TARGET))
    }

    fn between(source: Node, target: Node) -> Self {
        let (leaves, leaves_socket) = Launcher::new();
        let (arrives, arrives_socket) = Launcher::new();
        let target_end = target.channels.receive(migration("v", "m"), SOURCE.into(), arrives_socket);
        let source_end = source.channels.send(migration("v", "m"), target.as_target(TARGET), leaves_socket);
        Self { source_end, target_end, leaves, arrives, source, target }
    }
}

fn migration(vmi: &str, migration: &str) -> Migration {
    Migration { vmi: vmi.to_owned(), migration: migration.to_owned() }
}

/// Bytes without a pattern that a lost or repeated part would hide.
fn data(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Reads until the end and asserts that no byte comes.
async fn closed(stream: &mut UnixStream) {
    let mut rest = Vec::new();
    let _ = soon(stream.read_to_end(&mut rest)).await;
    assert!(rest.is_empty(), "{rest:?}");
}

#[tokio::test(start_paused = true)]
async fn node_listens_at_an_address_that_appears_later_and_at_the_former_one() {
    let authority = Authority::new();
    let node = Node::start(&authority, "target");
    let first = node.endpoint();
    let shown = Arc::new(std::sync::Mutex::new(first.ip()));
    let now = {
        let shown = shown.clone();
        move || *shown.lock().unwrap()
    };
    let stop = CancellationToken::new();
    let follows = tokio::spawn(server::follow_address(node.channels.clone(), now, stop.clone()));
    let second: std::net::IpAddr = [127, 0, 0, 2].into();
    // An address of no interface is left out until it can be used.
    for (address, expected) in
        [(first.ip(), first.ip()), ([192, 0, 2, 1].into(), first.ip()), (second, second), (first.ip(), first.ip())]
    {
        *shown.lock().unwrap() = address;
        tokio::time::sleep(std::time::Duration::from_secs(11)).await;
        assert_eq!(node.endpoint(), SocketAddr::new(expected, first.port()), "{address}");
    }
    for address in [first.ip(), second] {
        std::net::TcpStream::connect((address, first.port())).unwrap();
    }
    stop.cancel();
    follows.await.unwrap();
}
