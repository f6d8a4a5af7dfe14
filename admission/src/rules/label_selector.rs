//! Label selectors: the rules of Kubernetes, and matching.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::json;

use super::pod_errors::{forbidden, invalid, required};
use crate::context::{FieldErrors, names};

/// An invalid label selector, with the message of its first invalid requirement.
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
    check(selector)?;
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

/// Fails with the first invalid requirement of a selector. The texts are those of `LabelSelectorAsSelector` of Kubernetes,
/// not those of pod validation.
fn check(selector: &LabelSelector) -> Result<(), SelectorError> {
    for (key, value) in selector.match_labels.iter().flatten() {
        check_requirement(key, std::slice::from_ref(value), None)?;
    }
    for requirement in selector.match_expressions.iter().flatten() {
        let values = requirement.values.as_deref().unwrap_or_default();
        let broken = match requirement.operator.as_str() {
            "In" | "NotIn" => values.is_empty().then_some("for 'in', 'notin' operators, values set can't be empty"),
            "Exists" | "DoesNotExist" => {
                (!values.is_empty()).then_some("values set must be empty for exists and does not exist")
            }
            other => return Err(SelectorError(format!("{:?} is not a valid label selector operator", start(other)))),
        };
        check_requirement(&requirement.key, values, broken)?;
    }
    Ok(())
}

/// Values whose errors a message names.
const NAMED: usize = 10;
/// Bytes of a key, a value or a list of values in a message.
const SHOWN: usize = 256;

/// Fails with the errors of a requirement; `broken` is the rule that the number of its values breaks. Values are not read under an
/// invalid key, which can be long and would be part of each text.
fn check_requirement(key: &str, values: &[String], broken: Option<&str>) -> Result<(), SelectorError> {
    let mut found = Vec::new();
    let problems = names::qualified_name_errors(key);
    let is_key = problems.is_empty();
    if !is_key {
        found.push(format!("key: Invalid value: {:?}: {}", start(key), problems.join("; ")));
    }
    if let Some(rule) = broken {
        let shown = if values.is_empty() { json!(null) } else { json!(values) }.to_string();
        found.push(format!("values: Invalid value: {}: {rule}", start(&shown)));
    }
    let invalid = values.iter().enumerate().filter(|_| is_key).filter_map(|(index, value)| {
        let problems = names::label_value_errors(value);
        let text = || format!("values[{index}][{key}]: Invalid value: {:?}: {}", start(value), problems.join("; "));
        (!problems.is_empty()).then(text)
    });
    found.extend(invalid.take(NAMED));
    match found.as_slice() {
        [] => Ok(()),
        [one] => Err(SelectorError(one.clone())),
        many => Err(SelectorError(format!("[{}]", many.join(", ")))),
    }
}

/// Returns as much of a text as a message shows.
fn start(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN)]
}

#[cfg(test)]
mod tests {
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
    }

    #[test]
    fn messages_are_those_of_kubernetes_selectors() {
        for (selector, start, end) in [
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Like"}]}),
                "\"Like\" is not a valid label selector operator",
                "",
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "In"}]}),
                "values: Invalid value: ",
                ": for 'in', 'notin' operators, values set can't be empty",
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}),
                "values: Invalid value: ",
                ": values set must be empty for exists and does not exist",
            ),
            (json!({"matchLabels": {"": "x"}}), "key: Invalid value: \"\": name part must be non-empty; name part", ""),
            (json!({"matchLabels": {"a": "b c"}}), "values[0][a]: Invalid value: \"b c\": a valid label", ""),
            (
                json!({"matchExpressions": [{"key": "a b", "operator": "NotIn", "values": []}]}),
                "[key: Invalid value: \"a b\": name part must consist",
                ", values: Invalid value: null: for 'in', 'notin' operators, values set can't be empty]",
            ),
        ] {
            let parsed = serde_json::from_value(selector.clone()).unwrap();
            let message = matches(&parsed, &BTreeMap::new()).unwrap_err().to_string();
            assert!(message.starts_with(start) && message.ends_with(end), "{selector}: {message}");
        }
    }

    #[test]
    fn messages_about_long_keys_and_many_values_are_short() {
        for (key, values) in [("k".repeat(100_000), 3000), (format!("{}/k", "a.".repeat(126) + "a"), 32_000)] {
            for operator in ["In", "Exists", "Like"] {
                let requirement = json!({"key": key, "operator": operator, "values": vec!["!"; values]});
                let selector = serde_json::from_value(json!({"matchExpressions": [requirement]})).unwrap();
                let message = matches(&selector, &BTreeMap::new()).unwrap_err().to_string();
                assert!(message.len() < 8192, "{operator} {values}: {} bytes", message.len());
            }
        }
    }
}
