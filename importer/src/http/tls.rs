//! Certificates of servers.

use std::{fs, path::Path, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};

use super::SourceError;

/// Certificates of public authorities as Debian's package ca-certificates has them.
const PUBLIC: &str = "/usr/share/ca-certificates/mozilla";
/// Limits the files of a folder with certificates, and each of them.
const FILES: usize = 1000;
const FILE_SIZE: u64 = 1 << 20;

/// Returns the TLS configuration for a server. `certs` is a folder with further authorities.
pub(super) fn config(certs: Option<&Path>, insecure: bool) -> Result<ClientConfig, SourceError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| SourceError::Header(error.to_string()))?;
    if insecure {
        let verifier = Arc::new(Unverified(provider));
        return Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    // The image has it; tests have not.
    if Path::new(PUBLIC).is_dir() {
        add(&mut roots, Path::new(PUBLIC))?;
    }
    if let Some(certs) = certs {
        let before = roots.len();
        add(&mut roots, certs)?;
        if roots.len() == before {
            let reason = "it has no certificate in PEM format".to_owned();
            return Err(SourceError::File { path: certs.display().to_string(), reason });
        }
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn add(roots: &mut RootCertStore, folder: &Path) -> Result<(), SourceError> {
    let failed = |path: &Path, reason: String| SourceError::File { path: path.display().to_string(), reason };
    let entries = fs::read_dir(folder).map_err(|error| failed(folder, error.to_string()))?;
    for entry in entries.flatten().take(FILES) {
        let path = entry.path();
        // A mounted ConfigMap has links and hidden folders.
        let Ok(meta) = fs::metadata(&path) else { continue };
        if !meta.is_file() || meta.len() > FILE_SIZE {
            continue;
        }
        let bytes = fs::read(&path).map_err(|error| failed(&path, error.to_string()))?;
        let certificates = CertificateDer::pem_slice_iter(&bytes).flatten();
        roots.add_parsable_certificates(certificates);
    }
    Ok(())
}

/// Accepts every certificate whose key the server holds, as the task demands it.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
