//! Compares the rights in two rendered charts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use serde_json::Value;

use crate::error::{Error, Result};

/// A permission of a rule, for one verb.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    /// `GROUP/RESOURCE`, or a path.
    on: String,
    /// Name of the only object, if the rule names objects.
    name: Option<String>,
    verb: String,
}

/// The rights of each role, by kind, namespace and name.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Roles(BTreeMap<String, BTreeSet<Right>>);

/// Reads the roles in rendered manifests.
pub(super) fn read(manifests: &str) -> Result<Roles> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifests)
        .map_err(|error| Error::NotReleasable(format!("rendered manifests are not YAML: {error}")))?;
    let mut roles = Roles::default();
    for document in documents {
        let kind = document["kind"].as_str().unwrap_or_default();
        if !["Role", "ClusterRole"].contains(&kind) {
            continue;
        }
        let name = document["metadata"]["name"].as_str().unwrap_or_default();
        let key = match document["metadata"]["namespace"].as_str() {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None => format!("{kind} {name}"),
        };
        let rights = document["rules"].as_array().into_iter().flatten().flat_map(rights_of);
        roles.0.entry(key).or_default().extend(rights);
    }
    Ok(roles)
}

fn strings<'a>(rule: &'a Value, key: &str) -> Vec<&'a str> {
    rule[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn rights_of(rule: &Value) -> Vec<Right> {
    let mut on: Vec<String> = strings(rule, "nonResourceURLs").into_iter().map(str::to_owned).collect();
    for group in strings(rule, "apiGroups") {
        let group = if group.is_empty() { "core" } else { group };
        on.extend(strings(rule, "resources").into_iter().map(|resource| format!("{group}/{resource}")));
    }
    let mut names: Vec<Option<String>> =
        strings(rule, "resourceNames").into_iter().map(|name| Some(name.to_owned())).collect();
    if names.is_empty() {
        names.push(None);
    }
    let mut rights = Vec::new();
    for on in &on {
        for name in &names {
            let right = |verb: &str| Right { on: on.clone(), name: name.clone(), verb: verb.to_owned() };
            rights.extend(strings(rule, "verbs").into_iter().map(right));
        }
    }
    rights
}

/// Returns the differences as a Markdown list for each role that differs.
pub(super) fn compare(former: &Roles, new: &Roles) -> String {
    let none = BTreeSet::new();
    let names: BTreeSet<&String> = former.0.keys().chain(new.0.keys()).collect();
    let mut sections = Vec::new();
    for name in names {
        let (before, after) = (former.0.get(name).unwrap_or(&none), new.0.get(name).unwrap_or(&none));
        let added = lines("added", after.difference(before));
        let removed = lines("removed", before.difference(after));
        let change = match (former.0.contains_key(name), new.0.contains_key(name)) {
            (false, _) => " (new)",
            (_, false) => " (removed)",
            _ if added.is_empty() && removed.is_empty() => continue,
            _ => "",
        };
        sections.push(format!("### {name}{change}\n\n{added}{removed}").trim_end().to_owned() + "\n");
    }
    if sections.is_empty() { "No role has changed.\n".to_owned() } else { sections.join("\n") }
}

/// Returns one line for each resource, with its verbs.
fn lines<'a>(change: &str, rights: impl Iterator<Item = &'a Right>) -> String {
    let mut verbs: BTreeMap<(&str, Option<&str>), Vec<&str>> = BTreeMap::new();
    for right in rights {
        verbs.entry((&right.on, right.name.as_deref())).or_default().push(&right.verb);
    }
    let mut text = String::new();
    for ((on, name), verbs) in verbs {
        let name = name.map(|name| format!(" `{name}`")).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "- {change}: `{on}`{name}: {}", verbs.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(name: &str, rules: &str) -> String {
        format!("---\nkind: ClusterRole\nmetadata: {{name: {name}}}\nrules: [{rules}]\n")
    }

    fn compared(former: &str, new: &str) -> String {
        compare(&read(former).unwrap(), &read(new).unwrap())
    }

    #[test]
    fn rights_are_compared_one_by_one() {
        let pods = "{apiGroups: [''], resources: [pods, nodes], verbs: [get, list]}";
        let split = "{apiGroups: [''], resources: [pods], verbs: [list, get]}, {apiGroups: [''], resources: [nodes], verbs: [get, list]}";
        let cases = [
            ("the same rights in other rules", role("a", pods), role("a", split), "No role has changed.\n"),
            (
                "a verb less, a path more",
                role("a", pods),
                role(
                    "a",
                    "{apiGroups: [''], resources: [pods, nodes], verbs: [get]}, {nonResourceURLs: [/metrics], verbs: [get]}",
                ),
                "### ClusterRole a\n\n- added: `/metrics`: get\n- removed: `core/nodes`: list\n- removed: `core/pods`: list\n",
            ),
            (
                "named objects",
                role("a", "{apiGroups: [apps], resources: [deployments], verbs: [patch]}"),
                role("a", "{apiGroups: [apps], resources: [deployments], resourceNames: [x], verbs: [patch, get]}"),
                "### ClusterRole a\n\n- added: `apps/deployments` `x`: get, patch\n- removed: `apps/deployments`: patch\n",
            ),
            (
                "roles that come and go",
                role("a", "{apiGroups: [apps], resources: [deployments], verbs: [get]}"),
                role("b", ""),
                "### ClusterRole a (removed)\n\n- removed: `apps/deployments`: get\n\n### ClusterRole b (new)\n",
            ),
        ];
        for (name, former, new, expected) in cases {
            assert_eq!(compared(&former, &new), expected, "{name}");
        }
    }

    #[test]
    fn other_kinds_are_skipped_and_roles_of_namespaces_kept_apart() {
        let other = "kind: Service\nmetadata: {name: a}\nrules: [{verbs: [get]}]\n";
        let role = |namespace: &str| {
            format!(
                "---\nkind: Role\nmetadata: {{name: a, namespace: {namespace}}}\nrules: [{{apiGroups: [x], resources: [z], verbs: [get]}}]\n"
            )
        };
        let text = compared(other, &(role("one") + &role("two")));
        assert!(text.contains("### Role one/a (new)") && text.contains("### Role two/a (new)"), "{text}");
        assert!(!text.contains("Service"));
        assert!(read("a: [").is_err());
    }
}
