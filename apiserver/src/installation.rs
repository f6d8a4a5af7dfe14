//! What the chart's hooks do, as commands of virt-api.
//!
//! | hook | command | does |
//! |---|---|---|
//! | pre-install, pre-upgrade | `apply-definitions` | refuses a configuration that is not carried out, which no webhook sees on the first install; brings the definitions of the kinds up to date, which Helm itself does on the first install only |
//! | pre-delete | `check-uninstall` | refuses while machines run, since nothing would look after them any more |
//! | post-delete | `clean-up` | removes what the processes made: certificates, the webhooks' path segment, the lease, labels of nodes, finalizers that nobody would honour |
//!
//! The objects of users stay: definitions are kept, and with them every VM that is not running.

use std::{collections::BTreeMap, fmt::Debug, time::Duration};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet,
    constants::{KUBEVIRT_NAME, annotation, component, finalizer, label},
    kubevirt::spec::KubeVirtSpec,
    tls, webhook_path,
};
use k8s_openapi::{
    api::{
        certificates::v1::CertificateSigningRequest,
        coordination::v1::Lease,
        core::v1::{ConfigMap, Node, Pod, Secret},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// Objects fetched in one call.
const PAGE: u32 = 500;
/// Most machines named in a refusal.
const MAX_NAMED: usize = 10;
/// Longest wait for the processes to be gone before what they keep is removed.
const GONE_TIMEOUT: Duration = Duration::from_secs(90);
/// Field manager of the definitions.
const MANAGER: &str = "ferrovirt";

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum InstallationError {
    /// No client for the API server.
    #[error("no client for the API server")]
    Client(#[from] process::client::ClientError),
    /// The configuration cannot be used, or is not carried out.
    #[error("the value kubevirt.configuration cannot be had: {0}")]
    Configuration(String),
    /// The definitions cannot be made.
    #[error("definitions cannot be made: {0}")]
    Definitions(String),
    /// A call to the API server failed.
    #[error("{what}: {source}")]
    Call {
        /// What was being done.
        what: String,
        /// What the API server said.
        source: kube::Error,
    },
    /// Machines run.
    #[error(
        "{count} virtual machines are running, and nothing would look after them any more: {}{}. Stop them and uninstall \
         again, or leave them running on their own with `helm uninstall --no-hooks`. To keep the installation, which Helm \
         shows as uninstalling now: `{keep}`", named.join(", "), if named.len() < *count { ", ..." } else { "" }
    )]
    Running {
        /// How many.
        count: usize,
        /// Some of them.
        named: Vec<String>,
        /// The command that undoes the attempt.
        keep: String,
    },
    /// A process did not go away.
    #[error("{0} is still running")]
    NotGone(String),
}

/// Refuses what the webhook would refuse, of a configuration as JSON. What cannot be read is the API server's to refuse.
///
/// # Errors
/// When the configuration cannot be used, or is not carried out.
pub fn check_configuration(text: &str) -> Result<(), InstallationError> {
    let Ok(configuration) = serde_json::from_str(text) else { return Ok(()) };
    let object = KubeVirt::new(KUBEVIRT_NAME, KubeVirtSpec { configuration, ..KubeVirtSpec::default() });
    let causes = admission::kubevirt::usable(&object);
    if causes.is_empty() {
        return Ok(());
    }
    let messages: Vec<&str> = causes.as_slice().iter().map(|cause| cause.message.as_str()).collect();
    Err(InstallationError::Configuration(messages.join("; ")))
}

/// Brings the definitions up to date. Those that are so already, as after a first installation, are not written: it takes
/// the API server seconds to digest one.
pub async fn apply_definitions() -> Result<(), InstallationError> {
    let api = Api::<CustomResourceDefinition>::all(process::client::connect().await?);
    let definitions = api::crds::all().map_err(|error| InstallationError::Definitions(error.to_string()))?;
    for wanted in definitions {
        let name = wanted.name_any();
        let live = api.get_opt(&name).await.map_err(call(format!("cannot read the definition {name}")))?;
        if live.is_some_and(|live| is_current(&live, &wanted)) {
            tracing::info!(name, "definition is up to date");
            continue;
        }
        api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&wanted))
            .await
            .map_err(call(format!("cannot apply the definition {name}")))?;
        tracing::info!(name, "definition was brought up to date");
    }
    Ok(())
}

/// Whether a definition in the cluster says what is wanted. The schemas must be the same; outside of them the API server
/// fills in defaults.
fn is_current(live: &CustomResourceDefinition, wanted: &CustomResourceDefinition) -> bool {
    let (live_names, names) = (&live.spec.names, &wanted.spec.names);
    live.spec.versions == wanted.spec.versions
        && live.spec.scope == wanted.spec.scope
        && live_names.short_names == names.short_names
        && live_names.categories == names.categories
        && wanted.labels().iter().all(|(key, value)| live.labels().get(key) == Some(value))
}

/// Refuses while machines run. `keep` is the command that undoes the attempt to uninstall: Helm marks a release before it
/// asks its hooks, and only a rollback to the revision takes the mark away.
pub async fn check_uninstall(keep: String) -> Result<(), InstallationError> {
    let client = process::client::connect().await?;
    let mut running = Vec::new();
    for_each(&Api::<VirtualMachineInstance>::all(client), |vmi| {
        if is_running(vmi) {
            running.push(format!("{}/{}", vmi.namespace().unwrap_or_default(), vmi.name_any()));
        }
    })
    .await?;
    if running.is_empty() {
        return Ok(());
    }
    let count = running.len();
    running.truncate(MAX_NAMED);
    Err(InstallationError::Running { count, named: running, keep })
}

fn is_running(vmi: &VirtualMachineInstance) -> bool {
    !vmi.status.as_ref().and_then(|status| status.phase.as_ref()).is_some_and(api::enums::VmiPhase::is_final)
}

/// Removes what the processes made and kept.
pub async fn clean_up() -> Result<(), InstallationError> {
    let client = process::client::connect().await?;
    let namespace = process::client::install_namespace();
    // Whoever still runs would put back what is taken away.
    for name in [component::VIRT_CONTROLLER, component::VIRT_HANDLER] {
        wait_until_gone(&client, &namespace, name).await?;
    }
    let certificates = [tls::CA_SECRET, tls::API_SERVER_SECRET, tls::API_CLIENT_SECRET, tls::CONTROLLER_SECRET];
    for name in certificates.into_iter().chain([webhook_path::SECRET]) {
        delete::<Secret>(&client, &namespace, name).await?;
    }
    delete::<ConfigMap>(&client, &namespace, tls::CA_CONFIG_MAP).await?;
    delete::<Lease>(&client, &namespace, component::VIRT_CONTROLLER).await?;
    delete_requests(&client).await?;
    release::<VirtualMachineInstance>(&client).await?;
    release::<VirtualMachine>(&client).await?;
    release::<VirtualMachineInstanceReplicaSet>(&client).await?;
    release::<KubeVirt>(&client).await?;
    clean_nodes(&client).await
}

async fn wait_until_gone(client: &Client, namespace: &str, name: &str) -> Result<(), InstallationError> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let selector = ListParams::default().labels(&format!("{}={name}", label::APP)).limit(1);
    let until = Instant::now() + GONE_TIMEOUT;
    loop {
        let left = pods.list_metadata(&selector).await.map_err(call(format!("cannot list pods of {name}")))?;
        if left.items.is_empty() {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(InstallationError::NotGone(name.to_owned()));
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn delete<K>(client: &Client, namespace: &str, name: &str) -> Result<(), InstallationError>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    match Api::<K>::namespaced(client.clone(), namespace).delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(call(format!("cannot delete {} {name}", K::kind(&())))(error)),
    }
}

/// Removes the certificate requests of the agents.
async fn delete_requests(client: &Client) -> Result<(), InstallationError> {
    let ours = ListParams::default().fields(&format!("spec.signerName={}", tls::HANDLER_SIGNER));
    Api::<CertificateSigningRequest>::all(client.clone())
        .delete_collection(&DeleteParams::default(), &ours)
        .await
        .map(|_| ())
        .map_err(call("cannot delete the certificate requests of the agents".to_owned()))
}

/// Takes our finalizers off all objects of a kind, so that their owners can delete them.
async fn release<K>(client: &Client) -> Result<(), InstallationError>
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

/// The patch that leaves foreign finalizers only; `None` if there are no others.
fn released(finalizers: &[String], resource_version: Option<String>) -> Option<Value> {
    let foreign = finalizers.iter().filter(|name| !finalizer::ALL.contains(&name.as_str())).collect::<Vec<_>>();
    (foreign.len() < finalizers.len())
        .then(|| json!({"metadata": {"finalizers": foreign, "resourceVersion": resource_version}}))
}

async fn clean_nodes(client: &Client) -> Result<(), InstallationError> {
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

/// The patch that takes our labels and annotations off a node; `None` if it has none.
fn unmarked(labels: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> Option<Value> {
    fn removed<'a>(keys: impl Iterator<Item = &'a String>) -> serde_json::Map<String, Value> {
        keys.map(|key| (key.clone(), Value::Null)).collect()
    }
    let labels = removed(labels.keys().filter(|key| label::is_on_nodes(key)));
    let annotations = removed(annotations.keys().filter(|key| annotation::ON_NODES.contains(&key.as_str())));
    (!labels.is_empty() || !annotations.is_empty())
        .then(|| json!({"metadata": {"labels": labels, "annotations": annotations}}))
}

/// Looks at all objects, page by page. A kind that is not defined has none.
async fn for_each<K>(api: &Api<K>, mut look: impl FnMut(&K)) -> Result<(), InstallationError>
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
        page.items.iter().for_each(&mut look);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

fn call(what: String) -> impl FnOnce(kube::Error) -> InstallationError {
    move |source| InstallationError::Call { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(keys: &[&str]) -> BTreeMap<String, String> {
        keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect()
    }

    #[test]
    fn a_configuration_that_the_webhook_would_refuse_is_not_installed() {
        for text in ["{}", r#"{"memBalloonStatsPeriod": 0}"#, "no JSON", r#"{"memBalloonStatsPeriod": "often"}"#] {
            assert!(check_configuration(text).is_ok(), "{text}");
        }
        let refusal = check_configuration(r#"{"imagePullPolicy": "Never ever", "ksmConfiguration": {}}"#).unwrap_err();
        let refusal = refusal.to_string();
        assert!(refusal.contains("imagePullPolicy \"Never ever\" is none of"), "{refusal}");
        assert!(refusal.contains("; spec.configuration.ksmConfiguration is not supported yet"), "{refusal}");
    }

    #[test]
    fn node_loses_our_keys_and_keeps_those_of_others() {
        // label of a node, and whether it is removed
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
            ("kubevirt.io/of-somebody-else", false),
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
    fn definition_is_current_when_only_defaults_of_the_server_differ() {
        let wanted = api::crds::all().unwrap().remove(0);
        let mut live = wanted.clone();
        live.metadata.uid = Some("u1".into());
        live.metadata.labels.get_or_insert_default().insert("a".into(), "b".into());
        live.spec.names.list_kind = Some("List".into());
        assert!(is_current(&live, &wanted));
        let mut older = live.clone();
        older.spec.versions.truncate(1);
        assert!(!is_current(&older, &wanted));
        live.metadata.labels = None;
        assert!(!is_current(&live, &wanted));
    }

    #[test]
    fn foreign_finalizers_stay() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let foreign = [
            "example.com/a",
            "cdi.kubevirt.io/dataVolumeFinalizer",
            "forklift.kubevirt.io/y",
            "snapshot.kubevirt.io/vmsnapshot-vm-protection",
            "kubevirt.io/of-somebody-else",
        ];
        assert_eq!(released(&names(&foreign), None), None);
        assert_eq!(released(&[], None), None);
        let ours = [
            "kubevirt.io/virtualMachineControllerFinalize",
            "kubevirt.io/foregroundDeleteVirtualMachine",
            "foregroundDeleteVirtualMachine",
            "kubevirt.io/migrationJobFinalize",
        ];
        assert_eq!(
            released(&names(&[ours.as_slice(), foreign.as_slice()].concat()), Some("7".into())),
            Some(json!({"metadata": {"finalizers": foreign, "resourceVersion": "7"}}))
        );
    }

    #[test]
    fn machine_runs_until_it_is_over() {
        let vmi = |status: Value| -> VirtualMachineInstance {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"},
                "spec": {"domain": {"devices": {}}}, "status": status,
            }))
            .unwrap()
        };
        for (phase, running) in
            [("Pending", true), ("Running", true), ("Unknown", true), ("Succeeded", false), ("Failed", false)]
        {
            assert_eq!(is_running(&vmi(json!({"phase": phase}))), running, "{phase}");
        }
        assert!(is_running(&vmi(json!({}))));
    }

    #[test]
    fn refusal_names_some_machines_and_the_way_out() {
        let error = InstallationError::Running {
            count: 12,
            named: vec!["a/b".into(), "a/c".into()],
            keep: "helm rollback r 1".into(),
        };
        let text = error.to_string();
        assert!(text.starts_with("12 virtual machines are running"), "{text}");
        assert!(text.contains("a/b, a/c, ..."), "{text}");
        assert!(text.contains("--no-hooks"), "{text}");
        assert!(text.contains("`helm rollback r 1`"), "{text}");
    }
}
