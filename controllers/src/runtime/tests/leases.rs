//! Tests of the terms of a leader, and of the replicas that follow it.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    runtime::{Election, Times},
    scripted::{Reply, Server, status},
};

fn absent() -> Reply {
    Reply::Answer(404, status(404, "NotFound"))
}

/// A lease of this holder in this version; empty: it is free.
fn lease(holder: &str, version: &str) -> Value {
    let metadata = json!({"name": "lease", "namespace": "kubevirt", "resourceVersion": version});
    json!({"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 8}})
}

/// An answer with a lease of this holder; empty: it is free.
fn answer(holder: &str) -> Reply {
    Reply::Answer(200, lease(holder, "1"))
}

fn election(server: &Server) -> Election {
    Election::new(server.client(), "kubevirt", "lease", "a".to_owned(), Times::default())
}

/// Returns the requests so far: methods, and `WATCH`.
fn requests(server: &Server) -> Vec<String> {
    let verb = |(method, path): (Method, String)| {
        if path.ends_with("/leases") && method == Method::GET { "WATCH".to_owned() } else { method.to_string() }
    };
    server.requests().into_iter().map(verb).collect()
}

#[tokio::test(start_paused = true)]
async fn lease_is_read_when_a_renewal_is_overdue_and_taken_when_it_expires() {
    // A watch that reports nothing, and one that is refused; reads until the lease is taken.
    for (watch, reads) in [(Reply::Silence, 6), (Reply::Answer(403, status(403, "Forbidden")), 9)] {
        let unchanged = std::iter::repeat_with(|| answer("b")).take(reads);
        let server = Server::new([answer("b"), watch].into_iter().chain(unchanged).chain([answer("a")]));
        let start = Instant::now();
        assert!(election(&server).win(&CancellationToken::new()).await);
        let milliseconds = start.elapsed().as_millis();
        assert!((8000..8100).contains(&milliseconds), "{reads}: {milliseconds}");
        let expected = ["GET", "WATCH"].into_iter().chain(std::iter::repeat_n("GET", reads)).chain(["PUT"]);
        assert_eq!(requests(&server), expected.collect::<Vec<_>>(), "{reads}");
    }
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_taken_when_the_watch_reports_it() {
    let event = json!({"type": "MODIFIED", "object": lease("", "2")});
    let server = Server::new([answer("b"), Reply::Answer(200, event), Reply::Answer(200, lease("", "2")), answer("a")]);
    let start = Instant::now();
    assert!(election(&server).win(&CancellationToken::new()).await);
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!(requests(&server), ["GET", "WATCH", "GET", "PUT"]);
}

#[tokio::test]
async fn restarted_leader_releases_its_lease_and_no_other() {
    for (holder, expected) in [("a", vec!["GET", "PUT"]), ("b", vec!["GET"])] {
        let server = Server::new([answer(holder), answer("")]);
        election(&server).release().await;
        assert_eq!(requests(&server), expected, "{holder}");
    }
}

#[tokio::test(start_paused = true)]
async fn deleted_lease_is_created_again_by_its_holder() {
    let conflict = Reply::Answer(409, status(409, "Conflict"));
    let server = Server::new([absent(), answer("a"), conflict, absent(), answer("a")]);
    let (mut election, stop) = (election(&server), CancellationToken::new());
    assert!(election.win(&stop).await);
    let kept = tokio::time::timeout(Duration::from_secs(4), election.keep(&stop)).await;
    assert!(kept.is_err(), "{kept:?}");
    assert_eq!(requests(&server), ["GET", "POST", "PUT", "GET", "POST"]);
}

#[tokio::test]
async fn former_leadership_stays_ended_when_the_lease_is_won_again() {
    // Created, released, taken.
    let server = Server::new([absent(), answer("a"), answer("a"), answer(""), answer(""), answer("a")]);
    let (mut election, stop) = (election(&server), CancellationToken::new());
    assert!(election.win(&stop).await);
    let former = election.leadership();
    former.end();
    election.release().await;
    assert!(election.win(&stop).await);
    assert!(!former.holds() && election.leadership().holds());
}
