//! Tests of volume migrations.

use api::VirtualMachine;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::*;

fn now() -> Time {
    Time(jiff::Timestamp::UNIX_EPOCH)
}

fn volume(name: &str, claim: &str) -> Value {
    json!({"name": name, "persistentVolumeClaim": {"claimName": claim}})
}

fn volumes(volumes: &Value) -> Vec<Volume> {
    serde_json::from_value(volumes.clone()).unwrap()
}

fn info(claim: &str, mode: &str) -> Value {
    json!({
        "claimName": claim, "accessModes": [mode], "volumeMode": "Block", "capacity": {"storage": "1Gi"},
        "filesystemOverhead": "0.055",
    })
}

/// Returns a running VMI with volume `a` on claim `a-old`.
fn vmi(change: &Value) -> VirtualMachineInstance {
    let mut vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
        "spec": {
            "domain": {"devices": {"disks": [{"name": "a", "disk": {"bus": "virtio"}}]}},
            "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, volume("a", "a-old")],
        },
        "status": {
            "phase": "Running",
            "volumeStatus": [
                {"name": "a", "target": "vda", "persistentVolumeClaimInfo": info("a-old", "ReadWriteOnce")},
            ],
        },
    });
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

/// Returns a VMI that moves from claim `a-old` to `a-new`, with this condition VolumesChange.
fn moving(condition: &Value) -> VirtualMachineInstance {
    vmi(&json!({
        "spec": {"volumes": [volume("a", "a-new"), volume("b", "b-old")]},
        "status": {
            "migratedVolumes": [{
                "volumeName": "a", "sourcePVCInfo": {"claimName": "a-old"}, "destinationPVCInfo": {"claimName": "a-new"},
            }],
            "conditions": condition,
        },
    }))
}

fn claims(list: &[(&str, Value)]) -> BTreeMap<String, Arc<CachedClaim>> {
    let claim = |(name, change): &(&str, Value)| {
        let mut claim = json!({
            "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "resources": {"requests": {"storage": "2Gi"}}},
            "status": {"phase": "Bound", "capacity": {"storage": "2Gi"}},
        });
        json_patch::merge(&mut claim, change);
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        ((*name).to_owned(), Arc::new(CachedClaim::from(claim)))
    };
    list.iter().map(claim).collect()
}

fn decided(
    vmi: &VirtualMachineInstance,
    template: &Value,
    claims: &BTreeMap<String, Arc<CachedClaim>>,
    migrates: bool,
    in_migration: bool,
) -> Step {
    let data_volumes = &DataVolumes::default();
    decide(&Observed { vmi, template: &volumes(template), migrates, claims, data_volumes, in_migration })
}

#[test]
fn vmi_begins_to_move_or_the_reason_is_shown() {
    let template = json!([{"name": "root", "containerDisk": {"image": "i"}}, volume("a", "a-new")]);
    let same = json!([volume("a", "a-old")]);
    let there = claims(&[("a-new", json!({}))]);
    let restart = |text: &str| Step::Restart(text.to_owned());
    let waits = |text: &str| Step::Waits(text.to_owned());
    let invalid = |what: &str| restart(&format!("invalid volumes to update with migration: {what}: [a]"));
    let plain = || json!({});
    let filling = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.pod.phase": "Running"}}});
    let with_other = |mode: &str| {
        json!({
            "spec": {"volumes": [volume("a", "a-old"), volume("b", "b-old")]},
            "status": {"volumeStatus": [
                {"name": "a", "target": "vda", "persistentVolumeClaimInfo": info("a-old", "ReadWriteOnce")},
                {"name": "b", "target": "vdb", "persistentVolumeClaimInfo": info("b-old", mode)},
            ]},
        })
    };
    let obstacle = json!({"status": {"conditions": [
        {"type": "StorageLiveMigratable", "status": "False", "message": "VMI uses SEV"},
    ]}});
    let waited = json!({"status": {"conditions": [{"type": "VolumesChange", "status": "False", "message": "m"}]}});
    let cancelled =
        json!({"status": {"conditions": [{"type": "VolumesChange", "status": "False", "reason": CANCELLED}]}});
    // Change of the VMI, template, claims, strategy Migration, in a migration; step.
    let rows = [
        (plain(), &same, there.clone(), true, false, Step::Same),
        (plain(), &template, there.clone(), false, false, Step::Same),
        (json!({"status": {"phase": "Scheduled"}}), &template, there.clone(), true, false, Step::Same),
        // A hint about a missing claim goes with its cause, a cancellation stays.
        (waited, &same, there.clone(), true, false, Step::Forget),
        (cancelled, &same, there.clone(), true, false, Step::Same),
        (plain(), &template, claims(&[]), true, false, waits("One of the destination volumes doesn't exist: [a-new]")),
        (
            plain(),
            &template,
            claims(&[("a-new", json!({"status": {"phase": "Lost"}}))]),
            true,
            false,
            waits("One of the destination volumes doesn't exist: [a-new]"),
        ),
        (
            plain(),
            &template,
            claims(&[("a-new", filling)]),
            true,
            false,
            waits("the destination volume a-new is being filled"),
        ),
        (
            json!({"spec": {"domain": {"devices": {"disks": [{"name": "a", "shareable": true, "disk": {}}]}}}}),
            &template,
            there.clone(),
            true,
            false,
            invalid("shareable"),
        ),
        (
            json!({"spec": {"domain": {"devices": {"disks": [{"name": "a", "lun": {}}]}}}}),
            &template,
            there.clone(),
            true,
            false,
            invalid("luns"),
        ),
        (
            json!({"spec": {"domain": {"devices": {"filesystems": [{"name": "a", "virtiofs": {}}]}}}}),
            &template,
            there.clone(),
            true,
            false,
            invalid("filesystems"),
        ),
        (
            json!({"status": {"volumeStatus": [{"name": "a", "target": "sda", "hotplugVolume": {}}]}}),
            &template,
            there.clone(),
            true,
            false,
            invalid("hotplugged"),
        ),
        (
            obstacle,
            &template,
            there.clone(),
            true,
            false,
            restart("cannot migrate the volumes as the VMI isn't migratable: VMI uses SEV"),
        ),
        (
            with_other("ReadWriteOnce"),
            &template,
            there.clone(),
            true,
            false,
            restart("cannot migrate the VM. The volume b is RWO and not included in the migration volumes"),
        ),
        (
            plain(),
            &template,
            claims(&[("a-new", json!({"status": {"capacity": {"storage": "512Mi"}}}))]),
            true,
            false,
            restart("cannot migrate the VM. The destination of volume a is smaller than its source"),
        ),
        (
            plain(),
            &template,
            there.clone(),
            true,
            true,
            Step::Refused("volumes cannot be updated while the VMI is migrating"),
        ),
    ];
    for (index, (change, template, claims, migrates, in_migration, expected)) in rows.into_iter().enumerate() {
        assert_eq!(decided(&vmi(&change), template, &claims, migrates, in_migration), expected, "row {index}");
    }
    for change in [plain(), with_other("ReadWriteMany")] {
        assert!(matches!(decided(&vmi(&change), &template, &there, true, false), Step::Begin { .. }), "{change}");
    }
}

#[test]
fn destination_that_a_data_volume_fills_is_waited_for() {
    use crate::data_volumes::tests::{claim, volume};

    let template = volumes(&json!([{"name": "a", "dataVolume": {"name": "a-new"}}]));
    // Phases of DataVolume and claim; the reason to wait.
    for (phase, claimed, expected) in [
        ("Succeeded", "Bound", None),
        // The target pod is its first consumer, and starts when it is filled.
        ("PendingPopulation", "Pending", None),
        (
            "ImportInProgress",
            "Bound",
            Some("a-new cannot be used yet: the phase of DataVolume a-new is ImportInProgress"),
        ),
        ("Failed", "Bound", Some("a-new cannot be used yet: the phase of DataVolume a-new is Failed")),
        ("WaitForFirstConsumer", "Pending", Some("annotation cdi.kubevirt.io/storage.bind.immediate.requested")),
    ] {
        let data_volumes = DataVolumes { known: [volume("a-new", phase, &json!([]))].into(), absent: false };
        let claims = [claim("a-new", claimed, &json!({"spec": {"volumeMode": "Block"}}))].into();
        let (vmi, in_migration) = (vmi(&json!({})), false);
        let observed = Observed {
            vmi: &vmi,
            template: &template,
            migrates: true,
            claims: &claims,
            data_volumes: &data_volumes,
            in_migration,
        };
        match (decide(&observed), expected) {
            (Step::Begin { volumes, .. }, None) => assert_eq!(volumes, template, "{phase}"),
            (Step::Waits(reason), Some(expected)) => assert!(reason.contains(expected), "{phase}: {reason}"),
            (step, _) => panic!("{phase}: {step:?}"),
        }
    }
}

#[test]
fn both_claims_are_recorded_with_the_change() {
    let template = json!([{"name": "root", "containerDisk": {"image": "i"}}, volume("a", "a-new")]);
    let vmi = vmi(&json!({}));
    let step = decided(&vmi, &template, &claims(&[("a-new", json!({}))]), true, false);
    let [wanted] = &step.apply(&vmi, &now())[..] else { panic!("{step:?}") };
    assert_eq!(wanted.spec.volumes, volumes(&template));
    assert_eq!(
        serde_json::to_value(&wanted.status.as_ref().unwrap().migrated_volumes).unwrap(),
        json!([{
            "volumeName": "a",
            "sourcePVCInfo": {
                "claimName": "a-old", "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                "capacity": {"storage": "1Gi"},
            },
            "destinationPVCInfo": {
                "claimName": "a-new", "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                "capacity": {"storage": "2Gi"}, "requests": {"storage": "2Gi"},
            },
        }])
    );
    let condition = wanted.condition(VOLUMES_CHANGE).unwrap();
    assert_eq!((condition.is_true(), condition.message.as_deref()), (true, Some("migrate volumes")));
    assert_eq!(decided(wanted, &template, &claims(&[]), true, true), Step::Same);
}

#[test]
fn move_in_progress_is_cancelled_after_its_migration() {
    let condition = |status: &str| json!([{"type": "VolumesChange", "status": status}]);
    let (back, forth) =
        (json!([volume("a", "a-old"), volume("b", "b-old")]), json!([volume("a", "a-new"), volume("b", "b-old")]));
    let other = json!([volume("a", "third"), volume("b", "b-old")]);
    let both = json!([volume("a", "a-old"), volume("b", "b-new")]);
    let invalid = Step::Refused("The volume can only be reverted to the previous version during the update");
    let restored = Step::Restore(volumes(&json!([volume("a", "a-old")])));
    // Condition, template, in a migration; step.
    for (status, template, in_migration, expected) in [
        ("True", &forth, true, Step::Same),
        ("True", &forth, false, Step::Same),
        // Cancelled, and wanted again.
        ("False", &forth, true, Step::Resume),
        ("True", &other, false, invalid.clone()),
        ("True", &both, false, invalid),
        // The guest can get to the new claims until its migration has ended.
        ("True", &back, true, Step::Cancel),
        ("False", &back, true, Step::Same),
        ("False", &back, false, restored.clone()),
        ("True", &back, false, restored.clone()),
    ] {
        for migrates in [true, false] {
            let step = decided(&moving(&condition(status)), template, &claims(&[]), migrates, in_migration);
            assert_eq!(step, expected, "{status} {template} {in_migration}");
        }
    }
    let vmi = moving(&condition("False"));
    let [claims_set_back, forgotten] = &restored.apply(&vmi, &now())[..] else { panic!() };
    assert_eq!(claims_set_back.spec.volumes, volumes(&back));
    assert_eq!(claims_set_back.status, vmi.status);
    assert!(forgotten.status.as_ref().unwrap().migrated_volumes.is_empty());
    assert_eq!(forgotten.condition(VOLUMES_CHANGE).unwrap().reason.as_deref(), Some(CANCELLED));
    // A process that ended between the two writes.
    assert_eq!(decided(claims_set_back, &back, &claims(&[]), true, false), Step::Forget);
}

fn vm(strategy: Option<&str>, claim: &str, status: &Value) -> VirtualMachine {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "m"},
        "spec": {
            "updateVolumesStrategy": strategy,
            "template": {"spec": {"domain": {"devices": {}}, "volumes": [volume("a", claim)]}},
        },
        "status": status,
    }))
    .unwrap()
}

#[test]
fn vm_records_the_move_and_its_interruption() {
    let (old, new) = (json!({"claimName": "a-old"}), json!({"claimName": "a-new"}));
    let migrated = json!([{"volumeName": "a", "sourcePVCInfo": old, "destinationPVCInfo": new}]);
    let state = json!({"volumeMigrationState": {"migratedVolumes": migrated}});
    let shown = |status: &str| json!([{"type": "VolumesChange", "status": status}]);
    let running = |change: &Value| Some(moving(change));
    let ended = |change: &Value| {
        let mut vmi = moving(change);
        vmi.status.as_mut().unwrap().phase = Some(VmiPhase::Succeeded);
        Some(vmi)
    };
    let recovery = json!([{"type": "ManualRecoveryRequired", "status": "True"}]);
    let migration = Some("Migration");
    // Strategy, claim of the template, state and conditions of the VM, VMI; state is kept, recovery is required.
    for (strategy, claim, known, conditions, vmi, kept, required) in [
        (migration, "a-new", Value::Null, json!([]), None, false, false),
        (migration, "a-new", Value::Null, json!([]), running(&shown("True")), true, false),
        (migration, "a-new", state.clone(), shown("True"), ended(&shown("True")), true, true),
        (migration, "a-new", state.clone(), shown("True"), None, true, true),
        // The VMI ended before the move was recorded.
        (migration, "a-new", Value::Null, json!([]), ended(&shown("True")), true, true),
        (migration, "a-old", Value::Null, json!([]), ended(&shown("True")), false, false),
        (migration, "a-new", Value::Null, json!([]), ended(&shown("False")), false, false),
        // The move was complete.
        (migration, "a-new", state.clone(), json!([]), None, true, false),
        (migration, "a-new", state.clone(), shown("True"), ended(&json!([])), true, false),
        // It stays required until somebody decides.
        (migration, "a-new", state.clone(), recovery.clone(), None, true, true),
        (migration, "a-old", state.clone(), recovery.clone(), None, false, false),
        // A restore has named other claims.
        (migration, "a-other", state.clone(), recovery.clone(), None, false, false),
        (None, "a-new", state.clone(), recovery.clone(), None, false, false),
        (Some("Replacement"), "a-new", state.clone(), shown("True"), None, false, false),
    ] {
        let vm = vm(strategy, claim, &json!({"volumeUpdateState": known, "conditions": conditions}));
        let mut status = vm.status.clone().unwrap();
        update_state(&vm, vmi.as_ref(), &mut status, &now());
        let is_required = status.condition_is_true("ManualRecoveryRequired");
        let row = format!("{strategy:?} {claim} {known} {conditions} {vmi:?}");
        assert_eq!((status.volume_update_state.is_some(), is_required), (kept, required), "{row}");
    }
}

#[test]
fn vm_shows_names_and_modes_of_the_claims_alone() {
    let short = |name: &str| json!({"claimName": name, "volumeMode": "Filesystem"});
    let full = |name: &str| {
        let mut info = short(name);
        let more =
            json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "2Gi"}, "requests": {"storage": "1Gi"}});
        json_patch::merge(&mut info, &more);
        info
    };
    let moved = |info: &dyn Fn(&str) -> Value| json!([{"volumeName": "a", "sourcePVCInfo": info("a-old"), "destinationPVCInfo": info("a-new")}]);
    let mut vmi = moving(&json!([{"type": "VolumesChange", "status": "True"}]));
    vmi.status.as_mut().unwrap().migrated_volumes = serde_json::from_value(moved(&full)).unwrap();
    let vm = vm(Some("Migration"), "a-new", &json!({}));
    let mut status = vm.status.clone().unwrap();
    update_state(&vm, Some(&vmi), &mut status, &now());
    let state = serde_json::to_value(&status.volume_update_state).unwrap();
    assert_eq!(state, json!({"volumeMigrationState": {"migratedVolumes": moved(&short)}}));
}

trait Conditions {
    fn condition_is_true(&self, type_: &str) -> bool;
}

impl Conditions for api::vm::status::VirtualMachineStatus {
    fn condition_is_true(&self, type_: &str) -> bool {
        self.conditions.iter().any(|condition| condition.type_ == type_ && condition.is_true())
    }
}
