//! Which object controls another.
//!
//! The creator of an object writes its owner references. A UID alone therefore proves nothing: an owner counts only if API version, kind,
//! name, UID and the controller mark all agree.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

/// Returns the owner reference of the object's controller.
#[must_use]
pub fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// Returns the owner reference of the object's controller if that is of kind `K`.
#[must_use]
pub fn controller_of_kind<K: Resource<DynamicType = ()>>(meta: &ObjectMeta) -> Option<&OwnerReference> {
    controller(meta).filter(|owner| owner.kind == K::kind(&()) && owner.api_version == K::api_version(&()))
}

/// True when `owner`, an object of the same namespace, controls the object.
#[must_use]
pub fn is_controlled_by<K: Resource<DynamicType = ()>>(meta: &ObjectMeta, owner: &K) -> bool {
    let of = owner.meta();
    let Some(reference) = controller_of_kind::<K>(meta) else { return false };
    !reference.uid.is_empty()
        && of.uid.as_deref() == Some(reference.uid.as_str())
        && of.name.as_deref() == Some(reference.name.as_str())
        && of.namespace == meta.namespace
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::VirtualMachineInstance;

    fn meta(namespace: &str, owners: &Value) -> ObjectMeta {
        serde_json::from_value(json!({"name": "p", "namespace": namespace, "ownerReferences": owners})).unwrap()
    }

    fn vmi() -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": {"domain": {"devices": {}}},
        }))
        .unwrap()
    }

    #[test]
    fn cve_2025_64435_an_owner_counts_only_as_a_whole() {
        let owner = |change: Value| {
            let mut owner = json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "m", "uid": "u", "controller": true,
            });
            owner.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            owner
        };
        for (change, controlled) in [
            (json!({}), true),
            (json!({"blockOwnerDeletion": true}), true),
            (json!({"apiVersion": "kubevirt.io/v1alpha3"}), false),
            (json!({"apiVersion": "example.org/v1"}), false),
            (json!({"apiVersion": "kubevirt.io.example.org/v1"}), false),
            (json!({"kind": "Invented"}), false),
            (json!({"kind": "VirtualMachine"}), false),
            (json!({"name": "other"}), false),
            (json!({"uid": "v"}), false),
            (json!({"uid": ""}), false),
            (json!({"controller": false}), false),
            (json!({"controller": null}), false),
        ] {
            assert_eq!(is_controlled_by(&meta("n", &json!([owner(change.clone())])), &vmi()), controlled, "{change}");
        }
        let other = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "x"});
        assert!(is_controlled_by(&meta("n", &json!([other, owner(json!({}))])), &vmi()));
        assert!(!is_controlled_by(&meta("elsewhere", &json!([owner(json!({}))])), &vmi()));
        assert!(!is_controlled_by(&meta("n", &json!([])), &vmi()));
        let mut without_uid = vmi();
        without_uid.metadata.uid = None;
        assert!(!is_controlled_by(&meta("n", &json!([owner(json!({"uid": ""}))])), &without_uid));
    }

    #[test]
    fn the_controller_is_of_the_kind_or_none() {
        let of_vmi = json!([{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "m", "uid": "u", "controller": true,
        }]);
        assert!(controller_of_kind::<VirtualMachineInstance>(&meta("n", &of_vmi)).is_some());
        assert!(controller_of_kind::<crate::VirtualMachine>(&meta("n", &of_vmi)).is_none());
        assert_eq!(controller(&meta("n", &of_vmi)).map(|owner| owner.name.as_str()), Some("m"));
    }
}
