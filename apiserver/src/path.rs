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

/// Reads the path of a document of the group, `/apis/GROUP/VERSION/DOCUMENT`, as kube-apiserver does when it authorizes a
/// request for it: a list of the resource of that name.
pub fn document_attributes(path: &str) -> Result<Attributes, PathError> {
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

/// Port and protocol in the path of a port-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestPort {
    /// Port, 1 to 65535.
    pub port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
}

/// Protocols that can be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A stream.
    Tcp,
    /// One message for each datagram.
    Udp,
}

/// Why a path is not that of a port-forward.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// More or fewer elements than port and protocol.
    #[error("404: Page Not Found")]
    NoSuchPath,
    /// The port is not one.
    #[error("invalid port {0:?}: must be a number between 1 and 65535")]
    Port(String),
    /// The protocol is not one.
    #[error("invalid protocol {0:?}: must be tcp or udp")]
    Protocol(String),
}

/// Reads port and protocol of `…/portforward/PORT[/PROTOCOL]`, a path that [`attributes`] has taken.
pub fn guest_port(path: &str) -> Result<GuestPort, PortError> {
    let mut elements = path.split('/').skip_while(|element| *element != "namespaces").skip(5);
    let cut = |text: &str| text.chars().take(MAX_ECHO).collect::<String>();
    let (port, protocol) = match (elements.next(), elements.next(), elements.next()) {
        (Some(port), protocol, None) => (port, protocol.unwrap_or("tcp")),
        _ => return Err(PortError::NoSuchPath),
    };
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let number = port.parse::<u16>().ok().filter(|number| digits && *number != 0);
    let port = number.ok_or_else(|| PortError::Port(cut(port)))?;
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        other => return Err(PortError::Protocol(cut(other))),
    };
    Ok(GuestPort { port, protocol })
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
    fn port_and_protocol_come_from_the_path() {
        let at = |rest: &str| guest_port(&format!("{BASE}/namespaces/a/virtualmachines/b/portforward{rest}"));
        assert_eq!(at("/22"), Ok(GuestPort { port: 22, protocol: Protocol::Tcp }));
        assert_eq!(at("/53/udp"), Ok(GuestPort { port: 53, protocol: Protocol::Udp }));
        assert_eq!(at(""), Err(PortError::NoSuchPath));
        assert_eq!(at("/22/tcp/x"), Err(PortError::NoSuchPath));
        for port in ["0", "65536", "+22", "ssh", "-1"] {
            assert_eq!(at(&format!("/{port}")), Err(PortError::Port(port.into())));
        }
        assert_eq!(at("/22/sctp"), Err(PortError::Protocol("sctp".into())));
        // A namespace, a machine and a port of confusing names.
        let path = format!("{BASE}/namespaces/namespaces/virtualmachines/portforward/portforward/1");
        assert_eq!(guest_port(&path), Ok(GuestPort { port: 1, protocol: Protocol::Tcp }));
    }
}
