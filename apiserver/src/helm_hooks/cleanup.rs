//! `clean-up`: objects, labels and finalizers of the processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VirtualMachineInstanceReplicaSet,
    cdi::DataVolume,
    constants::{MAX_SHARDS, annotation, component, controller_lease, finalizer, label},
    instancetype::common,
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore},
    tls, webhook_path,
};
use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest,
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node, Pod, Secret},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{HookError, call, definitions, for_each};

/// Longest wait for the end of the processes.
const GONE_TIMEOUT: Duration = Duration::from_secs(90);

/// Removes the objects, labels and finalizers of the processes, and the definitions without objects unless they are kept.
pub async fn clean_up(delete_definitions: bool) -> Result<(), HookError> {
    let client = daemon::client::connect().await?;
    let namespace = daemon::client::install_namespace();
    // A running process would create them again.
    for name in [component::VIRT_CONTROLLER, component::VIRT_HANDLER] {
        wait_until_gone(&client, &namespace, name).await?;
    }
    let certificates = [tls::CA_SECRET, tls::API_SERVER_SECRET, tls::API_CLIENT_SECRET, tls::CONTROLLER_SECRET];
    for name in certificates.into_iter().chain([webhook_path::SECRET]) {
        delete::<Secret>(&client, &namespace, name).await?;
    }
    delete::<ConfigMap>(&client, &namespace, tls::CA_CONFIG_MAP).await?;
    for shard in 0..MAX_SHARDS {
        delete::<Lease>(&client, &namespace, &controller_lease(shard)).await?;
    }
    delete_requests(&client).await?;
    release::<VirtualMachineInstance>(&client).await?;
    release::<VirtualMachine>(&client).await?;
    release::<VirtualMachineInstanceReplicaSet>(&client).await?;
    release::<VirtualMachineInstanceMigration>(&client).await?;
    release::<VirtualMachineSnapshot>(&client).await?;
    release::<VirtualMachineSnapshotContent>(&client).await?;
    release::<VirtualMachineRestore>(&client).await?;
    release::<DataVolume>(&client).await?;
    release::<KubeVirt>(&client).await?;
    clean_nodes(&client).await?;
    delete_common(&client, &common::instancetypes()).await?;
    delete_common(&client, &common::preferences()).await?;
    if delete_definitions { definitions::delete_definitions(&client).await } else { Ok(()) }
}

async fn wait_until_gone(client: &Client, namespace: &str, name: &str) -> Result<(), HookError> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let selector = ListParams::default().labels(&format!("{}={name}", label::APP)).limit(1);
    let until = Instant::now() + GONE_TIMEOUT;
    loop {
        let left = pods.list_metadata(&selector).await.map_err(call(format!("cannot list pods of {name}")))?;
        if left.items.is_empty() {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(HookError::NotGone(name.to_owned()));
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn delete<K>(client: &Client, namespace: &str, name: &str) -> Result<(), HookError>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    match Api::<K>::namespaced(client.clone(), namespace).delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(call(format!("cannot delete {} {name}", K::kind(&())))(error)),
    }
}

/// Removes the certificate requests of virt-handlers.
async fn delete_requests(client: &Client) -> Result<(), HookError> {
    let ours = ListParams::default().fields(&format!("spec.signerName={}", tls::HANDLER_SIGNER));
    Api::<CertificateSigningRequest>::all(client.clone())
        .delete_collection(&DeleteParams::default(), &ours)
        .await
        .map(|_| ())
        .map_err(call("cannot delete the certificate requests of virt-handlers".to_owned()))
}

/// Removes our finalizers from all objects of a kind, so that they can be deleted.
async fn release<K>(client: &Client) -> Result<(), HookError>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let mut held = Vec::new();
    let all = Api::<K>::all(client.clone());
    for_each(&all, |object| {
        if let Some(patch) = released(object.finalizers(), object.resource_version()) {
            held.push((object.namespace().unwrap_or_default(), object.name_any(), patch));
        }
    })
    .await?;
    for (namespace, name, patch) in held {
        let api = Api::<K>::namespaced(client.clone(), &namespace);
        match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(call(format!("cannot release {} {namespace}/{name}", K::kind(&())))(error)),
        }
    }
    Ok(())
}

/// Returns the patch that keeps foreign finalizers only, or `None` if there are no others.
fn released(finalizers: &[String], resource_version: Option<String>) -> Option<Value> {
    let foreign = finalizers.iter().filter(|name| !finalizer::ALL.contains(&name.as_str())).collect::<Vec<_>>();
    (foreign.len() < finalizers.len())
        .then(|| json!({"metadata": {"finalizers": foreign, "resourceVersion": resource_version}}))
}

/// Deletes the common instance types or preferences, except those that a user took over.
async fn delete_common<K>(client: &Client, objects: &[K]) -> Result<(), HookError>
where
    K: Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let names: BTreeSet<String> = objects.iter().map(ResourceExt::name_any).collect();
    let api = Api::<K>::all(client.clone());
    let mut ours = Vec::new();
    for_each(&api, |object| {
        let is_ours = object.annotations().contains_key(common::WRITTEN) && names.contains(&object.name_any());
        ours.extend(is_ours.then(|| object.name_any()));
    })
    .await?;
    for name in ours {
        match api.delete(&name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(call(format!("cannot delete {} {name}", K::kind(&())))(error)),
        }
    }
    Ok(())
}

async fn clean_nodes(client: &Client) -> Result<(), HookError> {
    let api = Api::<Node>::all(client.clone());
    let mut marked = Vec::new();
    for_each(&api, |node| {
        if let Some(patch) = unmarked(node.labels(), node.annotations()) {
            marked.push((node.name_any(), patch));
        }
    })
    .await?;
    for (name, patch) in marked {
        match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(call(format!("cannot clean node {name}"))(error)),
        }
    }
    Ok(())
}

/// Returns the patch that removes our labels and annotations from a node, or `None` if it has none.
fn unmarked(labels: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> Option<Value> {
    fn removed<'a>(keys: impl Iterator<Item = &'a String>) -> serde_json::Map<String, Value> {
        keys.map(|key| (key.clone(), Value::Null)).collect()
    }
    let labels = removed(labels.keys().filter(|key| label::is_on_nodes(key)));
    let annotations = removed(annotations.keys().filter(|key| annotation::ON_NODES.contains(&key.as_str())));
    (!labels.is_empty() || !annotations.is_empty())
        .then(|| json!({"metadata": {"labels": labels, "annotations": annotations}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(keys: &[&str]) -> BTreeMap<String, String> {
        keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect()
    }

    #[test]
    fn node_loses_our_keys_and_keeps_those_of_others() {
        // label of a node, removed or not
        for (key, ours) in [
            ("kubevirt.io/schedulable", true),
            ("kubevirt.io/cpumanager", true),
            ("cpumanager", true),
            ("kubevirt.io/realtime", true),
            ("kubevirt.io/sev-snp", true),
            ("kubevirt.io/s390-pv", true),
            ("kubevirt.io/vm-arch-arm64", true),
            ("cpu-model.node.kubevirt.io/Skylake", true),
            ("cpu-model-migration.node.kubevirt.io/Skylake", true),
            ("cpu-feature.node.kubevirt.io/aes", true),
            ("cpu-timer.node.kubevirt.io/tsc-frequency", true),
            ("hyperv.node.kubevirt.io/synic", true),
            ("host-model-cpu.node.kubevirt.io/Skylake", true),
            ("machine-type.node.kubevirt.io/q35", true),
            ("scheduling.node.kubevirt.io/tsc-frequency-2000", true),
            ("node-labeller.kubevirt.io/obsolete-host-model", true),
            ("cdi.kubevirt.io/x", false),
            ("containerized-data-importer.kubevirt.io", false),
            ("containerized-data-importer.kubevirt.io/x", false),
            ("forklift.kubevirt.io/y", false),
            ("hostpath.kubevirt.io/pool", false),
            ("kubevirt.io/of-another-project", false),
            ("scheduling.node.kubevirt.io/x", false),
            ("cpu-model.node.kubevirt.io", false),
            ("kubernetes.io/hostname", false),
            ("notkubevirt.io/schedulable", false),
            ("kubevirt.io.example.com/schedulable", false),
            ("node-labeller.kubevirt.io/skip-node", false),
        ] {
            let patch = ours.then(|| json!({"metadata": {"labels": {key: null}, "annotations": {}}}));
            assert_eq!(unmarked(&map(&[key]), &map(&[])), patch, "{key}");
        }
        for (key, ours) in [
            ("kubevirt.io/heartbeat", true),
            ("node-labeller.kubevirt.io/skip-node", false),
            ("cdi.kubevirt.io/x", false),
            ("forklift.kubevirt.io/y", false),
            ("example.com/a", false),
        ] {
            let patch = ours.then(|| json!({"metadata": {"labels": {}, "annotations": {key: null}}}));
            assert_eq!(unmarked(&map(&[]), &map(&[key])), patch, "{key}");
        }
    }

    #[test]
    fn foreign_finalizers_stay() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let foreign = [
            "example.com/a",
            "cdi.kubevirt.io/dataVolumeFinalizer",
            "forklift.kubevirt.io/y",
            "snapshot.kubevirt.io/vmsnapshot-vm-protection",
            "kubevirt.io/of-another-project",
        ];
        assert_eq!(released(&names(&foreign), None), None);
        assert_eq!(released(&[], None), None);
        let ours = [
            "kubevirt.io/virtualMachineControllerFinalize",
            "kubevirt.io/foregroundDeleteVirtualMachine",
            "foregroundDeleteVirtualMachine",
            "kubevirt.io/migrationJobFinalize",
            "kubevirt.io/foregroundDeleteKubeVirt",
        ];
        assert_eq!(
            released(&names(&[ours.as_slice(), foreign.as_slice()].concat()), Some("7".into())),
            Some(json!({"metadata": {"finalizers": foreign, "resourceVersion": "7"}}))
        );
    }
}
