//! The watches and observations of the controller of DataSources.

use std::sync::Arc;

use api::cdi::{DataSource, DataSourceSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, Target, resolve};
use crate::{
    cache::Key,
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
        let (woken, by) = (wake.clone(), sources.clone());
        // Those that name one, and those that name these.
        let wake_by = Arc::new(move |index: &DataSourceIndex| {
            for key in by.keys_by(index) {
                woken.keys(by.keys_by(&DataSourceIndex::DataSource(key.clone())));
                woken.key(key);
            }
        });
        let (of_claim, of_volume, of_snapshot) = (wake_by.clone(), wake_by.clone(), wake_by.clone());
        caches.claims.listen(move |(former, present)| {
            let Some(claim) = present.or(former) else { return };
            of_claim(&DataSourceIndex::Claim(Key::of(&claim.metadata)));
        });
        caches.data_volumes.listen(move |(former, present)| {
            let Some(volume) = present.or(former) else { return };
            of_volume(&DataSourceIndex::Claim(Key::of(&volume.metadata)));
        });
        caches.snapshots.listen(move |(former, present)| {
            let Some(snapshot) = present.or(former) else { return };
            of_snapshot(&DataSourceIndex::Snapshot(Key::of(&snapshot.metadata)));
        });
        caches.data_sources.listen(move |(former, present)| {
            let Some(source) = present.or(former) else { return };
            wake_by(&DataSourceIndex::DataSource(Key::of(&source.metadata)));
        });
        let (woken, sources) = (wake.clone(), sources.clone());
        caches.cdis.listen(move |seen| {
            // CDI appeared or went.
            if let (None, None) = seen {
                woken.keys(sources.keys());
            }
        });
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
