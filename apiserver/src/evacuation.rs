//! Giving up the evacuation of a machine.

use api::{subresources::EvacuateCancelOptions, vmi::spec::VirtualMachineInstance};
use json_patch::{Patch, PatchOperation, RemoveOperation, TestOperation, jsonptr::PointerBuf};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::error::ApiError;

/// The node that a machine is to leave, or is on.
pub fn node(vmi: &VirtualMachineInstance) -> Option<&str> {
    let status = vmi.status.as_ref()?;
    [&status.evacuation_node_name, &status.node_name].into_iter().flatten().map(String::as_str).find(|n| !n.is_empty())
}

/// Whether the machine is asked to leave its node.
pub fn is_under_way(vmi: &VirtualMachineInstance) -> bool {
    vmi.status.as_ref().and_then(|status| status.evacuation_node_name.as_ref()).is_some_and(|name| !name.is_empty())
}

/// Refuses to give up while the node itself says that it is drained: the machine would be asked again at once.
pub fn check_node(node: &Node, drain_key: &str) -> Result<(), ApiError> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    if taints.iter().any(|taint| taint.key == drain_key && taint.effect == "NoSchedule") {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        return Err(ApiError::BadRequest(format!("Node \"{name}\" has NodeDrainTaintKey \"{drain_key}:NoSchedule\"")));
    }
    Ok(())
}

/// What changes in the machine. Who names no node means the one that the machine is to leave now.
pub fn patch(vmi: &VirtualMachineInstance, options: &EvacuateCancelOptions) -> Patch {
    let path = PointerBuf::from_tokens(["status", "evacuationNodeName"]);
    let asked = Some(options.evacuation_node_name.as_str()).filter(|name| !name.is_empty());
    let node = asked.or_else(|| vmi.status.as_ref()?.evacuation_node_name.as_deref());
    Patch(vec![
        PatchOperation::Test(TestOperation { path: path.clone(), value: json!(node) }),
        PatchOperation::Remove(RemoveOperation { path }),
    ])
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
    fn drained_node_is_left_whatever_the_user_says() {
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
    fn patch_holds_only_for_the_node_that_the_user_means() {
        let leaving = vmi(json!({"evacuationNodeName": "n2"}));
        for (asked, tested) in [("n1", "n1"), ("", "n2")] {
            let options = EvacuateCancelOptions { evacuation_node_name: asked.into(), dry_run: None };
            assert_eq!(
                json!(patch(&leaving, &options)),
                json!([
                    {"op": "test", "path": "/status/evacuationNodeName", "value": tested},
                    {"op": "remove", "path": "/status/evacuationNodeName"},
                ])
            );
        }
    }

    #[test]
    fn node_to_leave_counts_before_the_node_it_is_on() {
        let leaving = vmi(json!({"evacuationNodeName": "a", "nodeName": "b"}));
        assert_eq!((node(&leaving), is_under_way(&leaving)), (Some("a"), true));
        let staying = vmi(json!({"nodeName": "b"}));
        assert_eq!((node(&staying), is_under_way(&staying)), (Some("b"), false));
        assert_eq!(node(&vmi(json!({}))), None);
    }
}
