//! The claim of a DataVolume: storage class, modes and size as far as the DataVolume leaves them open, labels and annotations.

use std::collections::BTreeMap;

use api::{
    cdi::{DataVolume, annotation, data_volume::StorageSpec, label},
    quantity,
};
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};

use crate::{
    resources::{
        claims::SHARED,
        storage_classes::CachedStorageClass,
        storage_profiles::{CachedStorageProfile, PropertySet},
    },
    runtime::Kind,
};

/// Part of a file system that its own data take, in percent: the default of CDI.
const OVERHEAD: i64 = 6;
/// Unit of the sizes of file systems.
const MIB: i64 = 1 << 20;
/// Annotation of claims that others fill.
const EXTERNAL: &str = "cdi.kubevirt.io/externalPopulation";
/// Access mode that every class can provide.
const SINGLE: &str = "ReadWriteOnce";
const BLOCK: &str = "Block";
const FILE_SYSTEM: &str = "Filesystem";
/// Resource of claims.
const STORAGE: &str = "storage";
/// Label of file systems: a disk image fills them, which is no reason for an alert.
const NO_ALERT: (&str, &str) = ("alerts.k8s.io/KubePersistentVolumeFillingUp", "disabled");
/// Prefixes of annotations of a DataVolume that its claim does not get: storage controllers and Ferrovirt decide by them.
const KEPT_BACK: [&str; 5] = [
    "ferrovirt.io/",
    "pv.kubernetes.io/",
    "volume.kubernetes.io/",
    "volume.beta.kubernetes.io/",
    "kubectl.kubernetes.io/",
];

/// The least size of a claim whose DataVolume gives none, for this spec.
pub(crate) type SizeOf<'a> = &'a dyn Fn(&PersistentVolumeClaimSpec) -> Option<i64>;

/// The objects from which a claim is completed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Defaults<'a> {
    /// The class that the DataVolume names, or else the default.
    pub class: Option<&'a CachedStorageClass>,
    /// The profile of the class.
    pub profile: Option<&'a CachedStorageProfile>,
}

/// Returns the storage class that the DataVolume names.
pub(crate) fn class_name(volume: &DataVolume) -> Option<&str> {
    let pvc = volume.spec.pvc.as_ref().and_then(|pvc| pvc.storage_class_name.as_deref());
    pvc.or_else(|| volume.spec.storage.as_ref()?.storage_class_name.as_deref())
}

/// Returns the spec of the claim, or why it cannot be completed.
pub(crate) fn spec(
    volume: &DataVolume,
    defaults: Defaults<'_>,
    size: SizeOf<'_>,
) -> Result<PersistentVolumeClaimSpec, String> {
    match (&volume.spec.pvc, &volume.spec.storage) {
        (Some(pvc), _) => Ok(pvc.clone()),
        (None, Some(storage)) => complete(volume, storage, defaults, size),
        (None, None) => Err("Missing Data volume PVC".to_owned()),
    }
}

fn complete(
    volume: &DataVolume,
    storage: &StorageSpec,
    defaults: Defaults<'_>,
    size: SizeOf<'_>,
) -> Result<PersistentVolumeClaimSpec, String> {
    let class = storage.storage_class_name.clone().or_else(|| defaults.class?.metadata.name.clone());
    if storage.access_modes.is_empty() && class.is_none() {
        return Err("PVC spec is missing accessMode and no storageClass to choose profile".to_owned());
    }
    let (modes, mode) = modes(storage, is_archive(volume), defaults);
    let mut spec = PersistentVolumeClaimSpec {
        access_modes: Some(modes),
        data_source: storage.data_source.clone(),
        data_source_ref: storage.data_source_ref.clone(),
        resources: Some(storage.resources.clone()),
        selector: storage.selector.clone(),
        storage_class_name: class,
        volume_mode: Some(mode),
        volume_name: storage.volume_name.clone(),
        ..PersistentVolumeClaimSpec::default()
    };
    let given = storage.resources.requests.as_ref().and_then(|requests| requests.get(STORAGE));
    let bytes = match given {
        Some(given) => {
            let bytes = quantity::units(given).map_err(|error| format!("the size is not valid: {error}"))?;
            if has_image(volume, &spec) { with_overhead(bytes) } else { Some(bytes) }
        }
        None => size(&spec),
    };
    let bytes = bytes.ok_or("PVC size is missing, and the size of the source is not known yet")?;
    let bytes = bytes.max(defaults.profile.and_then(|profile| profile.minimum).unwrap_or_default());
    let mut resources = storage.resources.clone();
    resources.requests.get_or_insert_default().insert(STORAGE.to_owned(), quantity::bytes(bytes));
    spec.resources = Some(resources);
    Ok(spec)
}

/// Returns access modes and volume mode: those that the DataVolume names, then those of the first set of the profile that fits, then
/// those that every class can provide. Volumes that several nodes can use let VMs be migrated.
fn modes(storage: &StorageSpec, is_archive: bool, defaults: Defaults<'_>) -> (Vec<String>, String) {
    let mode_of = |set: &PropertySet| set.volume_mode.clone().unwrap_or_else(|| FILE_SYSTEM.to_owned());
    let wanted = storage.volume_mode.clone().or_else(|| is_archive.then(|| FILE_SYSTEM.to_owned()));
    let fits = |set: &&PropertySet| {
        let given = &storage.access_modes;
        !set.access_modes.is_empty()
            && (given.is_empty() || given.iter().any(|mode| set.access_modes.contains(mode)))
            && wanted.as_ref().is_none_or(|wanted| *wanted == mode_of(set))
    };
    let set = defaults.profile.and_then(|profile| profile.sets.iter().find(fits));
    let mode = wanted.or_else(|| set.map(mode_of)).unwrap_or_else(|| FILE_SYSTEM.to_owned());
    if !storage.access_modes.is_empty() {
        return (storage.access_modes.clone(), mode);
    }
    let shared = defaults.class.map(|class| class.shared).unwrap_or_default();
    let is_shared = if mode == BLOCK { shared.blocks } else { shared.files };
    let known = if is_shared { SHARED } else { SINGLE };
    (set.map_or_else(|| vec![known.to_owned()], |set| set.access_modes.clone()), mode)
}

fn is_archive(volume: &DataVolume) -> bool {
    volume.spec.content_type.as_deref() == Some("archive")
}

/// Returns true if a file system of the claim holds the image of a disk.
fn has_image(volume: &DataVolume, spec: &PersistentVolumeClaimSpec) -> bool {
    spec.volume_mode.as_deref() != Some(BLOCK) && !is_archive(volume)
}

/// Returns the size of a file system that holds a disk of this size: in whole MiB, with the overhead on top, rounded up.
fn with_overhead(bytes: i64) -> Option<i64> {
    let rounded = bytes.checked_add(MIB - 1)? / MIB * MIB;
    Some(rounded.checked_mul(100 + OVERHEAD)?.checked_add(99)? / 100)
}

/// Returns the size of the disk in a claim of this size.
pub(crate) fn without_overhead(bytes: i64) -> i64 {
    let disk = bytes.saturating_mul(100) / (100 + OVERHEAD);
    disk - disk % MIB
}

/// Overhead of file systems, for the size of clones.
pub(crate) fn overhead() -> f64 {
    0.06
}

/// Renders the claim. `is_external`: others fill it.
pub(crate) fn render(volume: &DataVolume, spec: PersistentVolumeClaimSpec, is_external: bool) -> PersistentVolumeClaim {
    let of = &volume.metadata;
    let mut labels = of.labels.clone().unwrap_or_default();
    labels.retain(|key, _| key != label::OWNED_BY);
    let mut insert = |(key, value): (&str, &str)| labels.insert(key.to_owned(), value.to_owned());
    insert((label::APP, label::APP_VALUE));
    if spec.volume_mode.as_deref() != Some(BLOCK) {
        insert(NO_ALERT);
    }
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: of.name.clone(),
            namespace: of.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations(volume, is_external)),
            owner_references: Some(vec![Kind::DataVolume.owner_reference(of)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

/// Returns the annotations: those of the DataVolume, and those by which consumers of the claim know that it is not filled yet.
fn annotations(volume: &DataVolume, is_external: bool) -> BTreeMap<String, String> {
    let of = &volume.metadata;
    let mut annotations = of.annotations.clone().unwrap_or_default();
    let ours = [annotation::POPULATED_FOR, annotation::PRE_POPULATED];
    annotations
        .retain(|key, _| !ours.contains(&key.as_str()) && !KEPT_BACK.iter().any(|prefix| key.starts_with(prefix)));
    annotations.insert(annotation::CREATED_FOR.to_owned(), of.uid.clone().unwrap_or_default());
    if is_external {
        annotations.insert(EXTERNAL.to_owned(), "true".to_owned());
        return annotations;
    }
    let content = volume.spec.content_type.as_deref().filter(|content| !content.is_empty()).unwrap_or("kubevirt");
    let preallocation = volume.spec.preallocation.unwrap_or_default().to_string();
    let own = [
        (annotation::USE_POPULATOR, "false"),
        (annotation::CONTENT_TYPE, content),
        (annotation::PREALLOCATION_REQUESTED, &preallocation),
        (annotation::POD_PHASE, "Pending"),
        (annotation::POD_RESTARTS, "0"),
    ];
    annotations.extend(own.map(|(key, value)| (key.to_owned(), value.to_owned())));
    annotations
}

/// Returns the size that a claim requests, in bytes.
pub(crate) fn requested(requests: &BTreeMap<String, Quantity>) -> Option<i64> {
    quantity::units(requests.get(STORAGE)?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::sharing::Shared;

    fn volume(metadata: &Value, spec: &Value) -> DataVolume {
        let mut object = json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "metadata": {"name": "d", "namespace": "n", "uid": "u"}, "spec": spec,
        });
        json_patch::merge(&mut object["metadata"], metadata);
        serde_json::from_value(object).unwrap()
    }

    fn class() -> CachedStorageClass {
        CachedStorageClass {
            metadata: ObjectMeta { name: Some("fast".to_owned()), ..ObjectMeta::default() },
            ..CachedStorageClass::default()
        }
    }

    fn completed(storage: &Value, content: Option<&str>, class: Option<&CachedStorageClass>) -> Result<Value, String> {
        let volume = volume(&json!({}), &json!({"storage": storage, "contentType": content}));
        let spec = spec(&volume, Defaults { class, profile: None }, &|_| Some(5 * MIB))?;
        Ok(serde_json::to_value(spec).unwrap())
    }

    #[test]
    fn open_fields_are_completed() {
        let sized = |size: &str| json!({"requests": {"storage": size}});
        for (storage, content, modes, mode, class_name, size) in [
            (json!({"resources": sized("100Mi")}), None, "ReadWriteOnce", "Filesystem", "fast", "106Mi"),
            // A part of a MiB counts as a whole one.
            (json!({"resources": sized("1")}), None, "ReadWriteOnce", "Filesystem", "fast", "1111491"),
            (json!({"resources": sized("100Mi")}), Some("archive"), "ReadWriteOnce", "Filesystem", "fast", "100Mi"),
            (
                json!({"resources": sized("1Gi"), "volumeMode": "Block", "accessModes": ["ReadWriteMany"]}),
                None,
                "ReadWriteMany",
                "Block",
                "fast",
                "1Gi",
            ),
            (
                json!({"resources": sized("1Gi"), "volumeMode": "Block", "storageClassName": "slow"}),
                None,
                "ReadWriteOnce",
                "Block",
                "slow",
                "1Gi",
            ),
            // That of the source.
            (json!({"resources": {}}), None, "ReadWriteOnce", "Filesystem", "fast", "5Mi"),
        ] {
            let spec = completed(&storage, content, Some(&class())).unwrap();
            assert_eq!(spec["accessModes"], json!([modes]), "{storage}");
            assert_eq!(
                (&spec["volumeMode"], &spec["storageClassName"]),
                (&json!(mode), &json!(class_name)),
                "{storage}"
            );
            assert_eq!(spec["resources"]["requests"]["storage"], json!(size), "{storage}");
        }
    }

    #[test]
    fn open_modes_are_those_of_the_profile_or_of_the_driver() {
        let set = |access: &str, mode: &str| PropertySet {
            access_modes: vec![access.to_owned()],
            volume_mode: Some(mode.to_owned()),
        };
        let (many, one) = ("ReadWriteMany", "ReadWriteOnce");
        let sets = [set(many, "Block"), set(one, "Block"), set(one, "Filesystem")];
        let (files, blocks) = (Shared { files: true, blocks: false }, Shared { files: false, blocks: true });
        for (storage, archive, sets, shared, access, mode) in [
            (json!({}), false, &sets[..], files, many, "Block"),
            (json!({}), true, &sets, files, one, "Filesystem"),
            (json!({"volumeMode": "Filesystem"}), false, &sets, blocks, one, "Filesystem"),
            (json!({"accessModes": [one]}), false, &sets, files, one, "Block"),
            (json!({"accessModes": ["ReadOnlyMany"]}), false, &sets, files, "ReadOnlyMany", "Filesystem"),
            (json!({"accessModes": [many], "volumeMode": "Filesystem"}), false, &sets, files, many, "Filesystem"),
            (json!({"volumeMode": "Filesystem"}), false, &sets[..1], files, many, "Filesystem"),
            (json!({}), false, &[], Shared::default(), one, "Filesystem"),
            (json!({}), false, &[], files, many, "Filesystem"),
            (json!({}), false, &[], blocks, one, "Filesystem"),
            (json!({"volumeMode": "Block"}), false, &[], blocks, many, "Block"),
            (json!({"volumeMode": "Block"}), false, &[], files, one, "Block"),
        ] {
            let mut storage = storage;
            storage["resources"] = json!({"requests": {"storage": "1Gi"}});
            let class = CachedStorageClass { shared, ..class() };
            let profile = CachedStorageProfile { sets: sets.to_vec(), ..CachedStorageProfile::default() };
            let defaults = Defaults { class: Some(&class), profile: Some(&profile) };
            let content = archive.then_some("archive");
            let spec =
                spec(&volume(&json!({}), &json!({"storage": storage, "contentType": content})), defaults, &|_| None);
            let spec = spec.unwrap();
            let found = (spec.access_modes.unwrap(), spec.volume_mode.unwrap());
            assert_eq!(found, (vec![access.to_owned()], mode.to_owned()), "{storage} {archive} {sets:?} {shared:?}");
        }
    }

    #[test]
    fn claim_has_the_least_size_that_its_storage_supports() {
        let profile = CachedStorageProfile { minimum: Some(4 << 30), ..CachedStorageProfile::default() };
        let class = class();
        let defaults = Defaults { class: Some(&class), profile: Some(&profile) };
        for (size, expected) in [("1Gi", "4Gi"), ("5Gi", "5Gi")] {
            let storage = json!({"volumeMode": "Block", "resources": {"requests": {"storage": size}}});
            let spec = spec(&volume(&json!({}), &json!({"storage": storage})), defaults, &|_| None).unwrap();
            assert_eq!(spec.resources.unwrap().requests.unwrap()[STORAGE].0, expected);
        }
    }

    #[test]
    fn spec_that_cannot_be_completed_is_refused() {
        let text = completed(&json!({"resources": {"requests": {"storage": "1Gi"}}}), None, None).unwrap_err();
        assert_eq!(text, "PVC spec is missing accessMode and no storageClass to choose profile");
        let unsized_ = volume(&json!({}), &json!({"storage": {"resources": {}}}));
        let class = class();
        let defaults = Defaults { class: Some(&class), profile: None };
        assert!(spec(&unsized_, defaults, &|_| None).unwrap_err().starts_with("PVC size is missing"));
        assert_eq!(spec(&volume(&json!({}), &json!({})), defaults, &|_| None).unwrap_err(), "Missing Data volume PVC");
    }

    #[test]
    fn literal_spec_is_taken_as_it_is() {
        let pvc = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}});
        let volume = volume(&json!({}), &json!({"pvc": pvc}));
        let spec = spec(&volume, Defaults::default(), &|_| Some(1)).unwrap();
        assert_eq!(serde_json::to_value(spec).unwrap(), pvc);
    }

    #[test]
    fn claim_has_the_metadata_of_the_volume() {
        let metadata = json!({
            "labels": {"a": "b", "cdi.kubevirt.io/OwnedByUID": "x"},
            "annotations": {
                "c": "d", "ferrovirt.io/hand-over-to": "n/x", "volume.kubernetes.io/selected-node": "x",
                "cdi.kubevirt.io/storage.populatedFor": "d", "cdi.kubevirt.io/storage.prePopulated": "d",
            },
        });
        let claim =
            render(&volume(&metadata, &json!({"preallocation": true})), PersistentVolumeClaimSpec::default(), false);
        let claim = serde_json::to_value(claim).unwrap();
        let metadata = &claim["metadata"];
        assert_eq!(
            metadata["labels"],
            json!({"a": "b", "app": "containerized-data-importer",
                "alerts.k8s.io/KubePersistentVolumeFillingUp": "disabled"})
        );
        assert_eq!(
            metadata["annotations"],
            json!({
                "c": "d", "cdi.kubevirt.io/createdForDataVolume": "u", "cdi.kubevirt.io/storage.contentType": "kubevirt",
                "cdi.kubevirt.io/storage.pod.phase": "Pending", "cdi.kubevirt.io/storage.pod.restarts": "0",
                "cdi.kubevirt.io/storage.preallocation.requested": "true",
                "cdi.kubevirt.io/storage.usePopulator": "false",
            })
        );
        let owner = &metadata["ownerReferences"][0];
        assert_eq!(
            (&owner["kind"], &owner["uid"], &owner["controller"]),
            (&json!("DataVolume"), &json!("u"), &json!(true))
        );
    }

    #[test]
    fn disk_fits_into_the_claim_that_was_made_for_it() {
        for size in [1, MIB, 100 * MIB, 10 * 1024 * MIB + 1] {
            let claim = with_overhead(size).unwrap();
            assert!(without_overhead(claim) >= size, "{size}: {claim}");
            assert!(without_overhead(claim) < size + 2 * MIB, "{size}: {claim}");
        }
        assert_eq!(with_overhead(i64::MAX), None);
    }
}
