//! Memory that the caches take for a VM, its VMI, its pod and its claim.

use api::{VirtualMachine, VirtualMachineInstance, vmi::volumes::Volume};
use k8s_openapi::api::{apps::v1::ControllerRevision, core::v1::PersistentVolumeClaim};
use serde_json::{Value, json};

use super::{claims::CachedClaim, instancetype_revisions::InstancetypeRevision, pods::CachedPod};
use crate::cache::Cached;

/// An object has room for its optional parts, unless these are boxed. Before they were, a VMI had 5 KiB and a volume 900 bytes.
#[test]
fn objects_have_no_room_for_large_parts_that_few_of_them_have() {
    for (name, size, limit) in [
        ("VM", size_of::<VirtualMachine>(), 3600),
        ("VMI", size_of::<VirtualMachineInstance>(), 3200),
        ("volume", size_of::<Volume>(), 360),
        ("pod", size_of::<CachedPod>(), 1300),
        ("claim", size_of::<CachedClaim>(), 720),
    ] {
        assert!(size <= limit, "{name}: {size} bytes, limit {limit}");
    }
}

fn metadata() -> Value {
    json!({
        "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1",
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "o"}],
        "managedFields": [{"manager": "m", "operation": "Update"}],
    })
}

#[test]
fn kept_lists_have_no_room_for_more_entries() {
    let template = json!({"spec": {"domain": {"devices": {"disks": [{"name": "d"}]}}, "volumes": [{"name": "d"}]}});
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata(), "spec": {"template": template}});
    let mut vm: VirtualMachine = serde_json::from_value(vm).unwrap();
    vm.trim();
    let spec = vm.spec.template.spec.unwrap();
    assert_eq!((spec.volumes.capacity(), spec.domain.devices.disks.capacity()), (1, 1));
    assert_eq!(vm.metadata.managed_fields, None);
    assert_eq!(vm.metadata.annotations, Some([].into()));
    let claim = json!({"metadata": metadata(), "spec": {"accessModes": ["ReadWriteOnce"]}});
    let claim = CachedClaim::from(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap());
    assert_eq!(claim.access_modes.capacity(), 1);
    assert_eq!(claim.metadata.owner_references.unwrap().capacity(), 1);
}

#[test]
fn copies_of_an_instance_type_share_its_text() {
    let copy = |name: &str, cpus: u32| {
        let data = json!({"metadata": {"name": name}, "spec": {"cpu": {"guest": cpus}}});
        let revision = json!({"metadata": {"name": name}, "revision": 1, "data": data});
        InstancetypeRevision::from(serde_json::from_value::<ControllerRevision>(revision).unwrap())
    };
    let (first, second, other) = (copy("first", 12345), copy("second", 12345), copy("third", 54321));
    assert!(std::sync::Arc::ptr_eq(&first.object, &second.object));
    assert_ne!(first.object, other.object);
    drop((first, second, other));
    assert!(copy("fourth", 12345).object.contains("12345"));
}
