//! TLS between two processes of the same role, each of which shows its certificate to the other.

use std::{io, sync::Arc};

use rustls::{CipherSuite, ClientConfig, ServerConfig, crypto::CryptoProvider, pki_types::ServerName, version::TLS13};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{
    ClientPolicy, Identity, Peer, Roots, TlsError,
    configs::{client_config_with, server_config_with},
    provider,
    stream::{TlsStream, buffered},
};

/// TLS 1.3 between two processes whose certificates have the same common name.
#[derive(Clone)]
pub struct MutualTls {
    common_name: &'static str,
    protocol: &'static str,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    identity: Identity,
}

impl MutualTls {
    /// Creates the configurations. `protocol` is negotiated by ALPN, so that no process takes the connections of another
    /// server, or of another version, for its own.
    ///
    /// # Errors
    /// When rustls rejects the material.
    pub fn new(
        identity: &Identity,
        roots: &Roots,
        common_name: &'static str,
        protocol: &'static str,
    ) -> Result<Self, TlsError> {
        let (clients, provider) = (ClientPolicy::only(roots.clone(), common_name), bulk_provider());
        Ok(Self {
            common_name,
            protocol,
            server: server_config_with(provider.clone(), &[&TLS13], identity, clients, &[protocol])?,
            client: client_config_with(provider, &[&TLS13], roots, Some(identity), &[protocol])?,
            identity: identity.clone(),
        })
    }

    /// Returns the configuration of the server.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// Returns true if both ends of an accepted connection have agreed on the protocol.
    #[must_use]
    pub fn has_agreed(&self, stream: &TlsStream) -> bool {
        stream.get_ref().1.alpn_protocol() == Some(self.protocol.as_bytes())
    }

    /// Connects as a client. The certificate of the server must have the common name and be valid for `server_name`.
    ///
    /// # Errors
    /// When there is no identity yet, or the handshake fails.
    pub async fn connect(&self, stream: TcpStream, server_name: String) -> io::Result<TlsStream> {
        if self.identity.current().is_none() {
            return Err(io::Error::other("there is no certificate to show to the server yet"));
        }
        let address = stream.peer_addr()?;
        let name = ServerName::try_from(server_name).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.client.clone()).connect(name, buffered(stream)).await?;
        let stream = TlsStream::from(stream);
        let server = Peer::new(address, stream.get_ref().1.peer_certificates().unwrap_or_default());
        if !server.is(self.common_name) || !self.has_agreed(&stream) {
            return Err(io::Error::other("the server has another role or speaks another protocol"));
        }
        Ok(stream)
    }
}

/// Returns the provider for bulk data, which prefers AES with 128 bits: ten rounds for each block instead of fourteen. The server follows
/// the order of the client.
fn bulk_provider() -> Arc<CryptoProvider> {
    let mut preferring = CryptoProvider::clone(&provider());
    preferring.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(preferring)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::tests::Authority;

    #[test]
    fn bulk_data_prefers_the_cheapest_cipher_and_offers_all() {
        let (usual, bulk) = (provider(), bulk_provider());
        assert_eq!(bulk.cipher_suites[0].suite(), CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert_eq!(bulk.cipher_suites.len(), usual.cipher_suites.len());
    }

    #[tokio::test]
    async fn both_ends_agree_on_the_cheapest_cipher() {
        let authority = Authority::new();
        let tls = |name: &str| {
            MutualTls::new(&authority.identity("peer", name), &authority.roots(), "peer", "test/1").unwrap()
        };
        let (client, server) = (tls("a.example"), tls("b.example"));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(server.server());
        let (connected, accepted) =
            tokio::join!(client.connect(stream, "b.example".to_owned()), acceptor.accept(accepted));
        let agreed = connected.unwrap().get_ref().1.negotiated_cipher_suite().unwrap().suite();
        assert_eq!(agreed, CipherSuite::TLS13_AES_128_GCM_SHA256);
        accepted.unwrap();
    }
}
