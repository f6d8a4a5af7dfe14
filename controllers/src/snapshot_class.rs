//! The class of the volume snapshots of a storage class.

use std::sync::Arc;

use crate::{
    cache::Key,
    resources::{
        Caches,
        snapshot_classes::{CachedSnapshotClass, SnapshotClassIndex},
    },
};

/// Returns the class of the volume snapshots of a storage class; `None` without one.
///
/// # Errors
/// Returns the message about several classes of which none is the default.
pub(crate) fn of(caches: &Caches, storage_class: &str) -> Result<Option<String>, String> {
    let key = Key::cluster_wide(storage_class);
    let Some(class) = caches.storage_classes.get(&key) else { return Ok(None) };
    if let Some(named) = caches.storage_profiles.get(&key).and_then(|profile| profile.snapshot_class.clone()) {
        let exists = caches.snapshot_classes.get(&Key::cluster_wide(named.as_str())).is_some();
        return Ok(exists.then_some(named));
    }
    choose(&class.provisioner, &caches.snapshot_classes.by(&SnapshotClassIndex::Driver(class.provisioner.clone())))
}

/// Chooses one of the classes of a driver: the only one, else the only default.
fn choose(driver: &str, classes: &[Arc<CachedSnapshotClass>]) -> Result<Option<String>, String> {
    let name = |class: &CachedSnapshotClass| class.metadata.name.clone();
    let defaults: Vec<_> = classes.iter().filter(|class| class.is_default).collect();
    match (classes, defaults.as_slice()) {
        ([], _) => Ok(None),
        ([only], _) => Ok(name(only)),
        (_, [default]) => Ok(name(default)),
        _ => Err(format!("{} matching VolumeSnapshotClasses for {driver}", classes.len())),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    #[test]
    fn class_is_the_only_one_or_the_default() {
        let class = |(name, is_default): &(&str, bool)| {
            let metadata = ObjectMeta { name: Some((*name).to_owned()), ..ObjectMeta::default() };
            Arc::new(CachedSnapshotClass { metadata, is_default: *is_default, driver: "d".to_owned() })
        };
        for (classes, chosen) in [
            (&[][..], Ok(None)),
            (&[("a", false)], Ok(Some("a"))),
            (&[("a", false), ("b", true)], Ok(Some("b"))),
            (&[("a", false), ("b", false)], Err("2 matching VolumeSnapshotClasses for d")),
            (&[("a", true), ("b", true)], Err("2 matching VolumeSnapshotClasses for d")),
        ] {
            let classes: Vec<_> = classes.iter().map(class).collect();
            let found = choose("d", &classes);
            assert_eq!(found.as_ref().map(Option::as_deref).map_err(String::as_str), chosen);
        }
    }
}
