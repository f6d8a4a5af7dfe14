use std::sync::Arc;

use axum::{Extension, Router, routing::get};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;

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
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new()
        .route("/", get(|Extension(peer): Extension<Peer>| async move { format!("names: {:?}", &*peer.common_names) }));
    tokio::spawn(serve(listener, config, router, Limits::default(), stop));
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
    assert!(answer.contains("names: [\"right\"]"), "{answer}");
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
    let config = server_config(&server, ClientPolicy::None, &["http/1.1"]).unwrap();
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
async fn rotated_identity_and_bundle_take_effect_without_restart() {
    let old = Authority::new();
    let new = Authority::new();
    let server = old.identity("server", "a.example");
    let address =
        start(server_config(&server, ClientPolicy::None, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
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
