//! Paths of requests to the API server.

const SEGMENT_MAX: usize = 253;

/// Returns the path of a collection. `None` if a part of it, or the name of the object, is not a path segment: no such
/// object exists.
pub(super) fn collection_path(
    group: &str,
    version: &str,
    plural: &str,
    namespace: Option<&str>,
    name: Option<&str>,
) -> Option<String> {
    let parts = [version, plural].into_iter().chain(namespace).chain(name);
    let well_formed = (group.is_empty() || is_segment(group)) && parts.into_iter().all(is_segment);
    well_formed.then(|| {
        let root = if group.is_empty() { "/api".to_owned() } else { format!("/apis/{group}") };
        match namespace {
            Some(namespace) => format!("{root}/{version}/namespaces/{namespace}/{plural}"),
            None => format!("{root}/{version}/{plural}"),
        }
    })
}

/// Returns true if a text is one path segment without escapes. Names come from objects that users write and must not
/// lead to another path.
fn is_segment(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= SEGMENT_MAX
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte))
        && text.bytes().any(|byte| byte != b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_the_api_conventions() {
        let path = |group, version, plural, namespace| collection_path(group, version, plural, namespace, Some("a"));
        let claims = "/api/v1/namespaces/ns/persistentvolumeclaims";
        assert_eq!(path("", "v1", "persistentvolumeclaims", Some("ns")).as_deref(), Some(claims));
        let classes = "/apis/storage.k8s.io/v1/storageclasses";
        assert_eq!(path("storage.k8s.io", "v1", "storageclasses", None).as_deref(), Some(classes));
    }

    #[test]
    fn names_cannot_change_the_path() {
        for name in ["", ".", "..", "a/b", "../secrets", "a?b", "a#b", "a%2fb", "a b", "ä", &"x".repeat(254)] {
            assert_eq!(collection_path("", "v1", "pods", Some("ns"), Some(name)), None, "{name}");
            assert_eq!(collection_path("", "v1", "pods", Some(name), None), None, "{name}");
        }
    }
}
