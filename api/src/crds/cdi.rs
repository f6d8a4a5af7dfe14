//! CRDs of cdi.kubevirt.io that the importer brings where CDI is absent: DataVolumes and DataSources.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::json;

use super::{CrdError, Definition, Rule};
use crate::cdi::{DataSource, DataVolume, label};

const DATA_VOLUME: &[Rule] = &[
    ("spec.contentType", || json!({"enum": ["kubevirt", "archive"]})),
    ("spec.source.registry.pullMethod", || json!({"enum": ["pod", "node"]})),
];

const CONDITION: &[Rule] = &[
    ("conditions[].lastHeartbeatTime", || json!({"nullable": true})),
    ("conditions[].lastTransitionTime", || json!({"nullable": true})),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&DataVolume::crd())?
            .rules("", DATA_VOLUME)?
            .rules("status", CONDITION)?
            .label(label::DEFINITION)
            .finish()?,
        Definition::new(&DataSource::crd())?
            .rules("status", CONDITION)?
            .without_status_subresource()
            .label(label::DEFINITION)
            .finish()?,
    ])
}
