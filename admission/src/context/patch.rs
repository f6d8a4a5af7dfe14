//! JSON patches with the necessary changes only.
//!
//! Defaults are set on the decoded form of an object. The decoded form has a few structs that the client left out and lacks
//! a few zero values that the client wrote; neither is a change. So the patch is the difference between the decoded form
//! before and after, applied to the JSON that the client sent.

use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, TestOperation,
    jsonptr::{PointerBuf, Token},
};
use serde_json::Value;

use super::FieldPath;

/// Returns the patch that brings `raw` from `before` to `after`. `before` is the decoded form of `raw`.
pub fn between(raw: &Value, before: &Value, after: &Value) -> Patch {
    let mut patch = vec![];
    format_quantities(FieldPath::Root, raw, before, &mut patch);
    compare(FieldPath::Root, raw, before, after, &mut patch);
    Patch(patch)
}

/// Returns an operation that fails the patch if the value is another one.
pub(crate) fn test(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path, value })
}

/// Returns an operation that adds a value.
pub(crate) fn add(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path, value })
}

/// Returns an operation that replaces a value.
pub(crate) fn replace(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Replace(ReplaceOperation { path, value })
}

/// Returns an operation that removes a value.
pub(crate) fn remove(path: PointerBuf) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path })
}

/// Replaces quantities that were sent as fractional numbers by text. The types accept such numbers, but the schema, which
/// the API server checks afterwards, accepts text and integers only.
fn format_quantities(path: FieldPath<'_>, raw: &Value, decoded: &Value, patch: &mut Vec<PatchOperation>) {
    match (raw, decoded) {
        (Value::Number(number), Value::String(_)) if number.is_f64() => {
            patch.push(replace(path.pointer(), decoded.clone()));
        }
        (Value::Object(raw), Value::Object(decoded)) => {
            for (key, raw) in raw {
                if let Some(decoded) = decoded.get(key) {
                    format_quantities(FieldPath::Member(&path, key), raw, decoded, patch);
                }
            }
        }
        (Value::Array(raw), Value::Array(decoded)) if raw.len() == decoded.len() => {
            for (index, (raw, decoded)) in raw.iter().zip(decoded).enumerate() {
                format_quantities(FieldPath::Item(&path, index), raw, decoded, patch);
            }
        }
        _ => {}
    }
}

/// Adds the differences. Values are compared at the leaves: comparing whole branches first would compare each value once
/// for every branch that contains it.
fn compare(path: FieldPath<'_>, raw: &Value, before: &Value, after: &Value, patch: &mut Vec<PatchOperation>) {
    match (raw, before, after) {
        (Value::Object(raw), Value::Object(before), Value::Object(after)) => {
            for key in before.keys().filter(|key| !after.contains_key(*key) && raw.contains_key(*key)) {
                patch.push(remove(FieldPath::Member(&path, key).pointer()));
            }
            for (key, after) in after {
                let member = FieldPath::Member(&path, key);
                match (raw.get(key), before.get(key)) {
                    (Some(raw), Some(before)) => compare(member, raw, before, after, patch),
                    // Only in the decoded form, and unchanged.
                    (None, Some(before)) if before == after => {}
                    _ => patch.push(add(member.pointer(), after.clone())),
                }
            }
        }
        (Value::Array(raw), Value::Array(before), Value::Array(after))
            if raw.len() == before.len() && after.len() >= before.len() =>
        {
            for (index, after) in after.iter().enumerate() {
                match (raw.get(index), before.get(index)) {
                    (Some(raw), Some(before)) => compare(FieldPath::Item(&path, index), raw, before, after, patch),
                    _ => {
                        let mut end = path.pointer();
                        end.push_back(Token::new("-"));
                        patch.push(add(end, after.clone()));
                    }
                }
            }
        }
        _ if before == after => {}
        _ => patch.push(replace(path.pointer(), after.clone())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Applies the patch to `raw`.
    fn applied(raw: &Value, before: &Value, after: &Value) -> Value {
        let mut result = raw.clone();
        json_patch::patch(&mut result, &between(raw, before, after)).unwrap();
        result
    }

    #[test]
    fn equal_objects_give_an_empty_patch() {
        let raw = json!({"a": {"unknown": 1}});
        assert!(between(&raw, &json!({"a": {}, "b": {}}), &json!({"a": {}, "b": {}})).is_empty());
    }

    #[test]
    fn fractional_numbers_become_text() {
        let raw = json!({"requests": {"cpu": 2.2, "memory": 5}, "list": [{"a": "x"}, {"a": 0.5}], "share": 0.25});
        let before =
            json!({"requests": {"cpu": "2.2", "memory": "5"}, "list": [{"a": "x"}, {"a": "500m"}], "share": 0.25});
        assert_eq!(
            json!(between(&raw, &before, &before)),
            json!([
                {"op": "replace", "path": "/list/1/a", "value": "500m"},
                {"op": "replace", "path": "/requests/cpu", "value": "2.2"},
            ])
        );
        let mut after = before.clone();
        after["requests"] = json!({"cpu": "3"});
        assert_eq!(applied(&raw, &before, &after)["requests"], json!({"cpu": "3"}));
    }

    #[test]
    fn only_changed_fields_are_patched() {
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
    fn null_is_replaced() {
        assert_eq!(applied(&json!({"a": null}), &json!({}), &json!({"a": {"b": 1}})), json!({"a": {"b": 1}}));
    }

    #[test]
    fn lists_that_shrink_are_replaced() {
        let raw = json!({"a": [1, 2]});
        assert_eq!(applied(&raw, &raw, &json!({"a": [2]})), json!({"a": [2]}));
    }
}
