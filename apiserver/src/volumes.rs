//! Whether a volume can be hot-plugged or unplugged.

use api::{
    config::ClusterConfig,
    enums::VmiPhase,
    owner,
    subresources::{AddVolumeRequest, RemoveVolumeRequest},
    vm::spec::VirtualMachine,
    vmi::{
        spec::{VirtualMachineInstance, VirtualMachineInstanceSpec},
        volumes::Volume,
    },
};

use crate::{
    error::{ApiError, Kind},
    instance,
};

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// A volume more.
    Add(&'a AddVolumeRequest),
    /// A volume less.
    Remove(&'a RemoveVolumeRequest),
}

fn bad(message: impl Into<String>) -> ApiError {
    ApiError::BadRequest(message.into())
}

/// Whether the cluster lets volumes be changed while a machine runs.
pub fn check_gates(config: &ClusterConfig) -> Result<(), ApiError> {
    if config.enabled("DeclarativeHotplugVolumes") || config.enabled("HotplugVolumes") {
        Ok(())
    } else {
        Err(bad("Enable DeclarativeHotplugVolumes or HotplugVolumes feature gate to use this API."))
    }
}

/// Whether the request says all that it must.
pub fn check_request(change: Change<'_>) -> Result<(), ApiError> {
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

/// Whether a machine's volumes can be changed this way.
pub fn check_instance(
    vmi: &VirtualMachineInstance,
    change: Change<'_>,
    config: &ClusterConfig,
) -> Result<(), ApiError> {
    let owned = owner::controller_of_kind::<VirtualMachine>(&vmi.metadata).is_some();
    if owned && !config.enabled("HotplugVolumes") {
        let metadata = &vmi.metadata;
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        return Err(bad(format!("VMI {}/{} is owned by a VM", text(&metadata.namespace), text(&metadata.name))));
    }
    if instance::phase(vmi) != VmiPhase::Running {
        return Err(instance::conflict(vmi, "VMI is not running"));
    }
    check_volumes(&vmi.spec, change).map_err(|message| instance::conflict(vmi, message))
}

/// Whether a VM's volumes can be changed this way.
pub fn check_machine(vm: &VirtualMachine, change: Change<'_>) -> Result<(), ApiError> {
    let empty = VirtualMachineInstanceSpec::default();
    let spec = vm.spec.template.spec.as_ref().unwrap_or(&empty);
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    check_volumes(spec, change).map_err(|message| ApiError::conflict(Kind::VirtualMachine, name, message))
}

/// The claim or DataVolume behind a volume.
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

fn check_volumes(spec: &VirtualMachineInstanceSpec, change: Change<'_>) -> Result<(), String> {
    match change {
        Change::Add(request) => {
            let name = &request.name;
            if spec.volumes.iter().any(|volume| volume.name == *name) {
                return Err(format!("Unable to add volume [{name}] because volume with that name already exists"));
            }
            let wanted = request.volume_source.as_ref().and_then(|source| {
                let claim = source.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
                claim.or_else(|| source.data_volume.as_ref().map(|volume| volume.name.as_str()))
            });
            match wanted {
                Some(wanted) if spec.volumes.iter().any(|volume| source(volume) == Some(wanted)) => {
                    Err(format!("Unable to add volume source [{wanted}] because it already exists"))
                }
                _ => Ok(()),
            }
        }
        Change::Remove(request) => {
            let name = request.name.as_str();
            let found = spec.volumes.iter().find(|volume| volume.name == name || source(volume) == Some(name));
            match found {
                None => Err(format!("Unable to remove volume [{name}] because it does not exist")),
                Some(volume) if !is_hotpluggable(volume) => {
                    Err(format!("Unable to remove volume [{name}] because it is not hotpluggable"))
                }
                Some(_) => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
    fn volumes_are_added_once_and_removed_when_they_can_be() {
        let config = ClusterConfig::default();
        let vmi = vmi("Running", json!([]));
        let check = |change: Change<'_>| check_instance(&vmi, change, &config);
        let asked = |name: &str, claim: &str| {
            add(
                json!({"name": name, "disk": {"name": name}, "volumeSource": {"persistentVolumeClaim": {"claimName": claim}}}),
            )
        };
        assert_eq!(check(Change::Add(&asked("more", "more-claim"))), Ok(()));
        assert_eq!(
            message(check(Change::Add(&asked("root", "x")))),
            "Unable to add volume [root] because volume with that name already exists"
        );
        assert_eq!(
            message(check(Change::Add(&asked("x", "root-claim")))),
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
    fn machine_of_a_vm_is_changed_through_the_vm() {
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vmi", "uid": "u", "controller": true}]);
        let config = ClusterConfig::default();
        let request = remove("data");
        let owned = vmi("Running", owner);
        assert_eq!(message(check_instance(&owned, Change::Remove(&request), &config)), "VMI ns/vmi is owned by a VM");
        let old = ClusterConfig { feature_gates: vec!["HotplugVolumes".into()], ..Default::default() };
        assert_eq!(check_instance(&owned, Change::Remove(&request), &old), Ok(()));
        let stopped = vmi("Scheduled", json!([]));
        assert_eq!(message(check_instance(&stopped, Change::Remove(&request), &config)), "VMI is not running");
    }

    #[test]
    fn one_of_two_gates_is_enough() {
        assert_eq!(check_gates(&ClusterConfig::default()), Ok(()));
        let disabled_feature_gates = vec!["DeclarativeHotplugVolumes".to_owned()];
        let off = ClusterConfig { disabled_feature_gates, ..Default::default() };
        assert!(check_gates(&off).is_err());
        assert_eq!(check_gates(&ClusterConfig { feature_gates: vec!["HotplugVolumes".into()], ..off }), Ok(()));
    }
}
