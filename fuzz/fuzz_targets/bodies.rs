//! Whatever is sent to a webhook: there is a well-formed answer.
//!
//! Input: any bytes; they are sent to every webhook.

#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    for webhook in admission::WEBHOOKS {
        fuzz::answer(webhook.path, body);
    }
});
