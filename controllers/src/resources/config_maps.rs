//! The ConfigMaps with the CA bundle, and with the filter of the metric with the labels of VMs.

use api::tls;
use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{Api, Client};

use super::{
    Caches,
    declaration::{Declaration, Selection},
};
use crate::{
    cache::{Cached, Key, trim_meta},
    runtime::Kind,
};

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

impl Cached for ConfigMap {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Declaration for ConfigMap {
    type Wire = Self;
    type Kept = Self;
    const SELECTION: Selection = Selection::Names(&[tls::CA_CONFIG_MAP, VM_LABELS_FILTER]);
    const WRITTEN: Option<Kind> = Some(Kind::ConfigMap);

    fn api(client: Client, install_namespace: &str) -> Api<Self> {
        Api::namespaced(client, install_namespace)
    }
}
