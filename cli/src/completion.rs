//! Completion for `kubectl virt <TAB>`. kubectl runs `kubectl_complete-virt` with the words typed so far and completes the
//! last one. It expects candidates (`word\tdescription`) and a final `:directive` line.

use api::pool;
use clap::{Arg, Command, CommandFactory, builder::StyledStr};
use http::Method;
use serde::Deserialize;

use crate::{ClusterOptions, Connection, Error, command_line::Cli};

/// Cobra's directive "do not complete file names".
const NO_FILES: &str = ":4";
const POOLS: &str = "virtualmachinepools";
/// Time limit for looking up names in the cluster, since the user waits at the prompt.
const LOOKUP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(3);

pub(crate) async fn complete(words: &[String]) -> Result<(), Error> {
    let (typed, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    for candidate in words_of_commands(before, typed) {
        say!("{candidate}")?;
    }
    if let Some(resource) = resource_to_name(before, typed) {
        let names = tokio::time::timeout(LOOKUP_TIMEOUT, names(before, resource)).await;
        // An unreachable cluster must not print errors into the prompt.
        if let Ok(Ok(names)) = names {
            for name in names.iter().filter(|name| name.starts_with(typed)) {
                say!("{name}")?;
            }
        }
    }
    say!("{NO_FILES}")
}

/// Returns true if the next word is the value of this flag.
fn takes_next(commands: &[&Command], word: &str) -> bool {
    let named = |arg: &Arg| {
        arg.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long))
            || arg.get_short().is_some_and(|letter| word == format!("-{letter}"))
    };
    let takes_value = |arg: &Arg| arg.get_action().takes_values() && !arg.is_require_equals_set();
    commands.iter().copied().flat_map(Command::get_arguments).any(|arg| named(arg) && takes_value(arg))
}

/// Returns the program and the commands that the words name, the innermost last.
fn commands_in<'c>(root: &'c Command, before: &[String]) -> Vec<&'c Command> {
    let mut commands = vec![root];
    for word in before {
        commands.extend(commands.last().and_then(|command| command.find_subcommand(word)));
    }
    commands
}

/// Returns the words that are neither flags nor values of flags, or `None` if the next word is the value of a flag.
fn positional<'w>(commands: &[&Command], before: &'w [String]) -> Option<Vec<&'w str>> {
    let mut found = Vec::new();
    let mut words = before.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            found.push(word);
        } else if takes_next(commands, word) {
            words.next()?;
        }
    }
    Some(found)
}

/// Formats a candidate for kubectl.
fn candidate(word: &str, about: Option<&StyledStr>) -> String {
    about.map_or_else(|| word.to_owned(), |about| format!("{word}\t{about}"))
}

fn words_of_commands(before: &[String], typed: &str) -> Vec<String> {
    let root = Cli::command();
    let known = commands_in(&root, before);
    let (Some(words), Some(command)) = (positional(&known, before), known.last()) else { return Vec::new() };
    if typed.starts_with('-') {
        let flags = known.iter().copied().flat_map(Command::get_arguments);
        return flags
            .filter_map(|flag| Some((format!("--{}", flag.get_long()?), flag.get_help())))
            .filter(|(flag, _)| flag.starts_with(typed))
            .map(|(flag, help)| candidate(&flag, help))
            .collect();
    }
    // The first words are the commands themselves.
    let arguments = (words.len() + 1).saturating_sub(known.len());
    let commands = command.get_subcommands().filter(|_| arguments == 0);
    let commands = commands.map(|command| (command.get_name(), command.get_about()));
    let values = command.get_positionals().nth(arguments).map(Arg::get_possible_values).unwrap_or_default();
    let values = values.iter().map(|value| (value.get_name(), value.get_help()));
    let offered = commands.chain(values).filter(|(word, _)| word.starts_with(typed));
    offered.map(|(word, about)| candidate(word, about)).collect()
}

/// Returns the resource whose names complete the next word, if the next word is a name.
fn resource_to_name(before: &[String], typed: &str) -> Option<&'static str> {
    if typed.starts_with('-') {
        return None;
    }
    let root = Cli::command();
    let words = positional(&commands_in(&root, before), before)?;
    let (name, arguments) = words.split_first()?;
    match (*name, arguments) {
        (
            "start" | "stop" | "restart" | "migrate" | "migrate-cancel" | "objectgraph" | "describe" | "top"
            | "hibernate",
            [],
        )
        | ("pause" | "unpause" | "evacuate-cancel" | "expose", ["vm"])
        | ("memory-dump", ["get" | "remove"])
        | ("credentials", ["add-ssh-key" | "remove-ssh-key" | "set-password"])
        | ("set", ["cpu" | "memory"]) => Some("virtualmachines"),
        (
            "console" | "vnc" | "soft-reboot" | "reset" | "guestosinfo" | "userlist" | "fslist" | "addvolume"
            | "removevolume",
            [],
        )
        | ("pause" | "unpause" | "evacuate-cancel" | "expose", ["vmi"])
        | ("usbredir", [_]) => Some("virtualmachineinstances"),
        ("expose", ["vmirs"]) => Some("virtualmachineinstancereplicasets"),
        ("expose", ["vmpool"]) => Some(POOLS),
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
    let version = if resource == POOLS { pool::API_VERSION } else { "kubevirt.io/v1" };
    let path = format!("/apis/{version}/namespaces/{}/{resource}?limit=500", connection.namespace);
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
        assert!(words_of_commands(&words("-n ns"), "con").iter().any(|c| c.starts_with("console\t")));
        for (line, typed, expected) in [
            ("memory-dump", "", &["get", "download", "remove"][..]),
            ("create", "", &["vm", "instancetype", "preference", "clone"]),
            ("create vm", "--volume-c", &["--volume-containerdisk", "--volume-clone-pvc"]),
            ("create vm", "", &[]),
            ("adm", "", &["log-verbosity"]),
            ("image-upload", "", &["dv", "pvc"]),
            ("evacuate-cancel", "v", &["vm", "vmi"]),
            ("-n ns expose --name svc", "", &["vm", "vmi", "vmirs", "vmpool"]),
            ("expose vm", "", &[]),
            ("-n", "", &[]),
        ] {
            let offered = words_of_commands(&words(line), typed);
            let offered = offered.iter().filter_map(|word| word.split('\t').next()).collect::<Vec<_>>();
            assert_eq!(offered, expected, "{line}");
        }
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
            ("set cpu", Some("virtualmachines")),
            ("expose vmpool", Some(POOLS)),
            ("describe", Some("virtualmachines")),
            ("credentials add-ssh-key -u joe", Some("virtualmachines")),
            ("create vm", None),
            ("usbredir 1-2", Some("virtualmachineinstances")),
            ("pause", None),
            ("start a", None),
            ("console -n ns", Some("virtualmachineinstances")),
            ("-n ns console --timeout=1", Some("virtualmachineinstances")),
            ("stop --force --grace-period 0", Some("virtualmachines")),
            ("console --context a -n ns b", None),
            ("console -n", None),
            ("", None),
        ] {
            assert_eq!(resource_to_name(&words(line), ""), expected, "{line}");
        }
    }
}
