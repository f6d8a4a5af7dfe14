//! `virtualmachines/removememorydump`: detaches the claim of memory dumps.

use api::VirtualMachine;
use axum::response::Response;

use super::common::{
    call::Call,
    memory_dump::{NOT_AVAILABLE, conflict, request},
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
fn decide(vm: &VirtualMachine) -> Result<(), ApiError> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    match request(vm) {
        None => Err(conflict(vm, format!("can't remove memory dump association for vm {name}, no association found"))),
        Some(request) if request.remove => {
            Err(conflict(vm, format!("memory dump remove request for pvc [{}] already exists", request.claim_name)))
        }
        Some(_) => Ok(()),
    }
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    decide(&call.vm().await?)?;
    Err(NOT_AVAILABLE)
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
        assert_eq!(decide(&vm(json!({"claimName": "a", "phase": "Completed"}))), Ok(()));
        assert!(message(decide(&vm(Value::Null))).ends_with("for vm vm, no association found"));
        let removed = vm(json!({"claimName": "a", "phase": "Dissociating", "remove": true}));
        assert_eq!(message(decide(&removed)), "memory dump remove request for pvc [a] already exists");
    }
}
