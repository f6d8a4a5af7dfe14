//! `virtualmachines/evacuate/cancel` and `virtualmachineinstances/evacuate/cancel`: cancels the evacuation of a VMI.

use api::{VirtualMachineInstance, subresources::EvacuateCancelOptions};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use json_patch::{Patch, PatchOperation, RemoveOperation, TestOperation, jsonptr::PointerBuf};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::PatchParams};
use serde_json::json;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS, VMS},
};
use crate::{
    clients::{objects::refusal, patches},
    requests::error::{ApiError, empty_response},
};

pub(super) static OF_VM: Specification = Specification {
    options: Some(schema::options::<EvacuateCancelOptions>),
    dry_run: true,
    operation: "vm-evacuatecancel",
    description: "Give up the evacuation of a VirtualMachine",
    ..Specification::put(VMS, NAME, Answer::Empty, |call, request| {
        Box::pin(async move { serve(call, call.vmi_of_vm().await?, request).await })
    })
};

pub(super) static OF_VMI: Specification = Specification {
    options: Some(schema::options::<EvacuateCancelOptions>),
    dry_run: true,
    operation: "vmi-evacuatecancel",
    description: "Cancel the evacuation of a VM or VMI",
    ..Specification::put(VMIS, NAME, Answer::Empty, |call, request| {
        Box::pin(async move { serve(call, call.vmi().await?, request).await })
    })
};

const NAME: &str = "evacuate/cancel";

/// Returns the node that a VMI is evacuated from, or runs on.
fn node(vmi: &VirtualMachineInstance) -> Option<&str> {
    let status = vmi.status.as_ref()?;
    [&status.evacuation_node_name, &status.node_name].into_iter().flatten().map(String::as_str).find(|n| !n.is_empty())
}

/// Returns true while a VMI is evacuated.
fn is_under_way(vmi: &VirtualMachineInstance) -> bool {
    vmi.status.as_ref().and_then(|status| status.evacuation_node_name.as_ref()).is_some_and(|name| !name.is_empty())
}

/// Rejects a node with the drain taint: the evacuation would start again at once.
fn check_node(node: &Node, drain_key: &str) -> Result<(), ApiError> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    if taints.iter().any(|taint| taint.key == drain_key && taint.effect == "NoSchedule") {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        return Err(ApiError::BadRequest(format!("Node \"{name}\" has NodeDrainTaintKey \"{drain_key}:NoSchedule\"")));
    }
    Ok(())
}

/// Returns the patch of the VMI. Options without a node mean the current one.
fn decide(vmi: &VirtualMachineInstance, options: &EvacuateCancelOptions) -> Patch {
    let path = PointerBuf::from_tokens(["status", "evacuationNodeName"]);
    let named = Some(options.evacuation_node_name.as_str()).filter(|name| !name.is_empty());
    let node = named.or_else(|| vmi.status.as_ref()?.evacuation_node_name.as_deref());
    Patch(vec![
        PatchOperation::Test(TestOperation { path: path.clone(), value: json!(node) }),
        PatchOperation::Remove(RemoveOperation { path }),
    ])
}

async fn serve(call: Call<'_>, vmi: VirtualMachineInstance, request: Request<Body>) -> Result<Response, ApiError> {
    let failed = |error: kube::Error| refusal(&error);
    let objects = &call.context.objects;
    let drain_key = call.context.config.current().node_drain_taint_key.clone();
    if !drain_key.is_empty()
        && let Some(name) = node(&vmi)
    {
        let node = Api::<Node>::all(objects.client.clone()).get(name).await.map_err(failed)?;
        check_node(&node, &drain_key)?;
    }
    if is_under_way(&vmi) {
        let (options, dry_run) = call.options_with_dry_run::<EvacuateCancelOptions>(request).await?;
        let params = PatchParams { dry_run, ..PatchParams::default() };
        let vmis = objects.vmis(&call.object.namespace);
        patches::send(vmis, None, &call.object.name, &params, decide(&vmi, &options)).await.map_err(failed)?;
    }
    Ok(empty_response(StatusCode::OK))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmi(status: serde_json::Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi"},
            "spec": {"domain": {"devices": {}}}, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn evacuation_of_a_drained_node_is_not_cancelled() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n1"},
            "spec": {"taints": [{"key": "kubevirt.io/drain", "effect": "NoSchedule"}]},
        }))
        .unwrap();
        assert_eq!(
            check_node(&node, "kubevirt.io/drain"),
            Err(ApiError::BadRequest("Node \"n1\" has NodeDrainTaintKey \"kubevirt.io/drain:NoSchedule\"".to_owned()))
        );
        assert_eq!(check_node(&node, "other"), Ok(()));
    }

    #[test]
    fn patch_tests_the_node_in_the_options() {
        let leaving = vmi(json!({"evacuationNodeName": "n2"}));
        for (named, tested) in [("n1", "n1"), ("", "n2")] {
            let options = EvacuateCancelOptions { evacuation_node_name: named.into(), dry_run: None };
            assert_eq!(
                json!(decide(&leaving, &options)),
                json!([
                    {"op": "test", "path": "/status/evacuationNodeName", "value": tested},
                    {"op": "remove", "path": "/status/evacuationNodeName"},
                ])
            );
        }
    }

    #[test]
    fn evacuated_node_precedes_the_current_node() {
        let leaving = vmi(json!({"evacuationNodeName": "a", "nodeName": "b"}));
        assert_eq!((node(&leaving), is_under_way(&leaving)), (Some("a"), true));
        let staying = vmi(json!({"nodeName": "b"}));
        assert_eq!((node(&staying), is_under_way(&staying)), (Some("b"), false));
        assert_eq!(node(&vmi(json!({}))), None);
    }
}
