//! Reading what admission rules want to know of other objects.
//!
//! One request per [`Wanted`], a few at a time. Answers are bounded: a list longer than the rules take is an error
//! rather than a truth half told.

use admission::neighbours::{Ask, MAX_LIST, Neighbours, Outcome, Wanted};
use futures::{StreamExt, stream};
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use kube::{
    Client,
    api::{GetParams, ListParams, Patch, PatchParams, PostParams},
    core::Request,
};
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::webhooks::weight;

/// Requests of one review under way at a time.
const PARALLEL: usize = 8;
/// Largest answer. Only lists come near this.
const MAX_ANSWER: usize = 8 << 20;
/// Longest error text passed on.
const MAX_MESSAGE: usize = 512;

/// Reads what is wanted, into `neighbours`. What it takes of the memory for answers is put into `taken`.
pub async fn read<'a>(
    client: &Client,
    wanted: Vec<Wanted>,
    neighbours: &mut Neighbours,
    room: &'a Semaphore,
    taken: &mut Vec<SemaphorePermit<'a>>,
) {
    let mut answers = stream::iter(wanted)
        .map(|wanted| async move {
            let (outcome, share) = ask(client, &wanted, room).await;
            (wanted, outcome, share)
        })
        .buffer_unordered(PARALLEL);
    while let Some((wanted, outcome, share)) = answers.next().await {
        taken.extend(share);
        neighbours.insert(wanted, outcome);
    }
}

async fn ask<'a>(client: &Client, wanted: &Wanted, room: &'a Semaphore) -> (Outcome, Option<SemaphorePermit<'a>>) {
    let failed = |message: String| (Outcome::Failed { code: 0, message }, None);
    let Some(path) = wanted.collection() else { return (Outcome::Object(None), None) };
    let request = match request(&path, &wanted.ask) {
        Ok(request) => request,
        Err(message) => return failed(message),
    };
    let response = match client.send(request.map(Into::into)).await {
        Ok(response) => response,
        Err(error) => return failed(error.to_string()),
    };
    let status = response.status();
    let body = match Limited::new(response.into_body(), MAX_ANSWER).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return failed(format!("the answer cannot be read: {error}")),
    };
    let weight = u32::try_from(weight(&body)).unwrap_or(u32::MAX);
    let Ok(share) = room.try_acquire_many(weight) else {
        return failed("too much is read for admission reviews, try again".to_owned());
    };
    (outcome(&wanted.ask, status, &body), Some(share))
}

fn request(path: &str, ask: &Ask) -> Result<http::Request<Vec<u8>>, String> {
    let request = Request::new(path);
    let made = match ask {
        Ask::Get { name } => request.get(name, &GetParams::default()),
        Ask::List { labels, first } => {
            let params = ListParams::default().limit(first.unwrap_or(MAX_LIST));
            let params = if labels.is_empty() { params } else { params.labels(labels) };
            request.list(&params)
        }
        Ask::DryRunCreate { object } => {
            request.create(&PostParams { dry_run: true, ..PostParams::default() }, object.clone().into_bytes())
        }
        Ask::Patch { name, patch, dry_run } => {
            let patch: json_patch::Patch = serde_json::from_str(patch).map_err(|error| error.to_string())?;
            let params = PatchParams { dry_run: *dry_run, ..PatchParams::default() };
            request.patch(name, &params, &Patch::Json::<()>(patch))
        }
    };
    made.map_err(|error| error.to_string())
}

/// What an answer of the API server means.
fn outcome(ask: &Ask, status: StatusCode, body: &[u8]) -> Outcome {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    if !status.is_success() {
        // Not found: the object, or its kind. For writes that is a failure like any other.
        if status == StatusCode::NOT_FOUND && matches!(ask, Ask::Get { .. } | Ask::List { .. }) {
            return Outcome::Object(None);
        }
        let message = match value.get("message").and_then(Value::as_str) {
            Some(message) => message.chars().take(MAX_MESSAGE).collect(),
            None => status.to_string(),
        };
        return Outcome::Failed { code: status.as_u16(), message };
    }
    let Value::Object(mut value) = value else {
        return Outcome::Failed { code: 0, message: "the answer is no object".to_owned() };
    };
    let Ask::List { first, .. } = ask else { return Outcome::Object(Some(Value::Object(value))) };
    let more = value
        .get("metadata")
        .and_then(|metadata| metadata.get("continue"))
        .is_some_and(|token| token.as_str().is_some_and(|token| !token.is_empty()));
    if more && first.is_none() {
        return Outcome::Failed { code: 0, message: format!("there are more than {MAX_LIST}") };
    }
    match value.remove("items") {
        Some(Value::Array(items)) => Outcome::List(items),
        _ => Outcome::List(vec![]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GET: Ask = Ask::Get { name: String::new() };
    const LIST: Ask = Ask::List { labels: String::new(), first: None };

    fn answered(ask: &Ask, status: u16, body: &Value) -> Outcome {
        outcome(ask, StatusCode::from_u16(status).unwrap(), body.to_string().as_bytes())
    }

    #[test]
    fn answers_are_told_apart() {
        assert_eq!(answered(&GET, 200, &json!({"a": 1})), Outcome::Object(Some(json!({"a": 1}))));
        assert_eq!(answered(&GET, 404, &json!({"message": "no such"})), Outcome::Object(None));
        assert_eq!(answered(&LIST, 200, &json!({"items": [1, 2]})), Outcome::List(vec![json!(1), json!(2)]));
        assert_eq!(answered(&LIST, 200, &json!({"items": null})), Outcome::List(vec![]));
        let refusal = answered(&GET, 403, &json!({"message": "forbidden"}));
        assert_eq!(refusal, Outcome::Failed { code: 403, message: "forbidden".into() });
        let broken = outcome(&GET, StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(broken, Outcome::Failed { code: 502, message: "502 Bad Gateway".into() });
        assert!(matches!(outcome(&GET, StatusCode::OK, b"x"), Outcome::Failed { .. }));
        let patch = Ask::Patch { name: "a".into(), patch: "[]".into(), dry_run: false };
        assert!(matches!(answered(&patch, 404, &json!({"message": "gone"})), Outcome::Failed { code: 404, .. }));
    }

    #[test]
    fn list_cut_short_is_a_failure_unless_its_start_was_asked_for() {
        let cut = json!({"metadata": {"continue": "token"}, "items": [1]});
        assert!(matches!(answered(&LIST, 200, &cut), Outcome::Failed { .. }));
        let first = Ask::List { labels: String::new(), first: Some(1) };
        assert_eq!(answered(&first, 200, &cut), Outcome::List(vec![json!(1)]));
    }

    #[test]
    fn requests_are_those_of_the_api() {
        let made = |wanted: &Wanted| {
            let request = request(&wanted.collection().unwrap(), &wanted.ask).unwrap();
            // An empty query is kept or not, by the version of the library that reads it.
            (request.method().to_string(), request.uri().to_string().trim_end_matches('?').to_owned())
        };
        let get = Wanted::get("", "v1", "pods", Some("ns"), "a");
        assert_eq!(made(&get), ("GET".into(), "/api/v1/namespaces/ns/pods/a".into()));
        let list = Wanted::list("kubevirt.io", "v1", "virtualmachines", None, "a=b,c");
        let uri = "/apis/kubevirt.io/v1/virtualmachines?&labelSelector=a%3Db%2Cc&limit=1000";
        assert_eq!(made(&list), ("GET".into(), uri.into()));
        let dry = Wanted::dry_run_create("apps", "v1", "deployments", "ns", &json!({}));
        assert_eq!(made(&dry), ("POST".into(), "/apis/apps/v1/namespaces/ns/deployments?&dryRun=All".into()));
        let patch = Wanted::patch(["", "v1", "pods"], Some("ns"), "a", &json!([]), true);
        assert_eq!(made(&patch), ("PATCH".into(), "/api/v1/namespaces/ns/pods/a?&dryRun=All".into()));
    }
}
