//! The claims of a restore as objects.

use std::collections::BTreeMap;

use api::{
    cdi::{annotation as cdi, label},
    constants::{annotation, label as own},
    names, persistent_state, quantity,
    snapshot::{
        content::{SourceVirtualMachine, VolumeBackup},
        restore::{VolumeRestore, VolumeRestoreOverride},
    },
};
use k8s_openapi::{
    api::core::v1::{
        PersistentVolumeClaim, PersistentVolumeClaimSpec, TypedLocalObjectReference, TypedObjectReference,
        VolumeResourceRequirements,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use super::{Observed, Source, marks};
use crate::runtime::Kind;

/// Resource of claims.
const STORAGE: &str = "storage";
/// Prefixes of annotations that a restored claim does not get: its controllers write them.
const DROPPED: [&str; 7] = [
    "pv.kubernetes.io",
    "volume.beta.kubernetes.io",
    "cdi.kubevirt.io",
    "volume.kubernetes.io",
    "k8s.io/CloneRequest",
    "k8s.io/CloneOf",
    "ferrovirt.io",
];
/// API group of volume snapshots.
const GROUP: &str = "snapshot.storage.k8s.io";
/// Storage class of claims that are never bound. No cluster has it.
const NO_CLASS: &str = "none.ferrovirt.io";

/// Returns the name of the volume with the state of a captured VM.
pub(super) fn state_volume(vm: &SourceVirtualMachine) -> String {
    format!("{}{}", persistent_state::PREFIX, vm.metadata.name.as_deref().unwrap_or_default())
}

/// Returns true if the VM of the snapshot is restored. The claims of another one are in use, or belong to somebody else by now.
pub(super) fn is_same_vm(observed: &Observed, source: Source<'_>) -> bool {
    source.vm.metadata.name.as_deref() == Some(observed.target())
}

/// Renders the claim of this name that holds the snapshot of a volume: it is never bound.
pub(super) fn holding(observed: &Observed, restored: &VolumeRestore, name: String) -> PersistentVolumeClaim {
    let [(key, restore), (last, _)] = marks(observed);
    let restore = restore.as_str().unwrap_or_default().to_owned();
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: observed.restore.metadata.namespace.clone(),
            annotations: Some([(key.to_owned(), restore), (last.to_owned(), observed.id())].into()),
            owner_references: observed.vm.as_deref().map(|vm| vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            resources: Some(VolumeResourceRequirements {
                requests: Some([(STORAGE.to_owned(), quantity::bytes(1 << 20))].into()),
                limits: None,
            }),
            storage_class_name: Some(NO_CLASS.to_owned()),
            data_source: Some(TypedLocalObjectReference {
                api_group: Some(GROUP.to_owned()),
                kind: "VolumeSnapshot".to_owned(),
                name: restored.volume_snapshot_name.clone(),
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    }
}

/// Renders a claim.
pub(super) fn render(
    observed: &Observed,
    source: Source<'_>,
    restored: &VolumeRestore,
    backup: &VolumeBackup,
) -> PersistentVolumeClaim {
    let of = &backup.persistent_volume_claim;
    let (owner, owned_later) = owner(observed, source, restored, backup);
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(restored.persistent_volume_claim.clone()),
            namespace: observed.restore.metadata.namespace.clone(),
            labels: Some(labels(observed, source, backup)),
            annotations: Some(annotations(observed, restored, backup, owned_later)),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(spec(observed, restored, &of.spec.clone().unwrap_or_default())),
        status: None,
    }
}

/// Returns the owner of a claim, and true if the VM becomes it once it exists. Claims of DataVolumes are taken over by these.
fn owner(
    observed: &Observed,
    source: Source<'_>,
    restored: &VolumeRestore,
    backup: &VolumeBackup,
) -> (Option<OwnerReference>, bool) {
    let policy = observed.restore.spec.volume_ownership_policy.as_deref();
    if restored.data_volume_name.is_some() || policy == Some("None") {
        return (None, false);
    }
    if let Some(vm) = observed.vm.as_deref() {
        return (Some(Kind::VirtualMachine.owner_reference(&vm.metadata)), false);
    }
    let former = &source.vm.metadata;
    let is_former = |owner: &OwnerReference| {
        owner.kind == Kind::VirtualMachine.kind()
            && former.name.as_ref() == Some(&owner.name)
            && former.uid.as_ref() == Some(&owner.uid)
    };
    (None, backup.persistent_volume_claim.metadata.owner_references.iter().flatten().any(is_former))
}

fn labels(observed: &Observed, source: Source<'_>, backup: &VolumeBackup) -> BTreeMap<String, String> {
    let mut labels = backup.persistent_volume_claim.metadata.labels.clone().unwrap_or_default();
    labels.extend(overridden(observed, backup).flat_map(|change| change.labels.clone()));
    let of_others = [persistent_state::LABEL, persistent_state::MIGRATION_LABEL, label::OWNED_BY];
    labels.retain(|key, _| !of_others.contains(&key.as_str()) && !is_reserved(key));
    let text = |part: &Option<String>| names::label_value(part.as_deref().unwrap_or_default());
    let of = &source.vm.metadata;
    // A VM that the restore creates can start before the restore is complete.
    if observed.vm.is_none() && is_same_vm(observed, source) && backup.volume_name == state_volume(source.vm) {
        labels.insert(persistent_state::LABEL.to_owned(), text(&of.name));
    }
    labels.insert(own::RESTORE_SOURCE.to_owned(), text(&of.name));
    labels.insert(own::RESTORE_SOURCE_NAMESPACE.to_owned(), text(&of.namespace));
    labels
}

fn annotations(
    observed: &Observed,
    restored: &VolumeRestore,
    backup: &VolumeBackup,
    owned_later: bool,
) -> BTreeMap<String, String> {
    let former = backup.persistent_volume_claim.metadata.annotations.iter().flatten();
    let kept =
        former.filter(|(key, _)| *key == cdi::CONTENT_TYPE || !DROPPED.iter().any(|prefix| key.starts_with(prefix)));
    let mut annotations: BTreeMap<String, String> = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
    annotations.extend(overridden(observed, backup).flat_map(|change| change.annotations.clone()));
    annotations.retain(|key, _| !is_reserved(key));
    let name = observed.restore.metadata.name.clone().unwrap_or_default();
    annotations.insert(annotation::RESTORE.to_owned(), name.clone());
    annotations.insert(annotation::LAST_RESTORE.to_owned(), observed.id());
    if let Some(volume) = &restored.data_volume_name {
        annotations.insert(cdi::POPULATED_FOR.to_owned(), volume.clone());
    }
    if owned_later {
        annotations.insert(annotation::OWNED_BY_VM.to_owned(), name);
    }
    annotations
}

/// Returns true for a key that only controllers write. That of a former restore would decide about the owner of this claim.
fn is_reserved(key: &str) -> bool {
    ["ferrovirt.io/", "restore.kubevirt.io/"].iter().any(|prefix| key.starts_with(prefix))
        || cdi::RESERVED.contains(&key)
}

fn overridden<'a>(observed: &'a Observed, backup: &'a VolumeBackup) -> impl Iterator<Item = &'a VolumeRestoreOverride> {
    let changes = observed.restore.spec.volume_restore_overrides.iter();
    changes.filter(|change| change.volume_name.as_ref() == Some(&backup.volume_name))
}

/// Returns the spec of a claim: size, class and modes of the former one, the content of the snapshot. Nothing else is taken over: a
/// volume name or a selector would give the claim another volume.
fn spec(
    observed: &Observed,
    restored: &VolumeRestore,
    former: &PersistentVolumeClaimSpec,
) -> PersistentVolumeClaimSpec {
    let snapshot = observed.volume_snapshots.get(&restored.volume_snapshot_name);
    let requests = former.resources.as_ref().and_then(|resources| resources.requests.clone());
    let mut requests = requests.unwrap_or_default();
    let least = snapshot.and_then(|snapshot| snapshot.restore_size).unwrap_or(0);
    if requests.get(STORAGE).and_then(|size| quantity::units(size).ok()).is_none_or(|size| size < least) {
        requests.insert(STORAGE.to_owned(), quantity::bytes(least));
    }
    let (kind, name) = ("VolumeSnapshot".to_owned(), restored.volume_snapshot_name.clone());
    let api_group = Some(GROUP.to_owned());
    PersistentVolumeClaimSpec {
        access_modes: former.access_modes.clone(),
        resources: Some(VolumeResourceRequirements { requests: Some(requests), limits: None }),
        storage_class_name: former.storage_class_name.clone(),
        volume_mode: former.volume_mode.clone(),
        data_source: Some(TypedLocalObjectReference {
            api_group: api_group.clone(),
            kind: kind.clone(),
            name: name.clone(),
        }),
        data_source_ref: Some(TypedObjectReference { api_group, kind, name, namespace: None }),
        ..PersistentVolumeClaimSpec::default()
    }
}
