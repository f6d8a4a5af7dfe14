//! Certificate chains and headers of front proxies and of clients that pose as one.

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
fn front_proxy_with_an_allowed_name_acts_for_users() {
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
    let chain = leaf(&ca, Leaf { name: "another-name", ..Leaf::default() });
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
fn no_client_is_trusted_before_the_configuration_is_known() {
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
