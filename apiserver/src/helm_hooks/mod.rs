//! Hooks of the chart, as commands of virt-api.
//!
//! | hook | command | file |
//! |---|---|---|
//! | pre-install, pre-upgrade | `apply-definitions` | [`definitions`]: rejects an unsupported configuration, which no webhook validates on the first install, and updates the custom resource definitions, which Helm does only on the first install |
//! | pre-delete | `uninstall` | [`uninstall`]: deletes the KubeVirt object while the components run; fails while workloads block it |
//! | post-delete | `clean-up` | [`cleanup`]: removes the processes' objects (certificates, webhook path segment, lease), labels of nodes and finalizers, and the common instance types and preferences; on request also definitions without objects |
//! | test | `test-vm` | [`test_vm`]: boots a VMI and deletes it |
//!
//! Objects of users stay, unless the uninstall strategy is `RemoveWorkloads`: their definitions are kept, and with them every VM
//! that is not running.

mod cleanup;
mod definitions;
mod test_vm;
mod uninstall;

use std::fmt::Debug;

use kube::{Api, Resource, api::ListParams};
use serde::de::DeserializeOwned;

pub use self::{
    cleanup::clean_up,
    definitions::{apply_definitions, apply_importer_definitions, check_configuration},
    test_vm::test_vm,
    uninstall::uninstall,
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
    /// Workloads block the deletion of the KubeVirt object.
    #[error(
        "{count} workloads exist: {}. Stop the VMs and delete the other objects, and uninstall again. Or set \
         spec.uninstallStrategy of the KubeVirt object to RemoveWorkloads, which deletes all VMs, VMIs and replica sets. Or \
         leave them running unmanaged with `helm uninstall --no-hooks`. To keep the installation, which Helm shows as \
         uninstalling now: `{keep}`", list(named, *count)
    )]
    Blocked {
        /// Their number.
        count: usize,
        /// Names of some of them.
        named: Vec<String>,
        /// The command that undoes the attempt.
        keep: String,
    },
    /// The KubeVirt object cannot be deleted.
    #[error(
        "cannot delete the KubeVirt object: {source}. If virt-api does not work any more, uninstall with \
         `helm uninstall --no-hooks`. To keep the installation, which Helm shows as uninstalling now: `{keep}`"
    )]
    NotDeleted {
        /// Error of the API server.
        source: kube::Error,
        /// The command that undoes the attempt.
        keep: String,
    },
    /// Workloads of the deleted KubeVirt object remain.
    #[error(
        "the KubeVirt object is being deleted, and {count} workloads are left: {}. virt-controller goes on removing them; \
         uninstall again later", list(named, *count)
    )]
    NotRemoved {
        /// Their number.
        count: usize,
        /// Names of some of them.
        named: Vec<String>,
    },
    /// Pods of a component, or the VMI of a test, remain.
    #[error("{0} is still running")]
    NotGone(String),
    /// The VMI of a test cannot be generated.
    #[error("cannot generate the VMI: {0}")]
    TestVmi(serde_json::Error),
    /// A VMI of somebody else has the name of that of a test.
    #[error("VMI {0} exists and was not created by a test: delete it, or set the value test.namespace")]
    ForeignVmi(String),
    /// The VMI of a test does not run.
    #[error("VMI {name} does not run: {reason}")]
    NotBooted {
        /// Namespace and name.
        name: String,
        /// The reason.
        reason: String,
    },
}

/// Returns the text of a list of `count` objects, of which some are named.
fn list(named: &[String], count: usize) -> String {
    format!("{}{}", named.join(", "), if named.len() < count { ", ..." } else { "" })
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
