//! The bundle of authorities, and its copies in objects that the API server reads.

use std::collections::BTreeMap;

use api::tls;
use base64::Engine as _;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;

use super::{
    CertificateError,
    authority::{CertificateFacts, facts_of},
};
use crate::{
    resources::bundle_carriers::BundleCarrier,
    runtime::{Effect, Kind},
};

/// Returns the published bundle.
pub(super) fn text(map: Option<&ConfigMap>) -> Option<&str> {
    map?.data.as_ref()?.get(tls::CA_BUNDLE_KEY).map(String::as_str)
}

/// Returns the bundle to be published: these authorities, then published ones. Those that are not valid stay while `all`: a clock that
/// is ahead makes them look so, and certificates that they signed may be valid.
pub(super) fn wanted(
    published: Option<&str>,
    authorities: [Option<&CertificateFacts>; 2],
    now: Timestamp,
    all: bool,
    limit: usize,
) -> String {
    let mut wanted: Vec<String> = authorities.into_iter().flatten().map(|facts| facts.pem.clone()).collect();
    for der in CertificateDer::pem_slice_iter(published.unwrap_or_default().as_bytes()).flatten() {
        let Some(facts) = facts_of(&der) else { continue };
        if facts.is_authority && (all || facts.is_valid(now)) && !wanted.contains(&facts.pem) && wanted.len() < limit {
            wanted.push(facts.pem);
        }
    }
    wanted.concat()
}

pub(super) fn write(namespace: &str, former: Option<&ConfigMap>, text: &str) -> Result<Effect, CertificateError> {
    let data = BTreeMap::from([(tls::CA_BUNDLE_KEY.to_owned(), text.to_owned())]);
    let Some(former) = former else {
        let map = ConfigMap {
            metadata: ObjectMeta {
                name: Some(tls::CA_CONFIG_MAP.to_owned()),
                namespace: Some(namespace.to_owned()),
                labels: Some(super::owned_labels()),
                ..ObjectMeta::default()
            },
            data: Some(data),
            ..ConfigMap::default()
        };
        return Effect::create(Kind::ConfigMap, Some(namespace), &map).map_err(CertificateError::Json);
    };
    Ok(Effect::merge(Kind::ConfigMap, &former.metadata, json!({"data": data})))
}

/// Returns the change of an object whose bundle differs.
#[must_use]
pub(crate) fn inject(kind: Kind, object: &BundleCarrier, bundle: &str) -> Option<Effect> {
    let stale: Vec<&String> =
        object.bundles.iter().filter(|(_, known)| known != bundle.as_bytes()).map(|(name, _)| name).collect();
    if stale.is_empty() {
        return None;
    }
    let encoded = base64::engine::general_purpose::STANDARD.encode(bundle);
    Some(match kind {
        Kind::ApiService => Effect::merge(kind, &object.metadata, json!({"spec": {"caBundle": encoded}})),
        _ => {
            // Merged by the names of the webhooks, in any order.
            let webhooks: Vec<_> =
                stale.iter().map(|name| json!({"name": name, "clientConfig": {"caBundle": encoded}})).collect();
            Effect::merge(kind, &object.metadata, json!({"webhooks": webhooks})).by_keys()
        }
    })
}
