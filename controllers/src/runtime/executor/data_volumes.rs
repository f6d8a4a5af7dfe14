//! The creation of DataVolumes of VMs.
//!
//! The source is read, the right to clone it is checked, and a DataVolume with exactly this source is created, all in one step:
//! nothing can be exchanged between check and creation. virt-controller may create any DataVolume, so that this check alone
//! separates the author of a VM from the volumes of other namespaces.

use api::{
    cdi::{
        DataSource,
        data_volume::{DataVolumeImportSource, DataVolumeSourceRef},
    },
    constants::event,
};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use kube::{
    api::{GetParams, PostParams},
    core::{Request, request::Error as RequestError},
};
use serde_json::Value;

use super::{
    DataVolumeCreation, Event, Executor, Kind,
    errors::{WriteError, classify},
};
use crate::clone_source::{CloneSource, Requester, concrete, unready};

/// Collection of reviews.
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

impl Executor {
    /// Returns the DataVolume with its source, after the right to clone it was checked.
    pub(super) async fn prepare_data_volume(&self, creation: &DataVolumeCreation) -> Result<Value, WriteError> {
        let mut data_volume = creation.data_volume.clone();
        let namespace = data_volume.metadata.namespace.clone().unwrap_or_default();
        if let Some(reference) = data_volume.spec.source_ref.take() {
            let source = self.resolve(&namespace, &reference).await;
            let source = source.map_err(|error| self.refused(creation, Step::Create, error))?;
            data_volume.spec.source = Some(source);
        }
        let requester = Requester { namespace: &namespace, service_account: &creation.service_account };
        if let Some(source) = CloneSource::of(&data_volume).filter(|source| source.namespace != namespace)
            && !self.may_clone(requester, &source).await?
        {
            let message = source.denial(requester);
            return Err(self.refused(creation, Step::Authorize, WriteError::Refused(message)));
        }
        let mut object = serde_json::to_value(&data_volume).map_err(|error| WriteError::Refused(error.to_string()))?;
        object["apiVersion"] = Kind::DataVolume.api_version().into();
        object["kind"] = Kind::DataVolume.kind().into();
        Ok(object)
    }

    /// Returns the answer to a creation as it concerns the VM.
    pub(super) fn created_data_volume(
        &self,
        creation: &DataVolumeCreation,
        answer: Result<Option<Value>, WriteError>,
    ) -> Result<Option<Value>, WriteError> {
        match answer {
            // Versions of CDI that adopt no claims refuse the DataVolume of one that exists.
            Err(WriteError::Refused(message)) if creation.adopts_claim && message.contains("already exists") => {
                Ok(None)
            }
            answer => answer.map_err(|error| self.refused(creation, Step::Create, error)),
        }
    }

    /// Returns the source that a DataSource names.
    async fn resolve(&self, own: &str, reference: &DataVolumeSourceRef) -> Result<DataVolumeImportSource, WriteError> {
        let namespace = reference.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(own);
        let name = &reference.name;
        // Both become parts of a path.
        if reference.kind != "DataSource" || !is_name(namespace) || !is_name(name) {
            let message = format!("DataVolume sourceRef not supported: {} {namespace}/{name}", reference.kind);
            return Err(WriteError::Refused(message));
        }
        let request = Request::new(Kind::DataSource.path(Some(namespace)));
        let request = request.get(name, &GetParams::default()).map_err(invalid)?;
        let found: DataSource = self.client.request(request).await.map_err(|error| classify(&error, true))?;
        concrete(&found).ok_or_else(|| {
            let cause = unready(&found);
            WriteError::Refused(format!(
                "DataVolume sourceRef not supported: DataSource {namespace}/{name} names no source: {cause}"
            ))
        })
    }

    /// Asks if a service account may clone a source.
    async fn may_clone(&self, requester: Requester<'_>, source: &CloneSource) -> Result<bool, WriteError> {
        for required in source.rights() {
            let mut is_granted = true;
            for right in required {
                is_granted = is_granted && self.is_allowed(&requester.review(right)).await?;
            }
            if is_granted {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn is_allowed(&self, review: &SubjectAccessReview) -> Result<bool, WriteError> {
        let body = serde_json::to_vec(review).map_err(|error| WriteError::Refused(error.to_string()))?;
        let request = Request::new(REVIEWS).create(&PostParams::default(), body).map_err(invalid)?;
        let answer: SubjectAccessReview = self.client.request(request).await.map_err(|error| classify(&error, true))?;
        Ok(answer.status.is_some_and(|status| status.allowed && status.denied != Some(true)))
    }

    /// Emits the event of a refusal, and adds the step to the message.
    fn refused(&self, creation: &DataVolumeCreation, step: Step, error: WriteError) -> WriteError {
        let WriteError::Refused(message) = error else { return error };
        let name = creation.data_volume.metadata.name.as_deref().unwrap_or_default();
        let (reason, told, context) = match step {
            Step::Authorize => (
                event::UNAUTHORIZED_DATA_VOLUME_CREATE,
                "Not authorized to create",
                "not authorized to create DataVolume",
            ),
            Step::Create => (event::FAILED_DATA_VOLUME_CREATE, "Error creating", "failed to create DataVolume"),
        };
        let regarding = creation.regarding.clone();
        self.recorder.emit(
            "vm",
            Event::warning(regarding, reason, format!("{told} DataVolume {name}: {message}")),
            None,
            None,
        );
        WriteError::Refused(format!("{context}: {message}"))
    }
}

/// A step of the creation.
#[derive(Clone, Copy)]
enum Step {
    Authorize,
    Create,
}

fn invalid(error: RequestError) -> WriteError {
    WriteError::Refused(error.to_string())
}

/// Returns true for text that can name an object or a namespace.
pub(super) fn is_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !part.is_empty() && part.bytes().all(|byte| is_plain(byte) || byte == b'-')
    };
    text.split('.').all(is_part)
}
