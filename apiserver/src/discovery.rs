//! What the aggregated API says about itself.
//!
//! All of it is open to everybody, as on kube-apiserver, and lists only what is served. kube-apiserver reads the
//! resource lists and merges them into its own discovery; without them kubectl cannot resolve short names.

use axum::response::Response;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    error::{empty_response, json_response},
    openapi,
    path::{GROUP, Subresource, VERSIONS},
};

/// A document that needs no authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Document {
    /// `/`
    Root,
    /// `/apis`
    Groups,
    /// `/apis/subresources.kubevirt.io`
    Group,
    /// `/apis/subresources.kubevirt.io/<v>`
    Resources(&'static str),
    /// `…/<v>/version`
    Version,
    /// `/healthz`, `…/<v>/healthz`
    Health,
    /// `/openapi/v2`
    OpenApiV2,
    /// `/openapi/v3`
    OpenApiV3Root,
    /// `/openapi/v3/apis/subresources.kubevirt.io/<v>`
    OpenApiV3(&'static str),
}

/// The open document at exactly this path.
#[must_use]
pub fn find(path: &str) -> Option<Document> {
    match path {
        "/" => return Some(Document::Root),
        "/apis" => return Some(Document::Groups),
        "/healthz" => return Some(Document::Health),
        "/openapi/v2" => return Some(Document::OpenApiV2),
        "/openapi/v3" => return Some(Document::OpenApiV3Root),
        _ => {}
    }
    if let Some(rest) = path.strip_prefix("/openapi/v3/apis/").and_then(|rest| rest.strip_prefix(GROUP)) {
        return version(rest.strip_prefix('/')?).map(Document::OpenApiV3);
    }
    let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
    if rest.is_empty() {
        return Some(Document::Group);
    }
    let rest = rest.strip_prefix('/')?;
    match rest.split_once('/') {
        None => version(rest).map(Document::Resources),
        Some((v, "version")) => version(v).map(|_| Document::Version),
        Some((v, "healthz")) => version(v).map(|_| Document::Health),
        Some(_) => None,
    }
}

fn version(text: &str) -> Option<&'static str> {
    VERSIONS.into_iter().find(|version| *version == text)
}

/// The answer, for each document but the health, which has to ask the API server first.
#[must_use]
pub fn serve(document: Document, method: &Method, headers: &HeaderMap, query: Option<&str>) -> Response {
    if *method == Method::OPTIONS {
        let mut response = empty_response(StatusCode::OK);
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return response;
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return empty_response(StatusCode::METHOD_NOT_ALLOWED);
    }
    match document {
        Document::Root => json_response(StatusCode::OK, &root()),
        Document::Groups => json_response(StatusCode::OK, &json!({"kind": "APIGroupList", "groups": [group()]})),
        Document::Group => json_response(StatusCode::OK, &group()),
        Document::Resources(version) => json_response(StatusCode::OK, &resources(version)),
        Document::Version => json_response(StatusCode::OK, &version_info()),
        Document::OpenApiV2 => openapi::v2(headers),
        Document::OpenApiV3Root => openapi::v3_root(),
        Document::OpenApiV3(version) => openapi::v3(version, headers, query),
        Document::Health => empty_response(StatusCode::NOT_FOUND),
    }
}

fn root() -> Value {
    let mut paths =
        vec!["/apis".to_owned(), "/openapi/v2".to_owned(), "/openapi/v3".to_owned(), format!("/apis/{GROUP}")];
    paths.extend(VERSIONS.iter().map(|version| format!("/apis/{GROUP}/{version}")));
    json!({"paths": paths})
}

/// The group document. Its name is the one in the singular that clients of the API have always been given here; the
/// group document that they see at the cluster is kube-apiserver's own, with the right name.
fn group() -> Value {
    let versions = VERSIONS.map(|version| json!({"groupVersion": format!("{GROUP}/{version}"), "version": version}));
    json!({
        "kind": "APIGroup",
        "name": "subresource.kubevirt.io",
        "versions": versions,
        "preferredVersion": versions[0],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}],
    })
}

fn resources(version: &str) -> Value {
    // Kinds and verbs are empty on purpose: a list with verbs would make kubectl offer subresources as resources.
    let resources = Subresource::ALL.map(|subresource| {
        json!({
            "name": format!("{}/{}", subresource.resource(), subresource.name()),
            "singularName": "",
            "namespaced": true,
            "kind": "",
            "verbs": null,
        })
    });
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/{version}"),
        "resources": resources,
    })
}

/// What was built, in the form of Kubernetes version documents.
#[must_use]
pub fn version_info() -> Value {
    json!({
        "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        "gitCommit": option_env!("FERROVIRT_GIT_COMMIT").unwrap_or_default(),
        "gitTreeState": option_env!("FERROVIRT_GIT_TREE_STATE").unwrap_or_default(),
        "buildDate": option_env!("FERROVIRT_BUILD_DATE").unwrap_or_default(),
        // There is none; clients expect the key.
        "goVersion": "",
        "compiler": "rustc",
        "platform": platform(),
    })
}

fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}/{architecture}", std::env::consts::OS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_paths_are_exact() {
        let cases = [
            ("/", Some(Document::Root)),
            ("/apis", Some(Document::Groups)),
            ("/apis/", None),
            ("/healthz", Some(Document::Health)),
            ("/apis/subresources.kubevirt.io", Some(Document::Group)),
            ("/apis/subresources.kubevirt.io/", None),
            ("/apis/subresources.kubevirt.io/v1", Some(Document::Resources("v1"))),
            ("/apis/subresources.kubevirt.io/v1alpha3", Some(Document::Resources("v1alpha3"))),
            ("/apis/subresources.kubevirt.io/v1/", None),
            ("/apis/subresources.kubevirt.io/v2", None),
            ("/apis/subresources.kubevirt.io.example.com/v1", None),
            ("/apis/subresources.kubevirt.io/v1/version", Some(Document::Version)),
            ("/apis/subresources.kubevirt.io/v1alpha3/healthz", Some(Document::Health)),
            ("/apis/subresources.kubevirt.io/v2/healthz", None),
            ("/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start", None),
            ("/openapi/v2", Some(Document::OpenApiV2)),
            ("/openapi/v3", Some(Document::OpenApiV3Root)),
            ("/openapi/v3/apis/subresources.kubevirt.io/v1", Some(Document::OpenApiV3("v1"))),
            ("/openapi/v3/apis/subresources.kubevirt.io/v2", None),
            ("/metrics", None),
        ];
        for (path, expected) in cases {
            assert_eq!(find(path), expected, "{path}");
        }
    }

    #[test]
    fn resource_list_names_what_is_served() {
        let list = resources("v1alpha3");
        assert_eq!(list["groupVersion"], "subresources.kubevirt.io/v1alpha3");
        let names =
            list["resources"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect::<Vec<_>>();
        assert!(names.contains(&"virtualmachines/start"));
        assert!(names.contains(&"virtualmachineinstances/vnc/screenshot"));
        assert_eq!(names.len(), Subresource::ALL.len());
    }

    #[test]
    fn version_has_only_strings() {
        let version = version_info();
        assert!(version.as_object().unwrap().values().all(Value::is_string));
        assert_eq!(version["gitVersion"], concat!("v", env!("CARGO_PKG_VERSION")));
    }
}
