//! The search for pods that no watch shows.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::api::{ListParams, ObjectList, PartialObjectMeta, Patch, PatchParams};
use serde_json::{Value, json};

use super::{
    Executor, FIELD_MANAGER, Kind, WRITE_TIMEOUT,
    errors::{WriteError, classify},
};

/// Pods on a page of a list. Their metadata can have 256 KiB each.
const PAGE: u32 = 100;

impl Executor {
    /// Carries out [`Effect::Restore`].
    pub(super) async fn restore(
        &self,
        namespace: Option<&str>,
        name: Option<&str>,
        uids: &[String],
        labels: &BTreeMap<String, String>,
        owner: &OwnerReference,
    ) -> Result<(), WriteError> {
        let refused = |error: kube::core::request::Error| WriteError::Refused(error.to_string());
        let mut missing: Vec<&String> = uids.iter().collect();
        let mut parameters = ListParams::default().limit(PAGE);
        if let Some(name) = name {
            parameters = parameters.fields(&format!("metadata.name={name}"));
        }
        loop {
            let request = self.request(Kind::Pod, namespace).list_metadata(&parameters).map_err(refused)?;
            let page: ObjectList<PartialObjectMeta<Pod>> =
                self.client.request(request).await.map_err(|error| classify(&error, true))?;
            for pod in page.items {
                let uid = pod.metadata.uid.as_ref();
                let Some(found) = missing.iter().position(|wanted| Some(*wanted) == uid) else { continue };
                missing.swap_remove(found);
                // The list may have taken longer than leadership lasts.
                if !self.leadership.holds() {
                    return Err(WriteError::NotLeading);
                }
                let name = pod.metadata.name.clone().unwrap_or_default();
                tracing::warn!(pod = name, "the labels or the owner of a launcher pod were removed and are restored");
                let patch = restoration(&pod, labels, owner);
                let parameters =
                    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
                let request = self
                    .request(Kind::Pod, namespace)
                    .patch(&name, &parameters, &Patch::Merge(&patch))
                    .map_err(refused)?;
                // A pod that is gone by now is searched for again.
                let limit = WRITE_TIMEOUT.min(self.leadership.time_left());
                let answer = tokio::time::timeout(limit, self.client.request::<Value>(request)).await;
                let answer = answer.map_err(|_| WriteError::Unreachable("no answer in time".to_owned()))?;
                let answer = answer.map_err(|error| match classify(&error, false) {
                    WriteError::Gone => WriteError::Stale,
                    other => other,
                })?;
                self.answers.written(Kind::Pod, answer);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty() && !missing.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => break,
            }
        }
        for uid in missing {
            self.answers.deleted(Kind::Pod, namespace, name.unwrap_or_default(), Some(uid));
        }
        Ok(())
    }
}

/// Returns the patch that restores labels and controller of a pod, if it is still the version that was read. Other owners
/// stay.
fn restoration(pod: &PartialObjectMeta<Pod>, labels: &BTreeMap<String, String>, owner: &OwnerReference) -> Value {
    let mut patch = json!({"metadata": {"resourceVersion": pod.metadata.resource_version, "labels": labels}});
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    if !owners.contains(owner) {
        let others = owners.iter().filter(|other| other.uid != owner.uid && other.controller != Some(true));
        patch["metadata"]["ownerReferences"] = json!(others.chain([owner]).collect::<Vec<_>>());
    }
    patch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_pod_gets_its_labels_and_its_controller_and_keeps_other_owners() {
        let owner = |uid: &str, controller: bool| OwnerReference {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            name: "c".to_owned(),
            uid: uid.to_owned(),
            controller: Some(controller),
            block_owner_deletion: None,
        };
        let labels = BTreeMap::from([("kubevirt.io".to_owned(), "virt-launcher".to_owned())]);
        let patch = |owners: Vec<OwnerReference>| {
            let pod = json!({"metadata": {"name": "p", "resourceVersion": "7", "ownerReferences": owners}});
            restoration(&serde_json::from_value(pod).unwrap(), &labels, &owner("u", true))["metadata"].clone()
        };
        let plain = json!({"resourceVersion": "7", "labels": {"kubevirt.io": "virt-launcher"}});
        assert_eq!(patch(vec![owner("u", true)]), plain);
        for (owners, expected) in [
            (vec![], vec![owner("u", true)]),
            (vec![owner("u", false)], vec![owner("u", true)]),
            (vec![owner("x", true)], vec![owner("u", true)]),
            (vec![owner("x", false)], vec![owner("x", false), owner("u", true)]),
        ] {
            assert_eq!(patch(owners)["ownerReferences"], json!(expected));
        }
    }
}
