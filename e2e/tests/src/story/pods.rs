//! Pods: commands, logs, and a pod with network tools.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Status};
use kube::{
    Api,
    api::{AttachParams, LogParams},
};
use serde_json::Value;
use tokio::{
    io::AsyncReadExt,
    time::{Instant, sleep, timeout},
};

use super::Story;
use crate::environment::TIMEOUT;

/// Time in which a busy kubelet can refuse a command.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of a command in a pod.
const EXEC_LIMIT: Duration = Duration::from_secs(240);

impl Story {
    /// Starts a pod with a shell and network tools, and waits until it runs.
    ///
    /// # Errors
    /// Fails if it does not start.
    pub async fn toolbox(&self, name: &str) -> Result<()> {
        self.toolbox_without_wait(name).await?;
        let running = |pod: &Value| pod["status"]["phase"] == "Running";
        self.wait("Pod", name, "be Running", TIMEOUT, running).await?;
        Ok(())
    }

    /// Creates the pod of [`Self::toolbox`].
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn toolbox_without_wait(&self, name: &str) -> Result<()> {
        self.apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sleep, '3600']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"
        ))
        .await
    }

    /// Runs a command in a pod and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command exits with another code than 0, with its output.
    pub async fn exec(&self, pod: &str, command: &[&str]) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        exec(&pods, pod, command).await
    }

    /// Runs as [`Self::exec`] in a named container of the pod.
    ///
    /// # Errors
    /// Fails as [`Self::exec`].
    pub async fn exec_in(&self, pod: &str, container: &str, command: &[&str]) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        exec_with(&pods, pod, command, AttachParams::default().container(container)).await
    }

    /// Returns the log of a container.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn log(&self, pod: &str, container: &str) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
        Ok(pods.logs(pod, &params).await?)
    }
}

/// Runs a command in a pod and returns its standard output.
///
/// # Errors
/// Fails if the command exits with another code than 0, with its output.
pub(super) async fn exec(pods: &Api<Pod>, pod: &str, command: &[&str]) -> Result<String> {
    exec_with(pods, pod, command, AttachParams::default()).await
}

async fn exec_with(pods: &Api<Pod>, pod: &str, command: &[&str], params: AttachParams) -> Result<String> {
    // The end of a kubelet can leave a connection that nobody closes.
    let limited = timeout(EXEC_LIMIT, exec_unlimited(pods, pod, command, params)).await;
    limited.with_context(|| format!("{command:?} in {pod} has not ended within {EXEC_LIMIT:?}"))?
}

async fn exec_unlimited(pods: &Api<Pod>, pod: &str, command: &[&str], params: AttachParams) -> Result<String> {
    let params = params.stdout(true).stderr(true);
    let deadline = Instant::now() + CONNECT_LIMIT;
    let mut process = loop {
        match pods.exec(pod, command.iter().copied(), &params).await {
            // The command has not begun.
            Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(500)).await,
            process => break process.with_context(|| format!("exec in {pod}"))?,
        }
    };
    let mut stdout = process.stdout().context("no standard output")?;
    let mut stderr = process.stderr().context("no standard error")?;
    let status = process.take_status().context("no status")?;
    let (mut out, mut err) = (String::new(), String::new());
    let (read_out, read_err, status) =
        futures::join!(stdout.read_to_string(&mut out), stderr.read_to_string(&mut err), succeeded(status));
    read_out?;
    read_err?;
    ensure!(status, "{command:?} in {pod} failed: {err}{out}");
    Ok(out)
}

async fn succeeded(status: impl Future<Output = Option<Status>>) -> bool {
    status.await.and_then(|s| s.status).is_some_and(|s| s == "Success")
}
