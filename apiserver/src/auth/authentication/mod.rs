//! Authenticates the front proxy and extracts the user from its headers.
//!
//! Every request to the aggregated API comes through kube-apiserver. It authenticates the user and calls virt-api as a "front
//! proxy": with a client certificate of its own and the user in `X-Remote-*` headers. The headers count only if the
//! certificate of the connection
//!
//! 1. chains to an authority in `requestheader-client-ca-file`, and
//! 2. has a common name listed in `requestheader-allowed-names`.
//!
//! The second check matters: the authority may have signed other certificates, and without it each of their owners could act
//! as any user (CVE-2025-64432). Both values come from the ConfigMap `kube-system/extension-apiserver-authentication`
//! ([`super::front_proxy`] follows it). All other clients are anonymous; their headers are ignored.
//!
//! All functions here are pure.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc, time::Duration};

use daemon::tls::common_name;
use http::{HeaderMap, HeaderValue};
use percent_encoding::percent_decode_str;
use rustls::{
    RootCertStore,
    crypto::CryptoProvider,
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, UnixTime, pem::PemObject};

/// Key of the ConfigMap with the authorities that sign front-proxy certificates.
pub(crate) const CLIENT_CA_KEY: &str = "requestheader-client-ca-file";
/// Key of the ConfigMap with the JSON list of accepted common names.
pub(crate) const ALLOWED_NAMES_KEY: &str = "requestheader-allowed-names";
const USERNAME_HEADERS_KEY: &str = "requestheader-username-headers";
const GROUP_HEADERS_KEY: &str = "requestheader-group-headers";
const EXTRA_PREFIXES_KEY: &str = "requestheader-extra-headers-prefix";
const UID_HEADERS_KEY: &str = "requestheader-uid-headers";

/// Most groups, and most extra values, of one request. Requests with more are refused.
pub(crate) const MAX_VALUES: usize = 1024;

/// Errors of the request-header configuration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustError {
    /// A key of the ConfigMap is missing.
    #[error("key {0} is missing")]
    MissingKey(&'static str),
    /// A key of the ConfigMap is not a JSON list of strings.
    #[error("key {key} is not a JSON list of strings")]
    NotAList {
        /// The key.
        key: &'static str,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The bundle holds no certificate, or one that cannot be an authority.
    #[error("no usable certificate authority in {CLIENT_CA_KEY}")]
    NoAuthority,
    /// The verifier refused the bundle.
    #[error("certificate authorities in {CLIENT_CA_KEY} cannot be used")]
    Authorities(#[source] rustls::server::VerifierBuilderError),
}

/// Names of the headers that carry an identity. Values are lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
struct IdentityHeaders {
    user: Vec<String>,
    group: Vec<String>,
    uid: Vec<String>,
    extra_prefix: Vec<String>,
}

impl IdentityHeaders {
    /// Returns the names that kube-apiserver's aggregator always sets, independent of its inbound headers.
    fn aggregator() -> Self {
        Self {
            user: vec!["x-remote-user".into()],
            group: vec!["x-remote-group".into()],
            uid: vec!["x-remote-uid".into()],
            extra_prefix: vec!["x-remote-extra-".into()],
        }
    }
}

/// The parsed ConfigMap: certificates whose `X-Remote-*` headers count.
#[derive(Debug)]
pub(crate) struct FrontProxyTrust {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Empty: every name that the authority has signed, as Kubernetes defines it.
    allowed_names: Vec<String>,
    configured: IdentityHeaders,
}

impl FrontProxyTrust {
    /// Parses the data of `extension-apiserver-authentication`.
    ///
    /// A missing `requestheader-allowed-names` is an error, so that no certificate is trusted by omission.
    pub(crate) fn parse(data: &BTreeMap<String, String>, provider: Arc<CryptoProvider>) -> Result<Self, TrustError> {
        let bundle = data.get(CLIENT_CA_KEY).ok_or(TrustError::MissingKey(CLIENT_CA_KEY))?;
        let mut roots = RootCertStore::empty();
        // One unreadable certificate does not invalidate the readable ones.
        roots.add_parsable_certificates(CertificateDer::pem_slice_iter(bundle.as_bytes()).filter_map(Result::ok));
        if roots.is_empty() {
            return Err(TrustError::NoAuthority);
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(TrustError::Authorities)?;
        let allowed_names = string_list(data, ALLOWED_NAMES_KEY)?.ok_or(TrustError::MissingKey(ALLOWED_NAMES_KEY))?;
        let lower = |key| -> Result<Vec<String>, TrustError> {
            Ok(string_list(data, key)?.unwrap_or_default().iter().map(|n| n.to_ascii_lowercase()).collect())
        };
        Ok(Self {
            verifier,
            allowed_names,
            configured: IdentityHeaders {
                user: lower(USERNAME_HEADERS_KEY)?,
                group: lower(GROUP_HEADERS_KEY)?,
                uid: lower(UID_HEADERS_KEY)?,
                extra_prefix: lower(EXTRA_PREFIXES_KEY)?,
            },
        })
    }

    /// Returns true if the owner of this certificate chain may act for users.
    pub(crate) fn is_front_proxy(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> bool {
        let Some((leaf, intermediates)) = chain.split_first() else { return false };
        if self.verifier.verify_client_cert(leaf, intermediates, now).is_err() {
            return false;
        }
        if self.allowed_names.is_empty() {
            return true;
        }
        common_name(leaf).is_some_and(|name| self.allowed_names.contains(&name))
    }
}

fn string_list(data: &BTreeMap<String, String>, key: &'static str) -> Result<Option<Vec<String>>, TrustError> {
    data.get(key)
        .map(|text| serde_json::from_str(text).map_err(|source| TrustError::NotAList { key, source }))
        .transpose()
}

/// An authenticated user, as kube-apiserver described it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct User {
    /// User name.
    pub name: String,
    /// Groups, in the order given.
    pub groups: Vec<String>,
    /// Unique id, where the authenticator has one.
    pub uid: Option<String>,
    /// Further attributes of the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Errors of a request without a user. The text is the body of the answer 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unauthenticated {
    /// No client certificate, or one that may not act for users.
    #[error("request is not authenticated")]
    NotFrontProxy,
    /// A trusted front proxy that names no user.
    #[error("a valid user header is required for authorization")]
    NoUser,
    /// A trusted front proxy that names no group.
    #[error("a valid group header is required for authorization")]
    NoGroup,
    /// More values than any authenticator gives.
    #[error("too many identity headers")]
    TooMany,
}

/// Returns the user of a request.
///
/// `chain` is what the client presented on this connection, leaf first; possession of the leaf's key has been proven in
/// the handshake, nothing else has.
pub(crate) fn authenticate(
    trust: Option<&FrontProxyTrust>,
    chain: &[CertificateDer<'_>],
    headers: &HeaderMap,
    now: UnixTime,
) -> Result<User, Unauthenticated> {
    let trust = trust.filter(|trust| trust.is_front_proxy(chain, now)).ok_or(Unauthenticated::NotFrontProxy)?;
    // One family of headers or the other, never a mixture: kube-apiserver overwrites its own headers on each request,
    // while a header of the other family might have come from the user.
    let aggregator = IdentityHeaders::aggregator();
    let family =
        if aggregator.user.iter().any(|name| headers.contains_key(name)) { &aggregator } else { &trust.configured };
    let name = first_present(headers, &family.user)
        .and_then(|values| values.into_iter().next())
        .filter(|name| !name.is_empty())
        .ok_or(Unauthenticated::NoUser)?;
    let groups = first_present(headers, &family.group).filter(|g| !g.is_empty()).ok_or(Unauthenticated::NoGroup)?;
    let uid = first_present(headers, &family.uid).and_then(|values| values.into_iter().next());
    let extra = extra_values(headers, &family.extra_prefix);
    if groups.len() > MAX_VALUES || extra.values().map(Vec::len).sum::<usize>() > MAX_VALUES {
        return Err(Unauthenticated::TooMany);
    }
    Ok(User { name, groups, uid, extra })
}

/// Returns all values of the first of these headers that is present. A value that is not UTF-8 invalidates the header.
fn first_present(headers: &HeaderMap, names: &[String]) -> Option<Vec<String>> {
    let name = names.iter().find(|name| headers.contains_key(name.as_str()))?;
    headers.get_all(name.as_str()).iter().map(text).collect()
}

/// Returns a value as text. kube-apiserver sends names of users and groups as UTF-8.
fn text(value: &HeaderValue) -> Option<String> {
    std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned)
}

fn extra_values(headers: &HeaderMap, prefixes: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut extra = BTreeMap::<String, Vec<String>>::new();
    for (name, value) in headers {
        let Some(key) = prefixes.iter().find_map(|prefix| name.as_str().strip_prefix(prefix.as_str())) else {
            continue;
        };
        if let Some(value) = text(value) {
            extra.entry(percent_decoded(key)).or_default().push(value);
        }
    }
    extra
}

/// Decodes a header name. Names are lower case; encoded letters keep their case. An invalid name stays as it is.
fn percent_decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8().map_or_else(|_| text.to_owned(), Cow::into_owned)
}

/// Returns the time for certificate checks.
pub(crate) fn unix_now() -> UnixTime {
    UnixTime::since_unix_epoch(
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or(Duration::ZERO),
    )
}

#[cfg(test)]
mod tests;
