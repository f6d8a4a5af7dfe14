//! Who sends a request.
//!
//! Every request to the aggregated API comes through kube-apiserver, which authenticates the user, and then calls us
//! as "front proxy": with a client certificate of its own, and the user in `X-Remote-*` headers. The headers are worth
//! as much as the certificate on the connection they came over, so they count only if that certificate
//!
//! 1. chains to one of the authorities in `requestheader-client-ca-file`, and
//! 2. has a common name listed in `requestheader-allowed-names`.
//!
//! The second test matters: the authority may have signed certificates for others, too, and each of them could pose as
//! any user without it (CVE-2025-64432). Both values come from the ConfigMap
//! `kube-system/extension-apiserver-authentication` ([`crate::front_proxy`] follows it). Whoever does not pass is
//! anonymous: the headers are not looked at.
//!
//! Everything here is a pure function of its arguments.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue};
use process::tls::common_name;
use rustls::{
    RootCertStore,
    crypto::CryptoProvider,
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, UnixTime, pem::PemObject};

/// Key of the ConfigMap with the authorities that sign front-proxy certificates.
pub const CLIENT_CA_KEY: &str = "requestheader-client-ca-file";
/// Key of the ConfigMap with the JSON list of accepted common names.
pub const ALLOWED_NAMES_KEY: &str = "requestheader-allowed-names";
const USERNAME_HEADERS_KEY: &str = "requestheader-username-headers";
const GROUP_HEADERS_KEY: &str = "requestheader-group-headers";
const EXTRA_PREFIXES_KEY: &str = "requestheader-extra-headers-prefix";
const UID_HEADERS_KEY: &str = "requestheader-uid-headers";

/// Most groups, and most extra values, taken from one request; more is refused, not cut.
pub const MAX_VALUES: usize = 1024;

/// Why the request-header configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A key of the ConfigMap is not there.
    #[error("key {0} is missing")]
    MissingKey(&'static str),
    /// A key of the ConfigMap is not a JSON list of strings.
    #[error("key {key} is not a JSON list of strings")]
    NotAList {
        /// The key.
        key: &'static str,
        /// What the parser said.
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
    /// What kube-apiserver's aggregator always sets, whatever its own inbound headers are called.
    fn aggregator() -> Self {
        Self {
            user: vec!["x-remote-user".into()],
            group: vec!["x-remote-group".into()],
            uid: vec!["x-remote-uid".into()],
            extra_prefix: vec!["x-remote-extra-".into()],
        }
    }
}

/// Whom to believe `X-Remote-*` headers: the parsed ConfigMap.
#[derive(Debug)]
pub struct FrontProxyTrust {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Empty: every name that the authority vouches for, as Kubernetes defines it.
    allowed_names: Vec<String>,
    configured: IdentityHeaders,
}

impl FrontProxyTrust {
    /// Reads the data of `extension-apiserver-authentication`.
    ///
    /// A missing `requestheader-allowed-names` is an error, so that nobody is trusted by omission.
    pub fn parse(data: &BTreeMap<String, String>, provider: Arc<CryptoProvider>) -> Result<Self, TrustError> {
        let bundle = data.get(CLIENT_CA_KEY).ok_or(TrustError::MissingKey(CLIENT_CA_KEY))?;
        let mut roots = RootCertStore::empty();
        // One unreadable certificate must not take the readable ones with it.
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

    /// Whether the owner of this certificate chain may speak for users.
    pub fn is_front_proxy(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> bool {
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
pub struct User {
    /// User name.
    pub name: String,
    /// Groups, in the order given.
    pub groups: Vec<String>,
    /// Unique id, where the authenticator has one.
    pub uid: Option<String>,
    /// What else the authenticator knows.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Why a request has no user. The text is the body of the answer 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    /// No client certificate, or one that may not speak for users.
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

/// Finds the user of a request.
///
/// `chain` is what the client presented on this connection, leaf first; possession of the leaf's key has been proven in
/// the handshake, nothing else has.
pub fn authenticate(
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

/// All values of the first of these headers that is there. A value that is no text makes the header worthless.
fn first_present(headers: &HeaderMap, names: &[String]) -> Option<Vec<String>> {
    let name = names.iter().find(|name| headers.contains_key(name.as_str()))?;
    headers.get_all(name.as_str()).iter().map(text).collect()
}

/// A value as text. Names of users and groups have letters of all alphabets, which kube-apiserver sends as they are.
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

/// Decodes `%xx`. What is not valid stays as it was, as in every other implementation of this header. Names of headers are
/// lower case already; what was encoded has kept its own.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let escaped = (byte == b'%').then(|| tail.get(..2)).flatten().and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 16).ok()
        });
        match escaped {
            Some(decoded) => {
                bytes.push(decoded);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// The time, for certificate checks.
pub fn unix_now() -> UnixTime {
    UnixTime::since_unix_epoch(
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or(Duration::ZERO),
    )
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
        date_time_ymd,
    };

    use super::*;

    struct Authority {
        pem: String,
        issuer: Issuer<'static, KeyPair>,
    }

    fn authority(name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Authority { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    struct Leaf {
        name: &'static str,
        usage: Option<ExtendedKeyUsagePurpose>,
        expired: bool,
    }

    impl Default for Leaf {
        fn default() -> Self {
            Self { name: "front-proxy-client", usage: Some(ExtendedKeyUsagePurpose::ClientAuth), expired: false }
        }
    }

    fn leaf(authority: &Authority, leaf: Leaf) -> Vec<CertificateDer<'static>> {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, leaf.name);
        params.extended_key_usages = leaf.usage.into_iter().collect();
        if leaf.expired {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        vec![params.signed_by(&key, &authority.issuer).unwrap().der().clone()]
    }

    fn provider() -> Arc<CryptoProvider> {
        Arc::new(rustls::crypto::ring::default_provider())
    }

    fn data(pem: &str, names: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(CLIENT_CA_KEY.to_owned(), pem.to_owned()), (ALLOWED_NAMES_KEY.to_owned(), names.to_owned())])
    }

    fn trust(pem: &str, names: &str) -> FrontProxyTrust {
        FrontProxyTrust::parse(&data(pem, names), provider()).unwrap()
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value);
        }
        headers
    }

    fn alice() -> HeaderMap {
        headers(&[("X-Remote-User", "alice"), ("X-Remote-Group", "dev"), ("X-Remote-Group", "system:authenticated")])
    }

    #[test]
    fn front_proxy_with_an_allowed_name_speaks_for_users() {
        let ca = authority("front-proxy-ca");
        let user = authenticate(
            Some(&trust(&ca.pem, r#"["front-proxy-client"]"#)),
            &leaf(&ca, Leaf::default()),
            &alice(),
            unix_now(),
        )
        .unwrap();
        assert_eq!(user.name, "alice");
        assert_eq!(user.groups, ["dev", "system:authenticated"]);
    }

    #[test]
    fn cve_2025_64432_certificate_of_the_same_authority_with_another_name_is_anonymous() {
        let ca = authority("front-proxy-ca");
        let chain = leaf(&ca, Leaf { name: "somebody-else", ..Leaf::default() });
        let result = authenticate(Some(&trust(&ca.pem, r#"["front-proxy-client"]"#)), &chain, &alice(), unix_now());
        assert_eq!(result, Err(Unauthenticated::NotFrontProxy));
    }

    #[test]
    fn cve_2025_64432_headers_without_a_trusted_certificate_are_ignored() {
        let ca = authority("front-proxy-ca");
        let other = authority("front-proxy-ca");
        let trust = trust(&ca.pem, r#"["front-proxy-client"]"#);
        let cases: [(&str, Vec<CertificateDer<'static>>); 5] = [
            ("no certificate", vec![]),
            ("an authority of the same name", leaf(&other, Leaf::default())),
            ("expired", leaf(&ca, Leaf { expired: true, ..Leaf::default() })),
            (
                "a server's certificate",
                leaf(&ca, Leaf { usage: Some(ExtendedKeyUsagePurpose::ServerAuth), ..Leaf::default() }),
            ),
            ("no certificate at all in the bytes", vec![CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])]),
        ];
        for (name, chain) in cases {
            let result = authenticate(Some(&trust), &chain, &alice(), unix_now());
            assert_eq!(result, Err(Unauthenticated::NotFrontProxy), "{name}");
        }
    }

    #[test]
    fn nobody_is_trusted_before_the_configuration_is_known() {
        let ca = authority("front-proxy-ca");
        let result = authenticate(None, &leaf(&ca, Leaf::default()), &alice(), unix_now());
        assert_eq!(result, Err(Unauthenticated::NotFrontProxy));
    }

    #[test]
    fn empty_list_of_names_accepts_each_name_of_the_authority_only() {
        let ca = authority("front-proxy-ca");
        let other = authority("other");
        let trust = trust(&ca.pem, "[]");
        assert!(trust.is_front_proxy(&leaf(&ca, Leaf { name: "any", ..Leaf::default() }), unix_now()));
        assert!(!trust.is_front_proxy(&leaf(&other, Leaf { name: "any", ..Leaf::default() }), unix_now()));
    }

    #[test]
    fn each_authority_of_a_bundle_counts() {
        let (old, new) = (authority("old"), authority("new"));
        let trust = trust(&format!("{}\n{}", old.pem, new.pem), r#"["front-proxy-client"]"#);
        assert!(trust.is_front_proxy(&leaf(&old, Leaf::default()), unix_now()));
        assert!(trust.is_front_proxy(&leaf(&new, Leaf::default()), unix_now()));
    }

    #[test]
    fn unusable_configurations_are_errors() {
        let ca = authority("front-proxy-ca");
        let mut without_names = data(&ca.pem, "[]");
        without_names.remove(ALLOWED_NAMES_KEY);
        let cases = [
            ("no names", without_names),
            ("names are no list", data(&ca.pem, r#""front-proxy-client""#)),
            ("no bundle", BTreeMap::from([(ALLOWED_NAMES_KEY.to_owned(), "[]".to_owned())])),
            ("empty bundle", data("", "[]")),
            ("bundle is no PEM", data("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "[]")),
        ];
        for (name, data) in cases {
            assert!(FrontProxyTrust::parse(&data, provider()).is_err(), "{name}");
        }
    }

    #[test]
    fn identity_needs_user_and_group() {
        let ca = authority("front-proxy-ca");
        let chain = leaf(&ca, Leaf::default());
        let trust = trust(&ca.pem, r#"["front-proxy-client"]"#);
        let cases = [
            (headers(&[("X-Remote-Group", "dev")]), Unauthenticated::NoUser),
            (headers(&[("X-Remote-User", ""), ("X-Remote-Group", "dev")]), Unauthenticated::NoUser),
            (headers(&[("X-Remote-User", "alice")]), Unauthenticated::NoGroup),
        ];
        for (headers, expected) in cases {
            assert_eq!(authenticate(Some(&trust), &chain, &headers, unix_now()), Err(expected));
        }
    }

    #[test]
    fn names_have_letters_of_all_alphabets() {
        let ca = authority("front-proxy-ca");
        let named = headers(&[
            ("X-Remote-User", "jürgen@example.com"),
            ("X-Remote-Group", "Büro"),
            ("X-Remote-Group", "system:authenticated"),
            ("X-Remote-Extra-Name", "Ольга"),
        ]);
        let user = authenticate(Some(&trust(&ca.pem, "[]")), &leaf(&ca, Leaf::default()), &named, unix_now()).unwrap();
        assert_eq!((user.name.as_str(), user.groups[0].as_str()), ("jürgen@example.com", "Büro"));
        assert_eq!(user.extra["name"], ["Ольга"]);
        let mut broken = alice();
        broken.append("x-remote-group", HeaderValue::from_bytes(b"\xff").unwrap());
        let result = authenticate(Some(&trust(&ca.pem, "[]")), &leaf(&ca, Leaf::default()), &broken, unix_now());
        assert_eq!(result, Err(Unauthenticated::NoGroup));
    }

    #[test]
    fn configured_headers_count_only_without_the_aggregators_own() {
        let ca = authority("front-proxy-ca");
        let chain = leaf(&ca, Leaf::default());
        let mut data = data(&ca.pem, r#"["front-proxy-client"]"#);
        data.insert(USERNAME_HEADERS_KEY.into(), r#"["X-Proxy-User"]"#.into());
        data.insert(GROUP_HEADERS_KEY.into(), r#"["X-Proxy-Group"]"#.into());
        data.insert(EXTRA_PREFIXES_KEY.into(), r#"["X-Proxy-Extra-"]"#.into());
        let trust = FrontProxyTrust::parse(&data, provider()).unwrap();
        let proxy = [("X-Proxy-User", "root"), ("X-Proxy-Group", "system:masters"), ("X-Proxy-Extra-Scopes", "all")];
        let user = authenticate(Some(&trust), &chain, &headers(&proxy), unix_now()).unwrap();
        assert_eq!((user.name.as_str(), user.groups.as_slice()), ("root", ["system:masters".to_owned()].as_slice()));
        let mut both = alice();
        both.extend(headers(&proxy));
        let user = authenticate(Some(&trust), &chain, &both, unix_now()).unwrap();
        assert_eq!(user.name, "alice");
        assert_eq!(user.groups, ["dev", "system:authenticated"]);
        assert!(user.extra.is_empty());
    }

    #[test]
    fn extra_keys_are_decoded_and_lower_case() {
        let ca = authority("front-proxy-ca");
        let mut all = alice();
        all.extend(headers(&[
            ("X-Remote-Extra-Authentication.kubernetes.io%2fnode-name", "node1"),
            ("X-Remote-Extra-Scopes", "a"),
            ("x-remote-extra-scopes", "b"),
            ("X-Remote-Extra-Bad%zz", "c"),
            ("X-Remote-Extra-Caf%C3%89", "d"),
        ]));
        let user = authenticate(Some(&trust(&ca.pem, "[]")), &leaf(&ca, Leaf::default()), &all, unix_now()).unwrap();
        assert_eq!(user.extra["authentication.kubernetes.io/node-name"], ["node1"]);
        assert_eq!(user.extra["scopes"], ["a", "b"]);
        assert_eq!(user.extra["bad%zz"], ["c"]);
        assert_eq!(user.extra["cafÉ"], ["d"]);
    }
}
