//! Label selectors: the rules of Kubernetes, and matching.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::pod_errors::{forbidden, invalid, required};
use crate::context::{FieldErrors, names};

/// An invalid label selector, with the message of its first error.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SelectorError(String);

/// Validates the label selector at `path`.
pub(crate) fn validate(path: &str, selector: &LabelSelector, errors: &mut FieldErrors) {
    for (key, value) in selector.match_labels.iter().flatten() {
        for error in names::qualified_name_errors(key) {
            invalid(&format!("{path}.matchLabels"), key, &error, errors);
        }
        for error in names::label_value_errors(value) {
            invalid(&format!("{path}.matchLabels"), value, &error, errors);
        }
    }
    for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{index}]");
        let values = requirement.values.as_ref().map_or(0, Vec::len);
        match requirement.operator.as_str() {
            "In" | "NotIn" if values == 0 => {
                required(&format!("{path}.values"), "must be specified when `operator` is 'In' or 'NotIn'", errors);
            }
            "Exists" | "DoesNotExist" if values > 0 => forbidden(
                &format!("{path}.values"),
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                errors,
            ),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", errors),
        }
        for error in names::qualified_name_errors(&requirement.key) {
            invalid(&format!("{path}.key"), &requirement.key, &error, errors);
        }
        for (index, value) in requirement.values.iter().flatten().enumerate() {
            for error in names::label_value_errors(value) {
                invalid(&format!("{path}.values[{index}]"), value, &error, errors);
            }
        }
    }
}

/// Adds an error if the selector of a set is invalid or does not match the labels of its template.
pub(crate) fn validate_match(
    selector: &LabelSelector,
    labels: Option<&BTreeMap<String, String>>,
    errors: &mut FieldErrors,
) {
    match matches(selector, labels.unwrap_or(&BTreeMap::new())) {
        Ok(true) => {}
        Ok(false) => errors.invalid("spec.selector", "selector does not match labels."),
        Err(error) => errors.invalid("spec.selector", error.to_string()),
    }
}

/// Returns true if a selector matches the labels. Fails if the selector is invalid.
pub(crate) fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Result<bool, SelectorError> {
    let mut errors = FieldErrors::new();
    validate("spec.selector", selector, &mut errors);
    if let Some(error) = errors.as_slice().first() {
        return Err(SelectorError(error.message.clone()));
    }
    let by_label = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let by_expression = selector.match_expressions.iter().flatten().all(|requirement| {
        let value = labels.get(&requirement.key);
        let listed = value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
        match requirement.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            _ => value.is_none(),
        }
    });
    Ok(by_label && by_expression)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_match_labels() {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        for (selector, want) in [
            (json!({"matchLabels": {"app": "web"}}), Ok(true)),
            (json!({"matchLabels": {"app": "db"}}), Ok(false)),
            (json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "db"]}]}), Ok(true)),
            (json!({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}), Ok(false)),
            (json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}), Ok(true)),
        ] {
            assert_eq!(matches(&serde_json::from_value(selector).unwrap(), &labels), want);
        }
        let broken = serde_json::from_value(json!({"matchExpressions": [{"key": "app", "operator": "Like"}]})).unwrap();
        assert!(matches(&broken, &labels).is_err());
    }
}
