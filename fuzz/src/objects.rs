//! Checks that each object gets an answer, that its patch applies, and that a second call changes nothing more.
//!
//! Input: a line `PATH GROUP/VERSION/PLURAL OPERATION USER`, then one or two JSON documents: the object and the old object.

use serde_json::Value;

use crate::review::{Call, patched};

/// Returns true if the input was a call of a webhook.
pub fn check(input: &[u8]) -> bool {
    let mut parts = input.splitn(2, |byte| *byte == b'\n');
    let line = parts.next().and_then(|line| std::str::from_utf8(line).ok());
    let (Some(call), Some(documents)) = (line.and_then(Call::read), parts.next()) else { return false };
    if admission::Webhook::at(call.path).is_none() {
        return false;
    }
    let mut documents = serde_json::Deserializer::from_slice(documents).into_iter::<Value>();
    let Some(Ok(object)) = documents.next() else { return false };
    let old = documents.next().and_then(Result::ok).unwrap_or_default();

    let first = call.ask(&object, &old);
    if first.response.patch.is_some() {
        let once = patched(&object, &first);
        let twice = patched(&once, &call.ask(&once, &old));
        // Without a creation timestamp, defaults use the time of the request.
        if object.pointer("/metadata/creationTimestamp").is_some_and(Value::is_string) {
            assert_eq!(once, twice, "{} patches again", call.path);
        }
        let check = call.path.replace("-mutate", "-validate");
        for path in [check.as_str(), &format!("{check}-create")] {
            if admission::Webhook::at(path).is_some() {
                Call { path, ..call }.ask(&once, &old);
            }
        }
    }
    true
}
