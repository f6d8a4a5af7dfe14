//! VirtualMachineExport: volumes of a VM, snapshot, backup or claim, offered for download.

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A request to offer volumes for download.
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
    doc = "A request to offer the volumes of a VM, snapshot, backup or claim for download.",
    status = "VirtualMachineExportStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportSpec {
    /// What to export, in the export's namespace: a PersistentVolumeClaim, VirtualMachine, VirtualMachineSnapshot,
    /// VirtualMachineBackup or VirtualMachineTemplate.
    pub source: TypedLocalObjectReference,
    /// Secret whose key `token` is what downloads must present; one is made when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// How long after its creation the export is deleted, such as `1h30m`; 2 hours when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_duration: Option<String>,
}

/// What is observed of an export.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportStatus {
    /// Conditions, one entry a type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Where the content is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<VirtualMachineExportLinks>,
    /// `Pending`, `Ready`, `Terminated` or `Skipped`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Service in front of the server; internal links name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Secret with the token in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// When the export is deleted: creation plus `ttlDuration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_expiration_time: Option<Time>,
    /// VM the exported snapshot was taken of, or the exported VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_name: Option<String>,
}

/// Where exported content is.
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

/// Exported content, as reached from one side.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportLink {
    /// Backups, one entry a volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backups: Vec<VirtualMachineExportBackup>,
    /// Certificate of the authority that signed the server's, PEM.
    pub cert: String,
    /// Manifests, one entry a type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub manifests: Vec<VirtualMachineExportManifest>,
    /// Volumes, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VirtualMachineExportVolume>,
}

/// Exported backup of one volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportBackup {
    /// Where it can be read, one entry a kind of content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<VirtualMachineExportBackupEndpoint>,
    /// Name of the volume.
    pub name: String,
}

/// Where a backup can be read.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportBackupEndpoint {
    /// `data` for the content, `map` for the ranges that changed.
    pub endpoint: String,
    /// URL of it.
    pub url: String,
}

/// A manifest to make the exported objects anew.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportManifest {
    /// `all` for the objects, `auth-header-secret` for the Secret with the token.
    #[serde(rename = "type")]
    pub type_: String,
    /// URL of it.
    pub url: String,
}

/// An exported volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportVolume {
    /// Forms it is offered in, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<VirtualMachineExportVolumeFormat>,
    /// Name of the volume.
    pub name: String,
}

/// A form a volume is offered in.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineExportVolumeFormat {
    /// `raw`, `gzip`, `dir` or `tar.gz`.
    pub format: String,
    /// URL of it.
    pub url: String,
}
