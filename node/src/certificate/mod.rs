//! The certificates of virt-handler: one for its servers, and one for connections to guests.
//!
//! For each, virt-handler generates a key that never leaves its memory and creates a CertificateSigningRequest that names its
//! node. virt-controller signs it if the request came from virt-handler's service account on that node. At 80 % of a
//! certificate's lifetime the next one is requested, with a new key. If the clocks of virt-controller and this node differ, a new
//! certificate can seem to be at its end or not to have begun: it is used, and requests follow at growing intervals. The first
//! authority of the bundle is the current one. If another one has signed the certificate, the next one is requested as well.
//!
//! ```text
//!   request created -> pending ----> signed ----> in use -----> 80 % of its lifetime
//!        ^                | denied, failed, gone, too late             |
//!        |                v                                            | or other authority
//!        +-------- pause (1 s ... 5 min) <-----------------------------+
//! ```
//!
//! virt-handler may create and read requests, not delete them, because RBAC could not limit that to its own ones. Kubernetes
//! removes old requests.

use std::time::Duration;

use api::tls::{GUEST_CLIENT_CN, HANDLER_CN, HANDLER_SIGNER, handler_request_name, handler_server_name};
use daemon::{
    backoff, errors,
    tls::{Identity, Roots, TlsError},
};
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
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use x509_parser::prelude::{FromDer, Pem, X509Certificate};

/// Longest call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Limit of one request. Without virt-controller, requests accumulate at this rate.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// Largest accepted certificate chain.
const MAX_CHAIN: usize = 64 * 1024;
/// Shortest and longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Shortest and longest time between a certificate and the request of the next one.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// Tolerated difference of virt-controller's clock, in seconds.
const CLOCK_SKEW: i64 = 300;
/// Interval of checks of the wall clock, which can be set.
const CLOCK_CHECK: Duration = Duration::from_secs(30);
/// Time over which nodes spread their requests after a new authority, which all see at once. With the shortest [`INTERVAL`], or
/// with [`CLOCK_CHECK`], it stays below two minutes.
const SPREAD: Duration = Duration::from_secs(30);

/// Role of a certificate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Role {
    /// Server for virt-api and for scrapers.
    Handler,
    /// Client of guests.
    GuestClient,
}

impl Role {
    fn common_name(self) -> &'static str {
        match self {
            Self::Handler => HANDLER_CN,
            Self::GuestClient => GUEST_CLIENT_CN,
        }
    }

    fn usages(self) -> &'static [&'static str] {
        match self {
            Self::Handler => &["digital signature", "server auth", "client auth"],
            Self::GuestClient => &["digital signature", "client auth"],
        }
    }
}

/// Reason why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The key or the request cannot be created.
    #[error("cannot create a certificate request")]
    Request(#[from] rcgen::Error),
    /// The API server returned an error.
    #[error("cannot post or read the certificate request")]
    Api(#[source] Box<kube::Error>),
    /// The watch of the request failed.
    #[error("cannot watch the certificate request")]
    Watch(#[source] Box<kube::runtime::wait::Error>),
    /// No answer in time.
    #[error("certificate request {0} was not signed in time")]
    Timeout(String),
    /// The request was deleted before it was signed.
    #[error("certificate request {0} was deleted")]
    Gone(String),
    /// The request was denied.
    #[error("certificate request was denied: {0}")]
    Denied(String),
    /// The certificate does not match the request.
    #[error("certificate cannot be used: {0}")]
    Unusable(&'static str),
    /// The certificate and its key cannot be used.
    #[error("certificate cannot be used")]
    Tls(#[from] TlsError),
}

/// Lifetime of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Validity {
    from: i64,
    until: i64,
}

impl Validity {
    fn life(self) -> i64 {
        self.until.saturating_sub(self.from).max(0)
    }

    /// Returns the time at which the next certificate is requested.
    fn renewal(self) -> i64 {
        self.from.saturating_add(self.life() / 5 * 4)
    }

    /// Returns true if the next certificate is to be requested.
    fn is_due(self, now: i64) -> bool {
        now >= self.renewal() || self.from > now.saturating_add(CLOCK_SKEW)
    }

    /// Returns the shortest time for which the certificate is used. `former`: that of the one before, which was due at once.
    fn least_use(self, former: Option<Duration>) -> Duration {
        let part = Duration::from_secs(u64::try_from(self.life() / 5).unwrap_or(0));
        former.map_or(INTERVAL.0, |former| former * 2).min(part).clamp(INTERVAL.0, INTERVAL.1)
    }
}

/// Keeps an identity up to date until `stop`. It is empty until the first certificate is signed, which is requested once
/// `needed` is ready.
pub(crate) async fn follow(
    client: Client,
    node: String,
    role: Role,
    needed: impl Future<Output = ()>,
    roots: Roots,
    identity: Identity,
    stop: CancellationToken,
) {
    let keep = async {
        needed.await;
        keep_fresh(client, &node, role, &roots, &identity).await;
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = keep => {}
    }
}

async fn keep_fresh(client: Client, node: &str, role: Role, roots: &Roots, identity: &Identity) {
    let (mut failures, mut hasty) = (0_u32, None);
    loop {
        match obtain(&client, node, role, identity).await {
            Ok(validity) => {
                failures = 0;
                tracing::info!(?role, until = validity.until, "certificate in use");
                let least = validity.least_use(hasty);
                let is_due = || validity.is_due(Timestamp::now().as_second());
                let is_superseded = || is_superseded(roots, identity);
                hasty = (is_due() || is_superseded()).then_some(least);
                if hasty.is_some() {
                    tracing::warn!(
                        ?role,
                        ?validity,
                        "a new certificate is due at once: clocks differ, or it is not of the current authority"
                    );
                }
                sleep(least).await;
                while !is_due() {
                    if is_superseded() {
                        sleep(jitter()).await;
                        break;
                    }
                    sleep(CLOCK_CHECK).await;
                }
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                let pause = backoff::pause(BACKOFF, failures);
                tracing::warn!(error = errors::chain(&error), ?role, ?pause, "no certificate");
                sleep(pause).await;
            }
        }
    }
}

/// Returns true if another authority than the current one has signed the certificate in use. Each has a name of its own.
fn is_superseded(roots: &Roots, identity: &Identity) -> bool {
    let (Some(bundle), Some(present)) = (roots.pem(), identity.current()) else { return false };
    let Some(Ok(first)) = Pem::iter_from_buffer(&bundle).next() else { return false };
    let leaf = present.cert.first().and_then(|leaf| X509Certificate::from_der(leaf).ok());
    let (Ok(authority), Some((_, leaf))) = (first.parse_x509(), leaf) else { return false };
    authority.subject().as_raw() != leaf.issuer().as_raw()
}

/// Returns a random part of [`SPREAD`].
fn jitter() -> Duration {
    let [random, ..] = uuid::Uuid::new_v4().into_bytes();
    SPREAD * u32::from(random) / u32::from(u8::MAX)
}

/// Requests one certificate and puts it into use.
async fn obtain(client: &Client, node: &str, role: Role, identity: &Identity) -> Result<Validity, Error> {
    let key = KeyPair::generate()?;
    let request = request(node, role, &key)?;
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let name = request.metadata.name.clone().unwrap_or_default();
    timeout(CALL_TIMEOUT, api.create(&PostParams::default(), &request))
        .await
        .map_err(|_| Error::Timeout(name.clone()))?
        .map_err(|error| Error::Api(Box::new(error)))?;
    // A deleted request ends the wait as well.
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

/// Builds the request for a certificate that names the node.
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

/// Returns the PEM certificate chain of a signed request; `None` while it is pending.
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

/// Checks that the first certificate names the node, and returns its lifetime.
fn check(chain: &[u8], node: &str) -> Result<Validity, Error> {
    if chain.len() > MAX_CHAIN {
        return Err(Error::Unusable("the chain is too long"));
    }
    let pem = Pem::iter_from_buffer(chain).next().and_then(Result::ok).ok_or(Error::Unusable("it is not PEM"))?;
    let certificate = pem.parse_x509().map_err(|_| Error::Unusable("it cannot be parsed"))?;
    let names = certificate.subject_alternative_name().ok().flatten();
    let expected = handler_server_name(node);
    let named = names.is_some_and(|names| {
        names
            .value
            .general_names
            .iter()
            .any(|name| matches!(name, x509_parser::extensions::GeneralName::DNSName(name) if *name == expected))
    });
    if !named {
        return Err(Error::Unusable("it does not name this node"));
    }
    let validity = certificate.validity();
    Ok(Validity { from: validity.not_before.timestamp(), until: validity.not_after.timestamp() })
}

#[cfg(test)]
mod tests;
