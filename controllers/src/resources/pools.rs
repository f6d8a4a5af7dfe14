//! VirtualMachinePools, and the objects that they control.

use api::{VirtualMachinePool, owner, pool::GROUP};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

use crate::cache::{Cached, trim_meta};

/// Versions of the group that owner references have: old releases of KubeVirt created VMs of pools with the first one.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];

/// Returns the owner reference of the pool that an object names as its controller.
pub(crate) fn controlling_pool(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    let is_pool = |owner: &&OwnerReference| {
        let version = owner.api_version.strip_prefix(GROUP).and_then(|version| version.strip_prefix('/'));
        owner.kind == VirtualMachinePool::kind(&()) && version.is_some_and(|version| VERSIONS.contains(&version))
    };
    owner::controller(metadata).filter(is_pool)
}

/// Returns true if a pool controls an object.
pub(crate) fn controls(pool: &VirtualMachinePool, metadata: &ObjectMeta) -> bool {
    let Some(reference) = controlling_pool(metadata) else { return false };
    !reference.uid.is_empty()
        && pool.metadata.uid.as_deref() == Some(reference.uid.as_str())
        && pool.metadata.name.as_deref() == Some(reference.name.as_str())
        && pool.metadata.namespace == metadata.namespace
}

impl Cached for VirtualMachinePool {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

kept!(whole VirtualMachinePool written as Pool);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn owner_counts_only_as_a_whole() {
        let pool = json!({
            "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool",
            "metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"selector": {}, "virtualMachineTemplate": {}},
        });
        let pool: VirtualMachinePool = serde_json::from_value(pool).unwrap();
        for (change, controlled) in [
            (json!({}), true),
            (json!({"apiVersion": "pool.kubevirt.io/v1alpha1"}), true),
            (json!({"apiVersion": "pool.kubevirt.io/v2"}), false),
            (json!({"apiVersion": "pool.kubevirt.io.example.org/v1beta1"}), false),
            (json!({"kind": "VirtualMachine"}), false),
            (json!({"name": "other"}), false),
            (json!({"uid": "v"}), false),
            (json!({"uid": ""}), false),
            (json!({"controller": false}), false),
        ] {
            let mut owner = json!({
                "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "name": "p", "uid": "u", "controller": true,
            });
            json_patch::merge(&mut owner, &change);
            let in_namespace = |namespace: &str| {
                serde_json::from_value(json!({"name": "p-0", "namespace": namespace, "ownerReferences": [owner]}))
                    .unwrap()
            };
            assert_eq!(controls(&pool, &in_namespace("n")), controlled, "{change}");
            assert!(!controls(&pool, &in_namespace("elsewhere")), "{change}");
        }
    }
}
