//! TLS of clients.

use std::sync::Arc;

use anyhow::Result;
use daemon::tls::{ServerVerifier, provider};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, pem::PemObject};

/// Returns a client configuration that trusts these PEM certificates, or any certificate without them.
pub(crate) fn tls(roots: Option<&[u8]>) -> Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let mut config = match roots {
        Some(pem) => {
            let mut store = RootCertStore::empty();
            for certificate in CertificateDer::pem_slice_iter(pem) {
                store.add(certificate.map_err(|error| anyhow::anyhow!("the CA file is not PEM: {error}"))?)?;
            }
            builder.with_root_certificates(store)
        }
        None => builder.dangerous().with_custom_certificate_verifier(Arc::new(ServerVerifier::Any)),
    }
    .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
