//! Lookups of other objects for admission rules, and the writes that rules return.
//!
//! One request a query, a few at a time. Responses are bounded: a list that is longer than the rules accept is an error, not
//! a truncated list. A list of which a rule needs only some objects is read by pages.

use admission::{Effect, LookupResult, Lookups, ObjectQuery, Selection, context::lookups::MAX_LIST};
use futures::{StreamExt, stream};
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use kube::{
    Client,
    api::{GetParams, ListParams, Patch, PatchParams, PostParams},
    core::{Request, request},
};
use serde_json::{Map, Value};

use crate::{
    clients::patches,
    limits::{MemoryBudget, Reservation, memory::weight},
};

/// Concurrent requests of one review.
const PARALLEL: usize = 8;
/// Largest response. Only lists come near this.
const MAX_ANSWER: usize = 8 << 20;
/// Objects on a page of a list of which only some are kept. A page has to fit into the memory of all answers beside others.
const PAGE: u32 = 200;
/// Most pages.
const MAX_PAGES: usize = 50;
/// Longest error text passed on.
const MAX_MESSAGE: usize = 512;

/// A request to the API server that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// The request cannot be built.
    #[error(transparent)]
    Request(#[from] request::Error),
    /// No response.
    #[error(transparent)]
    Send(#[from] kube::Error),
    /// The response ended early or is too large.
    #[error("the answer cannot be read: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// Too many responses are in memory.
    #[error("too much is read for admission reviews, try again")]
    NoMemory,
    /// No object has that name.
    #[error("not found")]
    NotFound,
    /// The API server refused the request.
    #[error("{0}")]
    Refused(String),
}

/// Reads the queries into `lookups`. The memory of their results is added to `taken`.
pub(super) async fn read(
    client: &Client,
    queries: Vec<ObjectQuery>,
    lookups: &mut Lookups,
    budget: &MemoryBudget,
    taken: &mut Reservation,
) {
    let mut results = stream::iter(queries)
        .map(|query| async move {
            let (result, reservation) = read_one(client, &query, budget).await;
            (query, result, reservation)
        })
        .buffer_unordered(PARALLEL);
    while let Some((query, result, reservation)) = results.next().await {
        taken.merge(reservation);
        lookups.insert(query, result);
    }
}

async fn read_one(client: &Client, query: &ObjectQuery, budget: &MemoryBudget) -> (LookupResult, Reservation) {
    let Some(path) = query.collection() else { return (LookupResult::Object(None), Reservation::default()) };
    if matches!(query.selection, Selection::List { unfinished: true, .. }) {
        return match read_pages(client, &path, query, budget).await {
            Ok((objects, reservation)) => (LookupResult::List(objects), reservation),
            Err(result) => (result, Reservation::default()),
        };
    }
    let response = match read_request(&path, &query.selection) {
        Ok(request) => send(client, request, budget).await,
        Err(error) => Err(error.into()),
    };
    match response {
        Ok((status, body, reservation)) => (result(&query.selection, status, &body), reservation),
        Err(error) => (failed(&error), Reservation::default()),
    }
}

/// Reads a list by pages. Returns the objects that the query selects, and a reservation of their memory.
async fn read_pages(
    client: &Client,
    path: &str,
    query: &ObjectQuery,
    budget: &MemoryBudget,
) -> Result<(Vec<Value>, Reservation), LookupResult> {
    let mut kept = Vec::new();
    let mut reservation = Reservation::default();
    let mut params = ListParams::default().limit(PAGE);
    for _ in 0..MAX_PAGES {
        let request = Request::new(path).list(&params).map_err(|error| failed(&RequestError::Request(error)))?;
        let (status, body, _of_page) = send(client, request, budget).await.map_err(|error| failed(&error))?;
        let mut list = object(status, &body)?;
        let mut selected = items(&mut list);
        selected.retain(|object| query.selects(object));
        let text = serde_json::to_vec(&selected).unwrap_or_default();
        budget.try_reserve(&mut reservation, weight(&text)).map_err(|_| failed(&RequestError::NoMemory))?;
        kept.append(&mut selected);
        match next_page(&list) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok((kept, reservation)),
        }
    }
    let message = format!("there are more than {MAX_PAGES} pages of {PAGE}");
    Err(LookupResult::Failed { code: 0, message })
}

fn failed(error: &RequestError) -> LookupResult {
    LookupResult::Failed { code: 0, message: error.to_string() }
}

/// Carries out an effect of a review.
pub(super) async fn apply(client: &Client, effect: &Effect, budget: &MemoryBudget) -> Result<(), RequestError> {
    let path = effect.collection().ok_or(RequestError::NotFound)?;
    let (status, body, _reservation) = send(client, patch_request(&path, effect)?, budget).await?;
    if status.is_success() { Ok(()) } else { Err(RequestError::Refused(message(status, &parse(&body)))) }
}

async fn send(
    client: &Client,
    request: http::Request<Vec<u8>>,
    budget: &MemoryBudget,
) -> Result<(StatusCode, bytes::Bytes, Reservation), RequestError> {
    let response = client.send(request.map(Into::into)).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(RequestError::Body)?.to_bytes();
    let mut reservation = Reservation::default();
    budget.try_reserve(&mut reservation, weight(&body)).map_err(|_| RequestError::NoMemory)?;
    Ok((status, body, reservation))
}

fn read_request(path: &str, selection: &Selection) -> Result<http::Request<Vec<u8>>, request::Error> {
    let request = Request::new(path);
    match selection {
        Selection::Get { name } => request.get(name, &GetParams::default()),
        Selection::List { labels, limit, .. } => {
            let params = ListParams::default().limit(limit.unwrap_or(MAX_LIST));
            let params = if labels.is_empty() { params } else { params.labels(labels) };
            request.list(&params)
        }
        Selection::AccessReview { review } => request.create(&PostParams::default(), review.clone().into_bytes()),
    }
}

fn patch_request(path: &str, effect: &Effect) -> Result<http::Request<Vec<u8>>, request::Error> {
    let params = PatchParams { dry_run: effect.dry_run, ..PatchParams::default() };
    let request = Request::new(path).patch(&effect.name, &params, &Patch::Json::<()>(effect.patch.clone()))?;
    Ok(request.map(|body| patches::escaped(&body)))
}

fn parse(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_default()
}

/// Returns the message of a response with an error status.
fn message(status: StatusCode, body: &Value) -> String {
    match body.get("message").and_then(Value::as_str) {
        Some(message) => message.chars().take(MAX_MESSAGE).collect(),
        None => status.to_string(),
    }
}

/// Returns the result of a query from the response of the API server.
fn result(selection: &Selection, status: StatusCode, body: &[u8]) -> LookupResult {
    let mut value = match object(status, body) {
        Ok(value) => value,
        Err(result) => return result,
    };
    let Selection::List { limit, .. } = selection else { return LookupResult::Object(Some(Value::Object(value))) };
    if limit.is_none() && next_page(&value).is_some() {
        return LookupResult::Failed { code: 0, message: format!("there are more than {MAX_LIST}") };
    }
    LookupResult::List(items(&mut value))
}

/// Returns the object or list in a response, or the result of a query that has none.
fn object(status: StatusCode, body: &[u8]) -> Result<Map<String, Value>, LookupResult> {
    let value = parse(body);
    // Not found: the object, or its kind.
    if status == StatusCode::NOT_FOUND {
        return Err(LookupResult::Object(None));
    }
    if !status.is_success() {
        return Err(LookupResult::Failed { code: status.as_u16(), message: message(status, &value) });
    }
    match value {
        Value::Object(value) => Ok(value),
        _ => Err(LookupResult::Failed { code: 0, message: "the answer is no object".to_owned() }),
    }
}

/// Returns the token of the page after a list.
fn next_page(list: &Map<String, Value>) -> Option<String> {
    let token = list.get("metadata")?.get("continue")?.as_str()?;
    (!token.is_empty()).then(|| token.to_owned())
}

fn items(list: &mut Map<String, Value>) -> Vec<Value> {
    match list.remove("items") {
        Some(Value::Array(items)) => items,
        _ => vec![],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GET: Selection = Selection::Get { name: String::new() };
    const LIST: Selection = Selection::List { labels: String::new(), limit: None, unfinished: false };

    fn result_of(selection: &Selection, status: u16, body: &Value) -> LookupResult {
        result(selection, StatusCode::from_u16(status).unwrap(), body.to_string().as_bytes())
    }

    #[test]
    fn responses_become_results() {
        assert_eq!(result_of(&GET, 200, &json!({"a": 1})), LookupResult::Object(Some(json!({"a": 1}))));
        assert_eq!(result_of(&GET, 404, &json!({"message": "no such"})), LookupResult::Object(None));
        assert_eq!(result_of(&LIST, 200, &json!({"items": [1, 2]})), LookupResult::List(vec![json!(1), json!(2)]));
        assert_eq!(result_of(&LIST, 200, &json!({"items": null})), LookupResult::List(vec![]));
        let refusal = result_of(&GET, 403, &json!({"message": "forbidden"}));
        assert_eq!(refusal, LookupResult::Failed { code: 403, message: "forbidden".into() });
        let broken = result(&GET, StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(broken, LookupResult::Failed { code: 502, message: "502 Bad Gateway".into() });
        assert!(matches!(result(&GET, StatusCode::OK, b"x"), LookupResult::Failed { .. }));
    }

    #[test]
    fn truncated_list_is_a_failure_unless_the_query_has_a_limit() {
        let truncated = json!({"metadata": {"continue": "token"}, "items": [1]});
        assert!(matches!(result_of(&LIST, 200, &truncated), LookupResult::Failed { .. }));
        let first = Selection::List { labels: String::new(), limit: Some(1), unfinished: false };
        assert_eq!(result_of(&first, 200, &truncated), LookupResult::List(vec![json!(1)]));
    }

    #[tokio::test]
    async fn unfinished_objects_are_found_on_all_pages() {
        let read = |pages: usize| async move {
            let service = tower::service_fn(move |request: http::Request<kube::client::Body>| async move {
                let query = request.uri().query().unwrap_or_default();
                let token = query.split('&').find_map(|one| one.strip_prefix("continue="));
                let page = token.map_or(0, |token| token.parse::<usize>().unwrap());
                let next = if page + 1 < pages { (page + 1).to_string() } else { String::new() };
                let items = json!([{"page": page}, {"page": page, "status": {"complete": true}}]);
                let list = json!({"metadata": {"continue": next}, "items": items});
                Ok::<_, std::convert::Infallible>(http::Response::new(axum::body::Body::from(list.to_string())))
            });
            let query = ObjectQuery::unfinished("snapshot.kubevirt.io", "v1beta1", "virtualmachinerestores", "ns");
            let budget = MemoryBudget::new(1 << 20);
            read_one(&Client::new(service, "default"), &query, &budget).await.0
        };
        assert_eq!(read(2).await, LookupResult::List(vec![json!({"page": 0}), json!({"page": 1})]));
        assert!(matches!(read(MAX_PAGES).await, LookupResult::List(items) if items.len() == MAX_PAGES));
        assert!(matches!(read(MAX_PAGES + 1).await, LookupResult::Failed { .. }));
    }

    #[test]
    fn requests_follow_the_api() {
        let parts = |request: http::Request<Vec<u8>>| {
            // Versions of the URL library differ in whether an empty query is kept.
            (request.method().to_string(), request.uri().to_string().trim_end_matches('?').to_owned())
        };
        let read = |query: &ObjectQuery| parts(read_request(&query.collection().unwrap(), &query.selection).unwrap());
        let get = ObjectQuery::get("", "v1", "pods", Some("ns"), "a");
        assert_eq!(read(&get), ("GET".into(), "/api/v1/namespaces/ns/pods/a".into()));
        let list = ObjectQuery::list("kubevirt.io", "v1", "virtualmachines", None, "a=b,c");
        let uri = "/apis/kubevirt.io/v1/virtualmachines?&labelSelector=a%3Db%2Cc&limit=1000";
        assert_eq!(read(&list), ("GET".into(), uri.into()));
        let effect = Effect {
            group: "",
            version: "v1",
            plural: "pods",
            namespace: "ns".to_owned(),
            name: "a".to_owned(),
            patch: json_patch::Patch::default(),
            dry_run: true,
            on_failure: None,
        };
        let patch = parts(patch_request(&effect.collection().unwrap(), &effect).unwrap());
        assert_eq!(patch, ("PATCH".into(), "/api/v1/namespaces/ns/pods/a?&dryRun=All".into()));
    }
}
