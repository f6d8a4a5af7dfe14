//! DataVolumes of CDI. Without CDI, the importer of Ferrovirt carries them out.

use api::cdi::DataVolume;

use crate::cache::{Cached, Key};

/// Indices of DataVolumes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DataVolumeIndex {
    /// Claim that it clones.
    Claim(Key),
    /// Snapshot that it clones.
    Snapshot(Key),
}

impl Cached for DataVolume {
    type Index = DataVolumeIndex;
    whole!();

    fn indices(&self) -> Vec<DataVolumeIndex> {
        let own = self.metadata.namespace.as_deref().unwrap_or_default();
        let key = |namespace: &str, name: &str| Key::new(if namespace.is_empty() { own } else { namespace }, name);
        let source = self.spec.source.as_ref();
        let claim = source.and_then(|source| source.pvc.as_ref());
        let snapshot = source.and_then(|source| source.snapshot.as_ref());
        let claim = claim.map(|claim| DataVolumeIndex::Claim(key(&claim.namespace, &claim.name)));
        let snapshot = snapshot.map(|snapshot| DataVolumeIndex::Snapshot(key(&snapshot.namespace, &snapshot.name)));
        claim.into_iter().chain(snapshot).collect()
    }
}

kept!(whole DataVolume written as DataVolume, WhenServed);
