//! Following one named object.

use std::fmt::Debug;

use futures::StreamExt;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt, watcher},
};

/// Calls `seen` with each version of the object `name` (`None`: it does not exist), for ever, in a task of its own.
pub(crate) async fn follow<K, F>(api: Api<K>, name: String, mut seen: F)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: FnMut(Option<K>) + Send + 'static,
{
    let mut versions = std::pin::pin!(watcher::watch_object(api, &name).default_backoff());
    while let Some(version) = versions.next().await {
        match version {
            Ok(object) => seen(object),
            Err(error) => tracing::warn!(object = %name, error = %chain(&error), "watch was interrupted"),
        }
    }
}

/// An error with all its sources, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        // Some libraries repeat their source in their own message.
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        source = inner.source();
    }
    text
}
