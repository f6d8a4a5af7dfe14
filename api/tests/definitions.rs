//! Checks names, versions, subresources and columns of each CRD.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::sync::LazyLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion,
};
use serde_json::{Value, json};

static ALL: LazyLock<Vec<CustomResourceDefinition>> =
    LazyLock::new(|| [api::crds::all().unwrap(), api::crds::importer().unwrap()].concat());

/// Expected properties of a CRD.
struct Row {
    kind: &'static str,
    plural: &'static str,
    group: &'static str,
    short_names: &'static [&'static str],
    /// Namespaced kinds are in the category `all`, others in none.
    namespaced: bool,
    /// Versions in order; `*` marks the stored one, `!` a deprecated one.
    versions: &'static str,
    status: bool,
    scale: bool,
    /// True if the CRD sets a conversion strategy.
    conversion: bool,
    columns: &'static [&'static str],
}

const AGE: &str = "Age date .metadata.creationTimestamp";
const SOURCE_KIND: &str = "SourceKind string .spec.source.kind";
const SOURCE_NAME: &str = "SourceName string .spec.source.name";
const PHASE: &str = "Phase string .status.phase";
const READY: &str = "Ready string .status.conditions[?(@.type=='Ready')].status";
const SCALE_COLUMNS: &[&str] =
    &["Desired integer .spec.replicas", "Current integer .status.replicas", "Ready integer .status.readyReplicas", AGE];

const BASE: Row = Row {
    kind: "",
    plural: "",
    group: "",
    short_names: &[],
    namespaced: true,
    versions: "",
    status: true,
    scale: false,
    conversion: false,
    columns: &[],
};
const CORE: Row = Row { group: "kubevirt.io", versions: "*v1 !v1alpha3", ..BASE };
const SNAPSHOT: Row = Row { group: "snapshot.kubevirt.io", versions: "v1alpha1 *v1beta1", conversion: true, ..BASE };
const BACKUP: Row = Row { group: "backup.kubevirt.io", versions: "*v1alpha1", conversion: true, ..BASE };
const INSTANCETYPE: Row =
    Row { group: "instancetype.kubevirt.io", versions: "*v1beta1", status: false, conversion: true, ..BASE };

const CDI: Row = Row { group: "cdi.kubevirt.io", versions: "*v1beta1", ..BASE };

const ROWS: [Row; 22] = [
    Row {
        kind: "VirtualMachine",
        plural: "virtualmachines",
        short_names: &["vm", "vms"],
        // Beside those of the reference, with `-o wide`: node, address, run strategy and the need of a restart.
        columns: &[
            AGE,
            "Status string .status.printableStatus",
            READY,
            "NodeName string .status.nodeName 1",
            "IP string .status.ipAddress 1",
            "RunStrategy string .spec.runStrategy 1",
            "RestartRequired string .status.conditions[?(@.type=='RestartRequired')].status 1",
        ],
        ..CORE
    },
    Row {
        kind: "VirtualMachineInstance",
        plural: "virtualmachineinstances",
        short_names: &["vmi", "vmis"],
        status: false,
        columns: &[
            AGE,
            PHASE,
            "IP string .status.interfaces[0].ipAddress",
            "NodeName string .status.nodeName",
            READY,
            "Live-Migratable string .status.conditions[?(@.type=='LiveMigratable')].status 1",
            "Paused string .status.conditions[?(@.type=='Paused')].status 1",
        ],
        ..CORE
    },
    Row {
        kind: "VirtualMachineInstanceReplicaSet",
        plural: "virtualmachineinstancereplicasets",
        short_names: &["vmirs", "vmirss"],
        scale: true,
        columns: SCALE_COLUMNS,
        ..CORE
    },
    Row {
        kind: "VirtualMachineInstanceMigration",
        plural: "virtualmachineinstancemigrations",
        short_names: &["vmim", "vmims"],
        columns: &[PHASE, "VMI string .spec.vmiName"],
        ..CORE
    },
    Row {
        kind: "VirtualMachineInstancePreset",
        plural: "virtualmachineinstancepresets",
        short_names: &["vmipreset", "vmipresets"],
        versions: "!v1 *!v1alpha3",
        status: false,
        ..CORE
    },
    Row { kind: "KubeVirt", plural: "kubevirts", short_names: &["kv", "kvs"], columns: &[AGE, PHASE], ..CORE },
    Row {
        kind: "VirtualMachinePool",
        plural: "virtualmachinepools",
        group: "pool.kubevirt.io",
        short_names: &["vmpool", "vmpools"],
        versions: "v1alpha1 *v1beta1",
        scale: true,
        columns: SCALE_COLUMNS,
        ..BASE
    },
    Row {
        kind: "VirtualMachineSnapshot",
        plural: "virtualmachinesnapshots",
        short_names: &["vmsnapshot", "vmsnapshots"],
        columns: &[
            SOURCE_KIND,
            SOURCE_NAME,
            PHASE,
            "ReadyToUse boolean .status.readyToUse",
            "CreationTime date .status.creationTime",
            "Error string .status.error.message",
        ],
        ..SNAPSHOT
    },
    Row {
        kind: "VirtualMachineSnapshotContent",
        plural: "virtualmachinesnapshotcontents",
        short_names: &["vmsnapshotcontent", "vmsnapshotcontents"],
        columns: &[
            "ReadyToUse boolean .status.readyToUse",
            "CreationTime date .status.creationTime",
            "Error string .status.error.message",
        ],
        ..SNAPSHOT
    },
    Row {
        kind: "VirtualMachineRestore",
        plural: "virtualmachinerestores",
        short_names: &["vmrestore", "vmrestores"],
        columns: &[
            "TargetKind string .spec.target.kind",
            "TargetName string .spec.target.name",
            "Complete boolean .status.complete",
            "RestoreTime date .status.restoreTime",
        ],
        ..SNAPSHOT
    },
    Row {
        kind: "VirtualMachineExport",
        plural: "virtualmachineexports",
        group: "export.kubevirt.io",
        short_names: &["vmexport", "vmexports"],
        versions: "!v1beta1 *v1",
        conversion: true,
        columns: &[SOURCE_KIND, SOURCE_NAME, PHASE],
        ..BASE
    },
    Row {
        kind: "VirtualMachineBackup",
        plural: "virtualmachinebackups",
        short_names: &["vmbackup", "vmbackups"],
        columns: &[
            SOURCE_KIND,
            SOURCE_NAME,
            "Type string .status.type",
            "CheckpointName string .status.checkpointName",
        ],
        ..BACKUP
    },
    Row {
        kind: "VirtualMachineBackupTracker",
        plural: "virtualmachinebackuptrackers",
        short_names: &["vmbackuptracker", "vmbackuptrackers"],
        columns: &[
            SOURCE_KIND,
            SOURCE_NAME,
            "LatestCheckpoint string .status.latestCheckpoint.name",
            "CheckpointTime date .status.latestCheckpoint.creationTime",
        ],
        ..BACKUP
    },
    Row {
        kind: "VirtualMachineClone",
        plural: "virtualmachineclones",
        group: "clone.kubevirt.io",
        short_names: &["vmclone", "vmclones"],
        versions: "v1alpha1 *v1beta1",
        columns: &[
            PHASE,
            "SourceVirtualMachine string .spec.source.name",
            "TargetVirtualMachine string .spec.target.name",
        ],
        ..BASE
    },
    Row {
        kind: "VirtualMachineInstancetype",
        plural: "virtualmachineinstancetypes",
        short_names: &["vminstancetype", "vminstancetypes", "vmf", "vmfs"],
        ..INSTANCETYPE
    },
    Row {
        kind: "VirtualMachineClusterInstancetype",
        plural: "virtualmachineclusterinstancetypes",
        short_names: &["vmclusterinstancetype", "vmclusterinstancetypes", "vmcf", "vmcfs"],
        namespaced: false,
        ..INSTANCETYPE
    },
    Row {
        kind: "VirtualMachinePreference",
        plural: "virtualmachinepreferences",
        short_names: &["vmpref", "vmprefs", "vmp", "vmps"],
        ..INSTANCETYPE
    },
    Row {
        kind: "VirtualMachineClusterPreference",
        plural: "virtualmachineclusterpreferences",
        short_names: &["vmcp", "vmcps"],
        namespaced: false,
        ..INSTANCETYPE
    },
    Row {
        kind: "MigrationPolicy",
        plural: "migrationpolicies",
        group: "migrations.kubevirt.io",
        namespaced: false,
        versions: "*v1alpha1",
        ..BASE
    },
    Row {
        kind: "DataVolume",
        plural: "datavolumes",
        short_names: &["dv", "dvs"],
        columns: &[PHASE, "Progress string .status.progress", "Restarts integer .status.restartCount", AGE],
        ..CDI
    },
    Row { kind: "DataSource", plural: "datasources", short_names: &["das"], status: false, ..CDI },
    Row {
        kind: "Plugin",
        plural: "plugins",
        group: "plugin.kubevirt.io",
        namespaced: false,
        versions: "*v1alpha1",
        status: false,
        ..BASE
    },
];

/// Returns the warning for users of a deprecated version.
fn warning(kind: &str, version: &str) -> String {
    match (kind, version) {
        ("VirtualMachineInstancePreset", version) => {
            format!("kubevirt.io/{version} VirtualMachineInstancePresets is now deprecated and will be removed in v2.")
        }
        ("VirtualMachineExport", _) => {
            "export.kubevirt.io/v1beta1 VirtualMachineExport is now deprecated and will be removed in a future version."
                .to_owned()
        }
        _ => "kubevirt.io/v1alpha3 is now deprecated and will be removed in a future release.".to_owned(),
    }
}

fn columns(version: &CustomResourceDefinitionVersion) -> Vec<String> {
    let columns = version.additional_printer_columns.iter().flatten();
    columns
        .map(|column| {
            let priority = column.priority.filter(|priority| *priority != 0);
            let priority = priority.map(|priority| format!(" {priority}")).unwrap_or_default();
            format!("{} {} {}{priority}", column.name, column.type_, column.json_path)
        })
        .collect()
}

fn differences(row: &Row, crd: &CustomResourceDefinition) -> Vec<String> {
    let mut found = vec![];
    let mut same = |what: &str, got: Value, want: Value| {
        if got != want {
            found.push(format!("{}: {what} is {got}, not {want}", row.kind));
        }
    };
    let (spec, names) = (&crd.spec, &crd.spec.names);
    same("name", json!(crd.metadata.name), json!(format!("{}.{}", row.plural, row.group)));
    same("group", json!(spec.group), json!(row.group));
    same("plural", json!(names.plural), json!(row.plural));
    same("singular", json!(names.singular), json!(row.kind.to_lowercase()));
    same(
        "list kind",
        json!(names.list_kind.as_deref().unwrap_or(&format!("{}List", row.kind))),
        json!(format!("{}List", row.kind)),
    );
    same("short names", json!(names.short_names.clone().unwrap_or_default()), json!(row.short_names));
    let categories: &[&str] = if row.namespaced { &["all"] } else { &[] };
    same("categories", json!(names.categories.clone().unwrap_or_default()), json!(categories));
    same("scope", json!(spec.scope), json!(if row.namespaced { "Namespaced" } else { "Cluster" }));
    let strategy = spec.conversion.as_ref().map(|conversion| conversion.strategy.as_str());
    same("conversion", json!(strategy), json!(row.conversion.then_some("None")));
    let label = match (row.kind, row.group) {
        ("KubeVirt", _) => "operator.kubevirt.io",
        (_, "cdi.kubevirt.io") => "ferrovirt.io/importer",
        _ => "kubevirt.io",
    };
    same("labels", json!(crd.metadata.labels), json!({label: ""}));
    same("keeping unknown fields", json!(spec.preserve_unknown_fields.unwrap_or_default()), json!(false));

    let versions: Vec<String> = spec
        .versions
        .iter()
        .map(|version| {
            let stored = if version.storage { "*" } else { "" };
            let deprecated = if version.deprecated == Some(true) { "!" } else { "" };
            format!("{stored}{deprecated}{}", version.name)
        })
        .collect();
    same("versions", json!(versions.join(" ")), json!(row.versions));
    let schema = json!(spec.versions[0].schema);
    let undescribed = without_descriptions(schema.clone());
    for version in &spec.versions {
        let at = |what: &str| format!("{what} of {}", version.name);
        same(&at("serving"), json!(version.served), json!(true));
        let want = version.deprecated.map(|_| warning(row.kind, &version.name));
        same(&at("warning"), json!(version.deprecation_warning), json!(want));
        same(&at("columns"), json!(columns(version)), json!(row.columns));
        let scale = json!({
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.labelSelector",
        });
        let subresources = match (row.status, row.scale) {
            (false, _) => Value::Null,
            (true, false) => json!({"status": {}}),
            (true, true) => json!({"status": {}, "scale": scale}),
        };
        same(&at("subresources"), json!(version.subresources), subresources);
        same(&at("schema"), json!(without_descriptions(json!(version.schema)) == undescribed), json!(true));
    }

    let root = schema["openAPIV3Schema"].clone();
    same("metadata", root["properties"]["metadata"].clone(), json!({"type": "object"}));
    let required = if row.kind == "VirtualMachineInstancePreset" { Value::Null } else { json!(["spec"]) };
    same("required fields", root["required"].clone(), required);
    let nullable = ["VirtualMachineInstanceReplicaSet", "MigrationPolicy"].contains(&row.kind);
    same("nullable status", json!(root["properties"]["status"]["nullable"] == true), json!(nullable));
    found
}

/// Returns a schema without the descriptions, which the first version has alone.
fn without_descriptions(schema: Value) -> Value {
    match schema {
        Value::Object(members) => members
            .into_iter()
            .filter(|(name, member)| name != "description" || !member.is_string())
            .map(|(name, member)| (name, without_descriptions(member)))
            .collect(),
        Value::Array(members) => members.into_iter().map(without_descriptions).collect(),
        other => other,
    }
}

#[test]
fn definitions_are_as_clients_know_them() {
    let mut found = vec![];
    for row in &ROWS {
        match ALL.iter().find(|crd| crd.spec.names.kind == row.kind) {
            Some(crd) => found.extend(differences(row, crd)),
            None => found.push(format!("{} is not there", row.kind)),
        }
    }
    assert_eq!(ALL.len(), ROWS.len());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Descriptions of columns that have one.
#[test]
fn columns_are_described() {
    for crd in ALL.iter() {
        for column in crd.spec.versions.iter().flat_map(|version| version.additional_printer_columns.iter().flatten()) {
            let counted =
                if crd.spec.names.kind == "VirtualMachinePool" { "VirtualMachines" } else { "VirtualMachineInstances" };
            let want = match column.name.as_str() {
                "Status" => Some("Human Readable Status".to_owned()),
                "Desired" => Some(format!("Number of desired {counted}")),
                "Current" => Some(format!("Number of managed and not final or deleted {counted}")),
                "Ready" if column.type_ == "integer" => {
                    Some(format!("Number of managed {counted} which are ready to receive traffic"))
                }
                _ => None,
            };
            assert_eq!(column.description, want, "{} {}", crd.spec.names.kind, column.name);
        }
    }
}

/// Returns the schema of a kind at a path of property names; `[]` selects list items.
fn at(kind: &str, path: &str) -> Value {
    let crd = ALL.iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let mut node = json!(crd.spec.versions[0].schema)["openAPIV3Schema"].take();
    for step in path.split('.') {
        let name = step.trim_end_matches("[]");
        node = node["properties"][name].clone();
        if step.ends_with("[]") {
            node = node["items"].clone();
        }
    }
    assert!(node.is_object(), "{kind} has no {path}");
    node
}

/// Checks number and messages of CEL rules at a path. An API server must check that they compile.
#[test]
fn rules_stand_in_the_schema() {
    for (kind, path, messages) in [
        (
            "VirtualMachineBackup",
            "spec",
            &[
                "spec is immutable after creation",
                "pvcName is required",
                "tokenSecretRef is required when mode is Pull",
            ][..],
        ),
        (
            "VirtualMachineBackup",
            "spec.source",
            &[
                "apiGroup is required",
                "apiGroup must be kubevirt.io or backup.kubevirt.io",
                "kind must be VirtualMachine for kubevirt.io or VirtualMachineBackupTracker for backup.kubevirt.io",
                "name is required",
            ],
        ),
        ("VirtualMachineBackupTracker", "spec", &["spec is immutable after creation"]),
        (
            "VirtualMachineBackupTracker",
            "spec.source",
            &["apiGroup must be kubevirt.io", "kind must be VirtualMachine", "name is required"],
        ),
    ] {
        let rules = at(kind, path)["x-kubernetes-validations"].clone();
        let said: Vec<_> = rules.as_array().unwrap().iter().map(|rule| rule["message"].as_str().unwrap()).collect();
        assert_eq!(said, messages, "{kind} {path}");
    }
}

/// Keys of a schema besides its type, description and members.
#[test]
fn bounds_stand_in_the_schema() {
    for (kind, path, key, want) in [
        ("VirtualMachineInstance", "spec.volumes", "x-kubernetes-list-type", json!("atomic")),
        ("VirtualMachineInstance", "status.conditions", "x-kubernetes-list-type", json!("atomic")),
        ("VirtualMachineInstance", "spec.utilityVolumes", "x-kubernetes-list-type", json!("map")),
        ("VirtualMachineInstance", "status.kernelBootStatus.kernelInfo.checksum", "maximum", json!(4_294_967_295.0)),
        ("VirtualMachineInstance", "status.volumeStatus[].containerDiskVolume.checksum", "format", json!("int64")),
        ("VirtualMachineSnapshot", "status.indications", "x-kubernetes-list-type", json!("set")),
        ("VirtualMachineSnapshot", "status.snapshotVolumes.includedVolumes", "x-kubernetes-list-type", json!("set")),
        ("VirtualMachineSnapshot", "status.snapshotVolumes.excludedVolumes", "x-kubernetes-list-type", json!("set")),
        ("VirtualMachineSnapshot", "status.conditions[].lastProbeTime", "nullable", json!(true)),
        ("VirtualMachineSnapshot", "spec", "required", json!(["source"])),
        ("VirtualMachineSnapshotContent", "spec.source.virtualMachine.metadata", "nullable", json!(true)),
        (
            "VirtualMachineSnapshotContent",
            "spec.source.virtualMachine.metadata",
            "x-kubernetes-preserve-unknown-fields",
            json!(true),
        ),
        (
            "VirtualMachineSnapshotContent",
            "spec.volumeBackups[].persistentVolumeClaim.metadata",
            "x-kubernetes-preserve-unknown-fields",
            json!(true),
        ),
        (
            "VirtualMachineSnapshotContent",
            "spec.source.virtualMachine.spec.template.metadata",
            "x-kubernetes-preserve-unknown-fields",
            json!(true),
        ),
        (
            "VirtualMachineSnapshotContent",
            "spec.source.virtualMachine.spec.template.spec.domain.clock",
            "x-kubernetes-preserve-unknown-fields",
            json!(true),
        ),
        (
            "VirtualMachineSnapshotContent",
            "spec.source.virtualMachine.spec.template.spec.volumes",
            "maxItems",
            json!(256),
        ),
        (
            "VirtualMachineSnapshotContent",
            "spec.volumeBackups[]",
            "required",
            json!(["persistentVolumeClaim", "volumeName"]),
        ),
        ("VirtualMachineRestore", "spec.targetReadinessPolicy", "default", json!("WaitGracePeriod")),
        (
            "VirtualMachineRestore",
            "spec.targetReadinessPolicy",
            "enum",
            json!(["StopTarget", "WaitGracePeriod", "FailImmediate", "WaitEventually"]),
        ),
        ("VirtualMachineRestore", "spec", "required", json!(["target", "virtualMachineSnapshotName"])),
        ("VirtualMachineExport", "status.links.external.backups", "x-kubernetes-list-map-keys", json!(["name"])),
        (
            "VirtualMachineExport",
            "status.links.internal.backups[].endpoints",
            "x-kubernetes-list-map-keys",
            json!(["endpoint"]),
        ),
        ("VirtualMachineExport", "status.links.internal.manifests", "x-kubernetes-list-map-keys", json!(["type"])),
        (
            "VirtualMachineExport",
            "status.links.external.volumes[].formats",
            "x-kubernetes-list-map-keys",
            json!(["format"]),
        ),
        ("VirtualMachineExport", "status.links.external", "required", json!(["cert"])),
        ("VirtualMachineClone", "spec.volumeNamePolicy", "enum", json!(["RandomizeNames", "PrefixTargetName"])),
        ("VirtualMachineClone", "spec", "required", json!(["source"])),
        ("VirtualMachineClone", "spec.source", "required", json!(["kind", "name"])),
        ("VirtualMachineBackup", "spec.mode", "enum", json!(["Push", "Pull"])),
        ("VirtualMachineBackup", "status.conditions", "x-kubernetes-list-map-keys", json!(["type"])),
        (
            "VirtualMachineBackup",
            "status.conditions[]",
            "required",
            json!(["lastTransitionTime", "message", "reason", "status", "type"]),
        ),
        ("Plugin", "spec.domainHooks[].cel.expression", "minLength", json!(1)),
        ("Plugin", "spec.domainHooks[].sidecar.socketPath", "minLength", json!(1)),
        ("Plugin", "spec.nodeHooks[].socket", "minLength", json!(1)),
        ("Plugin", "spec.nodeHooks[].permittedHooks", "minItems", json!(1)),
        ("Plugin", "spec.validatingAdmissionWebhooks[].name", "minLength", json!(1)),
    ] {
        let mut got = at(kind, path)[key].clone();
        if let (Value::Array(items), "required") = (&mut got, key) {
            items.sort_by_key(ToString::to_string);
        }
        assert_eq!(got, want, "{kind} {path} {key}");
    }
}
