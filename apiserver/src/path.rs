//! From method and path to what is asked for.
//!
//! One parser serves authorization and dispatch alike, so the two cannot disagree about what a request means.

use http::Method;

/// Group of the aggregated API.
pub const GROUP: &str = "subresources.kubevirt.io";
/// Versions of the aggregated API, preferred first. Both serve the same.
pub const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];

/// What a request wants to do, in the terms of a SubjectAccessReview.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// Authorization verb.
    pub verb: &'static str,
    /// API group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Namespace.
    pub namespace: String,
    /// Plural resource.
    pub resource: String,
    /// Object, empty for a request on the collection.
    pub name: String,
    /// Subresource, empty for none.
    pub subresource: String,
}

/// Why a request cannot be authorized. The text is the body of the answer 401.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Not a path of this API.
    #[error("unknown api endpoint: {0}")]
    UnknownEndpoint(String),
    /// A resource that has no subresources here.
    #[error("unknown resource type {0}")]
    UnknownResource(String),
    /// A method without a meaning.
    #[error("unknown http verb in request: {0}")]
    UnknownVerb(String),
}

/// Longest part of a path repeated in an answer.
const MAX_ECHO: usize = 256;

/// Reads method and path.
///
/// Names of Kubernetes objects never need escaping, so an escaped, empty or relative element has no honest reading.
pub fn attributes(method: &Method, path: &str) -> Result<Attributes, PathError> {
    let unknown = || PathError::UnknownEndpoint(path.chars().take(MAX_ECHO).collect());
    let elements = path.split('/').skip(1).collect::<Vec<_>>();
    if elements.iter().any(|e| e.is_empty() || *e == "." || *e == ".." || e.contains(['%', '\\'])) {
        return Err(unknown());
    }
    let (group, version, namespace, resource, name, subresource) = match elements.as_slice() {
        ["apis", group, version, "namespaces", namespace, resource, name, subresource @ ..]
            if !subresource.is_empty() =>
        {
            if !matches!(*resource, "virtualmachines" | "virtualmachineinstances") {
                return Err(PathError::UnknownResource(resource.chars().take(MAX_ECHO).collect()));
            }
            // Port and protocol follow; the right to forward is one for all of them.
            let subresource = if subresource.first() == Some(&"portforward") {
                "portforward".to_owned()
            } else {
                subresource.join("/")
            };
            (group, version, namespace, resource, *name, subresource)
        }
        ["apis", group, version, "namespaces", namespace, resource] => {
            if *resource != "expand-vm-spec" {
                return Err(PathError::UnknownResource(resource.chars().take(MAX_ECHO).collect()));
            }
            (group, version, namespace, resource, "", String::new())
        }
        _ => return Err(unknown()),
    };
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

/// A subresource that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subresource {
    /// VM start.
    Start,
    /// VM stop.
    Stop,
    /// VM restart.
    Restart,
    /// VMI pause.
    Pause,
    /// VMI unpause.
    Unpause,
    /// VMI softreboot.
    SoftReboot,
    /// VMI reset.
    Reset,
    /// VMI serial console.
    Console,
    /// VMI graphical console.
    Vnc,
    /// VMI picture of the graphical console.
    Screenshot,
}

impl Subresource {
    /// All that are served, in the order of discovery.
    pub const ALL: [Self; 10] = [
        Self::Vnc,
        Self::Screenshot,
        Self::Console,
        Self::Pause,
        Self::Unpause,
        Self::Reset,
        Self::SoftReboot,
        Self::Start,
        Self::Stop,
        Self::Restart,
    ];

    /// The resource it belongs to.
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Start | Self::Stop | Self::Restart => "virtualmachines",
            _ => "virtualmachineinstances",
        }
    }

    /// Its name below the resource.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Restart => "restart",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::SoftReboot => "softreboot",
            Self::Reset => "reset",
            Self::Console => "console",
            Self::Vnc => "vnc",
            Self::Screenshot => "vnc/screenshot",
        }
    }

    /// The method it is called with.
    #[must_use]
    pub const fn method(self) -> Method {
        match self {
            Self::Console | Self::Vnc | Self::Screenshot => Method::GET,
            _ => Method::PUT,
        }
    }
}

/// Why an authorized request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// 404
    NoSuchPath,
    /// 405
    WrongMethod,
}

/// What an authorized request asks for.
pub fn subresource(attributes: &Attributes, method: &Method) -> Result<Subresource, NotServed> {
    if attributes.group != GROUP || !VERSIONS.contains(&attributes.version.as_str()) {
        return Err(NotServed::NoSuchPath);
    }
    let found = Subresource::ALL
        .into_iter()
        .find(|s| s.resource() == attributes.resource && s.name() == attributes.subresource)
        .ok_or(NotServed::NoSuchPath)?;
    if found.method() == *method { Ok(found) } else { Err(NotServed::WrongMethod) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "/apis/subresources.kubevirt.io/v1";

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
                    group: GROUP.into(),
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
    fn paths_without_a_meaning_are_refused() {
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

    #[test]
    fn each_served_subresource_is_found_in_both_versions_by_its_method_only() {
        for version in VERSIONS {
            for expected in Subresource::ALL {
                let path =
                    format!("/apis/{GROUP}/{version}/namespaces/a/{}/b/{}", expected.resource(), expected.name());
                let right = attributes(&expected.method(), &path).unwrap();
                assert_eq!(subresource(&right, &expected.method()), Ok(expected));
                let wrong = attributes(&Method::POST, &path).unwrap();
                assert_eq!(subresource(&wrong, &Method::POST), Err(NotServed::WrongMethod));
            }
        }
    }

    #[test]
    fn what_is_not_served_is_not_found() {
        for path in [
            "/apis/subresources.kubevirt.io/v2/namespaces/a/virtualmachines/b/start",
            "/apis/example.com/v1/namespaces/a/virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/console",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/migrate",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/expand-vm-spec",
        ] {
            let found = attributes(&Method::PUT, path).unwrap();
            assert_eq!(subresource(&found, &Method::PUT), Err(NotServed::NoSuchPath), "{path}");
        }
    }
}
