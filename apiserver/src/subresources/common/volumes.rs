//! Checks of volumes to plug and unplug.

use api::{
    FeatureGate,
    config::ClusterConfig,
    owner,
    subresources::{AddVolumeRequest, RemoveVolumeRequest},
    vm::spec::VirtualMachine,
    vmi::{
        spec::{VirtualMachineInstance, VirtualMachineInstanceSpec},
        volumes::Volume,
    },
};

use super::vmi_checks;
use crate::requests::error::{ApiError, Kind};

/// The error of all requests that pass the checks.
pub(crate) const NOT_AVAILABLE: ApiError = ApiError::NotAvailable("hot-plug of volumes");

/// Conflicts of a change with the volumes of a VM or VMI.
#[derive(Debug, thiserror::Error)]
enum VolumeConflict {
    #[error("Unable to add volume [{0}] because volume with that name already exists")]
    NameExists(String),
    #[error("Unable to add volume source [{0}] because it already exists")]
    SourceExists(String),
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
pub(crate) fn check_vmi(
    vmi: &VirtualMachineInstance,
    change: Change<'_>,
    config: &ClusterConfig,
) -> Result<(), ApiError> {
    let owned = owner::controller_of_kind::<VirtualMachine>(&vmi.metadata).is_some();
    if owned && !config.enabled(FeatureGate::HotplugVolumes) {
        let metadata = &vmi.metadata;
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        return Err(bad(format!("VMI {}/{} is owned by a VM", text(&metadata.namespace), text(&metadata.name))));
    }
    vmi_checks::check_running(vmi, "VMI is not running")?;
    check_volumes(&vmi.spec, change).map_err(|conflict| vmi_checks::conflict(vmi, conflict.to_string()))
}

/// Rejects a change that conflicts with a VM.
pub(crate) fn check_vm(vm: &VirtualMachine, change: Change<'_>) -> Result<(), ApiError> {
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

fn check_volumes(spec: &VirtualMachineInstanceSpec, change: Change<'_>) -> Result<(), VolumeConflict> {
    match change {
        Change::Add(request) => {
            let name = &request.name;
            if spec.volumes.iter().any(|volume| volume.name == *name) {
                return Err(VolumeConflict::NameExists(name.clone()));
            }
            let requested = request.volume_source.as_ref().and_then(|source| {
                let claim = source.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
                claim.or_else(|| source.data_volume.as_ref().map(|volume| volume.name.as_str()))
            });
            match requested {
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
    fn volumes_are_added_once_and_removed_if_hotpluggable() {
        let config = ClusterConfig::default();
        let vmi = vmi("Running", json!([]));
        let check = |change: Change<'_>| check_vmi(&vmi, change, &config);
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
    fn vmi_of_a_vm_is_changed_through_the_vm() {
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vmi", "uid": "u", "controller": true}]);
        let config = ClusterConfig::default();
        let request = remove("data");
        let owned = vmi("Running", owner);
        assert_eq!(message(check_vmi(&owned, Change::Remove(&request), &config)), "VMI ns/vmi is owned by a VM");
        let old = ClusterConfig { feature_gates: vec!["HotplugVolumes".into()], ..Default::default() };
        assert_eq!(check_vmi(&owned, Change::Remove(&request), &old), Ok(()));
        let stopped = vmi("Scheduled", json!([]));
        assert_eq!(message(check_vmi(&stopped, Change::Remove(&request), &config)), "VMI is not running");
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
