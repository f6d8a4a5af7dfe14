//! Instance types and preferences.

use std::sync::Arc;

use api::{config::ReferencePolicy, instancetype::MatchedKind, vm::status::ControllerRevisionRef};

use super::*;
use crate::resources::{instancetype_revisions::InstancetypeRevision, instancetypes::CachedInstancetype};

const COPY: &str = "v-u1.small-v1beta1-u-1-4";

fn class() -> Arc<CachedInstancetype> {
    let object: api::instancetype::VirtualMachineClusterInstancetype = serde_json::from_value(json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "u1.small", "uid": "u-1", "generation": 4},
        "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}, "annotations": {"from": "class"}},
    }))
    .unwrap();
    Arc::new(CachedInstancetype::new(MatchedKind::ClusterInstancetype, object))
}

fn preference() -> Arc<CachedInstancetype> {
    let object: api::instancetype::VirtualMachinePreference = serde_json::from_value(json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachinePreference",
        "metadata": {"name": "linux", "namespace": "d", "uid": "u-2", "generation": 1},
        "spec": {
            "cpu": {"preferredCPUTopology": "cores"},
            "devices": {
                "preferredDiskBus": "virtio", "preferredInterfaceModel": "e1000",
                "preferredAutoattachInputDevice": true, "preferredInputBus": "virtio",
            },
        },
    }))
    .unwrap();
    Arc::new(CachedInstancetype::new(MatchedKind::Preference, object))
}

fn copy_of(object: &CachedInstancetype) -> Arc<InstancetypeRevision> {
    Arc::new(InstancetypeRevision {
        metadata: serde_json::from_value(json!({
            "name": COPY, "namespace": "d", "uid": "copy-uid",
            "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid",
                "controller": true,
            }],
        }))
        .unwrap(),
        object: object.object.clone(),
        former: None,
    })
}

fn copy() -> Arc<InstancetypeRevision> {
    copy_of(&class())
}

/// The preference, of which there is a copy.
fn kept_preference() -> Lookup {
    Lookup::Object(preference(), Some(copy_of(&preference())))
}

fn naming(strategy: &str, status: &Value) -> VirtualMachine {
    vm(
        &json!({
            "runStrategy": strategy,
            "instancetype": {"name": "u1.small"},
            "preference": {"name": "linux", "kind": "VirtualMachinePreference"},
        }),
        status,
    )
}

fn kept() -> Value {
    json!({
        "instancetypeRef": {"name": "u1.small", "controllerRevisionRef": {"name": COPY}},
        "preferenceRef": {
            "name": "linux", "kind": "VirtualMachinePreference",
            "controllerRevisionRef": {"name": "v-linux-v1beta1-u-2-1"},
        },
    })
}

/// Returns the VMI of a VM with the record of its start.
fn running(vm: &VirtualMachine) -> (VirtualMachineInstance, Vec<Arc<StartRevision>>) {
    let decision = found(vm, None, ReferencePolicy::Reference, true);
    let vmi = only(made(&decision, Kind::Instance));
    let mut vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
    vmi.metadata.uid = Some("vmi-uid".to_owned());
    vmi.status.as_mut().unwrap().phase = Some(VmiPhase::Running);
    (vmi, records(&decision))
}

fn found(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    policy: ReferencePolicy,
    copies: bool,
) -> Decision {
    found_with(vm, instance, &[], policy, copies)
}

fn found_with(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    starts: &[Arc<StartRevision>],
    policy: ReferencePolicy,
    copies: bool,
) -> Decision {
    let config = ClusterConfig { reference_policy: policy, ..ClusterConfig::default() };
    let instancetype = if copies { Lookup::Revision(copy()) } else { Lookup::Object(class(), None) };
    let preference = kept_preference();
    decide(&Observed { instancetype, preference, starts: starts.to_vec(), ..observed(vm, instance, None, &config) })
        .unwrap()
}

fn made(decision: &Decision, wanted: Kind) -> Vec<Value> {
    let objects = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Create { kind, object, .. } if *kind == wanted => Some(object.clone()),
        _ => None,
    });
    objects.collect()
}

fn only(mut made: Vec<Value>) -> Value {
    assert_eq!(made.len(), 1, "{made:?}");
    made.remove(0)
}

#[test]
fn copy_is_created_before_the_vmi() {
    let vm = naming("Always", &Value::Null);
    let decision = found(&vm, None, ReferencePolicy::Reference, false);
    let mut revisions = made(&decision, Kind::ControllerRevision);
    let start = revisions.pop().unwrap();
    assert_eq!(start["metadata"]["name"], "revision-start-vm-vm-uid-2");
    assert_eq!(start["data"]["spec"]["instancetype"]["revisionName"], COPY);
    assert_eq!(start["data"]["spec"]["preference"]["revisionName"], "v-linux-v1beta1-u-2-1");
    let revision = only(revisions);
    assert_eq!(revision["metadata"]["name"], COPY);
    assert_eq!(revision["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
    let labels = &revision["metadata"]["labels"];
    assert_eq!(labels["instancetype.kubevirt.io/object-kind"], "VirtualMachineClusterInstancetype");
    assert_eq!(labels["instancetype.kubevirt.io/object-generation"], "4");
    assert_eq!(revision["data"]["spec"]["cpu"]["guest"], 2);
    assert_eq!(revision["data"]["kind"], "VirtualMachineClusterInstancetype");
    // The status names the copies with the next write, that of the new VMI.
    assert_eq!(status_patch(&decision), Value::Null);
    let vmi: VirtualMachineInstance = serde_json::from_value(only(made(&decision, Kind::Instance))).unwrap();
    let (instancetype, preference) = (Lookup::Object(class(), Some(copy())), kept_preference());
    let config = ClusterConfig::default();
    let next = decide(&Observed { instancetype, preference, ..observed(&vm, Some(&vmi), None, &config) }).unwrap();
    let status = status_patch(&next);
    assert_eq!((&status["created"], &status["printableStatus"]), (&json!(true), &json!("Starting")));
    for (name, reference) in kept().as_object().unwrap() {
        assert_eq!(status[name], *reference);
    }
    let position = |wanted: &dyn Fn(&Effect) -> bool| decision.effects.iter().position(wanted).unwrap();
    let of = |kind: Kind| move |effect: &Effect| matches!(effect, Effect::Create { kind: made, .. } if *made == kind);
    assert!(position(&of(Kind::ControllerRevision)) < position(&of(Kind::Instance)));
}

#[test]
fn copy_whose_name_is_taken_prevents_the_start() {
    let vm = naming("Always", &Value::Null);
    let config = ClusterConfig::default();
    let decided = |instancetype: Lookup| {
        let preference = kept_preference();
        decide(&Observed { instancetype, preference, ..observed(&vm, None, None, &config) }).unwrap()
    };
    let text = format!("found existing ControllerRevision with unexpected data: {COPY}");
    // An object in the cache has another content.
    let decision = decided(Lookup::Object(class(), Some(copy_of(&preference()))));
    assert!(made(&decision, Kind::ControllerRevision).is_empty());
    assert!(!creates(&decision));
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(60)));
    let status = status_patch(&decision);
    assert!(status.get("instancetypeRef").is_none(), "{status}");
    let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
    assert_eq!((&failure["reason"], &failure["message"]), (&json!("FailedCreate"), &json!(text)));
    let shown = "error encountered while storing instancetype.kubevirt.io controllerRevisions: ";
    let is_reported =
        |effect: &Effect| matches!(effect, Effect::Event(note) if note.message == format!("{shown}{text}"));
    assert!(decision.effects.iter().any(is_reported));
    // An object that is not in the cache shows when the copy is created.
    let decision = decided(Lookup::Object(class(), None));
    let Some(Effect::Create { kind: Kind::ControllerRevision, options, .. }) = decision.effects.first() else {
        panic!("{decision:?}")
    };
    assert_eq!(options.existing_refuses.as_ref(), Some(&text));
}

#[test]
fn copy_of_a_former_vm_is_replaced() {
    let (vm, config) = (naming("Halted", &Value::Null), ClusterConfig::default());
    // One with another content goes as well.
    for content in [class(), preference()] {
        let mut left = InstancetypeRevision::clone(&copy_of(&content));
        left.metadata.owner_references.as_mut().unwrap()[0].uid = "former".to_owned();
        let (instancetype, preference) = (Lookup::Object(class(), Some(Arc::new(left))), kept_preference());
        let decision = decide(&Observed { instancetype, preference, ..observed(&vm, None, None, &config) }).unwrap();
        let [
            Effect::Delete { kind: Kind::ControllerRevision, name, uid, .. },
            Effect::Create { kind: Kind::ControllerRevision, object, options, .. },
            Effect::Patch { kind: Kind::VirtualMachine, patch, .. },
            ..,
        ] = &decision.effects[..]
        else {
            panic!("{decision:?}")
        };
        assert_eq!((name.as_str(), uid.as_deref()), (COPY, Some("copy-uid")));
        assert_eq!(object["metadata"]["name"], COPY);
        assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
        // A conflict is no refusal: the former one may still be there.
        assert_eq!((options.existing_will_do, &options.existing_refuses), (false, &None));
        assert_eq!(patch["status"]["instancetypeRef"]["controllerRevisionRef"]["name"], COPY);
    }
}

#[test]
fn missing_copy_is_made_again_from_the_same_object() {
    let (mut vm, config) = (naming("Always", &kept()), ClusterConfig::default());
    let role = api::instancetype::matcher::Role::Instancetype;
    let found = |vm: &VirtualMachine| lookup::look_up(vm, role, |_| None, |_, name| (name == "u1.small").then(class));
    let (instancetype, preference) = (found(&vm), kept_preference());
    let decision = decide(&Observed { instancetype, preference, ..observed(&vm, None, None, &config) }).unwrap();
    assert_eq!(made(&decision, Kind::ControllerRevision)[0]["metadata"]["name"], COPY);
    assert!(creates(&decision));
    // Neither one that the spec names, nor one of another generation.
    let mut named = vm.clone();
    named.spec.instancetype.as_mut().unwrap().revision_name = Some(COPY.to_owned());
    vm.status.as_mut().unwrap().instancetype_ref.as_mut().unwrap().controller_revision_ref =
        Some(ControllerRevisionRef { name: Some("v-u1.small-v1beta1-u-1-3".to_owned()) });
    assert!([named, vm].iter().all(|vm| matches!(found(vm), Lookup::Missing(_))));
}

#[test]
fn copy_in_a_former_version_is_replaced() {
    const RENEWED: &str = "v-u1.small-v1beta1-u-0-2";
    let former = |name: &str, owner: &str| {
        let copy: ControllerRevision = serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": "d", "uid": "copy-uid",
                "labels": {
                    "instancetype.kubevirt.io/object-kind": "VirtualMachineClusterInstancetype",
                    "instancetype.kubevirt.io/object-name": "u1.small",
                    "instancetype.kubevirt.io/object-uid": "u-0", "instancetype.kubevirt.io/object-generation": "2",
                    "instancetype.kubevirt.io/object-version": "v1alpha2",
                },
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": owner, "controller": true,
                }],
            },
            "data": {
                "apiVersion": "instancetype.kubevirt.io/v1alpha2", "kind": "VirtualMachineClusterInstancetype",
                "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}},
            },
            "revision": 1,
        }))
        .unwrap();
        Lookup::Revision(Arc::new(InstancetypeRevision::from(copy)))
    };
    let decided = |vm: &VirtualMachine, name: &str, owner: &str| {
        let (instancetype, preference) = (former(name, owner), kept_preference());
        let config = ClusterConfig::default();
        decide(&Observed { instancetype, preference, ..observed(vm, None, None, &config) }).unwrap()
    };
    let vm = naming("Halted", &kept());
    let decision = decided(&vm, COPY, "vm-uid");
    let [
        Effect::Create { kind: Kind::ControllerRevision, object, .. },
        Effect::Patch { kind: Kind::VirtualMachine, patch, .. },
        Effect::Delete { kind: Kind::ControllerRevision, name, .. },
        ..,
    ] = &decision.effects[..]
    else {
        panic!("{decision:?}")
    };
    assert_eq!((&object["metadata"]["name"], name.as_str()), (&json!(RENEWED), COPY));
    assert_eq!(object["metadata"]["labels"]["instancetype.kubevirt.io/object-version"], "v1beta1");
    assert_eq!(object["data"]["apiVersion"], "instancetype.kubevirt.io/v1beta1");
    assert_eq!(object["data"]["spec"], json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}}));
    assert_eq!(patch["status"]["instancetypeRef"]["controllerRevisionRef"]["name"], RENEWED);
    // Copies of others, one that the spec names, and one that has the name of its successor stay as they are.
    let mut named = vm.clone();
    named.spec.instancetype.as_mut().unwrap().revision_name = Some(COPY.to_owned());
    let mut present = vm.clone();
    present.status.as_mut().unwrap().instancetype_ref.as_mut().unwrap().controller_revision_ref =
        Some(ControllerRevisionRef { name: Some(RENEWED.to_owned()) });
    for decision in [decided(&vm, COPY, "other"), decided(&named, COPY, "vm-uid"), decided(&present, RENEWED, "vm-uid")]
    {
        assert!(made(&decision, Kind::ControllerRevision).is_empty());
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Delete { .. })), "{decision:?}");
    }
}

#[test]
fn vmi_is_created_with_instance_type_and_preference() {
    let decision = found(&naming("Always", &kept()), None, ReferencePolicy::Reference, true);
    // Only what it is started from: there are copies already.
    assert_eq!(only(made(&decision, Kind::ControllerRevision))["metadata"]["name"], "revision-start-vm-vm-uid-2");
    let vmi = only(made(&decision, Kind::Instance));
    let domain = &vmi["spec"]["domain"];
    assert_eq!(domain["cpu"], json!({"sockets": 1, "cores": 2, "threads": 1}));
    assert_eq!(domain["memory"]["guest"], "1Gi");
    assert_eq!(domain["devices"]["disks"], json!([{"name": "cd", "disk": {"bus": "virtio"}}]));
    assert_eq!(domain["devices"]["interfaces"][0]["model"], "e1000");
    assert_eq!(domain["devices"]["inputs"], json!([{"name": "default-0", "bus": "virtio", "type": "tablet"}]));
    let annotations = &vmi["metadata"]["annotations"];
    assert_eq!(annotations["kubevirt.io/cluster-instancetype-name"], "u1.small");
    assert_eq!(annotations["kubevirt.io/preference-name"], "linux");
    assert_eq!(annotations["from"], "class");
}

#[test]
fn halted_vm_gets_its_copies_and_no_vmi() {
    let decision = found(&naming("Halted", &Value::Null), None, ReferencePolicy::Reference, false);
    assert_eq!(made(&decision, Kind::ControllerRevision).len(), 1);
    assert!(!creates(&decision));
}

#[test]
fn missing_instance_type_prevents_the_start_and_is_reported() {
    let vm = naming("Always", &Value::Null);
    let config = ClusterConfig::default();
    let missing = || lookup::look_up(&vm, api::instancetype::matcher::Role::Instancetype, |_| None, |_, _| None);
    let decided = |vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>| {
        decide(&Observed { instancetype: missing(), ..observed(vm, instance, None, &config) }).unwrap()
    };
    let decision = decided(&vm, None);
    assert!(!creates(&decision));
    let status = status_patch(&decision);
    let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
    assert_eq!(failure["reason"], "FailedFindInstancetype");
    // It starts as soon as the instance type exists.
    assert_eq!(status["printableStatus"], "Starting");
    let message = "virtualmachineclusterinstancetypes.instancetype.kubevirt.io \"u1.small\" not found";
    assert_eq!(failure["message"], message);
    let shown = |decision: &Decision| decision.effects.iter().any(|effect| matches!(effect, Effect::Event(_)));
    assert!(shown(&decision));
    let mut again = vm.clone();
    again.status = serde_json::from_value(status).unwrap();
    assert!(!shown(&decided(&again, None)));
    // A VMI that runs can still be stopped, and needs no restart.
    let halted = naming("Halted", &Value::Null);
    let running = instance(&halted, "Running");
    assert!(deletes(&decided(&halted, Some(&running))));
    let status = status_patch(&decided(&vm, Some(&running)));
    assert!(!status["conditions"].to_string().contains("RestartRequired"), "{status}");
}

#[test]
fn conflict_prevents_the_start_and_names_the_fields() {
    let mut vm = naming("Always", &kept());
    let spec = vm.spec.template.spec.as_mut().unwrap();
    spec.domain.memory = serde_json::from_value(json!({"guest": "2Gi"})).unwrap();
    let decision = found(&vm, None, ReferencePolicy::Reference, true);
    assert!(!creates(&decision));
    let status = status_patch(&decision);
    let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
    let cause = "Failed to apply instancetype: VMI conflicts with instancetype spec in fields: \
                 [spec.domain.memory.guest]";
    assert_eq!(failure["message"], format!("Failure while starting VMI: {cause}"));
    let events = |decision: &Decision| {
        let events = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Event(note) => Some((note.reason, note.message.clone())),
            _ => None,
        });
        events.collect::<Vec<_>>()
    };
    assert_eq!(events(&decision), [("FailedCreate", format!("Error creating virtual machine instance: {cause}"))]);
    // Once is enough.
    vm.status.as_mut().unwrap().conditions = serde_json::from_value(status["conditions"].clone()).unwrap();
    assert!(events(&found(&vm, None, ReferencePolicy::Reference, true)).is_empty());
}

#[test]
fn only_another_instance_type_requires_a_restart() {
    let vm = naming("Always", &kept());
    let (vmi, starts) = running(&vm);
    let conditions = |decision: &Decision| {
        let patches = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Patch { subresource: Some("status"), patch, .. } => Some(patch["status"]["conditions"].to_string()),
            _ => None,
        });
        patches.collect::<String>()
    };
    let same = found_with(&vm, Some(&vmi), &starts, ReferencePolicy::Reference, true);
    assert!(!conditions(&same).contains("RestartRequired"));
    let mut other = vm.clone();
    other.spec.instancetype = None;
    let changed = decide(&Observed {
        preference: kept_preference(),
        starts: starts.to_vec(),
        ..observed(&other, Some(&vmi), None, &ClusterConfig::default())
    })
    .unwrap();
    assert!(conditions(&changed).contains("RestartRequired"));
    // The VM does not use the copy any more.
    assert!(changed.effects.iter().any(|effect| {
        matches!(effect, Effect::Patch { patch, .. } if patch["status"].get("instancetypeRef") == Some(&Value::Null))
    }));
}

/// Returns the record of a start with its data changed, as another version would have written it.
fn recorded(vm: &VirtualMachine, change: &Value) -> Vec<Arc<StartRevision>> {
    let mut object = made(&found(vm, None, ReferencePolicy::Reference, true), Kind::ControllerRevision).pop().unwrap();
    json_patch::merge(&mut object["data"], change);
    vec![Arc::new(StartRevision::from(serde_json::from_value::<ControllerRevision>(object).unwrap()))]
}

#[test]
fn another_expansion_of_the_same_template_requires_no_restart() {
    let vm = naming("Always", &kept());
    let (vmi, _) = running(&vm);
    // A former version did not apply a field of the preference.
    let starts = recorded(&vm, &json!({"expandedTemplateSpec": {"domain": {"cpu": null}}}));
    let requires_restart = |vm: &VirtualMachine| {
        let decision = found_with(vm, Some(&vmi), &starts, ReferencePolicy::Reference, true);
        format!("{:?}", decision.effects).contains("RestartRequired")
    };
    assert!(!requires_restart(&vm));
    let mut changed = vm;
    changed.spec.template.spec.as_mut().unwrap().hostname = Some("other".to_owned());
    assert!(requires_restart(&changed));
}

#[test]
fn next_start_replaces_a_record_without_the_expanded_template() {
    let vm = naming("Always", &kept());
    for (change, replaced) in [(json!({}), false), (json!({"expandedTemplateSpec": null}), true)] {
        let starts = recorded(&vm, &change);
        let decision = found_with(&vm, None, &starts, ReferencePolicy::Reference, true);
        let name = "revision-start-vm-vm-uid-2";
        let deletions = decision.effects.iter().filter(
            |effect| matches!(effect, Effect::Delete { kind: Kind::ControllerRevision, name: gone, .. } if gone == name),
        );
        assert_eq!(deletions.count(), usize::from(replaced));
        assert_eq!(records(&decision).len(), usize::from(replaced));
        assert!(creates(&decision));
    }
}

#[test]
fn policy_expand_writes_everything_into_the_vm() {
    let vm = naming("Halted", &Value::Null);
    let decision = found(&vm, None, ReferencePolicy::Expand, false);
    let Some(Effect::Patch { kind: Kind::VirtualMachine, subresource: None, patch, .. }) = decision.effects.first()
    else {
        panic!("{decision:?}")
    };
    assert_eq!(patch["spec"]["instancetype"], Value::Null);
    assert_eq!(patch["spec"]["preference"], Value::Null);
    assert_eq!(patch["spec"]["template"]["spec"]["domain"]["cpu"]["cores"], 2);
    assert!(made(&decision, Kind::ControllerRevision).is_empty());
    // A VM with copies keeps its references.
    let decision = found(&naming("Halted", &kept()), None, ReferencePolicy::Expand, true);
    assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Patch { subresource: None, .. })));
}

#[test]
fn policy_expand_all_deletes_the_copies_and_leaves_the_vmi_current() {
    let vm = naming("Always", &kept());
    let (vmi, starts) = running(&vm);
    let decision = found_with(&vm, Some(&vmi), &starts, ReferencePolicy::ExpandAll, true);
    let deleted =
        |effect: &Effect| matches!(effect, Effect::Delete { kind: Kind::ControllerRevision, name, .. } if name == COPY);
    assert!(decision.effects.iter().any(deleted));
    // The VMI gets a record of the expanded VM, with which it is compared from then on.
    let mut vmi = serde_json::to_value(&vmi).unwrap();
    let mut expanded = serde_json::to_value(&vm).unwrap();
    for effect in &decision.effects {
        match effect {
            Effect::Patch { kind: Kind::VirtualMachine, patch, .. } => json_patch::merge(&mut expanded, patch),
            Effect::Patch { kind: Kind::Instance, patch, .. } => json_patch::merge(&mut vmi, patch),
            _ => {}
        }
    }
    assert_eq!(vmi["status"]["virtualMachineRevisionName"], "revision-start-vm-vm-uid-2-expanded");
    let expanded: VirtualMachine = serde_json::from_value(expanded).unwrap();
    let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
    let records = records(&decision);
    assert_eq!(records.len(), 1);
    let restart = |vm: &VirtualMachine| {
        let config = ClusterConfig::default();
        let decision =
            decide(&Observed { starts: records.to_vec(), ..observed(vm, Some(&vmi), None, &config) }).unwrap();
        status_patch(&decision)["conditions"].to_string().contains("RestartRequired")
    };
    assert!(!restart(&expanded));
    let mut changed = expanded;
    changed.spec.template.spec.as_mut().unwrap().hostname = Some("other".to_owned());
    assert!(restart(&changed));
}
