//! Admission of manifests as users write them. Valid ones are accepted and defaulted, invalid ones are refused with a message that
//! names the field. No VM is started.

mod accepted;
mod instancetypes;
mod invalid_objects;
mod invalid_vms;
mod presets;
mod unsupported;

use serde_json::{Value, json};

/// Returns a valid VM.
fn plain() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "plain"},
        "spec": {"runStrategy": "Halted", "template": {"metadata": {"labels": {"app": "plain"}}, "spec": {
            "domain": {
                "memory": {"guest": "256Mi"},
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "containerDisk": {"image": "registry.example/web:1"}}],
        }}},
    })
}
