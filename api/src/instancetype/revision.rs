//! Copies of instance types and preferences, kept in ControllerRevisions for the VMs that use them.
//!
//! A copy holds the whole object as it was, so that a VM keeps its shape when the object changes or goes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use thiserror::Error;

use super::{
    API_VERSION, VERSION,
    matcher::{MatchedKind, Role},
    preference::VirtualMachinePreferenceSpec,
    spec::VirtualMachineInstancetypeSpec,
};

/// Label: generation of the object copied.
pub const OBJECT_GENERATION: &str = "instancetype.kubevirt.io/object-generation";
/// Label: kind of the object copied.
pub const OBJECT_KIND: &str = "instancetype.kubevirt.io/object-kind";
/// Label: name of the object copied.
pub const OBJECT_NAME: &str = "instancetype.kubevirt.io/object-name";
/// Label: UID of the object copied.
pub const OBJECT_UID: &str = "instancetype.kubevirt.io/object-uid";
/// Label: version of the object copied.
pub const OBJECT_VERSION: &str = "instancetype.kubevirt.io/object-version";

/// Why a copy or object cannot be used.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum ContentError {
    /// It is of another kind than the VM names it as.
    #[error("it holds a {found}, not {wanted}")]
    Kind {
        /// Kind found.
        found: String,
        /// What was looked for.
        wanted: &'static str,
    },
    /// It is of a version that is not known.
    #[error("it holds version {0}, which is not supported")]
    Version(String),
    /// Its spec cannot be read.
    #[error("its spec cannot be read: {0}")]
    Malformed(String),
}

/// Name of the copy of an object for a VM.
pub fn name(vm: &str, object: &ObjectMeta) -> String {
    let of = |field: &Option<String>| field.clone().unwrap_or_default();
    format!("{vm}-{}-{VERSION}-{}-{}", of(&object.name), of(&object.uid), object.generation.unwrap_or(0)).to_lowercase()
}

/// Labels of the copy of an object.
pub fn labels(kind: MatchedKind, object: &ObjectMeta) -> BTreeMap<String, String> {
    let of = |field: &Option<String>| field.clone().unwrap_or_default();
    BTreeMap::from([
        (OBJECT_GENERATION.to_owned(), object.generation.unwrap_or(0).to_string()),
        (OBJECT_KIND.to_owned(), kind.kind().to_owned()),
        (OBJECT_NAME.to_owned(), of(&object.name)),
        (OBJECT_UID.to_owned(), of(&object.uid)),
        (OBJECT_VERSION.to_owned(), VERSION.to_owned()),
    ])
}

/// The spec of an instance type, from the object or a copy of it.
pub fn instancetype(object: &Value) -> Result<VirtualMachineInstancetypeSpec, ContentError> {
    serde_json::from_value(spec(object, Role::Instancetype)?).map_err(malformed)
}

/// The spec of a preference, from the object or a copy of it.
pub fn preference(object: &Value) -> Result<VirtualMachinePreferenceSpec, ContentError> {
    serde_json::from_value(spec(object, Role::Preference)?).map_err(malformed)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn malformed(error: serde_json::Error) -> ContentError {
    ContentError::Malformed(error.to_string())
}

fn spec(object: &Value, role: Role) -> Result<Value, ContentError> {
    let text = |field: &str| object.get(field).and_then(Value::as_str).unwrap_or_default();
    let (kind, version) = (text("kind"), text("apiVersion"));
    if version != API_VERSION {
        return Err(ContentError::Version(version.to_owned()));
    }
    let wanted = match role {
        Role::Instancetype => "an instance type",
        Role::Preference => "a preference",
    };
    let is_wanted = MatchedKind::ALL
        .into_iter()
        .any(|known| known.kind() == kind && known.is_instancetype() == (role == Role::Instancetype));
    if !is_wanted {
        return Err(ContentError::Kind { found: kind.to_owned(), wanted });
    }
    object.get("spec").cloned().ok_or_else(|| ContentError::Malformed("it has none".to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn copies_are_named_after_vm_and_object() {
        let object = ObjectMeta {
            name: Some("U1.Small".to_owned()),
            uid: Some("0-1".to_owned()),
            generation: Some(3),
            ..ObjectMeta::default()
        };
        assert_eq!(name("web", &object), "web-u1.small-v1beta1-0-1-3");
        let labels = labels(MatchedKind::ClusterInstancetype, &object);
        assert_eq!(labels[OBJECT_KIND], "VirtualMachineClusterInstancetype");
        assert_eq!((labels[OBJECT_GENERATION].as_str(), labels[OBJECT_VERSION].as_str()), ("3", "v1beta1"));
        assert_eq!((labels[OBJECT_NAME].as_str(), labels[OBJECT_UID].as_str()), ("U1.Small", "0-1"));
    }

    #[test]
    fn content_is_of_the_kind_and_version_asked_for() {
        let object = |kind: &str, version: &str| {
            json!({"apiVersion": format!("instancetype.kubevirt.io/{version}"), "kind": kind,
                "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}}})
        };
        let class = instancetype(&object("VirtualMachineClusterInstancetype", "v1beta1")).unwrap();
        assert_eq!(class.cpu.guest, 2);
        let old = instancetype(&object("VirtualMachineInstancetype", "v1alpha1")).unwrap_err();
        assert_eq!(old.to_string(), "it holds version instancetype.kubevirt.io/v1alpha1, which is not supported");
        let other = preference(&object("VirtualMachineInstancetype", "v1beta1")).unwrap_err();
        assert_eq!(other.to_string(), "it holds a VirtualMachineInstancetype, not a preference");
        assert!(preference(&json!({})).is_err());
        let bad = json!({"apiVersion": API_VERSION, "kind": "VirtualMachineInstancetype", "spec": {"cpu": 1}});
        assert!(matches!(instancetype(&bad), Err(ContentError::Malformed(_))));
    }
}
