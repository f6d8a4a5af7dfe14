//! OpenAPI documents of the aggregated API.
//!
//! kube-apiserver merges them into its own. They name paths, parameters and answers; the bodies of the options are
//! small enough to be described in place, so nothing here can clash with definitions of other servers.

use std::{fmt::Write, sync::OnceLock};

use api::subresources::{
    AddVolumeRequest, BackupCheckpoint, BackupOptions, EvacuateCancelOptions, FreezeUnfreezeTimeout, GuestAgentInfo,
    GuestFileSystemList, GuestUserList, MemoryDumpOptions, MigrateOptions, ObjectGraphNode, ObjectGraphOptions,
    PauseOptions, RemoveVolumeRequest, RestartOptions, SevMeasurementInfo, SevPlatformInfo, SevSecretOptions,
    SevSessionOptions, StartOptions, StopOptions,
};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

use crate::{
    endpoint::Subresource,
    error::{empty_response, json_response},
    negotiation,
    path::{GROUP, VERSIONS},
};

const JSON: &str = "application/json";

/// Schema of a type, written out in place: nothing refers to definitions that could clash with those of other servers.
fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    tidy(&mut schema);
    schema
}

/// Takes out what OpenAPI 2 does not know and nobody needs.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            for name in ["$schema", "title", "nullable", "default", "deprecated"] {
                // A property may bear such a name; its value is a schema then.
                if fields.get(name).is_some_and(|value| name == "default" || !value.is_object()) {
                    fields.remove(name);
                }
            }
            for name in ["anyOf", "oneOf"] {
                // A property may bear such a name as well.
                if fields.get(name).is_some_and(Value::is_array)
                    && let Some(Value::Array(alternatives)) = fields.remove(name)
                {
                    unite(fields, alternatives);
                }
            }
            fields.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// Puts alternatives into the schema that has them, as OpenAPI 2 has none: the one that is not null, or all words of an
/// enumeration. Of others nothing is said.
fn unite(schema: &mut Map<String, Value>, alternatives: Vec<Value>) {
    let null = json!({"enum": [null]});
    let mut left = alternatives;
    left.iter_mut().for_each(tidy);
    left.retain(|one| *one != null);
    if left.len() > 1 && left.iter().all(|one| one["type"] == "string" && one["enum"].is_array()) {
        let words = left.iter().filter_map(|one| one["enum"].as_array()).flatten().cloned().collect::<Vec<_>>();
        left = vec![json!({"type": "string", "enum": words})];
    }
    if let [Value::Object(only)] = left.as_mut_slice() {
        for (name, value) in std::mem::take(only) {
            schema.entry(name).or_insert(value);
        }
    }
}

/// What is sent along with a request.
fn body(subresource: Subresource) -> Option<Value> {
    let mut schema = match subresource {
        Subresource::Start => schema::<StartOptions>(),
        Subresource::Stop => schema::<StopOptions>(),
        Subresource::Restart => schema::<RestartOptions>(),
        Subresource::Migrate => schema::<MigrateOptions>(),
        Subresource::Pause | Subresource::Unpause => schema::<PauseOptions>(),
        Subresource::Freeze => schema::<FreezeUnfreezeTimeout>(),
        Subresource::CancelEvacuation | Subresource::VmCancelEvacuation => schema::<EvacuateCancelOptions>(),
        Subresource::AddVolume | Subresource::VmAddVolume => schema::<AddVolumeRequest>(),
        Subresource::RemoveVolume | Subresource::VmRemoveVolume => schema::<RemoveVolumeRequest>(),
        Subresource::MemoryDump => schema::<MemoryDumpOptions>(),
        Subresource::Backup => schema::<BackupOptions>(),
        Subresource::RedefineCheckpoint => schema::<BackupCheckpoint>(),
        Subresource::ObjectGraph | Subresource::VmObjectGraph => schema::<ObjectGraphOptions>(),
        Subresource::SetupSession => schema::<SevSessionOptions>(),
        Subresource::InjectLaunchSecret => schema::<SevSecretOptions>(),
        Subresource::ExpandVmSpec => return Some(machine()),
        _ => return None,
    };
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for name in ["kind", "apiVersion"] {
            properties.insert(name.to_owned(), json!({"type": "string"}));
        }
    }
    Some(schema)
}

/// A VirtualMachine, whose schema is that of its definition.
fn machine() -> Value {
    json!({"type": "object", "description": "a VirtualMachine of kubevirt.io/v1"})
}

/// What is answered, where it is JSON.
fn answered(subresource: Subresource) -> Option<Value> {
    Some(match subresource {
        Subresource::GuestOsInfo => schema::<GuestAgentInfo>(),
        Subresource::UserList => schema::<GuestUserList>(),
        Subresource::FileSystemList => schema::<GuestFileSystemList>(),
        Subresource::ObjectGraph | Subresource::VmObjectGraph => schema::<ObjectGraphNode>(),
        Subresource::FetchCertChain => schema::<SevPlatformInfo>(),
        Subresource::QueryLaunchMeasurement => schema::<SevMeasurementInfo>(),
        Subresource::ExpandSpec | Subresource::ExpandVmSpec => machine(),
        _ => return None,
    })
}

/// Query parameters with their JSON types.
fn query_parameters(subresource: Subresource) -> &'static [(&'static str, &'static str)] {
    match subresource {
        Subresource::Console => &[("replay", "boolean")],
        Subresource::Vnc => &[("preserveSession", "boolean")],
        Subresource::Screenshot => &[("moveCursor", "boolean")],
        Subresource::Vsock => &[("port", "integer"), ("tls", "boolean")],
        Subresource::PortForward | Subresource::VmPortForward => &[("halfClose", "boolean")],
        other if other.can_be_tried() => &[("dryRun", "string")],
        _ => &[],
    }
}

/// Content type of what is sent along.
const fn consumed(subresource: Subresource) -> &'static str {
    if subresource.takes_json_only() { JSON } else { "*/*" }
}

/// Code and description of the answer to a request that went well.
fn success(subresource: Subresource) -> (&'static str, &'static str) {
    match subresource {
        Subresource::Start
        | Subresource::Stop
        | Subresource::Restart
        | Subresource::Migrate
        | Subresource::AddVolume
        | Subresource::RemoveVolume
        | Subresource::VmAddVolume
        | Subresource::VmRemoveVolume
        | Subresource::MemoryDump
        | Subresource::RemoveMemoryDump
        | Subresource::SetupSession => ("202", "Accepted"),
        Subresource::Console
        | Subresource::Vnc
        | Subresource::UsbRedir
        | Subresource::Vsock
        | Subresource::PortForward
        | Subresource::VmPortForward => ("101", "Switching Protocols"),
        _ => ("200", "OK"),
    }
}

/// An operation at a path.
struct Operation {
    subresource: Subresource,
    path: String,
    id: String,
    /// Parameters in the path with their JSON types.
    parameters: Vec<(&'static str, &'static str)>,
}

/// The operations of a subresource: more than one where parts of the path may be left out.
fn operations(version: &str, subresource: Subresource) -> Vec<Operation> {
    let endpoint = subresource.endpoint();
    let id = format!("{version}{}", endpoint.operation);
    let base = format!("/apis/{GROUP}/{version}/namespaces/{{namespace}}/{}", endpoint.resource);
    if endpoint.name.is_empty() {
        return vec![Operation { subresource, path: base, id, parameters: vec![("namespace", "string")] }];
    }
    let path = format!("{base}/{{name}}/{}", endpoint.name);
    let parameters = vec![("namespace", "string"), ("name", "string")];
    if !matches!(subresource, Subresource::PortForward | Subresource::VmPortForward) {
        return vec![Operation { subresource, path, id, parameters }];
    }
    let with_port = [parameters, vec![("port", "integer")]].concat();
    let with_protocol = [with_port.clone(), vec![("protocol", "string")]].concat();
    vec![
        Operation { subresource, path: format!("{path}/{{port}}"), id: id.clone(), parameters: with_port },
        Operation {
            subresource,
            path: format!("{path}/{{port}}/{{protocol}}"),
            id: format!("{id}WithProtocol"),
            parameters: with_protocol,
        },
    ]
}

fn all_operations(version: &str) -> impl Iterator<Item = Operation> {
    Subresource::ALL.into_iter().flat_map(move |subresource| operations(version, subresource))
}

fn method_key(subresource: Subresource) -> &'static str {
    if subresource.endpoint().reads { "get" } else { "put" }
}

/// The open documents below a version: suffix, operation, description.
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
    for Operation { subresource, path, id, parameters } in all_operations(version) {
        let in_path = parameters.into_iter().map(
            |(name, kind)| json!({"name": name, "in": "path", "type": kind, "required": true, "uniqueItems": true}),
        );
        let in_query = query_parameters(subresource)
            .iter()
            .map(|(name, kind)| json!({"name": name, "in": "query", "type": kind, "uniqueItems": true}));
        let in_body = body(subresource).map(|schema| json!({"name": "body", "in": "body", "schema": schema}));
        let consumes = in_body.is_some().then(|| json!([consumed(subresource)]));
        let (code, answer) = success(subresource);
        let mut answer = json!({"description": answer});
        if let Some(schema) = answered(subresource) {
            answer["schema"] = schema;
        }
        let mut operation = json!({
            "operationId": id,
            "description": subresource.endpoint().description,
            "parameters": in_path.chain(in_query).chain(in_body).collect::<Vec<_>>(),
            "responses": {code: answer, "401": {"description": "Unauthorized"}},
        });
        if let Some(consumes) = consumes {
            operation["consumes"] = consumes;
        }
        if subresource.answers_json() {
            operation["produces"] = json!([JSON]);
        }
        paths.insert(path, json!({method_key(subresource): operation}));
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
    for Operation { subresource, path, id, parameters } in all_operations(version) {
        let in_path = parameters
            .into_iter()
            .map(|(name, kind)| json!({"name": name, "in": "path", "required": true, "schema": {"type": kind}}));
        let in_query = query_parameters(subresource)
            .iter()
            .map(|(name, kind)| json!({"name": name, "in": "query", "schema": {"type": kind}}));
        let (code, answer) = success(subresource);
        let mut answer = json!({"description": answer});
        if let Some(schema) = answered(subresource) {
            answer["content"] = json!({JSON: {"schema": schema}});
        }
        let mut operation = json!({
            "operationId": id,
            "description": subresource.endpoint().description,
            "parameters": in_path.chain(in_query).collect::<Vec<_>>(),
            "responses": {code: answer, "401": {"description": "Unauthorized"}},
        });
        if let Some(schema) = body(subresource) {
            operation["requestBody"] = json!({"content": {consumed(subresource): {"schema": schema}}});
        }
        paths.insert(path, json!({method_key(subresource): operation}));
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
pub fn v2(headers: &HeaderMap) -> Response {
    if negotiation::accepts_json(headers) {
        answer(rendered_v2(), headers)
    } else {
        empty_response(StatusCode::NOT_ACCEPTABLE)
    }
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
    if !negotiation::accepts_json(headers) {
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
            // Two have a second form with a protocol.
            assert_eq!(paths.len(), Subresource::ALL.len() + 2 + VERSION_DOCUMENTS.len());
            let ids = paths
                .values()
                .flat_map(|path| path.as_object().unwrap().values())
                .map(|operation| operation["operationId"].as_str().unwrap())
                .collect::<BTreeSet<_>>();
            assert_eq!(ids.len(), paths.len());
        }
    }

    #[test]
    fn bodies_are_described_by_their_types() {
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
    fn content_types_are_those_that_are_taken_and_given() {
        let base = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}";
        let (second, third) = (v2_document(), v3_document("v1"));
        for (path, method, taken, given) in [
            ("/expand-vm-spec", "put", Some(JSON), Some(JSON)),
            ("/virtualmachines/{name}/objectgraph", "get", Some(JSON), Some(JSON)),
            ("/virtualmachines/{name}/start", "put", Some("*/*"), None),
            ("/virtualmachineinstances/{name}/userlist", "get", None, Some(JSON)),
            ("/virtualmachineinstances/{name}/reset", "put", None, None),
        ] {
            let path = format!("{base}{path}");
            let operation = &second["paths"][&path][method];
            assert_eq!(operation["consumes"], json!(taken.map(|kind| [kind])), "{path}");
            assert_eq!(operation["produces"], json!(given.map(|kind| [kind])), "{path}");
            let body = &third["paths"][&path][method]["requestBody"]["content"];
            assert_eq!(body.as_object().and_then(|body| body.keys().next().map(String::as_str)), taken, "{path}");
        }
    }

    #[test]
    fn what_can_be_tried_says_so_in_its_body_as_well() {
        for subresource in Subresource::ALL {
            let described = body(subresource).is_some_and(|schema| schema["properties"]["dryRun"].is_object());
            assert_eq!(described, subresource.can_be_tried(), "{subresource:?}");
        }
    }

    /// One word that OpenAPI 2 does not know makes kube-apiserver refuse the whole, for all groups: `kubectl apply` then
    /// cannot validate anything.
    #[test]
    fn version_2_keeps_to_its_words() {
        let text = v2_document().to_string();
        for word in ["anyOf", "oneOf", "not", "nullable", "const", "deprecated", "$defs", "patternProperties", "$ref"] {
            assert!(!text.contains(&format!("\"{word}\":")), "{word}");
        }
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{name}/backup";
        let command = &v2_document()["paths"][path]["put"]["parameters"][2]["schema"]["properties"]["cmd"];
        assert_eq!(command["enum"], json!(["Start", "Abort", "Export"]), "{command}");
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
