//! The API of CDI, the containerized data importer: claims that are filled with the content of disks.

pub mod data_source;
pub mod data_volume;
pub mod status;
pub mod storage_profile;

pub use data_source::{DataSource, DataSourceSource, DataSourceSpec, DataSourceStatus};
pub use data_volume::{DataVolume, DataVolumeSpec};
pub use status::{DataVolumeCondition, DataVolumeStatus};
pub use storage_profile::StorageProfile;

/// Group of the API.
pub const GROUP: &str = "cdi.kubevirt.io";

/// Annotations of DataVolumes and claims.
pub mod annotation {
    /// DataVolume: a claim of its name that exists already is taken over.
    pub const ALLOW_CLAIM_ADOPTION: &str = "cdi.kubevirt.io/allowClaimAdoption";
    /// The claim is bound without waiting for a first consumer; any value.
    pub const BIND_IMMEDIATE: &str = "cdi.kubevirt.io/storage.bind.immediate.requested";
    /// DataVolume: the claim is filled by somebody else; any value.
    pub const PRE_POPULATED: &str = "cdi.kubevirt.io/storage.prePopulated";
    /// Claim: the DataVolume for which it was filled.
    pub const POPULATED_FOR: &str = "cdi.kubevirt.io/storage.populatedFor";
    /// `true` if the claim is filled through a second one.
    pub const USE_POPULATOR: &str = "cdi.kubevirt.io/storage.usePopulator";
    /// Claim: UID of the DataVolume for which it was created.
    pub const CREATED_FOR: &str = "cdi.kubevirt.io/createdForDataVolume";
    /// Claim: phase of the pod that fills it.
    pub const POD_PHASE: &str = "cdi.kubevirt.io/storage.pod.phase";
    /// Claim: restarts of the pod that fills it.
    pub const POD_RESTARTS: &str = "cdi.kubevirt.io/storage.pod.restarts";
    /// The pod that fills the claim stays; `true`.
    pub const RETAIN_POD: &str = "cdi.kubevirt.io/storage.pod.retainAfterCompletion";
    /// Claim: content of the claim, `kubevirt` or `archive`.
    pub const CONTENT_TYPE: &str = "cdi.kubevirt.io/storage.contentType";
    /// Claim: all blocks were requested in advance.
    pub const PREALLOCATION_REQUESTED: &str = "cdi.kubevirt.io/storage.preallocation.requested";
    /// Claim: all blocks are allocated.
    pub const PREALLOCATION: &str = "cdi.kubevirt.io/storage.preallocation";
    /// DataVolume: an available volume that names it is bound instead of filling one.
    pub const CHECK_STATIC_VOLUME: &str = "cdi.kubevirt.io/storage.checkStaticVolume";
    /// Proof that the creator may clone the source. Only CDI writes it.
    pub const CLONE_TOKEN: &str = "cdi.kubevirt.io/storage.clone.token";
    /// The same with a longer life. Only CDI writes it.
    pub const EXTENDED_CLONE_TOKEN: &str = "cdi.kubevirt.io/storage.extended.clone.token";
    /// Annotations that only controllers write.
    pub const RESERVED: [&str; 5] = [CLONE_TOKEN, EXTENDED_CLONE_TOKEN, CREATED_FOR, POPULATED_FOR, PERMITTED_CLONE];
    /// Annotations of a DataVolume with which CDI asks for no right to clone.
    pub const SKIP_AUTHORIZATION: [&str; 2] = [PRE_POPULATED, CHECK_STATIC_VOLUME];
    /// DataVolume: the source in another namespace that its creator may clone, see
    /// [`DataVolume::permits_clone`](super::DataVolume::permits_clone). Only virt-api writes it.
    pub const PERMITTED_CLONE: &str = "ferrovirt.io/permitted-clone";
    /// DataVolume: namespace and name of the DataSource by which virt-api replaced its `sourceRef`.
    pub const RESOLVED_REFERENCE: &str = "ferrovirt.io/resolved-source-ref";
    /// Claim: strategy of the clone.
    pub const CLONE_TYPE: &str = "cdi.kubevirt.io/cloneType";
    /// Claim: the reason why a copy is made instead of a clone.
    pub const CLONE_FALLBACK_REASON: &str = "cdi.kubevirt.io/cloneFallbackReason";
    /// StorageClass: default for disks of VMs; `true`.
    pub const DEFAULT_VIRT_CLASS: &str = "storageclass.kubevirt.io/is-default-virt-class";
}

/// Labels of claims and pods.
pub mod label {
    /// Marks claims and pods of imports.
    pub const APP: &str = "app";
    /// Value of [`APP`].
    pub const APP_VALUE: &str = "containerized-data-importer";
    /// Kind of the pod; `importer`.
    pub const COMPONENT: &str = "cdi.kubevirt.io";
    /// UID of the claim for which a temporary object was made.
    pub const OWNED_BY: &str = "cdi.kubevirt.io/OwnedByUID";
    /// Marks the definitions that the importer brought, as opposed to those of CDI.
    pub const DEFINITION: &str = "ferrovirt.io/importer";
}
