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
    choose(storage_class, &caches.snapshot_classes.by(&SnapshotClassIndex::Driver(class.provisioner.clone())))
}

/// Chooses one of the classes of a driver, which are in the order of their names: the only one, else a default, else one that carries
/// the annotation of defaults.
fn choose(storage_class: &str, classes: &[Arc<CachedSnapshotClass>]) -> Result<Option<String>, String> {
    let marked = |value: bool| classes.iter().find(|class| class.is_default == Some(value));
    let chosen = match classes {
        [] => return Ok(None),
        [only] => only,
        several => marked(true)
            .or_else(|| marked(false))
            .ok_or_else(|| format!("{} matching VolumeSnapshotClasses for {storage_class}", several.len()))?,
    };
    Ok(chosen.metadata.name.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::snapshot_classes::VolumeSnapshotClass;

    #[test]
    fn class_is_the_only_one_or_the_default() {
        let class = |(name, mark): &(&str, Option<&str>)| {
            let annotations = json!({"snapshot.storage.kubernetes.io/is-default-class": mark});
            let annotations = mark.map(|_| annotations);
            let class = json!({"metadata": {"name": name, "annotations": annotations}, "driver": "d"});
            let class: VolumeSnapshotClass = serde_json::from_value(class).unwrap();
            Arc::new(CachedSnapshotClass::from(class))
        };
        let (yes, no) = (Some("true"), Some("false"));
        for (classes, chosen) in [
            (&[][..], Ok(None)),
            (&[("a", None)], Ok(Some("a"))),
            (&[("a", None), ("b", yes)], Ok(Some("b"))),
            (&[("a", None), ("b", no)], Ok(Some("b"))),
            (&[("a", no), ("b", yes)], Ok(Some("b"))),
            (&[("a", yes), ("b", yes)], Ok(Some("a"))),
            (&[("a", None), ("b", None)], Err("2 matching VolumeSnapshotClasses for fast")),
        ] {
            let classes: Vec<_> = classes.iter().map(class).collect();
            let found = choose("fast", &classes);
            assert_eq!(found.as_ref().map(Option::as_deref).map_err(String::as_str), chosen);
        }
    }
}
