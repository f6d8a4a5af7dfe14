//! OpenAPI documents of the aggregated API.
//!
//! kube-apiserver merges them into its own. They name paths, parameters and answers; the bodies of the options are
//! small enough to be described in place, so nothing here can clash with definitions of other servers.

use std::{fmt::Write, sync::OnceLock};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

use crate::{
    error::{empty_response, json_response},
    path::{GROUP, Subresource, VERSIONS},
};

/// Fields of the options object that a subresource reads, with their JSON types.
fn options(subresource: Subresource) -> &'static [(&'static str, &'static str)] {
    match subresource {
        Subresource::Start => &[("paused", "boolean")],
        Subresource::Stop => &[("gracePeriod", "integer")],
        Subresource::Restart => &[("gracePeriodSeconds", "integer")],
        _ => &[],
    }
}

fn takes_options(subresource: Subresource) -> bool {
    matches!(
        subresource,
        Subresource::Start | Subresource::Stop | Subresource::Restart | Subresource::Pause | Subresource::Unpause
    )
}

fn options_schema(subresource: Subresource) -> Value {
    let mut properties = Map::new();
    properties.insert("kind".into(), json!({"type": "string"}));
    properties.insert("apiVersion".into(), json!({"type": "string"}));
    properties.insert("dryRun".into(), json!({"type": "array", "items": {"type": "string"}}));
    for (name, kind) in options(subresource) {
        let mut schema = json!({"type": kind});
        if *kind == "integer"
            && let Some(schema) = schema.as_object_mut()
        {
            schema.insert("format".into(), "int64".into());
        }
        properties.insert((*name).into(), schema);
    }
    json!({"type": "object", "properties": properties})
}

/// Query parameters with their JSON types.
fn query_parameters(subresource: Subresource) -> &'static [(&'static str, &'static str)] {
    match subresource {
        Subresource::Vnc => &[("preserveSession", "boolean")],
        Subresource::Screenshot => &[("moveCursor", "boolean")],
        _ => &[],
    }
}

/// Code and description of the answer to a request that went well.
fn success(subresource: Subresource) -> (&'static str, &'static str) {
    match subresource {
        Subresource::Start | Subresource::Stop | Subresource::Restart => ("202", "Accepted"),
        Subresource::Console | Subresource::Vnc => ("101", "Switching Protocols"),
        _ => ("200", "OK"),
    }
}

fn operation_id(version: &str, subresource: Subresource) -> String {
    let mut id = format!("{version}{}", subresource.resource());
    for part in subresource.name().split('/') {
        let mut letters = part.chars();
        if let Some(first) = letters.next() {
            id.push(first.to_ascii_uppercase());
            id.extend(letters);
        }
    }
    id
}

fn subresource_path(version: &str, subresource: Subresource) -> String {
    let (resource, name) = (subresource.resource(), subresource.name());
    format!("/apis/{GROUP}/{version}/namespaces/{{namespace}}/{resource}/{{name}}/{name}")
}

fn method_key(subresource: Subresource) -> &'static str {
    if subresource.method() == Method::GET { "get" } else { "put" }
}

/// The three open documents below a version: suffix, operation, description.
const VERSION_DOCUMENTS: [(&str, &str, &str); 3] = [
    ("", "ListResources", "Get the list of subresources"),
    ("/version", "Version", "Get the version of virt-api"),
    ("/healthz", "CheckHealth", "Check whether virt-api reaches the API server"),
];

fn describe(subresource: Subresource) -> String {
    format!("{} of a {}", subresource.name(), subresource.resource().trim_end_matches('s'))
}

fn v2_document() -> Value {
    let version = VERSIONS[0];
    let mut paths = Map::new();
    for (suffix, operation, description) in VERSION_DOCUMENTS {
        paths.insert(
            format!("/apis/{GROUP}/{version}{suffix}"),
            json!({"get": {
                "operationId": format!("{version}{operation}"),
                "description": description,
                "produces": ["application/json"],
                "responses": {"200": {"description": "OK"}, "500": {"description": "Internal Server Error"}},
            }}),
        );
    }
    for subresource in Subresource::ALL {
        let mut parameters = vec![
            json!({"name": "namespace", "in": "path", "type": "string", "required": true, "uniqueItems": true}),
            json!({"name": "name", "in": "path", "type": "string", "required": true, "uniqueItems": true}),
        ];
        for (name, kind) in query_parameters(subresource) {
            parameters.push(json!({"name": name, "in": "query", "type": kind, "uniqueItems": true}));
        }
        if takes_options(subresource) {
            parameters.push(json!({"name": "body", "in": "body", "schema": options_schema(subresource)}));
        }
        let (code, answer) = success(subresource);
        paths.insert(
            subresource_path(version, subresource),
            json!({method_key(subresource): {
                "operationId": operation_id(version, subresource),
                "description": describe(subresource),
                "parameters": parameters,
                "responses": {code: {"description": answer}, "401": {"description": "Unauthorized"}},
            }}),
        );
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "KubeVirt API", "description": "Subresources of virtual machines", "version": concat!("v", env!("CARGO_PKG_VERSION"))},
        "paths": paths,
        "definitions": {},
    })
}

fn v3_document(version: &str) -> Value {
    let mut paths = Map::new();
    for (suffix, operation, description) in VERSION_DOCUMENTS {
        paths.insert(
            format!("/apis/{GROUP}/{version}{suffix}"),
            json!({"get": {
                "operationId": format!("{version}{operation}"),
                "description": description,
                "responses": {
                    "200": {"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}},
                },
            }}),
        );
    }
    for subresource in Subresource::ALL {
        let mut parameters = vec![
            json!({"name": "namespace", "in": "path", "required": true, "schema": {"type": "string"}}),
            json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}),
        ];
        for (name, kind) in query_parameters(subresource) {
            parameters.push(json!({"name": name, "in": "query", "schema": {"type": kind}}));
        }
        let (code, answer) = success(subresource);
        let mut operation = json!({
            "operationId": operation_id(version, subresource),
            "description": describe(subresource),
            "parameters": parameters,
            "responses": {code: {"description": answer}, "401": {"description": "Unauthorized"}},
        });
        if takes_options(subresource)
            && let Some(operation) = operation.as_object_mut()
        {
            let content = json!({"*/*": {"schema": options_schema(subresource)}});
            operation.insert("requestBody".into(), json!({"content": content}));
        }
        paths.insert(subresource_path(version, subresource), json!({method_key(subresource): operation}));
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "KubeVirt API", "description": "Subresources of virtual machines", "version": version},
        "paths": paths,
        "components": {},
    })
}

/// A document with the hash that names it.
struct Rendered {
    text: Bytes,
    hash: String,
}

fn render(document: &Value) -> Rendered {
    let text = Bytes::from(document.to_string());
    let mut hash = String::new();
    for byte in Sha512::digest(&text) {
        // Writing to a string cannot fail.
        let _ = write!(hash, "{byte:02X}");
    }
    Rendered { text, hash }
}

fn rendered_v2() -> &'static Rendered {
    static DOCUMENT: OnceLock<Rendered> = OnceLock::new();
    DOCUMENT.get_or_init(|| render(&v2_document()))
}

fn rendered_v3(version: &str) -> &'static Rendered {
    static DOCUMENTS: OnceLock<[Rendered; 2]> = OnceLock::new();
    let [first, second] = DOCUMENTS.get_or_init(|| VERSIONS.map(|version| render(&v3_document(version))));
    if version == VERSIONS[0] { first } else { second }
}

fn answer(document: &Rendered, headers: &HeaderMap) -> Response {
    let etag = format!("\"{}\"", document.hash);
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|value| value.as_bytes() == etag.as_bytes());
    let mut response =
        if known { empty_response(StatusCode::NOT_MODIFIED) } else { Response::new(Body::from(document.text.clone())) };
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

/// Whether the client takes JSON. The protobuf forms are not offered.
fn accepts_json(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).peekable();
    values.peek().is_none()
        || values
            .flat_map(|value| value.split(','))
            .filter_map(|range| range.split(';').next())
            .any(|range| matches!(range.trim(), "application/json" | "application/*" | "*/*"))
}

/// `/openapi/v2`
pub fn v2(headers: &HeaderMap) -> Response {
    if accepts_json(headers) { answer(rendered_v2(), headers) } else { empty_response(StatusCode::NOT_ACCEPTABLE) }
}

/// `/openapi/v3`
pub fn v3_root() -> Response {
    let mut paths = Map::new();
    for version in VERSIONS {
        let path = format!("apis/{GROUP}/{version}");
        let url = format!("/openapi/v3/{path}?hash={}", rendered_v3(version).hash);
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json_response(StatusCode::OK, &json!({"paths": paths}))
}

/// `/openapi/v3/apis/subresources.kubevirt.io/<v>`; an outdated `hash` is sent on to the current one.
pub fn v3(version: &str, headers: &HeaderMap, query: Option<&str>) -> Response {
    if !accepts_json(headers) {
        return empty_response(StatusCode::NOT_ACCEPTABLE);
    }
    let document = rendered_v3(version);
    let asked = query.unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("hash="));
    match asked {
        Some(hash) if hash != document.hash => {
            let mut response = empty_response(StatusCode::MOVED_PERMANENTLY);
            let location = format!("/openapi/v3/apis/{GROUP}/{version}?hash={}", document.hash);
            if let Ok(location) = HeaderValue::from_str(&location) {
                response.headers_mut().insert(header::LOCATION, location);
            }
            response
        }
        Some(_) => {
            let mut response = answer(document, headers);
            response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("public, immutable"));
            response
        }
        None => answer(document, headers),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_served_subresource_is_described_once() {
        for document in [v2_document(), v3_document("v1"), v3_document("v1alpha3")] {
            let paths = document["paths"].as_object().unwrap();
            assert_eq!(paths.len(), Subresource::ALL.len() + VERSION_DOCUMENTS.len());
            let ids = paths
                .values()
                .flat_map(|path| path.as_object().unwrap().values())
                .map(|operation| operation["operationId"].as_str().unwrap())
                .collect::<BTreeSet<_>>();
            assert_eq!(ids.len(), paths.len());
        }
    }

    #[test]
    fn outdated_hash_is_sent_on_to_the_current_document() {
        let headers = HeaderMap::new();
        let moved = v3("v1", &headers, Some("hash=OLD"));
        assert_eq!(moved.status(), StatusCode::MOVED_PERMANENTLY);
        let location = moved.headers()[header::LOCATION].to_str().unwrap().to_owned();
        let (_, query) = location.split_once('?').unwrap();
        assert_eq!(v3("v1", &headers, Some(query)).status(), StatusCode::OK);
    }

    #[test]
    fn known_document_is_not_sent_again() {
        let first = v2(&HeaderMap::new());
        let mut headers = HeaderMap::new();
        headers.insert(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone());
        assert_eq!(v2(&headers).status(), StatusCode::NOT_MODIFIED);
    }

    #[test]
    fn only_json_is_offered() {
        let cases = [
            ("application/json", StatusCode::OK),
            ("application/com.github.proto-openapi.spec.v3.v1.0+protobuf, application/json;q=0.9", StatusCode::OK),
            ("*/*", StatusCode::OK),
            ("application/com.github.proto-openapi.spec.v3@v1.0+protobuf", StatusCode::NOT_ACCEPTABLE),
        ];
        for (accept, expected) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
            assert_eq!(v3("v1", &headers, None).status(), expected, "{accept}");
        }
    }
}
