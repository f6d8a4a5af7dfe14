//! What the status of a machine says about the claims behind its volumes.
//!
//! The node agent and the launcher read no claims: what they need to know of one (how large an image to make, whether
//! others may write to it) stands here. Device names in the guest are the agent's to tell, in the same entries.

use std::{collections::BTreeMap, sync::Arc};

use api::vmi::{
    status::{PersistentVolumeClaimInfo, VolumeStatus},
    volumes::Volume,
};

use crate::views::ClaimView;

/// Share of a volume that a file system is taken to need for itself, as upstream says where no importer says otherwise.
const FILESYSTEM_OVERHEAD: &str = "0.055";

/// Keeps the entries of volumes with claims in step with the claims. A claim that is gone leaves its entry as it was.
pub(super) fn tell_claims(
    volumes: &[Volume],
    claims: &BTreeMap<String, Arc<ClaimView>>,
    entries: &mut Vec<VolumeStatus>,
) {
    for volume in volumes {
        let Some(name) = claim_name(volume) else { continue };
        let Some(claim) = claims.get(name) else { continue };
        let info = Some(info(name, claim));
        match entries.iter_mut().find(|entry| entry.name == volume.name) {
            Some(entry) => entry.persistent_volume_claim_info = info,
            None => entries.push(VolumeStatus {
                name: volume.name.clone(),
                persistent_volume_claim_info: info,
                ..VolumeStatus::default()
            }),
        }
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
}

/// The claim that holds a volume's data itself; not one beneath a layer that is thrown away.
pub(crate) fn claim_name(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim.or_else(|| volume.data_volume.as_ref().map(|source| source.name.as_str()))
}

fn info(name: &str, claim: &ClaimView) -> PersistentVolumeClaimInfo {
    PersistentVolumeClaimInfo {
        access_modes: claim.access_modes.clone(),
        capacity: claim.capacity.clone(),
        claim_name: Some(name.to_owned()),
        filesystem_overhead: Some(FILESYSTEM_OVERHEAD.to_owned()),
        preallocated: claim.preallocated.then_some(true),
        requests: claim.requests.clone(),
        volume_mode: Some(if claim.block { "Block" } else { "Filesystem" }.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::{Value, json};

    use super::*;

    fn told(volumes: Value, claims: &[(&str, Value)], before: Value) -> Value {
        let volumes: Vec<Volume> = serde_json::from_value(volumes).unwrap();
        let claims = claims.iter().map(|(name, claim)| {
            let claim: PersistentVolumeClaim = serde_json::from_value(claim.clone()).unwrap();
            ((*name).to_owned(), Arc::new(ClaimView::from(claim)))
        });
        let mut entries: Vec<VolumeStatus> = serde_json::from_value(before).unwrap();
        tell_claims(&volumes, &claims.collect(), &mut entries);
        serde_json::to_value(entries).unwrap()
    }

    fn claim() -> Value {
        json!({
            "metadata": {"name": "c", "annotations": {"cdi.kubevirt.io/storage.preallocation": "true"}},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound", "capacity": {"storage": "2Gi"}},
        })
    }

    #[test]
    fn a_claim_is_told_beside_what_the_agent_says() {
        let volumes = json!([
            {"name": "root", "containerDisk": {"image": "i"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        ]);
        let before = json!([{"name": "root", "target": "vda"}, {"name": "data", "target": "vdb"}]);
        assert_eq!(
            told(volumes, &[("c", claim())], before),
            json!([
                {"name": "data", "target": "vdb", "persistentVolumeClaimInfo": {
                    "claimName": "c", "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "preallocated": true,
                    "capacity": {"storage": "2Gi"}, "requests": {"storage": "1Gi"}, "filesystemOverhead": "0.055"}},
                {"name": "root", "target": "vda"},
            ])
        );
    }

    #[test]
    fn only_claims_that_hold_the_data_themselves_are_told() {
        let volumes = json!([
            {"name": "a", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "gone"}},
        ]);
        assert_eq!(told(volumes, &[("c", claim())], json!([])), json!([]));
    }

    #[test]
    fn news_of_a_claim_is_what_its_machines_are_told() {
        let view = |changes: Value| {
            let mut claim = claim();
            json_patch::merge(&mut claim, &changes);
            ClaimView::from(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap())
        };
        let before = view(json!({}));
        for (changes, same) in [
            (json!({"metadata": {"resourceVersion": "7", "labels": {"team": "blue"}}}), true),
            (json!({"status": {"phase": "Lost"}}), false),
            (json!({"spec": {"resources": {"requests": {"storage": "3Gi"}}}}), false),
            (json!({"status": {"capacity": {"storage": "3Gi"}}}), false),
        ] {
            assert_eq!(before.tells_the_same(&view(changes.clone())), same, "{changes}");
        }
    }
}
