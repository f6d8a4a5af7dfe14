//! JSON merge patches (RFC 7386) from two versions of an object.

use serde_json::{Map, Value};

/// The merge patch that turns `old` into `new`; `None` when they are equal.
///
/// Lists are replaced as a whole, as merge patches do; writers hold a lock by resource version.
#[must_use]
pub fn merge_patch(old: &Value, new: &Value) -> Option<Value> {
    if old == new {
        return None;
    }
    let (Value::Object(old), Value::Object(new)) = (old, new) else { return Some(new.clone()) };
    let mut patch = Map::new();
    for key in old.keys() {
        if !new.contains_key(key) {
            patch.insert(key.clone(), Value::Null);
        }
    }
    for (key, value) in new {
        match old.get(key) {
            Some(known) => {
                if let Some(change) = merge_patch(known, value) {
                    patch.insert(key.clone(), change);
                }
            }
            None => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    Some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_objects_have_no_patch() {
        assert_eq!(merge_patch(&json!({"a": [1, {"b": 2}]}), &json!({"a": [1, {"b": 2}]})), None);
    }

    #[test]
    fn patch_names_only_what_changed() {
        let old = json!({"a": 1, "b": {"c": 1, "d": 2}, "gone": true, "list": [1, 2]});
        let new = json!({"a": 1, "b": {"c": 1, "d": 3}, "list": [1], "new": {"x": 1}});
        assert_eq!(merge_patch(&old, &new), Some(json!({"b": {"d": 3}, "gone": null, "list": [1], "new": {"x": 1}})));
    }
}
