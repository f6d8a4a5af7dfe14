//! CRDs of export.kubevirt.io: exports of volumes.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CONDITION, CrdError, Definition, Rule};
use crate::export::VirtualMachineExport;

const OLD: &str = "v1beta1";

const OLD_WARNING: &str =
    "export.kubevirt.io/v1beta1 VirtualMachineExport is now deprecated and will be removed in a future version.";

fn by(key: &str) -> Value {
    json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})
}

const LINK: &[Rule] = &[
    ("backups", || by("name")),
    ("backups[].endpoints", || by("endpoint")),
    ("manifests", || by("type")),
    ("volumes", || by("name")),
    ("volumes[].formats", || by("format")),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachineExport::crd())?
            .rules("status", CONDITION)?
            .rules("status.links.external", LINK)?
            .rules("status.links.internal", LINK)?
            .older_version(OLD, Some(OLD_WARNING))
            .without_conversion()
            .finish()?,
    ])
}
