//! VMs, VMIs, their pods and claims of the API server.

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration, constants::label, names::label_value,
    persistent_state,
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, Client, Resource,
    api::{GetParams, ListParams},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::address;
use crate::requests::error::{ApiError, Kind};

/// Pods on a page of those with the label of a VMI. Usually there is one.
const PODS_ON_PAGE: u32 = 16;
/// Most pages of them. Only pods of one namespace that a node has admitted count, so there are not as many.
const POD_PAGES: usize = 64;

/// Claims on a page of those with the state of a VM. Usually there is one.
const CLAIMS_ON_PAGE: u32 = 16;
/// Most pages of them. Users can give claims the label as well.
const CLAIM_PAGES: usize = 64;

/// Records a UID in the span of the request.
fn record(field: &'static str, uid: Option<&str>) {
    if let Some(uid) = uid {
        tracing::Span::current().record(field, uid);
    }
}

/// An object with its JSON, which also has the zero values that the types leave out. Tests of a JSON patch compare them.
pub(crate) struct Stored<K> {
    /// The object.
    pub object: K,
    /// Its JSON.
    pub json: Value,
}

/// Reads objects of the API server.
#[derive(Clone)]
pub(crate) struct Objects {
    /// Client for the API server.
    pub client: Client,
}

impl Objects {
    /// Returns the VMs of a namespace.
    pub(crate) fn vms(&self, namespace: &str) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Returns the VMIs of a namespace.
    pub(crate) fn vmis(&self, namespace: &str) -> Api<VirtualMachineInstance> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Returns the migrations of a namespace.
    pub(crate) fn migrations(&self, namespace: &str) -> Api<VirtualMachineInstanceMigration> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Reads a VM that may be missing.
    pub(crate) async fn vm_opt(&self, namespace: &str, name: &str) -> Result<Option<VirtualMachine>, ApiError> {
        let found = self
            .vms(namespace)
            .get_opt(name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vm [{name}]: {}", message(&error))))?;
        record("vm_uid", found.as_ref().and_then(|vm| vm.metadata.uid.as_deref()));
        Ok(found)
    }

    /// Reads a VM.
    pub(crate) async fn vm(&self, namespace: &str, name: &str) -> Result<VirtualMachine, ApiError> {
        self.vm_opt(namespace, name).await?.ok_or_else(|| ApiError::not_found(Kind::VirtualMachine, name))
    }

    /// Reads a VM with its JSON.
    pub(crate) async fn stored_vm(&self, namespace: &str, name: &str) -> Result<Stored<VirtualMachine>, ApiError> {
        let found = stored(self.vms(namespace), name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vm [{name}]: {}", message(&error))))?;
        let found = found.ok_or_else(|| ApiError::not_found(Kind::VirtualMachine, name))?;
        record("vm_uid", found.object.metadata.uid.as_deref());
        Ok(found)
    }

    /// Reads a VMI with its JSON. It may be missing.
    pub(crate) async fn stored_vmi_opt(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Stored<VirtualMachineInstance>>, ApiError> {
        let found = stored(self.vmis(namespace), name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vmi [{name}]: {}", message(&error))))?;
        record("vmi_uid", found.as_ref().and_then(|found| found.object.metadata.uid.as_deref()));
        Ok(found)
    }

    /// Reads a VMI that may be missing.
    pub(crate) async fn vmi_opt(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<VirtualMachineInstance>, ApiError> {
        let found = self
            .vmis(namespace)
            .get_opt(name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve vmi [{name}]: {}", message(&error))))?;
        record("vmi_uid", found.as_ref().and_then(|vmi| vmi.metadata.uid.as_deref()));
        Ok(found)
    }

    /// Reads the page of pods with the launcher pod of a VMI.
    pub(crate) async fn launcher_pods(&self, vmi: &VirtualMachineInstance) -> Result<Vec<Pod>, ApiError> {
        let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let Some(selector) = pod_selector(vmi) else { return Ok(Vec::new()) };
        let mut selector = selector.limit(PODS_ON_PAGE);
        for _ in 0..POD_PAGES {
            let page = pods.list(&selector).await;
            let page = page.map_err(|error| ApiError::Internal(format!("unable to list pods: {}", message(&error))))?;
            if address::launcher(vmi, &page.items).is_some() {
                return Ok(page.items);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => selector = selector.continue_token(&token),
                None => return Ok(Vec::new()),
            }
        }
        Err(ApiError::Internal("unable to find the launcher among pods with its label".to_owned()))
    }

    /// Returns the name of the newest claim with the state of a VM.
    pub(crate) async fn state_claim(&self, vm: &VirtualMachine) -> Result<Option<String>, ApiError> {
        let metadata = &vm.metadata;
        let claims = Api::<PersistentVolumeClaim>::namespaced(
            self.client.clone(),
            metadata.namespace.as_deref().unwrap_or_default(),
        );
        let name = label_value(metadata.name.as_deref().unwrap_or_default());
        let labels = format!("{}={name}", persistent_state::LABEL);
        let mut selector = ListParams::default().labels(&labels).limit(CLAIMS_ON_PAGE);
        let mut newest: Option<PersistentVolumeClaim> = None;
        for _ in 0..CLAIM_PAGES {
            let page = claims.list(&selector).await;
            let page =
                page.map_err(|error| ApiError::Internal(format!("unable to list claims: {}", message(&error))))?;
            let present = page.items.into_iter().filter(|claim| claim.metadata.deletion_timestamp.is_none());
            newest = newest.into_iter().chain(present).max_by_key(|claim| claim.metadata.creation_timestamp.clone());
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => selector = selector.continue_token(&token),
                None => return Ok(newest.and_then(|claim| claim.metadata.name)),
            }
        }
        Err(ApiError::Internal("unable to find the newest among claims with the label of the VM".to_owned()))
    }

    /// Reads a pod that may be missing.
    pub(crate) async fn pod_opt(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ApiError> {
        let pod = Api::<Pod>::namespaced(self.client.clone(), namespace).get_opt(name).await;
        pod.map_err(|error| ApiError::Internal(format!("unable to retrieve pod [{name}]: {}", message(&error))))
    }
}

/// Reads an object with its JSON. It may be missing.
async fn stored<K>(api: Api<K>, name: &str) -> kube::Result<Option<Stored<K>>>
where
    K: Resource + DeserializeOwned,
{
    let request = kube::core::Request::new(api.resource_url()).get(name, &GetParams::default());
    match api.into_client().request::<Value>(request.map_err(kube::Error::BuildRequest)?).await {
        Ok(json) => {
            let object = serde_json::from_value(json.clone()).map_err(kube::Error::SerdeError)?;
            Ok(Some(Stored { object, json }))
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the message of a failed request to the API server.
pub(crate) fn message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// End of the beginning of a message about a denial, which names the webhook.
const DENIED: &str = " denied the request: ";

/// Returns the answer to a user whose request led to a failed request to the API server. A denial by admission is answered with its
/// reason alone.
pub(crate) fn refusal(error: &kube::Error) -> ApiError {
    let message = message(error);
    match error {
        kube::Error::Api(status) if (400..500).contains(&status.code) => match message.split_once(DENIED) {
            Some((webhook, reason)) if webhook.starts_with("admission webhook ") => {
                ApiError::BadRequest(reason.to_owned())
            }
            _ => ApiError::Internal(message),
        },
        _ => ApiError::Internal(message),
    }
}

/// Selects the pods that may be the launcher of a VMI: those with its label, on its node, that have not ended. Users can give
/// pods the label, but a node admits a limited number. `None`: the VMI has no node.
fn pod_selector(vmi: &VirtualMachineInstance) -> Option<ListParams> {
    let uid = vmi.metadata.uid.as_deref().filter(|uid| !uid.is_empty())?;
    let node = vmi.status.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())?;
    let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
    Some(ListParams::default().labels(&format!("{}={uid}", label::CREATED_BY)).fields(&fields))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denial_by_admission_is_answered_with_its_reason() {
        let denied = "admission webhook \"a.kubevirt.io\" denied the request: Cannot migrate VMI";
        for (code, text, expected) in [
            (400, denied, ApiError::BadRequest("Cannot migrate VMI".to_owned())),
            (422, denied, ApiError::BadRequest("Cannot migrate VMI".to_owned())),
            (500, denied, ApiError::Internal(denied.to_owned())),
            (403, "pods is forbidden", ApiError::Internal("pods is forbidden".to_owned())),
            // The text of a user is no denial.
            (400, "x denied the request: y", ApiError::Internal("x denied the request: y".to_owned())),
        ] {
            let status = kube::core::Status::failure(text, "BadRequest").with_code(code);
            assert_eq!(refusal(&kube::Error::Api(status.boxed())), expected, "{code} {text}");
        }
    }

    #[tokio::test]
    async fn newest_claim_with_the_state_of_a_vm_is_found_on_any_page() {
        let service = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
            let is_second = request.uri().query().is_some_and(|query| query.contains("continue=more"));
            let (name, time, next) =
                if is_second { ("new", "2026-02-01T00:00:00Z", "") } else { ("old", "2026-01-01T00:00:00Z", "more") };
            let list = serde_json::json!({
                "kind": "PersistentVolumeClaimList", "apiVersion": "v1", "metadata": {"continue": next},
                "items": [{"metadata": {"name": name, "creationTimestamp": time}}],
            });
            Ok::<_, std::convert::Infallible>(http::Response::new(axum::body::Body::from(list.to_string())))
        });
        let objects = Objects { client: Client::new(service, "default") };
        let vm = serde_json::from_value(serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a", "namespace": "ns"},
            "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}},
        }));
        assert_eq!(objects.state_claim(&vm.unwrap()).await, Ok(Some("new".to_owned())));
    }

    #[test]
    fn launcher_is_selected_on_the_node_of_its_vmi() {
        let selected = |uid: &str, node: &str| {
            let vmi = serde_json::json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m", "uid": uid},
                "spec": {"domain": {"devices": {}}}, "status": {"nodeName": node},
            });
            let selector = pod_selector(&serde_json::from_value(vmi).unwrap())?;
            selector.label_selector.zip(selector.field_selector)
        };
        let fields = "spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed";
        assert_eq!(selected("u", "n1"), Some(("kubevirt.io/created-by=u".to_owned(), fields.to_owned())));
        assert_eq!(selected("u", ""), None);
        assert_eq!(selected("", "n1"), None);
    }
}
