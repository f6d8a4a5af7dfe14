//! The importer's watches and observations.

use std::sync::Arc;

use api::{VirtualMachine, cdi::DataVolume, owner};
use daemon::config::ConfigHandle;
use k8s_openapi::{api::core::v1::Toleration, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{Observed, claim, clone, pod, source};
use crate::{
    cache::Key,
    options::ImporterMode,
    resources::{
        Caches, Resource,
        import_pods::CachedImportPod,
        needs,
        storage_classes::{CachedStorageClass, StorageClassIndex, newest},
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// The controller of DataVolumes.
pub(crate) struct Importer {
    mode: ImporterMode,
    image: String,
    config: ConfigHandle,
}

impl Importer {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        let options = &setup.options;
        Self { mode: options.importer, image: options.importer_image.clone(), config: setup.config.clone() }
    }
}

/// Returns true if the importer begins imports: nobody else does.
pub(super) fn begins(mode: ImporterMode, caches: &Caches) -> bool {
    mode != ImporterMode::Off && caches.cdis.is_absent()
}

impl Controller for Importer {
    const NAME: &'static str = "importer";
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::DataVolumes,
        Resource::Claims,
        Resource::ImportPods,
        Resource::StorageClasses,
        Resource::Cdis,
        Resource::Namespaces,
        Resource::Volumes,
        Resource::Snapshots,
        Resource::SnapshotClasses,
        Resource::CsiDrivers,
        Resource::StorageProfiles,
        Resource::Vms,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.data_volumes);
        clone::facts::watch(caches, wake);
        let volumes = caches.data_volumes.clone();
        wake.on_object(&caches.claims, move |claim| {
            Some(Key::of(&claim.metadata)).filter(|key| volumes.len() > 0 && volumes.get(key).is_some())
        });
        wake.on_object(&caches.import_pods, filled_by);
        let pods = caches.import_pods.clone();
        wake.on(&caches.import_progress, move |_, present| {
            present.and_then(|progress| filled_by(&*pods.get(&Key::of(&progress.metadata))?))
        });
        wake.all_on_presence(&caches.cdis, &caches.data_volumes);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let volume = caches.data_volumes.get(attempt.key)?;
        let claim = caches.claims.get(attempt.key);
        let pod = caches.import_pods.get(&Key::new(attempt.key.namespace.clone(), pod::name(&attempt.key.name)));
        let pod = pod.filter(|pod| owner::is_controlled_by(&pod.metadata, &*volume));
        let progress = pod.as_ref().and_then(|pod| {
            let known = caches.import_progress.get(&Key::of(&pod.metadata))?;
            (known.metadata.uid == pod.metadata.uid).then_some(known.percent)
        });
        let class = match &claim {
            Some(claim) => {
                claim.storage_class.clone().and_then(|name| caches.storage_classes.get(&Key::cluster_wide(name)))
            }
            None => class(caches, &volume),
        };
        let named = class.as_ref().and_then(|class| class.metadata.name.clone());
        let named = named.or_else(|| claim::class_name(&volume).map(str::to_owned));
        let profile = named.and_then(|name| caches.storage_profiles.get(&Key::cluster_wide(name)));
        let begins = begins(self.mode, caches);
        let clone = source::source(&volume).ok();
        let clone = clone.and_then(|source| clone::facts::facts(caches, &volume, &source, class.as_deref()));
        Some(Observed {
            claim,
            pod,
            is_csi: class.as_ref().is_some_and(|class| clone::facts::is_csi(caches, class)),
            class,
            profile,
            warning: caches.claim_warnings.get(attempt.key),
            clone,
            begins,
            beside_cdi: self.mode == ImporterMode::On && !begins,
            tolerations: tolerations(caches, &volume),
            percent: progress,
            image: self.image.clone(),
            pull_policy: self.config.current().image_pull_policy.clone(),
            failures: attempt.failures.clone(),
            now: attempt.now,
            volume,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.volume.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Returns the DataVolume whose claim a pod fills.
fn filled_by(pod: &CachedImportPod) -> Option<Key> {
    let volume = owner::controller_of_kind::<DataVolume>(&pod.metadata)?;
    Some(Key::beside(&pod.metadata, volume.name.clone()))
}

/// Returns the tolerations of the VM that controls a DataVolume.
fn tolerations(caches: &Caches, volume: &DataVolume) -> Vec<Toleration> {
    let owner = owner::controller_of_kind::<VirtualMachine>(&volume.metadata);
    let vm = owner.and_then(|owner| caches.vms.get(&Key::beside(&volume.metadata, owner.name.clone())));
    let vm = vm.filter(|vm| owner::is_controlled_by(&volume.metadata, &**vm));
    vm.and_then(|vm| vm.spec.template.spec.as_ref().map(|spec| spec.tolerations.clone())).unwrap_or_default()
}

/// Returns the storage class of a claim to be made: the one that the DataVolume names, or the default. A literal spec without a class gets
/// that of Kubernetes, which knows no other default.
fn class(caches: &Caches, volume: &DataVolume) -> Option<Arc<CachedStorageClass>> {
    if let Some(name) = claim::class_name(volume) {
        return caches.storage_classes.get(&Key::cluster_wide(name));
    }
    let is_for_vms = volume.spec.pvc.is_none() && volume.spec.content_type.as_deref() != Some("archive");
    let virt = || newest(caches.storage_classes.by(&StorageClassIndex::VirtDefault));
    let default = || newest(caches.storage_classes.by(&StorageClassIndex::Default));
    if is_for_vms { virt().or_else(default) } else { default() }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::storage::v1::StorageClass;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn default_class_of_vms_is_for_disks_whose_claim_is_completed() {
        let caches = Caches::default();
        for (name, key) in [
            ("kubernetes", "storageclass.kubernetes.io/is-default-class"),
            ("vms", "storageclass.kubevirt.io/is-default-virt-class"),
            ("other", "x"),
        ] {
            let class = json!({"metadata": {"name": name, "annotations": {key: "true"}}, "provisioner": "p"});
            caches.storage_classes.observe(serde_json::from_value::<StorageClass>(class).unwrap().into());
        }
        let claim = |class: Option<&str>| json!({"storageClassName": class, "resources": {}});
        let found = |spec: &Value| {
            let object = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
                "metadata": {"name": "d", "namespace": "n"}, "spec": spec});
            let class = class(&caches, &serde_json::from_value(object).unwrap());
            class.and_then(|class| class.metadata.name.clone())
        };
        for (spec, expected) in [
            (json!({"storage": claim(None)}), "vms"),
            (json!({"storage": claim(Some("other"))}), "other"),
            (json!({"storage": claim(None), "contentType": "archive"}), "kubernetes"),
            (json!({"pvc": claim(None)}), "kubernetes"),
            (json!({"pvc": claim(Some("other"))}), "other"),
        ] {
            assert_eq!(found(&spec).as_deref(), Some(expected), "{spec}");
        }
    }

    #[test]
    fn pod_tolerates_what_the_vm_of_its_disk_does() {
        let caches = Caches::default();
        let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "m", "namespace": "n", "uid": "u"},
            "spec": {"template": {"spec": {"domain": {"devices": {}}, "tolerations": [{"key": "vms"}]}}}});
        caches.vms.observe(serde_json::from_value(vm).unwrap());
        for (name, uid, tolerates) in [("m", "u", true), ("m", "former", false), ("other", "u", false)] {
            let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name, "uid": uid, "controller": true});
            let object = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
                "metadata": {"name": "d", "namespace": "n", "ownerReferences": [owner]}, "spec": {}});
            let found = tolerations(&caches, &serde_json::from_value(object).unwrap());
            assert_eq!(found.len(), usize::from(tolerates), "{name} {uid}");
        }
    }
}
