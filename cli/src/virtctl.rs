//! Compares `virtctl.yaml`, the table of virtctl's commands and flags, with the definition of the command line.

use std::collections::{BTreeMap, BTreeSet};

use clap::Command;
use serde::Deserialize;

use crate::command_line::{VIRTCTL_ONLY, definition};

/// A command in the table.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Row {
    command: String,
    flags: Vec<String>,
    own: Vec<String>,
    lacks: BTreeMap<String, String>,
    absent: Option<String>,
    only: Option<String>,
    note: String,
}

fn rows() -> Vec<Row> {
    serde_saphyr::from_str(include_str!("../virtctl.yaml")).unwrap()
}

/// Returns the flags of a command: those of all commands, or its own.
fn flags(command: &Command, global: bool) -> BTreeSet<String> {
    let flags = command.get_arguments().filter(|flag| flag.is_global_set() == global);
    let names = flags.filter_map(|flag| flag.get_long()).filter(|name| !["help", "version"].contains(name));
    names.map(str::to_owned).collect()
}

/// Returns the commands that do something, with their words.
fn commands<'c>(command: &'c Command, words: &str) -> Vec<(String, &'c Command)> {
    let children = command.get_subcommands().filter(|child| child.get_name() != "help");
    children
        .flat_map(|child| {
            let words = format!("{words} {}", child.get_name()).trim_start().to_owned();
            let descendants = commands(child, &words);
            let is_group = child.is_subcommand_required_set();
            let own = (!is_group).then_some((words, child));
            own.into_iter().chain(descendants).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn table_has_each_command_and_flag() {
    let root = definition();
    let mut known = commands(&root, "");
    known.push((String::new(), &root));
    let rows = rows();
    let listed = rows.iter().filter(|row| row.absent.is_none()).map(|row| row.command.as_str());
    let defined = known.iter().map(|(words, _)| words.as_str()).collect::<BTreeSet<_>>();
    assert_eq!(listed.collect::<BTreeSet<_>>(), defined, "commands of kubectl virt");
    for row in &rows {
        let Some((_, command)) = known.iter().find(|(words, _)| *words == row.command) else { continue };
        let listed = row.flags.iter().chain(&row.own).cloned().collect::<BTreeSet<_>>();
        assert_eq!(listed.len(), row.flags.len() + row.own.len(), "{} lists a flag twice", row.command);
        assert_eq!(listed, flags(command, row.command.is_empty()), "flags of {:?}", row.command);
        for lacking in row.lacks.keys() {
            assert!(!listed.contains(lacking), "{} has {lacking}", row.command);
        }
        assert!(row.only.is_none() || (row.flags.is_empty() && row.lacks.is_empty()), "{row:?}");
    }
}

#[test]
fn commands_of_virtctl_that_are_missing_give_the_reason_of_the_table() {
    let reasons: BTreeMap<String, String> = rows()
        .iter()
        .filter_map(|row| Some((row.command.split(' ').next()?.to_owned(), row.absent.clone()?)))
        .collect();
    let said = VIRTCTL_ONLY.iter().map(|(command, why)| ((*command).to_owned(), (*why).to_owned()));
    assert_eq!(said.collect::<BTreeMap<_, _>>(), reasons);
    assert!(rows().iter().all(|row| !row.note.ends_with('.')));
}
