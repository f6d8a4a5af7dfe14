//! Persistent volumes that virt-controller hands over from one claim to another. Others are not watched.

use api::{
    constants::{annotation, label},
    quantity,
};
use k8s_openapi::{
    api::core::v1::{ObjectReference, PersistentVolume},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{
    declaration::{Declaration, Selection},
    metadata::{keep, slim},
};
use crate::{
    cache::{Cached, Key},
    runtime::Kind,
};

/// Annotation of volumes that were provisioned for a claim.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// Indices of volumes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VolumeIndex {
    /// UID of the DataVolume that gets the volume.
    DataVolume(String),
}

/// A volume that is handed over.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedVolume {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// `Available`, `Bound`, `Released` or `Failed`.
    pub phase: String,
    /// `Delete`, `Retain` or `Recycle`.
    pub reclaim_policy: String,
    /// The claim that it is bound or reserved to.
    pub claim: Option<ObjectReference>,
    /// Its size in bytes.
    pub size: Option<i64>,
    /// A provisioner made it.
    pub provisioned: bool,
}

impl CachedVolume {
    /// Returns the value of an annotation.
    fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the recorded reclaim policy, which the volume gets back.
    #[must_use]
    pub(crate) fn recorded_policy(&self) -> Option<&str> {
        self.annotation(annotation::HAND_OVER_RECLAIM_POLICY)
    }

    /// Returns the claim, and thereby the DataVolume of the same name, that the volume is handed over to.
    #[must_use]
    pub(crate) fn receiver(&self) -> Option<Key> {
        let (namespace, name) = self.annotation(annotation::HAND_OVER_TO)?.split_once('/')?;
        Some(Key::new(namespace, name))
    }
}

impl Cached for CachedVolume {
    type Index = VolumeIndex;
    reduced!();

    fn indices(&self) -> Vec<VolumeIndex> {
        let labels = self.metadata.labels.as_ref();
        let uid = labels.and_then(|labels| labels.get(label::HAND_OVER)).cloned();
        uid.map(VolumeIndex::DataVolume).into_iter().collect()
    }
}

impl Declaration for CachedVolume {
    type Wire = PersistentVolume;
    type Kept = Self;
    const SELECTION: Selection = Selection::HasLabel(label::HAND_OVER);
    const WRITTEN: Option<Kind> = Some(Kind::Volume);
}

impl From<PersistentVolume> for CachedVolume {
    fn from(volume: PersistentVolume) -> Self {
        let of = volume.metadata;
        let spec = volume.spec.unwrap_or_default();
        let annotations =
            keep(of.annotations.as_ref(), &[annotation::HAND_OVER_RECLAIM_POLICY, annotation::HAND_OVER_TO]);
        let provisioned = of.annotations.iter().flatten().any(|(key, _)| key == PROVISIONED_BY);
        let labels = keep(of.labels.as_ref(), &[label::HAND_OVER]);
        Self {
            metadata: ObjectMeta { annotations, labels, ..slim(of) },
            phase: volume.status.and_then(|status| status.phase).unwrap_or_default(),
            reclaim_policy: spec.persistent_volume_reclaim_policy.unwrap_or_default(),
            claim: spec.claim_ref,
            size: spec.capacity.as_ref().and_then(|amounts| quantity::units(amounts.get("storage")?).ok()),
            provisioned,
        }
    }
}
