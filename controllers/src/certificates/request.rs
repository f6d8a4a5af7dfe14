//! Requests of virt-handlers for certificates.
//!
//! A request is granted only if the service account of virt-handler made it with a token bound to a node, and if it names
//! exactly that node. Everything in the certificate but the public key is set here. There are two uses: virt-handler itself,
//! and virt-handler as a client of guests, whose certificate is not valid for a server.

use api::{constants::component, tls};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, DnValue, ExtendedKeyUsagePurpose,
    KeyUsagePurpose, PublicKey, SanType,
};
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject};
use serde_json::json;

use super::{Authority, CertificateError, Lives, SHORTEST_LIFE, authority::leaf_dates};
use crate::runtime::{Decision, Effect, Kind};

/// Longest request that is read.
const REQUEST_LIMIT: usize = 16 * 1024;
/// Wait while there is no authority.
const WITHOUT_AUTHORITY: std::time::Duration = std::time::Duration::from_secs(5);
const USAGES: &[&str] = &["server auth", "client auth", "digital signature", "key encipherment"];

/// A granted request.
struct Granted {
    node: String,
    role: Role,
    key: PublicKey,
}

/// The use of a certificate of virt-handler.
#[derive(Clone, Copy)]
enum Role {
    /// Serving virt-api and scrapers.
    Handler,
    /// Connecting to guests.
    GuestClient,
}

impl Role {
    fn named(common_name: &str) -> Option<Self> {
        [Self::Handler, Self::GuestClient].into_iter().find(|role| role.common_name() == common_name)
    }

    fn common_name(self) -> &'static str {
        match self {
            Self::Handler => tls::HANDLER_CN,
            Self::GuestClient => tls::GUEST_CLIENT_CN,
        }
    }

    fn purposes(self) -> Vec<ExtendedKeyUsagePurpose> {
        match self {
            Self::Handler => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
            Self::GuestClient => vec![ExtendedKeyUsagePurpose::ClientAuth],
        }
    }
}

/// Decides on a request.
pub(crate) fn decide(
    request: &CertificateSigningRequest,
    namespace: &str,
    authority: Option<&Authority>,
    lives: Lives,
    now: Timestamp,
) -> Result<Decision, CertificateError> {
    let mut decision = Decision::settled();
    if request.spec.signer_name != tls::HANDLER_SIGNER {
        return Ok(decision);
    }
    let status = request.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let has = |type_: &str| conditions.iter().any(|condition| condition.type_ == type_);
    let issued = status.is_some_and(|status| status.certificate.as_ref().is_some_and(|pem| !pem.0.is_empty()));
    if issued || has("Denied") || has("Failed") {
        return Ok(decision);
    }
    let granted = match examine(request, namespace) {
        Ok(granted) => granted,
        Err(reason) => {
            tracing::warn!(user = request.spec.username.as_deref().unwrap_or_default(), reason, "request is refused");
            // An approval by another user does not change the rule.
            let (type_, subresource) = if has("Approved") { ("Failed", "status") } else { ("Denied", "approval") };
            decision.push(conclude(request, type_, subresource, "NotPermitted", reason, now));
            return Ok(decision);
        }
    };
    let Some(authority) = authority else {
        decision.wake(WITHOUT_AUTHORITY);
        return Ok(decision);
    };
    if !has("Approved") {
        let message = "made by the node agent on the node it names";
        decision.push(conclude(request, "Approved", "approval", "NodeAgent", message, now));
    }
    let certificate = sign(request, &granted, authority, lives, now)?;
    decision.push(patch(request, "status", json!({"status": {"certificate": encode(&certificate)}})));
    Ok(decision)
}

/// Applies the rule. Errors are messages for users.
fn examine(request: &CertificateSigningRequest, namespace: &str) -> Result<Granted, &'static str> {
    let spec = &request.spec;
    let account = format!("system:serviceaccount:{namespace}:{}", component::HANDLER_SERVICE_ACCOUNT);
    if spec.username.as_deref() != Some(account.as_str()) {
        return Err("the requester is not the service account of the node agents");
    }
    let nodes = spec.extra.as_ref().and_then(|extra| extra.get(tls::NODE_NAME_EXTRA));
    let Some([node]) = nodes.map(Vec::as_slice) else {
        return Err("the requester's token is not bound to a node");
    };
    let usages = spec.usages.as_deref().unwrap_or_default();
    if usages.is_empty() || usages.iter().any(|usage| !USAGES.contains(&usage.as_str())) {
        return Err("the usages are not those of a node agent");
    }
    if spec.request.0.len() > REQUEST_LIMIT {
        return Err("the request is too long");
    }
    let der = CertificateSigningRequestDer::from_pem_slice(&spec.request.0).map_err(|_| "the request is not PEM")?;
    // Checks that the requester has the key.
    let parsed = CertificateSigningRequestParams::from_der(&der)
        .map_err(|_| "the request cannot be read or its signature is wrong")?;
    let names: Vec<_> = parsed.params.distinguished_name.iter().collect();
    let [(DnType::CommonName, name)] = names.as_slice() else {
        return Err("the subject is not exactly one common name");
    };
    let role = text(name).and_then(Role::named).ok_or("the common name is not one of a node agent")?;
    let expected = tls::handler_server_name(node);
    let [SanType::DnsName(dns)] = parsed.params.subject_alt_names.as_slice() else {
        return Err("the request does not name exactly one DNS name");
    };
    if dns.as_str() != expected {
        return Err("the request names another node than the one the requester's token is bound to");
    }
    Ok(Granted { node: node.clone(), role, key: parsed.public_key })
}

fn text(value: &DnValue) -> Option<&str> {
    match value {
        DnValue::Utf8String(text) => Some(text),
        DnValue::PrintableString(text) => Some(text.as_str()),
        _ => None,
    }
}

fn sign(
    request: &CertificateSigningRequest,
    granted: &Granted,
    authority: &Authority,
    lives: Lives,
    now: Timestamp,
) -> Result<String, CertificateError> {
    let mut params =
        CertificateParams::new(vec![tls::handler_server_name(&granted.node)]).map_err(CertificateError::Make)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, granted.role.common_name());
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = granted.role.purposes();
    params.use_authority_key_identifier_extension = true;
    let asked = request.spec.expiration_seconds.map(|seconds| SignedDuration::from_secs(i64::from(seconds)));
    let life = asked.map_or(lives.leaf, |asked| asked.max(SHORTEST_LIFE).min(lives.leaf));
    leaf_dates(&mut params, authority, now, life)?;
    let certificate = params.signed_by(&granted.key, authority.issuer()).map_err(CertificateError::Make)?;
    Ok(certificate.pem())
}

fn encode(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

fn conclude(
    request: &CertificateSigningRequest,
    type_: &str,
    subresource: &'static str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Effect {
    let mut conditions: Vec<serde_json::Value> = request
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref())
        .map(|conditions| conditions.iter().filter_map(|condition| serde_json::to_value(condition).ok()).collect())
        .unwrap_or_default();
    let at = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now);
    conditions.push(json!({
        "type": type_,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastUpdateTime": at,
    }));
    patch(request, subresource, json!({"status": {"conditions": conditions}}))
}

fn patch(request: &CertificateSigningRequest, subresource: &'static str, patch: serde_json::Value) -> Effect {
    Effect::merge(Kind::CertificateSigningRequest, &request.metadata, patch).of_subresource(subresource)
}
