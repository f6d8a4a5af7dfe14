//! Bodies of requests to `subresources.kubevirt.io` and of their answers.
//!
//! Requests are parsed leniently: a body may be absent (all defaults), and unknown fields are ignored, since some clients send
//! `kind` and `apiVersion` with any value. A null field counts as absent. Required fields are optional here if their
//! absence has a specific answer.

pub mod backup;
pub mod graph;
pub mod guest;
pub mod lifecycle;
pub mod sev;
pub mod usage;
pub mod volumes;

use serde::{Deserialize, Deserializer};

pub use backup::{BackupCheckpoint, BackupCommand, BackupMode, BackupOptions, BackupVolumeInfo};
pub use graph::{ObjectGraphNode, ObjectGraphOptions, ObjectReference};
pub use guest::{
    FreezeUnfreezeTimeout, GuestAgentCommandInfo, GuestAgentInfo, GuestFileSystem, GuestFileSystemDisk,
    GuestFileSystemInfo, GuestFileSystemList, GuestUser, GuestUserList,
};
pub use lifecycle::{EvacuateCancelOptions, MigrateOptions, PauseOptions, RestartOptions, StartOptions, StopOptions};
pub use sev::{SevMeasurementInfo, SevPlatformInfo, SevSecretOptions, SevSessionOptions};
pub use usage::{DiskUsage, DomainUsage, InterfaceUsage, MemoryUsage};
pub use volumes::{AddVolumeRequest, HibernateOptions, MemoryDumpOptions, RemoveVolumeRequest};

/// Maps null to the default, for `deserialize_with`. Some clients send null for unset fields.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn read<T: DeserializeOwned>(body: Value) -> T {
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn null_counts_as_absent() {
        let cancel = json!({"dryRun": null, "evacuationNodeName": null});
        assert_eq!(read::<EvacuateCancelOptions>(cancel), EvacuateCancelOptions::default());
        let migrate = json!({"addedNodeSelector": null, "dryRun": null});
        assert_eq!(read::<MigrateOptions>(migrate), MigrateOptions::default());
        let add = json!({"name": null, "disk": null, "volumeSource": null, "dryRun": null});
        assert_eq!(read::<AddVolumeRequest>(add), AddVolumeRequest::default());
        assert_eq!(read::<RemoveVolumeRequest>(json!({"name": null})), RemoveVolumeRequest::default());
        assert_eq!(read::<MemoryDumpOptions>(json!({"claimName": null})), MemoryDumpOptions::default());
        assert_eq!(read::<HibernateOptions>(json!({"claimName": null, "discard": null})), HibernateOptions::default());
        let session = json!({"session": null, "dhCert": null});
        assert_eq!(read::<SevSessionOptions>(session), SevSessionOptions::default());
        assert_eq!(read::<SevSecretOptions>(json!({"header": null, "secret": null})), SevSecretOptions::default());
        assert!(serde_json::from_value::<MemoryDumpOptions>(json!({"claimName": 1})).is_err());
    }
}
