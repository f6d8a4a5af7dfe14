//! Follows the request-header configuration of the cluster.
//!
//! kube-apiserver keeps it in `kube-system/extension-apiserver-authentication`. Whatever takes trust away (a removed
//! name, an unusable bundle, a deleted ConfigMap) takes it away here at once: until it is readable again, everybody is
//! anonymous.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::watch;

use crate::authentication::FrontProxyTrust;

const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";

/// The trust in force. Cheap to clone.
#[derive(Clone, Default)]
pub struct FrontProxy {
    trust: Arc<ArcSwapOption<FrontProxyTrust>>,
    read: watch::Sender<bool>,
}

impl FrontProxy {
    /// Follows the ConfigMap; spawns the task that watches.
    #[must_use]
    pub fn follow(client: Client) -> Self {
        let followed = Self::default();
        let this = followed.clone();
        tokio::spawn(async move {
            let api = Api::<ConfigMap>::namespaced(client, NAMESPACE);
            let mut versions = std::pin::pin!(watcher::watch_object(api, NAME).default_backoff());
            while let Some(version) = versions.next().await {
                match version {
                    Ok(map) => this.take(map),
                    Err(error) => tracing::warn!(object = NAME, error = %error, "watch was interrupted"),
                }
            }
        });
        followed
    }

    /// Puts the configuration of a version of the ConfigMap in force.
    pub(crate) fn take(&self, map: Option<ConfigMap>) {
        let data = map.and_then(|map| map.data).unwrap_or_default();
        match FrontProxyTrust::parse(&data, process::tls::provider()) {
            Ok(trust) => {
                tracing::info!("request-header configuration in force");
                self.trust.store(Some(Arc::new(trust)));
                self.read.send_replace(true);
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "nobody is authenticated until {NAMESPACE}/{NAME} is usable"
                );
                self.trust.store(None);
            }
        }
    }

    /// A fixed trust.
    #[cfg(test)]
    pub(crate) fn fixed(data: std::collections::BTreeMap<String, String>) -> Self {
        let fixed = Self::default();
        fixed.take(Some(ConfigMap { data: Some(data), ..ConfigMap::default() }));
        fixed
    }

    /// The trust in force, if any.
    #[must_use]
    pub fn current(&self) -> Option<Arc<FrontProxyTrust>> {
        self.trust.load_full()
    }

    /// Waits until a usable configuration has been read once.
    pub async fn ready(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.read.subscribe().wait_for(|read| *read).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::authentication::{ALLOWED_NAMES_KEY, CLIENT_CA_KEY};

    fn map(pem: String, names: Option<&str>) -> ConfigMap {
        let mut data = BTreeMap::from([(CLIENT_CA_KEY.to_owned(), pem)]);
        data.extend(names.map(|names| (ALLOWED_NAMES_KEY.to_owned(), names.to_owned())));
        ConfigMap { data: Some(data), ..ConfigMap::default() }
    }

    #[test]
    fn trust_goes_when_the_configuration_goes() {
        let pem = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap().cert.pem();
        let proxy = FrontProxy::default();
        assert!(proxy.current().is_none());
        proxy.take(Some(map(pem.clone(), Some("[]"))));
        assert!(proxy.current().is_some());
        proxy.take(Some(map(pem.clone(), None)));
        assert!(proxy.current().is_none());
        proxy.take(Some(map(pem, Some(r#"["a"]"#))));
        assert!(proxy.current().is_some());
        proxy.take(None);
        assert!(proxy.current().is_none());
    }
}
