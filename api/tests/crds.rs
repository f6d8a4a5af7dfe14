//! The definitions in the chart are those of the types, and the API server can take them.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::{fs, path::Path};

use serde_json::Value;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt/crds");

#[test]
fn chart_holds_the_current_definitions() {
    for crd in api::crds::all().unwrap() {
        let path = Path::new(CHART).join(api::crds::file_name(&crd));
        let held = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            held == api::crds::yaml(&crd).unwrap(),
            "{} is stale: run `cargo run -p ferrovirt-api --bin crds -- --output charts/ferrovirt/crds`",
            path.display()
        );
        assert!(held.len() < 1 << 20, "{} is too large for the API server", path.display());
    }
}

/// Rules of structural schemas, as far as they can be seen without an API server.
fn check(path: &str, node: &Value, found: &mut Vec<String>) {
    let Some(object) = node.as_object() else {
        found.push(format!("{path} is not an object"));
        return;
    };
    let int_or_string = object.contains_key("x-kubernetes-int-or-string");
    if !int_or_string && !object.contains_key("type") {
        found.push(format!("{path} has no type"));
    }
    for key in object.keys() {
        let known = [
            "default",
            "description",
            "enum",
            "format",
            "items",
            "additionalProperties",
            "maxItems",
            "maxLength",
            "maximum",
            "minItems",
            "minLength",
            "minimum",
            "nullable",
            "pattern",
            "properties",
            "required",
            "type",
        ];
        let extension = key.starts_with("x-kubernetes-") || (int_or_string && key == "anyOf");
        if !extension && !known.contains(&key.as_str()) {
            found.push(format!("{path} has {key}"));
        }
    }
    if let Some(format) = object.get("format").and_then(Value::as_str)
        && !["int32", "int64", "double", "float", "date-time", "byte"].contains(&format)
    {
        found.push(format!("{path} has format {format}"));
    }
    if let Some(properties) = object.get("properties").and_then(Value::as_object) {
        for (name, property) in properties {
            check(&format!("{path}.{name}"), property, found);
        }
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = object.get(key) {
            check(&format!("{path}[]"), inner, found);
        }
    }
}

#[test]
fn schemas_are_structural() {
    let mut found = vec![];
    for crd in api::crds::all().unwrap() {
        let stored = crd.spec.versions.iter().find(|version| version.storage).unwrap();
        let schema = serde_json::to_value(&stored.schema).unwrap();
        check(&crd.spec.names.kind, &schema["openAPIV3Schema"], &mut found);
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
