//! Media types that clients accept and send, and other tokens in headers.

use http::{HeaderMap, header};

/// Returns true if the client accepts JSON. Without a header it accepts everything.
pub(crate) fn accepts_json(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).peekable();
    values.peek().is_none()
        || values
            .flat_map(|value| value.split(','))
            .filter_map(|range| range.split(';').next())
            .any(|range| matches!(range.trim(), "application/json" | "application/*" | "*/*"))
}

/// Returns true if the body is labelled as JSON.
pub(crate) fn sends_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.and_then(|kind| kind.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// Returns true if the client accepts aggregated discovery.
pub(crate) fn accepts_aggregated_discovery(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|range| {
        let parts = range.split(';').map(str::trim).collect::<Vec<_>>();
        ["application/json", "g=apidiscovery.k8s.io", "v=v2", "as=APIGroupDiscoveryList"]
            .iter()
            .all(|part| parts.contains(part))
    })
}

/// Returns true if one of the comma-separated values of a header is `token`.
pub(crate) fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|value| value.trim().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(name: header::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn json_is_accepted_unless_excluded() {
        assert!(accepts_json(&HeaderMap::new()));
        for (accept, expected) in [
            ("application/json", true),
            ("application/json, */*", true),
            ("text/html;q=0.9, */*;q=0.1", true),
            ("text/plain", false),
            ("application/yaml", false),
        ] {
            assert_eq!(accepts_json(&headers(header::ACCEPT, accept)), expected, "{accept}");
        }
    }

    #[test]
    fn json_body_needs_its_media_type() {
        assert!(sends_json(&headers(header::CONTENT_TYPE, "application/json; charset=utf-8")));
        assert!(!sends_json(&headers(header::CONTENT_TYPE, "application/yaml")));
        assert!(!sends_json(&HeaderMap::new()));
    }

    #[test]
    fn aggregated_discovery_is_negotiated_by_group_and_version() {
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        assert!(accepts_aggregated_discovery(&headers(header::ACCEPT, accept)));
        let beta = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
        assert!(!accepts_aggregated_discovery(&headers(header::ACCEPT, beta)));
        assert!(!accepts_aggregated_discovery(&headers(header::ACCEPT, "application/json")));
    }
}
