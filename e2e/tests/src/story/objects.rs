//! Objects: applying, reading, deleting and waiting.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{POLL_INTERVAL, Story, kinds::resource};
use crate::environment::{TIMEOUT, patient, place, with_images};

impl Story {
    /// Returns the API of a namespaced kind, by its kind or kubectl's short name.
    #[must_use]
    pub fn api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource(kind))
    }

    /// Returns the API of a kind in the namespace of the installation.
    #[must_use]
    pub fn installation_api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), "kubevirt", &resource(kind))
    }

    /// Returns the API of a cluster-wide kind, or of a kind in all namespaces.
    #[must_use]
    pub fn cluster_api(&self, kind: &str) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &resource(kind))
    }

    /// Applies a manifest of one or more documents to the story's namespace as `kubectl apply` does. Unknown fields are
    /// errors.
    ///
    /// # Errors
    /// Fails with the error of the API server.
    pub async fn apply(&self, manifest: &str) -> Result<()> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&with_images(manifest)).context("manifest is not YAML")?;
        for mut value in documents {
            value["metadata"]["namespace"] = json!(self.namespace);
            place(&mut value);
            let object: DynamicObject = serde_json::from_value(value)?;
            let kind = object.types.as_ref().map(|t| t.kind.clone()).context("manifest without kind")?;
            let mut params = PatchParams::apply("e2e").force();
            params.field_validation = Some(kube::api::ValidationDirective::Strict);
            self.api(&kind)
                .patch(&object.name_any(), &params, &Patch::Apply(&object))
                .await
                .with_context(|| format!("apply {kind} {}", object.name_any()))?;
        }
        Ok(())
    }

    /// Returns the object that the API server would store for a manifest of one document (a dry run).
    ///
    /// # Errors
    /// Fails with the error of the API server.
    pub async fn dry_run(&self, manifest: &str) -> Result<Value> {
        let mut value: Value = serde_saphyr::from_str(manifest).context("manifest is not YAML")?;
        value["metadata"]["namespace"] = json!(self.namespace);
        place(&mut value);
        let object: DynamicObject = serde_json::from_value(value)?;
        let kind = object.types.as_ref().map(|t| t.kind.clone()).context("manifest without kind")?;
        let mut params = PatchParams::apply("e2e").force().dry_run();
        params.field_validation = Some(kube::api::ValidationDirective::Strict);
        let stored = self.api(&kind).patch(&object.name_any(), &params, &Patch::Apply(&object)).await;
        let stored = stored.with_context(|| format!("apply {kind} {} without storing it", object.name_any()))?;
        Ok(serde_json::to_value(stored)?)
    }

    /// Applies a manifest that must be refused and returns the message of the refusal.
    ///
    /// # Errors
    /// Fails if it is accepted.
    pub async fn refused(&self, manifest: &str) -> Result<String> {
        match self.apply(manifest).await {
            Ok(()) => bail!("accepted, but must be refused:\n{manifest}"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    /// Applies a manifest and retries while it is refused. virt-api notices objects that it watches with a delay.
    ///
    /// # Errors
    /// Fails with the last refusal after [`TIMEOUT`].
    pub async fn apply_when_accepted(&self, manifest: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + patient(TIMEOUT);
        while let Err(error) = self.apply(manifest).await {
            if tokio::time::Instant::now() > deadline {
                return Err(error);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Repeats a dry run of a manifest until it is refused and returns the message of the refusal.
    ///
    /// # Errors
    /// Fails if it is still accepted after [`TIMEOUT`].
    pub async fn refused_soon(&self, manifest: &str) -> Result<String> {
        let deadline = tokio::time::Instant::now() + patient(TIMEOUT);
        loop {
            if let Err(error) = self.dry_run(manifest).await {
                return Ok(format!("{error:#}"));
            }
            if tokio::time::Instant::now() > deadline {
                bail!("accepted, but must be refused:\n{manifest}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the current object.
    ///
    /// # Errors
    /// Fails if it does not exist.
    pub async fn get(&self, kind: &str, name: &str) -> Result<Value> {
        let object = self.api(kind).get(name).await.with_context(|| format!("get {kind} {name}"))?;
        Ok(serde_json::to_value(object)?)
    }

    /// Returns the objects of a kind in the namespace that have the labels.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn list(&self, kind: &str, labels: &str) -> Result<Vec<Value>> {
        let list = self.api(kind).list(&ListParams::default().labels(labels)).await?;
        list.items.into_iter().map(|object| Ok(serde_json::to_value(object)?)).collect()
    }

    /// Waits until `done` is true for the object. `what` describes the condition in the error ("be Running").
    ///
    /// # Errors
    /// Fails after the time limit, with the object's last status.
    pub async fn wait(
        &self,
        kind: &str,
        name: &str,
        what: &str,
        within: Duration,
        done: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let api = self.api(kind);
        let within = patient(within);
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let seen = api.get_opt(name).await?.map(serde_json::to_value).transpose()?;
            if let Some(object) = &seen
                && done(object)
            {
                return Ok(object.clone());
            }
            if tokio::time::Instant::now() > deadline {
                let status = seen.map_or_else(|| "does not exist".to_owned(), |o| format!("status: {}", o["status"]));
                bail!("{kind} {name} did not {what} within {within:?}; {status}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the object does not exist.
    ///
    /// # Errors
    /// Fails after the time limit, with the object.
    pub async fn wait_gone(&self, kind: &str, name: &str, within: Duration) -> Result<()> {
        let api = self.api(kind);
        let within = patient(within);
        let deadline = tokio::time::Instant::now() + within;
        while let Some(object) = api.get_opt(name).await? {
            if tokio::time::Instant::now() > deadline {
                bail!("{kind} {name} still exists after {within:?}: {}", serde_json::to_string(&object)?);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until the VMI runs.
    ///
    /// # Errors
    /// Fails after the time limit.
    pub async fn wait_running(&self, vmi: &str) -> Result<Value> {
        self.wait("vmi", vmi, "be Running", Duration::from_secs(180), |vmi| vmi["status"]["phase"] == "Running").await
    }

    /// Waits for an event about the named object with this reason, and returns its message.
    ///
    /// # Errors
    /// Fails after the time limit, with the reasons of the events about the object.
    pub async fn wait_event(&self, name: &str, reason: &str, within: Duration) -> Result<String> {
        let within = patient(within);
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let events = self.list("Event", "").await?;
            let about: Vec<&Value> = events.iter().filter(|e| e["involvedObject"]["name"] == name).collect();
            if let Some(event) = about.iter().find(|e| e["reason"] == reason) {
                return Ok(event["message"].as_str().unwrap_or_default().to_owned());
            }
            if tokio::time::Instant::now() > deadline {
                let seen: Vec<&Value> = about.iter().map(|e| &e["reason"]).collect();
                bail!("no event {reason} about {name} within {within:?}; seen: {seen:?}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Deletes the object, as `kubectl delete --wait=false` does.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.api(kind)
            .delete(name, &DeleteParams::background())
            .await
            .with_context(|| format!("delete {kind} {name}"))?;
        Ok(())
    }

    /// Returns the launcher pod of a VMI, without those that it has left in a migration, and those to which it moves.
    ///
    /// # Errors
    /// Fails unless there is exactly one.
    pub async fn launcher_pod(&self, vmi: &str) -> Result<Value> {
        let vmi = self.get("vmi", vmi).await?;
        let mut pods = self.launcher_pods(&vmi).await?;
        if pods.len() > 1 {
            let has_ended = |pod: &Value| pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed";
            pods.retain(|pod| !has_ended(pod) && pod["spec"]["nodeName"] == vmi["status"]["nodeName"]);
        }
        ensure!(pods.len() == 1, "{} launcher pods instead of one", pods.len());
        pods.pop().context("no launcher pod")
    }

    /// Waits until the launcher pod of a VMI has an address, which kubelet can show after the guest runs, and returns it.
    ///
    /// # Errors
    /// Fails unless there is exactly one pod, and after [`TIMEOUT`].
    pub async fn pod_address(&self, vmi: &str) -> Result<String> {
        let pod = self.launcher_pod(vmi).await?;
        let name = pod["metadata"]["name"].as_str().context("pod without name")?;
        let has_address = |pod: &Value| pod["status"]["podIP"].is_string();
        let pod = self.wait("Pod", name, "have an address", TIMEOUT, has_address).await?;
        pod["status"]["podIP"].as_str().map(str::to_owned).context("pod without address")
    }

    /// Returns all launcher pods of a VMI.
    ///
    /// # Errors
    /// Fails with errors of the API server.
    pub async fn launcher_pods(&self, vmi: &Value) -> Result<Vec<Value>> {
        let uid = vmi["metadata"]["uid"].as_str().context("vmi without uid")?;
        self.list("Pod", &format!("kubevirt.io/created-by={uid}")).await
    }
}
