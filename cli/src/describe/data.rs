//! The part of the report about a VM's data: state that outlives its pods, the operation that holds its disks, snapshots, restores and
//! clones.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::objects::{CopyKind, Objects, age, array, made};
use crate::{copies, guest::text, snapshot, wait::Progress};

/// Objects in the report.
const MOST: usize = 20;

impl CopyKind {
    /// Returns the other object: the snapshot of a restore, the other VM or the snapshot of a clone.
    fn other(self, object: &Value, vm: &str) -> Value {
        match self {
            Self::Snapshot => Value::Null,
            Self::Restore => object["spec"]["virtualMachineSnapshotName"].clone(),
            Self::Clone if made(object) == vm => object["spec"]["source"]["name"].clone(),
            Self::Clone => made(object).clone(),
        }
    }

    fn progress(self, object: &Value, vm: &str) -> Progress {
        match self {
            Self::Snapshot => snapshot::progress(&text(&object["metadata"]["name"]), Some(object)),
            Self::Restore => copies::restored(vm, Some(object)),
            Self::Clone => copies::cloned(&text(&object["spec"]["source"]["name"]), Some(object)),
        }
    }
}

/// Returns the operation that needs the VM's data to hold still, with its age.
pub(super) fn operation(objects: &Objects) -> Option<String> {
    let lease = objects.vm.as_ref()?["status"]["operation"].clone();
    let lease: api::vm::status::OperationLease = serde_json::from_value(lease).ok()?;
    let since = lease.since.as_ref().and_then(|since| age(Some(&since.0.to_string()), objects.now));
    Some(format!("{}{}", lease.holder(), since.map(|age| format!(" for {age}")).unwrap_or_default()))
}

/// Returns TPM and UEFI variables of the VM, with the claims that keep them.
pub(super) fn state(objects: &Objects) -> Vec<Value> {
    let domain = &objects.spec()["domain"];
    let (tpm, variables) = (&domain["devices"]["tpm"], &domain["firmware"]["bootloader"]["efi"]);
    let devices = [("TPM", tpm), ("UEFI variables", variables)].into_iter();
    let devices = devices.filter(|(_, fields)| fields.is_object() && fields["enabled"] != false);
    let device = |(device, fields): (&str, &Value)| {
        let is_kept = fields["persistent"] == true;
        let claims = objects.state_claims.iter().filter(|_| is_kept).map(|claim| {
            json!({
                "name": claim["metadata"]["name"], "phase": claim["status"]["phase"],
                "size": claim["status"]["capacity"]["storage"], "storageClass": claim["spec"]["storageClassName"],
            })
        });
        json!({"device": device, "kept": is_kept, "claims": claims.collect::<Vec<_>>()})
    };
    devices.map(device).collect()
}

/// Returns the newest snapshots, restores and clones of the VM, the last one at the end.
pub(super) fn copies(objects: &Objects) -> Vec<Value> {
    let mut copies = objects.copies.iter().collect::<Vec<_>>();
    let created = |object: &Value| object["metadata"]["creationTimestamp"].as_str().unwrap_or_default().to_owned();
    copies.sort_by_key(|(_, object)| created(object).parse::<Timestamp>().unwrap_or(Timestamp::UNIX_EPOCH));
    let newest = copies.split_off(copies.len().saturating_sub(MOST));
    let shown = |(copy, object): &(CopyKind, Value)| {
        let (state, detail) = match copy.progress(object, &objects.name) {
            Progress::Done(_) => ("Complete", excluded(object)),
            Progress::Failed(text) => ("Failed", Some(text)),
            Progress::Waiting(text) => ("Unfinished", Some(text)),
        };
        json!({
            "object": format!("{}/{}", copy.kind(), text(&object["metadata"]["name"])),
            "other": copy.other(object, &objects.name), "state": state, "detail": detail,
            "age": age(Some(&created(object)), objects.now),
        })
    };
    newest.into_iter().map(shown).collect()
}

/// Returns a text about the volumes that a snapshot lacks.
fn excluded(object: &Value) -> Option<String> {
    let names = array(&object["status"]["snapshotVolumes"]["excludedVolumes"]).iter().map(text).collect::<Vec<_>>();
    (!names.is_empty()).then(|| format!("not included: {}", names.join(", ")))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A VM that keeps state, with a snapshot of it that is restored.
    pub(in super::super) fn kept() -> Objects {
        let vm = |name: &str| json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name});
        let object = |name: &str, created: &str, spec: Value, status: Value| json!({"metadata": {"name": name, "creationTimestamp": created}, "spec": spec, "status": status});
        Objects {
            name: "m".into(),
            vm: Some(json!({
                "spec": {"runStrategy": "Halted", "template": {"spec": {
                    "domain": {
                        "devices": {
                            "tpm": {"persistent": true},
                            "disks": [{"name": "root", "disk": {}}, {"name": "tools", "cdrom": {}}],
                            "filesystems": [{"name": "share", "virtiofs": {}}],
                        },
                        "firmware": {"bootloader": {"efi": {"persistent": false}}},
                    },
                    "volumes": [
                        {"name": "root", "emptyDisk": {}}, {"name": "tools", "containerDisk": {"image": "i:1"}},
                        {"name": "share", "configMap": {"name": "c"}},
                    ],
                }}},
                "status": {"printableStatus": "Stopped", "operation": {
                    "name": "r", "operation": "Restore", "uid": "u", "since": "2026-11-29T06:00:30Z",
                }},
            })),
            state_claims: vec![json!({
                "metadata": {"name": "persistent-state-for-m-x"}, "spec": {"storageClassName": "fast"},
                "status": {"phase": "Bound", "capacity": {"storage": "10Mi"}},
            })],
            copies: vec![
                (
                    CopyKind::Clone,
                    object(
                        "c",
                        "2026-11-29T06:00:40Z",
                        json!({"source": vm("m")}),
                        json!({"phase": "RestoreInProgress"}),
                    ),
                ),
                (
                    CopyKind::Restore,
                    object(
                        "r",
                        "2026-11-29T06:00:30Z",
                        json!({"target": vm("m"), "virtualMachineSnapshotName": "s"}),
                        json!({"conditions": [{"type": "Ready", "status": "False", "reason": "Waiting"}]}),
                    ),
                ),
                (
                    CopyKind::Snapshot,
                    object(
                        "s",
                        "2026-11-29T06:00:00Z",
                        json!({"source": vm("m")}),
                        json!({"phase": "Succeeded", "readyToUse": true, "snapshotVolumes": {"excludedVolumes": ["tools"]}}),
                    ),
                ),
            ],
            now: "2026-11-29T06:01:00Z".parse().unwrap(),
            ..Objects::default()
        }
    }

    #[test]
    fn operation_names_its_holder() {
        assert_eq!(operation(&kept()).as_deref(), Some("restore \"r\" in progress for 30s"));
        assert_eq!(operation(&Objects::default()), None);
    }

    #[test]
    fn state_has_the_claims_of_the_devices_that_are_kept() {
        let state = state(&kept());
        assert_eq!((&state[0]["device"], &state[0]["kept"]), (&json!("TPM"), &json!(true)));
        assert_eq!(state[0]["claims"][0]["name"], "persistent-state-for-m-x");
        assert_eq!((&state[1]["device"], &state[1]["claims"]), (&json!("UEFI variables"), &json!([])));
    }

    #[test]
    fn copies_are_those_of_the_vm_with_their_state() {
        let copies = copies(&kept());
        let shown = copies
            .iter()
            .map(|copy| ["object", "other", "state", "detail", "age"].map(|field| text(&copy[field])).join(" "));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "VirtualMachineSnapshot/s - Complete not included: tools 60s",
                "VirtualMachineRestore/r s Unfinished Waiting 30s",
                "VirtualMachineClone/c - Unfinished RestoreInProgress 20s",
            ]
        );
        let vm = |name: &str| json!({"kind": "VirtualMachine", "name": name});
        for (copy, object, expected) in [
            (CopyKind::Snapshot, json!({"spec": {"source": vm("other")}}), false),
            (CopyKind::Restore, json!({"spec": {"target": vm("m")}}), true),
            (CopyKind::Clone, json!({"spec": {"source": vm("other"), "target": vm("m")}}), true),
            (CopyKind::Clone, json!({"spec": {"source": vm("other")}, "status": {"targetName": "m"}}), true),
            (CopyKind::Clone, json!({"spec": {"source": {"kind": "VirtualMachineSnapshot", "name": "m"}}}), false),
        ] {
            assert_eq!(copy.is_about(&object, "m"), expected, "{copy:?} {object}");
        }
    }
}
