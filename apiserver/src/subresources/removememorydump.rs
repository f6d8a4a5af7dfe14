//! `virtualmachines/removememorydump`: detaches the claim of memory dumps.

use api::{VirtualMachine, vm::status::VirtualMachineMemoryDumpRequest};
use axum::response::Response;

use super::common::{
    call::Call,
    memory_dump::{conflict, request, submit},
    specification::{Answer, Specification, VMS},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    listed: false,
    operation: "RemoveMemoryDump",
    description: "Detach the claim of memory dumps",
    ..Specification::put(VMS, "removememorydump", Answer::Accepted, |call, _| Box::pin(serve(call)))
};

/// Rejects a VM without a claim, or with a removal under way.
fn decide(vm: &VirtualMachine) -> Result<VirtualMachineMemoryDumpRequest, ApiError> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    match request(vm) {
        None => Err(conflict(vm, format!("can't remove memory dump association for vm {name}, no association found"))),
        Some(request) if request.remove => {
            Err(conflict(vm, format!("memory dump remove request for pvc [{}] already exists", request.claim_name)))
        }
        Some(request) => Ok(VirtualMachineMemoryDumpRequest {
            claim_name: request.claim_name.clone(),
            phase: "Dissociating".to_owned(),
            remove: true,
            ..VirtualMachineMemoryDumpRequest::default()
        }),
    }
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vm = call.vm().await?;
    let request = decide(&vm)?;
    submit(call, &vm, &request).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm(request: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
            "spec": {"template": {}}, "status": {"memoryDumpRequest": request},
        }))
        .unwrap()
    }

    fn message(result: Result<(), ApiError>) -> String {
        match result {
            Err(ApiError::Conflict { message, .. }) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn claim_is_detached_once() {
        let request = decide(&vm(json!({"claimName": "a", "phase": "Completed"}))).unwrap();
        assert_eq!(json!(request), json!({"claimName": "a", "phase": "Dissociating", "remove": true}));
        let message = |vm: &VirtualMachine| message(decide(vm).map(drop));
        assert!(message(&vm(Value::Null)).ends_with("for vm vm, no association found"));
        let removed = vm(json!({"claimName": "a", "phase": "Dissociating", "remove": true}));
        assert_eq!(message(&removed), "memory dump remove request for pvc [a] already exists");
    }
}
