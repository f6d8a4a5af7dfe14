//! The readiness of claims that DataVolumes fill. Every consumer of a claim decides by [`DataVolumes::readiness`].

use std::{collections::BTreeMap, sync::Arc};

use api::{DataVolumePhase, cdi::DataVolume};

use crate::{
    cache::Key,
    resources::{Caches, claims::CachedClaim},
};

/// Longest text of a message that is shown.
const SHOWN: usize = 512;

/// DataVolumes of some claims of a namespace.
#[derive(Clone, Debug, Default)]
pub(crate) struct DataVolumes {
    /// By name.
    pub known: BTreeMap<String, Arc<DataVolume>>,
    /// The cluster has no DataVolumes.
    pub absent: bool,
}

/// Readiness of a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Readiness<'a> {
    /// Pods can use it, or wait for it while they are scheduled.
    Ready,
    /// It is bound once a pod with it was scheduled, and filled once no pod uses it.
    AwaitsConsumer(&'a DataVolume),
    /// It is being filled.
    Waits(&'a DataVolume),
    /// Its DataVolume has failed for good.
    Failed(&'a DataVolume),
    /// The DataVolume that fills it does not exist.
    Orphaned(&'a str),
}

impl DataVolumes {
    /// Returns the DataVolumes of claims, and those with the names of claims that do not exist.
    pub(crate) fn of(
        caches: &Caches,
        namespace: &str,
        claims: &BTreeMap<String, Arc<CachedClaim>>,
        names: impl IntoIterator<Item = String>,
    ) -> Self {
        let owners = claims.values().filter_map(|claim| Some(claim.data_volume()?.0.to_owned()));
        let missing = names.into_iter().filter(|name| !claims.contains_key(name));
        let known = |name: String| Some((name.clone(), caches.data_volumes.get(&Key::new(namespace, name))?));
        Self { known: owners.chain(missing).filter_map(known).collect(), absent: caches.data_volumes.is_absent() }
    }

    /// Returns the DataVolume of a claim.
    pub(crate) fn of_claim(&self, claim: &CachedClaim) -> Option<&DataVolume> {
        self.known.get(claim.data_volume()?.0).map(Arc::as_ref)
    }

    /// Returns the readiness of a claim. Conditions of DataVolumes say less: an adopted claim that waits for its first consumer is not
    /// bound, and a claim that was deleted and made again is empty while its DataVolume still has its former phase.
    pub(crate) fn readiness<'a>(&'a self, claim: &'a CachedClaim) -> Readiness<'a> {
        let Some((owner, uid)) = claim.data_volume() else { return Readiness::Ready };
        let Some(volume) = self.known.get(owner).map(Arc::as_ref) else {
            let is_left = self.absent && claim.phase == "Bound";
            return if is_left { Readiness::Ready } else { Readiness::Orphaned(owner) };
        };
        let is_own = volume.metadata.uid.as_deref() == Some(uid);
        match volume.phase() {
            DataVolumePhase::Succeeded if is_own && !claim.populating => Readiness::Ready,
            DataVolumePhase::PendingPopulation if is_own => Readiness::Ready,
            DataVolumePhase::WaitForFirstConsumer if is_own && claim.phase == "Pending" => {
                Readiness::AwaitsConsumer(volume)
            }
            DataVolumePhase::Failed if is_own => Readiness::Failed(volume),
            _ => Readiness::Waits(volume),
        }
    }
}

/// Returns status and message of a condition of a DataVolume.
fn condition<'a>(volume: &'a DataVolume, type_: &str) -> Option<(&'a str, &'a str)> {
    let found = volume.condition(type_)?;
    Some((&found.status, found.message.as_deref().unwrap_or_default()))
}

/// Returns true if both versions of a DataVolume are the same but for progress, which changes every other second.
pub(crate) fn is_equivalent(left: &DataVolume, right: &DataVolume) -> bool {
    ["Ready", "Bound", "Running"].iter().all(|type_| condition(left, type_) == condition(right, type_))
        && left.metadata.uid == right.metadata.uid
        && left.phase() == right.phase()
}

/// Returns the words for a DataVolume that is not ready: its phase, and the reason if it shows one.
pub(crate) fn described(volume: &DataVolume) -> String {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let phase = volume.phase();
    let phase = Some(phase.as_str()).filter(|phase| !phase.is_empty()).unwrap_or("not known yet");
    let told = ["Running", "Bound"].into_iter().find_map(|type_| {
        let (status, message) = condition(volume, type_)?;
        (status == "False" && !message.is_empty()).then_some(message)
    });
    let told = told.map(|message| format!(": {}", message.chars().take(SHOWN).collect::<String>()));
    format!("the phase of DataVolume {name} is {phase}{}", told.unwrap_or_default())
}

#[cfg(test)]
pub(crate) mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::{Value, json};

    use super::*;

    /// Returns a DataVolume with this UID, phase and conditions.
    pub(crate) fn volume(name: &str, phase: &str, conditions: &Value) -> (String, Arc<DataVolume>) {
        let volume = json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "metadata": {"name": name, "namespace": "d", "uid": format!("{name}-uid")}, "spec": {},
            "status": {"phase": phase, "conditions": conditions},
        });
        (name.to_owned(), Arc::new(serde_json::from_value(volume).unwrap()))
    }

    /// Returns a claim in this phase that a DataVolume of its name controls.
    pub(crate) fn claim(name: &str, phase: &str, change: &Value) -> (String, Arc<CachedClaim>) {
        let mut claim = json!({
            "metadata": {"name": name, "namespace": "d", "uid": format!("{name}-claim"), "ownerReferences": [{
                "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": name, "uid": format!("{name}-uid"),
                "controller": true}]},
            "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": phase},
        });
        json_patch::merge(&mut claim, change);
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        (name.to_owned(), Arc::new(claim.into()))
    }

    #[test]
    fn claim_is_ready_by_the_phase_of_its_data_volume() {
        let none = json!({});
        let plain = json!({"metadata": {"ownerReferences": null}});
        let foreign = json!({"metadata": {"ownerReferences": [
            {"apiVersion": "v1", "kind": "DataVolume", "name": "d", "uid": "d-uid", "controller": true}]}});
        let former = json!({"metadata": {"ownerReferences": [{"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
            "name": "d", "uid": "former", "controller": true}]}});
        let annotated = |annotations: Value| json!({"metadata": {"annotations": annotations}});
        let remade = annotated(json!({
            "cdi.kubevirt.io/storage.usePopulator": "false", "cdi.kubevirt.io/createdForDataVolume": "d-uid"}));
        let filled = annotated(json!({"cdi.kubevirt.io/storage.usePopulator": "false",
            "cdi.kubevirt.io/createdForDataVolume": "d-uid", "cdi.kubevirt.io/storage.pod.phase": "Succeeded"}));
        // Phase of the DataVolume, phase and change of the claim; readiness.
        for (phase, claimed, change, expected) in [
            (None, "Pending", &plain, "Ready"),
            (None, "Pending", &foreign, "Ready"),
            (Some("ImportInProgress"), "Bound", &plain, "Ready"),
            (Some("Succeeded"), "Bound", &none, "Ready"),
            // Adopted, or filled by another program once it is bound.
            (Some("Succeeded"), "Pending", &none, "Ready"),
            (Some("Succeeded"), "Bound", &filled, "Ready"),
            // It was deleted and made again.
            (Some("Succeeded"), "Bound", &remade, "Waits"),
            (Some("Succeeded"), "Bound", &former, "Waits"),
            (Some("PendingPopulation"), "Pending", &none, "Ready"),
            (Some("WaitForFirstConsumer"), "Pending", &none, "AwaitsConsumer"),
            (Some("WaitForFirstConsumer"), "Bound", &none, "Waits"),
            (Some(""), "Pending", &none, "Waits"),
            (Some("PVCBound"), "Bound", &none, "Waits"),
            (Some("UploadReady"), "Bound", &none, "Waits"),
            (Some("PhaseOfTheFuture"), "Bound", &none, "Waits"),
            (Some("Failed"), "Lost", &none, "Failed"),
            (None, "Bound", &none, "Orphaned"),
        ] {
            let known = phase.map(|phase| volume("d", phase, &json!([]))).into_iter().collect();
            let volumes = DataVolumes { known, absent: false };
            let (_, claim) = claim("d", claimed, change);
            let readiness = format!("{:?}", volumes.readiness(&claim));
            assert!(readiness.starts_with(expected), "{phase:?} {claimed} {change}: {readiness}");
        }
    }

    #[test]
    fn claim_stays_ready_when_data_volumes_were_uninstalled() {
        for (phase, expected) in [("Bound", "Ready"), ("Pending", "Orphaned"), ("Lost", "Orphaned")] {
            let (_, claim) = claim("d", phase, &json!({}));
            let volumes = DataVolumes { absent: true, ..DataVolumes::default() };
            let readiness = format!("{:?}", volumes.readiness(&claim));
            assert!(readiness.starts_with(expected), "{phase}: {readiness}");
        }
    }

    #[test]
    fn text_names_the_phase_and_the_newest_message() {
        let running = json!({"type": "Running", "status": "False", "message": "no space"});
        let bound = json!({"type": "Bound", "status": "False", "message": "PVC d Pending"});
        for (phase, conditions, expected) in [
            ("", json!([]), "the phase of DataVolume d is not known yet"),
            ("ImportInProgress", json!([running, bound]), "the phase of DataVolume d is ImportInProgress: no space"),
            ("Pending", json!([bound]), "the phase of DataVolume d is Pending: PVC d Pending"),
        ] {
            assert_eq!(described(&volume("d", phase, &conditions).1), expected);
        }
    }

    #[test]
    fn progress_alone_is_no_change() {
        let with = |change: Value| {
            let mut object = serde_json::to_value(&*volume("d", "ImportInProgress", &json!([])).1).unwrap();
            json_patch::merge(&mut object, &change);
            serde_json::from_value::<DataVolume>(object).unwrap()
        };
        let running = json!([{"type": "Running", "status": "True"}]);
        for (change, same) in [
            (json!({"status": {"progress": "12.00%"}, "metadata": {"resourceVersion": "8"}}), true),
            (json!({"status": {"phase": "Succeeded"}}), false),
            (json!({"status": {"conditions": running}}), false),
            (json!({"metadata": {"uid": "other"}}), false),
        ] {
            assert_eq!(is_equivalent(&with(json!({})), &with(change.clone())), same, "{change}");
        }
    }
}
