//! What clients take and send.

use http::{HeaderMap, header};

/// Whether the client takes JSON. A client that says nothing takes everything.
pub fn accepts_json(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).peekable();
    values.peek().is_none()
        || values
            .flat_map(|value| value.split(','))
            .filter_map(|range| range.split(';').next())
            .any(|range| matches!(range.trim(), "application/json" | "application/*" | "*/*"))
}

/// Whether the client says that it sends JSON.
pub fn sends_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.and_then(|kind| kind.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// Whether the client takes aggregated discovery.
pub fn accepts_aggregated_discovery(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|range| {
        let parts = range.split(';').map(str::trim).collect::<Vec<_>>();
        ["application/json", "g=apidiscovery.k8s.io", "v=v2", "as=APIGroupDiscoveryList"]
            .iter()
            .all(|part| parts.contains(part))
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(name: header::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn json_is_taken_when_nothing_else_is_asked_for() {
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
    fn sent_json_must_be_called_so() {
        assert!(sends_json(&headers(header::CONTENT_TYPE, "application/json; charset=utf-8")));
        assert!(!sends_json(&headers(header::CONTENT_TYPE, "application/yaml")));
        assert!(!sends_json(&HeaderMap::new()));
    }

    #[test]
    fn aggregated_discovery_is_asked_for_by_group_and_version() {
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        assert!(accepts_aggregated_discovery(&headers(header::ACCEPT, accept)));
        let beta = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
        assert!(!accepts_aggregated_discovery(&headers(header::ACCEPT, beta)));
        assert!(!accepts_aggregated_discovery(&headers(header::ACCEPT, "application/json")));
    }
}
