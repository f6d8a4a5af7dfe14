//! Bodies of requests to `subresources.kubevirt.io` and of the answers to them.
//!
//! Requests are read leniently: a body may be absent (all defaults), and unknown fields are ignored, since some clients
//! send `kind` and `apiVersion` of any value along. Fields that a request must have are optional here where their absence
//! has an answer of its own.

pub mod backup;
pub mod graph;
pub mod guest;
pub mod lifecycle;
pub mod sev;
pub mod volumes;

pub use backup::{BackupCheckpoint, BackupCommand, BackupMode, BackupOptions, BackupVolumeInfo};
pub use graph::{ObjectGraphNode, ObjectGraphOptions, ObjectReference};
pub use guest::{
    FreezeUnfreezeTimeout, GuestAgentCommandInfo, GuestAgentInfo, GuestFileSystem, GuestFileSystemDisk,
    GuestFileSystemInfo, GuestFileSystemList, GuestUser, GuestUserList,
};
pub use lifecycle::{EvacuateCancelOptions, MigrateOptions, PauseOptions, RestartOptions, StartOptions, StopOptions};
pub use sev::{SevMeasurementInfo, SevPlatformInfo, SevSecretOptions, SevSessionOptions};
pub use volumes::{AddVolumeRequest, MemoryDumpOptions, RemoveVolumeRequest};
