//! The client for the Kubernetes API server; `metrics` counts its requests, `limit` delays them where the configuration says so, and
//! `silence` ends watches on which nothing arrives.

mod limit;
pub(crate) mod metrics;
mod silence;

use std::time::Duration;

use http::{HeaderValue, header::USER_AGENT};
use kube::{Client, Config, client::ClientBuilder};

pub use self::limit::limit_requests;
use self::{metrics::CountLayer, silence::SilenceLayer};

/// Longest time for a connection to the API server to come up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest silence on a connection; longer than a watch may be silent.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest time for a request to be accepted by the kernel.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Neither the pod's service account nor a kubeconfig was usable.
    #[error("no usable configuration for the API server")]
    Config(#[source] kube::config::InferConfigError),
    /// The TLS or HTTP client could not be built.
    #[error("the client cannot be built")]
    Build(#[source] kube::Error),
}

/// Returns a client from the pod's service account or, outside a cluster, from the kubeconfig; with time limits.
///
/// # Errors
/// When there is no usable configuration.
pub async fn connect() -> Result<Client, ClientError> {
    crate::tls::install_provider();
    let mut config = Config::infer().await.map_err(ClientError::Config)?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    config.reset_reader_on_write = true;
    // Callers decide on retries: only they know which requests are safe to repeat.
    config.default_retry = false;
    config.headers.extend(user_agent().map(|agent| (USER_AGENT, agent)));
    let host = config.cluster_url.authority().map_or_else(String::new, ToString::to_string);
    let layer = CountLayer { host: host.into() };
    Ok(ClientBuilder::try_from(config)
        .map_err(ClientError::Build)?
        .with_layer(&layer)
        .with_layer(&SilenceLayer)
        .build())
}

/// Returns name and version of this program. The API server's audit log has them, and the managers of fields have the name.
fn user_agent() -> Option<HeaderValue> {
    let program = std::env::current_exe().ok()?;
    let name = program.file_name()?.to_str()?;
    HeaderValue::from_str(&format!("{name}/{}", env!("CARGO_PKG_VERSION"))).ok()
}

/// Returns the install namespace: `POD_NAMESPACE`, else `kubevirt`.
#[must_use]
pub fn install_namespace() -> String {
    std::env::var("POD_NAMESPACE").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "kubevirt".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_tells_its_name() {
        let agent = user_agent().unwrap();
        let (name, version) = agent.to_str().unwrap().split_once('/').unwrap();
        assert!(name.starts_with("daemon-"), "{name}");
        assert_eq!(version, env!("CARGO_PKG_VERSION"));
    }
}
