//! Paths and methods of requests to the aggregated API.
//!
//! One parser serves authorization and dispatch, so both have the same understanding of a request.

use http::Method;

use crate::{auth::authorization::Attributes, subresources::registry};

/// Errors of a path or method. The text is the body of the answer 401.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(clippy::enum_variant_names, reason = "each names the unknown part")]
pub(super) enum PathError {
    /// Not a path of this API.
    #[error("unknown api endpoint: {0}")]
    UnknownEndpoint(String),
    /// A resource that has no subresources here.
    #[error("unknown resource type {0}")]
    UnknownResource(String),
    /// An unknown method.
    #[error("unknown http verb in request: {0}")]
    UnknownVerb(String),
}

/// Longest part of a path in an answer.
const MAX_ECHO: usize = 256;

/// Parses method and path.
///
/// Names of Kubernetes objects need no escaping, so a path with an escaped, empty or relative element is refused.
pub(super) fn attributes(method: &Method, path: &str) -> Result<Attributes, PathError> {
    let unknown = || PathError::UnknownEndpoint(path.chars().take(MAX_ECHO).collect());
    let elements = path.split('/').skip(1).collect::<Vec<_>>();
    if elements.iter().any(|e| e.is_empty() || *e == "." || *e == ".." || e.contains(['%', '\\'])) {
        return Err(unknown());
    }
    let (group, version, namespace, resource, name, rest) = match elements.as_slice() {
        ["apis", group, version, "namespaces", namespace, resource, name, rest @ ..] if !rest.is_empty() => {
            (group, version, namespace, resource, *name, rest)
        }
        ["apis", group, version, "namespaces", namespace, resource] => {
            (group, version, namespace, resource, "", &[][..])
        }
        _ => return Err(unknown()),
    };
    if !registry::ALL.iter().any(|known| known.resource == *resource && known.name.is_empty() == name.is_empty()) {
        return Err(PathError::UnknownResource(resource.chars().take(MAX_ECHO).collect()));
    }
    // Parameters follow the name; the right is the same for all of them.
    let with_parameters = registry::ALL
        .iter()
        .filter(|known| known.resource == *resource && !known.path_parameters.is_empty())
        .find(|known| rest.first() == Some(&known.name));
    let subresource = with_parameters.map_or_else(|| rest.join("/"), |known| known.name.to_owned());
    let verb = match (method.as_str(), name.is_empty()) {
        ("POST", _) => "create",
        ("GET" | "HEAD", false) => "get",
        ("GET" | "HEAD", true) => "list",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", false) => "delete",
        ("DELETE", true) => "deletecollection",
        (other, _) => return Err(PathError::UnknownVerb(other.chars().take(MAX_ECHO).collect())),
    };
    Ok(Attributes {
        verb,
        group: (*group).to_owned(),
        version: (*version).to_owned(),
        namespace: (*namespace).to_owned(),
        resource: (*resource).to_owned(),
        name: name.to_owned(),
        subresource,
    })
}

/// Parses the path of a document of the group, `/apis/GROUP/VERSION/DOCUMENT`, as kube-apiserver does when it authorizes a
/// request for it: a list of the resource of that name.
pub(super) fn document_attributes(path: &str) -> Result<Attributes, PathError> {
    match path.split('/').skip(1).collect::<Vec<_>>().as_slice() {
        ["apis", group, version, document] => Ok(Attributes {
            verb: "list",
            group: (*group).to_owned(),
            version: (*version).to_owned(),
            namespace: String::new(),
            resource: (*document).to_owned(),
            name: String::new(),
            subresource: String::new(),
        }),
        _ => Err(PathError::UnknownEndpoint(path.chars().take(MAX_ECHO).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "/apis/subresources.kubevirt.io/v1";

    #[test]
    fn documents_are_authorized_as_kube_apiserver_does() {
        let found = document_attributes("/apis/subresources.kubevirt.io/v1/dump-cluster-profiler").unwrap();
        assert_eq!(
            [found.verb, &found.group, &found.version, &found.resource],
            ["list", "subresources.kubevirt.io", "v1", "dump-cluster-profiler"]
        );
        assert!([&found.namespace, &found.name, &found.subresource].iter().all(|part| part.is_empty()));
        assert!(document_attributes("/apis/subresources.kubevirt.io/v1/a/b").is_err());
    }

    #[test]
    fn paths_become_authorization_attributes() {
        // (method, path below the base, resource, name, subresource, verb)
        let cases = [
            (
                "GET",
                "/namespaces/a/virtualmachineinstances/b/console",
                "virtualmachineinstances",
                "b",
                "console",
                "get",
            ),
            ("HEAD", "/namespaces/a/virtualmachineinstances/b/vnc", "virtualmachineinstances", "b", "vnc", "get"),
            (
                "GET",
                "/namespaces/a/virtualmachineinstances/b/vnc/screenshot",
                "virtualmachineinstances",
                "b",
                "vnc/screenshot",
                "get",
            ),
            (
                "GET",
                "/namespaces/a/virtualmachineinstances/b/portforward/22/tcp",
                "virtualmachineinstances",
                "b",
                "portforward",
                "get",
            ),
            (
                "PUT",
                "/namespaces/a/virtualmachineinstances/b/evacuate/cancel",
                "virtualmachineinstances",
                "b",
                "evacuate/cancel",
                "update",
            ),
            ("PUT", "/namespaces/a/virtualmachines/b/start", "virtualmachines", "b", "start", "update"),
            ("POST", "/namespaces/a/virtualmachines/b/start", "virtualmachines", "b", "start", "create"),
            ("PATCH", "/namespaces/a/virtualmachines/b/start", "virtualmachines", "b", "start", "patch"),
            ("DELETE", "/namespaces/a/virtualmachines/b/start", "virtualmachines", "b", "start", "delete"),
            ("PUT", "/namespaces/a/expand-vm-spec", "expand-vm-spec", "", "", "update"),
            ("GET", "/namespaces/a/expand-vm-spec", "expand-vm-spec", "", "", "list"),
            ("DELETE", "/namespaces/a/expand-vm-spec", "expand-vm-spec", "", "", "deletecollection"),
        ];
        for (method, path, resource, name, subresource, verb) in cases {
            let found = attributes(&method.parse().unwrap(), &format!("{BASE}{path}")).unwrap();
            assert_eq!(
                found,
                Attributes {
                    verb,
                    group: "subresources.kubevirt.io".into(),
                    version: "v1".into(),
                    namespace: "a".into(),
                    resource: resource.into(),
                    name: name.into(),
                    subresource: subresource.into(),
                },
                "{method} {path}"
            );
        }
    }

    #[test]
    fn unknown_paths_are_refused() {
        let vmi = format!("{BASE}/namespaces/a/virtualmachineinstances/b");
        let unknown = [
            String::new(),
            "/".into(),
            "/api/v1/namespaces/a/virtualmachines/b/start".into(),
            format!("{BASE}/"),
            vmi.clone(),
            format!("{vmi}/"),
            format!("{vmi}/console/"),
            format!("{vmi}//console"),
            format!("{vmi}/../c/console"),
            format!("{vmi}/vnc%2Fscreenshot"),
            format!("{BASE}/cluster/a/virtualmachines/b/start"),
        ];
        for path in unknown {
            assert_eq!(attributes(&Method::GET, &path), Err(PathError::UnknownEndpoint(path)));
        }
        assert_eq!(
            attributes(&Method::GET, &format!("{BASE}/namespaces/a/secrets/b/console")),
            Err(PathError::UnknownResource("secrets".into()))
        );
        assert_eq!(
            attributes(&Method::GET, &format!("{BASE}/namespaces/a/virtualmachines")),
            Err(PathError::UnknownResource("virtualmachines".into()))
        );
        assert_eq!(
            attributes(&Method::OPTIONS, &format!("{vmi}/console")),
            Err(PathError::UnknownVerb("OPTIONS".into()))
        );
    }
}
