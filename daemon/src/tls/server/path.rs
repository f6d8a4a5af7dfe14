//! Normalization of request paths.

use http::Uri;

/// Replaces repeated slashes in the path of a request by one, as Go's servers do: clients join an address that ends with a slash
/// and a path that begins with one. The query stays as it is.
pub(super) fn collapse_slashes(uri: &mut Uri) {
    if !uri.path().contains("//") {
        return;
    }
    let mut path = String::with_capacity(uri.path().len());
    for character in uri.path().chars() {
        if character != '/' || !path.ends_with('/') {
            path.push(character);
        }
    }
    if let Some(query) = uri.query() {
        path.push('?');
        path.push_str(query);
    }
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = path.parse().ok();
    *uri = Uri::from_parts(parts).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_slashes_of_the_path_become_one() {
        for (given, expected) in [
            ("//healthz", "/healthz"),
            ("/healthz", "/healthz"),
            ("///apis//x.io///v1", "/apis/x.io/v1"),
            ("//metrics?path=//a", "/metrics?path=//a"),
            ("/", "/"),
            ("//", "/"),
            ("/a%2F%2Fb//", "/a%2F%2Fb/"),
        ] {
            // The form in which hyper hands the target of a request over.
            let mut uri = Uri::builder().path_and_query(given).build().unwrap();
            collapse_slashes(&mut uri);
            assert_eq!(uri.path_and_query().map(|all| all.as_str()), Some(expected), "{given}");
        }
        let mut absolute: Uri = "https://virt-api:8443//healthz?a=b".parse().unwrap();
        collapse_slashes(&mut absolute);
        assert_eq!(absolute.to_string(), "https://virt-api:8443/healthz?a=b");
    }
}
