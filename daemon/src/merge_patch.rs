//! JSON merge patches (RFC 7386) from two versions of an object.

use serde_json::{Map, Value};

/// Returns the merge patch that turns `old` into `new`, or `None` when they are equal.
///
/// Lists are replaced as a whole: merge patches cannot do otherwise. Writers send the resource version along, so that a
/// concurrent change of a list is a conflict.
#[must_use]
pub fn diff(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let removed = old.keys().filter(|key| !new.contains_key(*key)).map(|key| (key.clone(), Value::Null));
            let mut patch: Map<String, Value> = removed.collect();
            for (key, value) in new {
                let change = old.get(key).map_or_else(|| Some(value.clone()), |known| diff(known, value));
                patch.extend(change.map(|change| (key.clone(), change)));
            }
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        (old, new) => (old != new).then(|| new.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_holds_only_what_differs_and_leads_to_the_new_version() {
        for (old, new, expected) in [
            (json!({"a": [1, {"b": 2}]}), json!({"a": [1, {"b": 2}]}), None),
            (json!({}), json!({"guestOSInfo": {}}), Some(json!({"guestOSInfo": {}}))),
            (json!({"a": {"b": 1}}), json!({"a": {}}), Some(json!({"a": {"b": null}}))),
            (json!({"a": {"b": 1}}), json!({"a": 2}), Some(json!({"a": 2}))),
            (
                json!({"a": 1, "b": {"c": 1, "d": 2}, "gone": true, "list": [1, 2]}),
                json!({"a": 1, "b": {"c": 1, "d": 3}, "list": [1], "new": {"x": 1}}),
                Some(json!({"b": {"d": 3}, "gone": null, "list": [1], "new": {"x": 1}})),
            ),
        ] {
            let patch = diff(&old, &new);
            assert_eq!(patch, expected, "{old} to {new}");
            let mut patched = old.clone();
            if let Some(patch) = &patch {
                json_patch::merge(&mut patched, patch);
            }
            assert_eq!(patched, new);
        }
    }
}
