//! The pod that is scheduled in place of the launcher pod while a claim waits for its first consumer.
//!
//! The scheduler selects its node as that of the launcher pod, for labels, claims, resources and placement are the same. Its program
//! ends at once, and no volume is mounted: importers wait until no pod uses the claim.

use api::constants::{annotation, component};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Inputs, RenderError, metadata::ISTIO_INJECT, render};
use crate::resources::pods::BIND_CLAIMS;

/// Renders the pod.
pub(crate) fn render_temporary(inputs: &Inputs<'_>) -> Result<Pod, RenderError> {
    let mut pod = render(inputs)?;
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(annotation::EPHEMERAL_PROVISIONING.to_owned(), "true".to_owned());
    // A proxy would not end, and needs a token.
    for marks in [&mut pod.metadata.labels, &mut pod.metadata.annotations].into_iter().flatten() {
        if let Some(inject) = marks.get_mut(ISTIO_INJECT) {
            "false".clone_into(inject);
        }
    }
    let Some(spec) = &mut pod.spec else { return Ok(pod) };
    spec.automount_service_account_token = Some(false);
    spec.volumes.get_or_insert_default().retain(|volume| volume.persistent_volume_claim.is_some());
    for container in spec.containers.iter_mut().filter(|container| container.name == component::COMPUTE_CONTAINER) {
        *container = Container {
            command: Some(BIND_CLAIMS.map(str::to_owned).to_vec()),
            env: None,
            liveness_probe: None,
            readiness_probe: None,
            volume_mounts: None,
            volume_devices: None,
            ..std::mem::take(container)
        };
    }
    Ok(pod)
}
