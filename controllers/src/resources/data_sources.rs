//! DataSources of CDI: named sources of DataVolumes, such as the newest version of an image.

use api::cdi::DataSource;

use crate::cache::{Cached, Key};

/// Indices of DataSources: the object that one names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DataSourceIndex {
    /// A claim.
    Claim(Key),
    /// A snapshot.
    Snapshot(Key),
    /// Another DataSource.
    DataSource(Key),
}

/// Returns the key of an object that a DataSource names. Without a namespace it is in that of the DataSource.
pub(crate) fn named(source: &DataSource, namespace: &str, name: &str) -> Key {
    let own = source.metadata.namespace.as_deref().unwrap_or_default();
    Key::new(if namespace.is_empty() { own } else { namespace }, name)
}

impl Cached for DataSource {
    type Index = DataSourceIndex;
    whole!();

    fn indices(&self) -> Vec<DataSourceIndex> {
        let source = &self.spec.source;
        let claim = source.pvc.as_ref().map(|pvc| DataSourceIndex::Claim(named(self, &pvc.namespace, &pvc.name)));
        let snapshot = source.snapshot.as_ref();
        let snapshot = snapshot.map(|of| DataSourceIndex::Snapshot(named(self, &of.namespace, &of.name)));
        let other = source.data_source.as_ref();
        let other = other.map(|of| DataSourceIndex::DataSource(named(self, &of.namespace, &of.name)));
        claim.into_iter().chain(snapshot).chain(other).collect()
    }
}

kept!(whole DataSource written as DataSource, WhenServed);
