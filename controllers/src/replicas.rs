//! The replicas of virt-controller: which of them are live, and which still run with another number of shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use api::constants::{component, label};
use daemon::lock;
use futures::StreamExt;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    runtime::watcher::{self, Event},
};

/// Flag with the number of shards, as the chart writes it.
const FLAG: &str = "--shards";
/// Time for which a replica must be ready before shards are handed over to it: its caches are full then.
const SETTLED: Duration = Duration::from_secs(15);
/// Longest time for a list of the pods, and the pause before the next one.
const LIST: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(1));
/// Ages of pods that differ by less do not show which pod was there first: the clocks of API servers differ.
const SAME_AGE: SignedDuration = SignedDuration::from_secs(60);

/// The live replicas.
pub(crate) struct Replicas {
    own: String,
    /// Replicas that are ready, and since when; `None`: since before this process began.
    ready: Mutex<BTreeMap<String, Option<Instant>>>,
}

impl Replicas {
    /// Creates the set with this replica alone.
    #[must_use]
    pub(crate) fn new(own: String) -> Arc<Self> {
        Arc::new(Self { own, ready: Mutex::default() })
    }

    /// Returns the name of this replica.
    #[must_use]
    pub(crate) fn own(&self) -> &str {
        &self.own
    }

    /// Returns the names of this replica and of those that have been ready for some time.
    #[must_use]
    pub(crate) fn live(&self) -> BTreeSet<String> {
        let ready = lock(&self.ready);
        let settled = ready.iter().filter(|(_, since)| since.is_none_or(|since| since.elapsed() >= SETTLED));
        settled.map(|(name, _)| name.clone()).chain([self.own.clone()]).collect()
    }

    /// Follows the pods of virt-controller with this number of shards for ever.
    pub(crate) async fn follow(self: Arc<Self>, client: Client, namespace: String, shards: u32) {
        let pods: Api<Pod> = Api::namespaced(client, &namespace);
        let mut events = std::pin::pin!(daemon::watch::events(pods, watcher::Config::default().labels(&selector())));
        let (mut listed, mut is_first) = (Vec::new(), true);
        while let Some(event) = events.next().await {
            let now = Some(Instant::now());
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(pod)) => listed.push((pod.name_any(), is_ready(&pod, shards))),
                Ok(Event::InitDone) => {
                    let since = if std::mem::take(&mut is_first) { None } else { now };
                    replace(&mut lock(&self.ready), std::mem::take(&mut listed), since);
                }
                Ok(Event::Apply(pod)) => {
                    record(&mut lock(&self.ready), pod.name_any(), is_ready(&pod, shards), now);
                }
                Ok(Event::Delete(pod)) => record(&mut lock(&self.ready), pod.name_any(), false, now),
                Err(error) => {
                    tracing::warn!(%error, "watch of the replicas was interrupted");
                }
            }
        }
    }
}

/// Waits until no former process of virt-controller with another number of shards is left: it divides the VMs in another way. New replicas
/// do not begin before the Deployment has removed the last of the former ones. These wait for no new ones, which wait for them: while an
/// upgrade cannot go on, they may restart.
pub(crate) async fn wait_for_former(client: Client, namespace: &str, own: &str, shards: u32) {
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let (limit, pause) = LIST;
    // Without a resource version this is a consistent read: of two that begin together, one sees the other.
    let all = ListParams::default().labels(&selector());
    let mut reported = None;
    loop {
        match tokio::time::timeout(limit, pods.list(&all)).await {
            Ok(Ok(list)) => {
                let Some(former) = former(&list.items, own, shards).map(ResourceExt::name_any) else { return };
                if reported.as_ref() != Some(&former) {
                    tracing::warn!(pod = former, "waiting for the end of a pod with another number of shards");
                    reported = Some(former);
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "replicas cannot be listed"),
            Err(_) => tracing::warn!("no list of the replicas in time"),
        }
        tokio::time::sleep(pause).await;
    }
}

fn selector() -> String {
    format!("{}={}", label::APP, component::VIRT_CONTROLLER)
}

/// Returns the number of shards of a replica.
fn shards_of(pod: &Pod) -> u32 {
    let mut args =
        pod.spec.iter().flat_map(|spec| &spec.containers).flat_map(|container| container.args.iter().flatten());
    args.find(|arg| arg.as_str() == FLAG);
    args.next().and_then(|number| number.parse().ok()).unwrap_or(1)
}

/// Returns a pod for whose end this replica waits.
fn former<'a>(pods: &'a [Pod], own: &str, shards: u32) -> Option<&'a Pod> {
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let begun = pods.iter().find(|pod| pod.name_any() == own).and_then(created);
    let is_later = |pod: &Pod| created(pod).zip(begun).is_some_and(|(pod, own)| pod.duration_since(own) > SAME_AGE);
    pods.iter().find(|pod| pod.name_any() != own && is_other(pod, shards) && !is_later(pod))
}

/// Returns true for a pod whose process may run with another number of shards.
fn is_other(pod: &Pod, shards: u32) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    shards_of(pod) != shards && !matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns true for a ready replica with this number of shards.
fn is_ready(pod: &Pod, shards: u32) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_ready = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    is_ready && pod.metadata.deletion_timestamp.is_none() && shards_of(pod) == shards
}

fn record(ready: &mut BTreeMap<String, Option<Instant>>, name: String, is_ready: bool, since: Option<Instant>) {
    if is_ready {
        ready.entry(name).or_insert(since);
    } else {
        ready.remove(&name);
    }
}

/// Records a list of all replicas.
fn replace(ready: &mut BTreeMap<String, Option<Instant>>, listed: Vec<(String, bool)>, since: Option<Instant>) {
    let names: BTreeSet<String> = listed.iter().map(|(name, _)| name.clone()).collect();
    ready.retain(|name, _| names.contains(name));
    for (name, is_ready) in listed {
        record(ready, name, is_ready, since);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::scripted::{Reply, Server, status};

    fn pod(name: &str, args: &Value, ready: &str, phase: &str) -> Pod {
        let conditions = json!([{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]);
        let containers = json!([{"name": "virt-controller", "args": args}]);
        let pod = json!({
            "metadata": {"name": name, "namespace": "kubevirt"}, "spec": {"containers": containers},
            "status": {"phase": phase, "conditions": conditions},
        });
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn replicas_count_while_they_are_ready_and_have_the_same_shards() {
        let four = json!(["-v", "2", "--shards", "4"]);
        // Arguments, readiness, phase; number of shards; the replica is live, a process with other shards.
        for (args, ready, phase, shards, is_live, other) in [
            (&four, "True", "Running", 4, true, false),
            (&four, "False", "Running", 4, false, false),
            (&four, "True", "Running", 1, false, true),
            (&four, "False", "Pending", 2, false, true),
            (&four, "False", "Failed", 1, false, false),
            (&json!(["-v", "2"]), "True", "Running", 4, false, true),
            (&json!(["-v", "2"]), "True", "Running", 1, true, false),
            (&Value::Null, "True", "Running", 1, true, false),
            (&json!(["--shards"]), "True", "Running", 1, true, false),
        ] {
            let pod = pod("a", args, ready, phase);
            assert_eq!((is_ready(&pod, shards), is_other(&pod, shards)), (is_live, other), "{args} {ready} {phase}");
        }
        let mut leaving = pod("a", &four, "True", "Running");
        leaving.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2030-01-01T00:00:00Z")).unwrap());
        assert!(!is_ready(&leaving, 4) && is_other(&leaving, 1));
    }

    #[test]
    fn shards_are_handed_over_to_replicas_that_were_ready_for_some_time() {
        let replicas = Replicas::new("a".to_owned());
        let live = || replicas.live().into_iter().collect::<Vec<_>>();
        assert_eq!(live(), ["a"]);
        let listed = |names: &[(&str, bool)]| names.iter().map(|(name, ready)| ((*name).to_owned(), *ready)).collect();
        replace(&mut lock(&replicas.ready), listed(&[("a", true), ("b", true), ("c", false)]), None);
        assert_eq!(live(), ["a", "b"]);
        let now = Instant::now();
        record(&mut lock(&replicas.ready), "c".to_owned(), true, Some(now));
        assert_eq!(live(), ["a", "b"]);
        record(&mut lock(&replicas.ready), "d".to_owned(), true, now.checked_sub(SETTLED));
        assert_eq!(live(), ["a", "b", "d"]);
        // A later list makes no replica younger, and forgets those that are gone.
        replace(&mut lock(&replicas.ready), listed(&[("a", true), ("d", true)]), Some(now));
        assert_eq!(live(), ["a", "d"]);
        record(&mut lock(&replicas.ready), "d".to_owned(), false, Some(now));
        assert_eq!(live(), ["a"]);
    }

    #[test]
    fn of_two_replicas_with_different_shards_the_younger_one_waits() {
        let created = |name: &str, args: &Value, at: &str| {
            let mut pod = pod(name, args, "True", "Running");
            pod.metadata.creation_timestamp = Some(serde_json::from_value(json!(at)).unwrap());
            pod
        };
        let (old, four) = ("2030-01-01T00:00:00Z", json!(["--shards", "4"]));
        // Creation of the pod with four shards; the one with one shard waits, the one with four does.
        for (at, one_waits, four_waits) in [
            ("2030-01-01T00:01:01Z", false, true),
            // Both wait if it is not certain which one is older.
            ("2030-01-01T00:01:00Z", true, true),
            ("2029-12-31T23:59:00Z", true, true),
            ("2029-12-31T23:58:59Z", true, false),
        ] {
            let pods = [created("one", &Value::Null, old), created("four", &four, at)];
            let waits = |own: &str, shards: u32| former(&pods, own, shards).is_some();
            assert_eq!((waits("one", 1), waits("four", 4)), (one_waits, four_waits), "{at}");
            // A replica without a pod is younger than all.
            assert!(waits("none", 1) && waits("none", 4));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn replica_begins_when_those_with_other_shards_have_ended() {
        let list = |pods: &[Pod]| {
            let items: Vec<Value> = pods.iter().map(|pod| serde_json::to_value(pod).unwrap()).collect();
            Reply::Answer(200, json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
        };
        let own = pod("own", &json!([]), "True", "Running");
        let former = |phase: &str| pod("former", &Value::Null, "True", phase);
        let server = Server::new([
            Reply::Answer(500, status(500, "InternalError")),
            list(&[own.clone(), former("Running")]),
            list(&[own.clone(), former("Running")]),
            list(&[own, former("Succeeded")]),
        ]);
        wait_for_former(server.client(), "kubevirt", "own", 4).await;
        assert_eq!(server.requests().len(), 4);
    }
}
