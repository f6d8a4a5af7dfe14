//! Responses of admission reviews (`admission.k8s.io/v1`).
//!
//! `kube::core::admission::AdmissionResponse` does not fit: it writes the patch as an array of numbers instead of base64
//! and a status with every response, and it can be created only from kube's request (see [`super::request`]). The status
//! is kube's.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use json_patch::Patch;
use kube::core::{
    Status,
    response::{StatusCause, StatusDetails},
};
use serde::Serialize;

use super::{
    Failure,
    field_errors::{FieldError, FieldErrors},
    outcome::{DenialForm, Outcome},
};

pub(super) const API_VERSION: &str = "admission.k8s.io/v1";
pub(super) const KIND: &str = "AdmissionReview";
/// Errors listed in a denial; the others are counted.
const ERRORS_MAX: usize = 10;
/// Longest text of a failure.
const TEXT_MAX: usize = 1024;
/// Longest audit annotation.
const ANNOTATION_MAX: usize = 1024;
/// Field of an error that concerns no single one.
const WHOLE: &str = "spec";
/// Audit annotation with the fields that were changed.
const DEFAULTED: &str = "defaulted-fields";
/// Audit annotation with the fields that have errors.
const REFUSED: &str = "refused-fields";

/// Admission review with a response.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReview {
    api_version: &'static str,
    kind: &'static str,
    /// The response.
    pub response: AdmissionResponse,
}

/// Response of an admission review.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionResponse {
    /// Identifier of the request.
    pub uid: String,
    /// True if the request passes.
    pub allowed: bool,
    /// Reason of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// Changes to the object, a JSON patch in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch: Option<String>,
    /// Format of the changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_type: Option<&'static str>,
    /// Warnings for the user.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Entries for the audit log of the API server, which prefixes them with the name of the webhook.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub audit_annotations: BTreeMap<&'static str, String>,
}

impl From<AdmissionResponse> for AdmissionReview {
    fn from(response: AdmissionResponse) -> Self {
        Self { api_version: API_VERSION, kind: KIND, response }
    }
}

impl AdmissionReview {
    /// Returns the review with an outcome.
    pub(crate) fn new(uid: &str, outcome: Outcome) -> Self {
        match outcome {
            Outcome::Allowed { patch, warnings } => Self::allowed(uid, &patch, warnings),
            Outcome::Denied { errors, warnings, form } => Self::denied(uid, &errors, warnings, form),
            Outcome::Failed(failure) => Self::from_failure(uid, failure),
        }
    }

    /// Fails the request with an HTTP status and a message.
    pub fn failed(uid: &str, code: u16, message: impl Into<String>) -> Self {
        Self::from_failure(uid, Failure::new(code, message))
    }

    fn allowed(uid: &str, patch: &Patch, warnings: Vec<String>) -> Self {
        let mut response =
            AdmissionResponse { uid: uid.to_owned(), allowed: true, warnings, ..AdmissionResponse::default() };
        if !patch.is_empty() {
            let Ok(text) = serde_json::to_vec(patch) else {
                return Self::failed(uid, 500, "the changes cannot be written");
            };
            response.patch = Some(STANDARD.encode(text));
            response.patch_type = Some("JSONPatch");
            response.audit_annotations = annotation(DEFAULTED, patch.iter().map(|change| change.path().as_str()));
        }
        response.into()
    }

    fn denied(uid: &str, errors: &FieldErrors, warnings: Vec<String>, form: DenialForm) -> Self {
        let errors = errors.as_slice();
        let max = if form == DenialForm::Full { usize::MAX } else { ERRORS_MAX };
        let shown = &errors[..errors.len().min(max)];
        let mut messages = Vec::new();
        for message in shown.iter().map(|error| error.message.as_str()) {
            if !messages.contains(&message) {
                messages.push(message);
            }
        }
        let (code, message) = match form {
            DenialForm::FirstMessage => (0, messages.first().copied().unwrap_or_default().to_owned()),
            DenialForm::Abbreviated | DenialForm::Full => {
                let message = messages.join(", ");
                let hidden = errors.len() - shown.len();
                (422, if hidden == 0 { message } else { format!("{message}, and {hidden} more validation errors") })
            }
        };
        let details = StatusDetails {
            causes: shown.iter().map(cause).collect(),
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            retry_after_seconds: 0,
        };
        let status =
            Status { message, code, reason: "Invalid".to_owned(), details: Some(details), ..Status::default() };
        AdmissionResponse {
            uid: uid.to_owned(),
            status: Some(status),
            warnings,
            audit_annotations: annotation(REFUSED, errors.iter().map(|error| error.field.as_str())),
            ..AdmissionResponse::default()
        }
        .into()
    }

    fn from_failure(uid: &str, Failure { code, message }: Failure) -> Self {
        let status = Status { message: message.chars().take(TEXT_MAX).collect(), code, ..Status::default() };
        AdmissionResponse { uid: uid.to_owned(), status: Some(status), ..AdmissionResponse::default() }.into()
    }
}

/// Returns the cause of an error. kubectl prints `FIELD: MESSAGE`, so each cause has a field and its message does not repeat
/// it. The message of the status, which clients match, is not changed.
fn cause(error: &FieldError) -> StatusCause {
    let field = if error.field.is_empty() { WHOLE } else { &error.field };
    StatusCause {
        reason: error.type_.map(|type_| type_.as_str().to_owned()).unwrap_or_default(),
        message: without_field(field, &error.message).to_owned(),
        field: field.to_owned(),
    }
}

/// Returns a message without the field, or a field that contains it, at its beginning.
fn without_field<'a>(field: &str, message: &'a str) -> &'a str {
    let Some((word, rest)) = message.split_once(' ') else { return message };
    let path = word.trim_end_matches(':').trim_start_matches('.');
    let contains = field.split_at_checked(path.len()).is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(path) && rest.chars().next().is_none_or(|next| ".[#".contains(next))
    });
    // "A and B must differ" needs both.
    if path.is_empty() || !contains || rest.starts_with("and ") {
        return message;
    }
    rest.strip_prefix("in body ").unwrap_or(rest)
}

/// Returns one annotation with as many of the texts as fit, without duplicates; nothing if there are no texts.
fn annotation<'a>(name: &'static str, texts: impl Iterator<Item = &'a str>) -> BTreeMap<&'static str, String> {
    let mut seen = Vec::new();
    let mut value = String::new();
    for text in texts.filter(|text| !text.is_empty()) {
        if seen.contains(&text) {
            continue;
        }
        if value.len() + text.len() + 5 > ANNOTATION_MAX {
            value.push_str(" ...");
            break;
        }
        if !value.is_empty() {
            value.push(' ');
        }
        value.push_str(text);
        seen.push(text);
    }
    if value.is_empty() { BTreeMap::new() } else { BTreeMap::from([(name, value)]) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn patched(patch: Value) -> AdmissionReview {
        AdmissionReview::new("u", Outcome::Allowed { patch: from_value(patch).unwrap(), warnings: vec![] })
    }

    fn denied(errors: FieldErrors, form: DenialForm) -> AdmissionReview {
        AdmissionReview::new("u", Outcome::Denied { errors, warnings: vec![], form })
    }

    #[test]
    fn audit_annotations_name_changed_and_refused_fields() {
        let changes = json!([{"op": "add", "path": "/a", "value": 1}, {"op": "add", "path": "/b", "value": 1}]);
        assert_eq!(json!(patched(changes).response.audit_annotations), json!({"defaulted-fields": "/a /b"}));
        assert!(patched(json!([])).response.audit_annotations.is_empty());
        let mut errors = FieldErrors::new();
        for field in ["spec.x", "", "spec.y", "spec.x"] {
            errors.invalid(field, "m");
        }
        let annotations = denied(errors, DenialForm::Abbreviated).response.audit_annotations;
        assert_eq!(json!(annotations), json!({"refused-fields": "spec.x spec.y"}));
        let mut errors = FieldErrors::new();
        (0..1000).for_each(|index| errors.invalid(format!("spec.f{index}"), "m"));
        let annotations = denied(errors, DenialForm::Full).response.audit_annotations;
        let text = &annotations["refused-fields"];
        assert!(text.len() <= ANNOTATION_MAX && text.ends_with(" ..."), "{text}");
    }

    #[test]
    fn denial_lists_ten_errors_and_counts_the_others() {
        let mut errors = FieldErrors::new();
        for index in 0..12 {
            errors.invalid(format!("spec.f{index}"), format!("m{index}"));
        }
        let status = denied(errors, DenialForm::Abbreviated).response.status.unwrap();
        assert_eq!(status.details.unwrap().causes.len(), 10);
        assert!(status.message.ends_with("m9, and 2 more validation errors"));
        assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"));
    }

    #[test]
    fn causes_name_the_field_once() {
        for (field, message, shown, expected) in [
            ("spec.a.tpm", "spec.a.tpm is not supported yet: a TPM", "spec.a.tpm", "is not supported yet: a TPM"),
            ("spec.d[1].name", "spec.d[1].Name 'x' not found.", "spec.d[1].name", "'x' not found."),
            (
                "spec.d[1].bootOrder",
                "spec.d[1] must have an order > 0",
                "spec.d[1].bootOrder",
                "must have an order > 0",
            ),
            ("spec.ttl", "spec.ttl: \"x\" is not a duration", "spec.ttl", "\"x\" is not a duration"),
            ("spec.v[1].name", "spec.v[1] and spec.v[0] differ", "spec.v[1].name", "spec.v[1] and spec.v[0] differ"),
            ("spec.d[10].name", "spec.d[1].name is odd", "spec.d[10].name", "spec.d[1].name is odd"),
            ("spec.x", "spec.xy is odd", "spec.x", "spec.xy is odd"),
            ("", "update of VMI object is restricted", "spec", "update of VMI object is restricted"),
        ] {
            let mut errors = FieldErrors::new();
            errors.invalid(field, message);
            errors.invalid(field, message);
            let status = denied(errors, DenialForm::Abbreviated).response.status.unwrap();
            let causes = status.details.unwrap().causes;
            assert_eq!((causes[0].field.as_str(), causes[0].message.as_str()), (shown, expected));
            assert_eq!((causes.len(), status.message.as_str()), (2, message));
        }
        let mut errors = FieldErrors::new();
        errors.schema("spec.domain.x in body is a forbidden property");
        errors.schema(".extra in body is a forbidden property");
        let causes = denied(errors, DenialForm::Full).response.status.unwrap().details.unwrap().causes;
        let shown: Vec<_> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        assert_eq!(shown, ["spec.domain.x: is a forbidden property", "extra: is a forbidden property"]);
    }

    #[test]
    fn json_follows_the_kubernetes_api() {
        let wire = serde_json::to_value(patched(json!([{"op": "add", "path": "/a", "value": 1}]))).unwrap();
        assert_eq!(wire["kind"], "AdmissionReview");
        assert_eq!(wire["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(wire["response"]["patchType"], "JSONPatch");
        assert_eq!(wire["response"].get("status"), None);
        let mut errors = FieldErrors::new();
        errors.required("spec.x", "x is missing");
        errors.schema("spec in body is required");
        let wire = serde_json::to_value(denied(errors, DenialForm::Abbreviated)).unwrap();
        assert_eq!(
            wire["response"]["status"],
            json!({
                "message": "x is missing, spec in body is required",
                "code": 422,
                "reason": "Invalid",
                "details": {"causes": [
                    {"reason": "FieldValueRequired", "message": "x is missing", "field": "spec.x"},
                    {"message": "is required", "field": "spec"},
                ]},
            })
        );
    }
}
