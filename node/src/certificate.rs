//! The agent's own certificates: the one that it serves with, and one that it shows to guests.
//!
//! For each the agent makes a key that never leaves its memory and asks for a certificate that names its node, by a
//! CertificateSigningRequest. virt-controller answers if the request came from the agent's service account on that very
//! node. At 80 % of a certificate's life the next one is asked for, with a new key.
//!
//! ```text
//!   request made ----> pending ----> signed ----> in force ----> 80 % of its life
//!        ^                | denied, failed, gone, too late             |
//!        |                v                                            |
//!        +-------- pause (1 s ... 5 min) <-----------------------------+
//! ```
//!
//! The agent may make requests and read them; it may not delete any, since it would have to be allowed to delete those
//! of others too. Kubernetes removes old ones.

use std::time::Duration;

use api::tls::{GUEST_CLIENT_CN, HANDLER_CN, HANDLER_SIGNER, handler_request_name, handler_server_name};
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
    runtime::wait::await_condition,
};
use process::tls::{Identity, TlsError};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use x509_parser::pem::Pem;

/// Longest call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// How long one request is waited for before another one is made. While virt-controller is not there, requests gather
/// only this fast.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// Largest certificate chain that is taken.
const MAX_CHAIN: usize = 64 * 1024;
/// Shortest and longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// The wall clock may be set: it is looked at this often.
const CLOCK_CHECK: Duration = Duration::from_secs(30);

/// What a certificate is for.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// The agent is server to virt-api and to scrapers.
    Agent,
    /// The agent is a client of guests.
    GuestClient,
}

impl Role {
    fn common_name(self) -> &'static str {
        match self {
            Self::Agent => HANDLER_CN,
            Self::GuestClient => GUEST_CLIENT_CN,
        }
    }

    fn usages(self) -> &'static [&'static str] {
        match self {
            Self::Agent => &["digital signature", "server auth", "client auth"],
            Self::GuestClient => &["digital signature", "client auth"],
        }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key or the request could not be made.
    #[error("cannot make a certificate request")]
    Request(#[from] rcgen::Error),
    /// The API server refused.
    #[error("cannot post or read the certificate request")]
    Api(#[source] Box<kube::Error>),
    /// The request could not be followed.
    #[error("cannot follow the certificate request")]
    Watch(#[source] Box<kube::runtime::wait::Error>),
    /// No answer in time.
    #[error("certificate request {0} was not answered in time")]
    Timeout(String),
    /// The request was removed before it was answered.
    #[error("certificate request {0} is gone")]
    Gone(String),
    /// The request was denied.
    #[error("certificate request was denied: {0}")]
    Denied(String),
    /// The certificate is not one that was asked for.
    #[error("certificate cannot be used: {0}")]
    Unusable(&'static str),
    /// The certificate cannot be put in force.
    #[error("certificate cannot be used")]
    Tls(#[from] TlsError),
}

/// Time of life of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Validity {
    from: i64,
    until: i64,
}

impl Validity {
    /// When the next certificate is to be asked for.
    fn renewal(self) -> i64 {
        let life = self.until.saturating_sub(self.from).max(0);
        self.from.saturating_add(life / 5 * 4)
    }
}

/// The agent's identity in a role, kept fresh until `stop`. It is empty until the first certificate is signed, which is
/// asked for when `wanted` is ready.
#[must_use]
pub fn follow(
    client: Client,
    node: &str,
    role: Role,
    wanted: impl Future<Output = ()> + Send + 'static,
    stop: CancellationToken,
) -> Identity {
    let identity = Identity::empty();
    let (followed, node) = (identity.clone(), node.to_owned());
    let keep = async move {
        wanted.await;
        keep_fresh(client, &node, role, &followed).await;
    };
    tokio::spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = keep => {}
        }
    });
    identity
}

async fn keep_fresh(client: Client, node: &str, role: Role, identity: &Identity) {
    let mut pause = BACKOFF.0;
    loop {
        match obtain(&client, node, role, identity).await {
            Ok(validity) => {
                pause = BACKOFF.0;
                tracing::info!(?role, until = validity.until, "certificate in force");
                while Timestamp::now().as_second() < validity.renewal() {
                    sleep(CLOCK_CHECK).await;
                }
            }
            Err(error) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%error, source, ?role, ?pause, "no certificate");
                sleep(pause).await;
                pause = (pause * 2).min(BACKOFF.1);
            }
        }
    }
}

/// Gets one certificate and puts it in force.
async fn obtain(client: &Client, node: &str, role: Role, identity: &Identity) -> Result<Validity, Error> {
    let key = KeyPair::generate()?;
    let request = request(node, role, &key)?;
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let name = request.metadata.name.clone().unwrap_or_default();
    timeout(CALL_TIMEOUT, api.create(&PostParams::default(), &request))
        .await
        .map_err(|_| Error::Timeout(name.clone()))?
        .map_err(|error| Error::Api(Box::new(error)))?;
    // A request that is gone ends the wait as well.
    let answered = await_condition(api, &name, |request: Option<&CertificateSigningRequest>| {
        request.is_none_or(|request| !matches!(answer(request), Ok(None)))
    });
    let request = timeout(ANSWER_TIMEOUT, answered)
        .await
        .map_err(|_| Error::Timeout(name.clone()))?
        .map_err(|error| Error::Watch(Box::new(error)))?
        .ok_or_else(|| Error::Gone(name.clone()))?;
    let chain = answer(&request)?.ok_or(Error::Timeout(name))?;
    let validity = check(chain, node)?;
    identity.set_pem(chain, key.serialize_pem().as_bytes())?;
    Ok(validity)
}

/// The request for a certificate that names the node.
fn request(node: &str, role: Role, key: &KeyPair) -> Result<CertificateSigningRequest, Error> {
    let mut params = CertificateParams::new([handler_server_name(node)])?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, role.common_name());
    let pem = params.serialize_request(key)?.pem()?;
    let random = uuid::Uuid::new_v4().simple().to_string();
    Ok(CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(handler_request_name(node, random.get(..10).unwrap_or_default())),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(pem.into_bytes()),
            signer_name: HANDLER_SIGNER.to_owned(),
            usages: Some(role.usages().iter().map(|usage| (*usage).to_owned()).collect()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    })
}

/// The certificate chain of an answered request, PEM; `None` while there is no answer.
fn answer(request: &CertificateSigningRequest) -> Result<Option<&[u8]>, Error> {
    let Some(status) = &request.status else { return Ok(None) };
    for condition in status.conditions.iter().flatten() {
        if matches!(condition.type_.as_str(), "Denied" | "Failed") && condition.status == "True" {
            let parts = [condition.reason.as_deref(), condition.message.as_deref()];
            let reason: Vec<&str> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
            return Err(Error::Denied(reason.join(": ")));
        }
    }
    Ok(status.certificate.as_ref().map(|chain| chain.0.as_slice()).filter(|chain| !chain.is_empty()))
}

/// Checks that the first certificate names the node, and reads its time of life.
fn check(chain: &[u8], node: &str) -> Result<Validity, Error> {
    if chain.len() > MAX_CHAIN {
        return Err(Error::Unusable("the chain is too long"));
    }
    let pem = Pem::iter_from_buffer(chain).next().and_then(Result::ok).ok_or(Error::Unusable("it is not PEM"))?;
    let certificate = pem.parse_x509().map_err(|_| Error::Unusable("it cannot be parsed"))?;
    let names = certificate.subject_alternative_name().ok().flatten();
    let wanted = handler_server_name(node);
    let named = names.is_some_and(|names| {
        names
            .value
            .general_names
            .iter()
            .any(|name| matches!(name, x509_parser::extensions::GeneralName::DNSName(name) if *name == wanted))
    });
    if !named {
        return Err(Error::Unusable("it does not name this node"));
    }
    let validity = certificate.validity();
    Ok(Validity { from: validity.not_before.timestamp(), until: validity.not_after.timestamp() })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::{CertificateSigningRequestCondition, CertificateSigningRequestStatus};
    use rcgen::{BasicConstraints, CertificateSigningRequestParams, IsCa, Issuer};

    use super::*;

    fn signed(request: &CertificateSigningRequest) -> Vec<u8> {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = Issuer::new(params, KeyPair::generate().unwrap());
        let pem = String::from_utf8(request.spec.request.0.clone()).unwrap();
        CertificateSigningRequestParams::from_pem(&pem).unwrap().signed_by(&issuer).unwrap().pem().into_bytes()
    }

    #[test]
    fn a_request_names_role_and_node() {
        let key = KeyPair::generate().unwrap();
        let request = request("node-1", Role::Agent, &key).unwrap();
        assert!(request.metadata.name.as_ref().unwrap().starts_with("virt-handler-node-1-"));
        assert_eq!(request.spec.signer_name, "kubevirt.io/virt-handler");
        let pem = String::from_utf8(request.spec.request.0.clone()).unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{pem}");
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
        let (_, csr) = <x509_parser::certification_request::X509CertificationRequest as x509_parser::prelude::FromDer<_>>::from_der(&pem.contents).unwrap();
        let subject = csr.certification_request_info.subject.to_string();
        assert_eq!(subject, "CN=kubevirt.io:system:node:virt-handler");
        let names = format!("{:?}", csr.requested_extensions().unwrap().collect::<Vec<_>>());
        assert!(names.contains("node-1.virt-handler"), "{names}");
    }

    #[test]
    fn a_signed_request_becomes_the_identity() {
        let key = KeyPair::generate().unwrap();
        let request = request("node-1", Role::Agent, &key).unwrap();
        let chain = signed(&request);
        let validity = check(&chain, "node-1").unwrap();
        assert!(validity.from < validity.until);
        assert!(matches!(check(&chain, "node-2"), Err(Error::Unusable("it does not name this node"))));
        let identity = Identity::empty();
        identity.set_pem(&chain, key.serialize_pem().as_bytes()).unwrap();
        assert!(identity.current().is_some());
        // A certificate for somebody else's key is not taken.
        let other = KeyPair::generate().unwrap();
        assert!(identity.set_pem(&chain, other.serialize_pem().as_bytes()).is_err());
    }

    /// An API server that signs or denies each request as soon as it is made.
    fn api_server(sign: bool, made: tokio::sync::mpsc::UnboundedSender<String>) -> Client {
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
                            certificate: Some(ByteString(signed(&request))),
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

    #[tokio::test]
    async fn the_agent_gets_an_identity_that_names_its_node() {
        let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let identity = follow(api_server(true, made), "node-1", Role::Agent, std::future::ready(()), stop.clone());
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
    async fn nothing_is_asked_for_before_it_is_wanted() {
        let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let (stop, gate) = (CancellationToken::new(), CancellationToken::new());
        let wanted = gate.clone().cancelled_owned();
        let identity = follow(api_server(true, made), "node-1", Role::GuestClient, wanted, stop.clone());
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
    async fn a_denied_agent_asks_again_ever_more_seldom() {
        let (made, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let identity = follow(api_server(false, made), "node-1", Role::Agent, std::future::ready(()), stop.clone());
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
    fn an_answer_is_waited_for_and_a_denial_is_told() {
        let mut request = request("node-1", Role::Agent, &KeyPair::generate().unwrap()).unwrap();
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
    fn what_is_no_certificate_is_refused() {
        for chain in [&b""[..], b"x", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &[0xff; 100]] {
            assert!(matches!(check(chain, "node-1"), Err(Error::Unusable(_))));
        }
        assert!(matches!(check(&vec![b'-'; MAX_CHAIN + 1], "node-1"), Err(Error::Unusable("the chain is too long"))));
    }

    #[test]
    fn renewal_is_at_four_fifths_of_life() {
        assert_eq!(Validity { from: 1000, until: 2000 }.renewal(), 1800);
        assert_eq!(Validity { from: 1000, until: 1000 }.renewal(), 1000);
        // Never later than its end, whatever the dates say.
        assert_eq!(Validity { from: 2000, until: 1000 }.renewal(), 2000);
        assert!(Validity { from: i64::MIN, until: i64::MAX }.renewal() < i64::MAX);
    }
}
