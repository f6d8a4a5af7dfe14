//! Where tools find the image for looking into disks.

use std::time::{Duration, Instant};

use api::{KubeVirt, kubevirt::status::KubeVirtStatus};
use axum::response::Response;
use http::StatusCode;
use kube::{Api, Client, api::ListParams};
use serde_json::{Value, json};
use tokio::{sync::Mutex, time::timeout};

use crate::error::json_response;

/// How long an answer is given again.
const TTL: Duration = Duration::from_secs(2);
/// Longest wait for the API server.
const TIMEOUT: Duration = Duration::from_secs(4);

/// The image, or why there is none, as it was found last. Whoever reaches this process may ask for it; so that this is no
/// way to load the API server, it is read once in a while, and by one at a time: those who wait have the same answer.
#[derive(Default)]
pub struct GuestFs {
    found: Mutex<Option<(Instant, Result<Value, String>)>>,
}

impl GuestFs {
    /// The answer, from the status of the installation.
    pub async fn answer(&self, client: &Client, namespace: &str) -> Response {
        let mut found = self.found.lock().await;
        let known = found.as_ref().filter(|(at, _)| at.elapsed() < TTL).map(|(_, answer)| answer.clone());
        let answer = match known {
            Some(answer) => answer,
            None => {
                let answered = timeout(TIMEOUT, read(client, namespace)).await;
                let answer = answered.unwrap_or_else(|_| Err("no answer in time".to_owned()));
                *found = Some((Instant::now(), answer.clone()));
                answer
            }
        };
        drop(found);
        match answer {
            Ok(document) => json_response(StatusCode::OK, &document),
            Err(error) => json_response(
                StatusCode::INTERNAL_SERVER_ERROR,
                &json!({"guestfs": {"status": "failed", "error": error}}),
            ),
        }
    }
}

async fn read(client: &Client, namespace: &str) -> Result<Value, String> {
    let objects = Api::<KubeVirt>::namespaced(client.clone(), namespace).list(&ListParams::default().limit(1)).await;
    match objects.map_err(|error| error.to_string())?.items.into_iter().next() {
        Some(object) => document(&object.status.unwrap_or_default()),
        None => Err("there is no KubeVirt object".to_owned()),
    }
}

fn document(status: &KubeVirtStatus) -> Result<Value, String> {
    let known = |text: &Option<String>, name: &str| {
        text.clone().filter(|text| !text.is_empty()).ok_or_else(|| format!("the KubeVirt object has no {name}"))
    };
    let registry = known(&status.observed_kubevirt_registry, "observedKubeVirtRegistry")?;
    let tag = known(&status.observed_kubevirt_version, "observedKubeVirtVersion")?;
    let config: Value = match status.observed_deployment_config.as_deref() {
        None | Some("") => Value::Null,
        Some(text) => serde_json::from_str(text).map_err(|error| format!("observedDeploymentConfig: {error}"))?,
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
    fn image_is_named_by_the_status() {
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
        assert!(document(&KubeVirtStatus::default()).unwrap_err().contains("observedKubeVirtRegistry"));
        let broken = KubeVirtStatus { observed_deployment_config: Some("{".into()), ..status };
        assert!(document(&broken).is_err());
    }
}
