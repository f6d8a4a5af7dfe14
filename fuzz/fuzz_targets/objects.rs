//! Objects sent to a webhook: an answer, whose patch applies, and that changes nothing more when it is asked again.
//!
//! Input: a line `PATH GROUP/VERSION/PLURAL OPERATION USER`, then one or two JSON documents: the object and the old one.

#![no_main]

use fuzz::Call;
use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::Value;

fuzz_target!(|input: &[u8]| -> Corpus {
    let mut parts = input.splitn(2, |byte| *byte == b'\n');
    let line = parts.next().and_then(|line| std::str::from_utf8(line).ok());
    let (Some(call), Some(documents)) = (line.and_then(Call::read), parts.next()) else { return Corpus::Reject };
    if admission::Webhook::at(call.path).is_none() {
        return Corpus::Reject;
    }
    let mut documents = serde_json::Deserializer::from_slice(documents).into_iter::<Value>();
    let Some(Ok(object)) = documents.next() else { return Corpus::Reject };
    let old = documents.next().and_then(Result::ok).unwrap_or_default();

    let first = call.ask(&object, &old);
    if first.response.patch.is_some() {
        let once = fuzz::patched(&object, &first);
        let twice = fuzz::patched(&once, &call.ask(&once, &old));
        // A status without a time of creation gets the time of the request.
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
    Corpus::Keep
});
