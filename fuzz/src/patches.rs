//! Checks that the patch between two values turns the first into the second, and is empty for equal values.
//!
//! Input: two JSON documents.

use serde_json::Value;

/// Returns true if the input was two documents.
pub fn check(input: &[u8]) -> bool {
    let mut documents = serde_json::Deserializer::from_slice(input).into_iter::<Value>();
    let (Some(Ok(before)), Some(Ok(after))) = (documents.next(), documents.next()) else { return false };
    assert!(admission::context::patch::between(&before, &before, &before).is_empty());
    let patch = admission::context::patch::between(&before, &before, &after);
    let mut result = before.clone();
    json_patch::patch(&mut result, &patch).expect("it applies");
    assert_eq!(result, after);
    true
}
