//! Tree of the objects that a VM or VMI depends on.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Label of a node with the type of the dependency (`compute`, `config`, `storage`, `network`).
pub const DEPENDENCY_TYPE: &str = "kubevirt.io/dependency-type";

/// Options of `objectgraph`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectGraphOptions {
    /// Include optional dependencies; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_optional_nodes: Option<bool>,
    /// Labels that included nodes must have, except the root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
}

/// Answer of `objectgraph`: an object and its dependencies.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectGraphNode {
    /// Dependencies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "children")]
    pub children: Vec<Self>,
    /// Labels of the node, including [`DEPENDENCY_TYPE`]; not those of the object.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The object.
    pub object_reference: ObjectReference,
    /// True if the VMI can run without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optional: Option<bool>,
}

/// Reference to an object.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// API group; empty for the core group.
    pub api_group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace; unset for cluster-scoped objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// Replaces the recursive schema, since references are inlined.
fn children(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "array", "items": {"type": "object"}})
}
