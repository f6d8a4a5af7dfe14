//! Patches of restored VMs: JSON patches, each one operation as text.
//!
//! The dialect is that of the API server: `replace` creates a missing member, and `test` with null passes on one. Clones depend on it,
//! for interfaces without MAC address.

use api::VirtualMachine;
use json_patch::{AddOperation, PatchOperation};
use serde_json::Value;
use thiserror::Error;

/// Paths beneath which a patch may change a VM.
const PATHS: [&str; 3] = ["/spec/", "/metadata/labels/", "/metadata/annotations/"];

/// The error of a patch.
#[derive(Debug, Error)]
pub enum PatchError {
    /// It is no operation. The text of the reference, which also refuses some that are.
    #[error("patch format is not valid - one \":\" expected in a single key-value json patch: {0}")]
    Format(String),
    /// It would change another part of the VM.
    #[error("patching is valid only for elements under /spec/ only:  \"path\": \"{0}\"")]
    Path(String),
    /// Repeated copies of a part into itself grow without bound.
    #[error("operation copy is not supported: {0}")]
    Copy(String),
    /// It does not fit the VM.
    #[error("failed to apply patch for VM {patch}: {error}")]
    Unfit {
        /// The patch.
        patch: String,
        /// The reason.
        error: String,
    },
}

/// Parses a patch, and checks what it changes.
///
/// # Errors
/// Fails for other text than one operation, and for paths outside of spec, labels and annotations.
pub fn parse(text: &str) -> Result<PatchOperation, PatchError> {
    let operation: PatchOperation =
        serde_json::from_str(text).map_err(|_| PatchError::Format(text.trim_matches(['{', '}']).to_owned()))?;
    let from = match &operation {
        PatchOperation::Copy(_) => return Err(PatchError::Copy(text.to_owned())),
        PatchOperation::Move(operation) => Some(operation.from.as_str()),
        _ => None,
    };
    for path in [Some(operation.path().as_str()), from].into_iter().flatten() {
        if !PATHS.iter().any(|prefix| path.starts_with(prefix)) {
            return Err(PatchError::Path(path.to_owned()));
        }
    }
    Ok(operation)
}

/// Applies patches to a VM in their order.
///
/// # Errors
/// Fails at the first patch that is none, or does not fit the VM.
pub fn apply(patches: &[String], vm: &VirtualMachine) -> Result<VirtualMachine, PatchError> {
    let unfit = |patch: &String, error: String| PatchError::Unfit { patch: patch.clone(), error };
    let mut object = serde_json::to_value(vm).map_err(|error| PatchError::Format(error.to_string()))?;
    for text in patches {
        let operation = match parse(text)? {
            PatchOperation::Replace(replace) if is_missing_member(&object, replace.path.as_str()) => {
                PatchOperation::Add(AddOperation { path: replace.path, value: replace.value })
            }
            PatchOperation::Test(test) if test.value.is_null() && is_missing_member(&object, test.path.as_str()) => {
                continue;
            }
            operation => operation,
        };
        json_patch::patch(&mut object, &[operation]).map_err(|error| unfit(text, error.to_string()))?;
    }
    serde_json::from_value(object)
        .map_err(|error| PatchError::Unfit { patch: patches.join(","), error: error.to_string() })
}

/// Returns true for a path to a member that its object does not have.
fn is_missing_member(object: &Value, path: &str) -> bool {
    let parent = path.rsplit_once('/').and_then(|(parent, _)| object.pointer(parent));
    parent.is_some_and(Value::is_object) && object.pointer(path).is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm() -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "labels": {"a": "b"}},
            "spec": {"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {"interfaces": [{"name": "default"}]}}}}},
        }))
        .unwrap()
    }

    #[test]
    fn only_spec_labels_and_annotations_can_be_patched() {
        for (text, error) in [
            (r#"{"op": "replace", "path": "/spec/running", "value": false}"#, ""),
            (r#"{"op": "add", "path": "/metadata/annotations/a", "value": "b:c,{d}"}"#, ""),
            (r#"{"op": "move", "from": "/metadata/labels/a", "path": "/metadata/labels/b"}"#, ""),
            (r#"{"op": "move", "from": "/metadata/name", "path": "/spec/a"}"#, "patching is valid only"),
            (r#"{"op": "copy", "from": "/spec/template", "path": "/spec/template/a"}"#, "operation copy"),
            (r#"{"op": "replace", "path": "/metadata/name", "value": "a"}"#, "patching is valid only"),
            (r#"{"op": "remove", "path": "/spec"}"#, "patching is valid only"),
            (r#"{"op": "jump", "path": "/spec/a"}"#, "patch format"),
            ("[]", "patch format"),
        ] {
            let found = parse(text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(found.starts_with(error) && found.is_empty() == error.is_empty(), "{text}: {found}");
        }
    }

    #[test]
    fn missing_members_are_replaced_as_the_api_server_does() {
        let mac = "/spec/template/spec/domain/devices/interfaces/0/macAddress";
        let patches = [
            json!({"op": "test", "path": mac, "value": null}),
            json!({"op": "replace", "path": mac, "value": "02:00:00:00:00:01"}),
            json!({"op": "remove", "path": "/metadata/labels/a"}),
        ];
        let patched = apply(&patches.map(|patch| patch.to_string()), &vm()).unwrap();
        let interfaces = patched.spec.template.spec.unwrap().domain.devices.interfaces;
        assert_eq!(interfaces[0].mac_address.as_deref(), Some("02:00:00:00:00:01"));
        assert!(patched.metadata.labels.unwrap_or_default().is_empty());
        for (unfit, text) in [
            (json!({"op": "remove", "path": "/metadata/labels/x"}), "failed to apply patch"),
            (json!({"op": "replace", "path": "/spec/a/b", "value": 1}), "failed to apply patch"),
            (json!({"op": "replace", "path": "/spec/runStrategy", "value": 1}), "failed to apply patch"),
            (json!({"op": "replace", "path": "/status/ready", "value": true}), "patching is valid only"),
        ] {
            let error = apply(&[unfit.to_string()], &vm()).unwrap_err().to_string();
            assert!(error.starts_with(text), "{unfit}: {error}");
        }
    }
}
