//! Discovery documents of the aggregated API.
//!
//! They need no authorization, as on kube-apiserver, and list only what is served. kube-apiserver reads the resource lists and
//! merges them into its own discovery; without them kubectl cannot resolve short names.

use axum::response::{IntoResponse, Response};
use daemon::profiler::ProfilerAction;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

use super::openapi;
use crate::{
    requests::{
        error::{ApiError, empty_response, json_response},
        negotiation,
    },
    subresources::{
        common::specification::{GROUP, Specification, VERSIONS},
        registry,
    },
};

/// A document of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Document {
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
    /// `…/<v>/guestfs`
    GuestFs,
    /// `/healthz`, `…/<v>/healthz`
    Health,
    /// `…/<v>/start-cluster-profiler` and the like
    Profiler(ProfilerAction),
    /// `/openapi/v2`
    OpenApiV2,
    /// `/openapi/v3`
    OpenApiV3Root,
    /// `/openapi/v3/apis/subresources.kubevirt.io/<v>`
    OpenApiV3(&'static str),
}

/// Returns the document at a path.
#[must_use]
pub(crate) fn find(path: &str) -> Option<Document> {
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
        Some((v, rest)) => {
            version(v)?;
            match rest {
                "version" => Some(Document::Version),
                "healthz" => Some(Document::Health),
                "guestfs" => Some(Document::GuestFs),
                "start-cluster-profiler" => Some(Document::Profiler(ProfilerAction::Start)),
                "stop-cluster-profiler" => Some(Document::Profiler(ProfilerAction::Stop)),
                "dump-cluster-profiler" => Some(Document::Profiler(ProfilerAction::DumpCluster)),
                _ => None,
            }
        }
    }
}

fn version(text: &str) -> Option<&'static str> {
    VERSIONS.into_iter().find(|version| *version == text)
}

/// Returns the answer to all methods but GET and HEAD.
pub(crate) fn refuse_method(method: &Method) -> Option<Response> {
    match *method {
        Method::GET | Method::HEAD => None,
        Method::OPTIONS => {
            let mut response = empty_response(StatusCode::OK);
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            Some(response)
        }
        _ => Some(ApiError::WrongMethod("GET").into_response()),
    }
}

/// Serves a document that depends on the registry only.
#[must_use]
pub(crate) fn serve(document: Document, headers: &HeaderMap, query: Option<&str>) -> Response {
    match document {
        Document::Root => json_response(StatusCode::OK, &root()),
        Document::Groups if negotiation::accepts_aggregated_discovery(headers) => aggregated(),
        Document::Groups => json_response(StatusCode::OK, &json!({"kind": "APIGroupList", "groups": [group()]})),
        Document::Group => json_response(StatusCode::OK, &group()),
        Document::Resources(version) => json_response(StatusCode::OK, &resources(version)),
        Document::Version => json_response(StatusCode::OK, &version_info()),
        Document::OpenApiV2 => openapi::v2(headers),
        Document::OpenApiV3Root => openapi::v3_root(),
        Document::OpenApiV3(version) => openapi::v3(version, headers, query),
        Document::Health | Document::GuestFs | Document::Profiler(_) => ApiError::NoSuchPath.into_response(),
    }
}

fn root() -> Value {
    let mut paths = vec!["/apis".to_owned(), "/openapi/v2".to_owned()];
    // The group is named with each of its versions.
    paths.extend(VERSIONS.iter().flat_map(|version| [format!("/apis/{GROUP}"), format!("/apis/{GROUP}/{version}")]));
    json!({"paths": paths})
}

/// Returns the group document. As in the reference, its name is singular; clients of the cluster see kube-apiserver's own
/// document, with the correct name.
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
    let resources = listed(version)
        .map(|known| {
            json!({
                "name": known.full_name(),
                "singularName": "",
                "namespaced": true,
                "kind": "",
                "verbs": null,
            })
        })
        .collect::<Vec<_>>();
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/{version}"),
        "resources": resources,
    })
}

/// Returns the subresources of a version that discovery names.
fn listed(version: &str) -> impl Iterator<Item = &'static Specification> {
    registry::ALL.into_iter().filter(move |known| known.listed && known.versions.contains(&version))
}

/// Returns the resources of a version, each with its subresources.
fn resources_with_children(version: &str) -> Vec<Value> {
    // Older clients fail on a missing kind.
    let kind = || json!({"group": "", "version": "", "kind": ""});
    let mut resources: Vec<Value> = Vec::new();
    for known in listed(version) {
        let at = resources.iter().position(|found| found["resource"] == known.resource).unwrap_or(resources.len());
        if at == resources.len() {
            resources.push(json!({
                "resource": known.resource,
                "responseKind": kind(),
                "scope": "Namespaced",
                "singularResource": "",
                "verbs": [],
            }));
        }
        if known.name.is_empty() {
            continue;
        }
        let entry = json!({"subresource": known.name, "responseKind": kind(), "verbs": []});
        match resources.get_mut(at).and_then(|parent| parent["subresources"].as_array_mut()) {
            Some(subresources) => subresources.push(entry),
            None => resources[at]["subresources"] = json!([entry]),
        }
    }
    resources
}

/// Returns discovery in one document, `apidiscovery.k8s.io/v2`, with the contents of the lists of all versions.
fn aggregated() -> Response {
    let versions = VERSIONS.map(
        |version| json!({"version": version, "freshness": "Current", "resources": resources_with_children(version)}),
    );
    let document = json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": [{"metadata": {"name": GROUP}, "versions": versions}],
    });
    let mut response = json_response(StatusCode::OK, &document);
    let kind = HeaderValue::from_static("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
    response
}

/// Returns the version, in the form of Kubernetes version documents. The image sets the commit in variables
/// (`images/src/source.rs`), since a commit in the program would change it with each build.
#[must_use]
pub(crate) fn version_info() -> Value {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    json!({
        "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        "gitCommit": variable("FERROVIRT_GIT_COMMIT"),
        "gitTreeState": variable("FERROVIRT_GIT_TREE_STATE"),
        "buildDate": variable("FERROVIRT_BUILD_DATE"),
        // Clients expect the key.
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
            ("/apis/subresources.kubevirt.io/v1/guestfs", Some(Document::GuestFs)),
            ("/apis/subresources.kubevirt.io/v1/guestfs/", None),
            (
                "/apis/subresources.kubevirt.io/v1/dump-cluster-profiler",
                Some(Document::Profiler(ProfilerAction::DumpCluster)),
            ),
            ("/stop-profiler", None),
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
    fn root_lists_the_paths_of_the_reference() {
        let group = "/apis/subresources.kubevirt.io";
        let versions = [format!("{group}/v1"), format!("{group}/v1alpha3")];
        assert_eq!(root()["paths"], json!(["/apis", "/openapi/v2", group, versions[0], group, versions[1]]));
    }

    #[test]
    fn resource_list_contains_the_listed_subresources() {
        let list = resources("v1alpha3");
        assert_eq!(list["groupVersion"], "subresources.kubevirt.io/v1alpha3");
        let names =
            list["resources"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(names.len(), 31);
        assert_eq!(names[0], "expand-vm-spec");
        assert_eq!(names[13], "virtualmachines/start");
        assert_eq!(names[30], "virtualmachineinstances/evacuate/cancel");
        // Served, but not listed.
        assert!(!names.contains(&"virtualmachineinstances/usbredir"));
    }

    #[tokio::test]
    async fn aggregated_discovery_equals_the_lists() {
        let mut headers = HeaderMap::new();
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
        let response = serve(Document::Groups, &headers, None);
        assert_eq!(response.headers()[header::CONTENT_TYPE], accept);
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let document: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(document["items"][0]["metadata"]["name"], GROUP);
        for version in document["items"][0]["versions"].as_array().unwrap() {
            let mut names = Vec::new();
            for resource in version["resources"].as_array().unwrap() {
                let parent = resource["resource"].as_str().unwrap();
                match resource["subresources"].as_array() {
                    Some(children) => {
                        names.extend(
                            children.iter().map(|c| format!("{parent}/{}", c["subresource"].as_str().unwrap())),
                        );
                    }
                    None => names.push(parent.to_owned()),
                }
            }
            let mut expected =
                listed(version["version"].as_str().unwrap()).map(Specification::full_name).collect::<Vec<_>>();
            names.sort();
            expected.sort();
            assert_eq!(names, expected);
        }
    }

    #[test]
    fn documents_are_read_only() {
        assert!(refuse_method(&Method::GET).is_none());
        assert_eq!(refuse_method(&Method::OPTIONS).unwrap().status(), StatusCode::OK);
        assert_eq!(refuse_method(&Method::POST).unwrap().status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[test]
    fn version_has_only_strings() {
        let version = version_info();
        assert!(version.as_object().unwrap().values().all(Value::is_string));
        assert_eq!(version["gitVersion"], concat!("v", env!("CARGO_PKG_VERSION")));
    }
}
