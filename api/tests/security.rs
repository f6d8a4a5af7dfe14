//! Compares the threat model with the sources: the rights of the components in the chart, and the tests that it names.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test ends here")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const THREAT_MODEL: &str = "docs/design/threat-model.md";

/// A story that the threat model names and that is merged beside this file.
const BESIDE: &str = "hanging_mounts.rs";

/// A rule of a role in the chart: whether the role is for the whole cluster, the role's name, and the rule.
struct Rule {
    cluster: bool,
    role: String,
    rule: Value,
}

impl Rule {
    fn list(&self, key: &str) -> Vec<&str> {
        self.rule[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    }
}

/// The rules of all roles of the components. Users' roles are made by loops of the template, and are none of a component.
fn rules() -> Vec<Rule> {
    let templates = Path::new(ROOT).join("charts/ferrovirt/templates");
    let helpers = fs::read_to_string(templates.join("_helpers.tpl")).unwrap();
    let lists = lists(&helpers);
    let mut rules = Vec::new();
    for file in fs::read_dir(templates).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "yaml") || path.ends_with("rbac-users.yaml") {
            continue;
        }
        let mut text = fs::read_to_string(&path).unwrap();
        for (include, list) in &lists {
            text = text.replace(include, list);
        }
        for document in text.split("\n---") {
            let cluster = document.lines().any(|line| line == "kind: ClusterRole");
            if !cluster && !document.lines().any(|line| line == "kind: Role") {
                continue;
            }
            let role = filled(document);
            let name = role["metadata"]["name"].as_str().unwrap().to_owned();
            let of_role = role["rules"].as_array().unwrap_or_else(|| panic!("{name} has no rules"));
            rules.extend(of_role.iter().map(|rule| Rule { cluster, role: name.clone(), rule: rule.clone() }));
        }
        // The roles of hooks are templates of their rules.
        for defined in text.split("{{- define \"ferrovirt.hooks.").skip(1) {
            let Some((name, rest)) = defined.split_once("\" -}}\n") else { continue };
            let Some((_, kind @ ("ClusterRole" | "Role"))) = name.split_once('.') else { continue };
            let (of_role, _) = rest.split_once("\n{{- end -}}\n").unwrap_or_else(|| panic!("{name} has no end"));
            let of_role = filled(of_role);
            let of_role = of_role.as_array().unwrap_or_else(|| panic!("{name} has no rules"));
            let cluster = kind == "ClusterRole";
            rules.extend(of_role.iter().map(|rule| Rule { cluster, role: name.to_owned(), rule: rule.clone() }));
        }
    }
    rules
}

/// Values of the lists among the template helpers, above all the names of Secrets.
fn lists(helpers: &str) -> Vec<(String, &str)> {
    let defined = helpers.split("{{- define \"").skip(1);
    let lists = defined.filter_map(|text| {
        let (name, rest) = text.split_once("\" -}}\n")?;
        let (list, _) = rest.split_once("\n{{- end -}}")?;
        list.starts_with('[').then(|| (format!("{{{{ include \"{name}\" . }}}}"), list))
    });
    lists.collect()
}

/// A document without what the template puts into it.
fn filled(document: &str) -> Value {
    let plain: String = document.lines().filter(|line| !line.trim_start().starts_with("{{")).map(plain).collect();
    serde_saphyr::from_str(&plain).unwrap_or_else(|error| panic!("{error}: {plain}"))
}

/// A line without what the template puts into it.
fn plain(line: &str) -> String {
    let mut parts = line.split("{{");
    let first = parts.next().unwrap_or_default().to_owned();
    let filled = parts.fold(first, |text, part| text + "x" + part.split_once("}}").map_or("", |(_, rest)| rest));
    filled + "\n"
}

#[test]
fn cve_2020_1701_no_component_reads_secrets_but_the_installations_own() {
    let rules = rules();
    for role in ["kubevirt-handler", "kubevirt-controller", "kubevirt-apiserver", "clean-up.ClusterRole"] {
        assert!(rules.iter().any(|rule| rule.cluster && rule.role == role), "the role {role} was not found");
    }
    let mut named = 0;
    for rule in &rules {
        let (verbs, resources) = (rule.list("verbs"), rule.list("resources"));
        assert!(!resources.is_empty() || !rule.list("nonResourceURLs").is_empty(), "{}: {}", rule.role, rule.rule);
        for list in [&verbs, &resources, &rule.list("apiGroups")] {
            assert!(!list.contains(&"*"), "{} may do anything: {}", rule.role, rule.rule);
        }
        if !resources.contains(&"secrets") {
            continue;
        }
        assert!(!rule.cluster, "{} reaches the secrets of all namespaces: {}", rule.role, rule.rule);
        assert_ne!(rule.role, "kubevirt-handler", "{}", rule.rule);
        // A name cannot be given to what does not exist yet; all else is for named ones.
        let names = rule.list("resourceNames");
        assert!(verbs == ["create"] || !names.is_empty(), "{}: {}", rule.role, rule.rule);
        assert!(names.iter().all(|name| name.starts_with("kubevirt-")), "{}: {}", rule.role, rule.rule);
        named += names.len();
    }
    assert!(named > 0, "no role with secrets was found");
}

#[test]
fn cve_2024_33394_the_token_of_virt_handler_opens_no_pod_and_makes_no_other_token() {
    // These verbs give their holder the rights of others.
    let others = [
        "pods/exec",
        "pods/attach",
        "pods/portforward",
        "pods/proxy",
        "pods/ephemeralcontainers",
        "nodes/proxy",
        "services/proxy",
        "serviceaccounts",
        "serviceaccounts/token",
        "rolebindings",
        "clusterrolebindings",
        "users",
        "groups",
    ];
    let mut of_handler = 0;
    for rule in rules() {
        let (verbs, resources) = (rule.list("verbs"), rule.list("resources"));
        let shown = format!("{}: {}", rule.role, rule.rule);
        assert!(!resources.iter().any(|resource| others.contains(resource)), "{shown}");
        assert!(!verbs.contains(&"impersonate") && !verbs.contains(&"bind"), "{shown}");
        if rule.role != "kubevirt-handler" {
            continue;
        }
        of_handler += 1;
        for resource in resources {
            let most: &[&str] = match resource {
                "virtualmachineinstances" => &["get", "list", "watch", "update", "patch"],
                "nodes" => &["get", "list", "watch", "patch"],
                "events" => &["create", "patch"],
                "certificatesigningrequests" => &["create", "get", "list", "watch"],
                "tokenreviews" | "subjectaccessreviews" => &["create"],
                "kubevirts" | "configmaps" => &["get", "list", "watch"],
                "migrationpolicies" => &["list", "watch"],
                other => panic!("virt-handler has rights for {other}: {shown}"),
            };
            assert!(verbs.iter().all(|verb| most.contains(verb)), "{shown}");
            assert!(resource != "configmaps" || !rule.cluster, "{shown}");
        }
    }
    assert!(of_handler >= 4, "{of_handler} rules of virt-handler were found");
}

/// All Rust files of the repository, by their path in it.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut sources = BTreeMap::new();
    let mut open = vec![PathBuf::from(ROOT)];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type().unwrap().is_dir() {
                if !name.starts_with('.') && !["target", "build", "node_modules"].contains(&&*name) {
                    open.push(path);
                }
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap();
                sources.insert(path.strip_prefix(ROOT).unwrap().to_owned(), text);
            }
        }
    }
    sources
}

/// Names of all functions.
fn functions(sources: &BTreeMap<PathBuf, String>) -> BTreeSet<&str> {
    let declared = sources.values().flat_map(|text| text.split("fn ").skip(1));
    declared.filter_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next()).collect()
}

/// The ids of vulnerabilities in the name of a function, as `2026_7374`.
fn ids(function: &str) -> Vec<String> {
    let mut words = function.split('_').peekable();
    let mut ids = Vec::new();
    while let Some(word) = words.next() {
        if word == "cve"
            && let (Some(year), Some(number)) = (words.next(), words.next())
        {
            ids.push(format!("{year}_{number}"));
        }
    }
    ids
}

/// Returns the texts between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn each_vulnerability_of_the_threat_model_has_a_test_of_its_name() {
    let text = fs::read_to_string(Path::new(ROOT).join(THREAT_MODEL)).unwrap();
    let sources = sources();
    let functions = functions(&sources);
    let tested: BTreeSet<String> = functions.iter().flat_map(|function| ids(function)).collect();
    let listed: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| CVE-"))
        .filter_map(|line| Some(line.split_whitespace().next()?.replace('-', "_")))
        .collect();
    assert!(listed.len() > 20, "the table was not found: {listed:?}");
    let missing: Vec<&String> = listed.difference(&tested).collect();
    assert!(missing.is_empty(), "no function is named cve_ID_... for {missing:?}");
    let unlisted: Vec<&String> = tested.difference(&listed).collect();
    assert!(unlisted.is_empty(), "{unlisted:?} are not in the table of {THREAT_MODEL}");
}

#[test]
fn the_threat_model_names_tests_and_files_that_exist() {
    let text = fs::read_to_string(Path::new(ROOT).join(THREAT_MODEL)).unwrap();
    let sources = sources();
    let functions = functions(&sources);
    let mut named = 0;
    for quoted in quoted(&text) {
        let is_file = quoted.contains('/') && [".rs", ".yaml", ".proto", ".md"].iter().any(|end| quoted.ends_with(end));
        // Names of tests are sentences; fields and resources are not.
        let is_test = quoted.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            && quoted.matches('_').count() >= 3;
        if is_file {
            let beside = quoted.ends_with(BESIDE);
            assert!(beside || Path::new(ROOT).join(quoted).is_file(), "{quoted} does not exist");
        } else if is_test {
            assert!(functions.contains(quoted), "there is no function {quoted}");
        }
        named += usize::from(is_file || is_test);
    }
    assert!(named > 40, "{named} tests and files are named");
}

/// kube-apiserver reads the parameter of a policy before it looks at the user: if it cannot, a policy that fails refuses all requests.
#[test]
fn only_policies_that_would_block_users_ignore_failures() {
    let chart = Path::new(ROOT).join("charts/ferrovirt");
    let (mut policies, mut ignoring) = (0, Vec::new());
    for file in fs::read_dir(chart.join("templates")).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let lines = |line: &str| text.lines().filter(|other| *other == line).count();
        let of_file = lines("kind: ValidatingAdmissionPolicy");
        assert_eq!(of_file, lines("  failurePolicy: Fail"), "{}", path.display());
        policies += of_file;
        ignoring.extend(text.contains("failurePolicy: Ignore").then(|| path.display().to_string()));
    }
    assert!(policies > 5, "{policies} policies were found");
    assert_eq!(ignoring.len(), 1, "{ignoring:?}");
    assert!(ignoring.concat().ends_with("/controller-restriction.yaml"), "{ignoring:?}");
    let template = fs::read_to_string(chart.join("templates/controller-restriction.yaml")).unwrap();
    let condition = "{{- if and $row.installation (not $row.labels) }}";
    assert!(template.contains(condition), "another condition than {condition}");
    let rows = fs::read_to_string(chart.join("policies/controller.yaml")).unwrap();
    let rows = rows.split("\n  - name: ").filter(|row| row.contains("\n    installation: true\n"));
    let ignoring = rows.filter(|row| !row.contains("\n    labels: {"));
    let names: Vec<&str> = ignoring
        .map(|row| {
            assert!(row.contains("\n    operations: [DELETE]\n"), "{row}");
            row.lines().next().unwrap()
        })
        .collect();
    assert_eq!(names, ["pool-deletion", "vmi-deletion", "vm-deletion"]);
}

/// kube-apiserver converts a pod for each policy whose rules select a write, unless an object selector excludes the pod before.
#[test]
fn a_write_of_a_pod_without_our_labels_passes_one_policy() {
    let chart = Path::new(ROOT).join("charts/ferrovirt");
    let rows = fs::read_to_string(chart.join("policies/controller.yaml")).unwrap();
    let mut writes = Vec::new();
    for row in rows.split("\n  - name: ").skip(1).filter(|row| !row.contains("\n    labels: {")) {
        let list = |key: &str| {
            let (_, list) = row.split_once(&format!("\n    {key}: [")).unwrap_or_else(|| panic!("{row} has no {key}"));
            list.split_once(']').unwrap().0.split(", ").map(str::to_owned).collect::<Vec<_>>()
        };
        for resource in list("resources").iter().filter(|name| *name == "pods" || name.starts_with("pods/")) {
            writes.extend(list("operations").iter().map(|operation| format!("{operation} {resource}")));
        }
    }
    writes.sort();
    let expected = [
        "CREATE pods",
        "CREATE pods/eviction",
        "DELETE pods",
        "UPDATE pods",
        "UPDATE pods/resize",
        "UPDATE pods/status",
    ];
    assert_eq!(writes, expected);
    for file in fs::read_dir(chart.join("templates")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        let policies =
            text.split("\n---").filter(|one| one.lines().any(|line| line == "kind: ValidatingAdmissionPolicy"));
        for policy in policies.filter(|policy| policy.contains("resources: [pods")) {
            assert!(policy.contains("\n    objectSelector:\n"), "{policy}");
        }
    }
}
