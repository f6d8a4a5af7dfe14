//! TLS of the processes: identities and CA bundles that are followed live, and the one accept loop.
//!
//! - [`Identity`]: a certificate chain with its key; from a Secret, or set by the process (the node agent).
//! - [`Roots`]: the CA certificates that are trusted; from a ConfigMap, or set by the process.
//! - [`server_config`] and [`client_config`]: rustls configurations that read both at each handshake.
//! - [`ServerTls`]: a server's configuration as the cluster demands it, live.
//! - [`connect_to_guest`]: what a program in a guest is shown, and what is asked of it.
//! - [`serve`]: accepts connections, limits them, hands requests with a [`Peer`] extension to an axum router.
//! - [`ProbeAddresses`]: addresses that kubelet's probes come from, for places of their own.
//! - [`TrustedAddresses`]: addresses that have proven to be an API server, for shares of connections and memory.
//!
//! The crypto provider is ring everywhere.

mod again;
mod configs;
mod connections;
mod demands;
mod gate;
mod guest;
mod identity;
mod patient;
mod peer;
mod probes;
mod roots;
mod serve;
#[cfg(test)]
mod tests;
mod trusted;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use configs::{ClientPolicy, client_config, server_config};
pub use demands::ServerTls;
pub use guest::connect_to_guest;
pub use identity::Identity;
pub use peer::{Peer, common_name, not_after};
pub use probes::ProbeAddresses;
pub use roots::Roots;
pub use serve::{Callers, Limits, listen, serve};
pub use trusted::TrustedAddresses;

/// Why TLS material cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The object lacks a key.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Text that is not PEM, or the wrong kind of it.
    #[error("{what} is not valid PEM: {reason}")]
    Pem {
        /// What was being read.
        what: &'static str,
        /// Why it was refused.
        reason: String,
    },
    /// A certificate that cannot be parsed.
    #[error("certificate cannot be parsed: {0}")]
    Certificate(String),
    /// rustls refused the material.
    #[error("TLS material was refused")]
    Rustls(#[source] rustls::Error),
}

/// The crypto provider of all connections.
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
