//! The watches and observations of the controller of DataSources.

use std::sync::Arc;

use api::cdi::{DataSource, DataSourceSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, Target, resolve};
use crate::{
    cache::{Cache, Cached, Key},
    importer::{controller::begins, status::Fact},
    options::ImporterMode,
    resources::{
        Caches, Resource,
        data_sources::{DataSourceIndex, named},
        needs,
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// The controller of DataSources.
pub(crate) struct DataSources {
    mode: ImporterMode,
}

impl DataSources {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { mode: setup.options.importer }
    }
}

/// Returns the object that a source names.
fn target(caches: &Caches, own: &DataSource, source: &DataSourceSource) -> Target {
    if let Some(pvc) = &source.pvc {
        let key = named(own, &pvc.namespace, &pvc.name);
        return Target::Claim(caches.claims.get(&key), caches.data_volumes.get(&key));
    }
    if let Some(snapshot) = &source.snapshot {
        return Target::Snapshot(caches.snapshots.get(&named(own, &snapshot.namespace, &snapshot.name)));
    }
    Target::None(Fact::no("NoSource", "No source PVC set"))
}

/// Wakes the DataSources that name a changed object, and those that name these.
fn wake_naming<K: Cached>(
    wake: &Wake,
    cache: &Cache<K>,
    sources: &Arc<Cache<DataSource>>,
    index: fn(Key) -> DataSourceIndex,
) {
    let sources = sources.clone();
    wake.on_object(cache, move |object| {
        let mut naming = sources.keys_by(&index(Key::of(object.meta())));
        let further = naming.iter().flat_map(|key| sources.keys_by(&DataSourceIndex::DataSource(key.clone())));
        naming.extend(further.collect::<Vec<_>>());
        naming
    });
}

impl Controller for DataSources {
    const NAME: &'static str = "datasource";
    const NEEDS: Needs = needs(&[
        Resource::DataSources,
        Resource::DataVolumes,
        Resource::Claims,
        Resource::Snapshots,
        Resource::Cdis,
        Resource::Namespaces,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.data_sources);
        let sources = &caches.data_sources;
        wake_naming(wake, &caches.claims, sources, DataSourceIndex::Claim);
        wake_naming(wake, &caches.data_volumes, sources, DataSourceIndex::Claim);
        wake_naming(wake, &caches.snapshots, sources, DataSourceIndex::Snapshot);
        wake_naming(wake, sources, sources, DataSourceIndex::DataSource);
        wake.all_on_presence(&caches.cdis, sources);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let data_source = caches.data_sources.get(attempt.key)?;
        if !begins(self.mode, caches) || data_source.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let (source, target) = match resolve(&data_source, |key| caches.data_sources.get(key)) {
            Ok(source) => (source.clone(), target(caches, &data_source, &source)),
            Err(fact) => (DataSourceSource::default(), Target::None(fact)),
        };
        Some(Observed { data_source, source, target, now: attempt.now })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.data_source.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}
