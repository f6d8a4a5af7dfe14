//! Format of answers.

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use ferrovirt_e2e_tests::webhook::Answer;
use serde_json::Value;

/// Reasons of causes that clients of Kubernetes know.
const CAUSES: [&str; 8] = [
    "FieldValueNotFound",
    "FieldValueRequired",
    "FieldValueDuplicate",
    "FieldValueInvalid",
    "FieldValueNotSupported",
    "FieldValueForbidden",
    "FieldManagerConflict",
    "UnexpectedServerResponse",
];

/// Returns the response to the request with this UID, after checking its form by `admission.k8s.io/v1`.
pub(crate) fn response(answer: &Answer, uid: &str) -> Result<Value> {
    ensure!(answer.status == 200, "HTTP status {}: {:?}", answer.status, answer.body);
    let review: Value = serde_json::from_slice(&answer.body).context("the answer is not JSON")?;
    check(&review, uid).with_context(|| format!("in the answer {review}"))?;
    Ok(review["response"].clone())
}

fn check(review: &Value, uid: &str) -> Result<()> {
    let fields = review.as_object().context("the answer is not an object")?;
    for field in fields.keys() {
        ensure!(["apiVersion", "kind", "response"].contains(&field.as_str()), "unknown field {field}");
    }
    ensure!(review["apiVersion"] == "admission.k8s.io/v1", "wrong apiVersion");
    ensure!(review["kind"] == "AdmissionReview", "wrong kind");
    let response = &review["response"];
    ensure!(response["uid"] == uid, "the uid is not {uid}");
    let allowed = response["allowed"].as_bool().context("allowed is missing")?;
    match (response.get("patch"), response.get("patchType")) {
        (None, None) => {}
        (Some(patch), Some(type_)) => {
            ensure!(allowed, "a refused object is patched");
            ensure!(type_ == "JSONPatch", "unknown type of patch");
            let patch = patch.as_str().context("the patch is not a text")?;
            let patch = STANDARD.decode(patch).context("the patch is not base64")?;
            let patch: json_patch::Patch = serde_json::from_slice(&patch).context("the patch is no JSON patch")?;
            ensure!(!patch.is_empty(), "the patch is empty");
        }
        _ => bail!("patch and patchType do not go together"),
    }
    if let Some(warnings) = response.get("warnings") {
        let warnings = warnings.as_array().context("the warnings are no list")?;
        ensure!(warnings.iter().all(|w| w.as_str().is_some_and(|w| !w.is_empty())), "a warning is no sentence");
    }
    if !allowed {
        check_status(&response["status"])?;
    }
    Ok(())
}

fn check_status(status: &Value) -> Result<()> {
    let message = status["message"].as_str().context("the refusal has no message")?;
    ensure!(!message.trim().is_empty(), "the message of the refusal is empty");
    let code = status["code"].as_u64().context("the refusal has no code")?;
    ensure!((400..600).contains(&code), "the code of the refusal is {code}");
    if status["reason"] != "Invalid" {
        return Ok(());
    }
    ensure!(code == 422, "an invalid object has code {code}");
    let causes = status["details"]["causes"].as_array().context("an invalid object without causes")?;
    ensure!(!causes.is_empty(), "an invalid object without causes");
    for cause in causes {
        ensure!(cause["message"].as_str().is_some_and(|text| !text.is_empty()), "a cause without a message");
        ensure!(cause["field"].is_null() || cause["field"].is_string(), "the field of a cause is no text");
        let known = cause["reason"].as_str().is_none_or(|reason| CAUSES.contains(&reason));
        ensure!(known, "unknown reason {}", cause["reason"]);
    }
    Ok(())
}

/// Checks that a request is allowed.
pub(crate) fn allowed(answer: &Answer, uid: &str) -> Result<Value> {
    let response = response(answer, uid)?;
    ensure!(response["allowed"] == true, "refused: {response}");
    Ok(response)
}

/// Checks that a request is denied.
pub(crate) fn refused(answer: &Answer, uid: &str) -> Result<Value> {
    let response = response(answer, uid)?;
    ensure!(response["allowed"] == false, "allowed: {response}");
    Ok(response)
}

/// Checks that a malformed request is refused by status or review, and never allowed.
pub(crate) fn turned_away(answer: &Answer, what: &str) -> Result<()> {
    if (400..600).contains(&answer.status) {
        let review: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        ensure!(review["response"]["allowed"] != true, "{what}: {} but allowed", answer.status);
        return Ok(());
    }
    let review: Value = serde_json::from_slice(&answer.body).with_context(|| format!("{what}: no JSON"))?;
    let uid = review["response"]["uid"].as_str().with_context(|| format!("{what}: no uid"))?;
    refused(answer, uid).with_context(|| what.to_owned())?;
    Ok(())
}

/// Applies the patch of a response. Returns the object, and true if there was a patch.
pub(crate) fn patched(object: &Value, response: &Value) -> Result<(Value, bool)> {
    let mut object = object.clone();
    let Some(patch) = response["patch"].as_str() else { return Ok((object, false)) };
    let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch)?)?;
    json_patch::patch(&mut object, &patch).with_context(|| format!("the patch does not apply: {response}"))?;
    Ok((object, true))
}
