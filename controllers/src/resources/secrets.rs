//! Secrets that this process makes.

use std::sync::Arc;

use api::{tls, webhook_path};
use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{Api, Client};

use super::{
    Caches,
    declaration::{Declaration, Selection},
};
use crate::{
    cache::{Cached, Key, trim_meta},
    runtime::Kind,
};

impl Caches {
    /// Returns a Secret of the installation.
    #[must_use]
    pub(crate) fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(&Key::new(namespace, name))
    }
}

impl Cached for Secret {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Declaration for Secret {
    type Wire = Self;
    type Kept = Self;
    const SELECTION: Selection = Selection::Names(&[
        tls::CA_SECRET,
        tls::API_SERVER_SECRET,
        tls::API_CLIENT_SECRET,
        tls::CONTROLLER_SECRET,
        webhook_path::SECRET,
    ]);
    const WRITTEN: Option<Kind> = Some(Kind::Secret);

    fn api(client: Client, install_namespace: &str) -> Api<Self> {
        Api::namespaced(client, install_namespace)
    }
}
