//! The ConfigMaps with the CA bundle, and with the filter of the metric with the labels of VMs.

use api::tls;
use k8s_openapi::api::core::v1::ConfigMap;

use super::{
    Caches,
    declaration::{Declaration, Selection},
};
use crate::{cache::Key, runtime::Kind};

/// ConfigMap that users can create, with the filter of the metric `kubevirt_vm_labels`.
pub(crate) const VM_LABELS_FILTER: &str = "kubevirt-vm-labels-config";

impl Caches {
    /// Returns the CA bundle in force.
    #[must_use]
    pub(crate) fn ca_bundle(&self, namespace: &str) -> Option<String> {
        let map = self.config_maps.get(&Key::new(namespace, tls::CA_CONFIG_MAP))?;
        map.data.as_ref()?.get(tls::CA_BUNDLE_KEY).cloned()
    }
}

unindexed!(whole ConfigMap);

impl Declaration for ConfigMap {
    type Wire = Self;
    type Kept = Self;
    const SELECTION: Selection = Selection::Names(&[tls::CA_CONFIG_MAP, VM_LABELS_FILTER]);
    const WRITTEN: Option<Kind> = Some(Kind::ConfigMap);
    in_install_namespace!();
}
