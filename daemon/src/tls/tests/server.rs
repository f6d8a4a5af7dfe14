//! The accept loop.

use api::config::ClusterConfig;

use super::*;
use crate::{
    config::ConfigHandle,
    ops::{Ops, Readiness},
};

/// A server of one page, and how to ask it.
struct Site {
    address: std::net::SocketAddr,
    tls: Arc<rustls::ClientConfig>,
}

impl Site {
    async fn start(limits: Limits, callers: Callers) -> Self {
        let authority = Authority::new();
        let server = authority.identity("server", "a.example");
        let config = server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
        let address = start_with(config, limits, callers, CancellationToken::new()).await;
        Self { address, tls: client_config(&authority.roots(), None, &["http/1.1"]).unwrap() }
    }

    /// Connects from an address of the loopback network.
    async fn connect(&self, from: [u8; 4]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    async fn secure(&self, from: [u8; 4]) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = self.connect(from).await;
        TlsConnector::from(self.tls.clone()).connect(ServerName::try_from("a.example").unwrap(), stream).await
    }

    /// Asks for the page as a probe does, on a connection of its own.
    async fn probe(&self, from: [u8; 4]) -> std::io::Result<String> {
        let answer = async {
            let mut stream = self.secure(from).await?;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok(answer)
        };
        tokio::time::timeout(Duration::from_secs(2), answer).await?
    }

    /// Asks for the page on a connection that stays open.
    async fn page(stream: &mut TlsStream<TcpStream>) -> std::io::Result<String> {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await?;
        let mut answer = vec![0; 4096];
        let read = tokio::time::timeout(Duration::from_secs(2), stream.read(&mut answer)).await??;
        answer.truncate(read);
        String::from_utf8(answer).map_err(std::io::Error::other)
    }
}

/// Returns true if the server has closed the connection by now, or soon does.
async fn is_closed(mut stream: impl tokio::io::AsyncRead + Unpin) -> bool {
    tokio::time::timeout(Duration::from_millis(300), stream.read_to_end(&mut Vec::new())).await.is_ok()
}

#[tokio::test]
async fn silent_connections_of_one_address_delay_no_other() {
    let site = Site::start(Limits::default(), Callers::default()).await;
    let mut flood = Vec::new();
    for _ in 0..300 {
        flood.push(site.connect([127, 0, 0, 1]).await);
    }
    for from in [[127, 0, 0, 2], [127, 0, 0, 1]] {
        let answer = site.probe(from).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
    let newest = flood.pop().unwrap();
    assert!(is_closed(flood.swap_remove(0)).await, "the oldest is still open");
    assert!(!is_closed(newest).await, "the newest is closed");
}

#[tokio::test]
async fn connections_without_a_request_are_cut_off_and_others_stay() {
    let limits = Limits { request_head: Duration::from_millis(500), silent: 2, ..Limits::default() };
    let site = Site::start(limits, Callers::default()).await;
    let mut speaks = site.secure([127, 0, 0, 1]).await.unwrap();
    assert!(Site::page(&mut speaks).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    let mut held = Vec::new();
    // One says nothing at all, one begins like HTTP/2.
    for first_words in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
        let mut stream = site.secure([127, 0, 0, 1]).await.unwrap();
        stream.write_all(first_words).await.unwrap();
        held.push(stream);
    }
    assert!(site.probe([127, 0, 0, 1]).await.is_ok());
    assert!(Site::page(&mut speaks).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    for mut stream in held {
        let rest = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut Vec::new())).await;
        assert!(rest.is_ok(), "still open");
    }
}

#[tokio::test]
async fn one_address_has_a_share_and_its_idle_connections_give_way() {
    let limits = Limits { share: 2, ..Limits::default() };
    let site = Site::start(limits, Callers::default()).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        let mut stream = site.secure([127, 0, 0, 1]).await.unwrap();
        assert!(Site::page(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 OK"));
        idle.push(stream);
    }
    let mut idle = idle.into_iter();
    assert!(is_closed(idle.next().unwrap()).await, "the oldest is still open");
    for mut stream in idle {
        assert!(Site::page(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    }
}

#[tokio::test]
async fn trusted_addresses_have_more_than_all_others_together() {
    let limits = Limits { connections: 12, others: 4, share: 4, silent: 4, ..Limits::default() };
    let callers = Callers::default();
    callers.trusted.record([127, 0, 0, 3].into());
    let site = Site::start(limits, callers).await;
    let mut trusted = Vec::new();
    for _ in 0..8 {
        trusted.push(site.secure([127, 0, 0, 3]).await.unwrap());
    }
    let mut flood = Vec::new();
    for _ in 0..100 {
        flood.push(site.connect([127, 0, 0, 1]).await);
    }
    for stream in &mut trusted {
        assert!(Site::page(stream).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    }
    // Beyond what is left the others give way, not those that are trusted.
    for _ in 0..4 {
        trusted.push(site.secure([127, 0, 0, 3]).await.unwrap());
    }
    for stream in &mut trusted {
        assert!(Site::page(stream).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    }
}

#[tokio::test]
async fn probes_have_slots_when_all_others_are_in_use() {
    let router_stalls = Limits { connections: 2, others: 2, share: 1, silent: 2, probes: 1, ..Limits::default() };
    let callers = Callers { probes: [[127, 0, 0, 9].into()].into_iter().collect(), ..Callers::default() };
    let site = Site::start(router_stalls, callers).await;
    let mut busy = Vec::new();
    for from in [[127, 0, 0, 1], [127, 0, 0, 2]] {
        let mut stream = site.secure(from).await.unwrap();
        // A request whose answer waits for its body.
        stream.write_all(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n").await.unwrap();
        busy.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(site.probe([127, 0, 0, 4]).await.is_err(), "there is a third slot");
    for _ in 0..3 {
        assert!(site.probe([127, 0, 0, 9]).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    }
}

#[tokio::test]
async fn handshake_with_a_certificate_is_a_proof_where_one_is_required() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    for proves in [false, true] {
        let policy = ClientPolicy::only(authority.roots(), "right");
        let callers = Callers::default();
        let limits = Limits { handshake_proves: proves, ..Limits::default() };
        let config = server_config(&server, policy, &["http/1.1"]).unwrap();
        let address = start_with(config, limits, callers.clone(), CancellationToken::new()).await;
        let nobody = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
        assert!(ask(address, nobody, "a.example").await.is_err());
        assert!(!callers.trusted.contains(address.ip()));
        let client = authority.identity("right", "client.example");
        let config = client_config(&authority.roots(), Some(&client), &["http/1.1"]).unwrap();
        assert!(ask(address, config, "a.example").await.is_ok());
        assert_eq!(callers.trusted.contains(address.ip()), proves);
    }
}

/// More bytes than the kernel buffers for a client that does not read.
const LARGE: usize = 64 << 20;

/// Returns the bytes from a server of `router` with a write limit of half a second to a client that reads after three.
async fn read_late(router: Router, more_headers: &str) -> Vec<u8> {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tls = server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let limits = Limits { answer: Duration::from_millis(500), ..Limits::default() };
    tokio::spawn(serve(listener, tls, router, limits, Callers::default(), CancellationToken::new()));
    let config = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let mut stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: x\r\n{more_headers}\r\n").as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut read = Vec::new();
    // A connection that is cut off ends without a word.
    let _ = stream.read_to_end(&mut read).await;
    read
}

#[tokio::test]
async fn client_that_does_not_read_its_answer_is_cut_off() {
    let router = Router::new().route("/", get(|| async { vec![b' '; LARGE] }));
    let answer = read_late(router, "connection: close\r\n").await;
    assert!(answer.starts_with(b"HTTP/1.1 200 OK") && answer.len() < LARGE, "{} bytes came", answer.len());
}

#[tokio::test]
async fn stream_waits_for_its_client() {
    let router = Router::new().route(
        "/",
        get(|request: axum::extract::Request| async move {
            tokio::spawn(async move {
                let mut stream = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
                stream.write_all(&vec![b' '; LARGE]).await.unwrap();
                stream.shutdown().await.unwrap();
            });
            let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, "bytes")];
            (StatusCode::SWITCHING_PROTOCOLS, headers)
        }),
    );
    let stream = read_late(router, "connection: upgrade\r\nupgrade: bytes\r\n").await;
    assert!(stream.starts_with(b"HTTP/1.1 101 ") && stream.len() > LARGE, "{} bytes came", stream.len());
}

#[tokio::test]
async fn header_lines_are_limited_by_the_kind_of_client() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tls = server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let router = Router::new().route("/", get(|| async { "served" }));
    let limits = Limits { header_lines: 400, ..Limits::default() };
    tokio::spawn(serve(listener, tls, router, limits, Callers::default(), CancellationToken::new()));
    let client = authority.identity("client", "client.example");
    for (identity, lines, expected) in [
        (None, 90, "200 OK"),
        (None, 110, "431 "),
        (Some(&client), 110, "200 OK"),
        (Some(&client), 390, "200 OK"),
        (Some(&client), 500, "431 "),
    ] {
        let name = ServerName::try_from("a.example").unwrap();
        let config = client_config(&authority.roots(), identity, &["http/1.1"]).unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let mut stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
        let groups = "x-remote-group: g\r\n".repeat(lines);
        let head = format!("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{groups}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected}")), "{lines}: {answer}");
    }
}

/// Sends a request without a body to a path and returns the answer.
async fn get_path(address: std::net::SocketAddr, tls: &Arc<rustls::ClientConfig>, path: &str) -> String {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let mut stream = TlsConnector::from(tls.clone()).connect(name, stream).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

// virt-controller and virt-handler serve their endpoints this way, and virt-api its documents with the same accept loop.
#[tokio::test]
async fn endpoints_are_found_with_repeated_slashes_on_every_address() {
    let authority = Authority::new();
    let identity = authority.identity("server", "a.example");
    let unreachable = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        Err::<http::Response<axum::body::Body>, _>(std::io::Error::other("no API server"))
    });
    let config = ConfigHandle::fixed(ClusterConfig::default());
    let client = kube::Client::new(unreachable, "default");
    let ops = Ops::new(client, config, Readiness::new(), prometheus::Registry::new(), authority.roots());
    let listener = listen_everywhere(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let more = Router::new().route("/leader", get(|| async { "{}" }));
    let policy = ClientPolicy::Optional(authority.roots());
    let server = ops.serve(listener, more, &identity, policy, Limits::default(), CancellationToken::new()).unwrap();
    tokio::spawn(server);
    let tls = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    // `kubectl port-forward` connects to the loopback addresses of a pod.
    let loopback = [std::net::Ipv4Addr::LOCALHOST.into(), std::net::IpAddr::from(std::net::Ipv6Addr::LOCALHOST)];
    let has_ipv6 = std::net::UdpSocket::bind("[::1]:0").is_ok();
    for address in loopback.into_iter().filter(|address| address.is_ipv4() || has_ipv6) {
        for (path, expected) in [
            ("//livez", "200 OK"),
            ("//readyz", "200 OK"),
            ("///leader", "200 OK"),
            ("//healthz?a=//b", "500 "),
            ("//metrics", "401 "),
            ("//other", "404 "),
        ] {
            let answer = get_path((address, port).into(), &tls, path).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {expected}")), "{address} {path}: {answer}");
            let health = path.starts_with("//healthz");
            assert_eq!(answer.contains("config-resource-version"), health, "{address} {path}: {answer}");
        }
    }
}
