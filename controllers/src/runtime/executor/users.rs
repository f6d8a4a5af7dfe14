//! The read of the pods that use claims. Most of them are of other owners, which no watch shows.

use std::collections::BTreeMap;

use api::{VirtualMachineInstance, owner};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{
    api::{ListParams, ObjectList},
    core::Request,
};

use super::{
    Executor, Kind,
    errors::{WriteError, classify},
};

/// Pods on a page of a list.
const PAGE: u32 = 100;
/// Users of a claim that are kept at most: they are named in a message.
const MOST: usize = 4;

/// A pod that can write to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClaimUser {
    /// Its name.
    pub pod: String,
    /// The VMI that it runs, which has the name of its VM.
    pub vmi: Option<String>,
}

impl Executor {
    /// Carries out [`super::Effect::ReadUsers`]: one list for all claims.
    pub(super) async fn read_users(
        &self,
        namespace: &str,
        claims: &BTreeMap<String, String>,
    ) -> Result<(), WriteError> {
        let mut parameters = ListParams::default().limit(PAGE);
        let mut found: BTreeMap<&str, Vec<ClaimUser>> = claims.keys().map(|claim| (claim.as_str(), vec![])).collect();
        loop {
            let request = Request::new(Kind::Pod.path(Some(namespace)))
                .list(&parameters)
                .map_err(|error| WriteError::Refused(error.to_string()))?;
            let page: ObjectList<Pod> = self.client.request(request).await.map_err(|error| classify(&error, true))?;
            for (claim, users) in &mut found {
                let left = MOST.saturating_sub(users.len());
                users.extend(page.items.iter().filter_map(|pod| user(pod, claim)).take(left));
            }
            let is_open = found.values().any(|users| users.len() < MOST);
            match page.metadata.continue_.filter(|token| is_open && !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => {
                    for (claim, users) in found {
                        let uid = claims.get(claim).map(String::as_str).unwrap_or_default();
                        self.answers.users(namespace, claim, uid, users, page.metadata.resource_version.clone());
                    }
                    return Ok(());
                }
            }
        }
    }
}

/// Returns the pod if it can write to the claim now or later.
fn user(pod: &Pod, claim: &str) -> Option<ClaimUser> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    let writes = spec.volumes.iter().flatten().any(|volume| {
        let source = volume.persistent_volume_claim.as_ref().filter(|source| source.claim_name == claim);
        source.is_some_and(|source| source.read_only != Some(true)) && has_writer(pod, &volume.name)
    });
    let vmi = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata).map(|vmi| vmi.name.clone());
    writes.then(|| ClaimUser { pod: pod.metadata.name.clone().unwrap_or_default(), vmi })
}

/// Returns true if a container can write to the volume. A volume that none mounts may get its user from outside the pod.
fn has_writer(pod: &Pod, volume: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let containers: Vec<&Container> = spec.containers.iter().chain(spec.init_containers.iter().flatten()).collect();
    let mounts: Vec<bool> = containers
        .iter()
        .flat_map(|container| container.volume_mounts.iter().flatten())
        .filter(|mount| mount.name == volume)
        .map(|mount| mount.read_only == Some(true))
        .collect();
    mounts.is_empty() || mounts.contains(&false)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn pod_uses_a_claim_if_it_can_write_to_it() {
        let mount = |name: &str, read_only: bool| json!({"name": name, "mountPath": "/d", "readOnly": read_only});
        let device = json!([{"name": "v", "devicePath": "/dev/d"}]);
        // phase, claim, the volume is read-only, mounts, devices, uses
        for (phase, claim, read_only, mounts, devices, uses) in [
            ("Running", "c", false, json!([mount("v", false)]), json!([]), true),
            ("Pending", "c", false, json!([mount("v", false)]), json!([]), true),
            ("Succeeded", "c", false, json!([mount("v", false)]), json!([]), false),
            ("Failed", "c", false, json!([mount("v", false)]), json!([]), false),
            ("Running", "other", false, json!([mount("v", false)]), json!([]), false),
            ("Running", "c", true, json!([mount("v", false)]), json!([]), false),
            ("Running", "c", false, json!([mount("v", true)]), json!([]), false),
            ("Running", "c", false, json!([mount("v", true), mount("v", false)]), json!([]), true),
            ("Running", "c", false, json!([]), device.clone(), true),
            ("Running", "c", true, json!([]), device, false),
            ("Running", "c", false, json!([]), json!([]), true),
        ] {
            let source = json!({"claimName": claim, "readOnly": read_only});
            let pod = json!({
                "metadata": {"name": "p"}, "status": {"phase": phase},
                "spec": {"volumes": [{"name": "v", "persistentVolumeClaim": source}],
                    "containers": [{"name": "a", "volumeMounts": mounts, "volumeDevices": devices}]},
            });
            let found = user(&serde_json::from_value(pod.clone()).unwrap(), "c");
            assert_eq!(found.is_some(), uses, "{pod}");
        }
    }

    #[test]
    fn launcher_pod_names_its_vmi() {
        let owner = |kind: &str| json!([{"apiVersion": "kubevirt.io/v1", "kind": kind, "name": "m", "uid": "u", "controller": true}]);
        let named = |owners: Value| {
            let pod = json!({"metadata": {"name": "p", "ownerReferences": owners}, "spec": {"containers": [],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
            user(&serde_json::from_value(pod).unwrap(), "c").unwrap().vmi
        };
        assert_eq!(named(owner("VirtualMachineInstance")), Some("m".to_owned()));
        assert_eq!(named(owner("ReplicaSet")), None);
    }
}
