//! JSON patches that change only what has to change.
//!
//! Defaults are set on the typed form of an object. The typed form shows a few structs the client left out and leaves
//! out a few zero values the client wrote; neither is a change. So the patch is the difference between the typed form
//! before and after, put in terms of what the client really sent.

use serde_json::{Value, json};

use crate::place::Place;

/// The patch that brings `raw` from `before` to `after`. `before` is the typed form of `raw`.
pub fn between(raw: &Value, before: &Value, after: &Value) -> Vec<Value> {
    let mut patch = vec![];
    write_out(Place::Root, raw, before, &mut patch);
    walk(Place::Root, raw, before, after, &mut patch);
    patch
}

/// Amounts that were sent as fractional numbers become text. Types read them so, but the schema, which the API server holds
/// the object against after this, takes text and whole numbers only.
fn write_out(place: Place<'_>, raw: &Value, typed: &Value, patch: &mut Vec<Value>) {
    match (raw, typed) {
        (Value::Number(number), Value::String(_)) if number.is_f64() => {
            patch.push(json!({"op": "replace", "path": place.pointer(), "value": typed}));
        }
        (Value::Object(raw), Value::Object(typed)) => {
            for (key, raw) in raw {
                if let Some(typed) = typed.get(key) {
                    write_out(Place::Member(&place, key), raw, typed, patch);
                }
            }
        }
        (Value::Array(raw), Value::Array(typed)) if raw.len() == typed.len() => {
            for (index, (raw, typed)) in raw.iter().zip(typed).enumerate() {
                write_out(Place::Item(&place, index), raw, typed, patch);
            }
        }
        _ => {}
    }
}

/// What is the same in both forms gives nothing. That is found at the ends: comparing whole branches first would compare
/// each value once for every branch that it is in.
fn walk(place: Place<'_>, raw: &Value, before: &Value, after: &Value, patch: &mut Vec<Value>) {
    match (raw, before, after) {
        (Value::Object(raw), Value::Object(before), Value::Object(after)) => {
            for key in before.keys().filter(|key| !after.contains_key(*key) && raw.contains_key(*key)) {
                patch.push(json!({"op": "remove", "path": Place::Member(&place, key).pointer()}));
            }
            for (key, after) in after {
                let member = Place::Member(&place, key);
                match (raw.get(key), before.get(key)) {
                    (Some(raw), Some(before)) => walk(member, raw, before, after, patch),
                    // Shown by the typed form alone, and still the same.
                    (None, Some(before)) if before == after => {}
                    _ => patch.push(json!({"op": "add", "path": member.pointer(), "value": after})),
                }
            }
        }
        (Value::Array(raw), Value::Array(before), Value::Array(after))
            if raw.len() == before.len() && after.len() >= before.len() =>
        {
            for (index, after) in after.iter().enumerate() {
                match (raw.get(index), before.get(index)) {
                    (Some(raw), Some(before)) => walk(Place::Item(&place, index), raw, before, after, patch),
                    _ => patch.push(json!({"op": "add", "path": format!("{}/-", place.pointer()), "value": after})),
                }
            }
        }
        _ if before == after => {}
        _ => patch.push(json!({"op": "replace", "path": place.pointer(), "value": after})),
    }
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
    fn fractional_numbers_become_text() {
        let raw = json!({"requests": {"cpu": 2.2, "memory": 5}, "list": [{"a": "x"}, {"a": 0.5}], "share": 0.25});
        let before =
            json!({"requests": {"cpu": "2.2", "memory": "5"}, "list": [{"a": "x"}, {"a": "500m"}], "share": 0.25});
        assert_eq!(
            between(&raw, &before, &before),
            [
                json!({"op": "replace", "path": "/list/1/a", "value": "500m"}),
                json!({"op": "replace", "path": "/requests/cpu", "value": "2.2"}),
            ]
        );
        let mut after = before.clone();
        after["requests"] = json!({"cpu": "3"});
        assert_eq!(applied(&raw, &before, &after)["requests"], json!({"cpu": "3"}));
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
