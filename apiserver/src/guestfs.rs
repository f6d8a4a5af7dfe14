//! Where tools find the image for looking into disks.

use api::{KubeVirt, kubevirt::status::KubeVirtStatus};
use axum::response::Response;
use http::StatusCode;
use kube::{Api, Client, api::ListParams};
use serde_json::{Value, json};

use crate::error::json_response;

/// The answer, from the status of the installation.
pub async fn answer(client: &Client, namespace: &str) -> Response {
    let objects = Api::<KubeVirt>::namespaced(client.clone(), namespace).list(&ListParams::default().limit(1)).await;
    let document = match objects {
        Ok(list) => match list.items.into_iter().next() {
            Some(object) => document(&object.status.unwrap_or_default()),
            None => Err("there is no KubeVirt object".to_owned()),
        },
        Err(error) => Err(error.to_string()),
    };
    match document {
        Ok(document) => json_response(StatusCode::OK, &document),
        Err(error) => {
            json_response(StatusCode::INTERNAL_SERVER_ERROR, &json!({"guestfs": {"status": "failed", "error": error}}))
        }
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
