use std::{sync::Arc, time::Duration};

use axum::{Extension, Router, routing::get};
use hyper::{StatusCode, header};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::*;
use crate::CancellationToken;

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test ca");
        let certificate = params.self_signed(&key).unwrap();
        Self { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    fn identity(&self, common_name: &str, dns_name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![dns_name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity::empty();
        identity.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
        identity
    }

    fn roots(&self) -> Roots {
        let roots = Roots::empty();
        roots.set_pem(self.pem.as_bytes()).unwrap();
        roots
    }
}

async fn start(config: Arc<rustls::ServerConfig>, stop: CancellationToken) -> std::net::SocketAddr {
    start_with(config, Limits::default(), Callers::default(), stop).await
}

async fn start_with(
    config: Arc<rustls::ServerConfig>,
    limits: Limits,
    callers: Callers,
    stop: CancellationToken,
) -> std::net::SocketAddr {
    let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new()
        .route("/body", axum::routing::post(|_: axum::body::Bytes| async { "read" }))
        .route("/", get(|Extension(peer): Extension<Peer>| async move { format!("name: {:?}", peer.common_name) }));
    tokio::spawn(serve(listener, config, router, limits, callers, stop));
    address
}

async fn ask(
    address: std::net::SocketAddr,
    config: Arc<rustls::ClientConfig>,
    server_name: &str,
) -> std::io::Result<String> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from(server_name.to_owned()).unwrap();
    let mut stream = TlsConnector::from(config).connect(name, stream).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn client_with_the_right_common_name_is_served_and_named() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let client = authority.identity("right", "client.example");
    let config = client_config(&authority.roots(), Some(&client), &["http/1.1"]).unwrap();
    let answer = ask(address, config, "a.example").await.unwrap();
    assert!(answer.contains("name: Some(\"right\")"), "{answer}");
}

#[tokio::test]
async fn client_of_the_same_ca_with_another_common_name_is_refused() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let client = authority.identity("wrong", "client.example");
    let config = client_config(&authority.roots(), Some(&client), &["http/1.1"]).unwrap();
    assert!(ask(address, config, "a.example").await.is_err());
}

#[test]
fn certificate_that_nobody_judged_on_the_way_in_is_judged_where_it_counts() {
    let (authority, other) = (Authority::new(), Authority::new());
    let peer = |authority: &Authority, name: &str| {
        let mut params = CertificateParams::new(vec!["client.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&KeyPair::generate().unwrap(), &authority.issuer).unwrap();
        Peer::new(([192, 0, 2, 1], 1).into(), &[certificate.der().clone()])
    };
    let roots = authority.roots();
    assert!(roots.vouch_for(&peer(&authority, "right"), "right"));
    assert!(!roots.vouch_for(&peer(&authority, "wrong"), "right"));
    assert!(!roots.vouch_for(&peer(&other, "right"), "right"));
    assert!(!roots.vouch_for(&Peer::new(([192, 0, 2, 1], 1).into(), &[]), "right"));
    assert!(!Roots::empty().vouch_for(&peer(&authority, "right"), "right"));
}

#[tokio::test]
async fn client_without_certificate_is_refused_where_one_is_required() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let config = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, config, "a.example").await.is_err());
}

#[tokio::test]
async fn server_of_another_name_or_another_ca_is_refused() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let config = server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let address = start(config, CancellationToken::new()).await;
    let trusting = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, trusting.clone(), "b.example").await.is_err());
    assert!(ask(address, trusting, "a.example").await.is_ok());
    let other = client_config(&Authority::new().roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, other, "a.example").await.is_err());
    let nothing = client_config(&Roots::empty(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, nothing, "a.example").await.is_err());
}

#[tokio::test]
async fn a_guest_may_show_any_certificate_and_learns_who_calls() {
    let authority = Authority::new();
    let guest = Authority::new().identity("anything", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "caller");
    let address = start(server_config(&guest, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let caller = authority.identity("caller", "node.example");
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = connect_to_guest(&caller, stream).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("name: Some(\"caller\")"), "{answer}");
    let stream = TcpStream::connect(address).await.unwrap();
    assert!(connect_to_guest(&Identity::empty(), stream).await.is_err(), "nobody is shown");
}

#[tokio::test]
async fn rotated_identity_and_bundle_take_effect_without_restart() {
    let old = Authority::new();
    let new = Authority::new();
    let server = old.identity("server", "a.example");
    let address =
        start(server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let roots = old.roots();
    let config = client_config(&roots, None, &["http/1.1"]).unwrap();
    assert!(ask(address, config.clone(), "a.example").await.is_ok());
    roots.set_pem(format!("{}{}", old.pem, new.pem).as_bytes()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &new.issuer).unwrap();
    server.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    assert!(ask(address, config.clone(), "a.example").await.is_ok());
    roots.set_pem(new.pem.as_bytes()).unwrap();
    assert!(ask(address, config, "a.example").await.is_ok());
}

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
async fn silent_connections_of_one_address_keep_nobody_waiting() {
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
async fn connections_that_speak_are_not_silent_and_those_that_do_not_are_cut_off() {
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
async fn probes_have_places_where_all_others_are_taken() {
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
    assert!(site.probe([127, 0, 0, 4]).await.is_err(), "there is a third place");
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

#[test]
fn certificate_with_a_name_beside_one_that_is_no_text_has_no_name() {
    let key = KeyPair::generate().unwrap();
    let named = |names: &[&str]| {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // The builder takes one name of each type: the second attribute is turned into another common name below.
        let types = [DnType::CommonName, DnType::OrganizationalUnitName];
        for (kind, name) in types.into_iter().zip(names) {
            params.distinguished_name.push(kind, *name);
        }
        params.self_signed(&key).unwrap().der().to_vec()
    };
    let replaced = |mut der: Vec<u8>, from: &[u8], to: &[u8]| {
        assert_eq!(from.len(), to.len());
        let places: Vec<usize> = (0..der.len() - from.len()).filter(|at| der[*at..].starts_with(from)).collect();
        assert!(!places.is_empty());
        for at in places {
            der[at..at + to.len()].copy_from_slice(to);
        }
        CertificateDer::from(der)
    };
    // Object identifiers 2.5.4.11 and 2.5.4.3.
    let (unit, common) = ([0x06, 0x03, 0x55, 0x04, 0x0b], [0x06, 0x03, 0x55, 0x04, 0x03]);
    let name = |certificate: &CertificateDer<'_>| common_name(certificate);
    assert_eq!(name(&CertificateDer::from(named(&["good"]))).as_deref(), Some("good"));
    let two = replaced(named(&["good", "other"]), &unit, &common);
    assert_eq!(name(&two), None, "two names");
    let broken = replaced(two.to_vec(), b"other", b"oth\xff\xff");
    assert_eq!(name(&broken), None, "a second name that is no text");
    let broken = replaced(two.to_vec(), b"good", b"go\xff\xff");
    assert_eq!(name(&broken), None, "a first name that is no text");
    for certificate in [two, broken] {
        assert!(!Peer::new(([192, 0, 2, 1], 1).into(), &[certificate]).is("good"));
    }
    assert_eq!(name(&CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])), None);
}

/// More than the kernel keeps for who does not read.
const LARGE: usize = 64 << 20;

/// What comes from a server of `router`, in which answers wait for half a second, when it is read after three.
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
async fn client_that_does_not_take_its_answer_is_cut_off() {
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
async fn head_has_as_many_lines_as_the_server_takes_of_the_client() {
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

#[tokio::test]
async fn cluster_demands_the_newest_tls_while_the_server_runs() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let config = |version: &str| {
        let mut config = api::config::ClusterConfig::default();
        config.tls.min_tls_version = Some(version.to_owned());
        crate::config::ConfigHandle::fixed(config)
    };
    let mut trusted = rustls::RootCertStore::empty();
    trusted.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let older = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(trusted)
        .with_no_client_auth();
    for (version, works) in [("VersionTLS12", true), ("VersionTLS13", false)] {
        let tls = ServerTls::following(&server, ClientPolicy::Unjudged, &["http/1.1"], config(version)).unwrap();
        let address = start(tls.current(), CancellationToken::new()).await;
        assert_eq!(ask(address, Arc::new(older.clone()), "a.example").await.is_ok(), works, "{version}");
    }
}

#[test]
fn key_of_another_certificate_is_refused() {
    let authority = Authority::new();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority.issuer).unwrap();
    let other = KeyPair::generate().unwrap();
    let identity = Identity::empty();
    assert!(identity.set_pem(certificate.pem().as_bytes(), other.serialize_pem().as_bytes()).is_err());
    assert!(identity.current().is_none());
}

#[test]
fn bundle_that_is_not_pem_leaves_the_last_one_in_force() {
    let authority = Authority::new();
    let roots = authority.roots();
    assert!(roots.set_pem(b"nonsense").is_err());
    assert_eq!(roots.pem().unwrap(), authority.pem.as_bytes());
    assert!(!roots.set_pem(authority.pem.as_bytes()).unwrap());
}

#[tokio::test]
async fn cve_2025_64434_certificate_of_an_agent_opens_no_other_agent_and_stands_for_no_other_node() {
    use api::tls::{API_CLIENT_CN, HANDLER_CN, handler_server_name};
    let authority = Authority::new();
    let stolen = authority.identity(HANDLER_CN, &handler_server_name("n1"));
    let other = authority.identity(HANDLER_CN, &handler_server_name("n2"));
    let policy = ClientPolicy::only(authority.roots(), API_CLIENT_CN);
    let address = start(server_config(&other, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let as_client = client_config(&authority.roots(), Some(&stolen), &["http/1.1"]).unwrap();
    assert!(ask(address, as_client, &handler_server_name("n2")).await.is_err());
    let config = server_config(&stolen, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let address = start(config, CancellationToken::new()).await;
    let api = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, api.clone(), &handler_server_name("n2")).await.is_err());
    assert!(ask(address, api, &handler_server_name("n1")).await.is_ok());
}
