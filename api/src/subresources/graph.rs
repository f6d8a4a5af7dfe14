//! The objects that a machine depends on, as a tree.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Label of each node: what it is to the machine (`compute`, `config`, `storage`, `network`).
pub const DEPENDENCY_TYPE: &str = "kubevirt.io/dependency-type";

/// Options of `objectgraph`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectGraphOptions {
    /// Whether nodes that the machine does not need to run are in the answer; true when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_optional_nodes: Option<bool>,
    /// Labels that nodes must carry to be in the answer; the root always is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
}

/// Answer of `objectgraph`: an object and those it depends on.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectGraphNode {
    /// What it depends on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "children")]
    pub children: Vec<Self>,
    /// Labels of the node, [`DEPENDENCY_TYPE`] among them; not those of the object.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The object.
    pub object_reference: ObjectReference,
    /// Whether the machine runs without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optional: Option<bool>,
}

/// Names an object.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// API group; empty for the core group.
    pub api_group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace; unset for objects of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The schema would contain itself; documents that are written out in place end here.
fn children(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "array", "items": {"type": "object"}})
}
