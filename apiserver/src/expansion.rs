//! Reading the VM of `expand-vm-spec`.

use api::VirtualMachine;
use serde_json::Value;

use crate::{error::ApiError, webhooks};

/// Largest VM: what etcd takes.
pub const MAX_VM: usize = 3 << 19;
/// Most values of a VM; see the webhooks.
const MAX_VALUES: usize = 8 << 10;

/// Reads a VM that was sent to `namespace`, with the checks that admission would make of its form.
pub fn read(body: &[u8], namespace: &str) -> Result<VirtualMachine, ApiError> {
    if webhooks::values(body) > MAX_VALUES {
        return Err(ApiError::BadRequest(format!("a VM has at most {MAX_VALUES} values")));
    }
    let raw: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}")))?;
    let mut vm: VirtualMachine = admission::read::object(&raw).map_err(|causes| ApiError::Invalid {
        message: "Object is not a valid VirtualMachine".to_owned(),
        causes: causes.as_slice().iter().map(|cause| cause.message.clone()).collect(),
    })?;
    match vm.metadata.namespace.as_deref() {
        None | Some("") => {}
        Some(own) if own == namespace => {}
        Some(_) => return Err(ApiError::BadRequest(format!("VM namespace must be empty or {namespace}"))),
    }
    // Objects that instance types are looked up in.
    vm.metadata.namespace = Some(namespace.to_owned());
    Ok(vm)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(namespace: &str, spec: Value) -> Vec<u8> {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "vm", "namespace": namespace}, "spec": spec,
        });
        vm.to_string().into_bytes()
    }

    fn spec() -> Value {
        json!({"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}}}}})
    }

    #[test]
    fn vm_is_read_as_strictly_as_by_admission() {
        assert_eq!(read(&vm("", spec()), "ns").unwrap().metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(read(&vm("ns", spec()), "ns").unwrap().metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(
            read(&vm("other", spec()), "ns").err(),
            Some(ApiError::BadRequest("VM namespace must be empty or ns".into()))
        );
        let Err(ApiError::BadRequest(message)) = read(b"{", "ns") else { panic!("accepted") };
        assert!(message.starts_with("Can not unmarshal Request body to struct, error: "), "{message}");
        let mut wrong = spec();
        wrong["template"]["spec"]["unknown"] = json!(1);
        let Err(ApiError::Invalid { message, causes }) = read(&vm("", wrong), "ns") else { panic!("accepted") };
        assert_eq!(message, "Object is not a valid VirtualMachine");
        assert!(causes[0].contains("spec.template.spec.unknown"), "{causes:?}");
    }
}
