//! Profiles of all components, read from the address of each pod.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use api::{constants::component, tls};
use axum::body::Body;
use bytes::Bytes;
use daemon::profiler::ProfilerAction;
use futures::{StreamExt, TryStreamExt, stream};
use http::{Request, StatusCode};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt, api::ListParams};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::{sync::Mutex, time::timeout};

use crate::clients::{Component, ComponentClient, ComponentError, address};

/// Port of a component's server for metrics and health.
const PORT: u16 = 8443;
/// Longest time for a component to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Concurrent requests.
const PARALLEL: usize = 16;
/// Default number of pods on a page.
const PAGE: u32 = 10;
/// Most pods on a page of profiles.
const MAX_PAGE: u32 = 20;
/// Pods on a page of requests without answers.
const LONG_PAGE: u32 = 500;
/// Largest answer: the largest profile in base64.
const MAX_ANSWER: usize = 9 << 20;

/// Options of a dump, the body of its request.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ClusterProfilerRequest {
    /// Labels of the components' pods; empty: all.
    pub label_selector: String,
    /// Continuation of the previous page.
    pub r#continue: String,
    /// Pods on a page, at most 20; 0: 10.
    pub page_size: i64,
}

/// Profiles of a page of pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClusterProfilerResults {
    /// By pod: `pprofData` with each profile in base64.
    pub component_results: Map<String, Value>,
    /// Continuation of the next page, or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub r#continue: String,
}

/// Errors of a request to all components.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterProfilerError {
    /// The pods of the components cannot be listed.
    #[error("cannot list the pods of the components: {0}")]
    List(#[source] kube::Error),
    /// A component refused.
    #[error("pod {pod}: {status}: {message}")]
    Refused {
        /// Its pod.
        pod: String,
        /// Status of the answer.
        status: StatusCode,
        /// Text of the answer.
        message: String,
    },
    /// A component did not answer.
    #[error("pod {pod}: {source}")]
    Component {
        /// Its pod.
        pod: String,
        /// Error of the request.
        source: ComponentError,
    },
}

impl ClusterProfilerError {
    /// Returns the code of the answer. Errors of the client's selector and continuation have codes of their own.
    #[must_use]
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::List(kube::Error::Api(status)) if status.code == 400 => StatusCode::BAD_REQUEST,
            Self::List(kube::Error::Api(status)) if status.code == 410 => StatusCode::GONE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Requests profiles of the components.
pub(crate) struct ClusterProfiler {
    pods: Api<Pod>,
    namespace: String,
    components: Arc<ComponentClient>,
    /// Held during a request, since profiles take memory.
    turn: Mutex<()>,
}

impl ClusterProfiler {
    /// Returns a profiler of the components in `namespace`.
    #[must_use]
    pub(crate) fn new(client: Client, namespace: &str, components: Arc<ComponentClient>) -> Self {
        Self {
            pods: Api::namespaced(client, namespace),
            namespace: namespace.to_owned(),
            components,
            turn: Mutex::default(),
        }
    }

    /// Starts or stops the profilers of all components.
    ///
    /// # Errors
    /// If one component does not answer or refuses; others may have succeeded.
    pub(crate) async fn switch(&self, action: ProfilerAction) -> Result<(), ClusterProfilerError> {
        let _turn = self.turn.lock().await;
        let mut token = String::new();
        loop {
            let (pods, next) = self.page("", LONG_PAGE, &token).await?;
            self.request_all(action, pods).await?;
            if next.is_empty() {
                return Ok(());
            }
            token = next;
        }
    }

    /// Reads a page of profiles. `None`: the page has no pods.
    ///
    /// # Errors
    /// If one component does not answer or refuses.
    pub(crate) async fn dump(
        &self,
        request: &ClusterProfilerRequest,
    ) -> Result<Option<ClusterProfilerResults>, ClusterProfilerError> {
        let _turn = self.turn.lock().await;
        let (pods, next) =
            self.page(&request.label_selector, page_size(request.page_size), &request.r#continue).await?;
        if pods.is_empty() {
            return Ok(None);
        }
        let answers = self.request_all(ProfilerAction::Dump, pods).await?;
        let mut results = ClusterProfilerResults { r#continue: next, ..ClusterProfilerResults::default() };
        for (pod, answer) in answers {
            let document = serde_json::from_slice(&answer).map_err(|source| ClusterProfilerError::Component {
                pod: pod.clone(),
                source: ComponentError::Document { component: pod.clone(), source },
            })?;
            results.component_results.insert(pod, document);
        }
        Ok(Some(results))
    }

    async fn page(&self, labels: &str, size: u32, token: &str) -> Result<(Vec<Pod>, String), ClusterProfilerError> {
        let components = [component::VIRT_API, component::VIRT_CONTROLLER, component::VIRT_HANDLER].join(", ");
        let mut selector = format!("kubevirt.io in ({components})");
        if !labels.is_empty() {
            selector = format!("{selector},{labels}");
        }
        let mut params = ListParams::default().labels(&selector).limit(size);
        if !token.is_empty() {
            params = params.continue_token(token);
        }
        let list = self.pods.list(&params).await.map_err(ClusterProfilerError::List)?;
        Ok((list.items, list.metadata.continue_.unwrap_or_default()))
    }

    async fn request_all(
        &self,
        action: ProfilerAction,
        pods: Vec<Pod>,
    ) -> Result<Vec<(String, Bytes)>, ClusterProfilerError> {
        stream::iter(pods.into_iter().filter(is_ready))
            .map(|pod| async move {
                let name = pod.name_any();
                let answer = timeout(TIMEOUT, self.request(action, &pod)).await;
                let late = |_| {
                    let call = path(action).trim_start_matches('/').to_owned();
                    Err(ComponentError::Timeout { component: name.clone(), call, limit: TIMEOUT })
                };
                match answer.unwrap_or_else(late) {
                    Ok(answer) => Ok((name, answer)),
                    Err(ComponentError::Refused { status, message }) => {
                        Err(ClusterProfilerError::Refused { pod: name, status, message })
                    }
                    Err(source) => Err(ClusterProfilerError::Component { pod: name, source }),
                }
            })
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await
    }

    async fn request(&self, action: ProfilerAction, pod: &Pod) -> Result<Bytes, ComponentError> {
        let component = self.component(pod)?;
        let request = Request::get(path(action)).body(Body::empty())?;
        self.components.call(&component, request, MAX_ANSWER).await
    }

    fn component(&self, pod: &Pod) -> Result<Component, ComponentError> {
        let name = pod.name_any();
        let text = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
        let ip = text.parse::<IpAddr>().ok().filter(|ip| address::is_dialable(*ip));
        let ip = ip.ok_or_else(|| ComponentError::Address { component: name.clone(), address: text })?;
        let server_name = server_name(pod, &self.namespace).ok_or_else(|| ComponentError::ServerName(name.clone()))?;
        Ok(Component { name, address: SocketAddr::new(ip, PORT), server_name })
    }
}

fn path(action: ProfilerAction) -> &'static str {
    match action {
        ProfilerAction::Start => "/start-profiler",
        ProfilerAction::Stop => "/stop-profiler",
        ProfilerAction::Dump | ProfilerAction::DumpCluster => "/dump-profiler",
    }
}

fn page_size(requested: i64) -> u32 {
    match u32::try_from(requested) {
        Ok(0) | Err(_) => PAGE,
        Ok(size) => size.min(MAX_PAGE),
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns the TLS server name of the component in a pod.
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
    fn page_size_is_bounded() {
        assert_eq!([0, -1, 1, 20, 21, i64::MAX].map(page_size), [10, 10, 1, 20, 20, 10]);
    }

    #[test]
    fn server_names_are_those_of_the_certificates() {
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
    fn pods_that_are_not_ready_are_skipped() {
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
