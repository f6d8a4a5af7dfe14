//! The claims in a VMI's volume status.
//!
//! virt-handler and virt-launcher read no claims: they take size and access modes from here. virt-handler adds the device
//! names to the same entries.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachineInstanceSpec,
    persistent_state::{self, STATUS_VOLUME},
    vmi::status::{PersistentVolumeClaimInfo, VolumeStatus},
};

use crate::resources::claims::{CachedClaim, amounts, claim_name};

/// Share of a volume that its file system is assumed to need, the reference's default.
const FILESYSTEM_OVERHEAD: &str = "0.055";

/// Updates the entries of volumes with claims. A claim that is gone leaves its entry unchanged.
pub(super) fn update_claims(
    spec: &VirtualMachineInstanceSpec,
    claims: &BTreeMap<String, Arc<CachedClaim>>,
    entries: &mut Vec<VolumeStatus>,
) {
    let volumes = spec.volumes.iter().filter_map(|volume| Some((&volume.name, claim_name(volume)?)));
    let utilities = spec.utility_volumes.iter().map(|volume| (&volume.name, volume.claim_name.as_str()));
    for (volume, name) in volumes.chain(utilities) {
        let Some(claim) = claims.get(name) else { continue };
        let info = Some(info(name, claim));
        match entries.iter_mut().find(|entry| entry.name == *volume) {
            Some(entry) => entry.persistent_volume_claim_info = info,
            None => entries.push(VolumeStatus {
                name: volume.clone(),
                persistent_volume_claim_info: info,
                ..VolumeStatus::default()
            }),
        }
    }
    persistent_state::sort_volumes(entries);
}

/// Updates the entry of the claim with the state of the VMI. One that is gone leaves its entry unchanged.
pub(super) fn update_state(claim: Option<&CachedClaim>, entries: &mut Vec<VolumeStatus>) {
    let Some(claim) = claim else { return };
    let info = Some(PersistentVolumeClaimInfo {
        access_modes: claim.access_modes.clone(),
        claim_name: claim.metadata.name.clone(),
        ..PersistentVolumeClaimInfo::default()
    });
    match entries.iter_mut().find(|entry| entry.name == STATUS_VOLUME) {
        Some(entry) => entry.persistent_volume_claim_info = info,
        None => entries.push(VolumeStatus {
            name: STATUS_VOLUME.to_owned(),
            persistent_volume_claim_info: info,
            ..VolumeStatus::default()
        }),
    }
    persistent_state::sort_volumes(entries);
}

fn info(name: &str, claim: &CachedClaim) -> PersistentVolumeClaimInfo {
    PersistentVolumeClaimInfo {
        access_modes: claim.access_modes.clone(),
        capacity: amounts(claim.capacity.as_ref()),
        claim_name: Some(name.to_owned()),
        filesystem_overhead: Some(FILESYSTEM_OVERHEAD.to_owned()),
        preallocated: claim.preallocated.then_some(true),
        requests: amounts(claim.requests.as_ref()),
        volume_mode: Some(if claim.block { "Block" } else { "Filesystem" }.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::{Value, json};

    use super::*;

    fn updated(volumes: Value, claims: &[(&str, Value)], before: Value) -> Value {
        let spec: VirtualMachineInstanceSpec =
            serde_json::from_value(json!({"domain": {"devices": {}}, "volumes": volumes})).unwrap();
        let claims = claims.iter().map(|(name, claim)| {
            let claim: PersistentVolumeClaim = serde_json::from_value(claim.clone()).unwrap();
            ((*name).to_owned(), Arc::new(CachedClaim::from(claim)))
        });
        let mut entries: Vec<VolumeStatus> = serde_json::from_value(before).unwrap();
        update_claims(&spec, &claims.collect(), &mut entries);
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
    fn claim_is_added_to_the_entry_of_virt_handler() {
        let volumes = json!([
            {"name": "root", "containerDisk": {"image": "i"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        ]);
        let before = json!([{"name": "root", "target": "vda"}, {"name": "data", "target": "vdb"}]);
        assert_eq!(
            updated(volumes, &[("c", claim())], before),
            json!([
                {"name": "data", "target": "vdb", "persistentVolumeClaimInfo": {
                    "claimName": "c", "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "preallocated": true,
                    "capacity": {"storage": "2Gi"}, "requests": {"storage": "1Gi"}, "filesystemOverhead": "0.055"}},
                {"name": "root", "target": "vda"},
            ])
        );
    }

    #[test]
    fn only_claims_that_hold_the_data_themselves_are_updated() {
        let volumes = json!([
            {"name": "a", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "gone"}},
        ]);
        assert_eq!(updated(volumes, &[("c", claim())], json!([])), json!([]));
    }

    #[test]
    fn only_relevant_changes_of_a_claim_are_changes() {
        let view = |changes: Value| {
            let mut claim = claim();
            json_patch::merge(&mut claim, &changes);
            CachedClaim::from(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap())
        };
        let before = view(json!({}));
        for (changes, same) in [
            (json!({"metadata": {"resourceVersion": "7", "labels": {"team": "blue"}}}), true),
            (
                json!({"metadata": {"ownerReferences": [{"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
                "name": "c", "uid": "u", "controller": true}]}}),
                false,
            ),
            (json!({"status": {"phase": "Lost"}}), false),
            (json!({"spec": {"resources": {"requests": {"storage": "3Gi"}}}}), false),
            (json!({"status": {"capacity": {"storage": "3Gi"}}}), false),
        ] {
            assert_eq!(before.is_equivalent(&view(changes.clone())), same, "{changes}");
        }
    }
}
