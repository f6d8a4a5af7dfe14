//! Rules, dashboards and values of the chart.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test ends here")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use layout::{promql, root, values};
use serde_json::{Value, json};

/// Metrics of other programs that the rules need.
const FOREIGN: &[(&str, &[&str])] = &[
    ("Prometheus", &["up"]),
    (
        "kube-state-metrics",
        &[
            "kube_daemonset_status_desired_number_scheduled",
            "kube_daemonset_status_number_ready",
            "kube_deployment_spec_replicas",
            "kube_node_labels",
            "kube_node_role",
            "kube_node_spec_unschedulable",
            "kube_node_status_allocatable",
            "kube_persistentvolumeclaim_info",
            "kube_persistentvolumeclaim_labels",
            "kube_persistentvolumeclaim_resource_requests_storage_bytes",
            "kube_pod_container_resource_requests",
            "kube_pod_info",
            "kube_pod_spec_volumes_persistentvolumeclaims_info",
            "kube_pod_status_phase",
            "kube_pod_status_ready",
        ],
    ),
    ("cAdvisor", &["container_memory_rss", "container_memory_working_set_bytes"]),
    ("DCGM exporter", &["DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_MEM_COPY_UTIL"]),
    ("kube-apiserver", &["apiserver_request_total", "apiserver_requested_deprecated_apis"]),
];

fn chart() -> PathBuf {
    root().join("charts/ferrovirt")
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(chart().join(path)).unwrap()).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Returns the texts of a field in all rules of a file.
fn field(rules: &Value, name: &str) -> Vec<String> {
    rules.as_array().unwrap().iter().map(|rule| rule[name].as_str().unwrap().to_owned()).collect()
}

/// Returns the names in the list of metrics.
fn metrics() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("docs/reference/metrics.md")).unwrap();
    text.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned())).collect()
}

/// Returns the expressions of a dashboard: of panels, and of the queries of variables.
fn queries(dashboard: &Value, found: &mut Vec<String>) {
    match dashboard {
        Value::Object(fields) => {
            found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
            let variable = fields.get("definition").and_then(Value::as_str);
            found.extend(variable.and_then(|query| query.strip_prefix("label_values(")).map(|query| {
                let (metric, _label) = query.rsplit_once(',').unwrap();
                metric.to_owned()
            }));
            fields.values().for_each(|value| queries(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        _ => {}
    }
}

fn dashboards() -> BTreeMap<String, Value> {
    let files = fs::read_dir(chart().join("monitoring/dashboards")).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap())
        })
        .collect()
}

#[test]
fn metrics_in_rules_and_dashboards_exist() {
    let (ours, recording, alerts) = (metrics(), yaml("monitoring/recording.yaml"), yaml("monitoring/alerts.yaml"));
    let records: BTreeSet<String> = field(&recording, "record").into_iter().collect();
    let foreign: BTreeSet<&str> = FOREIGN.iter().flat_map(|(_, names)| *names).copied().collect();
    let mut expressions: Vec<(String, String)> = Vec::new();
    expressions.extend(field(&recording, "record").into_iter().zip(field(&recording, "expr")));
    expressions.extend(field(&alerts, "alert").into_iter().zip(field(&alerts, "expr")));
    let boards = dashboards();
    assert_eq!(boards.len(), 2);
    for (name, dashboard) in &boards {
        let mut found = Vec::new();
        queries(dashboard, &mut found);
        assert!(found.len() > 20, "{name}: {} queries", found.len());
        expressions.extend(found.into_iter().map(|query| (name.clone(), query)));
    }
    let mut used = BTreeSet::new();
    let mut unknown = Vec::new();
    for (place, expression) in &expressions {
        for metric in promql::metrics(expression) {
            used.insert(metric);
            let base = ["_bucket", "_count", "_sum"].iter().find_map(|end| metric.strip_suffix(end));
            let known = ours.contains(metric) || base.is_some_and(|base| ours.contains(base));
            if !known && !records.contains(metric) && !foreign.contains(metric) {
                unknown.push(format!("{place}: {metric}"));
            }
        }
    }
    assert!(unknown.is_empty(), "metrics that do not exist:\n{}", unknown.join("\n"));
    let unused: Vec<&&str> = foreign.iter().filter(|name| !used.contains(**name)).collect();
    assert!(unused.is_empty(), "remove from the list of foreign metrics: {unused:?}");
}

#[test]
fn dashboards_work_without_recording_rules() {
    for (name, dashboard) in dashboards() {
        let mut found = Vec::new();
        queries(&dashboard, &mut found);
        for query in found {
            assert!(promql::metrics(&query).iter().all(|metric| !metric.contains(':')), "{name}: {query}");
        }
    }
}

#[test]
fn alerts_have_only_fields_that_the_template_renders() {
    let known = ["alert", "expr", "for", "severity", "impact", "component", "labels", "summary", "description"];
    for alert in yaml("monitoring/alerts.yaml").as_array().unwrap() {
        let fields = alert.as_object().unwrap();
        assert!(fields.keys().all(|key| known.contains(&key.as_str())), "{alert}");
        assert!(["critical", "warning", "info"].contains(&alert["severity"].as_str().unwrap()), "{alert}");
        assert!(["critical", "warning", "none"].contains(&alert["impact"].as_str().unwrap()), "{alert}");
        assert!(alert["summary"].as_str().is_some_and(|text| text.ends_with('.')), "{alert}");
    }
}

/// The address of the project. A path below it is that of a file of the repository.
const HOME: &str = "https://ferrovirt.io/";

/// Returns true if a link leads to a file of the repository, and its fragment to a heading.
fn leads_to_a_file(link: &str) -> bool {
    let Some(path) = link.strip_prefix(HOME) else { return false };
    let (path, fragment) = path.split_once('#').unwrap_or((path, ""));
    let file = root().join(path);
    let anchor = |line: &str| {
        let words = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        words.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect::<String>()
    };
    let heading = || {
        let text = fs::read_to_string(&file).unwrap_or_default();
        text.lines().any(|line| line.starts_with('#') && anchor(line) == fragment)
    };
    file.exists() && (fragment.is_empty() || heading())
}

#[test]
fn links_of_the_packaged_chart_are_absolute_and_lead_to_files() {
    let readme = fs::read_to_string(chart().join("README.md")).unwrap();
    let links: Vec<&str> = readme.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() > 5, "{links:?}");
    let metadata = yaml("Chart.yaml");
    let sources = metadata["sources"].as_array().unwrap().iter().filter_map(Value::as_str);
    let links = links.into_iter().chain(metadata["icon"].as_str()).chain(sources);
    let wrong: Vec<&str> = links.filter(|link| !leads_to_a_file(link)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(!leads_to_a_file("https://ferrovirt.io/README.md#no-such-heading"));
}

#[test]
fn metadata_of_the_chart_names_its_images_and_its_licence() {
    let metadata = yaml("Chart.yaml");
    assert_eq!(metadata["home"], HOME);
    let annotation = |name: &str| metadata["annotations"][format!("artifacthub.io/{name}")].as_str().unwrap();
    let list = |name: &str| serde_saphyr::from_str::<Vec<Value>>(annotation(name)).unwrap();
    let version = metadata["appVersion"].as_str().unwrap();
    let expected = ["virt-api", "virt-controller", "virt-handler", "virt-launcher", "virt-importer"]
        .map(|name| json!({"name": name, "image": format!("ferrovirt.io/{name}:{version}")}));
    assert_eq!(list("images"), expected);
    assert!(list("changes").iter().all(|change| change["description"].is_string()));
    assert_eq!(annotation("license"), "Apache-2.0");
    let licence = |folder: PathBuf| fs::read_to_string(folder.join("LICENSE")).unwrap();
    assert_eq!(licence(chart()), licence(root()));
}

#[test]
fn each_value_is_set_by_a_file_that_lint_renders() {
    let schema: Value = serde_json::from_str(&fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap();
    let defaults = yaml("values.yaml");
    let files: Vec<PathBuf> = fs::read_dir(chart().join("ci")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 2, "{files:?}");
    let sets: Vec<Value> =
        files.iter().map(|path| serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap()).collect();
    for path in values::paths(&schema) {
        let default = values::at(&defaults, &path);
        let mut found = sets.iter().filter_map(|set| values::at(set, &path)).filter(|value| !value.is_null());
        assert!(found.any(|value| Some(value) != default), "no file of charts/ferrovirt/ci changes {path}");
    }
}
