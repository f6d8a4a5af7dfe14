//! The configuration object.

use std::sync::Arc;

use api::KubeVirt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};

use super::{Caches, declaration::Declaration};
use crate::{
    cache::{Cached, trim_meta},
    runtime::Kind,
};

impl Caches {
    /// Returns the configuration object, unless it is being deleted.
    #[must_use]
    pub(crate) fn kubevirt(&self) -> Option<Arc<KubeVirt>> {
        self.kubevirts.all().into_iter().find(|object| object.metadata.deletion_timestamp.is_none())
    }
}

impl Cached for KubeVirt {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Declaration for KubeVirt {
    type Wire = Self;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::KubeVirt);

    fn api(client: Client, install_namespace: &str) -> Api<Self> {
        Api::namespaced(client, install_namespace)
    }
}
