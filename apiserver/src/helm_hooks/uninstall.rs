//! `uninstall`: the KubeVirt object, and with it the workloads.
//!
//! Helm deletes virt-controller before the KubeVirt object, whose finalizer would then stay. This step deletes the object while
//! all components run. [`UninstallStrategy`] and the webhook on the deletion decide which workloads block it.

use std::{fmt::Debug, time::Duration};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet,
    constants::KUBEVIRT_NAME,
    kubevirt::uninstall::{UninstallStrategy, Workload},
};
use kube::{Api, Client, Resource, ResourceExt, api::DeleteParams};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};

use super::{HookError, call, for_each};

/// Longest wait for the end of the workloads. The job of the hook has less than half a minute more.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(210);

/// Deletes the KubeVirt object and waits for its end. Fails while workloads block it. `keep` is the command that reverts the
/// attempt to uninstall: Helm marks a release before it runs the hooks, and only a rollback to the revision removes the mark.
pub async fn uninstall(keep: String) -> Result<(), HookError> {
    let client = daemon::client::connect().await?;
    let api = Api::<KubeVirt>::namespaced(client.clone(), &daemon::client::install_namespace());
    let read = || async {
        match api.get_opt(KUBEVIRT_NAME).await {
            // Without the definition there is nothing to remove.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            answer => answer.map_err(call("cannot read the KubeVirt object".to_owned())),
        }
    };
    let object = read().await?;
    let strategy = object.as_ref().map_or(UninstallStrategy::KeepVms, |object| UninstallStrategy::of(&object.spec));
    if strategy != UninstallStrategy::RemoveWorkloads {
        let mut blocking = Existing::default();
        blocking.add(&client, strategy).await?;
        if blocking.count > 0 {
            return Err(HookError::Blocked { count: blocking.count, named: blocking.named, keep });
        }
    }
    if object.is_none() {
        return Ok(());
    }
    match api.delete(KUBEVIRT_NAME, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(HookError::NotDeleted { source: error, keep }),
    }
    let until = Instant::now() + REMOVAL_TIMEOUT;
    while read().await?.is_some() {
        if Instant::now() > until {
            let mut left = Existing::default();
            left.add(&client, strategy).await?;
            return Err(HookError::NotRemoved { count: left.count, named: left.named });
        }
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Existing workloads.
#[derive(Debug, Default)]
struct Existing {
    count: usize,
    named: Vec<String>,
}

impl Existing {
    /// Most workloads that an error names.
    const MAX_NAMED: usize = 10;

    /// Adds all workloads that concern a strategy.
    async fn add(&mut self, client: &Client, strategy: UninstallStrategy) -> Result<(), HookError> {
        for workload in strategy.concerned() {
            match workload {
                Workload::Vmi => self.add_kind::<VirtualMachineInstance>(client, "VMI").await?,
                Workload::Vm => self.add_kind::<VirtualMachine>(client, "VM").await?,
                Workload::ReplicaSet => {
                    self.add_kind::<VirtualMachineInstanceReplicaSet>(client, "replica set").await?
                }
            }
        }
        Ok(())
    }

    async fn add_kind<K>(&mut self, client: &Client, kind: &str) -> Result<(), HookError>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        for_each(&Api::<K>::all(client.clone()), |object| {
            self.push(kind, &object.namespace().unwrap_or_default(), &object.name_any());
        })
        .await
    }

    fn push(&mut self, kind: &str, namespace: &str, name: &str) {
        self.count += 1;
        if self.named.len() < Self::MAX_NAMED {
            self.named.push(format!("{kind} {namespace}/{name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_some_workloads_and_the_alternatives() {
        let mut existing = Existing::default();
        (0..12).for_each(|number| existing.push("VMI", "a", &format!("vm-{number}")));
        let Existing { count, named } = existing;
        let error = HookError::Blocked { count, named: named.clone(), keep: "helm rollback r 1".into() };
        let text = error.to_string();
        assert!(text.starts_with("12 workloads exist: VMI a/vm-0, "), "{text}");
        assert!(text.contains("VMI a/vm-9, ..."), "{text}");
        assert!(text.contains("--no-hooks") && text.contains("RemoveWorkloads"), "{text}");
        assert!(text.contains("`helm rollback r 1`"), "{text}");
        let text = HookError::NotRemoved { count, named }.to_string();
        assert!(text.contains("12 workloads are left: VMI a/vm-0, "), "{text}");
    }
}
