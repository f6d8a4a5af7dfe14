//! CRDs of plugin.kubevirt.io: plugins.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CrdError, Definition, Rule};
use crate::plugin::Plugin;

fn not_empty() -> Value {
    json!({"minLength": 1})
}

const SPEC: &[Rule] = &[
    ("domainHooks[].cel.expression", not_empty),
    ("domainHooks[].sidecar.socketPath", not_empty),
    ("nodeHooks[].socket", not_empty),
    ("nodeHooks[].permittedHooks", || json!({"minItems": 1})),
    ("mutatingAdmissionPolicies[].name", not_empty),
    ("mutatingAdmissionWebhooks[].name", not_empty),
    ("validatingAdmissionPolicies[].name", not_empty),
    ("validatingAdmissionWebhooks[].name", not_empty),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![Definition::new(&Plugin::crd())?.rules("spec", SPEC)?.without_status_subresource().finish()?])
}
