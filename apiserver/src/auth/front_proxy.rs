//! Follows the request-header configuration of the cluster.
//!
//! kube-apiserver keeps it in `kube-system/extension-apiserver-authentication`. A change that removes trust (a removed name, an
//! unusable bundle, a deleted ConfigMap) counts at once: until the ConfigMap is usable again, every client is anonymous.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use daemon::tasks::Spawner;
use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::watch;

use super::authentication::FrontProxyTrust;

const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";

/// The trust in force. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct FrontProxy {
    trust: Arc<ArcSwapOption<FrontProxyTrust>>,
    read: watch::Sender<bool>,
}

impl FrontProxy {
    /// Follows the ConfigMap in a task of its own.
    #[must_use]
    pub(crate) fn follow(client: Client, tasks: &Spawner) -> Self {
        let followed = Self::default();
        let this = followed.clone();
        tasks.spawn("front proxy", async move {
            let api = Api::<ConfigMap>::namespaced(client, NAMESPACE);
            let mut versions = std::pin::pin!(daemon::watch::versions(api, NAME));
            while let Some(version) = versions.next().await {
                match version {
                    Ok(map) => this.apply(map),
                    Err(error) => tracing::warn!(object = NAME, error = %error, "watch was interrupted"),
                }
            }
        });
        followed
    }

    /// Applies a version of the ConfigMap.
    pub(crate) fn apply(&self, map: Option<ConfigMap>) {
        let data = map.and_then(|map| map.data).unwrap_or_default();
        match FrontProxyTrust::parse(&data, daemon::tls::provider()) {
            Ok(trust) => {
                tracing::info!("request-header configuration in force");
                self.trust.store(Some(Arc::new(trust)));
                self.read.send_replace(true);
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "no client is authenticated until {NAMESPACE}/{NAME} is usable"
                );
                self.trust.store(None);
            }
        }
    }

    /// Returns a fixed trust.
    #[cfg(test)]
    pub(crate) fn fixed(data: std::collections::BTreeMap<String, String>) -> Self {
        let fixed = Self::default();
        fixed.apply(Some(ConfigMap { data: Some(data), ..ConfigMap::default() }));
        fixed
    }

    /// Returns the trust in force, if any.
    #[must_use]
    pub(crate) fn current(&self) -> Option<Arc<FrontProxyTrust>> {
        self.trust.load_full()
    }

    /// Waits until a usable configuration has been read once.
    pub(crate) async fn ready(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.read.subscribe().wait_for(|read| *read).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::auth::authentication::{ALLOWED_NAMES_KEY, CLIENT_CA_KEY};

    fn map(pem: String, names: Option<&str>) -> ConfigMap {
        let mut data = BTreeMap::from([(CLIENT_CA_KEY.to_owned(), pem)]);
        data.extend(names.map(|names| (ALLOWED_NAMES_KEY.to_owned(), names.to_owned())));
        ConfigMap { data: Some(data), ..ConfigMap::default() }
    }

    #[test]
    fn trust_ends_with_the_configuration() {
        let pem = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap().cert.pem();
        let proxy = FrontProxy::default();
        assert!(proxy.current().is_none());
        proxy.apply(Some(map(pem.clone(), Some("[]"))));
        assert!(proxy.current().is_some());
        proxy.apply(Some(map(pem.clone(), None)));
        assert!(proxy.current().is_none());
        proxy.apply(Some(map(pem, Some(r#"["a"]"#))));
        assert!(proxy.current().is_some());
        proxy.apply(None);
        assert!(proxy.current().is_none());
    }
}
