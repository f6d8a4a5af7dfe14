//! The source of a clone: its size, and the states in which it cannot be cloned yet.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;

use super::{Hold, Observed};
use crate::{
    cache::Key,
    importer::claim,
    resources::{
        claim_facts::{self, ClaimUsers},
        claims::CachedClaim,
        snapshots::CachedSnapshot,
    },
};

/// Unit of the sizes of file systems.
const MIB: i64 = 1 << 20;

/// The source of a clone.
#[derive(Clone, Copy, Debug)]
pub(in crate::importer) enum Source<'a> {
    /// A claim, if it exists.
    Claim(Option<&'a CachedClaim>),
    /// A snapshot, if it exists.
    Snapshot(Option<&'a CachedSnapshot>),
}

impl Source<'_> {
    /// Returns the kind as messages name it.
    fn kind(&self) -> &'static str {
        match self {
            Self::Claim(_) => "pvc",
            Self::Snapshot(_) => "snapshot",
        }
    }

    /// Returns the smallest size of a clone in bytes, if it is known.
    fn size(&self) -> Option<i64> {
        match self {
            Self::Claim(claim) => claim.as_ref()?.requested_bytes(),
            Self::Snapshot(snapshot) => snapshot.as_ref()?.restore_size,
        }
    }
}

/// Returns the size that a claim requests.
pub(super) fn requested(spec: &PersistentVolumeClaimSpec) -> Option<i64> {
    claim::requested(spec.resources.as_ref()?.requests.as_ref()?)
}

/// Returns the size of a claim whose DataVolume gives none, in bytes. `overhead`: part of a file system that its own data take.
pub(super) fn size(source: &Source<'_>, spec: &PersistentVolumeClaimSpec, overhead: f64) -> Option<i64> {
    let block = spec.volume_mode.as_deref() == Some("Block");
    let claim = match source {
        Source::Snapshot(snapshot) => return snapshot.as_ref()?.restore_size,
        Source::Claim(claim) => claim.as_ref()?,
    };
    if claim.storage_class == spec.storage_class_name && claim.block == block {
        return claim.requested_bytes();
    }
    let capacity = claim.capacity_bytes()?;
    if block {
        return Some(capacity);
    }
    let rounded = capacity.checked_add(MIB - 1)? / MIB * MIB;
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
    Some((rounded as f64 * (1.0 + overhead)).ceil() as i64)
}

/// Returns why the source cannot be cloned now.
pub(super) fn check(observed: &Observed<'_>) -> Result<(), Hold> {
    let (kind, key) = (observed.source.kind(), observed.source_key);
    let missing = || Hold::bound("CloneWithoutSource", format!("The source {kind} {} doesn't exist", key.name));
    match observed.source {
        Source::Claim(claim) => is_complete(claim.ok_or_else(missing)?, observed, key)?,
        Source::Snapshot(snapshot) if !snapshot.ok_or_else(missing)?.ready => {
            return Err(Hold::bound("Pending", format!("VolumeSnapshot {key} is not ready to use")));
        }
        Source::Snapshot(_) => has_driver(observed, key)?,
    }
    // Last, so that nobody learns the state of a source without the right to clone it.
    match observed.source.size().zip(requested(observed.spec)) {
        Some((least, size)) if size < least => Err(Hold::bound(
            "CloneValidationFailed",
            format!(
                "The clone doesn't meet the validation requirements: target resources requests storage size is smaller than \
                 the source {size} < {least}"
            ),
        )),
        _ => Ok(()),
    }
}

/// Rejects a class without a CSI driver for the clone of a snapshot: its provisioner would ignore the data source and make an empty
/// volume. Another driver than that of the snapshot refuses it.
fn has_driver(observed: &Observed<'_>, key: &Key) -> Result<(), Hold> {
    let lacks = match observed.class {
        Some(class) if class.is_csi => return Ok(()),
        Some(_) => "has no CSI driver",
        None => "does not exist",
    };
    let class = observed.spec.storage_class_name.as_deref().unwrap_or("(default)");
    Err(Hold::bound(
        "CloneValidationFailed",
        format!(
            "The clone doesn't meet the validation requirements: storage class {class} {lacks}; a clone of VolumeSnapshot \
             {key} needs the CSI driver of the snapshot"
        ),
    ))
}

fn is_complete(claim: &CachedClaim, observed: &Observed<'_>, key: &Key) -> Result<(), Hold> {
    let waits = |text: String| Err(Hold::bound("Pending", text));
    if claim.metadata.deletion_timestamp.is_some() {
        return waits(format!("PersistentVolumeClaim {key} is being deleted"));
    }
    if claim.phase != "Bound" {
        return waits(format!("PersistentVolumeClaim {key} is not bound"));
    }
    if claim.populating || !observed.source_is_filled {
        return waits(format!("PersistentVolumeClaim {key} is not filled yet"));
    }
    Ok(())
}

/// The use of a source by pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// It has to be read.
    Unknown,
    /// No pod can write to it.
    Free,
    /// A pod can write to it: the message.
    Used(String),
}

/// Returns the use of a claim.
pub(super) fn users(observed: &Observed<'_>, claim: &CachedClaim) -> Use {
    let of_claim = |users: &&ClaimUsers| users.metadata.uid == claim.metadata.uid;
    let Some(known) = observed.users.filter(of_claim) else { return Use::Unknown };
    let Some(user) = known.users.first() else {
        let counts = known.counts(observed.data_volume.creation_timestamp.as_ref(), observed.now);
        return if counts { Use::Free } else { Use::Unknown };
    };
    if claim_facts::is_old(known.read_at, observed.now, super::RETRY) {
        return Use::Unknown;
    }
    let key = observed.source_key;
    let used = format!("pod {}/{} using PersistentVolumeClaim {}", key.namespace, user.pod, key.name);
    let message = match &user.vmi {
        Some(vm) => format!("{used}; it belongs to VM {vm}, which has to be stopped, or cloned from a VolumeSnapshot"),
        None => used,
    };
    Use::Used(message)
}
