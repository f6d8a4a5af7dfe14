//! Tests of watches: the comparison of a cache with the API server, and optional resources.

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};

use super::*;
use crate::scripted::{Reply, Server, status};

#[derive(Clone, Debug)]
struct Thing(ObjectMeta);

impl Cached for Thing {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.0
    }
}

fn meta(name: &str, version: u64) -> Value {
    json!({"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": version.to_string()})
}

fn thing(name: &str, version: u64) -> Thing {
    Thing(serde_json::from_value(meta(name, version)).unwrap())
}

fn list(version: u64, items: &[Value]) -> Value {
    let items: Vec<Value> = items.iter().map(|meta| json!({"metadata": meta})).collect();
    json!({
        "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version.to_string()}, "items": items,
    })
}

/// A cache that has been read once, and its watch, which delivers nothing.
fn standby(server: &Server, known: &[(&str, u64)]) -> (Arc<Cache<Thing>>, Watch<ConfigMap, Thing>) {
    let cache = Arc::new(Cache::default());
    known.iter().for_each(|(name, version)| cache.observe(thing(name, *version)));
    let api = Api::<ConfigMap>::namespaced(server.client(), "n");
    let watch = Watch::new(&cache, api, |object: ConfigMap| Some(Thing(object.metadata)));
    watch.synced.send_replace(true);
    (cache, watch)
}

#[tokio::test(start_paused = true)]
async fn new_leader_waits_until_its_cache_is_as_new_as_the_api_server() {
    // The former leader changed `a`, created `b` and deleted `c` before it lost the lease.
    let newest = list(20, &[meta("a", 15), meta("b", 16), meta("d", 4)]);
    let server = Server::new([Reply::Answer(200, newest.clone()), Reply::Answer(200, newest)]);
    let (cache, watch) = standby(&server, &[("a", 5), ("c", 3), ("d", 4)]);
    let mut waits = std::pin::pin!(watch.catch_up());
    let soon = Duration::from_millis(200);
    assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
    cache.observe(thing("a", 15));
    assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
    // Deleted again at once.
    cache.observe_deleted(&Key::new("n", "b"), Some("uid-b"));
    assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
    cache.observe_deleted(&Key::new("n", "c"), Some("uid-c"));
    assert!(tokio::time::timeout(soon, &mut waits).await.is_ok());
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn cache_that_is_as_new_is_ready_at_once() {
    let server =
        Server::new([Reply::Answer(500, status(500, "InternalError")), Reply::Answer(200, list(20, &[meta("a", 5)]))]);
    // Objects newer than the list may be known already.
    let (_, watch) = standby(&server, &[("a", 7), ("new", 21)]);
    assert!(tokio::time::timeout(Duration::from_secs(1), watch.catch_up()).await.is_ok());
    assert_eq!(server.requests().len(), 2, "a failed list is repeated");
}

#[tokio::test(start_paused = true)]
async fn list_without_an_answer_is_repeated() {
    let server = Server::new([Reply::Silence, Reply::Answer(200, list(20, &[meta("a", 5)]))]);
    let (_cache, watch) = standby(&server, &[("a", 5)]);
    assert!(tokio::time::timeout(Duration::from_secs(4), watch.catch_up()).await.is_ok());
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn silent_watch_is_started_again() {
    let newest = || Reply::Answer(200, list(20, &[meta("a", 15)]));
    // List and watch. Then comparisons and the requests of the second watch get the same answer, in any order.
    let first = [Reply::Answer(200, list(10, &[meta("a", 5)])), Reply::Silence];
    let server = Server::new(first.into_iter().chain(std::iter::repeat_with(newest).take(10)));
    let cache = Arc::new(Cache::default());
    let api = Api::<ConfigMap>::namespaced(server.client(), "n");
    let watch = Arc::new(Watch::new(&cache, api, |object: ConfigMap| Some(Thing(object.metadata))));
    let task = tokio::spawn(watch.clone().run());
    watch.synced().await;
    // The watch is under way.
    tokio::time::sleep(Duration::from_millis(10)).await;
    let caught_up = tokio::time::timeout(Duration::from_secs(5), watch.catch_up()).await;
    assert!(caught_up.is_ok(), "{:?}", server.requests());
    let known = cache.get(&Key::new("n", "a")).and_then(|object| object.0.resource_version.clone());
    assert_eq!(known.as_deref(), Some("15"));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn list_is_repeated_when_the_watch_does_not_deliver() {
    let server = Server::new([Reply::Answer(200, list(20, &[meta("a", 15)])), Reply::Answer(200, list(30, &[]))]);
    let (_, watch) = standby(&server, &[]);
    assert!(tokio::time::timeout(Duration::from_secs(5), watch.catch_up()).await.is_ok());
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn resource_that_is_not_installed_does_not_hold_the_leader_back() {
    let absent = || Reply::Answer(404, status(404, "NotFound"));
    let server = Server::new(std::iter::repeat_with(absent).take(200));
    // Once a standby whose watch has read a list before, once one that never could.
    for synced in [true, false] {
        let (_cache, watch) = standby(&server, &[]);
        watch.synced.send_replace(synced);
        assert!(tokio::time::timeout(ABSENT - RETRY, watch.catch_up()).await.is_err(), "{synced}");
        assert!(tokio::time::timeout(ABSENT * 2, watch.catch_up()).await.is_ok(), "{synced}");
    }
}

#[tokio::test(start_paused = true)]
async fn list_that_is_refused_holds_the_leader_back_until_it_is_read() {
    let refused = || Reply::Answer(403, status(403, "Forbidden"));
    let absent_for_a_moment = Reply::Answer(404, status(404, "NotFound"));
    let replies = std::iter::repeat_with(refused).take(100).chain([absent_for_a_moment]);
    let server = Server::new(replies.chain([Reply::Answer(200, list(20, &[]))]));
    let (_cache, watch) = standby(&server, &[]);
    let mut waits = std::pin::pin!(watch.catch_up());
    assert!(tokio::time::timeout(RETRY * 99, &mut waits).await.is_err());
    assert!(tokio::time::timeout(RETRY * 5, &mut waits).await.is_ok());
}

#[test]
fn failures_are_logged_once_for_each_reason() {
    let failure = |code: u16| {
        let status = serde_json::from_value(status(code, "x")).unwrap();
        CompareError::List(kube::Error::Api(Box::new(status)))
    };
    let mut failures = Failures::default();
    assert!(!failures.record("things", &failure(404)));
    let first = failures.logged.clone();
    assert!(!failures.record("things", &failure(404)));
    assert_eq!(failures.logged, first, "the same reason is not logged again");
    assert!(failures.absent_since.is_some());
    assert!(!failures.record("things", &failure(500)));
    assert_ne!(failures.logged, first);
    assert!(failures.absent_since.is_none(), "only consecutive answers count");
}
