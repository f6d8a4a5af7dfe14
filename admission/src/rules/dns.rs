//! DNS settings of the launcher pod: the rules of Kubernetes for pods.

use api::VirtualMachineInstanceSpec;

use crate::context::{FieldErrors, addresses, names};

const POLICIES: [&str; 5] = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None", ""];
const NAMESERVERS_MAX: usize = 3;
const SEARCHES_MAX: usize = 6;
const SEARCH_CHARS_MAX: usize = 256;

/// Validates the DNS settings.
pub(super) fn validate(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let policy = spec.dns_policy.as_deref().unwrap_or_default();
    if !POLICIES.contains(&policy) {
        errors.not_supported(
            format!("{root}.dnsPolicy"),
            format!("DNSPolicy: {policy} is not supported, valid values: [{}]", POLICIES.join(" ")),
        );
    }
    let Some(config) = &spec.dns_config else {
        if policy == "None" {
            errors.required(format!("{root}.dnsConfig"), "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        return;
    };
    let nameservers = config.nameservers.as_deref().unwrap_or_default();
    if policy == "None" && nameservers.is_empty() {
        errors.required("nameservers", "must provide at least one DNS nameserver when `dnsPolicy` is None");
        return;
    }
    if nameservers.len() > NAMESERVERS_MAX {
        errors.invalid(
            "nameservers",
            format!("must not have more than {NAMESERVERS_MAX} nameservers: [{}]", nameservers.join(" ")),
        );
    }
    for server in nameservers.iter().filter(|server| addresses::address(server).is_none()) {
        errors.invalid("nameservers", format!("must be valid IP address: {server}"));
    }
    let searches = config.searches.as_deref().unwrap_or_default();
    if searches.len() > SEARCHES_MAX {
        errors.invalid("searchDomains", format!("must not have more than {SEARCHES_MAX} search paths"));
    }
    if searches.join(" ").chars().count() > SEARCH_CHARS_MAX {
        errors.invalid(
            "searchDomains",
            format!("must not have more than {SEARCH_CHARS_MAX} characters (including spaces) in the search list"),
        );
    }
    for search in searches {
        // A final dot marks an absolute name.
        for error in names::subdomain_errors(search.strip_suffix('.').unwrap_or(search)) {
            errors.invalid("searchDomains", error);
        }
    }
    for option in config.options.iter().flatten() {
        if option.name.as_deref().unwrap_or_default().is_empty() {
            errors.invalid("options", "Option.Name must not be empty");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::rules::testing::*;

    #[test]
    fn policy_is_known_and_none_brings_nameservers() {
        accepts(json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.1", "01.1.1.1"]}}));
        refuses(json!({"dnsPolicy": "Maybe"}), "spec.dnsPolicy", "DNSPolicy: Maybe is not supported");
        refuses(json!({"dnsPolicy": "None"}), "spec.dnsConfig", "must provide `dnsConfig`");
        refuses(json!({"dnsPolicy": "None", "dnsConfig": {}}), "nameservers", "at least one DNS nameserver");
    }

    #[test]
    fn lists_are_bounded_and_well_formed() {
        accepts(json!({"dnsConfig": {"searches": ["a.b."], "options": [{"name": "ndots", "value": "2"}]}}));
        refuses(
            json!({"dnsConfig": {"nameservers": ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"]}}),
            "nameservers",
            "more than 3",
        );
        refuses(json!({"dnsConfig": {"nameservers": ["dns"]}}), "nameservers", "must be valid IP address: dns");
        refuses(json!({"dnsConfig": {"searches": ["a_b"]}}), "searchDomains", "RFC 1123 subdomain");
        refuses(
            json!({"dnsConfig": {"searches": ["a", "b", "c", "d", "e", "f", "g"]}}),
            "searchDomains",
            "more than 6",
        );
        refuses(json!({"dnsConfig": {"searches": ["a".repeat(300)]}}), "searchDomains", "more than 256 characters");
        refuses(json!({"dnsConfig": {"options": [{"value": "2"}]}}), "options", "Option.Name must not be empty");
    }
}
