//! Static volumes for new users: a default storage class whose claims bind to folders that all nodes have.

use std::fs;

use serde_json::{Value, json};

use crate::{
    error::{FileContext, Result},
    kubectl::Kubectl,
    plan::Plan,
    progress::Progress,
};

/// Name of the storage class and beginning of the names of its volumes.
const CLASS: &str = "static";
/// Sizes of the volumes in GiB. A claim takes the smallest one that suffices, and no room is reserved for it.
const SIZES: &[u8] = &[1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 16, 16];

/// Creates the storage class and its volumes. Volumes whose claims are gone are emptied and offered again.
///
/// # Errors
/// Fails if the API server refuses an object or a folder cannot be made.
pub(crate) fn provide(plan: &Plan, kubectl: &Kubectl, progress: &Progress) -> Result<()> {
    let phases = "jsonpath={range .items[*]}{.metadata.name} {.status.phase}{\"\\n\"}{end}";
    let listed = kubectl.run("listing the volumes", &["get", "persistentvolumes", "-o", phases])?;
    for name in released(&listed) {
        kubectl.run("deleting a volume", &["delete", "persistentvolume", name])?;
        let folder = plan.shared().join(name);
        fs::remove_dir_all(&folder).at("remove", folder)?;
    }
    for name in names() {
        let folder = plan.shared().join(name);
        fs::create_dir_all(&folder).at("create", folder)?;
    }
    kubectl.apply("creating the storage class and its volumes", &manifest(plan))?;
    progress.step(format!("storage class {CLASS} (default): {} volumes of up to 16Gi", SIZES.len()));
    Ok(())
}

fn names() -> impl Iterator<Item = String> {
    (1..=SIZES.len()).map(|number| format!("{CLASS}-{number}"))
}

/// Returns the names of our volumes whose claims were deleted, from lines `NAME PHASE`.
fn released(listed: &str) -> Vec<&str> {
    let ours = |name: &str| names().any(|own| own == name);
    listed.lines().filter_map(|line| line.strip_suffix(" Released")).filter(|name| ours(name)).collect()
}

fn manifest(plan: &Plan) -> String {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
    });
    let volumes = names().zip(SIZES).map(|(name, size)| -> Value {
        let every_node = json!({"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]});
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "storageClassName": CLASS,
                "capacity": {"storage": format!("{size}Gi")},
                "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "local": {"path": plan.shared().join(&name)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [every_node]}},
            },
        })
    });
    let items: Vec<Value> = std::iter::once(class).chain(volumes).collect();
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn only_own_volumes_without_a_claim_are_offered_again() {
        let listed = "static-1 Bound\nstatic-2 Released\nstatic-3 Available\nstatic-99 Released\nother Released\n";
        assert_eq!(released(listed), ["static-2"]);
        assert!(released("").is_empty());
    }

    #[test]
    fn class_is_the_default_and_its_volumes_are_folders_of_all_nodes() {
        let list: Value = serde_json::from_str(&manifest(&Plan::new(PathBuf::from("/src"), 0).unwrap())).unwrap();
        let items = list["items"].as_array().unwrap();
        assert_eq!(items.len(), SIZES.len() + 1);
        assert_eq!(items[0]["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"], "true");
        assert_eq!(items[1]["spec"]["local"]["path"], "/src/build/cluster/shared/static-1");
        assert_eq!(items[14]["spec"]["capacity"]["storage"], "16Gi");
    }
}
