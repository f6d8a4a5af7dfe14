//! OpenAPI documents of the aggregated API.
//!
//! kube-apiserver merges them into its own. They describe paths, parameters and answers. Options are described in place, so
//! no definition can clash with those of other servers.

use std::{fmt::Write, sync::OnceLock};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

use crate::{
    requests::{
        error::{empty_response, json_response},
        negotiation,
        options::query_value,
    },
    subresources::{
        common::specification::{Answer, Content, GROUP, Parameter, Specification, VERSIONS, Verb},
        registry,
    },
};

const JSON: &str = "application/json";

/// Returns the schema of the answer, if it is JSON.
fn answer_schema(specification: &Specification) -> Option<Value> {
    match specification.answer {
        Answer::Document(schema) => Some(schema()),
        _ => None,
    }
}

/// Returns the query parameters with their JSON types.
fn query_parameters(specification: &Specification) -> impl Iterator<Item = Parameter> {
    let dry_run = specification.dry_run.then_some(("dryRun", "string"));
    specification.query_parameters.iter().copied().chain(dry_run)
}

/// Returns the content type of the body.
const fn consumed(specification: &Specification) -> &'static str {
    match specification.content {
        Content::Any => "*/*",
        Content::JsonOrUnlabelled | Content::Json => JSON,
    }
}

/// Returns code and description of a successful answer.
const fn success(specification: &Specification) -> (&'static str, &'static str) {
    match specification.answer {
        Answer::Accepted => ("202", "Accepted"),
        Answer::Stream(_) => ("101", "Switching Protocols"),
        Answer::Empty | Answer::Document(_) | Answer::Picture => ("200", "OK"),
    }
}

/// An operation at a path.
struct Operation {
    specification: &'static Specification,
    path: String,
    id: String,
    /// Parameters in the path with their JSON types.
    parameters: Vec<Parameter>,
}

/// Returns the operations of a subresource: more than one if parameters in the path are optional.
fn operations(version: &str, specification: &'static Specification) -> Vec<Operation> {
    let id = format!("{version}{}", specification.operation);
    let mut path = format!("/apis/{GROUP}/{version}/namespaces/{{namespace}}/{}", specification.resource);
    let mut parameters = vec![("namespace", "string")];
    if !specification.name.is_empty() {
        path = format!("{path}/{{name}}/{}", specification.name);
        parameters.push(("name", "string"));
    }
    let Some((first, optional)) = specification.path_parameters.split_first() else {
        return vec![Operation { specification, path, id, parameters }];
    };
    path = format!("{path}/{{{}}}", first.0);
    parameters.push(*first);
    let mut all = vec![Operation { specification, path, id, parameters }];
    for parameter in optional {
        let Some(last) = all.last() else { break };
        let name = parameter.0;
        let capital: String = name.chars().take(1).flat_map(char::to_uppercase).chain(name.chars().skip(1)).collect();
        let operation = Operation {
            specification,
            path: format!("{}/{{{name}}}", last.path),
            id: format!("{}With{capital}", last.id),
            parameters: [last.parameters.as_slice(), &[*parameter]].concat(),
        };
        all.push(operation);
    }
    all
}

fn all_operations(version: &str) -> impl Iterator<Item = Operation> {
    let served = registry::ALL.into_iter().filter(move |known| known.versions.contains(&version));
    served.flat_map(move |specification| operations(version, specification))
}

const fn method_key(specification: &Specification) -> &'static str {
    match specification.method {
        Verb::Get => "get",
        Verb::Put => "put",
    }
}

/// The open documents of a version: suffix, operation, description.
const VERSION_DOCUMENTS: [(&str, &str, &str); 7] = [
    ("", "getAPISubResources", "Get the list of subresources"),
    ("/version", "Version", "Get the version of virt-api"),
    ("/guestfs", "Guestfs", "Get the image for looking into disks"),
    ("/healthz", "CheckHealth", "Check whether virt-api reaches the API server"),
    ("/start-cluster-profiler", "start-cluster-profiler", "Start profiling all components"),
    ("/stop-cluster-profiler", "stop-cluster-profiler", "Stop profiling all components"),
    ("/dump-cluster-profiler", "dump-cluster-profiler", "Get the profiles of all components"),
];

fn v2_document() -> Value {
    let version = VERSIONS[0];
    let mut paths = Map::new();
    for (suffix, operation, description) in VERSION_DOCUMENTS {
        paths.insert(
            format!("/apis/{GROUP}/{version}{suffix}"),
            json!({"get": {
                "operationId": format!("{version}{operation}"),
                "description": description,
                "produces": [JSON],
                "responses": {"200": {"description": "OK"}, "500": {"description": "Internal Server Error"}},
            }}),
        );
    }
    for Operation { specification, path, id, parameters } in all_operations(version) {
        let in_path = parameters.into_iter().map(
            |(name, kind)| json!({"name": name, "in": "path", "type": kind, "required": true, "uniqueItems": true}),
        );
        let in_query = query_parameters(specification)
            .map(|(name, kind)| json!({"name": name, "in": "query", "type": kind, "uniqueItems": true}));
        let in_body = specification
            .options
            .map(|schema| schema())
            .map(|schema| json!({"name": "body", "in": "body", "schema": schema}));
        let consumes = in_body.is_some().then(|| json!([consumed(specification)]));
        let (code, answer) = success(specification);
        let mut answer = json!({"description": answer});
        if let Some(schema) = answer_schema(specification) {
            answer["schema"] = schema;
        }
        let mut operation = json!({
            "operationId": id,
            "description": specification.description,
            "parameters": in_path.chain(in_query).chain(in_body).collect::<Vec<_>>(),
            "responses": {code: answer, "401": {"description": "Unauthorized"}},
        });
        if let Some(consumes) = consumes {
            operation["consumes"] = consumes;
        }
        if specification.answers_json() {
            operation["produces"] = json!([JSON]);
        }
        paths.insert(path, json!({method_key(specification): operation}));
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
                    "200": {"description": "OK", "content": {JSON: {"schema": {"type": "object"}}}},
                },
            }}),
        );
    }
    for Operation { specification, path, id, parameters } in all_operations(version) {
        let in_path = parameters
            .into_iter()
            .map(|(name, kind)| json!({"name": name, "in": "path", "required": true, "schema": {"type": kind}}));
        let in_query = query_parameters(specification)
            .map(|(name, kind)| json!({"name": name, "in": "query", "schema": {"type": kind}}));
        let (code, answer) = success(specification);
        let mut answer = json!({"description": answer});
        if let Some(schema) = answer_schema(specification) {
            answer["content"] = json!({JSON: {"schema": schema}});
        }
        let mut operation = json!({
            "operationId": id,
            "description": specification.description,
            "parameters": in_path.chain(in_query).collect::<Vec<_>>(),
            "responses": {code: answer, "401": {"description": "Unauthorized"}},
        });
        if let Some(schema) = specification.options.map(|schema| schema()) {
            operation["requestBody"] = json!({"content": {consumed(specification): {"schema": schema}}});
        }
        paths.insert(path, json!({method_key(specification): operation}));
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
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

/// `/openapi/v2`
pub(crate) fn v2(headers: &HeaderMap) -> Response {
    if negotiation::accepts_json(headers) {
        answer(rendered_v2(), headers)
    } else {
        empty_response(StatusCode::NOT_ACCEPTABLE)
    }
}

/// `/openapi/v3`
pub(crate) fn v3_root() -> Response {
    let mut paths = Map::new();
    for version in VERSIONS {
        let path = format!("apis/{GROUP}/{version}");
        let url = format!("/openapi/v3/{path}?hash={}", rendered_v3(version).hash);
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json_response(StatusCode::OK, &json!({"paths": paths}))
}

/// `/openapi/v3/apis/subresources.kubevirt.io/<v>`; an outdated `hash` is redirected to the current one.
pub(crate) fn v3(version: &str, headers: &HeaderMap, query: Option<&str>) -> Response {
    if !negotiation::accepts_json(headers) {
        return empty_response(StatusCode::NOT_ACCEPTABLE);
    }
    let document = rendered_v3(version);
    match query_value(query, "hash") {
        Some(hash) if *hash != document.hash => {
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
    fn each_subresource_is_described_once() {
        for document in [v2_document(), v3_document("v1"), v3_document("v1alpha3")] {
            let paths = document["paths"].as_object().unwrap();
            // Two have a second form with a protocol.
            assert_eq!(paths.len(), registry::ALL.len() + 2 + VERSION_DOCUMENTS.len());
            let ids = paths
                .values()
                .flat_map(|path| path.as_object().unwrap().values())
                .map(|operation| operation["operationId"].as_str().unwrap())
                .collect::<BTreeSet<_>>();
            assert_eq!(ids.len(), paths.len());
        }
    }

    #[test]
    fn options_are_described_by_their_types() {
        let document = v3_document("v1");
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{name}/start";
        let schema = &document["paths"][path]["put"]["requestBody"]["content"]["*/*"]["schema"];
        assert_eq!(schema["properties"]["paused"]["type"], "boolean");
        assert_eq!(schema["properties"]["kind"]["type"], "string");
        let text = document.to_string();
        for word in ["$ref", "$schema", "nullable\":true"] {
            assert!(!text.contains(word), "{word}");
        }
    }

    #[test]
    fn content_types_match_bodies_and_answers() {
        let base = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}";
        let (second, third) = (v2_document(), v3_document("v1"));
        for (path, method, consumed, produced) in [
            ("/expand-vm-spec", "put", Some(JSON), Some(JSON)),
            ("/virtualmachines/{name}/objectgraph", "get", Some(JSON), Some(JSON)),
            ("/virtualmachines/{name}/start", "put", Some("*/*"), None),
            ("/virtualmachineinstances/{name}/userlist", "get", None, Some(JSON)),
            ("/virtualmachineinstances/{name}/reset", "put", None, None),
        ] {
            let path = format!("{base}{path}");
            let operation = &second["paths"][&path][method];
            assert_eq!(operation["consumes"], json!(consumed.map(|kind| [kind])), "{path}");
            assert_eq!(operation["produces"], json!(produced.map(|kind| [kind])), "{path}");
            let body = &third["paths"][&path][method]["requestBody"]["content"];
            assert_eq!(body.as_object().and_then(|body| body.keys().next().map(String::as_str)), consumed, "{path}");
        }
    }

    #[test]
    fn dry_run_is_in_the_options_as_well() {
        for known in registry::ALL {
            let described = known.options.is_some_and(|schema| schema()["properties"]["dryRun"].is_object());
            assert_eq!(described, known.dry_run, "{}", known.full_name());
        }
    }

    /// One unknown keyword makes kube-apiserver refuse the document of all groups; `kubectl apply` then cannot validate
    /// anything.
    #[test]
    fn version_2_contains_only_its_keywords() {
        let text = v2_document().to_string();
        for word in ["anyOf", "oneOf", "not", "nullable", "const", "deprecated", "$defs", "patternProperties", "$ref"] {
            assert!(!text.contains(&format!("\"{word}\":")), "{word}");
        }
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{name}/backup";
        let command = &v2_document()["paths"][path]["put"]["parameters"][2]["schema"]["properties"]["cmd"];
        assert_eq!(command["enum"], json!(["Start", "Abort", "Export"]), "{command}");
    }

    #[test]
    fn outdated_hash_is_redirected_to_the_current_document() {
        let headers = HeaderMap::new();
        let moved = v3("v1", &headers, Some("hash=OLD"));
        assert_eq!(moved.status(), StatusCode::MOVED_PERMANENTLY);
        let location = moved.headers()[header::LOCATION].to_str().unwrap().to_owned();
        let (_, query) = location.split_once('?').unwrap();
        assert_eq!(v3("v1", &headers, Some(query)).status(), StatusCode::OK);
    }

    #[test]
    fn unchanged_document_is_not_sent() {
        let first = v2(&HeaderMap::new());
        let mut headers = HeaderMap::new();
        headers.insert(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone());
        assert_eq!(v2(&headers).status(), StatusCode::NOT_MODIFIED);
    }

    #[test]
    fn only_json_is_served() {
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
