//! Certificate authorities: creation, parsing, facts about certificates.

use std::{fmt::Write as _, time::Duration};

use api::tls;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::CertificateError;

/// Tolerated difference of other hosts' clocks.
pub(super) const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(5);

/// Facts read from a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateFacts {
    /// The certificate as PEM, in the form in which bundles contain it.
    pub(crate) pem: String,
    /// Hash of the certificate.
    pub(crate) fingerprint: String,
    pub(crate) not_before: Timestamp,
    pub(crate) not_after: Timestamp,
    pub(crate) is_authority: bool,
    pub(crate) dns_names: Vec<String>,
    pub(crate) common_name: Option<String>,
}

impl CertificateFacts {
    /// Returns true if the certificate has begun. One of a process whose clock is ahead has not, and no other host accepts it.
    pub(crate) fn has_begun(&self, now: Timestamp) -> bool {
        self.not_before <= now.saturating_add(CLOCK_SKEW).unwrap_or(Timestamp::MAX)
    }

    /// Returns by how much longer the certificate lives than one that is made for this life; negative: shorter.
    pub(crate) fn surplus(&self, life: SignedDuration) -> SignedDuration {
        self.not_after.duration_since(self.not_before).saturating_sub(life.saturating_add(CLOCK_SKEW))
    }

    /// Returns true if the certificate has begun and has not ended.
    pub(crate) fn is_valid(&self, now: Timestamp) -> bool {
        self.has_begun(now) && self.not_after > now
    }
}

/// Returns facts about the first certificate of a PEM text.
pub(crate) fn facts(pem: &[u8]) -> Option<CertificateFacts> {
    facts_of(&CertificateDer::from_pem_slice(pem).ok()?)
}

/// Returns facts about a certificate.
pub(crate) fn facts_of(der: &CertificateDer<'_>) -> Option<CertificateFacts> {
    let (_, parsed) = X509Certificate::from_der(der).ok()?;
    let names = parsed.subject_alternative_name().ok().flatten();
    let dns_names = names
        .map(|extension| {
            let names = extension.value.general_names.iter();
            names
                .filter_map(|name| match name {
                    GeneralName::DNSName(name) => Some((*name).to_owned()),
                    _ => None,
                })
                .collect()
        })
        .unwrap_or_default();
    Some(CertificateFacts {
        pem: to_pem(der),
        fingerprint: Sha256::digest(der.as_ref()).iter().take(16).fold(String::new(), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        }),
        not_before: Timestamp::from_second(parsed.validity().not_before.timestamp()).ok()?,
        not_after: Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()?,
        is_authority: parsed.is_ca(),
        dns_names,
        common_name: daemon::tls::common_name(der),
    })
}

/// Returns a certificate as PEM.
fn to_pem(der: &CertificateDer<'_>) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der.as_ref());
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.push_str(&String::from_utf8_lossy(line));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// An authority that can sign.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    facts: CertificateFacts,
}

impl Authority {
    /// Creates an authority.
    pub(crate) fn make(now: Timestamp, life: SignedDuration) -> Result<Self, CertificateError> {
        let key = KeyPair::generate().map_err(CertificateError::Make)?;
        let mut params = CertificateParams::default();
        set_validity(&mut params, now, now.checked_add(life).map_err(|_| CertificateError::Life)?)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = DistinguishedName::new();
        // Each has its own name, so that verifiers find the right one at once.
        let name = format!("{}@{}", tls::CA_CN, now.as_second());
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&key).map_err(CertificateError::Make)?;
        let facts = facts_of(certificate.der()).ok_or(CertificateError::Life)?;
        Ok(Self { issuer: Issuer::new(params, key), facts })
    }

    /// Reads the authority from its Secret.
    #[must_use]
    pub(crate) fn from_secret(secret: &Secret) -> Option<Self> {
        let data = secret.data.as_ref()?;
        let facts = facts(&data.get(tls::CERT_KEY)?.0)?;
        let key = KeyPair::from_pem(std::str::from_utf8(&data.get(tls::KEY_KEY)?.0).ok()?).ok()?;
        let issuer = Issuer::from_ca_cert_pem(&facts.pem, key).ok()?;
        Some(Self { issuer, facts })
    }

    pub(super) fn issuer(&self) -> &Issuer<'static, KeyPair> {
        &self.issuer
    }

    /// Returns the fingerprint of the certificate.
    #[must_use]
    pub(crate) fn fingerprint(&self) -> &str {
        &self.facts.fingerprint
    }

    /// Returns the certificate as bundles contain it.
    #[must_use]
    pub(crate) fn pem(&self) -> &str {
        &self.facts.pem
    }

    /// Returns the end of its life.
    #[must_use]
    pub(crate) fn not_after(&self) -> Timestamp {
        self.facts.not_after
    }

    pub(super) fn certificate_pem(&self) -> String {
        self.facts.pem.clone()
    }

    pub(super) fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }
}

/// Returns true if the Secret has a key that belongs to its certificate.
pub(super) fn has_key(secret: &Secret, certificate: &str, key: &str) -> bool {
    let read = || {
        let data = secret.data.as_ref()?;
        let der = CertificateDer::from_pem_slice(&data.get(certificate)?.0).ok()?;
        let (_, parsed) = X509Certificate::from_der(&der).ok()?;
        let key = KeyPair::from_pem(std::str::from_utf8(&data.get(key)?.0).ok()?).ok()?;
        Some(parsed.public_key().subject_public_key.data.as_ref() == key.public_key_raw())
    };
    read().unwrap_or(false)
}

/// Returns start and end of a leaf that ends no later than its authority.
pub(super) fn leaf_dates(
    params: &mut CertificateParams,
    authority: &Authority,
    now: Timestamp,
    life: SignedDuration,
) -> Result<(), CertificateError> {
    let end = now.checked_add(life).map_err(|_| CertificateError::Life)?.min(authority.not_after());
    set_validity(params, now, end)
}

fn set_validity(params: &mut CertificateParams, now: Timestamp, end: Timestamp) -> Result<(), CertificateError> {
    let begin = now.checked_sub(CLOCK_SKEW).map_err(|_| CertificateError::Life)?;
    let since_epoch = |at: Timestamp| u64::try_from(at.as_second()).map_err(|_| CertificateError::Life);
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(since_epoch(begin)?);
    params.not_after = epoch + Duration::from_secs(since_epoch(end)?);
    Ok(())
}
