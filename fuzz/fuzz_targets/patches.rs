//! Differences between two values: the patch brings the first to the second, and is empty when they are the same.
//!
//! Input: two JSON documents.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::Value;

fuzz_target!(|input: &[u8]| -> Corpus {
    let mut documents = serde_json::Deserializer::from_slice(input).into_iter::<Value>();
    let (Some(Ok(before)), Some(Ok(after))) = (documents.next(), documents.next()) else { return Corpus::Reject };
    assert!(admission::patch::between(&before, &before, &before).is_empty());
    let patch = admission::patch::between(&before, &before, &after);
    let patch: json_patch::Patch = serde_json::from_value(patch.into()).expect("it is a JSON patch");
    let mut result = before.clone();
    json_patch::patch(&mut result, &patch).expect("it applies");
    assert_eq!(result, after);
    Corpus::Keep
});
