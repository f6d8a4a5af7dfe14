//! Profiles of all components: each is asked, by its pod's address.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use api::{constants::component, tls};
use axum::body::Body;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt, api::ListParams};
use process::profiler::Asked;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::{sync::Mutex, time::timeout};
use tokio_rustls::TlsConnector;

use crate::{address, dial::dial};

/// Port of a component's server for metrics and health.
const PORT: u16 = 8443;
/// Longest time for a component to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Components asked at a time.
const PARALLEL: usize = 16;
/// Pods on a page where the request does not say.
const PAGE: u32 = 10;
/// Most pods on a page whose profiles are to be got.
const MAX_PAGE: u32 = 20;
/// Pods on a page where there is nothing to be got.
const LONG_PAGE: u32 = 500;
/// Largest answer: the largest profile there is, in base64.
const MAX_ANSWER: usize = 9 << 20;
/// Longest text of a refusal that is passed on.
const MAX_TEXT: usize = 1024;

/// What is to be got, the body of a request.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterProfilerRequest {
    /// Which components, by labels of their pods; empty: all.
    pub label_selector: String,
    /// Where the page before ended.
    pub r#continue: String,
    /// Pods on a page, at most 20; 0: 10.
    pub page_size: i64,
}

/// What was got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterProfilerResults {
    /// By pod: `pprofData`, and in it each profile in base64.
    pub component_results: Map<String, Value>,
    /// Where the next page begins; empty: there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub r#continue: String,
}

/// Why not all was done.
#[derive(Debug, thiserror::Error)]
pub enum ProfilesError {
    /// There is no list of the components.
    #[error("cannot list the pods of the components: {0}")]
    List(#[source] kube::Error),
    /// One of them could not be asked.
    #[error("pod {pod}: {source}")]
    Component {
        /// Its pod.
        pod: String,
        /// Why.
        source: ComponentError,
    },
}

/// Why a component did not do it.
#[derive(Debug, thiserror::Error)]
pub enum ComponentError {
    /// Its pod has no address to dial.
    #[error("it has no usable address")]
    Address,
    /// No name to know it by.
    #[error("it has no TLS server name")]
    ServerName,
    /// The request could not be put together.
    #[error("the request is not valid: {0}")]
    Request(#[from] http::Error),
    /// TCP or TLS failed.
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    /// HTTP failed.
    #[error("request failed: {0}")]
    Http(#[from] hyper::Error),
    /// The answer broke off or is too long.
    #[error("the answer cannot be read: {0}")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is no JSON.
    #[error("the answer is no JSON: {0}")]
    Document(#[from] serde_json::Error),
    /// It refused.
    #[error("{0}: {1}")]
    Refused(StatusCode, String),
    /// It took too long.
    #[error("it took too long")]
    Timeout,
}

impl ProfilesError {
    /// The code of the answer: what is wrong with the request's own words is told as that.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::List(kube::Error::Api(status)) if status.code == 400 => StatusCode::BAD_REQUEST,
            Self::List(kube::Error::Api(status)) if status.code == 410 => StatusCode::GONE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// The components of the installation.
pub struct Components {
    pods: Api<Pod>,
    namespace: String,
    tls: TlsConnector,
    /// Held by the request that is served: profiles take memory.
    turn: Mutex<()>,
}

impl Components {
    /// Finds pods in `namespace` and dials them with `tls`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, tls: Arc<ClientConfig>) -> Self {
        Self {
            pods: Api::namespaced(client, namespace),
            namespace: namespace.to_owned(),
            tls: TlsConnector::from(tls),
            turn: Mutex::default(),
        }
    }

    /// Starts or stops the profilers of all.
    ///
    /// # Errors
    /// When one cannot be asked or refuses; others may have done it.
    pub async fn tell(&self, asked: Asked) -> Result<(), ProfilesError> {
        let _turn = self.turn.lock().await;
        let mut token = String::new();
        loop {
            let (pods, next) = self.page("", LONG_PAGE, &token).await?;
            self.ask_all(asked, pods).await?;
            if next.is_empty() {
                return Ok(());
            }
            token = next;
        }
    }

    /// Gets a page of profiles. `None`: there are no pods on it.
    ///
    /// # Errors
    /// When one of the pods cannot be asked or refuses.
    pub async fn dump(
        &self,
        request: &ClusterProfilerRequest,
    ) -> Result<Option<ClusterProfilerResults>, ProfilesError> {
        let _turn = self.turn.lock().await;
        let (pods, next) =
            self.page(&request.label_selector, page_size(request.page_size), &request.r#continue).await?;
        if pods.is_empty() {
            return Ok(None);
        }
        let answers = self.ask_all(Asked::Dump, pods).await?;
        let mut results = ClusterProfilerResults { r#continue: next, ..ClusterProfilerResults::default() };
        for (pod, answer) in answers {
            let document = serde_json::from_slice(&answer)
                .map_err(|error| ProfilesError::Component { pod: pod.clone(), source: error.into() })?;
            results.component_results.insert(pod, document);
        }
        Ok(Some(results))
    }

    async fn page(&self, labels: &str, size: u32, token: &str) -> Result<(Vec<Pod>, String), ProfilesError> {
        let components = [component::VIRT_API, component::VIRT_CONTROLLER, component::VIRT_HANDLER].join(", ");
        let mut selector = format!("kubevirt.io in ({components})");
        if !labels.is_empty() {
            selector = format!("{selector},{labels}");
        }
        let mut params = ListParams::default().labels(&selector).limit(size);
        if !token.is_empty() {
            params = params.continue_token(token);
        }
        let list = self.pods.list(&params).await.map_err(ProfilesError::List)?;
        Ok((list.items, list.metadata.continue_.unwrap_or_default()))
    }

    async fn ask_all(&self, asked: Asked, pods: Vec<Pod>) -> Result<Vec<(String, Bytes)>, ProfilesError> {
        stream::iter(pods.into_iter().filter(is_ready))
            .map(|pod| async move {
                let name = pod.name_any();
                let answer = timeout(TIMEOUT, self.ask(asked, &pod)).await.unwrap_or(Err(ComponentError::Timeout));
                match answer {
                    Ok(answer) => Ok((name, answer)),
                    Err(source) => Err(ProfilesError::Component { pod: name, source }),
                }
            })
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await
    }

    async fn ask(&self, asked: Asked, pod: &Pod) -> Result<Bytes, ComponentError> {
        let ip =
            pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).and_then(|ip| ip.parse::<IpAddr>().ok());
        let ip = ip.filter(|ip| address::is_dialable(*ip)).ok_or(ComponentError::Address)?;
        let host = server_name(pod, &self.namespace).ok_or(ComponentError::ServerName)?;
        let name = ServerName::try_from(host.clone()).map_err(|_| ComponentError::ServerName)?;
        let mut sender = dial(&self.tls, SocketAddr::new(ip, PORT), name).await?;
        let request = Request::get(path(asked))
            .header(header::HOST, host)
            .header(header::CONNECTION, "close")
            .body(Body::empty())?;
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let limit = if parts.status.is_success() { MAX_ANSWER } else { MAX_TEXT };
        let body = Limited::new(body, limit).collect().await.map_err(ComponentError::Body)?.to_bytes();
        if parts.status.is_success() {
            return Ok(body);
        }
        Err(ComponentError::Refused(parts.status, String::from_utf8_lossy(&body).trim().to_owned()))
    }
}

fn path(asked: Asked) -> &'static str {
    match asked {
        Asked::Start => "/start-profiler",
        Asked::Stop => "/stop-profiler",
        Asked::Dump | Asked::DumpCluster => "/dump-profiler",
    }
}

fn page_size(asked: i64) -> u32 {
    match u32::try_from(asked) {
        Ok(0) | Err(_) => PAGE,
        Ok(size) => size.min(MAX_PAGE),
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The name that the component in a pod can prove.
fn server_name(pod: &Pod, namespace: &str) -> Option<String> {
    let component = pod.metadata.labels.as_ref()?.get("kubevirt.io")?;
    match component.as_str() {
        component::VIRT_HANDLER => Some(tls::handler_server_name(pod.spec.as_ref()?.node_name.as_deref()?)),
        component::VIRT_API | component::VIRT_CONTROLLER => Some(format!("{component}.{namespace}.svc")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pages_have_a_size_that_is_bearable() {
        assert_eq!([0, -1, 1, 20, 21, i64::MAX].map(page_size), [10, 10, 1, 20, 20, 10]);
    }

    #[test]
    fn components_are_known_by_the_names_in_their_certificates() {
        let name = |component: &str| {
            let pod = json!({
                "metadata": {"name": "x", "labels": {"kubevirt.io": component}},
                "spec": {"nodeName": "node-1", "containers": []},
            });
            server_name(&serde_json::from_value(pod).unwrap(), "kubevirt")
        };
        assert_eq!(name("virt-handler").as_deref(), Some("node-1.virt-handler"));
        assert_eq!(name("virt-api").as_deref(), Some("virt-api.kubevirt.svc"));
        assert_eq!(name("virt-controller").as_deref(), Some("virt-controller.kubevirt.svc"));
        assert_eq!(name("virt-launcher"), None);
    }

    #[test]
    fn pods_that_are_not_ready_are_not_asked() {
        let ready = |status: &str| {
            let conditions = json!([{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": status}]);
            is_ready(&serde_json::from_value(json!({"metadata": {}, "status": {"conditions": conditions}})).unwrap())
        };
        assert!(ready("True") && !ready("False"));
        assert!(!is_ready(&Pod::default()));
    }

    #[test]
    fn results_have_the_form_of_the_reference() {
        let mut results = ClusterProfilerResults::default();
        results.component_results.insert("virt-api-1".into(), json!({"pprofData": {"cpu": "AA=="}}));
        assert_eq!(
            serde_json::to_value(&results).unwrap(),
            json!({"componentResults": {"virt-api-1": {"pprofData": {"cpu": "AA=="}}}})
        );
        let request: ClusterProfilerRequest =
            serde_json::from_value(json!({"labelSelector": "a=b", "continue": "x", "pageSize": 3})).unwrap();
        assert_eq!((request.label_selector.as_str(), request.r#continue.as_str(), request.page_size), ("a=b", "x", 3));
    }
}
