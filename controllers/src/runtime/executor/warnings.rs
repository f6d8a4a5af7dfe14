//! The read of the events about a pod that does not start.

use k8s_openapi::api::core::v1::Event;
use kube::{
    api::{ListParams, ObjectList},
    core::Request,
};

use super::{
    Executor,
    errors::{WriteError, classify},
};

/// Events of a pod that are read at most.
const MOST: u32 = 50;

impl Executor {
    /// Carries out [`super::Effect::ReadWarnings`].
    pub(super) async fn read_warnings(&self, namespace: &str, pod: &str, uid: &str) -> Result<(), WriteError> {
        let parameters = ListParams::default().fields(&format!("involvedObject.uid={uid},type=Warning")).limit(MOST);
        let request = Request::new(format!("/api/v1/namespaces/{namespace}/events"))
            .list(&parameters)
            .map_err(|error| WriteError::Refused(error.to_string()))?;
        let list: ObjectList<Event> = self.client.request(request).await.map_err(|error| classify(&error, true))?;
        self.answers.warned(namespace, pod, uid, &list);
        Ok(())
    }
}
