//! Requests of admission reviews (`admission.k8s.io/v1`).
//!
//! `kube::core::admission::AdmissionRequest` does not fit: it needs an object with decoded metadata, while rules need the
//! JSON as sent to find unknown fields and to compute patches; its review buffers the whole body once more
//! (`#[serde(flatten)]`), which doubles the memory of a request. The types of its fields do fit and are used.

use k8s_openapi::api::authentication::v1::UserInfo;
use kube::core::GroupVersionResource;
use serde::Deserialize;
use serde_json::Value;

use super::response::{API_VERSION, KIND};

/// Served versions of the group `kubevirt.io`.
const VERSIONS: [&str; 2] = [api::constants::VERSION, "v1alpha3"];

/// Operation on the object. (`kube::core::admission::Operation` is not `Copy`.)
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// Creates the object.
    Create,
    /// Changes the object.
    Update,
    /// Deletes the object.
    Delete,
    /// Connects to the object.
    Connect,
}

/// Request of the API server.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionRequest {
    /// Identifier that the response repeats.
    pub uid: String,
    /// Resource of the object, in the version the webhook is registered for.
    pub resource: GroupVersionResource,
    /// Name of the object.
    #[serde(default)]
    pub name: Option<String>,
    /// Namespace of the object.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Operation on the object.
    pub operation: Operation,
    /// User that sent the request.
    #[serde(default)]
    pub user_info: UserInfo,
    /// The new object.
    #[serde(default)]
    pub object: Value,
    /// The stored object.
    #[serde(default)]
    pub old_object: Value,
    /// True if nothing is stored.
    #[serde(default)]
    pub dry_run: Option<bool>,
    /// Options of the operation, such as the grace period of a deletion.
    #[serde(default)]
    pub options: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    #[serde(default)]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
    request: AdmissionRequest,
}

/// The part of a review that a response needs.
#[derive(Deserialize)]
struct UidOnly {
    request: RequestUid,
}

#[derive(Deserialize)]
struct RequestUid {
    uid: String,
}

/// A body that is not an admission review.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ParseError {
    /// Not JSON, or a field is missing or has the wrong type.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Another API version.
    #[error("{0} is not {API_VERSION}")]
    ApiVersion(String),
    /// Another kind.
    #[error("{0} is no {KIND}")]
    Kind(String),
}

/// Parses the body of an admission review. API version and kind may be missing.
pub(crate) fn parse(body: &[u8]) -> Result<AdmissionRequest, ParseError> {
    let review: Review = serde_json::from_slice(body)?;
    let is_other = |text: &String, expected: &str| !text.is_empty() && text != expected;
    if let Some(version) = review.api_version.filter(|version| is_other(version, API_VERSION)) {
        return Err(ParseError::ApiVersion(version));
    }
    match review.kind.filter(|kind| is_other(kind, KIND)) {
        Some(kind) => Err(ParseError::Kind(kind)),
        None => Ok(review.request),
    }
}

/// Returns the UID of a review that cannot be parsed; empty if it has none. With it the API server shows the message of
/// the response instead of an error about the response.
pub(crate) fn uid(body: &[u8]) -> String {
    serde_json::from_slice::<UidOnly>(body).map(|review| review.request.uid).unwrap_or_default()
}

/// Returns true if a resource of the group `kubevirt.io` has a served version. Webhooks of other groups check that
/// themselves.
pub(crate) fn is_served(resource: &GroupVersionResource) -> bool {
    resource.group != api::constants::GROUP || VERSIONS.contains(&resource.version.as_str())
}
