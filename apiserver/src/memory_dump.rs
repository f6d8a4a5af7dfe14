//! Whether a VM's memory can be dumped to a claim, and whether the claim can be detached.
//!
//! The claim must hold the memory that the machine asks for, 100 MiB besides, and what the file system takes of the
//! claim: the share that CDI's configuration gives, 5.5 % without CDI.

use api::{
    enums::VmiPhase,
    subresources::MemoryDumpOptions,
    vm::{spec::VirtualMachine, status::VirtualMachineMemoryDumpRequest},
    vmi::spec::VirtualMachineInstance,
};
use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::api::resource::Quantity};
use serde_json::Value;

use crate::{
    error::{ApiError, Kind},
    instance,
};

/// Bytes that a dump takes besides the memory.
const DUMP_OVERHEAD: i64 = 100 << 20;
/// Share of a claim that a file system takes where nothing else is known.
const DEFAULT_FILE_SYSTEM_OVERHEAD: f64 = 0.055;

fn conflict(vm: &VirtualMachine, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachine, vm.metadata.name.as_deref().unwrap_or_default(), message)
}

fn request(vm: &VirtualMachine) -> Option<&VirtualMachineMemoryDumpRequest> {
    vm.status.as_ref()?.memory_dump_request.as_ref()
}

/// The claim to dump to.
pub fn claim(vm: &VirtualMachine, options: &MemoryDumpOptions) -> Result<String, ApiError> {
    let asked = options.claim_name.as_str();
    match request(vm).map(|request| request.claim_name.as_str()) {
        None if asked.is_empty() => Err(ApiError::BadRequest("Memory dump requires claim name to be set".to_owned())),
        None => Ok(asked.to_owned()),
        Some(associated) if asked.is_empty() || asked == associated => Ok(associated.to_owned()),
        Some(associated) => Err(conflict(
            vm,
            format!(
                "can't request memory dump for pvc [{asked}] while pvc [{associated}] is still associated as the memory dump pvc"
            ),
        )),
    }
}

/// Whether the machine's memory can be read.
pub fn check_instance(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if instance::phase(vmi) == VmiPhase::Running { Ok(()) } else { Err(instance::conflict(vmi, "VMI is not running")) }
}

/// Whether the claim can take the dump. `cdi`: CDI's configuration, if there is one.
pub fn check_claim(
    vmi: &VirtualMachineInstance,
    claim: &PersistentVolumeClaim,
    cdi: Option<&Value>,
) -> Result<(), ApiError> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let clash = |message: String| ApiError::conflict(Kind::PersistentVolumeClaim, name, message);
    let spec = claim.spec.clone().unwrap_or_default();
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err(clash("pvc should be filesystem pvc".to_owned()));
    }
    let modes = spec.access_modes.unwrap_or_default();
    if !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany") {
        return Err(clash("pvc access mode can't be read only".to_owned()));
    }
    let bytes = |quantity: &Quantity| {
        api::quantity::units(quantity).map_err(|error| ApiError::Internal(format!("size of pvc {name}: {error}")))
    };
    let requests = spec.resources.and_then(|resources| resources.requests).unwrap_or_default();
    let size = requests.get("storage").map(bytes).transpose()?.unwrap_or(0);
    let memory = vmi.spec.domain.resources.requests.get("memory").map(bytes).transpose()?.unwrap_or(0);
    let needed = inflated(memory.saturating_add(DUMP_OVERHEAD), overhead(cdi, spec.storage_class_name.as_deref()));
    if size < needed {
        let (size, needed) = (api::quantity::bytes(size).0, api::quantity::bytes(needed).0);
        return Err(clash(format!("pvc size [{size}] should be bigger then [{needed}]")));
    }
    Ok(())
}

/// Share of a claim of a storage class that its file system takes, 0 to 1.
fn overhead(cdi: Option<&Value>, class: Option<&str>) -> f64 {
    let Some(overheads) = cdi.map(|cdi| &cdi["status"]["filesystemOverhead"]) else {
        return DEFAULT_FILE_SYSTEM_OVERHEAD;
    };
    let read = |value: &Value| value.as_str().and_then(|text| text.parse::<f64>().ok());
    class
        .and_then(|class| read(&overheads["storageClass"][class]))
        .or_else(|| read(&overheads["global"]))
        .filter(|share| (0.0..1.0).contains(share))
        .unwrap_or(DEFAULT_FILE_SYSTEM_OVERHEAD)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "sizes of claims are far below 2^53")]
fn inflated(bytes: i64, overhead: f64) -> i64 {
    (bytes as f64 / (1.0 - overhead)).ceil() as i64
}

/// Whether no other dump stands in the way.
pub fn check_request(vm: &VirtualMachine) -> Result<(), ApiError> {
    let Some(request) = request(vm) else { return Ok(()) };
    let claim = &request.claim_name;
    match request.phase.as_str() {
        "Dissociating" => Err(conflict(
            vm,
            format!("can't dump memory for pvc [{claim}] a remove memory dump request is in progress"),
        )),
        "Completed" | "Failed" => Ok(()),
        _ => Err(conflict(vm, format!("memory dump request for pvc [{claim}] already in progress"))),
    }
}

/// Whether the claim can be detached.
pub fn check_removal(vm: &VirtualMachine) -> Result<(), ApiError> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    match request(vm) {
        None => Err(conflict(vm, format!("can't remove memory dump association for vm {name}, no association found"))),
        Some(request) if request.remove => {
            Err(conflict(vm, format!("memory dump remove request for pvc [{}] already exists", request.claim_name)))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(request: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
            "spec": {"template": {}}, "status": {"memoryDumpRequest": request},
        }))
        .unwrap()
    }

    fn message<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        match result {
            Err(ApiError::Conflict { message, .. } | ApiError::BadRequest(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn options(claim: &str) -> MemoryDumpOptions {
        MemoryDumpOptions { claim_name: claim.into() }
    }

    #[test]
    fn claim_is_the_associated_one_until_it_is_detached() {
        assert_eq!(message(claim(&vm(Value::Null), &options(""))), "Memory dump requires claim name to be set");
        assert_eq!(claim(&vm(Value::Null), &options("a")), Ok("a".into()));
        let associated = vm(json!({"claimName": "a", "phase": "Completed"}));
        assert_eq!(claim(&associated, &options("")), Ok("a".into()));
        assert_eq!(
            message(claim(&associated, &options("b"))),
            "can't request memory dump for pvc [b] while pvc [a] is still associated as the memory dump pvc"
        );
    }

    #[test]
    fn one_dump_at_a_time() {
        let at = |phase: &str| vm(json!({"claimName": "a", "phase": phase}));
        assert_eq!(check_request(&at("Completed")), Ok(()));
        assert_eq!(check_request(&at("Failed")), Ok(()));
        assert_eq!(check_request(&vm(Value::Null)), Ok(()));
        assert_eq!(message(check_request(&at("Associating"))), "memory dump request for pvc [a] already in progress");
        assert!(message(check_request(&at("Dissociating"))).contains("remove memory dump request is in progress"));
        assert_eq!(check_removal(&at("Completed")), Ok(()));
        assert!(message(check_removal(&vm(Value::Null))).ends_with("for vm vm, no association found"));
        let removed = vm(json!({"claimName": "a", "phase": "Dissociating", "remove": true}));
        assert_eq!(message(check_removal(&removed)), "memory dump remove request for pvc [a] already exists");
    }

    #[test]
    fn claim_must_take_memory_overhead_and_file_system() {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi"},
            "spec": {"domain": {"devices": {}, "resources": {"requests": {"memory": "900Mi"}}}},
        }))
        .unwrap();
        let claim = |spec: Value| -> PersistentVolumeClaim {
            serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": spec})).unwrap()
        };
        let sized = |size: &str| {
            claim(
                json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": size}}}),
            )
        };
        assert_eq!(check_claim(&vmi, &sized("1100Mi"), None), Ok(()));
        assert!(
            message(check_claim(&vmi, &sized("1000Mi"), None)).starts_with("pvc size [1000Mi] should be bigger then [")
        );
        let cdi = json!({"status": {"filesystemOverhead": {"global": "0.5", "storageClass": {"fast": "0"}}}});
        assert_eq!(check_claim(&vmi, &sized("1000Mi"), Some(&cdi)), Ok(()));
        let cdi = json!({"status": {"filesystemOverhead": {"global": "0.5"}}});
        assert_eq!(
            message(check_claim(&vmi, &sized("1100Mi"), Some(&cdi))),
            "pvc size [1100Mi] should be bigger then [2000Mi]"
        );
        assert_eq!(
            message(check_claim(&vmi, &claim(json!({"volumeMode": "Block"})), None)),
            "pvc should be filesystem pvc"
        );
        assert_eq!(
            message(check_claim(&vmi, &claim(json!({"accessModes": ["ReadOnlyMany"]})), None)),
            "pvc access mode can't be read only"
        );
    }
}
