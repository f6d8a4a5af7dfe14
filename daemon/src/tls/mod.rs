//! TLS of the processes: identities and CA bundles that are followed live, and the TLS server.
//!
//! - [`Identity`]: a certificate chain with its key; from a Secret, or set by the process (virt-handler).
//! - [`Roots`]: the CA certificates that are trusted; from a ConfigMap, or set by the process.
//! - [`server_config`], [`client_config`], [`ServerTls`]: rustls configurations that read both at each handshake.
//! - [`connect_to_guest`]: connections to programs in guests. [`MutualTls`]: connections between processes of one role.
//! - [`Peer`]: the other end of a connection; `server`: the accept loop and its limits, for HTTP and for other streams.
//!
//! The crypto provider is ring everywhere.

mod configs;
mod followed;
mod guests;
mod identity;
mod mutual;
mod peer;
mod roots;
mod server;
mod server_tls;
mod stream;
#[cfg(test)]
mod tests;
mod verifiers;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use configs::{ClientPolicy, client_config, server_config};
pub use guests::connect_to_guest;
pub use identity::Identity;
pub use mutual::MutualTls;
pub use peer::{Peer, common_name, not_after};
pub use roots::Roots;
pub use server::{
    Accepted, Callers, Kept, Limits, ProbeAddresses, TrustedAddresses, listen, listen_at_loopback, listen_everywhere,
    serve, serve_streams,
};
pub use server_tls::ServerTls;
pub use stream::TlsStream;
pub use verifiers::ServerVerifier;

/// The reason why TLS material cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The object lacks a key.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Text that is not PEM, or the wrong kind of it.
    #[error("{what} is not valid PEM: {reason}")]
    Pem {
        /// The material.
        what: &'static str,
        /// The reason of the parser.
        reason: String,
    },
    /// A certificate that cannot be parsed.
    #[error("certificate cannot be parsed: {0}")]
    Certificate(String),
    /// rustls rejected the material.
    #[error("TLS material was rejected")]
    Rustls(#[source] rustls::Error),
}

/// Returns the crypto provider of all connections.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(rustls::crypto::ring::default_provider())).clone()
}

/// Makes ring the provider for libraries that ask rustls for its default. Harmless when repeated.
pub fn install_provider() {
    if CryptoProvider::get_default().is_none() {
        // An error means that another thread was first, with the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
