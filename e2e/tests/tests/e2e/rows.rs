//! Choice of the rows of a table that a run takes.
//!
//! `make test` runs a sample of each table of kills, `make test-long` all rows (`KILLS=all`). The sample is printed with its seed, and
//! `KILL_SEED` repeats it. `KILLS=3,8-11` runs the rows with these numbers.

use std::{
    fmt::Display,
    ops::RangeInclusive,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

/// Returns the rows that `KILLS` names, or a sample with every so many of them.
pub(crate) fn chosen<R: Display>(rows: Vec<R>, every: usize) -> Result<Vec<R>> {
    if let Ok(kills) = std::env::var("KILLS") {
        return numbered(rows, &kills);
    }
    let seed = match std::env::var("KILL_SEED") {
        Ok(seed) => seed.parse().with_context(|| format!("KILL_SEED is {seed:?}"))?,
        // Another sample each day.
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400,
    };
    let sample = sample(rows, every, usize::try_from(seed)?);
    eprintln!("KILL_SEED={seed}: {:?}", sample.iter().map(ToString::to_string).collect::<Vec<_>>());
    Ok(sample)
}

/// Returns every so many rows. Distances without a common divisor with the number of victims reach each of them.
fn sample<R>(rows: Vec<R>, every: usize, seed: usize) -> Vec<R> {
    rows.into_iter().skip(seed % every).step_by(every).collect()
}

/// Returns the rows that `kills` names: `all`, or numbers and ranges (`3,8-11`).
fn numbered<R>(rows: Vec<R>, kills: &str) -> Result<Vec<R>> {
    let range = |text: &str| -> Result<RangeInclusive<usize>> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Ok(first.parse()?..=last.parse()?)
    };
    let ranges: Result<Vec<_>> = match kills {
        "all" => Ok(vec![0..=usize::MAX]),
        _ => kills.split(',').map(range).collect(),
    };
    let ranges = ranges.with_context(|| format!("KILLS is {kills:?}"))?;
    let is_named = |number: usize| ranges.iter().any(|range| range.contains(&number));
    Ok(rows.into_iter().enumerate().filter(|(number, _)| is_named(*number)).map(|(_, row)| row).collect())
}

#[test]
fn rows_are_selected_by_numbers_and_ranges() -> Result<()> {
    let selected = |kills| numbered((0..6).collect(), kills);
    anyhow::ensure!(selected("all")? == [0, 1, 2, 3, 4, 5] && selected("1,3-4,9")? == [1, 3, 4]);
    anyhow::ensure!(selected("").is_err() && selected("some").is_err());
    Ok(())
}

#[test]
fn samples_of_following_days_have_all_rows_each_with_other_victims() {
    for (phases, victims, every) in [(2, 7, 5), (3, 7, 5), (5, 6, 5), (4, 6, 5), (5, 12, 23), (5, 1, 5), (1, 2, 1)] {
        let rows: Vec<_> = (0..phases * victims).collect();
        let mut seen = vec![];
        for day in 20_000..20_000 + every {
            let sample = sample(rows.clone(), every, day);
            let distinct: std::collections::BTreeSet<_> = sample.iter().map(|row| row % victims).collect();
            assert_eq!(distinct.len(), sample.len().min(victims), "{phases} phases, {victims} victims: {sample:?}");
            seen.extend(sample);
        }
        seen.sort_unstable();
        assert_eq!(seen, rows);
    }
}
