//! Image volumes of pods. An API server whose feature gate `ImageVolume` is off does not refuse them: it removes them and their
//! mounts, and creates the pod without them.

use std::sync::atomic::Ordering;

use kube::api::{DeleteParams, PostParams, Preconditions};
use serde_json::Value;

use super::{
    Executor, FIELD_MANAGER, Kind,
    errors::{WriteError, classify, exists},
};

impl Executor {
    /// Checks by a dry run that the API server keeps the image volumes of a pod, unless it kept those of an earlier one.
    pub(super) async fn try_image_volumes(&self, namespace: Option<&str>, pod: &Value) -> Result<(), WriteError> {
        if self.keeps_image_volumes.load(Ordering::Relaxed) || image_volumes(pod).next().is_none() {
            return Ok(());
        }
        let body = serde_json::to_vec(pod).map_err(|error| WriteError::Refused(error.to_string()))?;
        let parameters = PostParams { dry_run: true, field_manager: Some(FIELD_MANAGER.to_owned()) };
        let request = self.request(Kind::Pod, namespace).create(&parameters, body);
        let request = request.map_err(|error| WriteError::Refused(error.to_string()))?;
        let answer: Value = match self.client.request(request).await {
            // The creation has the same answer.
            Err(error) if exists(&error) => return Ok(()),
            answer => answer.map_err(|error| classify(&error, true))?,
        };
        if let Some(refusal) = refusal(pod, &answer) {
            return Err(WriteError::Refused(refusal));
        }
        self.keeps_image_volumes.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Deletes a pod that was created without its image volumes: the feature gate of the API server, or of one of several, was
    /// turned off since.
    pub(super) async fn refuse_without_image_volumes(
        &self,
        namespace: Option<&str>,
        pod: &Value,
        created: &Value,
    ) -> Result<(), WriteError> {
        let Some(refusal) = refusal(pod, created) else { return Ok(()) };
        self.keeps_image_volumes.store(false, Ordering::Relaxed);
        let uid = created["metadata"]["uid"].as_str().map(str::to_owned);
        let preconditions = Some(Preconditions { resource_version: None, uid });
        let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
        let name = created["metadata"]["name"].as_str().unwrap_or_default();
        let request = self.request(Kind::Pod, namespace).delete(name, &parameters);
        let request = request.map_err(|error| WriteError::Refused(error.to_string()))?;
        match self.client.request::<Value>(request).await.map_err(|error| classify(&error, false)) {
            Ok(_) | Err(WriteError::Gone | WriteError::Stale) => Err(WriteError::Refused(refusal)),
            Err(error) => Err(error),
        }
    }
}

/// Returns the names of a pod's image volumes.
fn image_volumes(pod: &Value) -> impl Iterator<Item = &str> {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    volumes.filter(|volume| volume["image"].is_object()).filter_map(|volume| volume["name"].as_str())
}

/// Returns the refusal of a pod that the answer of the API server shows without some of its image volumes.
fn refusal(pod: &Value, answer: &Value) -> Option<String> {
    let removed: Vec<&str> =
        image_volumes(pod).filter(|name| !image_volumes(answer).any(|kept| kept == *name)).collect();
    (!removed.is_empty()).then(|| {
        format!(
            "the API server removes image volumes from pods, which container disks and kernel images need ({}): turn on the \
             feature gate ImageVolume of Kubernetes",
            removed.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn refusal_names_the_volumes_that_were_removed() {
        let image = |name: &str| json!({"name": name, "image": {"reference": "r"}});
        let pod = |volumes: &[Value]| json!({"spec": {"volumes": volumes}});
        let sent = pod(&[json!({"name": "private", "emptyDir": {}}), image("root"), image("kernel-boot-volume")]);
        assert_eq!(refusal(&sent, &sent), None);
        let text = refusal(&sent, &pod(&[json!({"name": "private", "emptyDir": {}})])).unwrap();
        assert!(text.contains("(root, kernel-boot-volume)") && text.contains("feature gate ImageVolume"), "{text}");
        assert!(refusal(&sent, &pod(&[image("root")])).unwrap().contains("(kernel-boot-volume)"));
        // One that a webhook adds is none of ours.
        assert_eq!(refusal(&pod(&[]), &pod(&[image("injected")])), None);
        assert_eq!(refusal(&json!({}), &json!({})), None);
    }
}
