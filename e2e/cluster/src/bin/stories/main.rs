//! `stories`: selects the stories of a run, and keeps their durations.
//!
//! [`select`], [`changes`] and [`times`] decide; this file reads and writes the files of the working tree, in which it is run.

mod changes;
mod select;
mod times;

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};

use crate::select::{Selection, Share};

/// Core stories, one for each capability.
const CORE: &str = "e2e/core-stories.txt";
/// Paths of the repository and the modules whose stories test them.
const MAP: &str = "e2e/story-map.txt";
/// Known durations.
const TIMES: &str = "e2e/story-times.tsv";
/// Durations of the last run.
const RECORD: &str = "build/story-times";
/// Limit of the sum of the durations of a share, so that `make test` stays within its time, which docs/benchmarks.md lists.
const SECONDS: f64 = 830.0;
/// Names of the selected stories, for `e2e/run.sh`.
const SELECTED: &str = "build/stories-selected";
/// Reason and names of the other stories, empty if there are none.
const LEFT: &str = "build/stories-left";

/// Selects the stories of a run, and keeps their durations. Standard input: the list of all stories, as the test program prints it
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Writes build/stories-selected and build/stories-left; without arguments all stories are selected
    Select {
        /// Core stories, and a share of the others that depends on the commit
        #[arg(long, conflicts_with_all = ["changed", "names"])]
        share: bool,
        /// Seconds for the stories of --share: the sum of their known durations
        #[arg(long, env = "STORY_SECONDS", default_value_t = SECONDS)]
        seconds: f64,
        /// Stories that test what changed since this revision
        #[arg(long, conflicts_with = "names")]
        changed: Option<String>,
        /// Stories whose names contain one of these texts
        names: Vec<String>,
    },
    /// Takes the durations of build/story-times over into e2e/story-times.tsv
    Renew,
}

fn main() -> ExitCode {
    match run(Arguments::parse().action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stories: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("cannot read the list of stories")?;
    let stories = select::listed(&text);
    ensure!(!stories.is_empty(), "the list of stories on standard input is empty");
    match action {
        Action::Select { share, seconds, changed, names } => {
            let selection = match changed {
                _ if share => of_share(&stories, seconds)?,
                Some(base) => of_changes(&stories, &base)?,
                None if names.is_empty() => Selection { selected: stories.clone(), reason: String::new() },
                None => select::named(&stories, &names)?,
            };
            let (selected, left) = selection.render(&stories);
            write(SELECTED, &selected)?;
            write(LEFT, &left)?;
            println!("{} of {} stories are selected", selection.selected.len(), stories.len());
        }
        Action::Renew => {
            let record = read(RECORD)?;
            write(TIMES, &times::render(&times::renewed(&times::parse(&known_times()?)?, &record, &stories)))?;
        }
    }
    Ok(())
}

fn of_share(stories: &BTreeSet<String>, seconds: f64) -> Result<Selection> {
    let (core, times) = (select::lines(&read(CORE)?), times::parse(&known_times()?)?);
    // Sources without a history have always the same share.
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or_else(|_| "unknown".to_owned());
    Ok(Share { core: &core, times: &times, seed: commit.trim(), seconds }.of(stories))
}

fn of_changes(stories: &BTreeSet<String>, base: &str) -> Result<Selection> {
    let tracked = git(&["diff", "--name-only", "--no-renames", base, "--"])?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    let map = changes::Map::parse(&read(MAP)?)?;
    let core = select::lines(&read(CORE)?);
    let selected = map.stories(tracked.lines().chain(new.lines()), stories, &core);
    Ok(Selection { selected, reason: format!("they do not test what changed since {base}, by {MAP}") })
}

/// Returns the text of the file of durations. Before the first run there is none.
fn known_times() -> Result<String> {
    if Path::new(TIMES).exists() { read(TIMES) } else { Ok(String::new()) }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

fn write(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {path}"))
}

fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).output().context("cannot run git")?;
    if !output.status.success() {
        bail!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("paths are not text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_stories_leave_time_for_others() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let (core, times) = (select::lines(&text(CORE)), times::parse(&text(TIMES)).unwrap());
        let used: f64 = core.iter().filter_map(|name| times.get(name)).sum();
        assert!(!core.is_empty() && used < SECONDS * 0.85, "core stories take {used} s of {SECONDS} s");
    }
}
