//! See `fuzz::images`.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|input: &[u8]| -> Corpus { if fuzz::images::check(input) { Corpus::Keep } else { Corpus::Reject } });
