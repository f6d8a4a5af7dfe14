//! Tests of the common instance types and preferences.

use api::instancetype::{MatchedKind, VirtualMachineClusterInstancetype, VirtualMachineClusterPreference};

use super::*;

fn small() -> VirtualMachineClusterInstancetype {
    common::instancetypes().into_iter().find(|object| object.name_any() == "u1.small").unwrap()
}

/// Returns the decision while all other objects exist as they are in this release.
fn decided(is_on: bool, small: Option<VirtualMachineClusterInstancetype>) -> Vec<Effect> {
    let mut instancetypes = common::instancetypes();
    instancetypes.retain(|object| object.name_any() != "u1.small");
    instancetypes.extend(small);
    let cached = |object| Arc::new(CachedInstancetype::new(MatchedKind::ClusterInstancetype, object));
    let preference = |object: VirtualMachineClusterPreference| {
        Arc::new(CachedInstancetype::new(MatchedKind::ClusterPreference, object))
    };
    let observed = Observed {
        is_on,
        instancetypes: instancetypes.into_iter().map(cached).collect(),
        preferences: common::preferences().into_iter().map(preference).collect(),
    };
    let decision = decide(&observed).unwrap();
    assert_eq!(decision.wake_after.is_some(), !decision.effects.is_empty());
    decision.effects
}

/// Returns an object as a former release wrote it.
fn former() -> VirtualMachineClusterInstancetype {
    let mut object = small();
    object.spec.0.memory.overcommit_percent = 10;
    let labels = object.metadata.labels.as_mut().unwrap();
    labels.insert("instancetype.kubevirt.io/former".to_owned(), "true".to_owned());
    labels.insert("example.com/team".to_owned(), "a".to_owned());
    let digest = digest(&object.metadata, &serde_json::to_value(&object.spec).unwrap());
    object.metadata.annotations.as_mut().unwrap().insert(WRITTEN.to_owned(), digest);
    object
}

fn edited(mut object: VirtualMachineClusterInstancetype) -> VirtualMachineClusterInstancetype {
    object.spec.0.cpu.guest = 3;
    object
}

#[test]
fn missing_objects_are_created_and_current_ones_stay() {
    assert_eq!(decided(true, Some(small())), []);
    let effects = decided(true, None);
    let [Effect::Create { kind: Kind::ClusterInstancetype, namespace: None, object, options }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((&object["metadata"]["name"], &object["spec"]["memory"]["guest"]), (&json!("u1.small"), &json!("2Gi")));
    assert!(options.independent && options.existing_will_do);
}

#[test]
fn objects_of_another_release_are_replaced_unless_a_user_edited_them() {
    let effects = decided(true, Some(former()));
    let [Effect::Patch { name, patch, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(name, "u1.small");
    assert_eq!(patch["spec"], json!({"memory": {"overcommitPercent": null}}));
    let labels = &patch["metadata"]["labels"];
    assert_eq!(labels["instancetype.kubevirt.io/former"], Value::Null);
    assert!(labels.as_object().unwrap().contains_key("instancetype.kubevirt.io/former"));
    assert_eq!(labels.get("example.com/team"), None);
    assert_eq!(patch["metadata"]["annotations"][WRITTEN], small().annotations()[WRITTEN]);
    assert_eq!(decided(true, Some(edited(former()))), []);
    assert_eq!(decided(true, Some(edited(small()))), []);
    let mut relabelled = former();
    relabelled.metadata.labels.as_mut().unwrap().remove("instancetype.kubevirt.io/vendor");
    assert_eq!(decided(true, Some(relabelled)), []);
    let mut foreign = former();
    foreign.metadata.annotations = None;
    assert_eq!(decided(true, Some(foreign.clone())), []);
    // Those of others stay when the common ones go.
    let remains = |object| !decided(false, Some(object)).iter().any(is_small);
    assert!(remains(foreign) && !remains(small()) && !remains(former()) && !remains(edited(small())));
}

fn is_small(effect: &Effect) -> bool {
    matches!(effect, Effect::Delete { name, .. } if name == "u1.small")
}

#[test]
fn all_objects_go_when_they_are_switched_off() {
    let effects = decided(false, Some(small()));
    assert_eq!(effects.len(), 65 + 54);
    assert!(effects.iter().all(|effect| matches!(effect, Effect::Delete { .. })));
    assert!(!decided(false, None).iter().any(is_small));
}

#[test]
fn configuration_counts_once_the_installation_is_complete_until_it_is_deleted() {
    // phase, enabled, deleted
    for (phase, enabled, deleted, expected) in [
        (Some("Deployed"), None, false, Some(true)),
        (Some("Deployed"), Some(true), false, Some(true)),
        (Some("Deployed"), Some(false), false, Some(false)),
        (Some("Deploying"), None, false, None),
        (None, Some(false), false, None),
        (Some("Deployed"), Some(false), true, None),
    ] {
        let deletion = deleted.then_some("2030-01-01T00:00:00Z");
        let kubevirt = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt", "deletionTimestamp": deletion},
            "spec": {"configuration": {"commonInstancetypesDeployment": {"enabled": enabled}}}, "status": {"phase": phase},
        }))
        .unwrap();
        assert_eq!(is_on(&kubevirt), expected, "{phase:?} {enabled:?} {deleted}");
    }
}

/// The policies of the chart allow these writes only for objects with the annotation.
#[test]
fn chart_limits_writes_to_objects_with_the_annotation() {
    let policies =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt/policies/controller.yaml"));
    assert_eq!(policies.unwrap().matches(&format!("\"{WRITTEN}\" in ")).count(), 3);
}
