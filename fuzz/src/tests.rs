//! Runs the checks with the seeds and with variations of them. The variations are the same in every run.

use std::{
    fs, panic,
    path::Path,
    time::{Duration, Instant},
};

use crate::{images, objects, patches, review_bytes, specs};

/// Maximum number of variations of each seed.
const ROUNDS: usize = 300;
/// Time limit for all variations of a check. Fuzzing covers more.
const TIME: Duration = Duration::from_millis(900);
/// Variable with the seconds for each check, for `make test-long`. The number of variations has no limit then.
const SECONDS: &str = "FUZZ_SECONDS";

/// Reproducible pseudo-random numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which must not be 0.
    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.draw() % u64::try_from(end).unwrap()).unwrap()
    }

    /// Returns two positions in a text, in order.
    fn range(&mut self, length: usize) -> (usize, usize) {
        let (one, other) = (self.below(length + 1), self.below(length + 1));
        (one.min(other), one.max(other))
    }
}

/// Applies one to four changes to a text: flips a bit, moves a byte, duplicates a range, removes a range, or truncates the
/// text.
fn variation(seed: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut text = seed.to_vec();
    for _ in 0..=numbers.below(4) {
        if text.is_empty() {
            break;
        }
        let position = numbers.below(text.len());
        let (start, end) = numbers.range(text.len());
        match numbers.below(5) {
            0 => text[position] ^= 1 << numbers.below(8),
            1 => text[position] = text[numbers.below(seed.len()).min(text.len() - 1)],
            2 => {
                let range = text[start..end].to_vec();
                text.splice(end..end, range);
            }
            3 => {
                text.drain(start..end);
            }
            _ => text.truncate(position),
        }
    }
    text
}

fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    let mut seeds: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        })
        .collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "{target} has no seeds");
    seeds
}

fn holds(target: &str, check: fn(&[u8]) -> bool) {
    let seeds = seeds(target);
    for (name, seed) in &seeds {
        assert!(check(seed), "seed {name} of {target} is not of its kind");
    }
    let seconds = std::env::var(SECONDS).ok().map(|text| Duration::from_secs(text.parse().expect(SECONDS)));
    let (rounds, time) = seconds.map_or((ROUNDS, TIME), |time| (usize::MAX, time));
    let end = Instant::now() + time;
    let mut numbers = Numbers(1);
    for round in 0..rounds {
        for (name, seed) in &seeds {
            if Instant::now() >= end {
                return;
            }
            let input = variation(seed, &mut numbers);
            let outcome = panic::catch_unwind(|| check(&input));
            let text = String::from_utf8_lossy(&input);
            assert!(outcome.is_ok(), "{target} fails with variation {round} of seed {name}: {text:?}");
        }
    }
}

#[test]
fn any_body_has_a_well_formed_answer() {
    holds("review_bytes", review_bytes::check);
}

#[test]
fn any_image_is_judged_by_a_bounded_part() {
    holds("images", images::check);
}

#[test]
fn patches_of_objects_apply_and_are_idempotent() {
    holds("objects", objects::check);
}

#[test]
fn patches_turn_one_value_into_the_other() {
    holds("patches", patches::check);
}

#[test]
fn defaults_of_specs_are_set_once() {
    holds("specs", specs::check);
}

#[test]
fn variations_are_the_same_in_every_run() {
    let run = || {
        let mut numbers = Numbers(1);
        (0..100).map(|_| variation(b"{\"a\": [1, 2]}", &mut numbers)).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
    assert!(run().iter().any(|text| text != b"{\"a\": [1, 2]}"));
}
