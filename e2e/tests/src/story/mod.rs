//! A story: the steps of one user in a namespace of their own on the cluster under test.
//!
//! [`story`] creates the namespace, prints a diagnosis after a failure and removes the namespace. The other files add methods to
//! [`Story`] by subject.

mod calls;
mod diagnosis;
mod kinds;
mod metrics;
mod node;
mod objects;
mod plugin;
mod pods;
mod streams;

use std::{
    sync::RwLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow, bail};
use futures::FutureExt;
use kube::{Client, api::DeleteParams};
use serde_json::json;

pub use self::{node::Node, streams::OpenStreams};
use crate::environment::{TIMEOUT, connect};

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time limit for the removal of a namespace with its VMs.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(120);

/// A user's access to the cluster: a client and a namespace of their own.
pub struct Story {
    /// The client, with the administrator's rights.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
}

/// Runs `body` in a new namespace, prints a diagnosis if it fails, and removes the namespace.
///
/// # Panics
/// Panics if the body fails or the namespace cannot be removed, which fails the test.
pub fn story<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let _shared = RUNNING.read();
    run(name, body);
}

/// Runs as [`story`] while no other story runs, for stories that disturb the whole cluster.
///
/// # Panics
/// Panics as [`story`].
pub fn story_alone<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let _exclusive = RUNNING.write();
    run(name, body);
}

/// Lock of running stories. A failed story poisons it, which the others ignore.
static RUNNING: RwLock<()> = RwLock::new(());

fn run<F>(name: &str, body: F)
where
    F: AsyncFnOnce(&Story) -> Result<()>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.context("cannot start the runtime").and_then(|runtime| {
        runtime.block_on(async {
            let story = Story::begin(name).await?;
            // A failed assertion must not skip the clean-up.
            let result = std::panic::AssertUnwindSafe(body(&story)).catch_unwind().await;
            let result = result.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
                Err(anyhow!("assertion failed: {}", text.unwrap_or_default()))
            });
            if let Err(error) = &result {
                eprintln!("\n======== story {name} failed: {error:#}");
                diagnosis::print(&story).await;
            }
            let ended = story.end().await;
            result.and(ended)
        })
    });
    if let Err(error) = outcome {
        #[expect(clippy::panic, reason = "fails the test")]
        {
            panic!("story {name}: {error:#}");
        }
    }
}

impl Story {
    async fn begin(name: &str) -> Result<Self> {
        let client = connect().await?;
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let namespace = format!("e2e-{name}-{:05x}", nanos % 0xf_ffff);
        let story = Self { client, namespace };
        // Launcher pods must pass the strictest pod security there is.
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": story.namespace, "labels": {
            "ferrovirt.io/e2e": name, "pod-security.kubernetes.io/enforce": "restricted"}}});
        story.cluster_api("Namespace").create(&Default::default(), &serde_json::from_value(object)?).await?;
        story.wait("ServiceAccount", "default", "be created", TIMEOUT, |_| true).await?;
        Ok(story)
    }

    async fn end(self) -> Result<()> {
        let namespaces = self.cluster_api("Namespace");
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.context("cannot delete the namespace")?;
        let deadline = tokio::time::Instant::now() + NAMESPACE_TIMEOUT;
        while let Some(namespace) = namespaces.get_opt(&self.namespace).await? {
            if tokio::time::Instant::now() > deadline {
                diagnosis::print(&self).await;
                bail!("namespace {} still exists: {}", self.namespace, namespace.data["status"]);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}
