//! Checks that the CRDs in the chart are those of the types and that the API server can accept them.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::{collections::BTreeSet, fs, path::Path};

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
        let read: Value = serde_saphyr::from_str(&held).unwrap();
        assert_eq!(read, serde_json::to_value(&crd).unwrap(), "{} is read as something else", path.display());
        assert!(held.len() < 1 << 20, "{} is too large for the API server", path.display());
    }
}

/// Checks the rules of structural schemas that can be checked without an API server.
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
    for crd in [api::crds::all().unwrap(), api::crds::importer().unwrap()].concat() {
        let stored = crd.spec.versions.iter().find(|version| version.storage).unwrap();
        let schema = serde_json::to_value(&stored.schema).unwrap();
        check(&crd.spec.names.kind, &schema["openAPIV3Schema"], &mut found);
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Selectors of an affinity.
const AFFINITY: [&str; 11] = [
    "nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].preference",
    "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
    "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[]",
    "podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.labelSelector",
    "podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.namespaceSelector",
    "podAffinity.requiredDuringSchedulingIgnoredDuringExecution[].labelSelector",
    "podAffinity.requiredDuringSchedulingIgnoredDuringExecution[].namespaceSelector",
    "podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.labelSelector",
    "podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.namespaceSelector",
    "podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[].labelSelector",
    "podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[].namespaceSelector",
];

/// Selectors and references of a VMI spec, except those of its affinity.
const VMI: [&str; 9] = [
    "topologySpreadConstraints[].labelSelector",
    "volumes[].cloudInitConfigDrive.networkDataSecretRef",
    "volumes[].cloudInitConfigDrive.secretRef",
    "volumes[].cloudInitNoCloud.networkDataSecretRef",
    "volumes[].cloudInitNoCloud.secretRef",
    "volumes[].downwardAPI.fields[].fieldRef",
    "volumes[].downwardAPI.fields[].resourceFieldRef",
    "volumes[].sysprep.configMap",
    "volumes[].sysprep.secret",
];

/// Selectors and references of a VM spec, except those of its template.
const VM: [&str; 4] = [
    "dataVolumeTemplates[].spec.pvc.dataSource",
    "dataVolumeTemplates[].spec.pvc.selector",
    "dataVolumeTemplates[].spec.storage.dataSource",
    "dataVolumeTemplates[].spec.storage.selector",
];

/// Selectors and references of single kinds.
const SINGLE: [&str; 19] = [
    "KubeVirt.spec.configuration.autoCPULimitNamespaceLabelSelector",
    "KubeVirt.spec.configuration.changedBlockTrackingLabelSelectors.namespaceLabelSelector",
    "KubeVirt.spec.configuration.changedBlockTrackingLabelSelectors.virtualMachineLabelSelector",
    "KubeVirt.spec.configuration.ksmConfiguration.nodeLabelSelector",
    "KubeVirt.spec.imagePullSecrets[]",
    "VirtualMachineBackup.spec.source",
    "VirtualMachineBackupTracker.spec.source",
    "VirtualMachineClone.spec.source",
    "VirtualMachineClone.spec.target",
    "VirtualMachineExport.spec.source",
    "VirtualMachineInstancePreset.spec.selector",
    "VirtualMachineInstanceReplicaSet.spec.selector",
    "VirtualMachinePool.spec.scaleInStrategy.proactive.selectionPolicy.selectors.labelSelector",
    "VirtualMachinePool.spec.selector",
    "VirtualMachinePool.spec.updateStrategy.proactive.selectionPolicy.selectors.labelSelector",
    "VirtualMachineRestore.spec.target",
    "VirtualMachineSnapshot.spec.source",
    "VirtualMachineSnapshotContent.spec.volumeBackups[].persistentVolumeClaim.spec.dataSource",
    "VirtualMachineSnapshotContent.spec.volumeBackups[].persistentVolumeClaim.spec.selector",
];

/// Finds the paths that server-side apply replaces as a whole.
fn whole(path: &str, node: &Value, found: &mut BTreeSet<String>) {
    if node["x-kubernetes-map-type"] == "atomic" {
        found.insert(path.to_owned());
    }
    for (name, property) in node["properties"].as_object().into_iter().flatten() {
        whole(&format!("{path}.{name}"), property, found);
    }
    for (key, step) in [("items", "[]"), ("additionalProperties", "{}")] {
        if let Some(inner) = node.get(key) {
            whole(&format!("{path}{step}"), inner, found);
        }
    }
}

/// Expects the paths that upstream marks, and no others: bindings, revisions and hypervisors have only a name, too.
#[test]
fn appliers_replace_selectors_and_references_as_a_whole() {
    let mut wanted: BTreeSet<String> = SINGLE.map(str::to_owned).into();
    let mut want = |base: &str, paths: &[&str]| wanted.extend(paths.iter().map(|path| format!("{base}.{path}")));
    for vm in [
        "VirtualMachine.spec",
        "VirtualMachinePool.spec.virtualMachineTemplate.spec",
        "VirtualMachineSnapshotContent.spec.source.virtualMachine.spec",
    ] {
        want(vm, &VM);
        want(&format!("{vm}.template.spec"), &VMI);
        want(&format!("{vm}.template.spec.affinity"), &AFFINITY);
    }
    for vmi in ["VirtualMachineInstance.spec", "VirtualMachineInstanceReplicaSet.spec.template.spec"] {
        want(vmi, &VMI);
        want(&format!("{vmi}.affinity"), &AFFINITY);
    }
    want("KubeVirt.spec.infra.nodePlacement.affinity", &AFFINITY);
    want("KubeVirt.spec.workloads.nodePlacement.affinity", &AFFINITY);

    let mut found = BTreeSet::new();
    for crd in api::crds::all().unwrap() {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        whole(&crd.spec.names.kind, &schema["openAPIV3Schema"], &mut found);
    }
    let missing: Vec<&String> = wanted.difference(&found).collect();
    let wrong: Vec<&String> = found.difference(&wanted).collect();
    assert!(missing.is_empty() && wrong.is_empty(), "missing: {missing:#?}, wrong: {wrong:#?}");
}
