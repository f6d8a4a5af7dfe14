//! Whole reviews, as the API server sends them.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use admission::{
    WEBHOOKS, handle,
    neighbours::{Ask, MAX_WANTED, Neighbours, Outcome},
};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

const CONTROLLER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";
const HANDLER: &str = "system:serviceaccount:kubevirt:kubevirt-handler";

/// The answer in a cluster that holds no other objects.
fn respond(path: &str, body: &[u8]) -> admission::AdmissionReview {
    respond_beside(path, body, &|_| vec![])
}

/// The answer in a cluster that holds these objects of each plural.
fn respond_beside(path: &str, body: &[u8], objects: &dyn Fn(&str) -> Vec<Value>) -> admission::AdmissionReview {
    let mut neighbours = Neighbours::new();
    loop {
        match handle(path, body, &ClusterConfig::default(), "kubevirt", &neighbours) {
            Ok(review) => return review,
            Err(wanted) => {
                assert!(neighbours.len() < MAX_WANTED);
                for wanted in wanted {
                    let outcome = match wanted.ask {
                        Ask::List { .. } => Outcome::List(objects(&wanted.plural)),
                        _ => Outcome::Object(objects(&wanted.plural).into_iter().next()),
                    };
                    neighbours.insert(wanted, outcome);
                }
            }
        }
    }
}

struct Call {
    path: &'static str,
    plural: &'static str,
    operation: &'static str,
    user: &'static str,
    object: Value,
    old: Value,
    node: Option<&'static str>,
    group: &'static str,
    beside: Vec<(&'static str, Value)>,
}

impl Call {
    fn new(path: &'static str, plural: &'static str, operation: &'static str, object: Value) -> Self {
        Self {
            path,
            plural,
            operation,
            user: "jane",
            object,
            old: Value::Null,
            node: None,
            group: "kubevirt.io",
            beside: vec![],
        }
    }

    fn by(self, user: &'static str) -> Self {
        Self { user, ..self }
    }

    /// In a cluster that holds an object of a plural.
    fn beside(mut self, plural: &'static str, object: Value) -> Self {
        self.beside.push((plural, object));
        self
    }

    fn was(self, old: Value) -> Self {
        Self { old, ..self }
    }

    fn version(&self) -> &'static str {
        match self.group {
            "pool.kubevirt.io" => "v1beta1",
            "migrations.kubevirt.io" => "v1alpha1",
            _ => "v1",
        }
    }

    fn send(&self) -> Value {
        let extra = match self.node {
            Some(node) => json!({"authentication.kubernetes.io/node-name": [node]}),
            None => json!({}),
        };
        let body = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "the-uid",
                "kind": {"group": "kubevirt.io", "version": "v1", "kind": "Any"},
                "resource": {"group": self.group, "version": self.version(), "resource": self.plural},
                "namespace": "default",
                "operation": self.operation,
                "userInfo": {"username": self.user, "groups": ["system:authenticated"], "extra": extra},
                "object": self.object,
                "oldObject": self.old,
                "dryRun": false,
            },
        });
        let beside = |plural: &str| {
            self.beside.iter().filter(|(of, _)| *of == plural).map(|(_, object)| object.clone()).collect()
        };
        let review = respond_beside(self.path, body.to_string().as_bytes(), &beside);
        let review = serde_json::to_value(review).unwrap();
        assert_eq!(review["response"]["uid"], "the-uid");
        review["response"].clone()
    }

    /// The object after the patch of the answer.
    fn patched(&self) -> Value {
        let response = self.allowed();
        let mut object = self.object.clone();
        if let Some(patch) = response["patch"].as_str() {
            let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap();
            json_patch::patch(&mut object, &patch).unwrap();
        }
        object
    }

    fn refused(&self, message: &str) {
        let response = self.send();
        assert_eq!(response["allowed"], false, "{response}");
        let got = response["status"]["message"].as_str().unwrap();
        assert!(got.contains(message), "wanted {message}\ngot {got}");
    }

    fn allowed(&self) -> Value {
        let response = self.send();
        assert_eq!(response["allowed"], true, "{response}");
        response
    }
}

fn machine() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "default", "labels": {"app": "web"}},
        "spec": {
            "domain": {
                "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio", "readonly": false}}]},
                "memory": {"guest": "128Mi"},
            },
            "volumes": [{"name": "root", "containerDisk": {"image": "a:b"}}],
        },
    })
}

fn vm() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "v", "namespace": "default"},
        "spec": {
            "runStrategy": "Always",
            "template": {
                "metadata": {"creationTimestamp": null, "labels": {"app": "web"}},
                "spec": machine()["spec"],
            },
        },
    })
}

fn create(object: Value) -> Call {
    Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "CREATE", object)
}

fn validate(object: Value) -> Call {
    Call::new("/virtualmachineinstances-validate-create", "virtualmachineinstances", "CREATE", object)
}

fn update(object: Value, old: Value) -> Call {
    Call::new("/virtualmachineinstances-validate-update", "virtualmachineinstances", "UPDATE", object).was(old)
}

fn validate_vm(object: Value) -> Call {
    Call::new("/virtualmachines-validate", "virtualmachines", "CREATE", object)
}

#[test]
fn machine_is_completed_and_then_accepted() {
    let object = create(machine()).patched();
    assert_eq!(object["metadata"]["finalizers"], json!(["kubevirt.io/foregroundDeleteVirtualMachine"]));
    assert_eq!(object["metadata"]["annotations"]["kubevirt.io/pci-topology-version"], "v3");
    assert_eq!(object["metadata"]["labels"], json!({"app": "web"}));
    assert_eq!(object["status"]["phase"], "Pending");
    assert_eq!(object["status"]["runtimeUser"], 107);
    assert_eq!(object["status"]["phaseTransitionTimestamps"][0]["phase"], "Pending");
    assert_eq!(object["status"]["memory"]["guestAtBoot"], "128Mi");
    assert_eq!(object["status"]["currentCPUTopology"], json!({"sockets": 1, "cores": 1, "threads": 1}));
    assert_eq!(object["spec"]["networks"], json!([{"name": "default", "pod": {}}]));
    assert_eq!(
        object["spec"]["domain"]["devices"]["disks"],
        json!([{"name": "root", "disk": {"bus": "virtio", "readonly": false}}]),
        "what the user wrote stays as it was written"
    );
    validate(object.clone()).allowed();
    assert_eq!(create(object.clone()).by(CONTROLLER).patched(), object, "a second pass changes nothing");
}

#[test]
fn status_sent_by_a_user_on_creation_is_dropped() {
    let mut object = machine();
    object["status"] = json!({"phase": "Running", "nodeName": "n1", "runtimeUser": 0});
    let object = create(object).patched();
    assert_eq!(object["status"]["phase"], "Pending");
    assert_eq!(object["status"].get("nodeName"), None);
    assert_eq!(object["status"]["runtimeUser"], 107);
}

#[test]
fn status_changed_by_a_user_is_put_back() {
    let mut old = machine();
    old["status"] = json!({"phase": "Running", "nodeName": "n1"});
    let mut object = old.clone();
    object["status"]["nodeName"] = json!("n2");
    object["metadata"]["labels"]["app"] = json!("db");
    let call = |object: &Value| {
        Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "UPDATE", object.clone())
            .was(old.clone())
    };
    let kept = call(&object).patched();
    assert_eq!(kept["status"], old["status"]);
    assert_eq!(kept["metadata"]["labels"]["app"], "db");
    assert_eq!(call(&object).by(CONTROLLER).patched(), object);
    let mut without = old.clone();
    without.as_object_mut().unwrap().remove("status");
    assert_eq!(call(&without).patched(), old);
}

#[test]
fn spec_of_a_machine_is_changed_by_components_only() {
    let old = machine();
    let mut object = old.clone();
    object["spec"]["terminationGracePeriodSeconds"] = json!(1);
    update(object.clone(), old.clone()).refused("update of VMI object is restricted");
    update(object, old.clone()).by(CONTROLLER).allowed();
    let mut same = old.clone();
    same["spec"]["domain"]["memory"]["guest"] = json!("131072Ki");
    update(same, old.clone()).allowed();
    let mut old = old;
    old["status"] = json!({"volumeStatus": [{"name": "root", "target": "vda"}]});
    let mut other = old.clone();
    other["spec"]["volumes"][0]["containerDisk"]["image"] = json!("c:d");
    update(other, old).by(CONTROLLER).refused("permanent volume root, changed");
}

#[test]
fn reserved_labels_are_set_by_components_only() {
    let old = machine();
    let mut object = old.clone();
    object["metadata"]["labels"]["kubevirt.io/nodeName"] = json!("n1");
    update(object.clone(), old.clone()).refused("reserved kubevirt.io/ labels on a VMI object is prohibited");
    update(object.clone(), old).by(CONTROLLER).allowed();
    validate(create(object).patched()).refused("reserved kubevirt.io/ labels");
}

#[test]
fn agents_write_the_machines_of_their_node() {
    let mut old = machine();
    old["status"] = json!({"phase": "Running", "nodeName": "n1"});
    let mut object = old.clone();
    object["status"]["phase"] = json!("Succeeded");
    let call = |node| Call { node, ..update(object.clone(), old.clone()).by(HANDLER) };
    call(Some("n1")).allowed();
    call(Some("n2")).refused("virt-handler is only allowed to modify VMIs it owns");
    call(None).refused("virt-handler service account is missing node name");
    let mut moved = old.clone();
    moved["status"]["migrationState"] = json!({"targetNode": "n2"});
    Call { node: Some("n1"), ..update(moved, old).by(HANDLER) }.refused("not allowed to set target node");
}

#[test]
fn vm_gets_identity_once_and_stays_sparse() {
    let call = |operation, object| Call::new("/virtualmachines-mutate", "virtualmachines", operation, object);
    let object = call("CREATE", vm()).patched();
    let spec = &object["spec"]["template"]["spec"];
    assert!(spec["domain"]["firmware"]["uuid"].is_string());
    assert_ne!(spec["domain"]["firmware"]["uuid"], spec["domain"]["firmware"]["serial"]);
    assert_eq!(spec["architecture"], "amd64");
    assert_eq!(spec["domain"]["machine"]["type"], "q35");
    assert_eq!(spec.get("networks"), None);
    assert_eq!(object["spec"]["template"]["metadata"]["annotations"]["kubevirt.io/pci-topology-version"], "v3");
    assert_eq!(call("CREATE", object.clone()).patched(), object, "a second pass changes nothing");
    let response = call("UPDATE", object.clone()).was(object).allowed();
    assert_eq!(response.get("patch"), None);
}

#[test]
fn vm_runs_by_one_of_running_and_run_strategy() {
    validate_vm(vm()).allowed();
    for strategy in ["Halted", "Manual", "RerunOnFailure", "Once"] {
        let mut object = vm();
        object["spec"]["runStrategy"] = json!(strategy);
        validate_vm(object).allowed();
    }
    let mut object = vm();
    object["spec"]["running"] = json!(true);
    validate_vm(object.clone()).refused("Running and RunStrategy are mutually exclusive");
    object["spec"].as_object_mut().unwrap().remove("runStrategy");
    let response = validate_vm(object.clone()).allowed();
    assert_eq!(response["warnings"], json!(["spec.running is deprecated, please use spec.runStrategy instead."]));
    object["spec"].as_object_mut().unwrap().remove("running");
    validate_vm(object.clone()).refused("RunStrategy must be specified");
    object["spec"]["runStrategy"] = json!("Sometimes");
    validate_vm(object.clone()).refused("Invalid RunStrategy (Sometimes)");
    object["spec"]["runStrategy"] = json!("WaitAsReceiver");
    validate_vm(object).refused("DecentralizedLiveMigration feature gate is not enabled");
}

#[test]
fn vm_template_is_checked_like_a_machine() {
    let mut object = vm();
    object["spec"]["template"]["spec"]["domain"]["devices"]["disks"][0]["name"] = json!("other");
    validate_vm(object).refused("spec.template.spec.domain.devices.disks[0].Name 'other' not found.");
    let mut object = vm();
    object["spec"]["template"]["spec"]["domain"]["launchSecurity"] = json!({"sev": {}});
    // A rule that is broken is told alone; what is not carried out is told of what breaks none.
    let response = validate_vm(object.clone()).send();
    assert_eq!(response["status"]["message"], "SEV requires OVMF (UEFI)");
    object["spec"]["template"]["spec"]["domain"]["firmware"] = json!({"bootloader": {"efi": {"secureBoot": false}}});
    validate_vm(object).refused("spec.template.spec.domain.launchSecurity is not supported yet: encrypted guests");
    let mut object = vm();
    object["spec"]["template"] = json!({});
    validate_vm(object).refused("missing virtual machine template.");
    let mut object = vm();
    object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    object["spec"]["runStrategy"] = json!("Sometimes");
    validate_vm(object).allowed();
}

#[test]
fn configuration_that_was_let_in_before_holds_up_no_other_change() {
    let object = |label: &str, spec: Value| {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "default", "labels": {"app": label}}, "spec": spec,
        })
    };
    let update = |spec: Value, old: Value| {
        Call::new("/kubevirt-validate-update", "kubevirts", "UPDATE", object("new", spec)).was(object("old", old))
    };
    let merging = json!({"configuration": {"ksmConfiguration": {}}});
    update(merging.clone(), merging.clone()).allowed();
    update(merging, json!({})).refused("spec.configuration.ksmConfiguration is not supported yet");
    let short = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h"}}}});
    update(short.clone(), short.clone()).allowed();
    update(short, json!({})).refused("Certificate duration cannot exceed CA");
}

#[test]
fn snapshot_in_progress_holds_a_vm() {
    let mut old = vm();
    old["status"] = json!({"snapshotInProgress": "s1"});
    let mut object = old.clone();
    object["spec"]["runStrategy"] = json!("Halted");
    let call = Call::new("/virtualmachines-validate", "virtualmachines", "UPDATE", object).was(old);
    call.refused("Cannot update vm running state until snapshot \"s1\" completes");
}

#[test]
fn status_writes_of_vms_ask_for_no_hot_plug() {
    let call = |status: Value| {
        let mut object = vm();
        object["status"] = status;
        Call::new("/status-validate", "virtualmachines", "UPDATE", object).was(vm())
    };
    call(json!({"ready": true})).allowed();
    call(json!({"volumeRequests": [{}]})).refused("require one of either addVolumeOptions or removeVolumeOptions");
    let removal = json!({"volumeRequests": [{"removeVolumeOptions": {"name": "a"}}]});
    call(removal.clone()).refused("not supported yet: hot-plug");
    // One from before holds up nothing.
    let mut old = vm();
    old["status"] = removal.clone();
    call(removal).was(old).allowed();
}

#[test]
fn replica_set_selects_its_own_machines() {
    let call =
        |object| Call::new("/virtualmachinereplicaset-validate", "virtualmachineinstancereplicasets", "CREATE", object);
    let mut object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": "r"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": machine()["spec"]},
        },
    });
    call(object.clone()).allowed();
    object["spec"]["template"]["metadata"]["labels"]["app"] = json!("db");
    call(object.clone()).refused("selector does not match labels.");
    object["spec"]["template"] = json!({});
    call(object).refused("missing virtual machine template.");
}

fn preset(name: &str, domain: Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstancePreset",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}, "domain": domain},
    })
}

#[test]
fn new_machine_gets_what_presets_hold() {
    let cpu = |cores: u32| json!({"devices": {}, "cpu": {"cores": cores}});
    let call = || create(machine()).beside("virtualmachineinstancepresets", preset("small", cpu(2)));
    let object = call().patched();
    assert_eq!(object["spec"]["domain"]["cpu"]["cores"], 2);
    assert_eq!(object["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/small"], "kubevirt.io/v1");
    let warning = "kubevirt.io/v1 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
    assert_eq!(call().allowed()["warnings"], json!([warning]));

    let response = call().beside("virtualmachineinstancepresets", preset("large", cpu(8))).send();
    assert_eq!(response["status"]["code"], 422);
    assert_eq!(response["status"].get("reason"), None);
    let message = response["status"]["message"].as_str().unwrap();
    let start =
        "VirtualMachinePresets cannot be applied due to conflicts: presets 'small' and 'large' conflict: spec.cpu: ";
    assert!(message.starts_with(start), "{message}");

    let mut plain = machine();
    plain["metadata"]["annotations"] = json!({"virtualmachineinstancepresets.admission.kubevirt.io/exclude": "true"});
    let object = create(plain).beside("virtualmachineinstancepresets", preset("small", cpu(2))).patched();
    assert_eq!(object["spec"]["domain"]["cpu"]["cores"], 1);
}

#[test]
fn preset_is_checked_as_far_as_machines_get_it() {
    let call = |object| Call::new("/vmipreset-validate", "virtualmachineinstancepresets", "CREATE", object);
    call(preset("p", json!({"devices": {"tpm": {}}, "cpu": {"cores": 2}}))).allowed();
    call(preset("p", json!({"devices": {}, "cpu": {"dedicatedCpuPlacement": true}})))
        .refused("spec.domain.cpu.dedicatedCpuPlacement is not supported yet");
}

#[test]
fn new_migration_is_labelled_with_its_machine() {
    let mut object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "m", "namespace": "default"},
        "spec": {"vmiName": "web"},
    });
    for _ in 0..2 {
        let call = Call::new("/migration-mutate-create", "virtualmachineinstancemigrations", "CREATE", object.clone());
        object = call.patched();
        assert_eq!(
            object["metadata"],
            json!({
                "name": "m",
                "namespace": "default",
                "labels": {"kubevirt.io/vmi-name": "web"},
                "finalizers": ["kubevirt.io/migrationJobFinalize"],
            })
        );
    }
}

#[test]
fn kinds_that_nothing_works_on_are_refused_once_they_are_sound() {
    let mut running = machine();
    running["status"] = json!({"phase": "Running"});
    let migration = json!({"metadata": {"name": "m"}, "spec": {"vmiName": "m"}});
    Call::new("/migration-validate-create", "virtualmachineinstancemigrations", "CREATE", migration)
        .beside("virtualmachineinstances", running)
        .refused("VirtualMachineInstanceMigration is not supported yet: live migration");

    let policy = json!({"metadata": {"name": "p"}, "spec": {"selectors": {}}});
    let call = Call::new("/migration-policy-validate-create", "migrationpolicies", "CREATE", policy.clone());
    Call { group: "migrations.kubevirt.io", ..call }.refused("MigrationPolicy is not supported yet: live migration");
    let call =
        Call::new("/migration-policy-validate-create", "migrationpolicies", "UPDATE", policy.clone()).was(policy);
    Call { group: "migrations.kubevirt.io", ..call }.allowed();

    let pool = json!({
        "metadata": {"name": "p"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "virtualMachineTemplate": {"metadata": {"labels": {"app": "web"}}, "spec": vm()["spec"]},
        },
    });
    let call = Call::new("/virtualmachinepool-validate", "virtualmachinepools", "CREATE", pool);
    Call { group: "pool.kubevirt.io", ..call }.refused("VirtualMachinePool is not supported yet");
}

#[test]
fn objects_of_the_wrong_shape_are_named() {
    let mut object = machine();
    object["spec"]["domain"].as_object_mut().unwrap().remove("devices");
    create(object.clone()).refused("spec.domain.devices in body is required");
    validate(object).refused("spec.domain.devices in body is required");
    create(json!("text")).refused("the request carries no object");
    create(Value::Null).refused("the request carries no object");
    let was = json!({"status": {"phase": "Running"}});
    for object in [json!("text"), Value::Null] {
        let call = Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "UPDATE", object);
        call.was(was.clone()).refused("the request carries no object");
    }
}

#[test]
fn amount_that_is_none_is_refused_where_it_stands() {
    let mut object = machine();
    object["spec"]["domain"]["memory"] = json!({"guest": "much"});
    let object = create(object).patched();
    assert_eq!(object["status"].get("memory"), None, "the schema would complain about each copy");
    let response = validate(object).send();
    let causes = response["status"]["details"]["causes"].as_array().unwrap();
    let fields: Vec<_> = causes.iter().map(|cause| cause["field"].clone()).collect();
    assert_eq!(fields, ["spec.domain.memory.guest"]);
}

#[test]
fn causes_come_in_the_order_of_the_rules() {
    let mut object = create(machine()).patched();
    object["spec"]["hostname"] = json!("Web");
    object["spec"]["domain"]["memory"]["guest"] = json!("128");
    object["spec"]["domain"]["devices"]["interfaces"] = json!([
        {"name": "default", "masquerade": {}, "state": "sideways"},
        {"name": "b", "state": "sideways"},
    ]);
    object["spec"]["accessCredentials"] = json!([{"sshPublicKey": {
        "source": {}, "propagationMethod": {"configDrive": {}, "noCloud": {}},
    }}]);
    let response = validate(object).send();
    let causes = response["status"]["details"]["causes"].as_array().unwrap();
    let fields: Vec<_> = causes.iter().map(|cause| cause["field"].as_str().unwrap()).collect();
    let key = "spec.accessCredentials[0].sshPublicKey";
    assert_eq!(
        fields,
        [
            "spec.hostname",
            "spec.domain.memory.guest",
            "spec.domain.devices.interfaces[0].state",
            "spec.domain.devices.interfaces[1].state",
            "spec.domain.devices.interfaces[1]",
            "spec.domain.devices.interfaces[1].name",
            &format!("{key}.propagationMethod"),
            &format!("{key}.propagationMethod"),
            &format!("{key}.source"),
            &format!("{key}.propagationMethod"),
        ]
    );
}

#[test]
fn other_resources_and_paths_are_refused() {
    Call::new("/virtualmachines-mutate", "pods", "CREATE", vm()).refused("expect resource to be 'virtualmachines'");
    Call::new("/nowhere", "virtualmachines", "CREATE", vm()).refused("there is no webhook at /nowhere");
}

#[test]
fn any_body_gets_a_review() {
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let odd = json!({"request": {
        "uid": "u",
        "operation": "CREATE",
        "object": {"spec": []},
        "resource": {"group": "kubevirt.io", "resource": "virtualmachines"},
    }})
    .to_string();
    for path in WEBHOOKS.iter().map(|webhook| webhook.path) {
        for body in ["", "null", "0", "\"\"", "{}", "{\"request\":{}}", "{\"request\":{\"uid\":1}}", "\u{0}", &deep] {
            let review = respond(path, body.as_bytes());
            assert!(!review.response.allowed, "{path} {body}");
            assert_eq!(review.response.status.unwrap().code, 400, "{path} {body}");
        }
        // What matters here is that there is an answer at all.
        let review = respond(path, odd.as_bytes());
        assert_eq!(review.response.uid, "u");
    }
}
