//! Tests of watches: the comparison of a cache with the API server, and optional resources.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::WatchEvent;
use serde_json::{Value, json};

use super::{
    compare::{Difference, record},
    *,
};
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

/// The first page of a list of many objects at version 20.
fn first_page() -> Reply {
    let mut page = list(20, &[meta("a", 5)]);
    page["metadata"]["continue"] = json!("more");
    Reply::Answer(200, page)
}

fn event(kind: &str, metadata: &Value) -> Value {
    json!({"type": kind, "object": {"metadata": metadata}})
}

fn bookmark(version: &str) -> Value {
    let mut bookmark = event("BOOKMARK", &json!({"resourceVersion": version}));
    bookmark["object"]["kind"] = json!("PartialObjectMetadata");
    bookmark["object"]["apiVersion"] = json!("meta.k8s.io/v1");
    bookmark
}

#[tokio::test(start_paused = true)]
async fn cache_of_many_objects_is_current_when_a_bookmark_reaches_the_version_of_the_list() {
    // Version up to which the cache lacks nothing, event of the watch of changes, result.
    for (known, event, is_current) in [
        (10, bookmark("20"), true),
        (10, bookmark("21"), true),
        // Of an API server that is behind.
        (10, bookmark("19"), false),
        (10, event("ERROR", &json!({})), false),
        // Nothing was delivered yet.
        (0, bookmark("20"), false),
        // Nothing can be missing.
        (20, bookmark("20"), true),
    ] {
        // The second page of the list does not arrive.
        let server = Server::new([first_page(), Reply::Silence, Reply::Answer(200, event.clone())]);
        let (_cache, watch) = standby(&server, &[("a", 5)]);
        watch.complete_to.store(known, Ordering::Relaxed);
        let caught_up = tokio::time::timeout(Duration::from_secs(2), watch.catch_up()).await;
        assert_eq!(caught_up.is_ok(), is_current, "{known} {event}");
    }
}

#[tokio::test(start_paused = true)]
async fn new_leader_waits_for_the_changes_since_the_last_event() {
    // The event of a later change proves as much as a bookmark.
    for (change, object) in [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "a")] {
        let event = event(change, &meta(object, 20));
        let server = Server::new([first_page(), Reply::Silence, Reply::Answer(200, event)]);
        let (cache, watch) = standby(&server, &[("a", 5)]);
        watch.complete_to.store(10, Ordering::Relaxed);
        let mut waits = std::pin::pin!(watch.catch_up());
        let soon = Duration::from_millis(200);
        assert!(tokio::time::timeout(soon, &mut waits).await.is_err(), "{change}");
        match change {
            "DELETED" => cache.observe_deleted(&Key::new("n", "a"), Some("uid-a")),
            _ => cache.observe(thing(object, 20)),
        }
        assert!(tokio::time::timeout(soon, &mut waits).await.is_ok(), "{change}");
        assert_eq!(server.requests().len(), 3, "{change}");
    }
}

#[tokio::test(start_paused = true)]
async fn list_goes_on_without_a_bookmark() {
    let last_page = Reply::Answer(200, list(20, &[meta("b", 6)]));
    let server = Server::new([first_page(), last_page, Reply::Silence]);
    let (_cache, watch) = standby(&server, &[("a", 5), ("b", 6)]);
    watch.complete_to.store(10, Ordering::Relaxed);
    assert!(tokio::time::timeout(Duration::from_secs(1), watch.catch_up()).await.is_ok());
}

#[test]
fn last_change_of_each_object_counts() {
    let parse = |kind: &str, name: &str, version: u64| -> WatchEvent<PartialObjectMeta<ConfigMap>> {
        serde_json::from_value(event(kind, &meta(name, version))).unwrap()
    };
    let newer = |name: &str, version: u64| Difference::newer(thing(name, version).meta());
    let gone = |name: &str, version: u64| Difference::Gone { key: Key::new("n", name), version };
    for (events, expected) in [
        (vec![parse("ADDED", "a", 11), parse("MODIFIED", "a", 12)], newer("a", 12)),
        (vec![parse("ADDED", "a", 11), parse("DELETED", "a", 12)], gone("a", 12)),
        (vec![parse("DELETED", "a", 11), parse("ADDED", "a", 12)], newer("a", 12)),
        // Not kept any more.
        (vec![parse("ADDED", "other", 11), parse("MODIFIED", "other", 12)], gone("other", 12)),
    ] {
        let mut changes = HashMap::new();
        let selects = |meta: &ObjectMeta| meta.name.as_deref() == Some("a");
        let reached: Vec<_> = events.into_iter().map(|event| record(&mut changes, event, selects)).collect();
        assert_eq!(reached, [Some(11), Some(12)]);
        assert_eq!(changes.into_values().collect::<Vec<_>>(), [expected]);
    }
}

#[tokio::test(start_paused = true)]
async fn cache_is_complete_to_the_last_event_unless_one_was_lost() {
    let unreadable = json!({"type": "MODIFIED", "object": {"metadata": {"name": 5}}});
    let newer = event("MODIFIED", &meta("a", 16));
    // Events of two watches, version up to which the cache lacks nothing.
    for (events, expected) in [
        (vec![], 7),
        (vec![event("MODIFIED", &meta("a", 15))], 15),
        (vec![event("DELETED", &meta("a", 15)), newer.clone()], 16),
        (vec![unreadable, newer], 0),
    ] {
        let listed = Reply::Answer(200, list(10, &[meta("a", 5), meta("b", 7)]));
        let watched = events.into_iter().map(|event| Reply::Answer(200, event));
        let server = Server::new([listed].into_iter().chain(watched));
        let cache = Arc::new(Cache::default());
        let api = Api::<ConfigMap>::namespaced(server.client(), "n");
        let watch = Arc::new(Watch::new(&cache, api, |object: ConfigMap| Some(Thing(object.metadata))));
        let task = tokio::spawn(watch.clone().run());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(watch.complete_to.load(Ordering::Relaxed), expected);
        task.abort();
    }
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

#[test]
fn resource_that_is_missing_for_long_is_looked_for_less_often_unless_it_is_awaited() {
    // Seconds for which it is missing, seconds until the next look for one that is not awaited.
    for (unserved, expected) in [(0, 20), (80, 20), (200, 50), (480, 120), (86_400, 120)] {
        let (unserved, expected) = (Duration::from_secs(unserved), Duration::from_secs(expected));
        // A replica that follows waits for none.
        for (presence, acts) in
            [(Presence::WhenServed, true), (Presence::WhenServed, false), (Presence::Awaited, false)]
        {
            assert_eq!(presence.discovery(unserved, acts), expected, "{presence:?} {unserved:?} {acts}");
        }
        assert_eq!(Presence::Awaited.discovery(unserved, true), DISCOVERY, "{unserved:?}");
    }
}
