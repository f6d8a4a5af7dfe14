//! Certificates of the cluster-wide processes, one key for each role.

use api::tls;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};

use super::{
    Authority, CertificateError, ISSUER, LIFE_TOLERANCE, Observed,
    authority::{CertificateFacts, has_key, leaf_dates},
    facts,
};

/// The holder of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// virt-api's server.
    ApiServer,
    /// virt-api as a client of virt-handlers.
    ApiClient,
    /// This process's metrics server.
    Controller,
}

impl Role {
    pub(super) const ALL: [Self; 3] = [Self::ApiServer, Self::ApiClient, Self::Controller];

    pub(super) fn secret(self) -> &'static str {
        match self {
            Self::ApiServer => tls::API_SERVER_SECRET,
            Self::ApiClient => tls::API_CLIENT_SECRET,
            Self::Controller => tls::CONTROLLER_SECRET,
        }
    }

    fn common_name(self, namespace: &str) -> String {
        match self {
            Self::ApiServer => tls::api_server_cn(namespace),
            Self::ApiClient => tls::API_CLIENT_CN.to_owned(),
            Self::Controller => tls::CONTROLLER_CN.to_owned(),
        }
    }

    fn dns_names(self, namespace: &str) -> Vec<String> {
        match self {
            Self::ApiServer => tls::api_server_names(namespace).to_vec(),
            Self::ApiClient => Vec::new(),
            Self::Controller => vec![
                "virt-controller".to_owned(),
                format!("virt-controller.{namespace}"),
                format!("virt-controller.{namespace}.svc"),
            ],
        }
    }

    fn purpose(self) -> ExtendedKeyUsagePurpose {
        match self {
            Self::ApiServer | Self::Controller => ExtendedKeyUsagePurpose::ServerAuth,
            Self::ApiClient => ExtendedKeyUsagePurpose::ClientAuth,
        }
    }
}

/// Returns the time at which the certificate of a role must be replaced. `None`: it is missing or unusable.
pub(super) fn renew_at(
    secret: Option<&Secret>,
    role: Role,
    authority: &CertificateFacts,
    observed: &Observed,
) -> Option<Timestamp> {
    let secret = secret?;
    let facts = facts(secret, tls::CERT_KEY)?;
    let signed_by = secret.metadata.annotations.as_ref()?.get(ISSUER)?;
    let right = facts.has_begun(observed.now)
        && *signed_by == authority.fingerprint
        && has_key(secret, tls::CERT_KEY, tls::KEY_KEY)
        && facts.common_name.as_deref() == Some(role.common_name(&observed.namespace).as_str())
        && facts.dns_names == role.dns_names(&observed.namespace);
    if !right {
        return None;
    }
    // Another life is configured. A leaf that ends with its authority cannot be longer.
    let surplus = facts.surplus(observed.lives.leaf);
    let is_other = surplus > LIFE_TOLERANCE || (surplus < -LIFE_TOLERANCE && facts.not_after < authority.not_after);
    if observed.is_configured && is_other {
        return None;
    }
    // A leaf that ends with its authority is replaced with it: another one would end at the same time.
    if facts.not_after >= authority.not_after {
        return Some(facts.not_after);
    }
    facts.not_after.checked_sub(observed.lives.leaf_before).ok()
}

/// Creates the certificate of a role. Returns it and its key as PEM.
pub(super) fn issue(
    role: Role,
    authority: &Authority,
    observed: &Observed,
) -> Result<(String, String), CertificateError> {
    let key = KeyPair::generate().map_err(CertificateError::Make)?;
    let mut params = CertificateParams::new(role.dns_names(&observed.namespace)).map_err(CertificateError::Make)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, role.common_name(&observed.namespace));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![role.purpose()];
    params.use_authority_key_identifier_extension = true;
    leaf_dates(&mut params, authority, observed.now, observed.lives.leaf)?;
    let certificate = params.signed_by(&key, authority.issuer()).map_err(CertificateError::Make)?;
    Ok((certificate.pem(), key.serialize_pem()))
}
