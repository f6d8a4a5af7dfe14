//! The image of the libguestfs tools.

use std::time::{Duration, Instant};

use api::{KubeVirt, kubevirt::status::KubeVirtStatus};
use axum::response::Response;
use http::StatusCode;
use kube::{Api, Client, api::ListParams};
use serde_json::{Value, json};
use tokio::{sync::Mutex, time::timeout};

use crate::requests::error::json_response;

/// Time for which an answer is cached.
const TTL: Duration = Duration::from_secs(2);
/// Longest wait for the API server.
const TIMEOUT: Duration = Duration::from_secs(4);

/// Errors of the document.
#[derive(Debug, thiserror::Error)]
enum GuestFsError {
    #[error("no answer in time")]
    Timeout,
    #[error(transparent)]
    Read(#[from] kube::Error),
    #[error("there is no KubeVirt object")]
    NoObject,
    #[error("the KubeVirt object has no {0}")]
    Missing(&'static str),
    #[error("observedDeploymentConfig: {0}")]
    DeploymentConfig(#[from] serde_json::Error),
}

/// The cached answer. The document is open to every client, so it is read from the API server by one request at a time and
/// at most every [`TTL`].
#[derive(Default)]
pub(crate) struct GuestFs {
    cached: Mutex<Option<(Instant, StatusCode, Value)>>,
}

impl GuestFs {
    /// Returns the answer, from the status of the installation.
    pub(crate) async fn answer(&self, client: &Client, namespace: &str) -> Response {
        let mut cached = self.cached.lock().await;
        if let Some((read, status, document)) = cached.as_ref()
            && read.elapsed() < TTL
        {
            return json_response(*status, document);
        }
        let result = timeout(TIMEOUT, read(client, namespace)).await.unwrap_or(Err(GuestFsError::Timeout));
        let (status, document) = match result {
            Ok(document) => (StatusCode::OK, document),
            Err(error) => {
                tracing::error!(%error, "the image for guestfs is unknown");
                let document = json!({"guestfs": {"status": "failed", "error": error.to_string()}});
                (StatusCode::INTERNAL_SERVER_ERROR, document)
            }
        };
        let response = json_response(status, &document);
        *cached = Some((Instant::now(), status, document));
        response
    }
}

async fn read(client: &Client, namespace: &str) -> Result<Value, GuestFsError> {
    let objects = Api::<KubeVirt>::namespaced(client.clone(), namespace).list(&ListParams::default().limit(1)).await?;
    let object = objects.items.into_iter().next().ok_or(GuestFsError::NoObject)?;
    document(&object.status.unwrap_or_default())
}

fn document(status: &KubeVirtStatus) -> Result<Value, GuestFsError> {
    let known = |text: &Option<String>, name: &'static str| {
        text.clone().filter(|text| !text.is_empty()).ok_or(GuestFsError::Missing(name))
    };
    let registry = known(&status.observed_kubevirt_registry, "observedKubeVirtRegistry")?;
    let tag = known(&status.observed_kubevirt_version, "observedKubeVirtVersion")?;
    let config: Value = match status.observed_deployment_config.as_deref() {
        None | Some("") => Value::Null,
        Some(text) => serde_json::from_str(text)?,
    };
    let text = |name: &str| config[name].as_str().unwrap_or_default().to_owned();
    Ok(json!({
        "registry": registry,
        "tag": tag,
        "digest": "",
        "imagePrefix": text("imagePrefix"),
        "gsImage": text("gsImage"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_contains_the_image_of_the_status() {
        let status = KubeVirtStatus {
            observed_kubevirt_registry: Some("registry.example/virt".into()),
            observed_kubevirt_version: Some("v1".into()),
            observed_deployment_config: Some(r#"{"imagePrefix":"x-","gsImage":""}"#.into()),
            ..KubeVirtStatus::default()
        };
        assert_eq!(
            document(&status).unwrap(),
            json!({"registry": "registry.example/virt", "tag": "v1", "digest": "", "imagePrefix": "x-", "gsImage": ""})
        );
        assert!(document(&KubeVirtStatus::default()).unwrap_err().to_string().contains("observedKubeVirtRegistry"));
        let broken = KubeVirtStatus { observed_deployment_config: Some("{".into()), ..status };
        assert!(document(&broken).is_err());
    }
}
