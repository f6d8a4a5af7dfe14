//! JSON patches that change only what has to change.
//!
//! Defaults are set on the typed form of an object. The typed form shows a few structs the client left out and leaves
//! out a few zero values the client wrote; neither is a change. So the patch is the difference between the typed form
//! before and after, put in terms of what the client really sent.

use serde_json::{Value, json};

/// The patch that brings `raw` from `before` to `after`. `before` is the typed form of `raw`.
pub fn between(raw: &Value, before: &Value, after: &Value) -> Vec<Value> {
    let mut patch = vec![];
    walk("", raw, before, after, &mut patch);
    patch
}

fn walk(path: &str, raw: &Value, before: &Value, after: &Value, patch: &mut Vec<Value>) {
    if before == after {
        return;
    }
    match (raw, before, after) {
        (Value::Object(raw), Value::Object(before), Value::Object(after)) => {
            for key in before.keys().filter(|key| !after.contains_key(*key) && raw.contains_key(*key)) {
                patch.push(json!({"op": "remove", "path": join(path, key)}));
            }
            for (key, after) in after {
                match (raw.get(key), before.get(key)) {
                    (Some(raw), Some(before)) => walk(&join(path, key), raw, before, after, patch),
                    // Shown by the typed form alone, and still the same.
                    (None, Some(before)) if before == after => {}
                    _ => patch.push(json!({"op": "add", "path": join(path, key), "value": after})),
                }
            }
        }
        (Value::Array(raw), Value::Array(before), Value::Array(after))
            if raw.len() == before.len() && after.len() >= before.len() =>
        {
            for (index, after) in after.iter().enumerate() {
                match (raw.get(index), before.get(index)) {
                    (Some(raw), Some(before)) => walk(&format!("{path}/{index}"), raw, before, after, patch),
                    _ => patch.push(json!({"op": "add", "path": format!("{path}/-"), "value": after})),
                }
            }
        }
        _ => patch.push(json!({"op": "replace", "path": path, "value": after})),
    }
}

fn join(path: &str, key: &str) -> String {
    format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies the patch to what was sent; the result must read as `after`.
    fn applied(raw: &Value, before: &Value, after: &Value) -> Value {
        let patch: json_patch::Patch = serde_json::from_value(Value::from(between(raw, before, after))).unwrap();
        let mut result = raw.clone();
        json_patch::patch(&mut result, &patch).unwrap();
        result
    }

    #[test]
    fn nothing_changed_gives_no_patch() {
        let raw = json!({"a": {"unknown": 1}});
        assert!(between(&raw, &json!({"a": {}, "b": {}}), &json!({"a": {}, "b": {}})).is_empty());
    }

    #[test]
    fn only_changed_fields_are_touched() {
        let raw = json!({"spec": {"kept": false, "list": [{"name": "a", "odd": 1}]}});
        let before = json!({"spec": {"list": [{"name": "a"}], "resources": {}}});
        let after = json!({"spec": {"list": [{"name": "a", "disk": {}}, {"name": "b"}], "resources": {"x": 1}}});
        assert_eq!(
            applied(&raw, &before, &after),
            json!({"spec": {"kept": false, "list": [{"name": "a", "odd": 1, "disk": {}}, {"name": "b"}], "resources": {"x": 1}}})
        );
    }

    #[test]
    fn keys_are_escaped() {
        let raw = json!({"a": {"x/y~z": 1}});
        assert_eq!(applied(&raw, &raw, &json!({"a": {"x/y~z": 2, "n/m": 3}})), json!({"a": {"x/y~z": 2, "n/m": 3}}));
    }

    #[test]
    fn null_gives_way() {
        assert_eq!(applied(&json!({"a": null}), &json!({}), &json!({"a": {"b": 1}})), json!({"a": {"b": 1}}));
    }

    #[test]
    fn lists_that_shrink_are_replaced() {
        let raw = json!({"a": [1, 2]});
        assert_eq!(applied(&raw, &raw, &json!({"a": [2]})), json!({"a": [2]}));
    }
}
