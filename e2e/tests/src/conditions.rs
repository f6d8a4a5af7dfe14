//! Conditions in the status of an object.

use serde_json::Value;

/// Returns a condition of an object.
#[must_use]
pub fn condition<'a>(object: &'a Value, type_: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == type_)
}

/// Returns true if a condition of an object is true.
#[must_use]
pub fn is_true(object: &Value, type_: &str) -> bool {
    condition(object, type_).is_some_and(|condition| condition["status"] == "True")
}
