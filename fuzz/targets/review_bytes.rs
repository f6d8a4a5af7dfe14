//! See `fuzz::review_bytes`.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { if fuzz::review_bytes::check(input) { Corpus::Keep } else { Corpus::Reject } });
