//! Selects stories by name, or as a share whose duration is limited.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use anyhow::{Result, ensure};
use sha2::{Digest, Sha256};

/// Module with the stories that only `make node-test` runs.
const NODE_IN_A_VM: &str = "vm_node::";

/// Selected stories, and why the others are left out.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) selected: BTreeSet<String>,
    pub(crate) reason: String,
}

impl Selection {
    /// Returns the selected names as lines, and the report on the others for the end of the log.
    pub(crate) fn render(&self, stories: &BTreeSet<String>) -> (String, String) {
        let selected: String = self.selected.iter().map(|name| format!("{name}\n")).collect();
        let left: Vec<&String> = stories.difference(&self.selected).collect();
        let mut report = String::new();
        if !left.is_empty() {
            let _ = writeln!(report, "{} of {} stories were left out: {}", left.len(), stories.len(), self.reason);
            left.iter().for_each(|name| report.push_str(&format!("    {name}\n")));
        }
        (selected, report)
    }
}

/// Returns the names in the list that a test program prints, without the stories of [`NODE_IN_A_VM`].
pub(crate) fn listed(text: &str) -> BTreeSet<String> {
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    names.filter(|name| !name.starts_with(NODE_IN_A_VM)).map(str::to_owned).collect()
}

/// Returns the lines of a file without comments.
pub(crate) fn lines(text: &str) -> BTreeSet<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// Selects the stories whose names contain one of the texts.
///
/// # Errors
/// Fails for a text that no name contains, which would pass without a test.
pub(crate) fn named(stories: &BTreeSet<String>, texts: &[String]) -> Result<Selection> {
    for text in texts {
        ensure!(stories.iter().any(|name| name.contains(text)), "no story has a name that contains {text:?}");
    }
    let wanted = |name: &&String| texts.iter().any(|text| name.contains(text));
    let selected = stories.iter().filter(wanted).cloned().collect();
    Ok(Selection { selected, reason: format!("their names do not contain {}", texts.join(" or ")) })
}

/// Core stories, and of the others as many as there is time for.
pub(crate) struct Share<'a> {
    pub(crate) core: &'a BTreeSet<String>,
    /// Known durations in seconds.
    pub(crate) times: &'a BTreeMap<String, f64>,
    /// Determines the order of the others: the commit.
    pub(crate) seed: &'a str,
    /// Limit of the sum of the durations.
    pub(crate) seconds: f64,
}

impl Share<'_> {
    /// Selects core stories, those of unknown duration, and the others in the order of the seed until their time is used up. The
    /// last one may exceed it, with the probability that uses exactly the time on average: a long story would otherwise be selected
    /// rarely, or would prolong most runs.
    pub(crate) fn of(&self, stories: &BTreeSet<String>) -> Selection {
        let is_first = |name: &&String| self.core.contains(*name) || !self.times.contains_key(*name);
        let (first, mut others): (Vec<&String>, Vec<&String>) = stories.iter().partition(is_first);
        let duration = |name: &String| self.times.get(name).copied().unwrap_or_default();
        let digest = |name: &String| Sha256::digest(format!("{} {name}", self.seed)).to_vec();
        others.sort_by_cached_key(|name| digest(name));
        let mut used: f64 = first.iter().map(|name| duration(name)).sum();
        let core = used;
        let share = others.into_iter().take_while(|name| {
            let left = self.seconds - used;
            used += duration(name);
            fraction(&digest(name)) * duration(name) < left
        });
        let selected: BTreeSet<String> = first.into_iter().chain(share).cloned().collect();
        let reason = format!(
            "core stories take {core:.0} s of {:.0} s, and the rest of this time is for others, which commit {} selects \
             (make test-all runs all)",
            self.seconds, self.seed
        );
        Selection { selected, reason }
    }
}

/// Returns a number from 0 to 1 by the end of a digest, whose begin determines the order.
fn fraction(digest: &[u8]) -> f64 {
    digest.last_chunk::<4>().map_or(0.0, |end| f64::from(u32::from_be_bytes(*end)) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn names_are_read_from_lists_and_files() {
        assert_eq!(listed("a::b: test\nc: test\nd: benchmark\n\n2 tests, 1 benchmark\n"), set(&["a::b", "c"]));
        assert_eq!(lines("# comment\n\na::b\n  c\n"), set(&["a::b", "c"]));
    }

    #[test]
    fn stories_are_selected_by_parts_of_their_names() {
        let stories = set(&["boot::console", "disks::boot_order", "nics::plug"]);
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        for (parts, expected) in [
            (&["boot"][..], &["boot::console", "disks::boot_order"][..]),
            (&["boot::"], &["boot::console"]),
            (&["plug", "order"], &["disks::boot_order", "nics::plug"]),
        ] {
            assert_eq!(named(&stories, &texts(parts)).unwrap().selected, set(expected), "{parts:?}");
        }
        assert!(named(&stories, &texts(&["boot", "plgu"])).unwrap_err().to_string().contains("\"plgu\""));
    }

    #[test]
    fn stories_that_are_left_out_are_reported_with_the_reason() {
        let selection = Selection { selected: set(&["a", "c"]), reason: "why".to_owned() };
        let (selected, report) = selection.render(&set(&["a", "b", "c"]));
        assert_eq!((selected.as_str(), report.as_str()), ("a\nc\n", "1 of 3 stories were left out: why\n    b\n"));
        assert_eq!(selection.render(&set(&["a", "c"])).1, "");
    }

    /// Stories `s0` to `s9` of ten seconds each, of which two are core stories, and `new` of unknown duration.
    fn share(seed: &str, seconds: f64) -> BTreeSet<String> {
        let mut stories: BTreeSet<String> = (0..10).map(|number| format!("s{number}")).collect();
        let times = stories.iter().map(|name| (name.clone(), 10.0)).collect();
        stories.insert("new".to_owned());
        let core = set(&["s0", "s1", "gone"]);
        Share { core: &core, times: &times, seed, seconds }.of(&stories).selected
    }

    #[test]
    fn share_has_core_and_unknown_stories_and_as_many_others_as_there_is_time_for() {
        for (seconds, others) in [(0.0, 0), (20.0, 0), (30.0, 1), (45.0, 2), (50.0, 3), (55.0, 4), (1000.0, 8)] {
            let selected = share("seed", seconds);
            assert!(["s0", "s1", "new"].iter().all(|name| selected.contains(*name)), "{seconds}: {selected:?}");
            assert_eq!(selected.len(), 3 + others, "{seconds}: {selected:?}");
        }
    }

    #[test]
    fn share_is_repeated_for_a_commit_and_reaches_all_stories_in_several() {
        assert_eq!(share("one", 50.0), share("one", 50.0));
        assert_ne!(share("one", 50.0), share("two", 50.0));
        // Three of eight are selected each time, so that about twelve commits suffice on average.
        let reached: BTreeSet<String> = (0..40).flat_map(|commit| share(&commit.to_string(), 50.0)).collect();
        assert_eq!(reached.len(), 11);
    }

    #[test]
    fn long_stories_exceed_the_time_as_often_as_keeps_its_average() {
        let stories = set(&["long", "short"]);
        let times: BTreeMap<String, f64> = [("long".to_owned(), 100.0), ("short".to_owned(), 10.0)].into();
        let core = BTreeSet::new();
        let durations = |seed: u32| -> Vec<f64> {
            let seed = seed.to_string();
            let selected = Share { core: &core, times: &times, seed: &seed, seconds: 5.0 }.of(&stories).selected;
            selected.iter().map(|name| times[name]).collect()
        };
        let runs: Vec<Vec<f64>> = (0..1000).map(durations).collect();
        assert!(runs.iter().any(|run| run.contains(&100.0)));
        let average = runs.iter().flatten().sum::<f64>() / 1000.0;
        assert!((4.0..6.0).contains(&average), "{average}");
    }
}
