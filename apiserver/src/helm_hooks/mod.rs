//! Hooks of the chart, as commands of virt-api.
//!
//! | hook | command | file |
//! |---|---|---|
//! | pre-install, pre-upgrade | `apply-definitions` | [`definitions`]: rejects an unsupported configuration, which no webhook validates on the first install, and updates the custom resource definitions, which Helm does only on the first install |
//! | pre-delete | `check-uninstall` | [`uninstall`]: fails while VMIs run |
//! | post-delete | `clean-up` | [`cleanup`]: removes the processes' objects (certificates, webhook path segment, lease), labels of nodes and finalizers |
//!
//! Objects of users stay: definitions are kept, and with them every VM that is not running.

mod cleanup;
mod definitions;
mod uninstall;

use std::fmt::Debug;

use kube::{Api, Resource, api::ListParams};
use serde::de::DeserializeOwned;

pub use self::{
    cleanup::clean_up,
    definitions::{apply_definitions, check_configuration},
    uninstall::check_uninstall,
};

/// Objects on a page.
const PAGE: u32 = 500;

/// Errors of a hook.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// No client for the API server.
    #[error("no client for the API server")]
    Client(#[from] daemon::client::ClientError),
    /// The configuration is invalid or not supported.
    #[error("cannot use value kubevirt.configuration: {0}")]
    Configuration(String),
    /// The definitions cannot be generated.
    #[error("cannot generate the definitions: {0}")]
    Definitions(String),
    /// A call to the API server failed.
    #[error("{action}: {source}")]
    Call {
        /// The failed action.
        action: String,
        /// Error of the API server.
        source: kube::Error,
    },
    /// VMIs run.
    #[error(
        "{count} virtual machines are running and would be unmanaged: {}{}. Stop them and uninstall again, or leave them \
         running unmanaged with `helm uninstall --no-hooks`. To keep the installation, which Helm shows as uninstalling \
         now: `{keep}`", named.join(", "), if named.len() < *count { ", ..." } else { "" }
    )]
    Running {
        /// Their number.
        count: usize,
        /// Names of some of them.
        named: Vec<String>,
        /// The command that undoes the attempt.
        keep: String,
    },
    /// Pods of a component remain.
    #[error("{0} is still running")]
    NotGone(String),
}

/// Visits all objects, page by page. An undefined kind has none.
async fn for_each<K>(api: &Api<K>, mut visit: impl FnMut(&K)) -> Result<(), HookError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = match api.list(&params).await {
            Ok(page) => page,
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(error) => return Err(call(format!("cannot list {}", K::plural(&())))(error)),
        };
        page.items.iter().for_each(&mut visit);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

/// Returns the error of a failed action.
fn call(action: String) -> impl FnOnce(kube::Error) -> HookError {
    move |source| HookError::Call { action, source }
}
