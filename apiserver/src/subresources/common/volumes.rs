//! Volumes to plug and unplug: checks, and the patch of the VM's template or the VMI.

use api::{
    FeatureGate,
    config::ClusterConfig,
    hotplug, owner,
    subresources::{AddVolumeRequest, RemoveVolumeRequest},
    vm::spec::VirtualMachine,
    vmi::{
        disks::Disk,
        spec::{VirtualMachineInstance, VirtualMachineInstanceSpec},
        volumes::{DataVolumeSource, PersistentVolumeClaimVolumeSource, Volume},
    },
};
use axum::response::Response;
use http::StatusCode;
use json_patch::{AddOperation, Patch, PatchOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf};
use kube::api::PatchParams;
use serde_json::{Value, json};

use super::{call::Call, vmi_checks};
use crate::{
    clients::{
        objects::{Stored, message},
        patches,
    },
    requests::error::{ApiError, Kind, empty_response},
};

/// Conflicts of a change with the volumes of a VM or VMI.
#[derive(Debug, thiserror::Error)]
enum VolumeConflict {
    #[error("Unable to add volume [{0}] because volume with that name already exists")]
    NameExists(String),
    #[error("Unable to add volume source [{0}] because it already exists")]
    SourceExists(String),
    #[error("Unable to add volume [{0}] because its former claim is still being detached")]
    Detaching(String),
    #[error("Unable to remove volume [{0}] because it does not exist")]
    NotFound(String),
    #[error("Unable to remove volume [{0}] because it is not hotpluggable")]
    NotHotpluggable(String),
}

/// A requested change.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'a> {
    /// Add a volume.
    Add(&'a AddVolumeRequest),
    /// Remove a volume.
    Remove(&'a RemoveVolumeRequest),
}

fn bad(message: impl Into<String>) -> ApiError {
    ApiError::BadRequest(message.into())
}

/// Rejects all requests while both feature gates are off.
pub(crate) fn check_gates(config: &ClusterConfig) -> Result<(), ApiError> {
    if config.enabled(FeatureGate::DeclarativeHotplugVolumes) || config.enabled(FeatureGate::HotplugVolumes) {
        Ok(())
    } else {
        Err(bad("Enable DeclarativeHotplugVolumes or HotplugVolumes feature gate to use this API."))
    }
}

/// Rejects an incomplete request.
pub(crate) fn check_request(change: Change<'_>) -> Result<(), ApiError> {
    match change {
        Change::Add(request) => {
            if request.name.is_empty() {
                return Err(bad("AddVolumeOptions requires name to be set"));
            }
            if request.disk.is_none() {
                return Err(bad("AddVolumeOptions requires disk to not be nil"));
            }
            match &request.volume_source {
                None => Err(bad("AddVolumeOptions requires VolumeSource to not be nil")),
                Some(source) if source.data_volume.is_none() == source.persistent_volume_claim.is_none() => {
                    Err(bad("AddVolumeOptions requires exactly one of dataVolume and persistentVolumeClaim"))
                }
                Some(_) => Ok(()),
            }
        }
        Change::Remove(request) if request.name.is_empty() => Err(bad("RemoveVolumeOptions requires name to be set")),
        Change::Remove(_) => Ok(()),
    }
}

/// Rejects a change that conflicts with a VMI.
fn check_vmi(vmi: &VirtualMachineInstance, change: Change<'_>) -> Result<(), ApiError> {
    // The VMI of a VM follows the template, which has no other volumes.
    if owner::controller_of_kind::<VirtualMachine>(&vmi.metadata).is_some() {
        let metadata = &vmi.metadata;
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        return Err(bad(format!("VMI {}/{} is owned by a VM", text(&metadata.namespace), text(&metadata.name))));
    }
    vmi_checks::check_running(vmi, "VMI is not running")?;
    check_volumes(&vmi.spec, change)
        .and_then(|()| check_detached(vmi, change))
        .map_err(|conflict| vmi_checks::conflict(vmi, conflict.to_string()))
}

/// Rejects a change that conflicts with a VM.
fn check_vm(vm: &VirtualMachine, change: Change<'_>) -> Result<(), ApiError> {
    let empty = VirtualMachineInstanceSpec::default();
    let spec = vm.spec.template.spec.as_ref().unwrap_or(&empty);
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    check_volumes(spec, change).map_err(|conflict| ApiError::conflict(Kind::VirtualMachine, name, conflict.to_string()))
}

/// Returns the claim or DataVolume of a volume.
fn source(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim
        .or_else(|| volume.data_volume.as_ref().map(|volume| volume.name.as_str()))
        .or_else(|| volume.memory_dump.as_ref().map(|dump| dump.claim_name.as_str()))
}

fn is_hotpluggable(volume: &Volume) -> bool {
    volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.hotpluggable)
        || volume.data_volume.as_ref().is_some_and(|volume| volume.hotpluggable)
        || volume.memory_dump.as_ref().is_some_and(|dump| dump.hotpluggable)
}

/// Returns the names of the volumes to remove: that of the request, or those with this claim or DataVolume.
fn removed_names<'a>(spec: &'a VirtualMachineInstanceSpec, name: &str) -> Vec<&'a str> {
    let names = |selects: &dyn Fn(&Volume) -> bool| -> Vec<&'a str> {
        spec.volumes.iter().filter(|volume| selects(volume)).map(|volume| volume.name.as_str()).collect()
    };
    let named = names(&|volume| volume.name == name);
    if named.is_empty() { names(&|volume| source(volume) == Some(name)) } else { named }
}

/// Returns the volumes and disks after a change. A CD-ROM drive stays: its medium is inserted or ejected.
fn changed(spec: &VirtualMachineInstanceSpec, change: Change<'_>) -> (Vec<Volume>, Vec<Disk>) {
    let (mut volumes, mut disks) = (spec.volumes.clone(), spec.domain.devices.disks.clone());
    match change {
        Change::Add(request) => {
            let name = &request.name;
            let source = request.volume_source.clone().unwrap_or_default();
            volumes.push(Volume {
                name: name.clone(),
                data_volume: source.data_volume.map(|source| DataVolumeSource { hotpluggable: true, ..source }),
                persistent_volume_claim: source
                    .persistent_volume_claim
                    .map(|source| PersistentVolumeClaimVolumeSource { hotpluggable: true, ..source }),
                ..Volume::default()
            });
            if !disks.iter().any(|disk| disk.name == *name && disk.cdrom.is_some()) {
                disks.push(Disk { name: name.clone(), ..request.disk.clone().unwrap_or_default() });
            }
        }
        Change::Remove(request) => {
            let names = removed_names(spec, &request.name);
            volumes.retain(|volume| !names.contains(&volume.name.as_str()));
            disks.retain(|disk| disk.cdrom.is_some() || !names.contains(&disk.name.as_str()));
        }
    }
    (volumes, disks)
}

/// Returns the patch of the spec below `root` of a stored object. It tests the lists that it replaces as they are stored. An empty
/// list can be stored or absent, so that the version of the object is tested in its place.
fn patch(root: &str, stored: &Value, spec: &VirtualMachineInstanceSpec, change: Change<'_>) -> Patch {
    let pointer = |path: &str| PointerBuf::parse(path).unwrap_or_default();
    let replaced = |path: &str, value: Value| {
        let old =
            stored.pointer(&format!("{root}{path}")).filter(|old| old.as_array().is_some_and(|old| !old.is_empty()));
        let path = pointer(&format!("{root}{path}"));
        if let Some(old) = old {
            let test = TestOperation { path: path.clone(), value: old.clone() };
            [PatchOperation::Test(test), PatchOperation::Replace(ReplaceOperation { path, value })]
        } else {
            let version = "/metadata/resourceVersion";
            let current = stored.pointer(version).cloned().unwrap_or_default();
            let test = TestOperation { path: pointer(version), value: current };
            [PatchOperation::Test(test), PatchOperation::Add(AddOperation { path, value })]
        }
    };
    let (volumes, disks) = changed(spec, change);
    let [test_volumes, volumes] = replaced("/spec/volumes", json!(volumes));
    let [test_disks, disks] = replaced("/spec/domain/devices/disks", json!(disks));
    Patch(vec![test_volumes, test_disks, volumes, disks])
}

/// Returns the answer for a refused patch.
fn refused(what: &str, error: &kube::Error) -> ApiError {
    match error {
        kube::Error::Api(status) if status.code == 422 => ApiError::Unprocessable {
            message: status.message.clone(),
            details: serde_json::to_value(&status.details).unwrap_or_default(),
        },
        error => ApiError::Internal(format!("unable to patch {what}: {}", message(error))),
    }
}

/// Changes the template of a VM. The running VMI follows it.
pub(crate) async fn change_vm(
    call: Call<'_>,
    vm: &Stored<VirtualMachine>,
    change: Change<'_>,
    dry_run: bool,
) -> Result<Response, ApiError> {
    check_vm(&vm.object, change)?;
    let spec = vm.object.spec.template.spec.clone().unwrap_or_default();
    let patch = patch("/spec/template", &vm.json, &spec, change);
    let params = PatchParams { dry_run, ..PatchParams::default() };
    let vms = call.context.objects.vms(&call.object.namespace);
    patches::send(vms, None, &call.object.name, &params, patch).await.map_err(|error| refused("vm", &error))?;
    Ok(empty_response(StatusCode::ACCEPTED))
}

/// Changes a VMI.
pub(crate) async fn change_vmi(
    call: Call<'_>,
    vmi: &Stored<VirtualMachineInstance>,
    change: Change<'_>,
    dry_run: bool,
) -> Result<Response, ApiError> {
    check_vmi(&vmi.object, change)?;
    let patch = patch("", &vmi.json, &vmi.object.spec, change);
    let params = PatchParams { dry_run, ..PatchParams::default() };
    let vmis = call.context.objects.vmis(&call.object.namespace);
    patches::send(vmis, None, &call.object.name, &params, patch).await.map_err(|error| refused("vmi", &error))?;
    Ok(empty_response(StatusCode::ACCEPTED))
}

/// Returns the claim or DataVolume of a request.
fn requested(request: &AddVolumeRequest) -> Option<&str> {
    let source = request.volume_source.as_ref()?;
    let claim = source.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim.or_else(|| source.data_volume.as_ref().map(|volume| volume.name.as_str()))
}

/// Rejects another claim by the name of a volume that the guest still has: it would write to the former one.
fn check_detached(vmi: &VirtualMachineInstance, change: Change<'_>) -> Result<(), VolumeConflict> {
    let Change::Add(request) = change else { return Ok(()) };
    let entry = hotplug::status_of(vmi, &request.name).filter(|entry| entry.hotplug_volume.is_some());
    let former = entry.and_then(|entry| entry.persistent_volume_claim_info.as_ref()?.claim_name.as_deref());
    match former {
        Some(former) if requested(request) != Some(former) => Err(VolumeConflict::Detaching(request.name.clone())),
        _ => Ok(()),
    }
}

fn check_volumes(spec: &VirtualMachineInstanceSpec, change: Change<'_>) -> Result<(), VolumeConflict> {
    match change {
        Change::Add(request) => {
            let name = &request.name;
            if spec.volumes.iter().any(|volume| volume.name == *name) {
                return Err(VolumeConflict::NameExists(name.clone()));
            }
            match requested(request) {
                Some(requested) if spec.volumes.iter().any(|volume| source(volume) == Some(requested)) => {
                    Err(VolumeConflict::SourceExists(requested.to_owned()))
                }
                _ => Ok(()),
            }
        }
        Change::Remove(request) => {
            let name = request.name.as_str();
            let found = spec.volumes.iter().find(|volume| volume.name == name || source(volume) == Some(name));
            match found {
                None => Err(VolumeConflict::NotFound(name.to_owned())),
                Some(volume) if !is_hotpluggable(volume) => Err(VolumeConflict::NotHotpluggable(name.to_owned())),
                Some(_) => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmi(phase: &str, owner: Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vmi", "namespace": "ns", "ownerReferences": owner},
            "spec": {"domain": {"devices": {}}, "volumes": [
                {"name": "root", "persistentVolumeClaim": {"claimName": "root-claim"}},
                {"name": "data", "dataVolume": {"name": "data-dv", "hotpluggable": true}},
            ]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn add(body: Value) -> AddVolumeRequest {
        serde_json::from_value(body).unwrap()
    }

    fn remove(name: &str) -> RemoveVolumeRequest {
        RemoveVolumeRequest { name: name.into(), dry_run: None }
    }

    fn message(result: Result<(), ApiError>) -> String {
        match result {
            Err(ApiError::Conflict { message, .. } | ApiError::BadRequest(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_must_be_complete() {
        let claim = json!({"persistentVolumeClaim": {"claimName": "c"}});
        let cases = [
            (json!({}), "AddVolumeOptions requires name to be set"),
            (json!({"name": "a"}), "AddVolumeOptions requires disk to not be nil"),
            (json!({"name": "a", "disk": {"name": ""}}), "AddVolumeOptions requires VolumeSource to not be nil"),
        ];
        for (body, expected) in cases {
            assert_eq!(message(check_request(Change::Add(&add(body)))), expected);
        }
        let complete = add(json!({"name": "a", "disk": {"name": "a"}, "volumeSource": claim}));
        assert_eq!(check_request(Change::Add(&complete)), Ok(()));
        assert!(
            check_request(Change::Add(&add(json!({"name": "a", "disk": {"name": "a"}, "volumeSource": {}})))).is_err()
        );
        assert_eq!(message(check_request(Change::Remove(&remove("")))), "RemoveVolumeOptions requires name to be set");
    }

    #[test]
    fn volumes_are_added_once_and_removed_if_hotpluggable() {
        let vmi = vmi("Running", json!([]));
        let check = |change: Change<'_>| check_vmi(&vmi, change);
        let request = |name: &str, claim: &str| {
            add(
                json!({"name": name, "disk": {"name": name}, "volumeSource": {"persistentVolumeClaim": {"claimName": claim}}}),
            )
        };
        assert_eq!(check(Change::Add(&request("more", "more-claim"))), Ok(()));
        assert_eq!(
            message(check(Change::Add(&request("root", "x")))),
            "Unable to add volume [root] because volume with that name already exists"
        );
        assert_eq!(
            message(check(Change::Add(&request("x", "root-claim")))),
            "Unable to add volume source [root-claim] because it already exists"
        );
        assert_eq!(check(Change::Remove(&remove("data"))), Ok(()));
        assert_eq!(check(Change::Remove(&remove("data-dv"))), Ok(()));
        assert_eq!(
            message(check(Change::Remove(&remove("root")))),
            "Unable to remove volume [root] because it is not hotpluggable"
        );
        assert_eq!(
            message(check(Change::Remove(&remove("x")))),
            "Unable to remove volume [x] because it does not exist"
        );
    }

    #[test]
    fn another_claim_waits_until_the_former_one_is_detached() {
        let mut vmi = vmi("Running", json!([]));
        let info = json!({"claimName": "former"});
        let entries = json!([
            {"name": "leaves", "target": "sda", "hotplugVolume": {}, "persistentVolumeClaimInfo": info},
            {"name": "other", "target": "sdb", "persistentVolumeClaimInfo": info},
        ]);
        vmi.status = Some(serde_json::from_value(json!({"phase": "Running", "volumeStatus": entries})).unwrap());
        let refused = "Unable to add volume [leaves] because its former claim is still being detached";
        for (name, source, expected) in [
            ("leaves", json!({"persistentVolumeClaim": {"claimName": "new"}}), Some(refused)),
            ("leaves", json!({"dataVolume": {"name": "new"}}), Some(refused)),
            ("leaves", json!({"persistentVolumeClaim": {"claimName": "former"}}), None),
            ("leaves", json!({"dataVolume": {"name": "former"}}), None),
            ("other", json!({"persistentVolumeClaim": {"claimName": "new"}}), None),
            ("more", json!({"persistentVolumeClaim": {"claimName": "new"}}), None),
        ] {
            let request = add(json!({"name": name, "disk": {"name": name}, "volumeSource": source}));
            let found = check_vmi(&vmi, Change::Add(&request)).err().map(|error| message(Err(error)));
            assert_eq!(found.as_deref(), expected, "{name} {source}");
        }
    }

    #[test]
    fn vmi_of_a_vm_is_changed_through_the_vm() {
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vmi", "uid": "u", "controller": true}]);
        let request = remove("data");
        let owned = vmi("Running", owner);
        assert_eq!(message(check_vmi(&owned, Change::Remove(&request))), "VMI ns/vmi is owned by a VM");
        let stopped = vmi("Scheduled", json!([]));
        assert_eq!(message(check_vmi(&stopped, Change::Remove(&request))), "VMI is not running");
    }

    #[test]
    fn one_of_two_gates_is_enough() {
        assert_eq!(check_gates(&ClusterConfig::default()), Ok(()));
        let disabled_feature_gates = vec!["DeclarativeHotplugVolumes".to_owned()];
        let off = ClusterConfig { disabled_feature_gates, ..Default::default() };
        assert!(check_gates(&off).is_err());
        assert_eq!(check_gates(&ClusterConfig { feature_gates: vec!["HotplugVolumes".into()], ..off }), Ok(()));
    }

    fn patched(spec: &Value, change: Change<'_>) -> Value {
        let stored = json!({"metadata": {"resourceVersion": "7"}, "spec": {"template": {"spec": spec}}});
        json!(patch("/spec/template", &stored, &serde_json::from_value(spec.clone()).unwrap(), change))
    }

    #[test]
    fn patch_tests_and_replaces_both_lists() {
        let request = add(json!({
            "name": "data", "disk": {"disk": {"bus": "scsi"}, "serial": "s"},
            "volumeSource": {"persistentVolumeClaim": {"claimName": "c"}},
        }));
        let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}});
        let disk = json!({"name": "data", "serial": "s", "disk": {"bus": "scsi"}});
        let (volumes, disks) = ("/spec/template/spec/volumes", "/spec/template/spec/domain/devices/disks");
        let version = "/metadata/resourceVersion";
        for empty in [json!({"domain": {"devices": {}}}), json!({"volumes": [], "domain": {"devices": {"disks": []}}})]
        {
            assert_eq!(
                patched(&empty, Change::Add(&request)),
                json!([
                    {"op": "test", "path": version, "value": "7"}, {"op": "test", "path": version, "value": "7"},
                    {"op": "add", "path": volumes, "value": [volume]}, {"op": "add", "path": disks, "value": [disk]},
                ])
            );
        }
        let full = json!({"volumes": [volume], "domain": {"devices": {"disks": [disk]}}});
        for name in ["data", "c"] {
            assert_eq!(
                patched(&full, Change::Remove(&remove(name))),
                json!([
                    {"op": "test", "path": volumes, "value": [volume]}, {"op": "test", "path": disks, "value": [disk]},
                    {"op": "replace", "path": volumes, "value": []}, {"op": "replace", "path": disks, "value": []},
                ])
            );
        }
    }

    #[test]
    fn lists_are_tested_as_they_are_stored() {
        let volumes = json!([
            {"name": "root", "persistentVolumeClaim": {"claimName": "r", "hotpluggable": false}},
            {"name": "scratch", "emptyDisk": {"capacity": 1_073_741_824}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}},
        ]);
        let disks = json!([
            {"name": "root", "disk": {"bus": "virtio", "readonly": false}},
            {"name": "scratch", "disk": {}},
            {"name": "data", "disk": {"bus": "scsi"}},
        ]);
        let spec = json!({"volumes": volumes, "domain": {"devices": {"disks": disks}}});
        let patch = patched(&spec, Change::Remove(&remove("data")));
        assert_eq!(patch[0]["op"], "test");
        assert_eq!(patch[0]["value"], volumes);
        assert_eq!(patch[1]["op"], "test");
        assert_eq!(patch[1]["value"], disks);
    }

    #[test]
    fn drive_stays_when_its_medium_comes_and_goes() {
        let drive = json!({"name": "cd", "cdrom": {"bus": "sata"}});
        let disks = |spec: &Value, change: Change<'_>| patched(spec, change)[3]["value"].clone();
        let empty = json!({"domain": {"devices": {"disks": [drive]}}});
        let claim = json!({"persistentVolumeClaim": {"claimName": "c"}});
        let request = add(json!({"name": "cd", "disk": {"disk": {"bus": "scsi"}}, "volumeSource": claim}));
        assert_eq!(disks(&empty, Change::Add(&request)), json!([drive]));
        let volume = json!({"name": "cd", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}});
        let full = json!({"volumes": [volume], "domain": {"devices": {"disks": [drive]}}});
        assert_eq!(disks(&full, Change::Remove(&remove("cd"))), json!([drive]));
    }
}
