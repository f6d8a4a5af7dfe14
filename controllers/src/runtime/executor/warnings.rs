//! The read of the events about a pod that does not start, or a claim that is not bound.

use k8s_openapi::api::core::v1::Event;
use kube::{
    api::{ListParams, ObjectList},
    core::Request,
};

use super::{
    Executor,
    errors::{WriteError, classify},
};

/// Events of an object that are read at most.
const MOST: u32 = 50;

impl Executor {
    /// Carries out [`super::Effect::ReadWarnings`].
    pub(super) async fn read_warnings(&self, namespace: &str, pod: &str, uid: &str) -> Result<(), WriteError> {
        let list = self.warnings(namespace, uid).await?;
        self.answers.warned(namespace, pod, uid, &list);
        Ok(())
    }

    /// Carries out [`super::Effect::ReadClaimWarning`].
    pub(super) async fn read_claim_warning(&self, namespace: &str, claim: &str, uid: &str) -> Result<(), WriteError> {
        let list = self.warnings(namespace, uid).await?;
        self.answers.warned_of_claim(namespace, claim, uid, &list);
        Ok(())
    }

    async fn warnings(&self, namespace: &str, uid: &str) -> Result<ObjectList<Event>, WriteError> {
        let parameters = ListParams::default().fields(&format!("involvedObject.uid={uid},type=Warning")).limit(MOST);
        let request = Request::new(format!("/api/v1/namespaces/{namespace}/events"))
            .list(&parameters)
            .map_err(|error| WriteError::Refused(error.to_string()))?;
        self.client.request(request).await.map_err(|error| classify(&error, true))
    }
}
