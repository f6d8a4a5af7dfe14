//! Heartbeat and labels of the node, in one patch.
//!
//! Each minute the annotation `kubevirt.io/heartbeat` is set to the time; virt-controller makes the node unschedulable when
//! it is too old. The same patch contains changed labels, which are rare. Labels that somebody changes or removes come back within
//! seconds: the metadata of this node alone is watched, without its status. `kubevirt.io/schedulable` is set to `true` when
//! kubelet has registered the device plugins for the first time; virt-handler never resets it, because the health of the
//! devices shows that they cannot be used.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    pin::pin,
    time::Duration,
};

use api::constants::{annotation, label};
use daemon::{backoff, config::ConfigHandle};
use futures::{FutureExt, Stream, StreamExt};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{PartialObjectMeta, Patch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use prometheus::IntGaugeVec;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    facts::{Documents, node_facts},
    ksm::{self, Ksm},
    labels::{self, Capabilities, NodeFacts},
};
use crate::devices::plugin::{self, Offers};

/// Interval of heartbeats.
const INTERVAL: Duration = Duration::from_secs(60);
/// Pause before changes of the node by others are looked at again.
const QUIET: Duration = Duration::from_secs(5);
/// Most versions of the node that are skipped at a time.
const MOST_VERSIONS: usize = 1000;
/// Longest wait for the cluster configuration before the first heartbeat.
const CONFIGURATION_WAIT: Duration = Duration::from_secs(10);
/// Longest call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// First and longest pause after failed calls. Well below the age at which a node counts as lost.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// The node and the sources of its labels.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Name of the node.
    pub node: String,
    /// Metric of the deprecated machine types, with the labels `machine_type` and `node`.
    pub deprecated: IntGaugeVec,
    /// Directory of libvirt's documents.
    pub labeller_dir: PathBuf,
    /// kubelet's directory.
    pub kubelet_dir: PathBuf,
    /// The kernel's directory for same-page merging.
    pub ksm_dir: PathBuf,
}

/// Directory of the node's memory in numbers.
const PROC: &str = "/proc";

/// Keeps heartbeat and labels up to date until `stop`.
pub(crate) async fn run(
    config: Config,
    client: Client,
    cluster: ConfigHandle,
    offers: watch::Receiver<Offers>,
    stop: CancellationToken,
) {
    let (api, nodes): (Api<Node>, Api<PartialObjectMeta<Node>>) = (Api::all(client.clone()), Api::all(client));
    let own = watcher::Config::default().fields(&format!("metadata.name={}", config.node));
    let versions = daemon::watch::events(nodes, own).applied_objects();
    let versions = versions.filter_map(|version| {
        if let Err(error) = &version {
            tracing::debug!(%error, "watch of the node's metadata was interrupted");
        }
        std::future::ready(version.ok().map(|node| node.metadata))
    });
    keep(config, api, versions, cluster, offers, stop).await;
}

/// Keeps heartbeat and labels up to date. `versions` are those of the node's metadata as they change.
async fn keep(
    config: Config,
    api: Api<Node>,
    versions: impl Stream<Item = ObjectMeta>,
    mut cluster: ConfigHandle,
    mut offers: watch::Receiver<Offers>,
    stop: CancellationToken,
) {
    let mut versions = pin!(versions);
    let mut documents = Documents::default();
    let mut ksm = Ksm::new(config.ksm_dir.clone(), PROC.into());
    let mut observed: Option<ObjectMeta> = None;
    let mut deprecated = BTreeSet::new();
    let mut failures = 0_u32;
    let mut due = Instant::now();
    // Labels that depend on the configuration should not change right after the start. The heartbeat does not need the
    // configuration.
    let _ = timeout(CONFIGURATION_WAIT, cluster.read_once()).await;
    loop {
        let now = Instant::now();
        let capabilities = documents.read(&config.labeller_dir);
        if let Some(capabilities) = capabilities
            && capabilities.deprecated_machine_types() != &deprecated
        {
            deprecated.clone_from(capabilities.deprecated_machine_types());
            show_deprecated(&config, &deprecated);
        }
        let settings = cluster.current();
        let facts = node_facts(&settings, &config.kubelet_dir);
        let schedulable = plugin::all_known(&offers.borrow_and_update());
        let beat = async {
            let current = match observed.take() {
                Some(metadata) => metadata,
                None => api.get_metadata(&config.node).await?.metadata,
            };
            let time = (due <= now).then(Timestamp::now);
            let ksm = ksm.follow(settings.ksm_nodes.as_ref(), &current, now);
            let Some(patch) = decide(&current, capabilities, &facts, schedulable, ksm, time) else {
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
                ksm.due().map_or(due, |adjustment| adjustment.min(due))
            }
            failed => {
                failures = failures.saturating_add(1);
                match failed {
                    Ok(Err(error)) => tracing::warn!(%error, "heartbeat failed"),
                    _ => tracing::warn!("heartbeat failed: no answer in time"),
                }
                now + backoff::pause(BACKOFF, failures)
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep_until(pause) => {}
            () = cluster.changed() => {}
            () = plugin::changed(&mut offers) => {}
            version = changed(&mut versions, now + QUIET) => observed = Some(version),
        }
    }
}

/// Returns the next version of the node, not before `from`, and the newest if there are several.
async fn changed(versions: &mut (impl Stream<Item = ObjectMeta> + Unpin), from: Instant) -> ObjectMeta {
    sleep_until(from).await;
    let Some(mut version) = versions.next().await else { return std::future::pending().await };
    for _ in 0..MOST_VERSIONS {
        let Some(Some(newer)) = versions.next().now_or_never() else { break };
        version = newer;
    }
    version
}

/// Shows the deprecated machine types in the metric.
fn show_deprecated(config: &Config, machine_types: &BTreeSet<String>) {
    config.deprecated.reset();
    for machine_type in machine_types {
        config.deprecated.with_label_values(&[machine_type, &config.node]).set(1);
    }
}

/// Returns the patch of the node's metadata; `None` if nothing changes. `time` is set when a heartbeat is due.
fn decide(
    current: &ObjectMeta,
    capabilities: Option<&Capabilities>,
    facts: &NodeFacts,
    schedulable: bool,
    ksm: ksm::Shown,
    time: Option<Timestamp>,
) -> Option<Value> {
    let empty = BTreeMap::new();
    let labels = current.labels.as_ref().unwrap_or(&empty);
    let annotations = current.annotations.as_ref().unwrap_or(&empty);
    let mut changes = match capabilities {
        Some(capabilities) if !annotations.contains_key(annotation::SKIP_NODE) => {
            let desired = labels::labels(capabilities, facts);
            labels::changes(labels, &desired)
        }
        // Unknown capabilities, or labels are disabled by the annotation: the labels do not change.
        _ => BTreeMap::new(),
    };
    let mut switches = labels::switches(facts);
    switches.insert(label::KSM_ENABLED.to_owned(), ksm.enabled.to_string());
    if schedulable {
        switches.insert(label::SCHEDULABLE.to_owned(), "true".to_owned());
    }
    for (key, value) in switches {
        if labels.get(&key) != Some(&value) {
            changes.insert(key, Some(value));
        }
    }
    // RFC 3339 without fractions, as readers expect.
    let time = time.map(|time| (annotation::HEARTBEAT, time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
    let was_managed = annotations.get(annotation::KSM_HANDLER_MANAGED).is_some_and(|managed| managed == "true");
    let managed = (ksm.managed != was_managed).then(|| (annotation::KSM_HANDLER_MANAGED, ksm.managed.to_string()));
    let noted: BTreeMap<&str, String> = time.into_iter().chain(managed).collect();
    if changes.is_empty() && noted.is_empty() {
        return None;
    }
    let mut metadata = serde_json::Map::new();
    if !changes.is_empty() {
        metadata.insert("labels".to_owned(), json!(changes));
    }
    if !noted.is_empty() {
        metadata.insert("annotations".to_owned(), json!(noted));
    }
    Some(json!({"metadata": metadata}))
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;

    use super::*;
    use crate::devices::plugin::{Registration, offers::Offer};

    const NONE: ksm::Shown = ksm::Shown { enabled: false, managed: false };

    fn metadata(labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> ObjectMeta {
        let map =
            |pairs: &[(&str, &str)]| Some(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        ObjectMeta { labels: map(labels), annotations: map(annotations), ..ObjectMeta::default() }
    }

    #[test]
    fn deprecated_machine_types_replace_those_before() {
        let config = Config {
            node: "node-1".to_owned(),
            deprecated: crate::metrics::Metrics::new().unwrap().deprecated_machine_types,
            labeller_dir: PathBuf::new(),
            kubelet_dir: PathBuf::new(),
            ksm_dir: PathBuf::new(),
        };
        for machine_type in ["pc-q35-4.0", "pc-q35-4.1"] {
            show_deprecated(&config, &BTreeSet::from([machine_type.to_owned()]));
            let families = prometheus::core::Collector::collect(&config.deprecated);
            let metrics = families[0].get_metric();
            let labels: Vec<_> = metrics[0].get_label().iter().map(|label| (label.name(), label.value())).collect();
            assert_eq!((metrics.len(), labels), (1, vec![("machine_type", machine_type), ("node", "node-1")]));
        }
    }

    fn capabilities() -> Capabilities {
        let host = "<capabilities><guest><arch><machine>q35</machine></arch></guest></capabilities>";
        Capabilities::parse(host, "<domainCapabilities/>", None).unwrap()
    }

    #[test]
    fn a_new_node_gets_labels_and_heartbeat_in_one_patch() {
        let time = "2026-01-02T03:04:05.678Z".parse().unwrap();
        let patch =
            decide(&metadata(&[], &[]), Some(&capabilities()), &NodeFacts::default(), true, NONE, Some(time)).unwrap();
        assert_eq!(
            patch,
            json!({"metadata": {
                "annotations": {"kubevirt.io/heartbeat": "2026-01-02T03:04:05Z"},
                "labels": {
                    "kubevirt.io/schedulable": "true",
                    "machine-type.node.kubevirt.io/q35": "true",
                    "kubevirt.io/cpumanager": "false",
                    "cpumanager": "false",
                    "kubevirt.io/ksm-enabled": "false",
                },
            }})
        );
    }

    #[test]
    fn a_settled_node_only_gets_the_heartbeat() {
        let settled = metadata(
            &[
                ("kubevirt.io/schedulable", "true"),
                ("machine-type.node.kubevirt.io/q35", "true"),
                ("kubevirt.io/cpumanager", "false"),
                ("cpumanager", "false"),
                ("kubevirt.io/ksm-enabled", "false"),
            ],
            &[],
        );
        let facts = NodeFacts::default();
        assert_eq!(decide(&settled, Some(&capabilities()), &facts, true, NONE, None), None);
        let beat = decide(&settled, Some(&capabilities()), &facts, true, NONE, Some(Timestamp::UNIX_EPOCH)).unwrap();
        assert_eq!(beat, json!({"metadata": {"annotations": {"kubevirt.io/heartbeat": "1970-01-01T00:00:00Z"}}}));
        // Plugins are not registered for a while, or nothing is known about the node: no change.
        assert_eq!(decide(&settled, Some(&capabilities()), &facts, false, NONE, None), None);
        assert_eq!(decide(&settled, None, &facts, false, NONE, None), None);
    }

    #[test]
    fn an_unschedulable_node_becomes_schedulable_again() {
        let lost = metadata(
            &[
                ("kubevirt.io/schedulable", "false"),
                ("kubevirt.io/cpumanager", "false"),
                ("cpumanager", "false"),
                ("kubevirt.io/ksm-enabled", "false"),
            ],
            &[("node-labeller.kubevirt.io/skip-node", "")],
        );
        let patch = decide(&lost, Some(&capabilities()), &NodeFacts::default(), true, NONE, None).unwrap();
        assert_eq!(patch, json!({"metadata": {"labels": {"kubevirt.io/schedulable": "true"}}}));
        assert_eq!(decide(&lost, Some(&capabilities()), &NodeFacts::default(), false, NONE, None), None);
    }

    #[test]
    fn same_page_merging_is_shown() {
        let known = |enabled: &str, managed: &[(&str, &str)]| {
            let labels =
                [("kubevirt.io/cpumanager", "false"), ("cpumanager", "false"), ("kubevirt.io/ksm-enabled", enabled)];
            metadata(&labels, managed)
        };
        let managed = |value: &'static str| [("kubevirt.io/ksm-handler-managed", value)];
        let both = ksm::Shown { enabled: true, managed: true };
        let enabled = ksm::Shown { enabled: true, managed: false };
        for (current, shown, expected) in [
            (known("false", &[]), NONE, Value::Null),
            (known("true", &managed("true")), both, Value::Null),
            (
                known("false", &[]),
                both,
                json!({"labels": {"kubevirt.io/ksm-enabled": "true"}, "annotations": {"kubevirt.io/ksm-handler-managed": "true"}}),
            ),
            (
                known("true", &managed("true")),
                enabled,
                json!({"annotations": {"kubevirt.io/ksm-handler-managed": "false"}}),
            ),
            (known("true", &managed("false")), NONE, json!({"labels": {"kubevirt.io/ksm-enabled": "false"}})),
        ] {
            let patch = decide(&current, None, &NodeFacts::default(), false, shown, None);
            assert_eq!(
                patch.map(|patch| patch["metadata"].clone()).unwrap_or_default(),
                expected,
                "{current:?} {shown:?}"
            );
        }
    }

    #[test]
    fn stale_labels_are_removed() {
        let stale = metadata(
            &[
                ("cpu-model.node.kubevirt.io/Gone", "true"),
                ("machine-type.node.kubevirt.io/q35", "true"),
                ("kubevirt.io/cpumanager", "false"),
                ("cpumanager", "false"),
                ("kubevirt.io/ksm-enabled", "false"),
            ],
            &[],
        );
        let patch = decide(&stale, Some(&capabilities()), &NodeFacts::default(), false, NONE, None).unwrap();
        assert_eq!(patch, json!({"metadata": {"labels": {"cpu-model.node.kubevirt.io/Gone": null}}}));
    }

    /// An API server with one node that reports each patch.
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
                assert!(accept.contains("PartialObjectMetadata"), "only metadata is requested: {accept}");
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

    fn node_1() -> Config {
        Config {
            node: "node-1".to_owned(),
            deprecated: crate::metrics::Metrics::new().unwrap().deprecated_machine_types,
            labeller_dir: "/nonexistent".into(),
            kubelet_dir: "/nonexistent".into(),
            ksm_dir: "/nonexistent".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn labels_that_somebody_removes_come_back_within_seconds() {
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        let (versions, seen) = futures::channel::mpsc::unbounded();
        let (_plugins, offers) = watch::channel(Offers::new());
        let (cluster, stop) = (ConfigHandle::fixed(ClusterConfig::default()), CancellationToken::new());
        let running = tokio::spawn(keep(node_1(), Api::all(api_server(sender)), seen, cluster, offers, stop.clone()));
        let start = Instant::now();
        let switches =
            [("kubevirt.io/cpumanager", "false"), ("cpumanager", "false"), ("kubevirt.io/ksm-enabled", "false")];
        let first: Value = patches.recv().await.unwrap();
        assert_eq!(first["metadata"]["labels"]["cpumanager"], "false", "{first}");
        versions.unbounded_send(metadata(&switches, &[])).unwrap();
        // Of several versions the newest counts.
        tokio::time::sleep(QUIET * 2).await;
        versions.unbounded_send(metadata(&[], &[])).unwrap();
        versions.unbounded_send(metadata(&switches[1..], &[])).unwrap();
        let second = patches.recv().await.unwrap();
        assert_eq!(second, json!({"metadata": {"labels": {"kubevirt.io/cpumanager": "false"}}}));
        // A user who removes it again and again does not cause a patch each time.
        let before = Instant::now();
        for _ in 0..50 {
            versions.unbounded_send(metadata(&switches[1..], &[])).unwrap();
        }
        patches.recv().await.unwrap();
        assert!(before.elapsed() >= QUIET - Duration::from_secs(1), "{:?}", before.elapsed());
        assert!(start.elapsed() < INTERVAL / 2, "not with the heartbeat");
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test]
    async fn the_first_patch_is_the_heartbeat_and_the_second_shows_registered_devices() {
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        let (plugins, offers) = watch::channel(Offers::new());
        let stop = CancellationToken::new();
        let cluster = ConfigHandle::fixed(ClusterConfig::default());
        let (api, versions) = (Api::all(api_server(sender)), futures::stream::pending());
        let running = tokio::spawn(keep(node_1(), api, versions, cluster, offers, stop.clone()));
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
        // Device changes do not change the node.
        plugins.send_replace(offered(Registration::Awaited));
        plugins.send_replace(offered(Registration::Done));
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(patches.try_recv().is_err());
        stop.cancel();
        timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    }
}
