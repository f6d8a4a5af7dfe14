//! Completion for `kubectl virt <TAB>`: kubectl runs `kubectl_complete-virt` with the words typed so far, the last of
//! which is to be completed, and expects candidates (`word\tdescription`) and a closing `:directive` line.

use clap::CommandFactory;
use http::Method;
use serde::Deserialize;

use crate::{Cli, ClusterOptions, Connection, Error};

/// Cobra's directive "do not complete file names".
const NO_FILES: &str = ":4";
/// Time that looking up names in the cluster may take: the user waits at the prompt.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(3);

pub async fn complete(words: &[String]) -> Result<(), Error> {
    let (typed, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    for candidate in words_of_commands(before, typed) {
        say!("{candidate}")?;
    }
    if let Some(resource) = resource_to_name(before, typed) {
        let names = tokio::time::timeout(PATIENCE, names(before, resource)).await;
        // Completion is a courtesy: a cluster that is away must not print errors into the prompt.
        if let Ok(Ok(names)) = names {
            for name in names.iter().filter(|name| name.starts_with(typed)) {
                say!("{name}")?;
            }
        }
    }
    say!("{NO_FILES}")
}

fn words_of_commands(before: &[String], typed: &str) -> Vec<String> {
    let root = Cli::command();
    let command = before.iter().find_map(|word| root.find_subcommand(word));
    if typed.starts_with('-') {
        let flags = command.into_iter().chain([&root]).flat_map(clap::Command::get_arguments);
        return flags
            .filter_map(|flag| Some((format!("--{}", flag.get_long()?), flag.get_help())))
            .filter(|(flag, _)| flag.starts_with(typed))
            .map(|(flag, help)| help.map_or_else(|| flag.clone(), |help| format!("{flag}\t{help}")))
            .collect();
    }
    if command.is_some() {
        return Vec::new();
    }
    root.get_subcommands()
        .filter(|c| c.get_name().starts_with(typed))
        .map(|c| c.get_about().map_or_else(|| c.get_name().to_owned(), |about| format!("{}\t{about}", c.get_name())))
        .collect()
}

/// The resource whose names fit the next word, if a name is what comes next.
fn resource_to_name(before: &[String], typed: &str) -> Option<&'static str> {
    if typed.starts_with('-') {
        return None;
    }
    let root = Cli::command();
    let at = before.iter().position(|word| root.find_subcommand(word).is_some())?;
    let given: Vec<&str> = before[at + 1..].iter().map(String::as_str).filter(|word| !word.starts_with('-')).collect();
    match (before[at].as_str(), given.as_slice()) {
        ("start" | "stop" | "restart" | "migrate" | "migrate-cancel" | "objectgraph", [])
        | ("pause" | "unpause" | "evacuate-cancel" | "expose", ["vm"])
        | ("memory-dump", ["get" | "remove"]) => Some("virtualmachines"),
        (
            "console" | "vnc" | "soft-reboot" | "reset" | "guestosinfo" | "userlist" | "fslist" | "addvolume"
            | "removevolume",
            [],
        )
        | ("pause" | "unpause" | "evacuate-cancel" | "expose", ["vmi"])
        | ("usbredir", [_]) => Some("virtualmachineinstances"),
        _ => None,
    }
}

async fn names(before: &[String], resource: &str) -> Result<Vec<String>, Error> {
    #[derive(Deserialize)]
    struct List {
        items: Vec<Item>,
    }
    #[derive(Deserialize)]
    struct Item {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        name: String,
    }
    let flag = |long: &str, short: &str| {
        let mut words = before.iter();
        while let Some(word) = words.next() {
            if word == long || word == short {
                return words.next().cloned();
            }
            if let Some(value) = word.strip_prefix(long).and_then(|rest| rest.strip_prefix('=')) {
                return Some(value.to_owned());
            }
        }
        None
    };
    let options = ClusterOptions {
        kubeconfig: flag("--kubeconfig", "--kubeconfig").map(Into::into),
        context: flag("--context", "--context"),
        cluster: flag("--cluster", "--cluster"),
        user: flag("--user", "--user"),
        namespace: flag("--namespace", "-n"),
        ..ClusterOptions::default()
    };
    let connection = Connection::open(&options).await?;
    let path = format!("/apis/kubevirt.io/v1/namespaces/{}/{resource}?limit=500", connection.namespace);
    let answer = connection.call(Method::GET, &path, Vec::new()).await?;
    let list: List = serde_json::from_slice(&answer).map_err(|e| Error::Transport(e.to_string()))?;
    Ok(list.items.into_iter().map(|item| item.metadata.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn commands_and_flags_are_offered() {
        assert!(words_of_commands(&[], "con").iter().any(|c| c.starts_with("console\t")));
        assert!(words_of_commands(&words("stop"), "--gr").iter().any(|c| c.starts_with("--grace-period\t")));
        assert!(words_of_commands(&words("stop"), "").is_empty());
    }

    #[test]
    fn names_are_looked_up_where_a_name_comes_next() {
        for (line, expected) in [
            ("console", Some("virtualmachineinstances")),
            ("start", Some("virtualmachines")),
            ("pause vm", Some("virtualmachines")),
            ("unpause vmi", Some("virtualmachineinstances")),
            ("evacuate-cancel vm", Some("virtualmachines")),
            ("evacuate-cancel node", None),
            ("memory-dump get", Some("virtualmachines")),
            ("usbredir 1-2", Some("virtualmachineinstances")),
            ("pause", None),
            ("start a", None),
            ("", None),
        ] {
            assert_eq!(resource_to_name(&words(line), ""), expected, "{line}");
        }
    }
}
