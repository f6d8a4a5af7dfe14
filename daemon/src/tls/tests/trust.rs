//! Identities, bundles and policies.

use super::*;

#[tokio::test]
async fn client_with_the_right_common_name_is_served_and_named() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let client = authority.identity("right", "client.example");
    let config = client_config(&authority.roots(), Some(&client), &["http/1.1"]).unwrap();
    let answer = ask(address, config, "a.example").await.unwrap();
    assert!(answer.contains("name: Some(\"right\")"), "{answer}");
}

#[tokio::test]
async fn client_of_the_same_ca_with_another_common_name_is_refused() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let client = authority.identity("wrong", "client.example");
    let config = client_config(&authority.roots(), Some(&client), &["http/1.1"]).unwrap();
    assert!(ask(address, config, "a.example").await.is_err());
}

#[test]
fn certificate_accepted_in_the_handshake_is_verified_with_each_request() {
    let (authority, other) = (Authority::new(), Authority::new());
    let peer = |authority: &Authority, name: &str| {
        let mut params = CertificateParams::new(vec!["client.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&KeyPair::generate().unwrap(), &authority.issuer).unwrap();
        Peer::new(([192, 0, 2, 1], 1).into(), &[certificate.der().clone()])
    };
    let roots = authority.roots();
    assert!(roots.vouch_for(&peer(&authority, "right"), "right"));
    assert!(!roots.vouch_for(&peer(&authority, "wrong"), "right"));
    assert!(!roots.vouch_for(&peer(&other, "right"), "right"));
    assert!(!roots.vouch_for(&Peer::new(([192, 0, 2, 1], 1).into(), &[]), "right"));
    assert!(!Roots::empty().vouch_for(&peer(&authority, "right"), "right"));
}

#[tokio::test]
async fn client_without_certificate_is_refused_where_one_is_required() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "right");
    let address = start(server_config(&server, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let config = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, config, "a.example").await.is_err());
}

#[tokio::test]
async fn server_of_another_name_or_another_ca_is_refused() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let config = server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let address = start(config, CancellationToken::new()).await;
    let trusting = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, trusting.clone(), "b.example").await.is_err());
    assert!(ask(address, trusting, "a.example").await.is_ok());
    let other = client_config(&Authority::new().roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, other, "a.example").await.is_err());
    let nothing = client_config(&Roots::empty(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, nothing, "a.example").await.is_err());
}

#[tokio::test]
async fn guest_presents_any_certificate_and_gets_that_of_the_caller() {
    let authority = Authority::new();
    let guest = Authority::new().identity("anything", "a.example");
    let policy = ClientPolicy::only(authority.roots(), "caller");
    let address = start(server_config(&guest, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let caller = authority.identity("caller", "node.example");
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = connect_to_guest(&caller, stream).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("name: Some(\"caller\")"), "{answer}");
    let stream = TcpStream::connect(address).await.unwrap();
    assert!(connect_to_guest(&Identity::empty(), stream).await.is_err(), "nobody is shown");
}

#[tokio::test]
async fn rotated_identity_and_bundle_take_effect_without_restart() {
    let old = Authority::new();
    let new = Authority::new();
    let server = old.identity("server", "a.example");
    let address =
        start(server_config(&server, ClientPolicy::Unjudged, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let roots = old.roots();
    let config = client_config(&roots, None, &["http/1.1"]).unwrap();
    assert!(ask(address, config.clone(), "a.example").await.is_ok());
    roots.set_pem(format!("{}{}", old.pem, new.pem).as_bytes()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &new.issuer).unwrap();
    server.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    assert!(ask(address, config.clone(), "a.example").await.is_ok());
    roots.set_pem(new.pem.as_bytes()).unwrap();
    assert!(ask(address, config, "a.example").await.is_ok());
}

#[test]
fn certificate_with_a_second_name_has_no_name() {
    let key = KeyPair::generate().unwrap();
    let named = |names: &[&str]| {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // The builder takes one name of each type: the second attribute is turned into another common name below.
        let types = [DnType::CommonName, DnType::OrganizationalUnitName];
        for (kind, name) in types.into_iter().zip(names) {
            params.distinguished_name.push(kind, *name);
        }
        params.self_signed(&key).unwrap().der().to_vec()
    };
    let replaced = |mut der: Vec<u8>, from: &[u8], to: &[u8]| {
        assert_eq!(from.len(), to.len());
        let places: Vec<usize> = (0..der.len() - from.len()).filter(|at| der[*at..].starts_with(from)).collect();
        assert!(!places.is_empty());
        for at in places {
            der[at..at + to.len()].copy_from_slice(to);
        }
        CertificateDer::from(der)
    };
    // Object identifiers 2.5.4.11 and 2.5.4.3.
    let (unit, common) = ([0x06, 0x03, 0x55, 0x04, 0x0b], [0x06, 0x03, 0x55, 0x04, 0x03]);
    let name = |certificate: &CertificateDer<'_>| common_name(certificate);
    assert_eq!(name(&CertificateDer::from(named(&["good"]))).as_deref(), Some("good"));
    let two = replaced(named(&["good", "other"]), &unit, &common);
    assert_eq!(name(&two), None, "two names");
    let broken = replaced(two.to_vec(), b"other", b"oth\xff\xff");
    assert_eq!(name(&broken), None, "a second name that is no text");
    let broken = replaced(two.to_vec(), b"good", b"go\xff\xff");
    assert_eq!(name(&broken), None, "a first name that is no text");
    for certificate in [two, broken] {
        assert!(!Peer::new(([192, 0, 2, 1], 1).into(), &[certificate]).is("good"));
    }
    assert_eq!(name(&CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])), None);
}

#[tokio::test]
async fn lowest_tls_version_follows_the_configuration() {
    let authority = Authority::new();
    let server = authority.identity("server", "a.example");
    let config = |version: &str| {
        let mut config = api::config::ClusterConfig::default();
        config.tls.min_tls_version = Some(version.to_owned());
        crate::config::ConfigHandle::fixed(config)
    };
    let mut trusted = rustls::RootCertStore::empty();
    trusted.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let older = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(trusted)
        .with_no_client_auth();
    for (version, works) in [("VersionTLS12", true), ("VersionTLS13", false)] {
        let tls = ServerTls::following(&server, ClientPolicy::Unjudged, &["http/1.1"], config(version)).unwrap();
        let address = start(tls.current(), CancellationToken::new()).await;
        assert_eq!(ask(address, Arc::new(older.clone()), "a.example").await.is_ok(), works, "{version}");
    }
}

#[test]
fn key_of_another_certificate_is_refused() {
    let authority = Authority::new();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority.issuer).unwrap();
    let other = KeyPair::generate().unwrap();
    let identity = Identity::empty();
    assert!(identity.set_pem(certificate.pem().as_bytes(), other.serialize_pem().as_bytes()).is_err());
    assert!(identity.current().is_none());
}

#[test]
fn bundle_that_is_not_pem_leaves_the_last_one_in_force() {
    let authority = Authority::new();
    let roots = authority.roots();
    assert!(roots.set_pem(b"nonsense").is_err());
    assert_eq!(roots.pem().unwrap(), authority.pem.as_bytes());
    assert!(!roots.set_pem(authority.pem.as_bytes()).unwrap());
}

#[tokio::test]
async fn cve_2025_64434_certificate_of_an_agent_opens_no_other_agent_and_stands_for_no_other_node() {
    use api::tls::{API_CLIENT_CN, HANDLER_CN, handler_server_name};
    let authority = Authority::new();
    let stolen = authority.identity(HANDLER_CN, &handler_server_name("n1"));
    let other = authority.identity(HANDLER_CN, &handler_server_name("n2"));
    let policy = ClientPolicy::only(authority.roots(), API_CLIENT_CN);
    let address = start(server_config(&other, policy, &["http/1.1"]).unwrap(), CancellationToken::new()).await;
    let as_client = client_config(&authority.roots(), Some(&stolen), &["http/1.1"]).unwrap();
    assert!(ask(address, as_client, &handler_server_name("n2")).await.is_err());
    let config = server_config(&stolen, ClientPolicy::Unjudged, &["http/1.1"]).unwrap();
    let address = start(config, CancellationToken::new()).await;
    let api = client_config(&authority.roots(), None, &["http/1.1"]).unwrap();
    assert!(ask(address, api.clone(), &handler_server_name("n2")).await.is_err());
    assert!(ask(address, api, &handler_server_name("n1")).await.is_ok());
}
