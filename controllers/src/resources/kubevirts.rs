//! The configuration object.

use std::sync::Arc;

use api::KubeVirt;

use super::{Caches, declaration::Declaration};
use crate::runtime::Kind;

impl Caches {
    /// Returns the configuration object, unless it is being deleted.
    #[must_use]
    pub(crate) fn kubevirt(&self) -> Option<Arc<KubeVirt>> {
        self.kubevirts.all().into_iter().find(|object| object.metadata.deletion_timestamp.is_none())
    }
}

unindexed!(whole KubeVirt);

impl Declaration for KubeVirt {
    type Wire = Self;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::KubeVirt);
    in_install_namespace!();
}
