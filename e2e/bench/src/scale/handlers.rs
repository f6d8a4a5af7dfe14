//! Simulates virt-handler on the simulated nodes: heartbeats, and the status writes for VMIs.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, kubeconfig};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::{sync::Semaphore, task::JoinSet};

use super::nodes::Nodes;

/// Interval of heartbeats, as of virt-handler.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Concurrent status writes.
const WRITES: usize = 64;
/// The service account of virt-handler.
const USER: &str = "system:serviceaccount:kubevirt:kubevirt-handler";
/// Groups of every service account of the namespace.
const GROUPS: [&str; 3] = ["system:serviceaccounts", "system:serviceaccounts:kubevirt", "system:authenticated"];

/// One client for each node, with the identity of that node's virt-handler.
type Clients = BTreeMap<String, Client>;

/// The simulated virt-handlers. They end with this value.
pub(super) struct Handlers {
    namespace: String,
    clients: Arc<Clients>,
    api: Api<DynamicObject>,
    _tasks: JoinSet<()>,
}

impl Handlers {
    /// Starts the virt-handlers of all nodes.
    pub(super) async fn start(story: &Story, nodes: &Nodes) -> Result<Self> {
        let mut clients = Clients::new();
        for node in &nodes.names {
            clients.insert(node.clone(), client(node).await?);
        }
        let clients = Arc::new(clients);
        let mut tasks = JoinSet::new();
        for (node, client) in clients.iter() {
            tasks.spawn(heartbeats(node.clone(), client.clone()));
        }
        tasks.spawn(follow(story.api("vmi"), story.api("Pod"), story.namespace.clone(), clients.clone()));
        Ok(Self { namespace: story.namespace.clone(), clients, api: story.api("vmi"), _tasks: tasks })
    }

    /// Changes the status of one VMI as a report of the guest agent does.
    pub(super) async fn change(&self, name: &str, version: u32) -> Result<()> {
        let vmi = self.api.get(name).await?;
        let node = vmi.data["status"]["nodeName"].as_str().context("the VMI has no node")?;
        let client = self.clients.get(node).context("the VMI is on another node")?;
        let patch = json!({"status": {"guestOSInfo": {"name": "Test", "kernelRelease": format!("6.{version}")}}});
        write(client, &self.namespace, name, &patch).await
    }
}

/// Returns a client with the identity of a node's virt-handler.
async fn client(node: &str) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig())?;
    let mut config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    config.auth_info.impersonate = Some(USER.to_owned());
    config.auth_info.impersonate_groups = Some(GROUPS.map(str::to_owned).to_vec());
    let name = http::HeaderName::from_static("impersonate-extra-authentication.kubernetes.io%2fnode-name");
    config.headers.push((name, http::HeaderValue::from_str(node)?));
    Ok(Client::try_from(config)?)
}

async fn heartbeats(node: String, client: Client) {
    let api: Api<Node> = Api::all(client);
    loop {
        let patch = json!({"metadata": {"annotations": {"kubevirt.io/heartbeat": now()}}});
        if let Err(error) = api.patch(&node, &PatchParams::default(), &Patch::Merge(&patch)).await {
            eprintln!("heartbeat of {node}: {error}");
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Watches VMIs and pods, and writes the statuses of VMIs. A VMI runs once its pod does: the launcher in it starts the guest.
async fn follow(vmis: Api<DynamicObject>, pods: Api<DynamicObject>, namespace: String, clients: Arc<Clients>) {
    let permits = Arc::new(Semaphore::new(WRITES));
    let mut writes = JoinSet::new();
    let watch = |api: Api<DynamicObject>| daemon::watch::events(api, watcher::Config::default()).applied_objects();
    let (vmis, pods) = (watch(vmis).map(|vmi| vmi.map(Changed::Vmi)), watch(pods).map(|pod| pod.map(Changed::Pod)));
    let mut events = stream::select(vmis.boxed(), pods.boxed());
    let mut known = Known::default();
    while let Some(event) = events.next().await {
        while writes.try_join_next().is_some() {}
        let vmi = match event {
            Ok(Changed::Vmi(vmi)) => known.vmi_changed(vmi),
            Ok(Changed::Pod(pod)) => known.pod_changed(&pod),
            Err(error) => {
                eprintln!("watch: {error}");
                continue;
            }
        };
        let Some((node, patch)) = vmi.as_ref().and_then(status_patch) else { continue };
        let Some(client) = clients.get(&node).cloned() else { continue };
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let (namespace, name) = (namespace.clone(), vmi.map(|vmi| vmi.name_any()).unwrap_or_default());
        writes.spawn(async move {
            // A new event of the watch follows a conflict.
            if let Err(error) = write(&client, &namespace, &name, &patch).await
                && !is_outdated(&error)
            {
                eprintln!("status of {name}: {error:#}");
            }
            drop(permit);
        });
    }
}

enum Changed {
    Vmi(DynamicObject),
    Pod(DynamicObject),
}

/// VMIs that wait for their pods, and UIDs of VMIs whose pods run.
#[derive(Default)]
struct Known {
    waiting: HashMap<String, DynamicObject>,
    started: HashSet<String>,
}

impl Known {
    /// Returns the VMI unless it waits for its pod.
    fn vmi_changed(&mut self, vmi: DynamicObject) -> Option<DynamicObject> {
        let uid = vmi.uid()?;
        if vmi.metadata.deletion_timestamp.is_some() || self.started.contains(&uid) {
            return Some(vmi);
        }
        self.waiting.insert(uid, vmi);
        None
    }

    /// Returns the VMI that waited for the pod.
    fn pod_changed(&mut self, pod: &DynamicObject) -> Option<DynamicObject> {
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true))?.uid.clone();
        if pod.data["status"]["phase"] != "Running" || !self.started.insert(owner.clone()) {
            return None;
        }
        self.waiting.remove(&owner)
    }
}

/// Returns the node of a VMI and the patch that its virt-handler would write once the pod runs.
fn status_patch(vmi: &DynamicObject) -> Option<(String, Value)> {
    let status = &vmi.data["status"];
    let node = status["nodeName"].as_str()?.to_owned();
    let phases: &[&str] = match (status["phase"].as_str()?, vmi.metadata.deletion_timestamp.is_some()) {
        ("Scheduling", false) => &["Scheduled", "Running"],
        ("Running", true) => &["Succeeded"],
        _ => return None,
    };
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut conditions = list(&status["conditions"]);
    let mut transitions = list(&status["phaseTransitionTimestamps"]);
    transitions.extend(phases.iter().map(|phase| json!({"phase": phase, "phaseTransitionTimestamp": now()})));
    if phases.contains(&"Running") {
        conditions.push(json!({
            "type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable", "lastProbeTime": null,
            "lastTransitionTime": null, "message": "cannot migrate VMI: simulated"}));
    }
    let patch = json!({
        "metadata": {"resourceVersion": vmi.resource_version()},
        "status": {
            "phase": phases.last(), "phaseTransitionTimestamps": transitions, "conditions": conditions,
            "interfaces": [{"name": "default", "ipAddress": "10.0.2.2", "ipAddresses": ["10.0.2.2"],
                "mac": "02:00:00:00:00:01", "infoSource": "domain", "queueCount": 1}],
            "machine": {"type": "pc-q35-10.0"},
        },
    });
    Some((node, patch))
}

async fn write(client: &Client, namespace: &str, name: &str, patch: &Value) -> Result<()> {
    let api: Api<api::VirtualMachineInstance> = Api::namespaced(client.clone(), namespace);
    let params = PatchParams { field_manager: Some("virt-handler".into()), ..PatchParams::default() };
    // Metadata only: parsing the whole VMI costs as much as the write.
    api.patch_metadata(name, &params, &Patch::Merge(patch)).await?;
    Ok(())
}

/// Returns true if the object was changed or deleted since it was read.
fn is_outdated(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<kube::Error>(), Some(kube::Error::Api(status)) if matches!(status.code, 404 | 409))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_vmi_runs_once_its_pod_does_whichever_is_seen_first() {
        let vmi = || {
            object(json!({"metadata": {"name": "a", "uid": "u"}, "status": {"phase": "Scheduling", "nodeName": "n"}}))
        };
        let pod = |phase: &str| {
            let owners = json!([{"apiVersion": "v1", "kind": "V", "name": "a", "uid": "u", "controller": true}]);
            object(json!({"metadata": {"ownerReferences": owners}, "status": {"phase": phase}}))
        };
        let mut known = Known::default();
        assert!(known.vmi_changed(vmi()).is_none());
        assert!(known.pod_changed(&pod("Pending")).is_none());
        let (node, patch) = status_patch(&known.pod_changed(&pod("Running")).unwrap()).unwrap();
        assert_eq!((node.as_str(), &patch["status"]["phase"]), ("n", &json!("Running")));
        assert!(known.pod_changed(&pod("Running")).is_none());
        let mut known = Known::default();
        assert!(known.pod_changed(&pod("Running")).is_none());
        assert!(known.vmi_changed(vmi()).is_some());
    }
}
