//! `create`: prints manifests, equal to those of virtctl. Sends no request.

pub(crate) mod clone;
mod instancetype;
mod params;
mod preference;
mod vm;

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::{ClusterOptions, Error, guest::Document, print};

/// Letters and digits of generated names: none that forms words.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Kinds of manifests.
#[derive(Subcommand)]
pub(crate) enum CreateCommand {
    /// Print the manifest of a VirtualMachine
    Vm(Box<vm::Options>),
    /// Print the manifest of an instance type
    Instancetype(instancetype::Options),
    /// Print the manifest of a preference
    Preference(preference::Options),
    /// Print the manifest of a VirtualMachineClone
    Clone(clone::Options),
}

/// Prints a manifest. It has a namespace if `--namespace` is given.
pub(crate) fn run(cluster: &ClusterOptions, command: &CreateCommand) -> Result<(), Error> {
    let namespace = cluster.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    let manifest = match command {
        CreateCommand::Vm(options) => vm::manifest(options, namespace)?,
        CreateCommand::Instancetype(options) => instancetype::manifest(options, namespace)?,
        CreateCommand::Preference(options) => preference::manifest(options, namespace),
        CreateCommand::Clone(options) => clone::manifest(options, namespace)?,
    };
    print(format_args!("{}", Document::Yaml.rendered(&manifest)?))
}

/// Returns the name, or the prefix with random characters.
fn name_or(name: Option<&str>, prefix: &str) -> String {
    name.filter(|name| !name.is_empty()).map_or_else(|| random_name(prefix, 5), str::to_owned)
}

/// Appends random characters to a prefix, as Kubernetes does for `generateName`.
pub(crate) fn random_name(prefix: &str, length: usize) -> String {
    let bytes = uuid::Uuid::new_v4().into_bytes();
    // Bytes 6 and 8 have fixed bits.
    let random = bytes.iter().enumerate().filter(|(at, _)| ![6, 8].contains(at)).take(length);
    let letters = random.map(|(_, byte)| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]));
    prefix.chars().chain(letters).collect()
}

/// Returns the metadata of a manifest.
fn metadata(name: &str, namespace: Option<&str>) -> Value {
    object([("name", json!(name)), ("namespace", json!(namespace))])
}

/// Returns an object of the fields that have a value.
fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let is_set = |value: &Value| !value.is_null() && *value != "" && *value != json!([]);
    let set = fields.into_iter().filter(|(_, value)| is_set(value));
    Value::Object(set.map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    /// Returns the manifest for the arguments, or the error.
    pub(super) fn made(words: &[&str]) -> Result<Value, String> {
        let words = [&["kubectl-virt", "create"], words].concat();
        let cli = parse(words).map_err(|error| error.to_string())?;
        let namespace = cli.cluster.namespace.as_deref();
        let Command::Create(command) = cli.command else { panic!("another command") };
        let manifest = match command {
            CreateCommand::Vm(options) => vm::manifest(&options, namespace),
            CreateCommand::Instancetype(options) => instancetype::manifest(&options, namespace),
            CreateCommand::Preference(options) => Ok(preference::manifest(&options, namespace)),
            CreateCommand::Clone(options) => clone::manifest(&options, namespace),
        };
        manifest.map_err(|error| error.to_string())
    }

    /// Compares manifests with those that virtctl prints.
    pub(super) fn check(cases: &[(&[&str], &str)]) {
        for (words, expected) in cases {
            let expected: Value = serde_saphyr::from_str(expected).unwrap();
            assert_eq!(made(words).unwrap_or_else(|error| panic!("{words:?}: {error}")), expected, "{words:?}");
        }
    }

    /// Compares errors.
    pub(super) fn check_errors(cases: &[(&[&str], &str)]) {
        for (words, expected) in cases {
            let error = made(words).err().unwrap_or_default();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }

    #[test]
    fn names_are_generated_where_none_is_given() {
        for (words, prefix, length) in [
            (&["vm"][..], "vm-", 8),
            (&["vm", "--name="], "vm-", 8),
            (&["instancetype", "--cpu=1", "--memory=1Gi"], "clusterinstancetype-", 25),
            (&["instancetype", "--cpu=1", "--memory=1Gi", "--namespaced"], "instancetype-", 18),
            (&["preference"], "clusterpreference-", 23),
            (&["preference", "-n", "ns"], "preference-", 16),
            (&["clone", "--source-name=a"], "clone-", 11),
        ] {
            let name = made(words).unwrap()["metadata"]["name"].as_str().unwrap().to_owned();
            assert!(name.starts_with(prefix) && name.len() == length, "{words:?}: {name}");
            assert!(name[prefix.len()..].bytes().all(|byte| ALPHABET.contains(&byte)), "{name}");
        }
        assert_ne!(random_name("", 6), random_name("", 6));
    }
}
