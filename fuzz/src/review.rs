//! Shared by all checks: calls webhooks and checks properties of every answer.

use admission::{AdmissionReview, LookupResult, Lookups, ObjectQuery, Selection, context::lookups::MAX_ROUNDS, handle};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

/// UID of all reviews. Generated values depend on it, so they are reproducible.
const UID: &str = "0c8f1c9e-3a0d-4f6e-9f55-6b0a4a4b6f11";

/// Returns the answer to a body, for a cluster without other objects.
pub(crate) fn answer(path: &str, body: &[u8]) -> AdmissionReview {
    let config = ClusterConfig::default();
    let mut lookups = Lookups::new();
    for _ in 0..=MAX_ROUNDS {
        match handle(path, body, &config, "kubevirt", &lookups) {
            Ok(evaluation) => {
                check(&evaluation.review);
                return evaluation.review;
            }
            Err(queries) => {
                assert!(!queries.is_empty(), "{path} requests no lookups");
                for query in queries {
                    let result = nothing(&query);
                    lookups.insert(query, result);
                }
            }
        }
    }
    panic!("{path} exceeds the rounds of lookups")
}

fn nothing(query: &ObjectQuery) -> LookupResult {
    // Covers the path of the request that the server would send.
    let _ = query.collection();
    let _ = query.to_string();
    match &query.selection {
        Selection::List { .. } => LookupResult::List(vec![]),
        Selection::Get { .. } | Selection::AccessReview { .. } => LookupResult::Object(None),
    }
}

/// A call of a webhook.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    /// Path of the webhook.
    pub path: &'a str,
    /// Group, version and plural of the kind.
    pub resource: [&'a str; 3],
    /// Operation of the request.
    pub operation: &'a str,
    /// User of the request.
    pub user: &'a str,
}

impl<'a> Call<'a> {
    /// Parses `PATH GROUP/VERSION/PLURAL OPERATION USER`; the core group is empty.
    pub(crate) fn read(line: &'a str) -> Option<Self> {
        let mut words = line.split(' ');
        let path = words.next()?;
        let mut resource = words.next()?.splitn(3, '/');
        let resource = [resource.next()?, resource.next()?, resource.next()?];
        Some(Self { path, resource, operation: words.next()?, user: words.next()? })
    }

    /// Returns the answer for an object.
    pub(crate) fn ask(self, object: &Value, old: &Value) -> AdmissionReview {
        let [group, version, plural] = self.resource;
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": UID, "name": "a", "namespace": "default", "operation": self.operation,
                "resource": {"group": group, "version": version, "resource": plural},
                "userInfo": {"username": self.user, "extra": {"authentication.kubernetes.io/node-name": ["n1"]}},
                "object": object, "oldObject": old,
            },
        });
        answer(self.path, review.to_string().as_bytes())
    }
}

/// Checks properties of every answer.
fn check(review: &AdmissionReview) {
    let wire = serde_json::to_value(review).expect("the answer can be written");
    let response = &wire["response"];
    assert_eq!(response.get("patch").is_some(), response.get("patchType").is_some(), "{wire}");
    if response["allowed"] == true {
        return;
    }
    assert!(response.get("patch").is_none(), "denied with a patch: {wire}");
    let status = &response["status"];
    assert!(status["message"].as_str().is_some_and(|text| !text.is_empty()), "denied without a message: {wire}");
    assert!(status["code"].as_u64().is_some_and(|code| (400..600).contains(&code)), "{wire}");
    if status["reason"] == "Invalid" {
        assert!(status["details"]["causes"].as_array().is_some_and(|causes| !causes.is_empty()), "{wire}");
    }
}

/// Applies the patch of an answer to the object.
pub(crate) fn patched(object: &Value, review: &AdmissionReview) -> Value {
    let mut object = object.clone();
    if let Some(patch) = &review.response.patch {
        let patch = STANDARD.decode(patch).expect("the patch is base64");
        let patch: json_patch::Patch = serde_json::from_slice(&patch).expect("the patch is a JSON patch");
        json_patch::patch(&mut object, &patch).expect("the patch applies");
    }
    object
}
