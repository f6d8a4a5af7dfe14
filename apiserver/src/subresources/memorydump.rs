//! `virtualmachines/memorydump`: writes the guest's memory to a claim.
//!
//! The claim must be as large as the memory that the VMI requests, another 100 MiB, and the overhead of the file system on both:
//! the fraction in CDI's configuration, or 5.5 % without CDI. virtctl creates claims of exactly this size.

use api::{
    VirtualMachine, VirtualMachineInstance, hotplug,
    subresources::MemoryDumpOptions,
    vm::{lease::Attempt, status::VirtualMachineMemoryDumpRequest},
};
use axum::{body::Body, response::Response};
use http::Request;
use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::api::resource::Quantity};
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::common::{
    call::Call,
    memory_dump::{self, conflict, request as dump_request, submit},
    schema,
    specification::{Answer, Specification, VMS},
    vmi_checks::check_running,
    volumes::check_gates,
};
use crate::{clients::objects::message, requests::error::ApiError};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<MemoryDumpOptions>),
    listed: false,
    operation: "MemoryDump",
    description: "Write the guest's memory to a claim",
    ..Specification::put(VMS, "memorydump", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Longest name of a volume: a DNS label.
const MAX_VOLUME_NAME: usize = 63;
/// Bytes of a dump in addition to the memory.
const DUMP_OVERHEAD: i64 = 100 << 20;
/// Fraction that is added for the file system without CDI's configuration.
const DEFAULT_FILE_SYSTEM_OVERHEAD: f64 = 0.055;
/// Unit of the size that a claim needs.
const MEBIBYTE: f64 = 1_048_576.0;
/// Unit of the size of a claim, as the reference compares and prints it.
const KILO: i64 = 1000;

/// Returns the claim of the dump.
fn claim(vm: &VirtualMachine, options: &MemoryDumpOptions) -> Result<String, ApiError> {
    let named = options.claim_name.as_str();
    match dump_request(vm).map(|request| request.claim_name.as_str()) {
        None if named.is_empty() => Err(ApiError::BadRequest("Memory dump requires claim name to be set".to_owned())),
        None => Ok(named.to_owned()),
        Some(associated) if named.is_empty() || named == associated => Ok(associated.to_owned()),
        Some(associated) => Err(conflict(
            vm,
            format!(
                "can't request memory dump for pvc [{named}] while pvc [{associated}] is still associated as the memory dump pvc"
            ),
        )),
    }
}

/// Rejects a claim that has no room for the dump. `cdi`: CDI's configuration, if there is one.
fn decide(vmi: &VirtualMachineInstance, claim: &PersistentVolumeClaim, cdi: Option<&Value>) -> Result<(), ApiError> {
    let kilobytes = memory_dump::claim_size(claim)?.saturating_add(KILO - 1) / KILO;
    let requested = vmi.spec.domain.resources.requests.get("memory");
    let memory = memory_dump::claim_bytes(claim, requested)?;
    let class = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    let needed = with_overhead(memory.saturating_add(DUMP_OVERHEAD), overhead(cdi, class));
    if kilobytes.saturating_mul(KILO) < needed {
        let size = api::quantity::canonical(&Quantity(format!("{kilobytes}k")));
        let needed = like(requested, needed);
        return Err(memory_dump::claim_conflict(claim, format!("pvc size [{size}] should be bigger then [{needed}]")));
    }
    Ok(())
}

/// Returns a number of bytes with a binary suffix, or with a decimal one if the memory of the VMI has none.
fn like(memory: Option<&Quantity>, bytes: i64) -> String {
    match memory {
        Some(memory) if !memory.0.ends_with('i') => api::quantity::canonical(&Quantity(bytes.to_string())),
        _ => api::quantity::bytes(bytes).0,
    }
}

/// Returns the fraction that is added for the file system of a claim of a storage class, 0 to 1.
fn overhead(cdi: Option<&Value>, class: Option<&str>) -> f64 {
    let Some(overheads) = cdi.map(|cdi| &cdi["status"]["filesystemOverhead"]) else {
        return DEFAULT_FILE_SYSTEM_OVERHEAD;
    };
    let read = |value: &Value| value.as_str().and_then(|text| text.parse::<f64>().ok());
    class
        .and_then(|class| read(&overheads["storageClass"][class]))
        .or_else(|| read(&overheads["global"]))
        .filter(|fraction| (0.0..1.0).contains(fraction))
        .unwrap_or(DEFAULT_FILE_SYSTEM_OVERHEAD)
}

/// Returns a size with the overhead of the file system, in whole MiB and at least one. The reference calculates with floating
/// point numbers, too.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "sizes of claims are far below 2^53")]
fn with_overhead(bytes: i64, overhead: f64) -> i64 {
    let mebibytes = ((1.0 + overhead) * bytes as f64 / MEBIBYTE).ceil().max(1.0);
    (mebibytes * MEBIBYTE) as i64
}

/// Rejects a VM with another dump under way.
fn check_request(vm: &VirtualMachine) -> Result<(), ApiError> {
    let Some(request) = dump_request(vm) else { return Ok(()) };
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

/// Rejects a VM whose data another operation needs to hold still.
fn check_lease(vm: &VirtualMachine) -> Result<(), ApiError> {
    match vm.status.as_ref().and_then(|status| status.forbids(Attempt::Operation)) {
        Some(lease) => Err(conflict(vm, format!("can't dump memory: {}", lease.holder()))),
        None => Ok(()),
    }
}

/// Rejects a claim whose name cannot be that of the volume for the dump.
pub(super) fn check_volume(vm: &VirtualMachine, vmi: &VirtualMachineInstance, name: &str) -> Result<(), ApiError> {
    let is_label_byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.len() > MAX_VOLUME_NAME || !name.bytes().all(is_label_byte) {
        return Err(conflict(
            vm,
            format!(
                "pvc [{name}] cannot hold a memory dump: its name must have at most {MAX_VOLUME_NAME} lower case letters, \
                 digits and hyphens"
            ),
        ));
    }
    let of_template = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    let mut volumes = of_template.chain(&vmi.spec.volumes);
    if volumes.any(|volume| volume.name == name && volume.memory_dump.is_none()) {
        return Err(conflict(
            vm,
            format!("pvc [{name}] cannot hold a memory dump: the VM has another volume of this name"),
        ));
    }
    // The entry of a former dump goes before the next one is written.
    let is_of_dump = vmi.spec.volumes.iter().any(|volume| volume.name == name)
        || dump_request(vm).is_some_and(|request| request.claim_name == name);
    if !is_of_dump && hotplug::status_of(vmi, name).is_some_and(|entry| entry.hotplug_volume.is_some()) {
        return Err(conflict(
            vm,
            format!("pvc [{name}] cannot hold a memory dump: the volume of this name is still being detached"),
        ));
    }
    Ok(())
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gates(&call.context.config.current())?;
    let options: MemoryDumpOptions = call.options(request).await?;
    let vm = call.vm().await?;
    let name = claim(&vm, &options)?;
    let vmi = call.vmi().await?;
    check_running(&vmi, "VMI is not running")?;
    check_volume(&vm, &vmi, &name)?;
    let claim = memory_dump::claim(call, &name).await?;
    decide(&vmi, &claim, cdi_config(call).await?.as_ref())?;
    check_request(&vm)?;
    check_lease(&vm)?;
    let request = VirtualMachineMemoryDumpRequest {
        claim_name: name,
        phase: "Associating".to_owned(),
        ..VirtualMachineMemoryDumpRequest::default()
    };
    submit(call, &vm, &request).await
}

/// Reads the configuration of CDI, if it is installed.
async fn cdi_config(call: Call<'_>) -> Result<Option<Value>, ApiError> {
    let resource = ApiResource {
        group: "cdi.kubevirt.io".to_owned(),
        version: "v1beta1".to_owned(),
        api_version: "cdi.kubevirt.io/v1beta1".to_owned(),
        kind: "CDIConfig".to_owned(),
        plural: "cdiconfigs".to_owned(),
    };
    match Api::<DynamicObject>::all_with(call.context.objects.client.clone(), &resource).get("config").await {
        Ok(object) => Ok(Some(object.data)),
        // Without CDI the API server has no such path, and answers with plain text.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(ApiError::Internal(format!("unable to retrieve CDIConfig: {}", message(&error)))),
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
    }

    #[test]
    fn claim_has_room_for_memory_overhead_and_file_system() {
        let vmi = |memory: &str| -> VirtualMachineInstance {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi"},
                "spec": {"domain": {"devices": {}, "resources": {"requests": {"memory": memory}}}},
            }))
            .unwrap()
        };
        let claim = |spec: Value| -> PersistentVolumeClaim {
            serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": spec})).unwrap()
        };
        let sized = |size: &str| {
            claim(
                json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": size}}}),
            )
        };
        let global = |overhead: &str| Some(json!({"status": {"filesystemOverhead": {"global": overhead}}}));
        let of_class = json!({"status": {"filesystemOverhead": {"global": "0.5", "storageClass": {"fast": "0"}}}});
        for (memory, size, cdi, refusal) in [
            // The sizes of virtctl, and a MiB less.
            ("1Gi", "1186Mi", None, ""),
            ("1Gi", "1185Mi", None, "pvc size [1242563k] should be bigger then [1186Mi]"),
            ("1Gi", "1192Mi", global("0.06"), ""),
            ("1Gi", "1191Mi", global("0.06"), "pvc size [1248855k] should be bigger then [1192Mi]"),
            ("900Mi", "1500Mi", global("0.5"), ""),
            ("900Mi", "1100Mi", global("0.5"), "pvc size [1153434k] should be bigger then [1500Mi]"),
            ("900Mi", "1000Mi", Some(of_class), ""),
            ("1G", "1166017k", None, ""),
            ("1G", "1100M", None, "pvc size [1100M] should be bigger then [1166016512]"),
            // Rounded up to a thousand bytes.
            ("1G", "1166016001", None, ""),
            ("1G", "1166016000", None, "pvc size [1166016k] should be bigger then [1166016512]"),
        ] {
            let found = decide(&vmi(memory), &sized(size), cdi.as_ref());
            match refusal {
                "" => assert_eq!(found, Ok(()), "{memory} {size}"),
                _ => assert_eq!(message(found), refusal, "{memory} {size}"),
            }
        }
        assert_eq!(with_overhead(1, 0.0), 1 << 20);
        let vmi = vmi("900Mi");
        assert_eq!(message(decide(&vmi, &claim(json!({"volumeMode": "Block"})), None)), "pvc should be filesystem pvc");
        assert_eq!(
            message(decide(&vmi, &claim(json!({"accessModes": ["ReadOnlyMany"]})), None)),
            "pvc access mode can't be read only"
        );
    }

    #[test]
    fn claim_can_have_the_name_of_the_volume() {
        let spec = |volume: Value| json!({"domain": {"devices": {}}, "volumes": [volume]});
        let (dump, disk) = (
            json!({"name": "a", "memoryDump": {"claimName": "a"}}),
            json!({"name": "a", "containerDisk": {"image": "i"}}),
        );
        for (name, template, running, expected) in [
            ("a", &dump, &dump, ""),
            ("b", &disk, &disk, ""),
            ("a", &disk, &dump, "the VM has another volume of this name"),
            ("a", &dump, &disk, "the VM has another volume of this name"),
            ("data.of-yesterday", &dump, &dump, "its name must have at most 63"),
            (&"a".repeat(64), &dump, &dump, "its name must have at most 63"),
        ] {
            let vm: VirtualMachine = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
                "spec": {"template": {"spec": spec(template.clone())}},
            }))
            .unwrap();
            let vmi: VirtualMachineInstance = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vm"},
                "spec": spec(running.clone()),
            }))
            .unwrap();
            let found = match check_volume(&vm, &vmi, name) {
                Ok(()) => String::new(),
                Err(error) => error.to_string(),
            };
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{name}: {found}");
        }
    }

    #[test]
    fn volume_that_leaves_the_guest_is_not_the_one_of_a_dump() {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vm"},
            "spec": {"domain": {"devices": {}}},
            "status": {"volumeStatus": [{"name": "a", "target": "sda", "phase": "Ready", "hotplugVolume": {}}]},
        }))
        .unwrap();
        let of = |claim: &str| vm(json!({"claimName": claim, "phase": "Failed"}));
        for (vm, name, refused) in [
            (vm(Value::Null), "a", true),
            (of("b"), "a", true),
            // The dump that failed before.
            (of("a"), "a", false),
            (vm(Value::Null), "b", false),
        ] {
            let found = check_volume(&vm, &vmi, name);
            assert_eq!(found.is_err(), refused, "{name} {found:?}");
            assert!(!refused || message(found).ends_with("the volume of this name is still being detached"));
        }
    }
}
