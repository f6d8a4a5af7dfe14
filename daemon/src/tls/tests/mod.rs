//! Tests with certificates and connections: an authority, servers and clients.

mod server;
mod trust;

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

pub(super) struct Authority {
    pub(super) pem: String,
    pub(super) issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test ca");
        let certificate = params.self_signed(&key).unwrap();
        Self { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    pub(super) fn identity(&self, common_name: &str, dns_name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![dns_name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity::empty();
        identity.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
        identity
    }

    pub(super) fn roots(&self) -> Roots {
        let roots = Roots::empty();
        roots.set_pem(self.pem.as_bytes()).unwrap();
        roots
    }
}

pub(super) async fn start(config: Arc<rustls::ServerConfig>, stop: CancellationToken) -> std::net::SocketAddr {
    start_with(config, Limits::default(), Callers::default(), stop).await
}

pub(super) async fn start_with(
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

pub(super) async fn ask(
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
