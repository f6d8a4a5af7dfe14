//! What the checks share: asking the webhooks, and what must hold of every answer.

use admission::{
    AdmissionReview, handle,
    neighbours::{Ask, MAX_ROUNDS, Neighbours, Outcome, Wanted},
};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

/// Identifier in all reviews made here: the same one gives the same made-up values.
const UID: &str = "0c8f1c9e-3a0d-4f6e-9f55-6b0a4a4b6f11";

/// The answer to a body, in a cluster that holds nothing else.
pub(crate) fn answer(path: &str, body: &[u8]) -> AdmissionReview {
    let config = ClusterConfig::default();
    let mut known = Neighbours::new();
    for _ in 0..=MAX_ROUNDS {
        match handle(path, body, &config, "kubevirt", &known) {
            Ok(review) => {
                check(&review);
                return review;
            }
            Err(wanted) => {
                assert!(!wanted.is_empty(), "{path} wants nothing");
                for wanted in wanted {
                    let outcome = nothing(&wanted);
                    known.insert(wanted, outcome);
                }
            }
        }
    }
    panic!("{path} asks for more and more")
}

fn nothing(wanted: &Wanted) -> Outcome {
    // The server makes the path of whatever is asked for.
    let _ = wanted.collection();
    let _ = wanted.to_string();
    match &wanted.ask {
        Ask::List { .. } => Outcome::List(vec![]),
        _ => Outcome::Object(None),
    }
}

/// What is done by whom to objects of which kind.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    /// Path of the webhook.
    pub path: &'a str,
    /// Group, version and plural of the kind.
    pub resource: [&'a str; 3],
    /// What is done.
    pub operation: &'a str,
    /// Who does it.
    pub user: &'a str,
}

impl<'a> Call<'a> {
    /// Reads `PATH GROUP/VERSION/PLURAL OPERATION USER`; the core group is empty.
    pub(crate) fn read(line: &'a str) -> Option<Self> {
        let mut words = line.split(' ');
        let path = words.next()?;
        let mut resource = words.next()?.splitn(3, '/');
        let resource = [resource.next()?, resource.next()?, resource.next()?];
        Some(Self { path, resource, operation: words.next()?, user: words.next()? })
    }

    /// The answer about an object.
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

/// What holds of every answer.
fn check(review: &AdmissionReview) {
    let wire = serde_json::to_value(review).expect("the answer can be written");
    let response = &wire["response"];
    assert_eq!(response.get("patch").is_some(), response.get("patchType").is_some(), "{wire}");
    if response["allowed"] == true {
        return;
    }
    assert!(response.get("patch").is_none(), "refused and patched: {wire}");
    let status = &response["status"];
    assert!(status["message"].as_str().is_some_and(|text| !text.is_empty()), "refused without a word: {wire}");
    assert!(status["code"].as_u64().is_some_and(|code| (400..600).contains(&code)), "{wire}");
    if status["reason"] == "Invalid" {
        assert!(status["details"]["causes"].as_array().is_some_and(|causes| !causes.is_empty()), "{wire}");
    }
}

/// The object after the patch of an answer.
pub(crate) fn patched(object: &Value, review: &AdmissionReview) -> Value {
    let mut object = object.clone();
    if let Some(patch) = &review.response.patch {
        let patch = STANDARD.decode(patch).expect("the patch is base64");
        let patch: json_patch::Patch = serde_json::from_slice(&patch).expect("the patch is a JSON patch");
        json_patch::patch(&mut object, &patch).expect("the patch applies");
    }
    object
}
