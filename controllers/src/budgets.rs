//! PodDisruptionBudgets that old releases of KubeVirt made for VMIs. They would block drains, about which the webhook for
//! evictions decides. Nothing makes new ones, so that each leader looks once.

use std::time::Duration;

use api::owner;
use k8s_openapi::{api::policy::v1::PodDisruptionBudget, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Preconditions},
};

/// Budgets of a page.
const PAGE: u32 = 100;
/// Time limit of an attempt.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// Wait after an attempt that failed.
const RETRY: Duration = Duration::from_secs(60);

/// Removes the budgets of VMIs. Repeats this until it succeeds.
pub(crate) async fn remove(client: Client) {
    loop {
        let error = match tokio::time::timeout(TIME_LIMIT, remove_all(&client)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no end within {TIME_LIMIT:?}"),
        };
        tracing::warn!(error, "cannot remove PodDisruptionBudgets of VMIs");
        tokio::time::sleep(RETRY).await;
    }
}

async fn remove_all(client: &Client) -> kube::Result<()> {
    let all = Api::<PodDisruptionBudget>::all(client.clone());
    let mut next = None;
    loop {
        let page =
            all.list_metadata(&ListParams { limit: Some(PAGE), continue_token: next, ..ListParams::default() }).await?;
        for budget in page.items.iter().map(|budget| &budget.metadata).filter(|budget| is_of_vmi(budget)) {
            delete(client, budget).await?;
        }
        next = page.metadata.continue_.filter(|token| !token.is_empty());
        if next.is_none() {
            return Ok(());
        }
    }
}

/// Returns true for a budget whose controller is a VMI.
fn is_of_vmi(budget: &ObjectMeta) -> bool {
    // Releases of that time used several versions.
    owner::controller(budget)
        .is_some_and(|owner| owner.kind == "VirtualMachineInstance" && owner.api_version.starts_with("kubevirt.io/"))
}

async fn delete(client: &Client, budget: &ObjectMeta) -> kube::Result<()> {
    let (namespace, name) =
        (budget.namespace.as_deref().unwrap_or_default(), budget.name.as_deref().unwrap_or_default());
    let budgets = Api::<PodDisruptionBudget>::namespaced(client.clone(), namespace);
    let same = Preconditions { uid: budget.uid.clone(), resource_version: None };
    match budgets.delete(name, &DeleteParams { preconditions: Some(same), ..DeleteParams::default() }).await {
        Ok(_) => {
            tracing::info!(namespace, name, "removed a PodDisruptionBudget of a VMI");
            Ok(())
        }
        // It is gone, or another one has its name.
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use serde_json::{Value, json};

    use super::*;
    use crate::scripted::{Reply, Server, status};

    fn owner(kind: &str, api_version: &str, controller: bool) -> Value {
        json!({"apiVersion": api_version, "kind": kind, "name": "a", "uid": "u", "controller": controller})
    }

    fn budget(name: &str, owners: &[Value]) -> Value {
        json!({"metadata": {"namespace": "n", "name": name, "uid": name, "ownerReferences": owners}})
    }

    #[test]
    fn budgets_of_others_are_kept() {
        for (kind, api_version, controller, expected) in [
            ("VirtualMachineInstance", "kubevirt.io/v1", true, true),
            ("VirtualMachineInstance", "kubevirt.io/v1alpha3", true, true),
            ("VirtualMachineInstance", "kubevirt.io/v1", false, false),
            ("VirtualMachineInstance", "example.com/v1", true, false),
            ("VirtualMachine", "kubevirt.io/v1", true, false),
        ] {
            let budget = budget("b", &[owner(kind, api_version, controller)]);
            let metadata = serde_json::from_value(budget["metadata"].clone()).unwrap();
            assert_eq!(is_of_vmi(&metadata), expected, "{kind} {api_version} {controller}");
        }
        assert!(!is_of_vmi(&ObjectMeta::default()));
    }

    #[tokio::test(start_paused = true)]
    async fn budgets_of_vmis_are_removed_from_all_pages() {
        let vmi = [owner("VirtualMachineInstance", "kubevirt.io/v1", true)];
        let page = |token: &str, items: &[Value]| {
            let body = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                "metadata": {"continue": token}, "items": items});
            Reply::Answer(200, body)
        };
        let server = Server::new([
            Reply::Answer(500, status(500, "InternalError")),
            page("next", &[budget("kept", &[]), budget("first", &vmi)]),
            Reply::Answer(404, status(404, "NotFound")),
            page("", &[budget("second", &vmi)]),
            Reply::Answer(200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})),
        ]);
        remove(server.client()).await;
        let list = || (Method::GET, "/apis/policy/v1/poddisruptionbudgets".to_owned());
        let delete = |name: &str| (Method::DELETE, format!("/apis/policy/v1/namespaces/n/poddisruptionbudgets/{name}"));
        assert_eq!(server.requests(), [list(), list(), delete("first"), list(), delete("second")]);
    }
}
