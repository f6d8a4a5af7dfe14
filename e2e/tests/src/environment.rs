//! The cluster under test and the files of the working tree.

use std::{path::PathBuf, sync::LazyLock, time::Duration};

use anyhow::{Context, Result};
use ferrovirt_e2e_cluster::{audit, plan::Plan, target};
use kube::{
    Client,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};

/// Time limit for results that take seconds on an idle host. Stories measure nothing: a stalled host must not fail them.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the label of the nodes that take all VMIs of the stories: `STORY_NODES`, as `KEY=VALUE`.
pub(crate) fn placement() -> Option<(String, String)> {
    let label = std::env::var("STORY_NODES").ok()?;
    label.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
}

/// Returns a time limit of the stories, multiplied by `STORY_PATIENCE` for slow nodes.
pub(crate) fn patient(limit: Duration) -> Duration {
    static FACTOR: LazyLock<u32> =
        LazyLock::new(|| std::env::var("STORY_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    limit * *FACTOR
}

/// Adds [`placement`] to a VM, a VMI or a set of them, unless it selects nodes itself.
pub(crate) fn place(object: &mut Value) {
    let Some((key, value)) = placement() else { return };
    let pointer = match object["kind"].as_str() {
        Some("VirtualMachineInstance") => "/spec",
        Some("VirtualMachine" | "VirtualMachineInstanceReplicaSet") => "/spec/template/spec",
        _ => return,
    };
    if let Some(spec) = object.pointer_mut(pointer).and_then(Value::as_object_mut)
        && !spec.contains_key("nodeSelector")
    {
        spec.insert("nodeSelector".to_owned(), json!({key: value}));
    }
}

/// Returns the root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).map_or(here.clone(), PathBuf::from)
}

/// Returns the kubeconfig of the cluster under test: `KUBECONFIG`, else that of the test cluster.
#[must_use]
pub fn kubeconfig() -> PathBuf {
    std::env::var_os("KUBECONFIG").map_or_else(|| repository().join("build/kubeconfig"), PathBuf::from)
}

/// Returns the path of the test cluster's audit log. It does not exist for other clusters.
#[must_use]
pub fn audit_log() -> PathBuf {
    audit::log(&kubeconfig())
}

/// Returns the plugin under test: `KUBECTL_VIRT`, else `build/bin/kubectl-virt`.
#[must_use]
pub fn kubectl_virt() -> PathBuf {
    std::env::var_os("KUBECTL_VIRT").map_or_else(|| repository().join("build/bin/kubectl-virt"), PathBuf::from)
}

/// Returns the registry of all images: `REGISTRY`, as for `make push` and `make up`, else the name that the nodes of the test
/// cluster use.
#[must_use]
pub fn registry() -> String {
    std::env::var("REGISTRY").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| OWN_REGISTRY.to_owned())
}

/// The prefix of images in manifests.
const OWN_REGISTRY: &str = "ferrovirt.io";

/// Returns the manifest with the images of the registry in use.
pub(crate) fn with_images(manifest: &str) -> String {
    ["guests/", "toolbox:", "virt-launcher:"].into_iter().fold(manifest.to_owned(), |text, image| {
        text.replace(&format!("{OWN_REGISTRY}/{image}"), &format!("{}/{image}", registry()))
    })
}

/// Returns a client of the cluster under test with the administrator's rights.
///
/// # Errors
/// Fails without a usable kubeconfig.
pub async fn connect() -> Result<Client> {
    Ok(Client::try_from(config().await?)?)
}

/// Returns the same client without retries after 429, 503 and 504.
///
/// # Errors
/// Fails without a usable kubeconfig.
pub async fn connect_without_retries() -> Result<Client> {
    let mut config = config().await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

async fn config() -> Result<kube::Config> {
    let path = kubeconfig();
    let file = Kubeconfig::read_from(&path)
        .with_context(|| format!("no kubeconfig at {}: bring the cluster up with `make up`", path.display()))?;
    Ok(kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
}

/// Returns the plan of the cluster under test if it is the test cluster of this working tree.
///
/// # Errors
/// Fails if FERROVIRT_INSTANCE is not a number.
pub fn own_cluster() -> Result<Option<Plan>> {
    let instance = match std::env::var("FERROVIRT_INSTANCE") {
        Ok(text) => text.parse().context("FERROVIRT_INSTANCE is not a number")?,
        Err(_) => 0,
    };
    let plan = Plan::new(repository(), instance)?;
    let own = target::foreign(&plan, Some(kubeconfig())).is_none();
    Ok(own.then_some(plan))
}

/// Reports that a test does not run, or not in full, because the cluster lacks `need`; see [`skips::skip`]. Only other
/// clusters than the test cluster may lack it where `CI=true`.
///
/// # Errors
/// Fails if FERROVIRT_INSTANCE is not a number.
#[track_caller]
pub fn skip(need: &str) -> Result<()> {
    let prefix = if own_cluster()?.is_some() { "" } else { skips::FOREIGN_CLUSTER };
    skips::skip(&format!("{prefix}{need}"));
    Ok(())
}
