//! Who is at the other end of a connection.

use std::{net::SocketAddr, sync::Arc};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::TlsError;

/// The other end of a connection. [`super::serve`] puts it into the extensions of each request.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Where the connection comes from.
    pub address: SocketAddr,
    /// The certificate chain it presented, verified as far as the connection's policy does; empty without one.
    pub certificates: Arc<[CertificateDer<'static>]>,
    /// Common names in the subject of the first certificate.
    pub common_names: Arc<[String]>,
}

impl Peer {
    /// Describes a peer by its address and its verified chain.
    #[must_use]
    pub fn new(address: SocketAddr, chain: &[CertificateDer<'_>]) -> Self {
        let names = chain.first().and_then(|certificate| common_names(certificate).ok()).unwrap_or_default();
        Self {
            address,
            certificates: chain.iter().map(|certificate| certificate.clone().into_owned()).collect(),
            common_names: names.into(),
        }
    }

    /// True when the peer presented a certificate whose only common name is `name`.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        matches!(&*self.common_names, [only] if only == name)
    }
}

/// The common names in the subject of a certificate.
pub fn common_names(certificate: &CertificateDer<'_>) -> Result<Vec<String>, TlsError> {
    let parsed = parse(certificate)?;
    Ok(parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok()).map(str::to_owned).collect())
}

/// The common name of a certificate that has exactly one.
#[must_use]
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let mut names = common_names(certificate).ok()?;
    if names.len() == 1 { names.pop() } else { None }
}

/// When a certificate ends, in seconds of Unix time.
pub fn not_after(certificate: &CertificateDer<'_>) -> Result<i64, TlsError> {
    Ok(parse(certificate)?.validity().not_after.timestamp())
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, TlsError> {
    X509Certificate::from_der(certificate.as_ref())
        .map(|(_, parsed)| parsed)
        .map_err(|error| TlsError::Certificate(error.to_string()))
}
