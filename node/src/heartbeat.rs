//! The sign of life of the agent and the labels of its node, in one patch.
//!
//! Each minute the annotation `kubevirt.io/heartbeat` gets the time; virt-controller takes the node out of scheduling
//! when it grows old. The same patch carries changes of labels, which is rare. `kubevirt.io/schedulable` becomes
//! `true` when kubelet knows the device plugins for the first time and is not taken back by the agent: that devices
//! cannot be used for a while is said by their health.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use api::{
    config::ClusterConfig,
    constants::{annotation, label},
};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use process::config::ConfigHandle;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    device_plugin::{self, Offers},
    labels::{self, Capabilities, Surroundings},
    safe_dir::{Error as PathError, SafeDir, Stat},
};

/// Time between signs of life.
const INTERVAL: Duration = Duration::from_secs(60);
/// Longest wait for the cluster configuration before the first sign of life.
const CONFIGURATION_WAIT: Duration = Duration::from_secs(10);
/// Longest call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Pauses after failed calls, the last one repeated: well within the time after which a node counts as lost.
const BACKOFF: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(15)];
/// Largest of libvirt's documents; that of the host has some tens of KiB.
const MAX_DOCUMENT: usize = 4 * 1024 * 1024;
/// Largest of kubelet's and the kernel's small files.
const MAX_STATE: usize = 1024 * 1024;
/// libvirt's documents in the directory that the init container writes to.
const DOCUMENTS: [&str; 3] = ["capabilities.xml", "virsh_domcapabilities.xml", "supported_features.xml"];

/// Feature gate for CPUs that kubelet pins.
const CPU_MANAGER_GATE: &str = "CPUManager";
/// Feature gate for guests of other architectures.
const CROSS_ARCHITECTURE_GATE: &str = "CrossArchitectureVirtualization";

/// Which node, and where what is said about it can be read.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the node.
    pub node: String,
    /// Where the init container leaves what libvirt says.
    pub labeller_dir: PathBuf,
    /// kubelet's directory.
    pub kubelet_dir: PathBuf,
}

/// Keeps sign of life and labels up to date until `stop`.
pub async fn run(
    config: Config,
    client: Client,
    mut cluster: ConfigHandle,
    mut offers: watch::Receiver<Offers>,
    stop: CancellationToken,
) {
    let api: Api<Node> = Api::all(client);
    let mut documents = Documents::default();
    let mut observed: Option<ObjectMeta> = None;
    let mut failures = 0;
    let mut due = Instant::now();
    // Labels that depend on the configuration should not change a moment after the start; a node whose agent cannot
    // read the configuration is alive all the same.
    let _ = timeout(CONFIGURATION_WAIT, cluster.read_once()).await;
    loop {
        let now = Instant::now();
        let capabilities = documents.read(&config.labeller_dir);
        let surroundings = surroundings(&cluster.current(), &config.kubelet_dir);
        let schedulable = device_plugin::all_known(&offers.borrow_and_update());
        let beat = async {
            let current = match observed.take() {
                Some(metadata) => metadata,
                None => api.get_metadata(&config.node).await?.metadata,
            };
            let time = (due <= now).then(Timestamp::now);
            let Some(patch) = decide(&current, capabilities, &surroundings, schedulable, time) else {
                return Ok(current);
            };
            let patched = api.patch_metadata(&config.node, &PatchParams::default(), &Patch::Merge(patch)).await?;
            Ok::<_, kube::Error>(patched.metadata)
        };
        let outcome = tokio::select! {
            () = stop.cancelled() => return,
            outcome = timeout(CALL_TIMEOUT, beat) => outcome,
        };
        let pause = match outcome {
            Ok(Ok(metadata)) => {
                observed = Some(metadata);
                failures = 0;
                if due <= now {
                    due = now + INTERVAL;
                }
                due
            }
            failed => {
                let pause = BACKOFF[failures.min(BACKOFF.len() - 1)];
                failures += 1;
                match failed {
                    Ok(Err(error)) => tracing::warn!(%error, "heartbeat failed"),
                    _ => tracing::warn!("heartbeat failed: no answer in time"),
                }
                now + pause
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep_until(pause) => {}
            () = cluster.changed() => {}
            () = device_plugin::changed(&mut offers) => {}
        }
    }
}

/// The patch that makes the node's metadata what it should be; `None` if there is nothing to say. `time` is given when
/// a sign of life is due.
fn decide(
    current: &ObjectMeta,
    capabilities: Option<&Capabilities>,
    surroundings: &Surroundings,
    schedulable: bool,
    time: Option<Timestamp>,
) -> Option<Value> {
    let empty = BTreeMap::new();
    let labels = current.labels.as_ref().unwrap_or(&empty);
    let annotations = current.annotations.as_ref().unwrap_or(&empty);
    let mut changes = match capabilities {
        Some(capabilities) if !annotations.contains_key(annotation::SKIP_NODE) => {
            let wanted = labels::labels(capabilities, surroundings);
            labels::changes(labels, &wanted)
        }
        // Nothing is known, or nobody wants to know: the labels stay as they are.
        _ => BTreeMap::new(),
    };
    let mut switches = labels::switches(surroundings);
    if schedulable {
        switches.insert(label::SCHEDULABLE.to_owned(), "true".to_owned());
    }
    for (key, value) in switches {
        if labels.get(&key) != Some(&value) {
            changes.insert(key, Some(value));
        }
    }
    if changes.is_empty() && time.is_none() {
        return None;
    }
    let mut metadata = serde_json::Map::new();
    if !changes.is_empty() {
        metadata.insert("labels".to_owned(), json!(changes));
    }
    if let Some(time) = time {
        // As RFC 3339 without fractions: that is how readers parse it.
        let time = time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        metadata.insert("annotations".to_owned(), json!({annotation::HEARTBEAT: time}));
    }
    Some(json!({"metadata": metadata}))
}

/// libvirt's documents, parsed again only when they change.
#[derive(Default)]
struct Documents {
    stats: Option<[Option<Stat>; 3]>,
    capabilities: Option<Capabilities>,
}

impl Documents {
    fn read(&mut self, directory: &Path) -> Option<&Capabilities> {
        let stats = SafeDir::trusted(directory).map(|dir| DOCUMENTS.map(|name| dir.stat(name).ok()));
        match stats {
            Ok(stats) if self.stats.as_ref() == Some(&stats) => {}
            Ok(stats) => {
                self.stats = Some(stats);
                match parse(directory) {
                    Ok(capabilities) => self.capabilities = Some(capabilities),
                    Err(error) => {
                        let source = error.source().map(ToString::to_string);
                        tracing::error!(%error, source, "node labels are left as they are");
                    }
                }
            }
            Err(error) => tracing::error!(%error, "node labels are left as they are"),
        }
        self.capabilities.as_ref()
    }
}

fn parse(directory: &Path) -> Result<Capabilities, Box<dyn std::error::Error>> {
    let directory = SafeDir::trusted(directory)?;
    let [host, domain, features] = DOCUMENTS;
    let features = match directory.read_text(features, MAX_DOCUMENT) {
        Ok(text) => Some(text),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error.into()),
    };
    let (host, domain) = (directory.read_text(host, MAX_DOCUMENT)?, directory.read_text(domain, MAX_DOCUMENT)?);
    Ok(Capabilities::parse(&host, &domain, features.as_deref())?)
}

fn surroundings(cluster: &ClusterConfig, kubelet: &Path) -> Surroundings {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    Surroundings {
        architecture: architecture.to_owned(),
        obsolete_models: cluster.obsolete_cpu_models.clone(),
        realtime: realtime().unwrap_or(false),
        cpu_manager: cluster.enabled(CPU_MANAGER_GATE) && pins_cpus(kubelet).unwrap_or(false),
        cross_architecture: cluster.enabled(CROSS_ARCHITECTURE_GATE),
    }
}

/// Whether real-time tasks may use all of the CPU's time.
fn realtime() -> Result<bool, PathError> {
    let kernel = SafeDir::trusted(Path::new("/proc/sys/kernel"))?;
    Ok(kernel.read_text("sched_rt_runtime_us", 64)?.trim() == "-1")
}

/// Whether kubelet pins CPUs.
fn pins_cpus(kubelet: &Path) -> Result<bool, PathError> {
    let state = SafeDir::trusted(kubelet)?.read_bounded("cpu_manager_state", MAX_STATE)?;
    let policy = serde_json::from_slice::<Value>(&state).ok();
    Ok(policy.is_some_and(|state| state["policyName"] == "static"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_plugin::{Offer, Registration};

    fn metadata(labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> ObjectMeta {
        let map =
            |pairs: &[(&str, &str)]| Some(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        ObjectMeta { labels: map(labels), annotations: map(annotations), ..ObjectMeta::default() }
    }

    fn capabilities() -> Capabilities {
        let host = "<capabilities><guest><arch><machine>q35</machine></arch></guest></capabilities>";
        Capabilities::parse(host, "<domainCapabilities/>", None).unwrap()
    }

    #[test]
    fn a_new_node_gets_labels_and_heartbeat_in_one_patch() {
        let time = "2026-01-02T03:04:05.678Z".parse().unwrap();
        let patch =
            decide(&metadata(&[], &[]), Some(&capabilities()), &Surroundings::default(), true, Some(time)).unwrap();
        assert_eq!(
            patch,
            json!({"metadata": {
                "annotations": {"kubevirt.io/heartbeat": "2026-01-02T03:04:05Z"},
                "labels": {
                    "kubevirt.io/schedulable": "true",
                    "machine-type.node.kubevirt.io/q35": "true",
                    "kubevirt.io/cpumanager": "false",
                    "cpumanager": "false",
                },
            }})
        );
    }

    #[test]
    fn a_settled_node_is_only_told_the_time() {
        let settled = metadata(
            &[
                ("kubevirt.io/schedulable", "true"),
                ("machine-type.node.kubevirt.io/q35", "true"),
                ("kubevirt.io/cpumanager", "false"),
                ("cpumanager", "false"),
            ],
            &[],
        );
        let surroundings = Surroundings::default();
        assert_eq!(decide(&settled, Some(&capabilities()), &surroundings, true, None), None);
        let beat = decide(&settled, Some(&capabilities()), &surroundings, true, Some(Timestamp::UNIX_EPOCH)).unwrap();
        assert_eq!(beat, json!({"metadata": {"annotations": {"kubevirt.io/heartbeat": "1970-01-01T00:00:00Z"}}}));
        // Not registered for a while, or nothing known about the node: what was said stays.
        assert_eq!(decide(&settled, Some(&capabilities()), &surroundings, false, None), None);
        assert_eq!(decide(&settled, None, &surroundings, false, None), None);
    }

    #[test]
    fn a_node_that_was_taken_out_of_scheduling_comes_back() {
        let lost = metadata(
            &[("kubevirt.io/schedulable", "false"), ("kubevirt.io/cpumanager", "false"), ("cpumanager", "false")],
            &[("node-labeller.kubevirt.io/skip-node", "")],
        );
        let patch = decide(&lost, Some(&capabilities()), &Surroundings::default(), true, None).unwrap();
        assert_eq!(patch, json!({"metadata": {"labels": {"kubevirt.io/schedulable": "true"}}}));
        assert_eq!(decide(&lost, Some(&capabilities()), &Surroundings::default(), false, None), None);
    }

    #[test]
    fn stale_labels_are_removed() {
        let stale = metadata(
            &[
                ("cpu-model.node.kubevirt.io/Gone", "true"),
                ("machine-type.node.kubevirt.io/q35", "true"),
                ("kubevirt.io/cpumanager", "false"),
                ("cpumanager", "false"),
            ],
            &[],
        );
        let patch = decide(&stale, Some(&capabilities()), &Surroundings::default(), false, None).unwrap();
        assert_eq!(patch, json!({"metadata": {"labels": {"cpu-model.node.kubevirt.io/Gone": null}}}));
    }

    /// An API server with one node; tells of each patch.
    fn api_server(patches: tokio::sync::mpsc::UnboundedSender<Value>) -> Client {
        let node = std::sync::Arc::new(tokio::sync::Mutex::new(json!({
            "apiVersion": "meta.k8s.io/v1",
            "kind": "PartialObjectMetadata",
            "metadata": {"name": "node-1", "labels": {"kubernetes.io/arch": "amd64"}},
        })));
        let service = tower::service_fn(move |call: http::Request<kube::client::Body>| {
            let (node, patches) = (std::sync::Arc::clone(&node), patches.clone());
            async move {
                let (parts, body) = call.into_parts();
                assert_eq!(parts.uri.path(), "/api/v1/nodes/node-1");
                let accept = parts.headers["accept"].to_str().unwrap();
                assert!(accept.contains("PartialObjectMetadata"), "only metadata is asked for: {accept}");
                let mut node = node.lock().await;
                if parts.method == http::Method::PATCH {
                    assert_eq!(parts.headers["content-type"], "application/merge-patch+json");
                    let patch: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
                    json_patch::merge(&mut node, &patch);
                    patches.send(patch).unwrap();
                }
                let body = kube::client::Body::from(serde_json::to_vec(&*node).unwrap());
                Ok::<_, std::convert::Infallible>(http::Response::new(body))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn one_patch_says_that_the_agent_lives_and_another_that_devices_are_there() {
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        let (plugins, offers) = watch::channel(Offers::new());
        let stop = CancellationToken::new();
        let config = Config {
            node: "node-1".to_owned(),
            labeller_dir: "/nonexistent".into(),
            kubelet_dir: "/nonexistent".into(),
        };
        let cluster = ConfigHandle::fixed(ClusterConfig::default());
        let running = tokio::spawn(run(config, api_server(sender), cluster, offers, stop.clone()));
        let first = timeout(Duration::from_secs(5), patches.recv()).await.unwrap().unwrap();
        assert!(first["metadata"]["annotations"]["kubevirt.io/heartbeat"].is_string(), "{first}");
        assert_eq!(first["metadata"]["labels"]["kubevirt.io/schedulable"], Value::Null);
        let offered = |registration| {
            let tun = Offer { registration, healthy: Some(true) };
            Offers::from([("devices.kubevirt.io/tun".to_owned(), tun)])
        };
        plugins.send_replace(offered(Registration::Done));
        let second = timeout(Duration::from_secs(5), patches.recv()).await.unwrap().unwrap();
        assert_eq!(second, json!({"metadata": {"labels": {"kubevirt.io/schedulable": "true"}}}));
        // Devices that come and go change nothing on the node.
        plugins.send_replace(offered(Registration::Awaited));
        plugins.send_replace(offered(Registration::Done));
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(patches.try_recv().is_err());
        stop.cancel();
        timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    }
}
