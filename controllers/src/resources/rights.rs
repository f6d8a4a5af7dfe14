//! The rights to list and watch that the chart gives virt-controller are those that the declarations require.

use std::{collections::BTreeSet, sync::Arc};

use kube::{Client, Resource as _};
use serde_json::Value;

use super::{
    Caches, Resource,
    declaration::{Declaration, Selection, Visitor},
};
use crate::{cache::Cache, runtime::Kind, scripted::Server};

/// Resource that is listed and never watched: warnings about pods that do not start.
const LISTED: (&str, &str) = ("", "events");

/// Resource whose objects are watched by name from the version on that was read, and in no cache.
const FOLLOWED: &str = "leases";

/// Resources whose objects are read by name.
const READ: [&str; 5] =
    [FOLLOWED, "datasources", "persistentvolumeclaims", "controllerrevisions", "volumesnapshotcontents"];

/// The objects of a resource that can be listed and watched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    group: String,
    resource: String,
    /// In the install namespace only.
    namespaced: bool,
    /// Empty: all.
    name: String,
}

/// Collects the rights that the declarations require.
struct Required {
    client: Client,
    rights: BTreeSet<Right>,
}

impl Visitor for Required {
    fn visit<D: Declaration>(&mut self, _resource: Resource, _cache: &Arc<Cache<D::Kept>>) {
        let (version, plural) = (D::Wire::api_version(&()), D::Wire::plural(&()));
        let is_same = |kind: Kind| kind.api_version() == version && kind.plural() == plural;
        assert!(D::WRITTEN.is_none_or(is_same), "{version} {plural}");
        let names = match D::SELECTION {
            Selection::Names(names) => names,
            _ => &[""],
        };
        self.rights.extend(names.iter().map(|name| Right {
            group: D::Wire::group(&()).into_owned(),
            resource: plural.clone().into_owned(),
            namespaced: D::api(self.client.clone(), "kubevirt").resource_url().contains("/namespaces/kubevirt/"),
            name: (*name).to_owned(),
        }));
    }
}

/// Returns a document of the chart without what Helm puts into it.
fn without_templates(document: &str) -> Value {
    let lines = document.lines().filter(|line| !line.trim_start().starts_with("{{"));
    let plain: Vec<String> = lines
        .map(|line| {
            let mut parts = line.split("{{");
            let first = parts.next().unwrap_or_default().to_owned();
            parts.filter_map(|part| part.split_once("}}")).fold(first, |text, (_, rest)| text + rest)
        })
        .collect();
    serde_saphyr::from_str(&plain.join("\n")).unwrap()
}

/// Returns the rights that the chart gives: those to watch, which must include those to list.
fn granted() -> BTreeSet<Right> {
    let templates = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt/templates");
    let read = |name: &str| std::fs::read_to_string(format!("{templates}/{name}")).unwrap();
    let (helpers, mut text) = (read("_helpers.tpl"), read("rbac-controller.yaml"));
    for list in ["ferrovirt.secrets", "ferrovirt.configMaps"] {
        let (_, rest) = helpers.split_once(&format!("{{{{- define \"{list}\" -}}}}\n")).unwrap();
        text = text.replace(&format!("{{{{ include \"{list}\" . }}}}"), rest.lines().next().unwrap());
    }
    let mut granted = BTreeSet::new();
    for role in text.split("\n---").map(without_templates) {
        for rule in role["rules"].as_array().into_iter().flatten() {
            let list = |key: &str| -> Vec<String> { serde_json::from_value(rule[key].clone()).unwrap_or_default() };
            let (verbs, mut names) = (list("verbs"), list("resourceNames"));
            if names.is_empty() {
                names.push(String::new());
            }
            for (group, resource) in list("apiGroups").iter().flat_map(|group| {
                list("resources").into_iter().map(|resource| (group.clone(), resource)).collect::<Vec<_>>()
            }) {
                let has = |verb: &str| verbs.iter().any(|known| known == verb);
                let is_listed = LISTED == (group.as_str(), resource.as_str());
                let is_read = READ.contains(&resource.as_str());
                assert!(!has("get") || is_read, "{group} {resource} is not read by name");
                let is_cached = has("watch") && resource != FOLLOWED;
                assert_eq!(has("list"), is_cached || is_listed, "{group} {resource}: {verbs:?}");
                let namespaced = role["kind"] == "Role";
                let of = |name| Right { group: group.clone(), resource: resource.clone(), namespaced, name };
                granted.extend(names.iter().filter(|_| is_cached).cloned().map(of));
            }
        }
    }
    granted
}

#[test]
fn rights_to_leases_do_not_depend_on_the_number_of_shards() {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt");
    // Former replicas with more shards renew theirs until the Deployment has ended them.
    let all = format!("{{{{ include \"ferrovirt.leases\" {} }}}}", api::constants::MAX_SHARDS);
    for file in ["templates/rbac-controller.yaml", "templates/hooks.yaml", "policies/controller.yaml"] {
        let text = std::fs::read_to_string(format!("{chart}/{file}")).unwrap();
        assert_eq!(text.matches("\"ferrovirt.leases\"").count(), 1, "{file}");
        assert!(text.contains(&all), "{file}");
    }
}

#[tokio::test]
async fn chart_grants_the_rights_that_the_declarations_require_and_no_others() {
    let mut required = Required { client: Server::default().client(), rights: BTreeSet::new() };
    Caches::default().each(&mut required);
    let granted = granted();
    let in_cluster = |right: &Right| granted.contains(&Right { namespaced: false, ..right.clone() });
    let missing: Vec<_> =
        required.rights.iter().filter(|right| !granted.contains(*right) && !in_cluster(right)).collect();
    assert!(missing.is_empty(), "charts/ferrovirt/templates/rbac-controller.yaml does not grant {missing:?}");
    let surplus: Vec<_> = granted.difference(&required.rights).collect();
    assert!(surplus.is_empty(), "no declaration requires {surplus:?}");
}
