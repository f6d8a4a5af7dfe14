//! The wire form of admission reviews (`admission.k8s.io/v1`).

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::causes::{Cause, Causes};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// Causes listed in a denial; the rest is counted only.
const CAUSES_SHOWN: usize = 10;
/// Longest text of an error passed back.
const TEXT_MAX: usize = 1024;
/// Longest audit annotation.
const ANNOTATION_MAX: usize = 1024;
/// Audit annotation of an object that was changed: the fields set.
const DEFAULTED: &str = "defaulted-fields";
/// Audit annotation of an object that was refused: the fields at fault.
const REFUSED: &str = "refused-fields";

/// What is done to the object.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// It is made.
    Create,
    /// It is changed.
    Update,
    /// It is deleted.
    Delete,
    /// A connection is opened to it.
    Connect,
}

/// Who asks.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(default)]
pub struct UserInfo {
    /// Name.
    pub username: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Further facts, such as the node a token is bound to.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Group, version and plural of a kind.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(default)]
pub struct Resource {
    /// API group.
    pub group: String,
    /// Version.
    pub version: String,
    /// Plural.
    pub resource: String,
}

/// A question of the API server.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Identifier to echo.
    pub uid: String,
    /// What the object is, in the version the webhook is registered for.
    #[serde(default)]
    pub resource: Resource,
    /// Part of the object written to.
    #[serde(default)]
    pub sub_resource: Option<String>,
    /// Name of the object.
    #[serde(default)]
    pub name: Option<String>,
    /// Namespace of the object.
    #[serde(default)]
    pub namespace: Option<String>,
    /// What is done.
    pub operation: Operation,
    /// Who asks.
    #[serde(default)]
    pub user_info: UserInfo,
    /// The object as it is to be.
    #[serde(default)]
    pub object: Value,
    /// The object as it is.
    #[serde(default)]
    pub old_object: Value,
    /// Whether nothing is to be stored.
    #[serde(default)]
    pub dry_run: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Question {
    #[serde(default)]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
    request: Request,
}

/// As much of a question as an answer needs, however large the rest is.
#[derive(Deserialize)]
struct Named {
    request: NamedRequest,
}

#[derive(Deserialize)]
struct NamedRequest {
    uid: String,
}

impl Question {
    /// Whether it is a question at all that is answered here; what leaves this out is taken for one.
    fn check(self) -> Result<Request, String> {
        let told = |word: &Option<String>| word.clone().filter(|word| !word.is_empty());
        match (told(&self.api_version), told(&self.kind)) {
            (Some(version), _) if version != API_VERSION => Err(format!("{version} is not {API_VERSION}")),
            (_, Some(kind)) if kind != KIND => Err(format!("{kind} is no {KIND}")),
            _ => Ok(self.request),
        }
    }
}

/// An answer to the API server.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReview {
    /// Version of the review.
    pub api_version: &'static str,
    /// Always `AdmissionReview`.
    pub kind: &'static str,
    /// The answer.
    pub response: Response,
}

/// The answer of a review.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Response {
    /// Identifier of the question.
    pub uid: String,
    /// Whether the object is let through.
    pub allowed: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// Changes to the object, a base64 JSON patch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch: Option<String>,
    /// Format of the changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_type: Option<&'static str>,
    /// Sentences shown to the user though the object is let through.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// What the API server puts into its audit log, below the name of the webhook.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub audit_annotations: BTreeMap<&'static str, String>,
}

/// Why an object is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// Sentence for people.
    pub message: String,
    /// HTTP status; 0 leaves it to the API server, which takes 400.
    #[serde(skip_serializing_if = "is_zero")]
    pub code: u16,
    /// `Invalid` when the object breaks rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// The rules broken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(code: &u16) -> bool {
    *code == 0
}

/// The rules broken.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Details {
    /// The first of them.
    pub causes: Vec<Cause>,
}

/// Reads a question; an answer that says what is wrong with it otherwise.
pub fn read(body: &[u8]) -> Result<Request, Box<AdmissionReview>> {
    let question = serde_json::from_slice::<Question>(body).map_err(|error| error.to_string());
    question.and_then(Question::check).map_err(|error| {
        // The identifier lets the API server show the message rather than complain about the answer.
        let uid = serde_json::from_slice::<Named>(body).map(|named| named.request.uid).unwrap_or_default();
        Box::new(AdmissionReview::refused(&uid, 400, format!("cannot read the admission review: {error}")))
    })
}

impl AdmissionReview {
    fn new(response: Response) -> Self {
        Self { api_version: API_VERSION, kind: KIND, response }
    }

    /// Lets the object through as it is.
    pub fn allowed(uid: &str, warnings: Vec<String>) -> Self {
        Self::new(Response { uid: uid.to_owned(), allowed: true, warnings, ..Response::default() })
    }

    /// Lets the object through with changes, a JSON patch; none when the list is empty.
    pub fn patched(uid: &str, patch: &[Value], warnings: Vec<String>) -> Self {
        let mut review = Self::allowed(uid, warnings);
        if !patch.is_empty() {
            let Ok(text) = serde_json::to_vec(patch) else {
                return Self::refused(uid, 500, "the changes cannot be written");
            };
            review.response.patch = Some(STANDARD.encode(text));
            review.response.patch_type = Some("JSONPatch");
            let paths = patch.iter().filter_map(|change| change["path"].as_str());
            review.response.audit_annotations = annotation(DEFAULTED, paths);
        }
        review
    }

    /// Refuses the object for breaking rules. The first few are listed, the rest is counted.
    pub fn invalid(uid: &str, causes: &Causes) -> Self {
        Self::broken(uid, causes, CAUSES_SHOWN, vec![])
    }

    /// Refuses the object for breaking rules, all of which are listed.
    pub fn invalid_in_full(uid: &str, causes: &Causes, warnings: Vec<String>) -> Self {
        Self::broken(uid, causes, usize::MAX, warnings)
    }

    fn broken(uid: &str, causes: &Causes, most: usize, warnings: Vec<String>) -> Self {
        let causes = causes.as_slice();
        let shown = &causes[..causes.len().min(most)];
        let mut message = shown.iter().map(|cause| cause.message.as_str()).collect::<Vec<_>>().join(", ");
        if causes.len() > shown.len() {
            message = format!("{message}, and {} more validation errors", causes.len() - shown.len());
        }
        Self::new(Response {
            uid: uid.to_owned(),
            status: Some(Status {
                message,
                code: 422,
                reason: Some("Invalid"),
                details: Some(Details { causes: shown.to_vec() }),
            }),
            warnings,
            audit_annotations: refused_fields(causes),
            ..Response::default()
        })
    }

    /// Refuses the object for breaking rules, in the form of plugins: the first message stands for all, and there is
    /// no status code.
    pub fn invalid_plugin(uid: &str, causes: &Causes) -> Self {
        let causes = causes.as_slice();
        let shown = &causes[..causes.len().min(CAUSES_SHOWN)];
        Self::new(Response {
            uid: uid.to_owned(),
            status: Some(Status {
                message: shown.first().map(|cause| cause.message.clone()).unwrap_or_default(),
                code: 0,
                reason: Some("Invalid"),
                details: Some(Details { causes: shown.to_vec() }),
            }),
            audit_annotations: refused_fields(causes),
            ..Response::default()
        })
    }

    /// Refuses the request as such.
    pub fn refused(uid: &str, code: u16, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self::new(Response {
            uid: uid.to_owned(),
            status: Some(Status { message: message.chars().take(TEXT_MAX).collect(), code, ..Status::default() }),
            ..Response::default()
        })
    }

    /// The answer to a list of causes: through when it is empty.
    pub fn verdict(uid: &str, causes: &Causes, warnings: Vec<String>) -> Self {
        if causes.is_empty() { Self::allowed(uid, warnings) } else { Self::invalid(uid, causes) }
    }
}

/// One annotation with the texts, as many as fit, each once; none when there are no texts.
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

fn refused_fields(causes: &[Cause]) -> BTreeMap<&'static str, String> {
    annotation(REFUSED, causes.iter().map(|cause| cause.field.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn audit_log_is_told_which_fields_were_set_or_at_fault() {
        let changes = [json!({"op": "add", "path": "/a"}), json!({"op": "add", "path": "/b"})];
        let annotations = AdmissionReview::patched("u", &changes, vec![]).response.audit_annotations;
        assert_eq!(json!(annotations), json!({"defaulted-fields": "/a /b"}));
        assert!(AdmissionReview::patched("u", &[], vec![]).response.audit_annotations.is_empty());
        let mut causes = Causes::new();
        for field in ["spec.x", "", "spec.y", "spec.x"] {
            causes.invalid(field, "m");
        }
        let annotations = AdmissionReview::invalid("u", &causes).response.audit_annotations;
        assert_eq!(json!(annotations), json!({"refused-fields": "spec.x spec.y"}));
        let mut causes = Causes::new();
        (0..1000).for_each(|index| causes.invalid(format!("spec.f{index}"), "m"));
        let annotations = AdmissionReview::invalid_in_full("u", &causes, vec![]).response.audit_annotations;
        let text = &annotations["refused-fields"];
        assert!(text.len() <= ANNOTATION_MAX && text.ends_with(" ..."), "{text}");
    }

    #[test]
    fn unreadable_body_is_refused_with_its_uid() {
        let review = read(br#"{"request": {"uid": "u1", "operation": "DANCE"}}"#).unwrap_err();
        assert_eq!(review.response.uid, "u1");
        assert!(!review.response.allowed);
        assert_eq!(review.response.status.as_ref().unwrap().code, 400);
        for (body, why) in [
            (
                r#"{"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "u", "operation": "CREATE"}}"#,
                "v1beta1",
            ),
            (r#"{"kind": "Pod", "request": {"uid": "u", "operation": "CREATE"}}"#, "Pod is no AdmissionReview"),
        ] {
            let response = read(body.as_bytes()).unwrap_err().response;
            assert_eq!(response.uid, "u");
            assert!(response.status.unwrap().message.contains(why));
        }
        for body in [&b""[..], b"{", b"[]", b"\xff\xfe", b"null", br#"{"request": null}"#] {
            let review = read(body).unwrap_err();
            assert!(!review.response.allowed);
        }
    }

    #[test]
    fn denial_lists_ten_causes_and_counts_the_rest() {
        let mut causes = Causes::new();
        for index in 0..12 {
            causes.invalid(format!("spec.f{index}"), format!("m{index}"));
        }
        let status = AdmissionReview::invalid("u", &causes).response.status.unwrap();
        assert_eq!(status.details.unwrap().causes.len(), 10);
        assert!(status.message.ends_with("m9, and 2 more validation errors"));
        assert_eq!((status.code, status.reason), (422, Some("Invalid")));
    }

    #[test]
    fn wire_form_is_that_of_kubernetes() {
        let review = AdmissionReview::patched("u", &[json!({"op": "add", "path": "/a", "value": 1})], vec![]);
        let wire = serde_json::to_value(&review).unwrap();
        assert_eq!(wire["kind"], "AdmissionReview");
        assert_eq!(wire["response"]["patchType"], "JSONPatch");
        assert_eq!(wire["response"].get("status"), None);
        let mut causes = Causes::new();
        causes.required("spec.x", "x is missing");
        let wire = serde_json::to_value(AdmissionReview::invalid("u", &causes)).unwrap();
        assert_eq!(
            wire["response"]["status"]["details"]["causes"][0],
            json!({"reason": "FieldValueRequired", "message": "x is missing", "field": "spec.x"})
        );
    }
}
