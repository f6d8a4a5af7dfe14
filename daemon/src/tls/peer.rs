//! The other end of a connection.

use std::{net::SocketAddr, sync::Arc};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::TlsError;

/// The other end of a connection. [`super::serve`] puts it into the extensions of each request.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The address that the connection comes from.
    pub address: SocketAddr,
    /// The certificate chain it presented, verified as far as the connection's policy does; empty without one.
    pub certificates: Arc<[CertificateDer<'static>]>,
    /// The common name of the first certificate, where it has exactly one.
    pub common_name: Option<Arc<str>>,
}

impl Peer {
    /// Describes a peer by its address and its verified chain.
    #[must_use]
    pub fn new(address: SocketAddr, chain: &[CertificateDer<'_>]) -> Self {
        Self {
            address,
            certificates: chain.iter().map(|certificate| certificate.clone().into_owned()).collect(),
            common_name: chain.first().and_then(common_name).map(Into::into),
        }
    }

    /// True when the peer presented a certificate whose only common name is `name`.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.common_name.as_deref() == Some(name)
    }

    /// Returns the DNS name of its certificate, if that is the only alternative name.
    #[must_use]
    pub fn dns_name(&self) -> Option<String> {
        let parsed = parse(self.certificates.first()?).ok()?;
        let names = parsed.subject_alternative_name().ok()??;
        match names.value.general_names.as_slice() {
            [GeneralName::DNSName(name)] => Some((*name).to_owned()),
            _ => None,
        }
    }
}

/// Returns the common name of a certificate that has exactly one, and none otherwise: readers disagree on which of several
/// counts. One that is no text counts as well.
#[must_use]
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let parsed = parse(certificate).ok()?;
    let mut names = parsed.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?.to_owned();
    names.next().is_none().then_some(name)
}

/// Returns the end of a certificate in seconds of Unix time.
///
/// # Errors
/// When the certificate cannot be parsed.
pub fn not_after(certificate: &CertificateDer<'_>) -> Result<i64, TlsError> {
    Ok(parse(certificate)?.validity().not_after.timestamp())
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, TlsError> {
    X509Certificate::from_der(certificate.as_ref())
        .map(|(_, parsed)| parsed)
        .map_err(|error| TlsError::Certificate(error.to_string()))
}
