//! Looking at a node itself, from a privileged pod in a namespace of its own.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{Api, api::DeleteParams};
use serde_json::json;

use crate::{PATIENCE, Story, diagnosis, story::exec};

impl Story {
    /// Runs a shell script as root on the node of the story's machines (of a cluster with one node: on it). The node's
    /// files are below `/host`; its processes and network are the script's own.
    ///
    /// # Errors
    /// When the pod does not come up or the script fails.
    pub async fn on_node(&self, script: &str) -> Result<String> {
        static LOOKS: AtomicU32 = AtomicU32::new(0);
        let namespace = format!("{}-node-{}", self.namespace, LOOKS.fetch_add(1, Ordering::Relaxed));
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {
            "ferrovirt.io/e2e": "node", "pod-security.kubernetes.io/enforce": "privileged"}}});
        namespaces.create(&Default::default(), &serde_json::from_value(object)?).await?;
        let done = self.run_in(&namespace, script).await;
        let removed = namespaces.delete(&namespace, &DeleteParams::background()).await;
        let output = done?;
        removed.context("cannot delete the namespace of the node's pod")?;
        Ok(output)
    }

    async fn run_in(&self, namespace: &str, script: &str) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "node"},
            "spec": {
                "hostPID": true, "hostNetwork": true, "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": false,
                "containers": [{
                    "name": "node", "image": format!("{}/toolbox:devel", crate::registry()), "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "600"],
                    "securityContext": {"privileged": true, "runAsUser": 0},
                    "volumeMounts": [{"name": "host", "mountPath": "/host", "readOnly": true}],
                }],
                "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
            },
        }))?;
        // The namespace's service account is made a moment after the namespace.
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while let Err(error) = pods.create(&Default::default(), &pod).await {
            ensure!(tokio::time::Instant::now() < deadline, "cannot make the node's pod: {error}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        loop {
            let status = pods.get("node").await?.status.unwrap_or_default();
            if status.phase.as_deref() == Some("Running") {
                break;
            }
            if tokio::time::Instant::now() > deadline {
                diagnosis::events(&self.client, namespace).await;
                bail!("the node's pod does not run: {}", serde_json::to_string(&status)?);
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        exec(&pods, "node", &["sh", "-c", script]).await
    }

    /// Kills a process of a launcher pod, by the name of its program.
    ///
    /// # Errors
    /// When there is no such process.
    pub async fn kill_in_launcher(&self, pod: &str, program: &str) -> Result<()> {
        let pod = self.get("Pod", pod).await?;
        let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
        self.kill(program, uid).await.with_context(|| format!("kill {program} of pod {uid}"))
    }

    /// Kills all processes of a program on the node of the story's machines.
    ///
    /// # Errors
    /// When there is none.
    pub async fn kill_on_node(&self, program: &str) -> Result<()> {
        self.kill(program, "").await.with_context(|| format!("kill {program}"))
    }

    /// Memory of virt-api on the node of the story's machines, in KiB: of several processes the largest.
    ///
    /// # Errors
    /// When there is none.
    pub async fn virt_api_memory(&self) -> Result<u64> {
        self.memory("virt-api", "").await
    }

    /// Memory of a program on the node of the story's VMs, in KiB: of several processes the largest. Only those with a word
    /// in their cgroup count, such as the UID of a pod.
    ///
    /// # Errors
    /// When there is none.
    pub async fn memory(&self, program: &str, cgroup: &str) -> Result<u64> {
        let name: String = program.chars().take(15).collect();
        let script = format!(
            "for p in /proc/[0-9]*; do \
               grep -qs -e '{cgroup}' $p/cgroup && [ \"$(cat $p/comm)\" = '{name}' ] && grep VmRSS $p/status; \
             done 2>/dev/null; true"
        );
        let sizes = self.on_node(&script).await?;
        let sizes = sizes.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse().ok());
        sizes.max().with_context(|| format!("{program} does not run"))
    }

    /// Kills processes by the name of their program and a word in their cgroup.
    async fn kill(&self, program: &str, cgroup: &str) -> Result<()> {
        let name: String = program.chars().take(15).collect();
        let script = format!(
            "killed=1; for p in /proc/[0-9]*; do \
               if grep -qs -e '{cgroup}' $p/cgroup && [ \"$(cat $p/comm)\" = '{name}' ]; then kill -9 ${{p#/proc/}} && killed=0; fi; \
             done; exit $killed"
        );
        self.on_node(&script).await?;
        Ok(())
    }
}
