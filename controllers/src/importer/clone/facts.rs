//! The objects that a clone depends on, from the caches, and the changes of them that wake its DataVolume.

use std::sync::Arc;

use api::{cdi::DataVolume, constants::annotation};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{source::Source as View, strategy::Class, temporary_claim};
use crate::{
    cache::{Cached, Key},
    importer::{pod, source::Source},
    resources::{
        Caches,
        claim_facts::{ClaimUsers, ClaimWarning},
        claims::CachedClaim,
        data_volumes::DataVolumeIndex,
        import_pods::CachedImportPod,
        snapshot_classes::SnapshotClassIndex,
        snapshots::CachedSnapshot,
        storage_classes::CachedStorageClass,
        volumes::{CachedVolume, VolumeIndex},
    },
    runtime::Wake,
};

/// The objects that a clone depends on.
#[derive(Clone, Debug)]
pub(in crate::importer) struct Facts {
    /// Namespace and name of the source.
    pub key: Key,
    /// The source is a snapshot.
    pub is_snapshot: bool,
    /// The claim that is the source.
    pub source: Option<Arc<CachedClaim>>,
    /// The snapshot that is the source.
    pub snapshot: Option<Arc<CachedSnapshot>>,
    /// No DataVolume is filling the source.
    pub is_filled: bool,
    /// Provisioner of the source.
    pub provisioner: Option<String>,
    /// The class of the claim that is made from the source.
    pub class: Option<Class>,
    /// The temporary claim.
    pub temporary: Option<Arc<CachedClaim>>,
    /// The pod that fills the temporary claim.
    pub pod: Option<Arc<CachedImportPod>>,
    /// Progress of that pod in percent.
    pub percent: Option<f64>,
    /// The volume that is handed over.
    pub volume: Option<Arc<CachedVolume>>,
    /// The pods that can write to the source.
    pub users: Option<Arc<ClaimUsers>>,
    /// Warnings about the claim that the driver makes.
    pub warning: Option<Arc<ClaimWarning>>,
}

impl Facts {
    /// Returns the source as decisions see it.
    pub(super) fn view(&self) -> View<'_> {
        if self.is_snapshot { View::Snapshot(self.snapshot.as_deref()) } else { View::Claim(self.source.as_deref()) }
    }

    /// Returns true if the source does not exist.
    pub(super) fn is_missing(&self) -> bool {
        self.source.is_none() && self.snapshot.is_none()
    }
}

/// Collects the objects that a clone depends on. `None`: the DataVolume is none.
pub(in crate::importer) fn facts(
    caches: &Caches,
    data_volume: &DataVolume,
    source: &Source<'_>,
    class: Option<&CachedStorageClass>,
) -> Option<Facts> {
    let (key, is_snapshot) = match source {
        Source::Claim(key) => (key.clone(), false),
        Source::Snapshot(key) => (key.clone(), true),
        _ => return None,
    };
    let metadata = &data_volume.metadata;
    let claim = (!is_snapshot).then(|| caches.claims.get(&key)).flatten();
    let of_temporary = Key::new(key.namespace.clone(), temporary_claim(metadata));
    let is_remote = metadata.namespace.as_deref() != Some(&*key.namespace);
    let temporary = is_remote.then(|| caches.claims.get(&of_temporary)).flatten();
    let pod = temporary.as_ref().and_then(|claim| {
        let name = pod::name(claim.metadata.name.as_deref().unwrap_or_default());
        let pod = caches.import_pods.get(&Key::new(key.namespace.clone(), name))?;
        let owner = api::owner::controller(&pod.metadata)?;
        (Some(&owner.uid) == claim.metadata.uid.as_ref()).then_some(pod)
    });
    let uid = metadata.uid.clone().unwrap_or_default();
    let made = if is_remote { of_temporary } else { Key::of(metadata) };
    let named = |name: &String| caches.storage_classes.get(&Key::cluster_wide(name.clone()));
    let profile = |class: &CachedStorageClass| {
        caches.storage_profiles.get(&Key::cluster_wide(class.metadata.name.clone().unwrap_or_default()))
    };
    // The temporary claim tells the class that it got, which is the default of its time if the DataVolume names none.
    let of_made = temporary.as_ref().and_then(|claim| named(claim.storage_class.as_ref()?));
    let class = of_made.as_deref().or(class);
    Some(Facts {
        is_filled: claim.as_ref().is_none_or(|claim| is_filled(caches, claim)),
        provisioner: claim.as_ref().and_then(|claim| Some(named(claim.storage_class.as_ref()?)?.provisioner.clone())),
        class: class.map(|class| Class {
            provisioner: class.provisioner.clone(),
            is_late: class.is_late,
            copies: class.copies || profile(class).is_some_and(|profile| profile.copies),
            is_csi: is_csi(caches, class),
        }),
        snapshot: is_snapshot.then(|| caches.snapshots.get(&key)).flatten(),
        volume: is_remote.then(|| caches.volumes.by(&VolumeIndex::DataVolume(uid)).into_iter().next()).flatten(),
        percent: pod.as_ref().and_then(|pod| {
            let known = caches.import_progress.get(&Key::of(&pod.metadata))?;
            (known.metadata.uid == pod.metadata.uid).then_some(known.percent)
        }),
        users: caches.claim_users.get(&key),
        warning: caches.claim_warnings.get(&made),
        source: claim,
        is_snapshot,
        temporary,
        pod,
        key,
    })
}

/// Returns true if the provisioner of a class is a CSI driver. Drivers need no `CSIDriver` object; a class of snapshots names others.
pub(in crate::importer) fn is_csi(caches: &Caches, class: &CachedStorageClass) -> bool {
    let provisioner = &class.provisioner;
    caches.csi_drivers.get(&Key::cluster_wide(provisioner.clone())).is_some()
        || !caches.snapshot_classes.by(&SnapshotClassIndex::Driver(provisioner.clone())).is_empty()
}

/// Returns true if no DataVolume is filling the claim.
fn is_filled(caches: &Caches, claim: &CachedClaim) -> bool {
    let Some(owner) = api::owner::controller_of_kind::<DataVolume>(&claim.metadata) else { return true };
    let key = Key::beside(&claim.metadata, owner.name.clone());
    let volume = caches.data_volumes.get(&key);
    volume.is_none_or(|volume| {
        volume.metadata.uid.as_deref() != Some(&*owner.uid) || volume.phase().as_str() == "Succeeded"
    })
}

/// Wakes DataVolumes when the objects of their clones change.
pub(in crate::importer) fn watch(caches: &Arc<Caches>, wake: &Wake) {
    let (woken, of) = (wake.clone(), caches.clone());
    caches.claims.listen(move |(former, present)| {
        let Some(claim) = present.or(former) else { return };
        let key = Key::of(&claim.metadata);
        if former.is_some_and(|former| present.is_none_or(|present| present.metadata.uid != former.metadata.uid)) {
            of.claim_users.observe_deleted(&key, None);
            of.claim_warnings.observe_deleted(&key, None);
        }
        woken.keys(receiver(claim));
        woken.keys(of.data_volumes.keys_by(&DataVolumeIndex::Claim(key)));
    });
    // A claim that a DataVolume fills is whole when that says so, which is after the last change of the claim.
    let volumes = caches.data_volumes.clone();
    wake.on(&caches.data_volumes, move |former, present| {
        let phase = |volume: Option<&DataVolume>| volume.map(DataVolume::phase);
        let changed = present.or(former).filter(|_| phase(former) != phase(present));
        let claim = changed.map(|volume| DataVolumeIndex::Claim(Key::of(&volume.metadata)));
        claim.map(|claim| volumes.keys_by(&claim)).into_iter().flatten()
    });
    let volumes = caches.data_volumes.clone();
    wake.on_object(&caches.snapshots, move |snapshot| {
        volumes.keys_by(&DataVolumeIndex::Snapshot(Key::of(&snapshot.metadata)))
    });
    wake.on_object(&caches.volumes, CachedVolume::receiver);
    let volumes = caches.data_volumes.clone();
    wake.on(&caches.claim_users, move |_, present| {
        let claim = present.map(|users| DataVolumeIndex::Claim(Key::of(users.meta())));
        claim.map(|claim| volumes.keys_by(&claim)).into_iter().flatten()
    });
    let (woken, of) = (wake.clone(), caches.clone());
    caches.claim_warnings.listen(move |(_, present)| {
        let Some(key) = present.map(|warning| Key::of(warning.meta())) else { return };
        woken.keys(of.claims.get(&key).and_then(|claim| receiver(&claim)));
        woken.key(key);
    });
    let of = caches.clone();
    wake.on_object(&caches.import_pods, move |pod| served(&of, pod));
    let of = caches.clone();
    wake.on(&caches.import_progress, move |_, present| {
        present.and_then(|progress| served(&of, &*of.import_pods.get(&Key::of(&progress.metadata))?))
    });
}

/// Returns the DataVolume whose temporary claim a pod fills.
fn served(caches: &Caches, pod: &CachedImportPod) -> Option<Key> {
    let owner = api::owner::controller_of_kind::<PersistentVolumeClaim>(&pod.metadata)?;
    let claim = caches.claims.get(&Key::new(pod.metadata.namespace.clone()?, owner.name.clone()))?;
    receiver(&claim)
}

/// Returns the DataVolume that a temporary claim serves.
fn receiver(claim: &CachedClaim) -> Option<Key> {
    let (namespace, name) = claim.metadata.annotations.as_ref()?.get(annotation::HAND_OVER_TO)?.split_once('/')?;
    Some(Key::new(namespace, name))
}
