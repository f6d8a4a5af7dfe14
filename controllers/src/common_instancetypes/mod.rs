//! The common instance types and preferences: brought along by the installation, kept up to date, removed when they are switched off.
//!
//! Objects of others and those that a user has edited are left as they are. The annotation [`WRITTEN`] tells them apart: it holds
//! the digest of what was written last.
//!
//! ```text
//!            no object      written, as in this release   written, by another release   edited, or of others
//! on         create         -                             replace                       -
//! off        -              delete                        delete                        delete if written, else -
//! ```

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc, time::Duration};

use api::{
    KubeVirt,
    instancetype::common::{self, WRITTEN, digest},
};
use daemon::merge_patch;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use serde::Serialize;
use serde_json::{Map, Value, json};

pub(crate) use self::controller::CommonInstancetypes;
use crate::{
    resources::instancetypes::CachedInstancetype,
    runtime::{Decision, Effect, Kind},
};

/// Time after which refused writes are repeated.
const RETRY: Duration = Duration::from_secs(60);

/// Everything that the decision depends on.
pub(crate) struct Observed {
    is_on: bool,
    /// Instance types of the cluster.
    instancetypes: Vec<Arc<CachedInstancetype>>,
    /// Preferences of the cluster.
    preferences: Vec<Arc<CachedInstancetype>>,
}

/// Returns true if the installation has the common objects, false if it has not, `None` while this is not to be decided: before
/// webhooks serve, and at the end of the installation, when a hook of the chart deletes them.
fn is_on(kubevirt: &KubeVirt) -> Option<bool> {
    let phase = kubevirt.status.as_ref().and_then(|status| status.phase.as_deref());
    let is_settled = kubevirt.metadata.deletion_timestamp.is_none() && phase == Some("Deployed");
    let deployment = kubevirt.spec.configuration.common_instancetypes_deployment.as_ref();
    is_settled.then(|| deployment.and_then(|deployment| deployment.enabled).unwrap_or(true))
}

/// Decides about all common objects.
fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    add(Kind::ClusterInstancetype, &common::instancetypes(), &observed.instancetypes, observed.is_on, &mut decision)?;
    add(Kind::ClusterPreference, &common::preferences(), &observed.preferences, observed.is_on, &mut decision)?;
    if !decision.effects.is_empty() {
        decision.wake(RETRY);
    }
    Ok(decision)
}

/// Adds the changes of the objects of a kind.
fn add<K: Serialize + ResourceExt>(
    kind: Kind,
    wanted: &[K],
    live: &[Arc<CachedInstancetype>],
    is_on: bool,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let live: HashMap<&str, _> =
        live.iter().filter_map(|object| Some((object.metadata.name.as_deref()?, object))).collect();
    for object in wanted {
        let effect = match live.get(object.name_any().as_str()) {
            Some(live) => change(kind, &serde_json::to_value(object)?, live, is_on)?,
            None if is_on => Some(Effect::create(kind, None, object)?.or_existing()),
            None => None,
        };
        // One that is refused does not prevent the others.
        decision.effects.extend(effect.map(Effect::independent));
    }
    Ok(())
}

/// Returns the change of an object that exists.
fn change(
    kind: Kind,
    wanted: &Value,
    live: &CachedInstancetype,
    is_on: bool,
) -> Result<Option<Effect>, serde_json::Error> {
    let present: Value = serde_json::from_str(&live.object)?;
    let metadata: ObjectMeta = serde_json::from_value(present["metadata"].clone())?;
    let Some(written) = metadata.annotations.as_ref().and_then(|all| all.get(WRITTEN)) else { return Ok(None) };
    if !is_on {
        return Ok(Some(Effect::delete(kind, &live.metadata)));
    }
    let is_current = wanted["metadata"]["annotations"][WRITTEN] == *written;
    let is_edited = *written != digest(&metadata, &present["spec"]);
    Ok((!is_current && !is_edited).then(|| Effect::merge(kind, &live.metadata, replacement(&present, wanted))))
}

/// Returns the patch that replaces the described content. Labels and annotations of others stay.
fn replacement(present: &Value, wanted: &Value) -> Value {
    let entries = |part: &str| {
        let described = |key: &&String| key.starts_with(common::PREFIX);
        let former = present["metadata"][part].as_object().into_iter().flat_map(Map::keys).filter(described);
        let mut entries: Map<String, Value> = former.map(|key| (key.clone(), Value::Null)).collect();
        entries.extend(wanted["metadata"][part].as_object().cloned().unwrap_or_default());
        entries
    };
    let mut patch = json!({"metadata": {"labels": entries("labels"), "annotations": entries("annotations")}});
    if let Some(spec) = merge_patch::diff(&present["spec"], &wanted["spec"]) {
        patch["spec"] = spec;
    }
    patch
}
