//! Access to a node from a privileged pod in a namespace of its own.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Story, diagnosis, pods::exec};
use crate::{
    conditions::is_true,
    environment::{TIMEOUT, patient, placement, registry},
    webhook::is_ready,
};

impl Story {
    /// Returns the node of a VMI.
    ///
    /// # Errors
    /// Fails if it has none.
    pub async fn node_of(&self, vmi: &str) -> Result<String> {
        let vmi = self.get("vmi", vmi).await?;
        vmi["status"]["nodeName"].as_str().map(str::to_owned).context("the VMI has no node")
    }

    /// Returns name and label `kubernetes.io/hostname` of a node that takes VMIs, for stories whose objects must be on one node.
    ///
    /// # Errors
    /// Fails if there is none.
    pub async fn one_node(&self) -> Result<(String, String)> {
        self.takers().await?.into_iter().next().context("no node takes VMIs")
    }

    /// Returns name and label `kubernetes.io/hostname` of all nodes that take VMIs.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn takers(&self) -> Result<Vec<(String, String)>> {
        let placed = placement().map(|(key, value)| format!(",{key}={value}")).unwrap_or_default();
        let takers = ListParams::default().labels(&format!("kubevirt.io/schedulable=true{placed}"));
        let mut nodes = Vec::new();
        for node in self.cluster_api("Node").list(&takers).await? {
            let taints = node.data["spec"]["taints"].as_array().into_iter().flatten();
            let closed = taints.into_iter().any(|taint| taint["effect"] != "PreferNoSchedule");
            let hostname = node.metadata.labels.as_ref().and_then(|labels| labels.get("kubernetes.io/hostname"));
            if let (Some(name), Some(hostname), false) = (&node.metadata.name, hostname, closed) {
                nodes.push((name.clone(), hostname.clone()));
            }
        }
        Ok(nodes)
    }

    /// Returns the nodes of the pods of a component of the installation, such as `virt-api`.
    ///
    /// # Errors
    /// Fails if there is none.
    pub async fn nodes_of(&self, component: &str) -> Result<BTreeSet<String>> {
        let labels = ListParams::default().labels(&format!("kubevirt.io={component}"));
        let pods = self.installation_api("Pod").list(&labels).await?;
        let nodes: BTreeSet<String> =
            pods.items.iter().filter_map(|pod| pod.data["spec"]["nodeName"].as_str().map(str::to_owned)).collect();
        ensure!(!nodes.is_empty(), "{component} runs on no node");
        Ok(nodes)
    }

    /// Runs a shell script as root on a node, in its PID and network namespaces. The files of the node are below `/host`.
    ///
    /// # Errors
    /// Fails if the pod does not start or the script fails.
    pub async fn on_node(&self, node: &str, script: &str) -> Result<String> {
        let node = self.enter_node(node).await?;
        let output = node.run(script).await;
        let removed = node.leave().await;
        let output = output?;
        removed?;
        Ok(output)
    }

    /// Starts the pod of [`on_node`](Self::on_node) for several scripts. Their background processes run until the node is left,
    /// for half an hour at most.
    ///
    /// # Errors
    /// Fails if the pod does not start.
    pub async fn enter_node(&self, node: &str) -> Result<Node> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let namespace = format!("{}-node-{}", self.namespace, COUNT.fetch_add(1, Ordering::Relaxed));
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {
            "ferrovirt.io/e2e": "node", "pod-security.kubernetes.io/enforce": "privileged"}}});
        namespaces.create(&Default::default(), &serde_json::from_value(object)?).await?;
        let entered = Node { client: self.client.clone(), namespace };
        match entered.start(node).await {
            Ok(()) => Ok(entered),
            Err(error) => {
                entered.leave().await?;
                Err(error)
            }
        }
    }

    /// Kills a process of a launcher pod by program name.
    ///
    /// # Errors
    /// Fails without such a process.
    pub async fn kill_in_launcher(&self, pod: &str, program: &str) -> Result<()> {
        let pod = self.get("Pod", pod).await?;
        let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
        let node = pod["spec"]["nodeName"].as_str().context("pod without node")?;
        self.kill(node, program, uid).await.with_context(|| format!("kill {program} of pod {uid}"))
    }

    /// Kills all processes of a component of the installation.
    ///
    /// # Errors
    /// Fails if a node with a pod of it has no such process.
    pub async fn kill_component(&self, component: &str) -> Result<()> {
        for node in self.nodes_of(component).await? {
            self.kill(&node, component, "").await.with_context(|| format!("kill {component} on {node}"))?;
        }
        Ok(())
    }

    /// Kills the processes of a program in a pod of the installation and removes the pod, so that kubelet does not restart them.
    ///
    /// # Errors
    /// Fails without such a process.
    pub async fn kill_installed(&self, pod: &str, program: &str) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "kubevirt");
        let found = pods.get(pod).await.with_context(|| format!("get pod {pod}"))?;
        let uid = found.metadata.uid.context("pod without uid")?;
        let node = found.spec.and_then(|spec| spec.node_name).context("pod without node")?;
        let node = self.enter_node(&node).await?;
        let killed = node.run(&signal(program, &uid, "KILL")).await.with_context(|| format!("kill {program} of {pod}"));
        // At once: kubelet notices the end of a container with a delay.
        let removed = match &killed {
            Ok(_) => pods.delete(pod, &DeleteParams::default().grace_period(0)).await.map(drop),
            Err(_) => Ok(()),
        };
        node.leave().await?;
        killed?;
        removed.with_context(|| format!("delete pod {pod}"))
    }

    /// Waits until each component has as many pods as it shall have, all are ready, and none ends.
    ///
    /// # Errors
    /// Fails if that lasts longer than five minutes.
    pub async fn components_are_ready(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(300);
        loop {
            let lack = match self.lacking_component().await? {
                None => self.lacking_service().await?,
                lack => lack,
            };
            let Some(lack) = lack else { return Ok(()) };
            ensure!(Instant::now() < deadline, "components are not ready: {lack}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Returns the first component whose pods are too few, not ready or about to end, with these numbers.
    async fn lacking_component(&self) -> Result<Option<String>> {
        for (kind, component, number) in [
            ("Deployment", "virt-api", "/spec/replicas"),
            ("Deployment", "virt-controller", "/spec/replicas"),
            ("DaemonSet", "virt-handler", "/status/desiredNumberScheduled"),
        ] {
            let workload = self.installation_api(kind).get(component).await?;
            let wanted = workload.data.pointer(number).and_then(Value::as_u64).unwrap_or(0);
            let pods = self.pods_of(component).await?;
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            if ready != pods.len() || ready as u64 != wanted {
                return Ok(Some(format!("{component}: {ready} of {} pods are ready, of {wanted}", pods.len())));
            }
        }
        Ok(None)
    }

    /// Returns what the API server lacks to reach virt-api, which follows the readiness of its pods.
    async fn lacking_service(&self) -> Result<Option<String>> {
        for name in ["v1.subresources.kubevirt.io", "v1alpha3.subresources.kubevirt.io"] {
            let service = serde_json::to_value(self.cluster_api("APIService").get(name).await?)?;
            if !is_true(&service, "Available") {
                return Ok(Some(format!("{name}: {}", service["status"])));
            }
        }
        Ok(None)
    }

    /// Returns the memory of the largest virt-api process in KiB.
    ///
    /// # Errors
    /// Fails without such a process.
    pub async fn virt_api_memory(&self) -> Result<u64> {
        let mut largest = 0;
        for node in self.nodes_of("virt-api").await? {
            largest = largest.max(self.memory(&node, "virt-api").await?);
        }
        Ok(largest)
    }

    /// Returns the memory of the largest process of a program on a node in KiB.
    ///
    /// # Errors
    /// Fails without such a process.
    pub async fn memory(&self, node: &str, program: &str) -> Result<u64> {
        let name: String = program.chars().take(15).collect();
        let script = format!(
            "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = '{name}' ] && grep VmRSS $p/status; done 2>/dev/null; true"
        );
        let sizes = self.on_node(node, &script).await?;
        let sizes = sizes.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse().ok());
        sizes.max().with_context(|| format!("{program} does not run on {node}"))
    }

    /// Kills the processes of a program on a node whose cgroup contains `cgroup`.
    async fn kill(&self, node: &str, program: &str, cgroup: &str) -> Result<()> {
        self.on_node(node, &signal(program, cgroup, "KILL")).await.map(drop)
    }
}

/// Returns a script that sends a signal to the processes of a program whose cgroup contains `cgroup`. It fails without one.
#[must_use]
pub fn signal(program: &str, cgroup: &str, signal: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "sent=1; for p in /proc/[0-9]*; do \
           if grep -qs -e '{cgroup}' $p/cgroup && [ \"$(cat $p/comm 2>/dev/null)\" = '{name}' ]; then \
             kill -{signal} ${{p#/proc/}} && sent=0; fi; \
         done; [ $sent = 0 ]"
    )
}

/// A privileged pod on a node, in a namespace of its own.
pub struct Node {
    client: Client,
    namespace: String,
}

impl Node {
    async fn start(&self, node: &str) -> Result<()> {
        let pods = self.pods();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "node"},
            "spec": {
                "nodeName": node, "tolerations": [{"operator": "Exists"}],
                "hostPID": true, "hostNetwork": true, "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": false,
                "containers": [{
                    "name": "node", "image": format!("{}/toolbox:devel", registry()), "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "1800"],
                    "securityContext": {"privileged": true, "runAsUser": 0},
                    "volumeMounts": [{"name": "host", "mountPath": "/host", "readOnly": true}],
                }],
                "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
            },
        }))?;
        // The service account of a new namespace is created with a delay.
        let deadline = tokio::time::Instant::now() + patient(TIMEOUT);
        while let Err(error) = pods.create(&Default::default(), &pod).await {
            ensure!(tokio::time::Instant::now() < deadline, "cannot create the node's pod: {error}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        loop {
            let status = pods.get("node").await?.status.unwrap_or_default();
            if status.phase.as_deref() == Some("Running") {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                diagnosis::events(&self.client, &self.namespace).await;
                bail!("the node's pod does not run: {}", serde_json::to_string(&status)?);
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Runs a shell script; see [`Story::on_node`].
    ///
    /// # Errors
    /// Fails if the script fails.
    pub async fn run(&self, script: &str) -> Result<String> {
        exec(&self.pods(), "node", &["sh", "-c", script]).await
    }

    /// Removes the pod with all processes of its scripts.
    ///
    /// # Errors
    /// Fails if the namespace cannot be deleted.
    pub async fn leave(self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client);
        let removed = namespaces.delete(&self.namespace, &DeleteParams::background()).await;
        removed.context("cannot delete the namespace of the node's pod").map(drop)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}
