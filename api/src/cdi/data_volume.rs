//! DataVolumes: claims that are filled with the content of a disk.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::api::core::v1::TypedObjectReference;
use k8s_openapi::api::core::v1::VolumeResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    annotation::PERMITTED_CLONE,
    status::{DataVolumeCondition, DataVolumeStatus},
};
use crate::DataVolumePhase;

/// A DataVolume to create.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeTemplateSpec {
    /// Version of the embedded object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name, labels and annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Spec of the DataVolume.
    pub spec: DataVolumeSpec,
    /// Ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<DataVolumeTemplateDummyStatus>,
}

/// Marker; carries nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DataVolumeTemplateDummyStatus {}

/// Spec of a DataVolume.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "cdi.kubevirt.io",
    version = "v1beta1",
    kind = "DataVolume",
    plural = "datavolumes",
    singular = "datavolume",
    shortname = "dv",
    shortname = "dvs",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A claim that is filled with the content of a disk.",
    status = "DataVolumeStatus",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Progress","type":"string","jsonPath":".status.progress"}"#,
    printcolumn = r#"{"name":"Restarts","type":"integer","jsonPath":".status.restartCount"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSpec {
    /// Snapshots of a multi-stage import.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<DataVolumeCheckpoint>,
    /// `kubevirt` for a disk, `archive` for files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// True if the last checkpoint ends the import.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_checkpoint: Option<bool>,
    /// Allocate all blocks in advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preallocation: Option<bool>,
    /// Priority class of the import pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Service account of the import pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Spec of the claim, verbatim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PersistentVolumeClaimSpec>,
    /// Source of the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<DataVolumeImportSource>,
    /// Reference to a source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ref: Option<DataVolumeSourceRef>,
    /// Spec of the claim, completed from the storage class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageSpec>,
}

/// One stage of an import.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeCheckpoint {
    /// Snapshot of this stage.
    pub current: String,
    /// Snapshot of the previous stage.
    pub previous: String,
}

/// Source of the content; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeImportSource {
    /// An empty disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blank: Option<DataVolumeBlankImage>,
    /// Google cloud storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gcs: Option<DataVolumeSourceGcs>,
    /// An HTTP server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<DataVolumeSourceHttp>,
    /// An oVirt imageio server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imageio: Option<DataVolumeSourceImageIo>,
    /// Another claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<DataVolumeSourcePvc>,
    /// A container image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry: Option<DataVolumeSourceRegistry>,
    /// An S3 bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<DataVolumeSourceS3>,
    /// A volume snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<DataVolumeSourceSnapshot>,
    /// An upload by a client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upload: Option<DataVolumeSourceUpload>,
    /// A VMware disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vddk: Option<DataVolumeSourceVddk>,
}

/// Marker for an empty disk.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DataVolumeBlankImage {}

/// Google cloud storage.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceGcs {
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Address.
    pub url: String,
}

/// An HTTP server.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceHttp {
    /// ConfigMap with CA certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_config_map: Option<String>,
    /// Checksum of the file, `algorithm:hexadecimal digits`, with md5, sha1, sha256 or sha512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
    /// Request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_headers: Vec<String>,
    /// Skip verification of the server's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure_skip_verify: Option<bool>,
    /// Secrets with request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_extra_headers: Vec<String>,
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Address.
    pub url: String,
}

/// An oVirt imageio server.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceImageIo {
    /// ConfigMap with CA certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_config_map: Option<String>,
    /// Disk identifier.
    pub disk_id: String,
    /// Skip verification of the server's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure_skip_verify: Option<bool>,
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Address.
    pub url: String,
}

/// A claim to copy.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourcePvc {
    /// Name of the claim.
    pub name: String,
    /// Namespace of the object.
    pub namespace: String,
}

/// A container image.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceRegistry {
    /// ConfigMap with CA certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_config_map: Option<String>,
    /// Image stream to import.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_stream: Option<String>,
    /// Platform of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformOptions>,
    /// `pod` or `node`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull_method: Option<String>,
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// Platform of an image.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlatformOptions {
    /// CPU architecture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
}

/// An S3 bucket.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceS3 {
    /// ConfigMap with CA certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_config_map: Option<String>,
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Address.
    pub url: String,
}

/// A volume snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceSnapshot {
    /// Name of the snapshot.
    pub name: String,
    /// Namespace of the object.
    pub namespace: String,
}

/// Marker for an upload.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DataVolumeSourceUpload {}

/// A VMware disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceVddk {
    /// Path of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_file: Option<String>,
    /// ConfigMap with further arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_args: Option<String>,
    /// Image with the VDDK library.
    #[serde(rename = "initImageURL", skip_serializing_if = "Option::is_none")]
    pub init_image_url: Option<String>,
    /// Secret with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
    /// Certificate thumbprint of the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    /// Address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// UUID of the VM in vSphere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// Reference to a source.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSourceRef {
    /// Kind of the source.
    pub kind: String,
    /// Name of the source.
    pub name: String,
    /// Namespace of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// Spec of a claim, completed from the storage class.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageSpec {
    /// Access modes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub access_modes: Vec<String>,
    /// Object from which the claim is populated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_source: Option<TypedLocalObjectReference>,
    /// Object from which the claim is populated, in any namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_source_ref: Option<TypedObjectReference>,
    /// Size.
    #[serde(default)]
    pub resources: VolumeResourceRequirements,
    /// Label selector for volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// Storage class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,
    /// `Block` or `Filesystem`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_mode: Option<String>,
    /// Name of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_name: Option<String>,
}

impl DataVolumeSpec {
    /// Returns true if `pvc` or `storage` names an object that fills the claim.
    pub fn is_externally_populated(&self) -> bool {
        let pvc = self.pvc.as_ref().is_some_and(|pvc| pvc.data_source.is_some() || pvc.data_source_ref.is_some());
        let storage = self.storage.as_ref();
        pvc || storage.is_some_and(|storage| storage.data_source.is_some() || storage.data_source_ref.is_some())
    }
}

impl DataVolumeImportSource {
    /// Returns the claim or snapshot of a clone as `persistentvolumeclaims/NAMESPACE/NAME` or `volumesnapshots/NAMESPACE/NAME`.
    pub fn clone_path(&self) -> Option<String> {
        if let Some(pvc) = &self.pvc {
            return Some(format!("persistentvolumeclaims/{}/{}", pvc.namespace, pvc.name));
        }
        self.snapshot.as_ref().map(|snapshot| format!("volumesnapshots/{}/{}", snapshot.namespace, snapshot.name))
    }
}

impl DataVolume {
    /// Returns the phase; it is empty before anybody has looked at the DataVolume.
    pub fn phase(&self) -> DataVolumePhase {
        self.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
    }

    /// Returns the condition of a type, if present.
    pub fn condition(&self, type_: &str) -> Option<&DataVolumeCondition> {
        self.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// Returns true if virt-api found at the creation that the creator may clone this source.
    pub fn permits_clone(&self) -> bool {
        let path = self.spec.source.as_ref().and_then(DataVolumeImportSource::clone_path);
        let annotations = self.metadata.annotations.as_ref();
        path.is_some() && annotations.and_then(|all| all.get(PERMITTED_CLONE)) == path.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn clone_is_permitted_of_the_marked_source_alone() {
        for (mark, source, expected) in [
            ("persistentvolumeclaims/n/a", json!({"pvc": {"namespace": "n", "name": "a"}}), true),
            ("volumesnapshots/n/a", json!({"snapshot": {"namespace": "n", "name": "a"}}), true),
            ("persistentvolumeclaims/n/a", json!({"pvc": {"namespace": "n", "name": "b"}}), false),
            ("persistentvolumeclaims/n/a", json!({"pvc": {"namespace": "o", "name": "a"}}), false),
            ("persistentvolumeclaims/n/a", json!({"snapshot": {"namespace": "n", "name": "a"}}), false),
            ("", json!({"pvc": {"namespace": "n", "name": "a"}}), false),
            ("", json!({"blank": {}}), false),
        ] {
            let mut volume = DataVolume::new("d", serde_json::from_value(json!({"source": source})).unwrap());
            volume.metadata.annotations = Some([(PERMITTED_CLONE.to_owned(), mark.to_owned())].into());
            assert_eq!(volume.permits_clone(), expected, "{mark} {source}");
        }
    }
}
