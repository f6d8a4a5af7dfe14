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
        let kind = crd.spec.names.kind;
        check(&kind, &api::crds::schema(&kind).unwrap(), &mut found);
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn old_version_is_served_with_its_warning() {
    for crd in api::crds::all().unwrap() {
        let kinds = [
            "VirtualMachine",
            "VirtualMachineInstance",
            "VirtualMachineInstanceReplicaSet",
            "VirtualMachineInstanceMigration",
            "KubeVirt",
        ];
        if !kinds.contains(&crd.spec.names.kind.as_str()) {
            continue;
        }
        let versions: Vec<_> =
            crd.spec.versions.iter().map(|version| (version.name.as_str(), version.storage, version.served)).collect();
        assert_eq!(versions, [("v1", true, true), ("v1alpha3", false, true)]);
        assert_eq!(
            crd.spec.versions[1].deprecation_warning.as_deref(),
            Some("kubevirt.io/v1alpha3 is now deprecated and will be removed in a future release.")
        );
    }
}

#[test]
fn status_subresource_is_where_it_belongs() {
    for crd in api::crds::all().unwrap() {
        let without = ["VirtualMachineInstance", "VirtualMachineInstancePreset"];
        let status = crd.spec.versions[0].subresources.as_ref().is_some_and(|sub| sub.status.is_some());
        assert_eq!(status, !without.contains(&crd.spec.names.kind.as_str()), "{}", crd.spec.names.kind);
    }
}

#[test]
fn versions_are_listed_in_their_order() {
    let preset = "VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
    for (kind, group, scope, versions) in [
        (
            "VirtualMachineInstancePreset",
            "kubevirt.io",
            "Namespaced",
            &[
                ("v1", false, Some(format!("kubevirt.io/v1 {preset}"))),
                ("v1alpha3", true, Some(format!("kubevirt.io/v1alpha3 {preset}"))),
            ][..],
        ),
        ("VirtualMachinePool", "pool.kubevirt.io", "Namespaced", &[("v1alpha1", false, None), ("v1beta1", true, None)]),
        ("MigrationPolicy", "migrations.kubevirt.io", "Cluster", &[("v1alpha1", true, None)]),
    ] {
        let crd = api::crds::all().unwrap().into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
        assert_eq!((crd.spec.group.as_str(), crd.spec.scope.as_str()), (group, scope));
        let found: Vec<_> = crd
            .spec
            .versions
            .iter()
            .map(|version| (version.name.as_str(), version.storage, version.deprecation_warning.clone()))
            .collect();
        assert_eq!(found, versions, "{kind}");
        assert!(crd.spec.versions.iter().all(|version| version.served));
    }
}
