//! Copies of instance types and preferences in ControllerRevisions, for the VMs that use them.
//!
//! A copy contains the whole object, so that a VM keeps its resources when the object changes or is deleted. Copies outlive the
//! versions of their kinds: those of earlier releases are read as well.
//!
//! ```text
//! v1beta1            the object
//! v1alpha2, v1alpha1 the object; all fields have the same meaning in v1beta1
//! v1alpha1, first    {apiVersion, spec}: no kind, and the spec as JSON in base64
//! ```

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use super::{
    API_VERSION, GROUP, VERSION,
    matcher::{MatchedKind, Role},
    preference::VirtualMachinePreferenceSpec,
    spec::VirtualMachineInstancetypeSpec,
};
use crate::{names, quantity};

/// Label: generation of the copied object.
pub const OBJECT_GENERATION: &str = "instancetype.kubevirt.io/object-generation";
/// Label: kind of the copied object.
pub const OBJECT_KIND: &str = "instancetype.kubevirt.io/object-kind";
/// Label: name of the copied object.
pub const OBJECT_NAME: &str = "instancetype.kubevirt.io/object-name";
/// Label: UID of the copied object.
pub const OBJECT_UID: &str = "instancetype.kubevirt.io/object-uid";
/// Label: version of the copied object.
pub const OBJECT_VERSION: &str = "instancetype.kubevirt.io/object-version";

/// Supported versions.
const VERSIONS: [&str; 3] = [VERSION, "v1alpha2", "v1alpha1"];

/// Reasons why a copy or object cannot be used.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum ContentError {
    /// The kind does not match the reference.
    #[error("it holds a {found}, not {wanted}")]
    Kind {
        /// Actual kind.
        found: String,
        /// Expected kind.
        wanted: &'static str,
    },
    /// The version is unknown.
    #[error("it holds version {0}, which is not supported")]
    Version(String),
    /// The spec is invalid.
    #[error("its spec cannot be read: {0}")]
    Malformed(String),
}

/// Returns the name of the copy of an object for a VM.
pub fn name(vm: &str, object: &ObjectMeta) -> String {
    let of = |field: &Option<String>| field.clone().unwrap_or_default();
    let end = format!("-{VERSION}-{}-{}", of(&object.uid), object.generation.unwrap_or(0));
    names::object_name(&format!("{vm}-{}", of(&object.name)), &end).to_lowercase()
}

/// Returns the labels of the copy of an object.
pub fn labels(kind: MatchedKind, object: &ObjectMeta) -> BTreeMap<String, String> {
    let of = |field: &Option<String>| field.clone().unwrap_or_default();
    BTreeMap::from([
        (OBJECT_GENERATION.to_owned(), object.generation.unwrap_or(0).to_string()),
        (OBJECT_KIND.to_owned(), kind.kind().to_owned()),
        (OBJECT_NAME.to_owned(), names::label_value(&of(&object.name))),
        (OBJECT_UID.to_owned(), of(&object.uid)),
        (OBJECT_VERSION.to_owned(), VERSION.to_owned()),
    ])
}

/// Returns the spec of an instance type, from the object or a copy of it.
pub fn instancetype(object: &Value) -> Result<VirtualMachineInstancetypeSpec, ContentError> {
    serde_json::from_value(spec(object, Role::Instancetype)?).map_err(malformed)
}

/// Returns the spec of a preference, from the object or a copy of it.
pub fn preference(object: &Value) -> Result<VirtualMachinePreferenceSpec, ContentError> {
    serde_json::from_value(spec(object, Role::Preference)?).map_err(malformed)
}

/// Returns a copied object in the present version.
pub fn upgraded(object: &Value, kind: MatchedKind, metadata: &ObjectMeta) -> Result<Value, ContentError> {
    let spec = if kind.is_instancetype() {
        serde_json::to_value(instancetype(object)?)
    } else {
        serde_json::to_value(preference(object)?)
    };
    let spec = spec.map_err(malformed)?;
    Ok(json!({"apiVersion": API_VERSION, "kind": kind.kind(), "metadata": metadata, "spec": spec}))
}

/// Returns true if a copy equals the object. Quantities are compared by value, since not every writer preserves their text.
pub fn is_copy_of(copy: &Value, object: &Value, role: Role) -> bool {
    match role {
        Role::Instancetype => agree(instancetype(copy), instancetype(object)),
        Role::Preference => agree(preference(copy), preference(object)),
    }
}

fn agree<T: Serialize>(copy: Result<T, ContentError>, object: Result<T, ContentError>) -> bool {
    let (Ok(copy), Ok(object)) = (copy, object) else { return false };
    let (Ok(copy), Ok(object)) = (serde_json::to_value(copy), serde_json::to_value(object)) else { return false };
    same(&copy, &object)
}

fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let is_same = |(key, value): (&String, &Value)| other.get(key).is_some_and(|found| same(value, found));
            one.len() == other.len() && one.iter().all(is_same)
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(value, found)| same(value, found))
        }
        (Value::String(one), Value::String(other)) => {
            let canonical = |text: &String| quantity::canonical(&Quantity(text.clone()));
            one == other || canonical(one) == canonical(other)
        }
        _ => one == other,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn malformed(error: serde_json::Error) -> ContentError {
    ContentError::Malformed(error.to_string())
}

fn spec(object: &Value, role: Role) -> Result<Value, ContentError> {
    let text = |field: &str| object.get(field).and_then(Value::as_str).unwrap_or_default();
    let (kind, version) = (text("kind"), text("apiVersion"));
    let bare = object.get("spec").filter(|spec| kind.is_empty() && spec.is_string());
    let is_known = |version: &str| {
        let parts = version.split_once('/');
        parts.is_some_and(|(group, version)| group == GROUP && VERSIONS.contains(&version))
    };
    // The first copies may lack their version.
    if !is_known(version) && (bare.is_none() || !version.is_empty()) {
        return Err(ContentError::Version(version.to_owned()));
    }
    let wanted = match role {
        Role::Instancetype => "an instance type",
        Role::Preference => "a preference",
    };
    let other = |found: &str| ContentError::Kind { found: found.to_owned(), wanted };
    if let Some(packed) = bare {
        let spec = unpacked(packed)?;
        // Instance types always have memory, preferences never.
        return match (role, spec.get("memory").is_some()) {
            (Role::Instancetype, true) | (Role::Preference, false) => Ok(spec),
            (Role::Instancetype, false) => Err(other("spec of a preference")),
            (Role::Preference, true) => Err(other("spec of an instance type")),
        };
    }
    let is_wanted = MatchedKind::ALL
        .into_iter()
        .any(|known| known.kind() == kind && known.is_instancetype() == (role == Role::Instancetype));
    if !is_wanted {
        return Err(other(kind));
    }
    object.get("spec").cloned().ok_or_else(|| ContentError::Malformed("it has none".to_owned()))
}

/// Decodes the spec in a copy of the first form.
fn unpacked(packed: &Value) -> Result<Value, ContentError> {
    let bytes = ByteString::deserialize(packed).map_err(malformed)?;
    serde_json::from_slice(&bytes.0).map_err(malformed)
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
        let (long, short) = (name(&"a".repeat(253), &object), name(&"a".repeat(169), &object));
        assert!(long.len() == 253 && long.ends_with("-v1beta1-0-1-3"), "{long}");
        assert_eq!(short, format!("{}-u1.small-v1beta1-0-1-3", "a".repeat(169)));
        let labels = labels(MatchedKind::ClusterInstancetype, &object);
        assert_eq!(labels[OBJECT_KIND], "VirtualMachineClusterInstancetype");
        assert_eq!((labels[OBJECT_GENERATION].as_str(), labels[OBJECT_VERSION].as_str()), ("3", "v1beta1"));
        assert_eq!((labels[OBJECT_NAME].as_str(), labels[OBJECT_UID].as_str()), ("U1.Small", "0-1"));
    }

    #[test]
    fn content_must_have_the_requested_kind_and_version() {
        let object = |kind: &str, version: &str| {
            json!({"apiVersion": format!("instancetype.kubevirt.io/{version}"), "kind": kind,
                "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}}})
        };
        let class = instancetype(&object("VirtualMachineClusterInstancetype", "v1beta1")).unwrap();
        assert_eq!(class.cpu.guest, 2);
        for known in ["v1alpha1", "v1alpha2"] {
            assert_eq!(instancetype(&object("VirtualMachineInstancetype", known)).unwrap(), class);
        }
        let odd = instancetype(&object("VirtualMachineInstancetype", "v2")).unwrap_err();
        assert_eq!(odd.to_string(), "it holds version instancetype.kubevirt.io/v2, which is not supported");
        let other = preference(&object("VirtualMachineInstancetype", "v1beta1")).unwrap_err();
        assert_eq!(other.to_string(), "it holds a VirtualMachineInstancetype, not a preference");
        assert!(preference(&json!({})).is_err());
        let api_version = super::super::API_VERSION;
        let bad = json!({"apiVersion": api_version, "kind": "VirtualMachineInstancetype", "spec": {"cpu": 1}});
        assert!(matches!(instancetype(&bad), Err(ContentError::Malformed(_))));
    }

    #[test]
    fn former_copies_are_upgraded_with_the_fields_that_they_have() {
        let spec = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
        let metadata = ObjectMeta { name: Some("small".to_owned()), ..ObjectMeta::default() };
        let kind = MatchedKind::ClusterInstancetype;
        let former = json!({
            "apiVersion": "instancetype.kubevirt.io/v1alpha2", "kind": "VirtualMachineClusterInstancetype", "spec": spec,
        });
        let wanted = json!({
            "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
            "metadata": {"name": "small"}, "spec": spec,
        });
        for copy in [former.clone(), bare("", &spec)] {
            assert_eq!(upgraded(&copy, kind, &metadata), Ok(wanted.clone()), "{copy}");
        }
        assert!(upgraded(&former, MatchedKind::ClusterPreference, &metadata).is_err());
    }

    #[test]
    fn copies_are_distinguished_from_other_objects() {
        let object = |guest: &str, annotations: Value| {
            json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineInstancetype",
                "spec": {"cpu": {"guest": 2}, "memory": {"guest": guest}, "annotations": annotations}})
        };
        let class = object("2Gi", json!({"a": "b"}));
        for (copy, want) in [
            (class.clone(), true),
            (object("2048Mi", json!({"a": "b"})), true),
            (object("2058Mi", json!({"a": "b"})), false),
            (object("2Gi", json!({"a": "c"})), false),
            (object("2Gi", json!({"a": "b", "c": "d"})), false),
            (object("2Gi", Value::Null), false),
            (json!({}), false),
        ] {
            assert_eq!(is_copy_of(&copy, &class, Role::Instancetype), want, "{copy}");
        }
        let wish = |bus: &str| {
            json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachinePreference",
                "spec": {"devices": {"preferredDiskBus": bus}}})
        };
        assert!(is_copy_of(&wish("sata"), &wish("sata"), Role::Preference));
        assert!(!is_copy_of(&wish("scsi"), &wish("sata"), Role::Preference));
        assert!(!is_copy_of(&class, &wish("sata"), Role::Preference));
    }

    /// Returns a copy in the form of the first releases.
    fn bare(version: &str, spec: &Value) -> Value {
        let mut copy = json!({"spec": ByteString(spec.to_string().into_bytes())});
        if !version.is_empty() {
            copy["apiVersion"] = json!(version);
        }
        copy
    }

    #[test]
    fn copies_of_earlier_releases_are_read() {
        let class = json!({
            "cpu": {"guest": 4, "model": "Skylake-Server", "dedicatedCPUPlacement": true, "isolateEmulatorThread": true},
            "memory": {"guest": "8Gi", "hugepages": {"pageSize": "1Gi"}},
            "gpus": [{"name": "g", "deviceName": "v/d"}], "ioThreadsPolicy": "auto", "launchSecurity": {"sev": {}},
        });
        let wish = json!({
            "clock": {"preferredClockOffset": {"timezone": "Europe/Rome"}},
            "cpu": {"preferredCPUTopology": "preferCores"},
            "devices": {"preferredDiskBus": "virtio", "preferredDiskDedicatedIoThread": true, "preferredTPM": {}},
            "firmware": {"preferredUseEfi": true, "preferredUseSecureBoot": true},
            "machine": {"preferredMachineType": "pc-q35-rhel8.2"},
        });
        let v1alpha1 = "instancetype.kubevirt.io/v1alpha1";
        for version in [v1alpha1, ""] {
            let read = instancetype(&bare(version, &class)).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), class, "nothing is lost");
            assert_eq!(serde_json::to_value(preference(&bare(version, &wish)).unwrap()).unwrap(), wish);
        }
        let whole = |kind: &str, spec: &Value| json!({"apiVersion": v1alpha1, "kind": kind, "spec": spec});
        let of_cluster = preference(&whole("VirtualMachineClusterPreference", &wish)).unwrap();
        assert_eq!(serde_json::to_value(of_cluster).unwrap(), wish);
        // An instance type is not accepted as a preference, and vice versa.
        for (found, want) in [
            (preference(&bare("", &class)).map(|_| ()), "it holds a spec of an instance type, not a preference"),
            (instancetype(&bare("", &wish)).map(|_| ()), "it holds a spec of a preference, not an instance type"),
            (instancetype(&bare("v1", &class)).map(|_| ()), "it holds version v1, which is not supported"),
        ] {
            assert_eq!(found.unwrap_err().to_string(), want);
        }
        for text in ["%", "e30", "eyJ4"] {
            let copy = json!({"apiVersion": v1alpha1, "spec": text});
            assert!(matches!(instancetype(&copy), Err(ContentError::Malformed(_))), "{text}");
        }
    }
}
