//! Metadata reduced to the parts that controllers read.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Keeps names, versions, times and owners.
pub(super) fn slim(mut meta: ObjectMeta) -> ObjectMeta {
    // Vectors that were parsed have room for more entries.
    meta.owner_references.iter_mut().for_each(Vec::shrink_to_fit);
    ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        generation: meta.generation,
        creation_timestamp: meta.creation_timestamp,
        deletion_timestamp: meta.deletion_timestamp,
        deletion_grace_period_seconds: meta.deletion_grace_period_seconds,
        owner_references: meta.owner_references,
        ..ObjectMeta::default()
    }
}

/// Copies the entries of a map with these keys.
pub(super) fn keep(map: Option<&BTreeMap<String, String>>, keys: &[&str]) -> Option<BTreeMap<String, String>> {
    let kept: BTreeMap<String, String> = map?
        .iter()
        .filter(|(key, _)| keys.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    (!kept.is_empty()).then_some(kept)
}
