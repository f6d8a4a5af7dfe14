//! How a claim is cloned: by the CSI driver, or by a pod that copies.
//!
//! No API says which drivers clone. An administrator can demand copies by CDI's annotation or StorageProfile of the storage class. Otherwise the driver
//! is asked: the claim names its data source, and a driver that refuses it for good makes the clone fall back to a copy, with a
//! warning and the driver's message as the reason. Only provisioners with a CSIDriver are asked: others may ignore the data source
//! and make an empty volume.

use super::{Observed, source};
use crate::resources::claims::CachedClaim;

/// Value of the annotation with the strategy: the driver clones the claim, or makes a volume from the snapshot.
pub(super) const DRIVER: &str = "csi-clone";
/// Value of the annotation with the strategy: a pod copies.
pub(super) const COPY: &str = "copy";
/// Codes of a driver that will never make the volume, and texts of its provisioner for the same.
const REFUSALS: [&str; 7] = [
    "code = InvalidArgument",
    "code = Unimplemented",
    "code = FailedPrecondition",
    "code = OutOfRange",
    "code = NotFound",
    "CLONE_VOLUME",
    "does not support",
];

/// The storage class of the new claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::importer) struct Class {
    /// Its provisioner.
    pub provisioner: String,
    /// A volume is made for the first pod that uses its claim.
    pub is_late: bool,
    /// The provisioner is a CSI driver.
    pub is_csi: bool,
    /// Its annotation or its profile demands copies.
    pub copies: bool,
}

/// A strategy, with the reason of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// The CSI driver makes the volume from its source.
    Driver,
    /// A pod copies the source, for this reason.
    Copy(&'static str),
}

/// Chooses the strategy of a clone whose source is a claim.
pub(super) fn choose(observed: &Observed<'_>, claim: &CachedClaim) -> Strategy {
    let Some(class) = observed.class else { return Strategy::Copy("the claim has no storage class") };
    let block = observed.spec.volume_mode.as_deref() == Some("Block");
    let size = source::requested(observed.spec);
    let is_larger = claim.capacity_bytes().zip(size).is_some_and(|(capacity, size)| size > capacity);
    if class.copies {
        Strategy::Copy(
            "annotation cdi.kubevirt.io/clone-strategy of the storage class, or its StorageProfile, demands it",
        )
    } else if !class.is_csi {
        Strategy::Copy("the provisioner of the storage class is no CSI driver")
    } else if observed.source_provisioner != Some(&*class.provisioner) {
        Strategy::Copy("source and target have different provisioners")
    } else if claim.block != block {
        Strategy::Copy("source and target have different volume modes")
    } else if is_larger && !block {
        // The driver makes the file system larger, and not the image in it.
        Strategy::Copy("the image has to grow to the size of the target")
    } else if class.is_late && (observed.is_remote() || observed.is_immediate) {
        // A pod has to use the claim before its driver makes the volume.
        Strategy::Copy("the storage class waits for the first consumer, which is the pod that copies")
    } else {
        Strategy::Driver
    }
}

/// Returns true if a driver has refused a clone for good.
pub(super) fn is_refusal(reason: &str, message: &str) -> bool {
    reason == "ProvisioningFailed" && REFUSALS.iter().any(|refusal| message.contains(refusal))
}
