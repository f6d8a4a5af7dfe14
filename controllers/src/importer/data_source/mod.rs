//! DataSources: names of claims and snapshots that are cloned, kept current while the importer works.
//!
//! The status of a DataSource names the claim or snapshot at the end of its reference, once that can be cloned. Condition Ready says why
//! it cannot. The labels by which VMs infer instance types and preferences are copied from the claim and its DataVolume.

mod controller;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    DataVolumePhase,
    cdi::{DataSource, DataSourceSource, DataSourceStatus, DataVolume},
};
use jiff::Timestamp;

pub(crate) use self::controller::DataSources;
use super::status::{self, Fact};
use crate::{
    cache::Key,
    resources::{
        claims::{CachedClaim, is_inference},
        snapshots::CachedSnapshot,
    },
    runtime::{Decision, Effect, Kind},
};

/// Message of condition Ready.
const READY: &str = "DataSource is ready to be consumed";

/// The object that a DataSource names in the end.
#[derive(Clone, Debug)]
enum Target {
    /// A claim, and the DataVolume of its name.
    Claim(Option<Arc<CachedClaim>>, Option<Arc<DataVolume>>),
    /// A snapshot.
    Snapshot(Option<Arc<CachedSnapshot>>),
    /// None, for this reason.
    None(Fact),
}

/// Everything that the decision about a DataSource depends on.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// The DataSource.
    data_source: Arc<DataSource>,
    /// The source that it names in the end.
    source: DataSourceSource,
    /// The object.
    target: Target,
    /// The current time.
    now: Timestamp,
}

/// Follows the reference to another DataSource of the namespace, at most once.
fn resolve(own: &DataSource, other: impl Fn(&Key) -> Option<Arc<DataSource>>) -> Result<DataSourceSource, Fact> {
    let Some(reference) = &own.spec.source.data_source else { return Ok(own.spec.source.clone()) };
    let refused = |reason, message| Err(Fact::no(reason, message));
    let namespace = own.metadata.namespace.as_deref().unwrap_or_default();
    if !reference.namespace.is_empty() && reference.namespace != namespace {
        return refused("CrossNamespaceReference", "DataSource cannot reference a DataSource in another namespace");
    }
    if Some(reference.name.as_str()) == own.metadata.name.as_deref() {
        return refused("SelfReference", "DataSource cannot self-reference");
    }
    let Some(other) = other(&Key::new(namespace, reference.name.clone())) else {
        return refused("NotFound", "DataSource not found");
    };
    if other.spec.source.data_source.is_some() {
        return refused(
            "MaxReferenceDepthReached",
            "DataSource cannot reference a DataSource that references another one",
        );
    }
    Ok(other.spec.source.clone())
}

/// Returns condition Ready.
fn ready(target: &Target) -> Fact {
    let (claim, volume) = match target {
        Target::None(fact) => return fact.clone(),
        Target::Snapshot(None) => return Fact::no("NotFound", "Snapshot not found"),
        Target::Snapshot(Some(snapshot)) if snapshot.ready => return Fact::yes("Ready", READY),
        Target::Snapshot(Some(_)) => return Fact::no("SnapshotNotReady", "Snapshot is not ready to use"),
        Target::Claim(claim, volume) => (claim, volume),
    };
    // A DataVolume that waits for its first consumer has a claim that cannot be cloned yet.
    if let Some(volume) = volume
        && volume.phase() != DataVolumePhase::Succeeded
    {
        let phase = volume.phase();
        return Fact::no(phase.as_str(), format!("Import DataVolume phase {phase}"));
    }
    match claim {
        None => Fact::no("NotFound", "PVC not found"),
        Some(_) => Fact::yes("Ready", READY),
    }
}

/// Returns the labels that a DataSource gets from its claim.
fn labels(target: &Target) -> BTreeMap<String, String> {
    let Target::Claim(claim, volume) = target else { return BTreeMap::new() };
    let of_claim = claim.iter().flat_map(|claim| &claim.inference);
    let of_volume = volume.iter().flat_map(|volume| volume.metadata.labels.iter().flatten());
    let both = of_volume.filter(|(key, _)| is_inference(key)).chain(of_claim);
    both.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Decides about a DataSource.
fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let former = observed.data_source.status.clone().unwrap_or_default();
    let ready = ready(&observed.target);
    let mut changed = (*observed.data_source).clone();
    if ready.holds {
        let labels = labels(&observed.target);
        if !labels.is_empty() {
            changed.metadata.labels.get_or_insert_default().extend(labels);
        }
    }
    changed.status = Some(DataSourceStatus {
        source: if ready.holds { observed.source.clone() } else { DataSourceSource::default() },
        conditions: vec![status::condition(&former.conditions, "Ready", ready, observed.now)],
    });
    let change = Effect::change(Kind::DataSource, &*observed.data_source, &changed, None)?;
    Ok(Decision { effects: change.into_iter().collect(), wake_after: None })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::{Value, json};

    use super::*;

    fn data_source(name: &str, source: &Value) -> Arc<DataSource> {
        let metadata = json!({"name": name, "namespace": "n", "uid": "u", "resourceVersion": "1"});
        let object = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource", "metadata": metadata,
            "spec": {"source": source}});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn volume(phase: &str) -> Option<Arc<DataVolume>> {
        let labels = json!({"instancetype.kubevirt.io/default-preference": "linux", "other": "x"});
        let object = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "metadata": {"name": "c", "namespace": "n", "labels": labels}, "spec": {}, "status": {"phase": phase}});
        Some(Arc::new(serde_json::from_value(object).unwrap()))
    }

    fn claim() -> Option<Arc<CachedClaim>> {
        let labels = json!({"instancetype.kubevirt.io/default-instancetype": "small", "app": "x"});
        let claim = json!({"metadata": {"name": "c", "namespace": "n", "labels": labels}});
        Some(Arc::new(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap().into()))
    }

    #[test]
    fn reference_is_followed_once_within_the_namespace() {
        let pvc = json!({"pvc": {"namespace": "", "name": "c"}});
        let reference = |namespace: &str, name: &str| json!({"dataSource": {"namespace": namespace, "name": name}});
        let known = |key: &Key| match key.name.as_str() {
            "direct" => Some(data_source("direct", &pvc)),
            "pointer" => Some(data_source("pointer", &reference("", "direct"))),
            _ => None,
        };
        for (source, expected) in [
            (pvc.clone(), Ok("c")),
            (reference("n", "direct"), Ok("c")),
            (reference("", "direct"), Ok("c")),
            (reference("", "pointer"), Err("MaxReferenceDepthReached")),
            (reference("", "own"), Err("SelfReference")),
            (reference("o", "direct"), Err("CrossNamespaceReference")),
            (reference("", "missing"), Err("NotFound")),
        ] {
            let found = resolve(&data_source("own", &source), known);
            let found = found.map(|source| source.pvc.unwrap().name).map_err(|fact| fact.reason);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{source}");
        }
    }

    #[test]
    fn source_is_ready_once_its_claim_is_filled() {
        for (claim, volume, reason, message) in [
            (None, None, "NotFound", "PVC not found"),
            (claim(), None, "Ready", "DataSource is ready to be consumed"),
            (claim(), volume("Succeeded"), "Ready", "DataSource is ready to be consumed"),
            (claim(), volume("ImportInProgress"), "ImportInProgress", "Import DataVolume phase ImportInProgress"),
            (
                claim(),
                volume("WaitForFirstConsumer"),
                "WaitForFirstConsumer",
                "Import DataVolume phase WaitForFirstConsumer",
            ),
        ] {
            let fact = ready(&Target::Claim(claim, volume));
            assert_eq!((fact.reason.as_str(), fact.message.as_str()), (reason, message));
        }
    }

    #[test]
    fn snapshot_is_ready_once_it_can_be_used() {
        let snapshot = |ready| Some(Arc::new(CachedSnapshot { ready, ..CachedSnapshot::default() }));
        for (snapshot, reason) in [(None, "NotFound"), (snapshot(false), "SnapshotNotReady"), (snapshot(true), "Ready")]
        {
            assert_eq!(ready(&Target::Snapshot(snapshot)).reason, reason);
        }
    }

    #[test]
    fn ready_source_has_the_labels_and_is_written_once() {
        let source = data_source("own", &json!({"pvc": {"namespace": "", "name": "c"}}));
        let observed = Observed {
            source: source.spec.source.clone(),
            data_source: source,
            target: Target::Claim(claim(), volume("Succeeded")),
            now: Timestamp::from_second(1).unwrap(),
        };
        let decision = decide(&observed).unwrap();
        let [Effect::Patch { patch, subresource: None, .. }] = decision.effects.as_slice() else {
            panic!("{decision:?}")
        };
        assert_eq!(
            patch["metadata"]["labels"],
            json!({"instancetype.kubevirt.io/default-preference": "linux",
                "instancetype.kubevirt.io/default-instancetype": "small"})
        );
        assert_eq!(patch["status"]["source"]["pvc"]["name"], "c");
        let mut object = serde_json::to_value(&*observed.data_source).unwrap();
        json_patch::merge(&mut object, patch);
        let after = Observed { data_source: Arc::new(serde_json::from_value(object).unwrap()), ..observed };
        assert!(decide(&after).unwrap().is_settled());
    }
}
