//! Tests of the claims with the state of VMIs.

use k8s_openapi::api::{core::v1::PersistentVolumeClaim, storage::v1::StorageClass};
use serde_json::{Value, json};

use super::*;
use crate::resources::{recoveries::CachedRecovery, storage_profiles::StorageProfile};

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A VMI that keeps a TPM, of a VM unless `vm` is false.
fn vmi(vm: bool) -> VirtualMachineInstance {
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": "vm", "controller": true,
        "blockOwnerDeletion": true});
    object(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "d", "uid": "vmi", "ownerReferences": if vm { json!([owner]) } else { json!([]) }},
        "spec": {"domain": {"devices": {"tpm": {"persistent": true}}}}, "status": {"phase": "Pending"},
    }))
}

fn migration(change: &Value) -> VirtualMachineInstanceMigration {
    let mut migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "mig", "namespace": "d", "uid": "g"}, "spec": {"vmiName": "m"},
        "status": {"phase": "Failed", "migrationState": {
            "sourcePersistentStatePVCName": "old", "targetPersistentStatePVCName": "new"}},
    });
    json_patch::merge(&mut migration, change);
    object(migration)
}

fn claim(name: &str, change: &Value) -> CachedClaim {
    let mut claim = json!({
        "metadata": {"name": name, "namespace": "d", "uid": name, "creationTimestamp": "2030-01-01T00:00:00Z"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}, "status": {"phase": "Bound"},
    });
    json_patch::merge(&mut claim, change);
    object::<PersistentVolumeClaim>(claim).into()
}

fn labelled(name: &str, owner: &str, created: &str) -> CachedClaim {
    let owners = match owner {
        "" => json!([]),
        uid => {
            json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": uid, "controller": true}])
        }
    };
    claim(
        name,
        &json!({"metadata": {"labels": {"persistent-state-for": "m"}, "ownerReferences": owners,
        "creationTimestamp": format!("2030-01-01T00:{created}:00Z")}}),
    )
}

fn state(claims: Vec<CachedClaim>) -> State {
    let named = |claim: CachedClaim| (claim.metadata.name.clone().unwrap(), Arc::new(claim));
    State { known: claims.into_iter().map(named).collect(), ..State::default() }
}

#[test]
fn newest_claim_of_the_vm_has_its_state() {
    let deleting = CachedClaim {
        metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
            deletion_timestamp: Some(object(json!("2030-01-01T00:09:00Z"))),
            ..labelled("z", "vm", "08").metadata
        },
        ..labelled("z", "vm", "08")
    };
    let legacy = |owner: &str| CachedClaim { state_of: None, ..labelled("persistent-state-for-m", owner, "01") };
    for (claims, expected) in [
        (vec![], None),
        (vec![labelled("a", "vm", "01")], Some("a")),
        // The source of a migration whose deletion failed.
        (vec![labelled("b", "vm", "01"), labelled("a", "vm", "02")], Some("a")),
        (vec![labelled("a", "vm", "01"), deleting], Some("a")),
        // Of a former VM of the name, and made by a user.
        (vec![labelled("a", "gone", "01")], None),
        (vec![labelled("a", "", "01")], Some("a")),
        (vec![labelled("a", "vm", "01"), labelled("b", "", "02")], Some("a")),
        (vec![legacy("vm")], Some("persistent-state-for-m")),
        (vec![legacy("")], None),
        (vec![legacy("vm"), labelled("a", "vm", "00")], Some("a")),
        (vec![CachedClaim { state_of: Some("other".into()), ..labelled("a", "vm", "01") }], None),
    ] {
        let state = state(claims.clone());
        let found = state.present(&vmi(true)).and_then(|claim| claim.metadata.name.clone());
        assert_eq!(found.as_deref(), expected, "{claims:?}");
    }
}

#[test]
fn claim_is_a_file_system_of_the_vm_with_its_label() {
    let choice = |shared| Choice { class: Arc::new(class("fast", &json!({})).into()), shared };
    let claim = |vm: bool, shared| {
        let vmi = vmi(vm);
        serde_json::to_value(Owner::of(&vmi).claim_of_vmi(&vmi, &choice(shared))).unwrap()
    };
    let of_vm = claim(true, false);
    let name = of_vm["metadata"]["name"].as_str().unwrap().to_owned();
    assert!(name.starts_with("persistent-state-for-m-") && name == name_for_vmi(&vmi(true)), "{name}");
    assert_eq!(of_vm["metadata"]["labels"]["persistent-state-for"], "m");
    assert_eq!(of_vm["metadata"]["labels"]["cdi.kubevirt.io/applyStorageProfile"], "true");
    assert_eq!(of_vm["metadata"]["ownerReferences"][0]["uid"], "vm");
    assert_eq!(
        of_vm["spec"],
        json!({
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "storageClassName": "fast",
            "resources": {"requests": {"storage": "10Mi"}},
        })
    );
    let of_vmi = claim(false, true);
    assert_eq!(of_vmi["metadata"]["ownerReferences"][0]["uid"], "vmi");
    assert_eq!(of_vmi["spec"]["accessModes"], json!(["ReadWriteMany"]));
    assert_ne!(of_vmi["metadata"]["name"], of_vm["metadata"]["name"]);
    let mut arm64 = vmi(true);
    arm64.spec.architecture = Some("arm64".to_owned());
    arm64.spec.domain.firmware = object(json!({"bootloader": {"efi": {"persistent": true}}}));
    let of_arm64 = serde_json::to_value(Owner::of(&arm64).claim_of_vmi(&arm64, &choice(false))).unwrap();
    assert_eq!(of_arm64["spec"]["resources"]["requests"]["storage"], "74Mi", "its variables have the size of a flash");

    let (vmi, migration) = (vmi(true), migration(&json!({})));
    let moved = serde_json::to_value(Owner::of(&vmi).claim_of_migration(&vmi, &migration, &choice(false))).unwrap();
    assert_eq!(moved["metadata"]["labels"]["kubevirt.io/migrationName"], "mig");
    assert_eq!(moved["metadata"]["labels"]["persistent-state-for"], Value::Null);
    assert_eq!(moved["metadata"]["ownerReferences"][0]["uid"], "vm");
    assert_ne!(moved["metadata"]["name"], of_vm["metadata"]["name"]);
}

fn class(name: &str, annotations: &Value) -> StorageClass {
    object(json!({"metadata": {"name": name, "annotations": annotations}, "provisioner": "p"}))
}

#[test]
fn class_and_access_mode_are_those_that_the_class_offers() {
    let default = json!({"storageclass.kubernetes.io/is-default-class": "true"});
    let virt = json!({"storageclass.kubevirt.io/is-default-virt-class": "true"});
    let profile = |sets: Value| json!({"metadata": {"name": "fast"}, "status": {"claimPropertySets": sets}});
    let set = |mode: &str, volume: &str| json!({"accessModes": [mode], "volumeMode": volume});
    let shared = claim("c", &json!({"spec": {"accessModes": ["ReadWriteMany"]}}));
    let choice = |configured: Option<&str>,
                  classes: &[StorageClass],
                  profile: Option<Value>,
                  claims: &[CachedClaim]| {
        let caches = Caches::default();
        classes.iter().for_each(|class| caches.storage_classes.observe(class.clone().into()));
        profile.into_iter().for_each(|value| caches.storage_profiles.observe(object::<StorageProfile>(value).into()));
        claims.iter().for_each(|claim| caches.claims.observe(claim.clone()));
        let config =
            ClusterConfig { vm_state_storage_class: configured.map(str::to_owned), ..ClusterConfig::default() };
        choose(&caches, &config).map(|choice| (choice.class.metadata.name.clone().unwrap(), choice.shared))
    };
    let ok = |name: &str, shared| Ok((name.to_owned(), shared));
    let fast = class("fast", &json!({}));
    let named = |profile, claims: &[CachedClaim]| choice(Some("fast"), std::slice::from_ref(&fast), profile, claims);

    assert_eq!(choice(None, &[], None, &[]), Err("no default storage class found".to_owned()));
    assert_eq!(choice(Some("gone"), &[], None, &[]), Err("storage class gone not found".to_owned()));
    assert_eq!(choice(None, &[class("a", &default), class("b", &virt)], None, &[]), ok("b", false));
    assert_eq!(choice(None, &[class("a", &default), fast.clone()], None, &[]), ok("a", false));
    assert_eq!(named(None, &[]), ok("fast", false));
    for (sets, expected) in [
        (json!([set("ReadWriteMany", "Block"), set("ReadWriteOnce", "Filesystem")]), false),
        (json!([set("ReadWriteOnce", "Filesystem"), set("ReadWriteMany", "Filesystem")]), true),
        (json!([set("ReadWriteMany", "Block")]), false),
        (json!([]), false),
    ] {
        assert_eq!(named(Some(profile(sets.clone())), &[]), ok("fast", expected), "{sets}");
    }
    // A bound claim proves what no profile says, and nothing against a profile.
    assert_eq!(named(None, std::slice::from_ref(&shared)), ok("fast", true));
    let says_no = profile(json!([set("ReadWriteOnce", "Filesystem")]));
    assert_eq!(named(Some(says_no), std::slice::from_ref(&shared)), ok("fast", false));
    for unproven in [
        json!({"status": {"phase": "Pending"}}),
        json!({"spec": {"volumeMode": "Block"}}),
        json!({"spec": {"storageClassName": "other"}}),
    ] {
        let mut change = json!({"spec": {"accessModes": ["ReadWriteMany"]}});
        json_patch::merge(&mut change, &unproven);
        assert_eq!(named(None, &[claim("c", &change)]), ok("fast", false), "{unproven}");
    }
}

#[test]
fn claim_is_ready_when_it_is_bound_or_waits_for_its_first_consumer() {
    let fast = class("fast", &json!({}));
    let late = StorageClass { volume_binding_mode: Some("WaitForFirstConsumer".to_owned()), ..fast.clone() };
    let pending = json!({"status": {"phase": "Pending"}});
    for (change, class, expected) in [
        (json!({}), None, None),
        (pending.clone(), Some(&late), None),
        (pending.clone(), Some(&fast), Some(("BackendStorageNotReady", "PVC pending"))),
        (pending, None, Some(("FailedBackendStorageProbe", "storage class fast not found"))),
        (
            json!({"status": {"phase": "Lost"}}),
            Some(&fast),
            Some(("FailedBackendStorageProbe", "backend storage PVC lost")),
        ),
        (
            json!({"status": {"phase": "Pending"}, "spec": {"storageClassName": null}}),
            None,
            Some(("FailedBackendStorageProbe", "no storage class name")),
        ),
    ] {
        let classes = class.map(|class| ("fast".to_owned(), Arc::new(class.clone().into()))).into_iter().collect();
        let state = State { classes, ..State::default() };
        let found = state.obstacle(&claim("c", &change));
        assert_eq!(found, expected.map(|(reason, text)| (reason, text.to_owned())), "{change}");
    }
}

#[test]
fn vm_waits_while_two_claims_may_have_its_state() {
    let moving = |mig: &str| claim("new", &json!({"metadata": {"labels": {"kubevirt.io/migrationName": mig}}}));
    let same = json!({"status": {"migrationState": {"targetPersistentStatePVCName": "old"}}});
    for (migration, claim, expected) in [
        (migration(&json!({})), Some(moving("mig")), Some("mig")),
        (migration(&json!({})), Some(moving("another")), None),
        (migration(&json!({})), None, None),
        // Handed over.
        (migration(&json!({})), Some(labelled("new", "vm", "01")), None),
        (migration(&same), Some(moving("mig")), None),
        (migration(&json!({"spec": {"vmiName": "x"}})), Some(moving("mig")), None),
    ] {
        let caches = Caches::default();
        claim.iter().for_each(|claim| caches.claims.observe(claim.clone()));
        caches.migrations.observe(migration.clone());
        let found = of_vmi(&caches, &ClusterConfig::default(), &vmi(true), &[]).undecided;
        assert_eq!(found.as_deref(), expected, "{migration:?} {claim:?}");
        let own = undecided(&caches, &Key::new("d", "m"), Some(&migration));
        assert_eq!(own, None, "a migration does not wait for itself");
    }
}

#[test]
fn pod_of_a_recovery_reads_the_mark_and_answers_by_its_code() {
    let pod = render_recovery(&migration(&json!({})), "old", Vec::new(), ("launcher:1", "Always"));
    let pod = serde_json::to_value(pod).unwrap();
    let container = &pod["spec"]["containers"][0];
    assert_eq!(
        container["command"],
        json!(["/usr/bin/virt-launcher", "find-migrated", "--directory", "/state", "--migration", "g"])
    );
    assert_eq!(container["volumeMounts"], json!([{"name": "vm-state", "mountPath": "/state", "readOnly": true}]));
    assert_eq!(pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"], "old");
    assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "VirtualMachineInstanceMigration");
    for (phase, code, expected) in [
        ("Pending", None, None),
        ("Running", None, None),
        ("Succeeded", Some(0), Some(Verdict::Moved)),
        ("Failed", Some(42), Some(Verdict::Stayed)),
        ("Failed", Some(1), Some(Verdict::Failed)),
        ("Failed", None, Some(Verdict::Failed)),
    ] {
        let pod = CachedRecovery { phase: phase.to_owned(), code, ..CachedRecovery::default() };
        assert_eq!(verdict(&pod), expected, "{phase} {code:?}");
    }
}
