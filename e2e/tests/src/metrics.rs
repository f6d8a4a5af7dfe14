//! Reads the metrics of the processes as a reader with a token.

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

use crate::{PATIENCE, Story, webhook};

/// Port of the metrics of every process.
const PORT: u16 = 8443;
/// The account that may read metrics.
const READER: &str = "metrics-reader";

/// Tokens of the reader, by namespace. A new token costs a review, and there are not many in ten seconds.
static TOKENS: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);

impl Story {
    /// The metrics of all pods of a component, such as `virt-api`, line by line.
    ///
    /// # Errors
    /// When a pod does not tell.
    pub async fn metrics(&self, component: &str) -> Result<Vec<String>> {
        let token = self.metrics_token().await?;
        let mut lines = Vec::new();
        for pod in self.pods_of(component).await? {
            let name = pod.metadata.name.clone().unwrap_or_default();
            let deadline = Instant::now() + PATIENCE;
            let answer = loop {
                let answer = self.ask_process(&pod, "/metrics", Some(&token)).await?;
                // A new token may have to wait for its turn to be reviewed, and a new right to be known.
                if answer.status == 200 || Instant::now() > deadline {
                    break answer;
                }
                sleep(Duration::from_secs(1)).await;
            };
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            ensure!(answer.status == 200, "metrics of {name}: {} {text}", answer.status);
            lines.extend(text.lines().map(str::to_owned));
        }
        Ok(lines)
    }

    /// The pods of a component of the installation.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn pods_of(&self, component: &str) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "kubevirt");
        Ok(pods.list(&ListParams::default().labels(&format!("kubevirt.io={component}"))).await?.items)
    }

    /// Gets a path from a pod's own port, past the API server, with a token or without.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn ask_process(&self, pod: &Pod, path: &str, token: Option<&str>) -> Result<webhook::Answer> {
        let endpoint = webhook::Endpoint::of_pod(&self.client, pod, PORT)?;
        let token = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = token.iter().map(|token| ("authorization", token.as_str())).collect();
        endpoint.connect().await?.request(Method::GET, path, &headers, Bytes::new()).await
    }

    /// A token of an account of the story's namespace that may read metrics.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn metrics_token(&self) -> Result<String> {
        let known = TOKENS.lock().unwrap_or_else(PoisonError::into_inner).get(&self.namespace).cloned();
        if let Some(token) = known {
            return Ok(token);
        }
        self.apply(&format!("{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: {READER}}}}}")).await?;
        let namespace = self.cluster_api("Namespace").get(&self.namespace).await?;
        // Nobody but the namespace holds it, so that it goes with the story.
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
        ensure!([201, 409].contains(&made.code), "binding of the reader: {} {}", made.code, made.said());
        self.may_read_metrics(READER).await?;
        let token = self.token(READER).await?;
        TOKENS.lock().unwrap_or_else(PoisonError::into_inner).insert(self.namespace.clone(), token.clone());
        Ok(token)
    }

    /// A token of a service account of the story's namespace.
    ///
    /// # Errors
    /// Those of the API server.
    pub async fn token(&self, account: &str) -> Result<String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        let asked: TokenRequest =
            serde_json::from_value(json!({"spec": {"audiences": [], "expirationSeconds": 3600}}))?;
        let answer = accounts.create_token_request(account, &Default::default(), &asked).await?;
        answer.status.and_then(|status| status.token).context("no token")
    }

    /// Waits until the API server knows of the right, which it learns by a watch.
    async fn may_read_metrics(&self, account: &str) -> Result<()> {
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
            "user": format!("system:serviceaccount:{}:{account}", self.namespace),
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        }});
        let deadline = Instant::now() + PATIENCE;
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        while self.call(&Method::POST, path, &review).await?.json()["status"]["allowed"] != Value::Bool(true) {
            ensure!(Instant::now() < deadline, "the reader of metrics was not allowed to read");
            sleep(Duration::from_millis(250)).await;
        }
        Ok(())
    }
}
