//! The cluster configuration, followed live.
//!
//! The configuration lives in the `KubeVirt` object of the install namespace. Defaults hold until it has been read;
//! a version that cannot be used is logged and the last good one stays in force.

use std::sync::Arc;

use api::{KubeVirt, config::ClusterConfig};
use futures::StreamExt;
use kube::{Api, Client, ResourceExt, runtime::watcher};
use tokio::sync::watch;

use crate::tasks::Spawner;

/// The configuration in force. Cheap to clone.
#[derive(Clone)]
pub struct ConfigHandle {
    current: watch::Receiver<Arc<ClusterConfig>>,
    read: watch::Receiver<bool>,
}

impl ConfigHandle {
    /// Returns a configuration that never changes (for tests and tools).
    #[must_use]
    pub fn fixed(config: ClusterConfig) -> Self {
        // Without its sender a receiver keeps the last value.
        Self { current: watch::channel(Arc::new(config)).1, read: watch::channel(true).1 }
    }

    /// Returns the configuration in force.
    #[must_use]
    pub fn current(&self) -> Arc<ClusterConfig> {
        self.current.borrow().clone()
    }

    /// Returns the resource version of the object in force; empty while defaults hold.
    #[must_use]
    pub fn resource_version(&self) -> String {
        self.current.borrow().resource_version.clone()
    }

    /// Waits for the next change after the one last waited for by this handle. Never returns for a fixed one.
    pub async fn changed(&mut self) {
        if self.current.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the configuration was read once, also when no object exists.
    pub async fn read_once(&mut self) {
        if self.read.wait_for(|read| *read).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Follows the `KubeVirt` object of `namespace` in a task of its own.
#[must_use]
pub fn follow(client: Client, namespace: &str, tasks: &Spawner) -> ConfigHandle {
    let (current_sender, current) = watch::channel(Arc::new(ClusterConfig::default()));
    let (read_sender, read) = watch::channel(false);
    let api = Api::<KubeVirt>::namespaced(client, namespace);
    tasks.spawn("configuration", async move {
        // Admission rejects a second object; of several the oldest counts.
        let mut objects: Vec<KubeVirt> = Vec::new();
        let mut listed: Vec<KubeVirt> = Vec::new();
        let mut events = std::pin::pin!(crate::watch::events(api, watcher::Config::default()));
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => {
                    listed.clear();
                    continue;
                }
                Ok(watcher::Event::InitApply(object)) => {
                    listed.push(object);
                    continue;
                }
                Ok(watcher::Event::InitDone) => objects = std::mem::take(&mut listed),
                Ok(watcher::Event::Apply(object)) => {
                    objects.retain(|known| known.name_any() != object.name_any());
                    objects.push(object);
                }
                Ok(watcher::Event::Delete(object)) => {
                    objects.retain(|known| known.name_any() != object.name_any());
                }
                Err(error) => {
                    tracing::warn!(error = %crate::errors::chain(&error), "watch of the configuration was interrupted");
                    continue;
                }
            }
            take(&objects, &current_sender);
            read_sender.send_replace(true);
        }
    });
    ConfigHandle { current, read }
}

/// Puts the configuration of the oldest object in force. An object that is being deleted counts if there is no other, since its
/// finalizer keeps it until VMIs have ended. A deleted object leaves the last configuration in force, since running VMIs were set
/// up by it.
fn take(objects: &[KubeVirt], sender: &watch::Sender<Arc<ClusterConfig>>) {
    let Some(object) = objects.iter().min_by_key(|object| object.rank()) else { return };
    if object.metadata.resource_version.as_deref() == Some(sender.borrow().resource_version.as_str()) {
        return;
    }
    match ClusterConfig::from_kubevirt(object) {
        Ok(config) => {
            tracing::info!(resource_version = %config.resource_version, "configuration in force");
            sender.send_replace(Arc::new(config));
        }
        Err(error) => {
            tracing::error!(
                name = %object.name_any(),
                error = %crate::errors::chain(&error),
                "configuration is not valid; the last valid one stays in force"
            );
        }
    }
}
