//! VirtualMachineExport: downloads of the volumes of a VM, snapshot, backup or claim.

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A request to export volumes.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "export.kubevirt.io",
    version = "v1",
    kind = "VirtualMachineExport",
    plural = "virtualmachineexports",
    singular = "virtualmachineexport",
    shortname = "vmexport",
    shortname = "vmexports",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to export the volumes of a VM, snapshot, backup or claim for download.",
    status = "VirtualMachineExportStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportSpec {
    /// Object to export, in the namespace of the export: a PersistentVolumeClaim, VirtualMachine, VirtualMachineSnapshot,
    /// VirtualMachineBackup or VirtualMachineTemplate.
    pub source: TypedLocalObjectReference,
    /// Secret with the download token in key `token`; default: a generated one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// Time after creation until the export is deleted, such as `1h30m`; default: 2 hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_duration: Option<String>,
}

/// Observed state of an export.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Links to the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<VirtualMachineExportLinks>,
    /// `Pending`, `Ready`, `Terminated` or `Skipped`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Service of the server, used in internal links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Secret with the current token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// Time of deletion: creation plus `ttlDuration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_expiration_time: Option<Time>,
    /// The exported VM, or the VM of the exported snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_name: Option<String>,
}

/// Links to exported content.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportLinks {
    /// Through the cluster's ingress or route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external: Option<VirtualMachineExportLink>,
    /// From within the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal: Option<VirtualMachineExportLink>,
}

/// Exported content under one link.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportLink {
    /// Backups, one per volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backups: Vec<VirtualMachineExportBackup>,
    /// CA certificate of the server, PEM.
    pub cert: String,
    /// Manifests, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub manifests: Vec<VirtualMachineExportManifest>,
    /// Volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VirtualMachineExportVolume>,
}

/// Exported backup of one volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportBackup {
    /// Endpoints, one per type of content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<VirtualMachineExportBackupEndpoint>,
    /// Name of the volume.
    pub name: String,
}

/// Endpoint of a backup.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportBackupEndpoint {
    /// `data` for the content, `map` for the ranges that changed.
    pub endpoint: String,
    /// URL of the endpoint.
    pub url: String,
}

/// A manifest for recreating the exported objects.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportManifest {
    /// `all` for the objects, `auth-header-secret` for the Secret with the token.
    #[serde(rename = "type")]
    pub type_: String,
    /// URL of the manifest.
    pub url: String,
}

/// An exported volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportVolume {
    /// Formats of the volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<VirtualMachineExportVolumeFormat>,
    /// Name of the volume.
    pub name: String,
}

/// A format of a volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportVolumeFormat {
    /// `raw`, `gzip`, `dir` or `tar.gz`.
    pub format: String,
    /// URL of the volume in this format.
    pub url: String,
}
