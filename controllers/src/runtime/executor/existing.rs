//! The pod that has the name with which another was to be created.

use api::constants::label;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    api::{ListParams, ObjectList},
    core::Request,
};
use serde_json::Value;

use super::{
    Executor, Kind,
    errors::{WriteError, classify},
};

/// The pod that has the name of one that was to be created.
#[derive(Debug, PartialEq)]
pub(super) enum Existing {
    /// A pod with the same controller, which an earlier attempt created.
    Own(Value),
    /// A pod of another controller.
    Foreign,
    /// Nothing any more, or a pod whose labels were removed, which the watch does not show.
    Nothing,
}

impl Executor {
    /// Reads the pod that has the name of a pod that was to be created.
    pub(super) async fn existing(
        &self,
        namespace: Option<&str>,
        name: &str,
        wanted: &Value,
    ) -> Result<Existing, WriteError> {
        // A list, since virt-controller has no right to get pods.
        let parameters = ListParams::default().fields(&format!("metadata.name={name}")).limit(1);
        let request = Request::new(Kind::Pod.path(namespace)).list(&parameters);
        let request = request.map_err(|error| WriteError::Refused(error.to_string()))?;
        let list: ObjectList<Pod> = self.client.request(request).await.map_err(|error| classify(&error, true))?;
        let Some(found) = list.items.into_iter().next() else { return Ok(Existing::Nothing) };
        let found = serde_json::to_value(found).map_err(|error| WriteError::Refused(error.to_string()))?;
        Ok(sorted(found, wanted))
    }
}

/// Compares a pod with the one that was to be created in its place.
fn sorted(found: Value, wanted: &Value) -> Existing {
    if controller(&found).is_none() || controller(&found) != controller(wanted) {
        return Existing::Foreign;
    }
    let labels = |pod: &Value| pod["metadata"]["labels"][label::APP].clone();
    if labels(&found) == labels(wanted) { Existing::Own(found) } else { Existing::Nothing }
}

/// Returns the UID of a pod's controller.
fn controller(pod: &Value) -> Option<&str> {
    let owners = pod["metadata"]["ownerReferences"].as_array()?;
    let controller = owners.iter().find(|owner| owner["controller"] == true)?;
    controller["uid"].as_str().filter(|uid| !uid.is_empty())
}
