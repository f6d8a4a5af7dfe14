//! Snapshots, restores, exports, backups, clones and plugins: one row for each rule, refused and accepted.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test ends here")]

use admission::{
    AdmissionReview, handle,
    neighbours::{Ask, Neighbours, Outcome, Wanted},
};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

const SNAPSHOTS: &str = "snapshot.kubevirt.io/v1beta1/virtualmachinesnapshots";
const CONTENTS: &str = "snapshot.kubevirt.io/v1beta1/virtualmachinesnapshotcontents";
const RESTORES: &str = "snapshot.kubevirt.io/v1beta1/virtualmachinerestores";
const EXPORTS: &str = "export.kubevirt.io/v1/virtualmachineexports";
const BACKUPS: &str = "backup.kubevirt.io/v1alpha1/virtualmachinebackups";
const TRACKERS: &str = "backup.kubevirt.io/v1alpha1/virtualmachinebackuptrackers";
const CLONES: &str = "clone.kubevirt.io/v1beta1/virtualmachineclones";
const PLUGINS: &str = "plugin.kubevirt.io/v1alpha1/plugins";
const VMS: &str = "kubevirt.io/v1/virtualmachines";

/// Path of the webhook that checks a resource.
fn path(resource: &str) -> &'static str {
    match resource {
        SNAPSHOTS => "/virtualmachinesnapshots-validate",
        RESTORES => "/virtualmachinerestores-validate",
        EXPORTS => "/virtualmachineexports-validate",
        BACKUPS => "/virtualmachinebackups-validate",
        TRACKERS => "/virtualmachinebackuptrackers-validate",
        CLONES => "/vm-clone-validate-create",
        _ => "/plugin-validate",
    }
}

/// A review and the cluster it meets.
#[derive(Clone)]
struct Call {
    path: &'static str,
    resource: &'static str,
    operation: &'static str,
    spec: Value,
    old: Value,
    gates: Vec<&'static str>,
    off: Vec<&'static str>,
    cluster: Vec<(&'static str, Value)>,
    templates: bool,
}

fn call(resource: &'static str, operation: &'static str, spec: Value) -> Call {
    Call {
        path: path(resource),
        resource,
        operation,
        old: spec.clone(),
        spec,
        gates: vec!["IncrementalBackup", "OCIExport", "Plugins"],
        off: vec![],
        cluster: vec![],
        templates: true,
    }
}

fn create(resource: &'static str, spec: Value) -> Call {
    call(resource, "CREATE", spec)
}

fn update(resource: &'static str, old: Value, spec: Value) -> Call {
    Call { old, ..call(resource, "UPDATE", spec) }
}

impl Call {
    fn without(self, gate: &'static str) -> Self {
        Self { gates: vec![], off: vec![gate], ..self }
    }

    fn among(mut self, resource: &'static str, object: Value) -> Self {
        self.cluster.push((resource, object));
        self
    }

    /// Asks for another resource than the webhook is for.
    fn about(self, resource: &'static str) -> Self {
        Self { resource, ..self }
    }

    fn review(&self) -> AdmissionReview {
        let [group, version, plural] = self.resource.split('/').collect::<Vec<_>>()[..] else { panic!() };
        let object = |spec: &Value| {
            json!({
                "apiVersion": format!("{group}/{version}"),
                "kind": "Any",
                "metadata": {"name": "new", "namespace": "default"},
                "spec": spec,
            })
        };
        let body = json!({"request": {
            "uid": "u",
            "resource": {"group": group, "version": version, "resource": plural},
            "namespace": "default",
            "operation": self.operation,
            "object": if self.operation == "DELETE" { Value::Null } else { object(&self.spec) },
            "oldObject": if self.operation == "CREATE" { Value::Null } else { object(&self.old) },
        }});
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let config = ClusterConfig {
            feature_gates: texts(&self.gates),
            disabled_feature_gates: texts(&self.off),
            virt_template: self.templates,
            ..ClusterConfig::default()
        };
        let mut neighbours = Neighbours::new();
        for _ in 0..admission::neighbours::MAX_ROUNDS {
            match handle(self.path, body.to_string().as_bytes(), &config, "kubevirt", &neighbours) {
                Ok(review) => return review,
                Err(wanted) => {
                    for wanted in wanted {
                        let outcome = self.read(&wanted);
                        neighbours.insert(wanted, outcome);
                    }
                }
            }
        }
        panic!("the review does not end")
    }

    /// The answer of the API server.
    fn read(&self, wanted: &Wanted) -> Outcome {
        assert_eq!(wanted.namespace.as_deref(), Some("default"));
        let resource = format!("{}/{}/{}", wanted.group, wanted.version, wanted.plural);
        let mut objects = self.cluster.iter().filter(|(of, _)| *of == resource).map(|(_, object)| object.clone());
        match &wanted.ask {
            Ask::Get { name } => Outcome::Object(objects.find(|object| object["metadata"]["name"] == **name)),
            Ask::List { .. } => Outcome::List(objects.collect()),
            other => panic!("{other:?}"),
        }
    }
}

/// What a rule says: the code and message of a request refused as such, or causes.
enum Says {
    Refused(&'static str),
    Causes(Vec<(&'static str, &'static str, &'static str)>),
}

fn invalid(field: &'static str, message: &'static str) -> Says {
    Says::Causes(vec![("FieldValueInvalid", field, message)])
}

/// A rule, a request that breaks it, and one that does not.
struct Row {
    rule: &'static str,
    broken: Call,
    says: Says,
    kept: Call,
}

fn row(rule: &'static str, broken: Call, says: Says, kept: Call) -> Row {
    Row { rule, broken, says, kept }
}

fn vm(name: &str) -> Value {
    json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name})
}

fn object(name: &str, spec: Value, status: Value) -> Value {
    json!({"apiVersion": "a/v1", "kind": "Any", "metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": spec, "status": status})
}

fn snapshot_rules() -> Vec<Row> {
    let spec = || json!({"source": vm("web")});
    let source = |source: Value| create(SNAPSHOTS, json!({"source": source}));
    let good = || create(SNAPSHOTS, spec());
    vec![
        row(
            "resource",
            good().about(VMS),
            Says::Refused("unexpected resource {Group:kubevirt.io Version:v1 Resource:virtualmachines}"),
            good(),
        ),
        row("operation", call(SNAPSHOTS, "DELETE", spec()), Says::Refused("unexpected operation DELETE"), good()),
        row("gate", good().without("Snapshot"), Says::Refused("snapshot feature gate not enabled"), good()),
        row(
            "group missing",
            source(json!({"kind": "VirtualMachine", "name": "web"})),
            Says::Causes(vec![("FieldValueNotFound", "spec.source.apiGroup", "missing apiGroup")]),
            good(),
        ),
        row(
            "group",
            source(json!({"apiGroup": "other.io", "kind": "VirtualMachine", "name": "web"})),
            invalid("spec.source.apiGroup", "invalid apiGroup"),
            good(),
        ),
        row(
            "kind",
            source(json!({"apiGroup": "kubevirt.io", "kind": "Pod", "name": "web"})),
            invalid("spec.source.kind", "invalid kind"),
            good(),
        ),
        row(
            "deadline",
            create(SNAPSHOTS, json!({"source": vm("web"), "failureDeadline": "soon"})),
            invalid("spec.failureDeadline", "spec.failureDeadline: \"soon\" is not a duration"),
            create(SNAPSHOTS, json!({"source": vm("web"), "failureDeadline": "1m30s"})),
        ),
        row(
            "immutable",
            update(SNAPSHOTS, spec(), json!({"source": vm("other")})),
            invalid("spec", "spec in immutable after creation"),
            update(SNAPSHOTS, spec(), spec()),
        ),
    ]
}

/// A restore of `spec` in a cluster with the VM `web`, its snapshot `s`, and what that holds.
fn restore(spec: Value) -> Call {
    let state = json!({"virtualMachine": {"spec": {"template": {"spec": {"domain": {"devices": {}}}}}}});
    let stateful = |domain: Value| json!({"virtualMachine": {"spec": {"template": {"spec": {"domain": domain}}}}});
    let taken = |content: &str| json!({"sourceUID": "uid-web", "virtualMachineSnapshotContentName": content});
    let mut all = json!({"target": vm("web"), "virtualMachineSnapshotName": "s"});
    for (key, value) in spec.as_object().unwrap() {
        all[key] = value.clone();
    }
    let source = || json!({"source": vm("web")});
    create(RESTORES, all)
        .among(VMS, object("web", json!({"template": {}}), json!({})))
        .among(VMS, object("other", json!({"template": {}}), json!({})))
        .among(SNAPSHOTS, object("s", source(), taken("plain")))
        .among(SNAPSHOTS, object("with-tpm", source(), taken("with-tpm")))
        .among(SNAPSHOTS, object("with-efi", source(), taken("with-efi")))
        .among(SNAPSHOTS, object("unfinished", source(), json!({"sourceUID": "uid-web"})))
        .among(SNAPSHOTS, object("of-nothing", source(), taken("of-nothing")))
        .among(SNAPSHOTS, object("lost", source(), taken("lost")))
        .among(CONTENTS, object("plain", json!({"source": state}), json!({})))
        .among(
            CONTENTS,
            object("with-tpm", json!({"source": stateful(json!({"devices": {"tpm": {"persistent": true}}}))}), json!({})),
        )
        .among(
            CONTENTS,
            object(
                "with-efi",
                json!({"source": stateful(json!({"devices": {}, "firmware": {"bootloader": {"efi": {"persistent": true}}}}))}),
                json!({}),
            ),
        )
        .among(CONTENTS, object("of-nothing", json!({"source": {}}), json!({})))
        .among(
            RESTORES,
            object("busy", json!({"target": vm("busy"), "virtualMachineSnapshotName": "s"}), json!({"complete": false})),
        )
        .among(
            RESTORES,
            object("done", json!({"target": vm("web"), "virtualMachineSnapshotName": "s"}), json!({"complete": true})),
        )
}

fn restore_rules() -> Vec<Row> {
    const STATE: &str =
        "Restore to a different VM is not supported when snapshotted VM has backend storage (persistent TPM or EFI)";
    let spec = || json!({"target": vm("web"), "virtualMachineSnapshotName": "s"});
    let good = || restore(json!({}));
    let other = |snapshot: &str| restore(json!({"target": vm("other"), "virtualMachineSnapshotName": snapshot}));
    let absent = |snapshot: &str| restore(json!({"target": vm("absent"), "virtualMachineSnapshotName": snapshot}));
    let patch = |text: &str| restore(json!({"patches": [text]}));
    let change =
        |change: Value| restore(json!({"volumeRestoreOverrides": [{"volumeName": "a", "restoreName": "b"}, change]}));
    vec![
        row(
            "resource",
            good().about(SNAPSHOTS),
            Says::Refused(
                "unexpected resource {Group:snapshot.kubevirt.io Version:v1beta1 Resource:virtualmachinesnapshots}",
            ),
            good(),
        ),
        row("operation", call(RESTORES, "DELETE", spec()), Says::Refused("unexpected operation DELETE"), good()),
        row("gate", good().without("Snapshot"), Says::Refused("Snapshot/Restore feature gate not enabled"), good()),
        row(
            "group missing",
            restore(json!({"target": {"kind": "VirtualMachine", "name": "web"}})),
            Says::Causes(vec![("FieldValueNotFound", "spec.target.apiGroup", "missing apiGroup")]),
            good(),
        ),
        row(
            "group",
            restore(json!({"target": {"apiGroup": "", "kind": "VirtualMachine", "name": "web"}})),
            invalid("spec.target.apiGroup", "invalid apiGroup"),
            good(),
        ),
        row(
            "kind",
            restore(json!({"target": {"apiGroup": "kubevirt.io", "kind": "Pod", "name": "web"}})),
            invalid("spec.target.kind", "invalid kind"),
            good(),
        ),
        row(
            "patch is pairs",
            patch(r#"{"op": "replace", "path": "/spec/running", "value": "a:b"}"#),
            invalid(
                "spec.patches",
                "patch format is not valid - one \":\" expected in a single key-value json patch:  \"value\": \"a:b\"",
            ),
            patch(r#"{"op": "replace", "path": "/spec/running", "value": "a"}"#),
        ),
        row(
            "patch of spec",
            patch(r#"{"op": "replace", "path": "/metadata/name", "value": "a"}"#),
            invalid(
                "spec.patches",
                "patching is valid only for elements under /spec/ only:  \"path\": \"/metadata/name\"",
            ),
            patch(r#"{"op": "add", "path": "/metadata/labels/a", "value": "b"}"#),
        ),
        row(
            "patches are checked before there is a snapshot",
            restore(json!({"virtualMachineSnapshotName": "later", "patches": ["x"]})),
            invalid(
                "spec.patches",
                "patch format is not valid - one \":\" expected in a single key-value json patch: x",
            ),
            restore(json!({"virtualMachineSnapshotName": "later", "target": vm("other")})),
        ),
        row(
            "content named",
            other("unfinished"),
            Says::Refused("snapshot content name is nil in vmSnapshot status"),
            restore(json!({"virtualMachineSnapshotName": "unfinished"})),
        ),
        row(
            "content found",
            absent("lost"),
            Says::Refused("virtualmachinesnapshotcontents.snapshot.kubevirt.io \"lost\" not found"),
            absent("s"),
        ),
        row("content of a VM", absent("of-nothing"), Says::Refused("unexpected snapshot source"), other("s")),
        row(
            "state of a TPM",
            other("with-tpm"),
            invalid("spec", STATE),
            restore(json!({"virtualMachineSnapshotName": "with-tpm"})),
        ),
        row("state of EFI", absent("with-efi"), invalid("spec", STATE), absent("s")),
        row(
            "override names a volume",
            change(json!({"restoreName": "c"})),
            Says::Causes(vec![(
                "FieldValueRequired",
                "spec.volumeRestoreOverrides[1].volumeName",
                "must provide a volume name",
            )]),
            change(json!({"volumeName": "c", "restoreName": "d"})),
        ),
        row(
            "override says something",
            change(json!({"volumeName": "c"})),
            Says::Causes(vec![(
                "FieldValueRequired",
                "spec.volumeRestoreOverrides[1]",
                "must provide at least one overriden field",
            )]),
            change(json!({"volumeName": "c", "labels": {"a": "b"}})),
        ),
        row(
            "volume policy",
            restore(json!({"volumeRestorePolicy": "Guess"})),
            invalid("spec.volumeRestorePolicy", "volume restore policy \"Guess\" doesn't exist"),
            restore(json!({"volumeRestorePolicy": "PrefixTargetName"})),
        ),
        row(
            "owner policy",
            restore(json!({"volumeOwnershipPolicy": "Me"})),
            invalid("spec.volumeOwnershipPolicy", "volume ownership policy \"Me\" doesn't exist"),
            restore(json!({"volumeOwnershipPolicy": "None"})),
        ),
        row(
            "one at a time",
            restore(json!({"target": vm("busy")})),
            invalid("spec.target", "VirtualMachineRestore \"busy\" in progress"),
            good(),
        ),
        row(
            "immutable",
            update(RESTORES, spec(), json!({"target": vm("other"), "virtualMachineSnapshotName": "s"})),
            invalid("spec", "spec in immutable after creation"),
            update(RESTORES, spec(), spec()),
        ),
    ]
}

fn export_rules() -> Vec<Row> {
    const KINDS: [(&str, &str, &str, &str, &str); 5] = [
        ("PersistentVolumeClaim", "", "v1", "PVC name must not be empty", "PVC API group must be missing or blank"),
        (
            "VirtualMachineSnapshot",
            "snapshot.kubevirt.io",
            "",
            "VMSnapshot name must not be empty",
            "VMSnapshot API group must be snapshot.kubevirt.io",
        ),
        (
            "VirtualMachine",
            "kubevirt.io",
            "",
            "Virtual Machine name must not be empty",
            "VM API group must be kubevirt.io",
        ),
        (
            "VirtualMachineBackup",
            "backup.kubevirt.io",
            "kubevirt.io",
            "VirtualMachineBackup name must not be empty",
            "VirtualMachineBackup API group must be backup.kubevirt.io",
        ),
        (
            "VirtualMachineTemplate",
            "template.kubevirt.io",
            "",
            "VirtualMachineTemplate name must not be empty",
            "VirtualMachineTemplate API group must be template.kubevirt.io",
        ),
    ];
    const TEMPLATES: &str =
        "VirtualMachineTemplate source requires the OCIExport feature gate and virt-template deployment to be enabled";
    let source = |group: &str, kind: &str, name: &str| {
        create(EXPORTS, json!({"source": {"apiGroup": group, "kind": kind, "name": name}}))
    };
    let spec = || json!({"source": {"kind": "PersistentVolumeClaim", "name": "data"}});
    let good = || create(EXPORTS, spec());
    let template = || source("template.kubevirt.io", "VirtualMachineTemplate", "t");
    let mut rows = vec![
        row(
            "resource",
            good().about(VMS),
            Says::Refused("unexpected resource {Group:kubevirt.io Version:v1 Resource:virtualmachines}"),
            good(),
        ),
        row("operation", call(EXPORTS, "DELETE", spec()), Says::Refused("unexpected operation DELETE"), good()),
        row("kind", source("", "Pod", "x"), invalid("spec.source.kind", "invalid kind"), good()),
        row("gate of templates", template().without("OCIExport"), invalid("spec.source.kind", TEMPLATES), template()),
        row(
            "templates deployed",
            Call { templates: false, ..template() },
            invalid("spec.source.kind", TEMPLATES),
            template(),
        ),
        row(
            "time to live",
            create(EXPORTS, json!({"source": spec()["source"], "ttlDuration": "-1h"})),
            invalid("spec.ttlDuration", "spec.ttlDuration: \"-1h\" is not a duration"),
            create(EXPORTS, json!({"source": spec()["source"], "ttlDuration": "1h"})),
        ),
        row(
            "immutable",
            update(EXPORTS, spec(), json!({"source": {"kind": "PersistentVolumeClaim", "name": "other"}})),
            invalid("spec", "spec in immutable after creation"),
            update(EXPORTS, spec(), spec()),
        ),
    ];
    for (kind, group, other, unnamed, grouped) in KINDS {
        rows.push(row("name", source(group, kind, ""), invalid("spec.source.name", unnamed), source(group, kind, "x")));
        rows.push(row(
            "group",
            source(other, kind, "x"),
            invalid("spec.source.APIGroup", grouped),
            source(group, kind, "x"),
        ));
    }
    rows
}

fn backup_rules() -> Vec<Row> {
    let spec = || json!({"source": vm("web"), "pvcName": "out"});
    let good = || create(BACKUPS, spec());
    let other =
        |name: &str, conditions: Value| good().among(BACKUPS, object(name, spec(), json!({"conditions": conditions})));
    let condition = |type_: &str| json!([{"type": type_, "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}]);
    let tracker = || create(TRACKERS, json!({"source": vm("web")}));
    vec![
        row(
            "resource",
            good().about(TRACKERS),
            Says::Refused(
                "unexpected resource {Group:backup.kubevirt.io Version:v1alpha1 Resource:virtualmachinebackuptrackers}",
            ),
            good(),
        ),
        row(
            "resource of trackers",
            tracker().about(BACKUPS),
            Says::Refused(
                "unexpected resource {Group:backup.kubevirt.io Version:v1alpha1 Resource:virtualmachinebackups}",
            ),
            tracker(),
        ),
        row(
            "gate",
            good().without("IncrementalBackup"),
            Says::Refused("IncrementalBackup feature gate not enabled"),
            good(),
        ),
        row(
            "gate of trackers",
            tracker().without("IncrementalBackup"),
            Says::Refused("IncrementalBackup feature gate not enabled"),
            tracker(),
        ),
        row(
            "new name",
            other("new", condition("Complete")),
            invalid("metadata.name", "VirtualMachineBackup \"new\" already exists"),
            other("old", condition("Complete")),
        ),
        row(
            "one at a time",
            other("old", condition("Progressing")),
            invalid("spec.source", "VirtualMachineBackup \"old\" in progress for source"),
            other("old", condition("Failed")),
        ),
        row(
            "time to live",
            create(BACKUPS, json!({"source": vm("web"), "ttlDuration": "x"})),
            invalid("spec.ttlDuration", "spec.ttlDuration: \"x\" is not a duration"),
            create(BACKUPS, json!({"source": vm("web"), "ttlDuration": "1h"})),
        ),
    ]
}

fn clone_rules() -> Vec<Row> {
    const MISPLACED_BANG: &str = "spec.labels filter a!b is invalid: cannot contain a negation character (!); FilterRules: NegationChar can be only used at the beginning of the filter";
    const MISPLACED_STAR: &str = "spec.template.annotations filter *a is invalid: cannot contain a wildcard character (*); FilterRules: WildcardChar can be only at the end of the filter";
    let with = |change: Value| {
        let mut spec = json!({"source": vm("web"), "target": vm("copy")});
        for (key, value) in change.as_object().unwrap() {
            match value {
                Value::Null => spec.as_object_mut().unwrap().remove(key),
                value => spec.as_object_mut().unwrap().insert(key.clone(), value.clone()),
            };
        }
        create(CLONES, spec)
    };
    let good = || with(json!({}));
    let source =
        |group: &str, kind: &str, name: &str| with(json!({"source": {"apiGroup": group, "kind": kind, "name": name}}));
    vec![
        row(
            "group of the request",
            good().about("other.io/v1/virtualmachineclones"),
            Says::Refused("unexpected group: other.io. Expected group: clone.kubevirt.io"),
            good(),
        ),
        row(
            "resource of the request",
            good().about("clone.kubevirt.io/v1beta1/others"),
            Says::Refused("unexpected resource: others. Expected resource: virtualmachineclones"),
            good(),
        ),
        row("gate", good().without("Snapshot"), Says::Refused("snapshot feature gate is not enabled"), good()),
        row(
            "filter is more than a sign",
            with(json!({"annotationFilters": ["!"]})),
            invalid("spec.annotations", "a negation character is not a valid filter"),
            with(json!({"annotationFilters": ["*", "!a/*"]})),
        ),
        row(
            "filter is something",
            with(json!({"template": {"labelFilters": [""]}})),
            invalid("spec.template.labels", "spec.template.labels filter is invalid: cannot be empty"),
            with(json!({"template": {"labelFilters": ["a"]}})),
        ),
        row(
            "negation first",
            with(json!({"labelFilters": ["a!b"]})),
            invalid("spec.labels", MISPLACED_BANG),
            with(json!({"labelFilters": ["!ab"]})),
        ),
        row(
            "wildcard last",
            with(json!({"template": {"annotationFilters": ["*a"]}})),
            invalid("spec.template.annotations", MISPLACED_STAR),
            with(json!({"template": {"annotationFilters": ["a*"]}})),
        ),
        row(
            "source kind",
            source("", "Pod", "x"),
            Says::Causes(vec![
                ("FieldValueInvalid", "spec.Source.Kind", "Source kind is not supported"),
                ("FieldValueInvalid", "spec.Source.APIGroup", "Source's APIGroup cannot be empty"),
            ]),
            source("snapshot.kubevirt.io", "VirtualMachineSnapshot", "s"),
        ),
        row(
            "target kind",
            with(json!({"target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "s"}})),
            invalid("spec.Target.Kind", "Target kind is not supported"),
            with(json!({"target": null})),
        ),
        row("source", with(json!({"source": null})), invalid("spec.Source", "Source cannot be nil"), good()),
        row(
            "source group",
            with(json!({"source": {"kind": "VirtualMachine", "name": "web"}})),
            invalid("spec.Source.APIGroup", "Source's APIGroup cannot be empty"),
            good(),
        ),
        row(
            "source kind missing",
            source("kubevirt.io", "", "web"),
            Says::Causes(vec![
                ("FieldValueInvalid", "spec.Source.Kind", "Source kind is not supported"),
                ("FieldValueInvalid", "spec.Source", "Source's Kind cannot be empty"),
            ]),
            good(),
        ),
        row(
            "source name",
            source("kubevirt.io", "VirtualMachine", ""),
            invalid("spec.Source.Name", "Source's name cannot be empty"),
            good(),
        ),
        row(
            "another name",
            with(json!({"target": vm("web")})),
            invalid("spec.target.name", "Target name cannot be equal to source name when both are VirtualMachines"),
            with(json!({"target": vm("web2")})),
        ),
        row(
            "MAC address",
            with(json!({"newMacAddresses": {"default": "02:00"}})),
            invalid("spec.newMacAddresses.default", "interface default has malformed MAC address (02:00)."),
            with(json!({"newMacAddresses": {"default": "02:00:00:00:00:01"}})),
        ),
        row(
            "patch",
            with(json!({"patches": ["{}", "{"]})),
            invalid("spec.patches[1]", "patch is not valid JSON ({)"),
            with(json!({"patches": ["{}"]})),
        ),
        row(
            "changed clones keep the rules",
            update(CLONES, json!({"source": vm("web")}), json!({"source": vm("web"), "target": vm("web")})),
            invalid("spec.target.name", "Target name cannot be equal to source name when both are VirtualMachines"),
            update(CLONES, json!({"source": vm("web")}), json!({"source": vm("web"), "target": vm("b")})),
        ),
    ]
}

fn plugin_rules() -> Vec<Row> {
    const SOCKET: &str = "spec.domainHooks[0].sidecar.socketPath";
    let hook = |hook: Value| create(PLUGINS, json!({"domainHooks": [hook]}));
    let node = |hook: Value| create(PLUGINS, json!({"nodeHooks": [hook]}));
    let socket = |path: &str| hook(json!({"sidecar": {"socketPath": path}}));
    let good = || hook(json!({"cel": {"expression": "Domain{}"}, "timeout": "10s"}));
    let near = || socket("/var/run/kubevirt-plugin/new/hook.sock");
    let long = format!("/var/run/kubevirt-plugin/new/{}.sock", "x".repeat(108));
    vec![
        row(
            "group of the request",
            good().about("other.io/v1/plugins"),
            Says::Refused("unexpected group: other.io, expected: plugin.kubevirt.io"),
            good(),
        ),
        row(
            "resource of the request",
            good().about("plugin.kubevirt.io/v1alpha1/others"),
            Says::Refused("unexpected resource: others, expected: plugins"),
            good(),
        ),
        row("gate", good().without("Plugins"), Says::Refused("Plugins feature gate is not enabled"), good()),
        row(
            "one way",
            hook(json!({})),
            invalid("spec.domainHooks[0]", "exactly one of cel or sidecar must be specified for each domain hook"),
            good(),
        ),
        row(
            "failure strategy",
            create(PLUGINS, json!({"failureStrategy": "Retry"})),
            invalid("spec.failureStrategy", "failureStrategy must be either 'Fail' or 'Ignore'"),
            create(PLUGINS, json!({"failureStrategy": "Ignore"})),
        ),
        row(
            "failure strategy of a hook",
            node(json!({"socket": "/a", "permittedHooks": ["PreVMStop"], "failureStrategy": "ignore"})),
            invalid("spec.nodeHooks[0].failureStrategy", "failureStrategy must be either 'Fail' or 'Ignore'"),
            node(json!({"socket": "/a", "permittedHooks": ["PreVMStop"], "failureStrategy": "Ignore"})),
        ),
        row(
            "hook points",
            node(json!({"socket": "/a", "permittedHooks": ["PreVMStop", "Never"]})),
            invalid("spec.nodeHooks[0].permittedHooks", "permittedHooks must only contain valid node hook points"),
            node(json!({"socket": "/a", "permittedHooks": ["PreVMStop", "PostMigrationSource"]})),
        ),
        row(
            "timeout",
            hook(json!({"cel": {"expression": "x"}, "timeout": "10"})),
            invalid("spec.domainHooks[0].timeout", "spec.domainHooks[0].timeout: \"10\" is not a duration"),
            good(),
        ),
        row(
            "clean path",
            socket("/var/run/kubevirt-plugin/new/../b.sock"),
            invalid(SOCKET, "socketPath must be a clean path (no '..' segments or redundant separators)"),
            near(),
        ),
        row(
            "name of the socket",
            socket("/var/run/kubevirt-plugin/new/b.socket"),
            invalid(SOCKET, "sidecar socketPath must end with .sock"),
            near(),
        ),
        row(
            "length of the socket",
            socket(&long),
            invalid(SOCKET, "sidecar socketPath must not exceed 108 characters (Unix socket limit)"),
            near(),
        ),
        row(
            "place of the socket",
            socket("/var/run/kubevirt-plugin/other/b.sock"),
            invalid(SOCKET, "sidecar socketPath must start with /var/run/kubevirt-plugin/<plugin-name>/"),
            near(),
        ),
    ]
}

fn causes(review: &AdmissionReview) -> Vec<(String, String, String)> {
    let review = serde_json::to_value(review).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let causes = review["response"]["status"]["details"]["causes"].as_array().cloned().unwrap_or_default();
    causes.iter().map(|cause| (text(&cause["reason"]), text(&cause["field"]), text(&cause["message"]))).collect()
}

#[test]
fn each_rule_refuses_what_breaks_it_and_nothing_else() {
    let mut count = 0;
    for (kind, rows) in [
        ("snapshot", snapshot_rules()),
        ("restore", restore_rules()),
        ("export", export_rules()),
        ("backup", backup_rules()),
        ("clone", clone_rules()),
        ("plugin", plugin_rules()),
    ] {
        for Row { rule, broken, says, kept } in rows {
            count += 1;
            let review = broken.review();
            assert!(!review.response.allowed, "{kind}: {rule}");
            let status = review.response.status.clone().unwrap();
            match says {
                Says::Refused(message) => {
                    assert_eq!((status.code, status.message.as_str()), (400, message), "{kind}: {rule}");
                    assert_eq!(status.reason, None, "{kind}: {rule}");
                }
                Says::Causes(want) => {
                    let want: Vec<_> =
                        want.into_iter().map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())).collect();
                    assert_eq!(causes(&review), want, "{kind}: {rule}");
                    let code = if kind == "plugin" { 0 } else { 422 };
                    assert_eq!((status.code, status.reason), (code, Some("Invalid")), "{kind}: {rule}");
                }
            }
            // What breaks no rule is let through, or waits for its controller.
            let review = kept.review();
            if kept.operation == "CREATE" {
                let got = causes(&review);
                assert_eq!(got.len(), 1, "{kind}: {rule}: {:?}", review.response.status);
                assert_eq!((got[0].0.as_str(), got[0].1.as_str()), ("FieldValueNotSupported", ""), "{kind}: {rule}");
                assert!(got[0].2.contains(" is not supported yet: "), "{kind}: {rule}: {}", got[0].2);
            } else {
                assert!(review.response.allowed, "{kind}: {rule}: {:?}", review.response.status);
            }
        }
    }
    println!("{count} rules");
}

#[test]
fn changed_backups_and_trackers_are_let_through() {
    for resource in [BACKUPS, TRACKERS] {
        let call =
            update(resource, json!({"source": vm("a")}), json!({"source": vm("b")})).without("IncrementalBackup");
        assert!(call.review().response.allowed);
    }
}

#[test]
fn changed_plugin_without_hooks_warns() {
    let review = update(PLUGINS, json!({}), json!({})).review();
    assert!(review.response.allowed);
    assert_eq!(
        review.response.warnings,
        ["no hooks or admission references are defined; this plugin will have no effect"]
    );
    let hooked = json!({"validatingAdmissionPolicies": [{"name": "p"}]});
    assert!(update(PLUGINS, hooked.clone(), hooked).review().response.warnings.is_empty());
}

#[test]
fn plugins_are_refused_in_the_words_of_the_first_cause() {
    let review = create(PLUGINS, json!({"failureStrategy": "a", "domainHooks": [{}]})).review();
    let status = serde_json::to_value(&review).unwrap()["response"]["status"].clone();
    assert_eq!(status["message"], "failureStrategy must be either 'Fail' or 'Ignore'");
    assert_eq!(status["details"]["causes"].as_array().unwrap().len(), 2);
    assert_eq!(status.get("code"), None);
}

/// Patch of a clone by its mutating webhook.
fn named(spec: Value) -> Vec<Value> {
    let call = Call { path: "/vm-clone-mutate-create", ..create(CLONES, spec) };
    let review = call.review();
    assert!(review.response.allowed, "{:?}", review.response.status);
    match review.response.patch {
        Some(patch) => serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap(),
        None => vec![],
    }
}

#[test]
fn clones_without_a_name_get_one() {
    let is_generated = |name: &Value| {
        let name = name.as_str().unwrap();
        let suffix = name.strip_prefix("clone-web-").unwrap();
        suffix.len() == 5 && suffix.bytes().all(|byte| b"bcdfghjklmnpqrstvwxz2456789".contains(&byte))
    };
    let patch = named(json!({"source": vm("web")}));
    assert_eq!((&patch[0]["op"], &patch[0]["path"]), (&json!("add"), &json!("/spec/target")));
    assert_eq!(patch[0]["value"]["kind"], "VirtualMachine");
    assert_eq!(patch[0]["value"]["apiGroup"], "kubevirt.io");
    assert!(is_generated(&patch[0]["value"]["name"]), "{patch:?}");

    let patch = named(json!({"source": vm("web"), "target": {"kind": "VirtualMachine", "name": ""}}));
    assert_eq!((&patch[0]["op"], &patch[0]["path"]), (&json!("replace"), &json!("/spec/target/name")));
    assert!(is_generated(&patch[0]["value"]), "{patch:?}");

    assert!(named(json!({"source": vm("web"), "target": vm("copy")})).is_empty());
    assert!(named(json!({"target": {"kind": "VirtualMachine", "name": ""}})).is_empty());
}
