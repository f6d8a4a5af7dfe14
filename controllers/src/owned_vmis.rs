//! Operations on VMIs that VMs and replica sets own.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance,
    constants::{annotation, event, label},
};
use k8s_openapi::{
    api::core::v1::ObjectReference,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::runtime::{Effect, Kind};

/// Namespace of the firmware UUIDs derived from VM names.
const FIRMWARE_NAMESPACE: Uuid = Uuid::from_u128(0x6a1a_24a1_4061_4607_8bf4_a396_3d0c_5895);

/// Returns the firmware UUID of a VM that has none in its spec.
pub(crate) fn firmware_uuid(vm: &str) -> String {
    Uuid::new_v5(&FIRMWARE_NAMESPACE, vm.as_bytes()).to_string()
}

/// Returns the labels that a VMI gets from a template. Reserved labels hold the node of a VMI and the VMI of a pod. Admission
/// rejects them in templates, but an older template may have them.
pub(crate) fn template_labels(template: &ObjectMeta) -> Option<BTreeMap<String, String>> {
    let mut labels = template.labels.clone()?;
    labels.retain(|key, _| !label::RESERVED_ON_VMI.contains(&key.as_str()));
    Some(labels)
}

/// Returns the annotations that a VMI gets from a template: without a trace context, which admission accepts from virt-controller.
pub(crate) fn template_annotations(template: &ObjectMeta) -> Option<BTreeMap<String, String>> {
    let mut annotations = template.annotations.clone()?;
    annotations.remove(annotation::TRACEPARENT);
    Some(annotations)
}

/// Adds a controller to a VMI that has none, if it is unchanged. Other owners stay.
pub(crate) fn adopt(instance: &VirtualMachineInstance, controller: &OwnerReference) -> Effect {
    let others = instance.metadata.owner_references.iter().flatten().filter(|owner| owner.uid != controller.uid);
    let owners: Vec<&OwnerReference> = others.chain([controller]).collect();
    set_owners(instance, &json!(owners))
}

/// Replaces the owners of a VMI, if it is unchanged.
pub(crate) fn set_owners(instance: &VirtualMachineInstance, owners: &Value) -> Effect {
    let metadata = &instance.metadata;
    let patch = json!({"metadata": {"uid": metadata.uid, "ownerReferences": owners}});
    Effect::merge(Kind::Instance, metadata, patch)
}

/// Creates a VMI. Its owner gets the events.
pub(crate) fn create_vmi(
    namespace: Option<&str>,
    instance: &impl Serialize,
    owner: ObjectReference,
) -> Result<Effect, serde_json::Error> {
    let started = "Started the virtual machine by creating the new virtual machine instance {name}";
    Ok(Effect::create(Kind::Instance, namespace, instance)?.reported(
        owner,
        (event::SUCCESSFUL_CREATE, started),
        (event::FAILED_CREATE, "Error creating virtual machine instance: {error}"),
    ))
}

/// Deletes a VMI. `owner` gets the events.
pub(crate) fn delete_vmi(instance: &VirtualMachineInstance, owner: impl Fn() -> ObjectReference) -> Effect {
    let uid = instance.metadata.uid.as_deref().unwrap_or_default();
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    let stopped = format!("Stopped the virtual machine by deleting the virtual machine instance {uid}");
    Effect::delete(Kind::Instance, &instance.metadata).reported(
        owner(),
        (event::SUCCESSFUL_DELETE, stopped),
        (event::FAILED_DELETE, format!("Error deleting virtual machine instance {name}: {{error}}")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_labels_of_a_template_reach_no_vmi() {
        let labels = |labels: Value| {
            let template: ObjectMeta = serde_json::from_value(json!({"labels": labels})).unwrap();
            json!(template_labels(&template))
        };
        for key in label::RESERVED_ON_VMI {
            assert_eq!(labels(json!({key: "x", "app": "web"})), json!({"app": "web"}), "{key}");
        }
        assert_eq!(labels(json!({"kubevirt.io/size": "small"})), json!({"kubevirt.io/size": "small"}));
        assert_eq!(labels(json!(null)), json!(null));
    }

    #[test]
    fn trace_context_of_a_template_reaches_no_vmi() {
        let annotations = json!({annotation::TRACEPARENT: "00-forged", "a": "b"});
        let template: ObjectMeta = serde_json::from_value(json!({"annotations": annotations})).unwrap();
        assert_eq!(json!(template_annotations(&template)), json!({"a": "b"}));
        assert_eq!(template_annotations(&ObjectMeta::default()), None);
    }

    #[test]
    fn adopted_vmi_keeps_its_other_owners() {
        let owner = |uid: &str, controller: bool| json!({"apiVersion": "v1", "kind": "ConfigMap", "name": uid, "uid": uid, "controller": controller});
        let ours: OwnerReference = serde_json::from_value(owner("vm", true)).unwrap();
        for (owners, expected) in [
            (json!([]), json!(["vm"])),
            (json!([owner("other", false)]), json!(["other", "vm"])),
            (json!([owner("vm", false), owner("other", false)]), json!(["other", "vm"])),
        ] {
            let instance: VirtualMachineInstance = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "m", "namespace": "n", "uid": "u", "resourceVersion": "1", "ownerReferences": owners},
                "spec": {"domain": {"devices": {}}},
            }))
            .unwrap();
            let Effect::Patch { patch, .. } = adopt(&instance, &ours) else { panic!("not a patch") };
            let written = patch["metadata"]["ownerReferences"].as_array().unwrap();
            let uids: Vec<&Value> = written.iter().map(|owner| &owner["uid"]).collect();
            assert_eq!(json!(uids), expected);
        }
    }
}
