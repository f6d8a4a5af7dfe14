//! Metrics of the components, read with the token of a service account.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::Method;
use k8s_openapi::api::{
    authentication::v1::TokenRequest,
    core::v1::{Pod, ServiceAccount},
};
use kube::{Api, api::ListParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::Story;
use crate::{environment::TIMEOUT, webhook};

/// Metrics port of every component.
const PORT: u16 = 8443;
/// Service account that may read metrics.
const READER: &str = "metrics-reader";

/// Tokens of the reader by namespace. Components limit the rate of reviews of new tokens.
static TOKENS: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);

impl Story {
    /// Returns the lines of the metrics of all pods of a component, such as `virt-api`.
    ///
    /// # Errors
    /// Fails if a pod does not serve them.
    pub async fn metrics(&self, component: &str) -> Result<Vec<String>> {
        let token = self.metrics_token().await?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.scrape(component, &token).await {
                // The review of a new token may be delayed, the authorizer may not know the new right yet, and pods may be
                // replaced.
                Err(_) if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
                outcome => return outcome,
            }
        }
    }

    /// Returns the lines of [`Self::metrics`] of one look.
    async fn scrape(&self, component: &str, token: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for pod in self.pods_of(component).await? {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let answer = self.get_from_component(&pod, "/metrics", Some(token)).await;
            let answer = answer.with_context(|| format!("metrics of {name}"))?;
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            ensure!(answer.status == 200, "metrics of {name}: {} {text}", answer.status);
            lines.extend(text.lines().map(str::to_owned));
        }
        Ok(lines)
    }

    /// Returns the pods of a component of the installation.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn pods_of(&self, component: &str) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "kubevirt");
        Ok(pods.list(&ListParams::default().labels(&format!("kubevirt.io={component}"))).await?.items)
    }

    /// Gets a path from a component's own port, without the API server.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn get_from_component(&self, pod: &Pod, path: &str, token: Option<&str>) -> Result<webhook::Answer> {
        let endpoint = webhook::Endpoint::of_pod(&self.client, pod, PORT)?;
        let token = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = token.iter().map(|token| ("authorization", token.as_str())).collect();
        endpoint.connect().await?.request(Method::GET, path, &headers, Bytes::new()).await
    }

    /// Gets a path from a component's own port through a port-forward, as `kubectl port-forward` does.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn get_through_forward(&self, pod: &Pod, path: &str) -> Result<webhook::Answer> {
        let endpoint = webhook::Endpoint::forwarded(&self.client, pod, PORT)?;
        endpoint.connect().await?.request(Method::GET, path, &[], Bytes::new()).await
    }

    /// Returns a token of an account of the story's namespace that may read metrics.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn metrics_token(&self) -> Result<String> {
        let known = TOKENS.lock().unwrap_or_else(PoisonError::into_inner).get(&self.namespace).cloned();
        if let Some(token) = known {
            return Ok(token);
        }
        self.apply(&format!("{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: {READER}}}}}")).await?;
        let namespace = self.cluster_api("Namespace").get(&self.namespace).await?;
        // The namespace owns it, so it is removed with the story.
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": format!("{}-{READER}", self.namespace), "ownerReferences": [{
                "apiVersion": "v1", "kind": "Namespace", "name": self.namespace, "uid": namespace.metadata.uid,
            }]},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kubevirt.io:metrics-reader",
            },
            "subjects": [{"kind": "ServiceAccount", "name": READER, "namespace": self.namespace}],
        });
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        let made = self.call(&Method::POST, path, &binding).await?;
        ensure!([201, 409].contains(&made.code), "binding of the reader: {} {}", made.code, made.message());
        self.may_read_metrics(READER).await?;
        let token = self.token(READER).await?;
        TOKENS.lock().unwrap_or_else(PoisonError::into_inner).insert(self.namespace.clone(), token.clone());
        Ok(token)
    }

    /// Returns a token of a service account of the story's namespace.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn token(&self, account: &str) -> Result<String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        let request: TokenRequest =
            serde_json::from_value(json!({"spec": {"audiences": [], "expirationSeconds": 3600}}))?;
        let answer = accounts.create_token_request(account, &Default::default(), &request).await?;
        answer.status.and_then(|status| status.token).context("no token")
    }

    /// Waits until the authorizer of the API server knows the new right.
    async fn may_read_metrics(&self, account: &str) -> Result<()> {
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
            "user": format!("system:serviceaccount:{}:{account}", self.namespace),
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        }});
        let deadline = Instant::now() + TIMEOUT;
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        while self.call(&Method::POST, path, &review).await?.json()["status"]["allowed"] != Value::Bool(true) {
            ensure!(Instant::now() < deadline, "the reader of metrics was not allowed to read");
            sleep(Duration::from_millis(250)).await;
        }
        Ok(())
    }
}
