//! A value that is replaced while connections use it, from an object that is followed or from the process itself.

use std::{fmt::Debug, sync::Arc};

use arc_swap::ArcSwapOption;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{Api, Resource};
use tokio::sync::watch;

use super::TlsError;
use crate::{tasks::Spawner, watch::follow};

/// The current value, if there is one, and a count of the values so far. Clones share both.
pub(super) struct Followed<T> {
    value: Arc<ArcSwapOption<T>>,
    version: watch::Sender<u64>,
}

/// The result of reading an object.
pub(super) enum Read {
    /// The object lacks the value. The last one stays in force.
    Missing,
    /// The value is the one in force.
    Unchanged,
    /// The value was replaced.
    Replaced,
}

impl<T> Followed<T> {
    pub(super) fn empty() -> Self {
        Self { value: Arc::new(ArcSwapOption::empty()), version: watch::Sender::new(0) }
    }

    pub(super) fn replace(&self, value: T) {
        self.value.store(Some(Arc::new(value)));
        self.version.send_modify(|version| *version += 1);
    }

    pub(super) fn current(&self) -> Option<Arc<T>> {
        self.value.load_full()
    }

    /// Waits until there is a value.
    pub(super) async fn ready(&self) {
        let mut versions = self.version.subscribe();
        // The sender lives in self, so waiting cannot fail.
        let _ = versions.wait_for(|version| *version > 0).await;
    }

    /// Returns a receiver of the number of values so far.
    pub(super) fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn version(&self) -> u64 {
        *self.version.borrow()
    }
}

impl<T> Clone for Followed<T> {
    fn clone(&self) -> Self {
        Self { value: self.value.clone(), version: self.version.clone() }
    }
}

/// Follows the object `name` in a task of its own. `read` puts the value of each version in force; a version that cannot be
/// used leaves the last value in force. `what` names the value in logs.
pub(super) fn follow_value<K, F>(api: Api<K>, name: &str, what: &'static str, tasks: &Spawner, read: F)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: Fn(K) -> Result<Read, TlsError> + Send + 'static,
{
    let object = name.to_owned();
    let seen = move |version: Option<K>| match version.map_or(Ok(Read::Missing), &read) {
        Ok(Read::Replaced) => tracing::info!(object, "{what} in force"),
        Ok(Read::Unchanged) => {}
        Ok(Read::Missing) => tracing::debug!(object, "{what} does not exist yet"),
        Err(error) => tracing::warn!(
            object,
            error = %crate::errors::chain(&error),
            "{what} cannot be used; the last one stays in force"
        ),
    };
    tasks.spawn(what, follow(api, name.to_owned(), seen));
}
