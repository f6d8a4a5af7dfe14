//! DataSources: names for claims and snapshots that DataVolumes are cloned from.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    data_volume::{DataVolumeSourcePvc, DataVolumeSourceSnapshot},
    status::DataVolumeCondition,
};

/// Spec of a DataSource.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "cdi.kubevirt.io",
    version = "v1beta1",
    kind = "DataSource",
    plural = "datasources",
    singular = "datasource",
    shortname = "das",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A name for a claim or snapshot that DataVolumes are cloned from.",
    status = "DataSourceStatus"
)]
pub struct DataSourceSpec {
    /// The object that the name stands for.
    pub source: DataSourceSource,
}

/// The object that a DataSource stands for; at most one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataSourceSource {
    /// Another DataSource of the same namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_source: Option<DataSourceRef>,
    /// A claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<DataVolumeSourcePvc>,
    /// A volume snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<DataVolumeSourceSnapshot>,
}

/// Reference to a DataSource.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct DataSourceRef {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

/// Status of a DataSource. It is no subresource.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct DataSourceStatus {
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<DataVolumeCondition>,
    /// The claim or snapshot at the end of the references.
    #[serde(default)]
    pub source: DataSourceSource,
}
