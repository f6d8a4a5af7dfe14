use k8s_openapi::api::certificates::v1::{CertificateSigningRequestCondition, CertificateSigningRequestStatus};
use rcgen::{BasicConstraints, CertificateSigningRequestParams, IsCa, Issuer};

use super::*;

fn signed(request: &CertificateSigningRequest) -> Vec<u8> {
    signed_with(request, |_| {})
}

fn signed_with(request: &CertificateSigningRequest, change: impl Fn(&mut CertificateParams)) -> Vec<u8> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = Issuer::new(params, KeyPair::generate().unwrap());
    let pem = String::from_utf8(request.spec.request.0.clone()).unwrap();
    let mut request = CertificateSigningRequestParams::from_pem(&pem).unwrap();
    change(&mut request.params);
    request.signed_by(&issuer).unwrap().pem().into_bytes()
}

#[test]
fn a_request_names_role_and_node() {
    let key = KeyPair::generate().unwrap();
    let request = request("node-1", Role::Handler, &key).unwrap();
    assert!(request.metadata.name.as_ref().unwrap().starts_with("virt-handler-node-1-"));
    assert_eq!(request.spec.signer_name, "kubevirt.io/virt-handler");
    let pem = String::from_utf8(request.spec.request.0.clone()).unwrap();
    assert!(pem.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{pem}");
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
    let (_, csr) =
        <x509_parser::certification_request::X509CertificationRequest as x509_parser::prelude::FromDer<_>>::from_der(
            &pem.contents,
        )
        .unwrap();
    let subject = csr.certification_request_info.subject.to_string();
    assert_eq!(subject, "CN=kubevirt.io:system:node:virt-handler");
    let names = format!("{:?}", csr.requested_extensions().unwrap().collect::<Vec<_>>());
    assert!(names.contains("node-1.virt-handler"), "{names}");
}

#[test]
fn a_signed_request_becomes_the_identity() {
    let key = KeyPair::generate().unwrap();
    let request = request("node-1", Role::Handler, &key).unwrap();
    let chain = signed(&request);
    let validity = check(&chain, "node-1").unwrap();
    assert!(validity.from < validity.until);
    assert!(matches!(check(&chain, "node-2"), Err(Error::Unusable("it does not name this node"))));
    let identity = Identity::empty();
    identity.set_pem(&chain, key.serialize_pem().as_bytes()).unwrap();
    assert!(identity.current().is_some());
    // A certificate for another key is rejected.
    let other = KeyPair::generate().unwrap();
    assert!(identity.set_pem(&chain, other.serialize_pem().as_bytes()).is_err());
}

/// An API server that signs or denies each request at once.
fn api_server(sign: bool, made: tokio::sync::mpsc::UnboundedSender<String>) -> Client {
    api_server_with(sign, made, |_| {})
}

/// An API server that signs certificates with a change.
fn api_server_with(
    sign: bool,
    made: tokio::sync::mpsc::UnboundedSender<String>,
    change: impl Fn(&mut CertificateParams) + Copy + Send + 'static,
) -> Client {
    let stored = std::sync::Arc::new(tokio::sync::Mutex::new(None));
    let service = tower::service_fn(move |call: http::Request<kube::client::Body>| {
        let (stored, made) = (std::sync::Arc::clone(&stored), made.clone());
        async move {
            let (parts, body) = call.into_parts();
            let answer = if parts.method == http::Method::POST {
                let body = body.collect_bytes().await.unwrap();
                let mut request: CertificateSigningRequest = serde_json::from_slice(&body).unwrap();
                made.send(request.metadata.name.clone().unwrap()).unwrap();
                let reply = serde_json::to_value(&request).unwrap();
                request.status = Some(if sign {
                    CertificateSigningRequestStatus {
                        certificate: Some(ByteString(signed_with(&request, change))),
                        conditions: None,
                    }
                } else {
                    let denied = CertificateSigningRequestCondition {
                        type_: "Denied".to_owned(),
                        status: "True".to_owned(),
                        ..CertificateSigningRequestCondition::default()
                    };
                    CertificateSigningRequestStatus { certificate: None, conditions: Some(vec![denied]) }
                });
                *stored.lock().await = Some(request);
                reply
            } else {
                let request = stored.lock().await.clone().unwrap();
                let query = parts.uri.query().unwrap().to_owned();
                assert!(query.contains("fieldSelector=metadata.name"), "only its own request is read: {query}");
                serde_json::json!({
                    "apiVersion": "certificates.k8s.io/v1",
                    "kind": "CertificateSigningRequestList",
                    "metadata": {"resourceVersion": "1"},
                    "items": [request],
                })
            };
            let body = kube::client::Body::from(serde_json::to_vec(&answer).unwrap());
            Ok::<_, std::convert::Infallible>(http::Response::new(body))
        }
    });
    Client::new(service, "default")
}

fn started(
    sign: bool,
    made: tokio::sync::mpsc::UnboundedSender<String>,
    role: Role,
    needed: impl Future<Output = ()> + Send + 'static,
    stop: &CancellationToken,
) -> Identity {
    let identity = Identity::empty();
    let (client, stop) = (api_server(sign, made), stop.clone());
    tokio::spawn(follow(client, "node-1".to_owned(), role, needed, Roots::empty(), identity.clone(), stop));
    identity
}

#[tokio::test]
async fn virt_handler_gets_an_identity_that_names_its_node() {
    let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let identity = started(true, made, Role::Handler, std::future::ready(()), &stop);
    timeout(Duration::from_secs(10), identity.ready()).await.unwrap();
    let certificate = identity.current().unwrap();
    let (_, leaf) = <x509_parser::certificate::X509Certificate<'_> as x509_parser::prelude::FromDer<_>>::from_der(
        &certificate.cert[0],
    )
    .unwrap();
    assert_eq!(leaf.subject().to_string(), "CN=kubevirt.io:system:node:virt-handler");
    assert!(requests.recv().await.unwrap().starts_with("virt-handler-node-1-"));
    assert!(requests.try_recv().is_err(), "one request is enough");
    stop.cancel();
}

#[tokio::test]
async fn nothing_is_requested_before_it_is_needed() {
    let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let (stop, gate) = (CancellationToken::new(), CancellationToken::new());
    let needed = gate.clone().cancelled_owned();
    let identity = started(true, made, Role::GuestClient, needed, &stop);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(requests.try_recv().is_err() && identity.current().is_none());
    gate.cancel();
    timeout(Duration::from_secs(10), identity.ready()).await.unwrap();
    let certificate = identity.current().unwrap();
    let (_, leaf) = <x509_parser::certificate::X509Certificate<'_> as x509_parser::prelude::FromDer<_>>::from_der(
        &certificate.cert[0],
    )
    .unwrap();
    assert_eq!(leaf.subject().to_string(), "CN=kubevirt.io:system:client:vsock");
    stop.cancel();
}

#[tokio::test]
async fn a_denied_request_is_repeated_at_growing_intervals() {
    let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let identity = started(false, made, Role::Handler, std::future::ready(()), &stop);
    // At once, after one second and after two more.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    stop.cancel();
    let mut count = 0;
    while requests.try_recv().is_ok() {
        count += 1;
    }
    assert_eq!(count, 2);
    assert!(identity.current().is_none());
}

#[test]
fn a_request_without_an_answer_is_pending_and_a_denial_is_an_error() {
    let mut request = request("node-1", Role::Handler, &KeyPair::generate().unwrap()).unwrap();
    assert!(matches!(answer(&request), Ok(None)));
    let condition = |type_: &str| CertificateSigningRequestCondition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: Some("WrongNode".to_owned()),
        message: Some("not from that node".to_owned()),
        ..CertificateSigningRequestCondition::default()
    };
    let status = |type_: &str, certificate: Option<&[u8]>| {
        Some(CertificateSigningRequestStatus {
            certificate: certificate.map(|bytes| ByteString(bytes.to_vec())),
            conditions: Some(vec![condition(type_)]),
        })
    };
    request.status = status("Approved", None);
    assert!(matches!(answer(&request), Ok(None)));
    request.status = status("Approved", Some(b""));
    assert!(matches!(answer(&request), Ok(None)));
    request.status = status("Approved", Some(b"chain"));
    assert!(matches!(answer(&request), Ok(Some(b"chain"))));
    for type_ in ["Denied", "Failed"] {
        request.status = status(type_, Some(b"chain"));
        let error = answer(&request).unwrap_err();
        assert_eq!(error.to_string(), "certificate request was denied: WrongNode: not from that node");
    }
}

#[test]
fn data_that_is_no_certificate_is_rejected() {
    for chain in [&b""[..], b"x", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &[0xff; 100]] {
        assert!(matches!(check(chain, "node-1"), Err(Error::Unusable(_))));
    }
    assert!(matches!(check(&vec![b'-'; MAX_CHAIN + 1], "node-1"), Err(Error::Unusable("the chain is too long"))));
}

#[test]
fn renewal_is_at_four_fifths_of_the_lifetime() {
    assert_eq!(Validity { from: 1000, until: 2000 }.renewal(), 1800);
    assert_eq!(Validity { from: 1000, until: 1000 }.renewal(), 1000);
    // Never later than its end.
    assert_eq!(Validity { from: 2000, until: 1000 }.renewal(), 2000);
    assert!(Validity { from: i64::MIN, until: i64::MAX }.renewal() < i64::MAX);
}

#[test]
fn certificate_out_of_its_time_is_due_and_requests_are_rare() {
    let day = Validity { from: 1_000_000, until: 1_086_400 };
    // Seconds after its begin, it is due.
    for (after, due) in [(-301, true), (-300, false), (0, false), (69_119, false), (69_120, true), (1_000_000, true)] {
        assert_eq!(day.is_due(day.from + after), due, "{after}");
    }
    let short = Validity { from: 0, until: 600 };
    let none = Validity { from: 1, until: 0 };
    // Time between requests of certificates that are due at once.
    for (validity, expected) in
        [(day, &[60, 120, 240, 480, 960, 1920, 3600, 3600][..]), (short, &[60, 120, 120, 120]), (none, &[60, 60])]
    {
        let mut former = None;
        for seconds in expected {
            let least = validity.least_use(former);
            assert_eq!(least.as_secs(), *seconds, "{validity:?} {former:?}");
            former = Some(least);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn virt_handler_whose_clock_is_ahead_does_not_request_without_pause() {
    let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let ended = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let client = api_server_with(true, made, ended);
    tokio::spawn(follow(
        client,
        "node-1".to_owned(),
        Role::Handler,
        std::future::ready(()),
        Roots::empty(),
        Identity::empty(),
        stop.clone(),
    ));
    tokio::time::sleep(Duration::from_secs(3600)).await;
    stop.cancel();
    let mut count = 0;
    while requests.try_recv().is_ok() {
        count += 1;
    }
    // At once, and after 1, 3, 7, 15, 31 minutes.
    assert_eq!(count, 6);
}

#[tokio::test(start_paused = true)]
async fn virt_handler_gets_a_certificate_of_the_current_authority() {
    // The name that the library gives to the authority of `signed_with`.
    const SIGNER: &str = "rcgen self signed cert";
    let bundle = |names: &[&str]| -> String {
        let pem = |name: &&str| {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, *name);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
        };
        names.iter().map(pem).collect()
    };
    let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let (stop, roots) = (CancellationToken::new(), Roots::empty());
    tokio::spawn(follow(
        api_server(true, made),
        "node-1".to_owned(),
        Role::Handler,
        std::future::ready(()),
        roots.clone(),
        Identity::empty(),
        stop.clone(),
    ));
    for (authorities, seconds, expected, why) in [
        (&[SIGNER, "next"][..], 3580, 1, "the next authority does not sign yet"),
        (&["next", SIGNER], 70, 1, "the former authority is not the first any more"),
        (&["next", SIGNER], 3600, 5, "it signs nevertheless: after 1, 3, 7, 15, 31 minutes"),
        (&[SIGNER, "next"], 7200, 0, "the certificate is of the current authority"),
    ] {
        roots.set_pem(bundle(authorities).as_bytes()).unwrap();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let mut count = 0;
        while requests.try_recv().is_ok() {
            count += 1;
        }
        assert_eq!(count, expected, "{why}");
    }
    stop.cancel();
}
