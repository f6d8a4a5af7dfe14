//! A watch of one named object.

use std::fmt::Debug;

use futures::StreamExt;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt, watcher},
};

/// Calls `seen` with each version of the object `name` (`None`: it does not exist). Never returns.
pub(crate) async fn follow<K, F>(api: Api<K>, name: String, mut seen: F)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: FnMut(Option<K>) + Send + 'static,
{
    let mut versions = std::pin::pin!(watcher::watch_object(api, &name).default_backoff());
    while let Some(version) = versions.next().await {
        match version {
            Ok(object) => seen(object),
            Err(error) => {
                tracing::warn!(object = %name, error = %crate::errors::chain(&error), "watch was interrupted")
            }
        }
    }
}
