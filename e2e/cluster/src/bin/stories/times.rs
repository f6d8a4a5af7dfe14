//! Durations of stories: the file of those that are known, and the record of a run.
//!
//! The duration of a story is its part of the duration of a run: a story that runs beside three others counts a quarter of its
//! time, one that runs alone all of it. The sum is therefore what a run takes while all places are used.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use anyhow::{Context, Result};

const HEAD: &str =
    "# Seconds that each story adds to a run of all. `make test-all` and `make e2e RENEW=1` renew this file.\n";
/// A change below this part of a duration, or below a second, is not written.
const TOLERANCE: f64 = 0.25;

/// Parses lines of a name and seconds, separated by a tab. `#` begins a comment.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, f64>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let row = |line: &str| {
        let (name, seconds) = line.split_once('\t')?;
        Some((name.to_owned(), seconds.parse().ok()?))
    };
    lines.map(|line| row(line).with_context(|| format!("not a name and seconds: {line:?}"))).collect()
}

/// Returns the text that [`parse`] reads.
pub(crate) fn render(times: &BTreeMap<String, f64>) -> String {
    let mut text = HEAD.to_owned();
    for (name, seconds) in times {
        let _ = writeln!(text, "{name}\t{seconds:.1}");
    }
    text
}

/// Returns the known durations with those of a record. Its lines are those that the kit of the tests writes:
/// `DURATION s PART s STORY (NAME)`, with ` FAILED: ` and the reason after a failure, whose duration means nothing. Stories that
/// do not exist any more are left out.
pub(crate) fn renewed(
    known: &BTreeMap<String, f64>,
    record: &str,
    stories: &BTreeSet<String>,
) -> BTreeMap<String, f64> {
    let mut recorded: BTreeMap<&str, f64> = BTreeMap::new();
    let mut failed = BTreeSet::new();
    for line in record.lines() {
        let mut words = line.split_whitespace().skip(2);
        let (Some(part), Some(_), Some(story)) = (words.next(), words.next(), words.next()) else { continue };
        let Ok(part) = part.parse::<f64>() else { continue };
        *recorded.entry(story).or_default() += part;
        if line.contains(" FAILED: ") {
            failed.insert(story);
        }
    }
    let mut times = known.clone();
    for (story, seconds) in recorded.into_iter().filter(|(story, _)| !failed.contains(story)) {
        let differs = |known: &f64| (seconds - known).abs() > (known * TOLERANCE).max(1.0);
        if times.get(story).is_none_or(differs) {
            times.insert(story.to_owned(), seconds);
        }
    }
    times.retain(|story, _| stories.contains(story));
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(rows: &[(&str, f64)]) -> BTreeMap<String, f64> {
        rows.iter().map(|&(name, seconds)| (name.to_owned(), seconds)).collect()
    }

    #[test]
    fn rendered_times_are_parsed() {
        let known = times(&[("a::b", 12.3), ("c", 0.0)]);
        assert_eq!(parse(&render(&known)).unwrap(), known);
        assert_eq!(parse("").unwrap(), times(&[]));
        for text in ["a", "a\tx", "a 1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn record_renews_times_that_differ() {
        let known = times(&[("close", 10.0), ("differs", 10.0), ("failed", 10.0), ("gone", 10.0), ("not_run", 10.0)]);
        let record = "   48.0 s    12.0 s close (close)\n   52.0 s    13.0 s differs (x)\n    2.0 s     2.0 s failed (y) FAILED: a\n\
                      \n    8.0 s     2.0 s twice (a)\n    4.0 s     1.0 s twice (b)\n    8.0 s gone";
        let stories = ["close", "differs", "failed", "not_run", "twice"].map(str::to_owned).into();
        let expected =
            times(&[("close", 10.0), ("differs", 13.0), ("failed", 10.0), ("not_run", 10.0), ("twice", 3.0)]);
        assert_eq!(renewed(&known, record, &stories), expected);
    }
}
