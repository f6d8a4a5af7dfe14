//! Secrets that this process makes.

use std::sync::Arc;

use api::{tls, webhook_path};
use k8s_openapi::api::core::v1::Secret;

use super::{
    Caches,
    declaration::{Declaration, Selection},
};
use crate::{cache::Key, runtime::Kind};

impl Caches {
    /// Returns a Secret of the installation.
    #[must_use]
    pub(crate) fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(&Key::new(namespace, name))
    }
}

unindexed!(whole Secret);

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
    in_install_namespace!();
}
