use std::collections::BTreeSet;

use serde_json::json;

use super::*;

/// Paths of the schema of a VMI's spec, and true for those without fields below them.
fn schema() -> Vec<(String, bool)> {
    let definitions = crate::crds::all().unwrap();
    let definition = definitions.iter().find(|found| found.spec.names.kind == "VirtualMachineInstance").unwrap();
    let definition = serde_json::to_value(definition).unwrap();
    let versions = definition["spec"]["versions"].as_array().unwrap();
    let stored = versions.iter().find(|version| version["storage"] == true).unwrap();
    let mut found = Vec::new();
    add_paths("", &stored["schema"]["openAPIV3Schema"]["properties"]["spec"], &mut found);
    found
}

fn add_paths(path: &str, schema: &Value, found: &mut Vec<(String, bool)>) {
    let properties = schema.get("properties").and_then(Value::as_object);
    let items = schema.get("items");
    found.push((path.to_owned(), properties.is_none() && items.is_none()));
    for (key, inner) in properties.into_iter().flatten() {
        add_paths(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, inner, found);
    }
    if let Some(inner) = items {
        add_paths(&format!("{path}[]"), inner, found);
    }
}

/// Returns true if a row says what becomes of a field: its own row, or one above it that covers it.
fn has_row(path: &str) -> bool {
    let above = path.char_indices().filter(|(_, c)| ['.', '['].contains(c)).filter_map(|(end, _)| path.get(..end));
    let covers = |above: &str| match row(above) {
        (Some(field), has_below) => field.covers_below() || (field.refusal.is_some() && !has_below),
        (None, _) => false,
    };
    row(path).0.is_some() || above.into_iter().any(covers)
}

#[test]
fn each_field_of_the_schema_has_a_row() {
    let missing: Vec<_> = schema().into_iter().filter(|(path, is_leaf)| *is_leaf && !has_row(path)).collect();
    assert!(missing.is_empty(), "accepted and ignored: {missing:#?}");
}

#[test]
fn each_row_names_a_field_of_the_schema_once() {
    let known: BTreeSet<String> = schema().into_iter().map(|(path, _)| path).collect();
    for field in FIELDS {
        assert!(known.contains(field.name()), "{} is no field of the schema", field.path);
    }
    for pair in FIELDS.windows(2) {
        assert!(pair[0].name() < pair[1].name(), "{} is not before {}", pair[0].path, pair[1].path);
    }
}

#[test]
fn rows_are_found_by_their_paths() {
    for (path, found, has_below) in [
        ("", None, false),
        ("domain", None, true),
        ("domain.ioThreads", None, true),
        ("domain.ioThreadsPolicy", Some("domain.ioThreadsPolicy"), false),
        ("domain.memory.hugepages", None, true),
        ("affinity", Some("affinity.*"), false),
        ("volumes", None, true),
        ("volumes[]", Some("volumes[]"), true),
        ("volumes[].nam", None, false),
        ("zone", None, false),
    ] {
        let (field, below) = row(path);
        assert_eq!((field.map(|field| field.path), below), (found, has_below), "{path}");
    }
}

#[test]
fn refused_uses_are_named_with_their_items() {
    let spec = json!({
        "domain": {"devices": {
            "gpus": [{"name": "a"}, {"name": "b", "requestName": "r"}],
            "disks": [{"name": "d", "changedBlockTracking": true}],
            "interfaces": [{"sriov": {}}],
        }},
        "volumes": [{"name": "a", "cloudInitNoCloud": {}}, {"name": "b", "cloudInitNoCloud": {}}],
    });
    let names = |found: Vec<(String, &'static str)>| found.into_iter().map(|(path, _)| path).collect::<Vec<_>>();
    let all = [
        "domain.devices.disks[0].changedBlockTracking",
        "domain.devices.gpus[1].claimName",
        "domain.devices.interfaces[0].sriov",
        "volumes[1]",
    ];
    assert_eq!(names(refused(&spec)), all);
    assert_eq!(
        names(refused_by_pod(&spec)),
        ["domain.devices.disks[0].changedBlockTracking", "domain.devices.interfaces[0].sriov"]
    );
    assert!(refused(&json!({"domain": {"devices": {"tpm": {"persistent": true}, "gpus": null}}})).is_empty());
}

#[test]
fn reasons_are_no_field_names_and_changes_have_tests() {
    for field in FIELDS {
        let reason = field.refusal.and_then(|refusal| refusal.reason).unwrap_or("ruled out");
        assert!(!reason.contains("domain."), "{}", field.path);
        assert!(field.by.is_some() || field.refusal.is_some(), "{} is carried out by no component", field.path);
    }
    let changes = FIELDS.iter().flat_map(|field| field.changes).chain(changes::OTHERS.iter().map(|(_, change)| change));
    assert!(changes.into_iter().all(|change| !change.test.is_empty()));
}
