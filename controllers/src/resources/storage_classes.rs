//! Storage classes, as far as claims of DataVolumes are completed from them.

use std::sync::Arc;

use k8s_openapi::{api::storage::v1::StorageClass, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{metadata::slim, sharing};
use crate::cache::Cached;

/// Annotation of the default class of the cluster.
const DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";
/// Annotation of the default class of VM disks, which comes before the default of the cluster.
const VIRT_DEFAULT: &str = "storageclass.kubevirt.io/is-default-virt-class";

/// Annotation with the strategy of clones.
const CLONE_STRATEGY: &str = "cdi.kubevirt.io/clone-strategy";

/// Indices of storage classes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StorageClassIndex {
    /// Default of the cluster.
    Default,
    /// Default of VM disks.
    VirtDefault,
}

/// A storage class.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedStorageClass {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its provisioner.
    pub provisioner: String,
    /// A volume is made for the first pod that uses its claim.
    pub is_late: bool,
    /// Clones of its claims are copies.
    pub copies: bool,
    /// Volumes that several nodes can use at a time, as far as its driver is known.
    pub shared: sharing::Shared,
    /// It is the default of the cluster.
    pub is_default: bool,
    /// It is the default of VM disks.
    pub is_virt_default: bool,
}

impl Cached for CachedStorageClass {
    type Index = StorageClassIndex;
    reduced!();

    fn indices(&self) -> Vec<StorageClassIndex> {
        let default = self.is_default.then_some(StorageClassIndex::Default);
        let virt = self.is_virt_default.then_some(StorageClassIndex::VirtDefault);
        default.into_iter().chain(virt).collect()
    }
}

/// Returns the newest class; of several, the first by name.
pub(crate) fn newest(classes: Vec<Arc<CachedStorageClass>>) -> Option<Arc<CachedStorageClass>> {
    let age = |class: &Arc<CachedStorageClass>| class.metadata.creation_timestamp.clone();
    classes.into_iter().reduce(|found, class| if age(&class) > age(&found) { class } else { found })
}

kept!(CachedStorageClass of StorageClass);

impl From<StorageClass> for CachedStorageClass {
    fn from(class: StorageClass) -> Self {
        let annotations = class.metadata.annotations.as_ref();
        let has = |key: &str| annotations.and_then(|all| all.get(key)).is_some_and(|value| value == "true");
        Self {
            copies: annotations.and_then(|all| all.get(CLONE_STRATEGY)).is_some_and(|value| value == "copy"),
            shared: sharing::of(&class.provisioner, class.parameters.as_ref()),
            provisioner: class.provisioner,
            is_late: class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            is_default: has(DEFAULT),
            is_virt_default: has(VIRT_DEFAULT),
            metadata: slim(class.metadata),
        }
    }
}
