//! Tests of the terms of a leader.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    runtime::{Election, Times},
    scripted::{Reply, Server, status},
};

fn absent() -> Reply {
    Reply::Answer(404, status(404, "NotFound"))
}

/// An answer with a lease of this holder; empty: it is free.
fn answer(holder: &str) -> Reply {
    let metadata = json!({"name": "lease", "namespace": "kubevirt", "resourceVersion": "1"});
    let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 7});
    Reply::Answer(200, json!({"metadata": metadata, "spec": spec}))
}

fn election(server: &Server) -> Election {
    Election::new(server.client(), "kubevirt", "lease", "a".to_owned(), Times::default())
}

#[tokio::test(start_paused = true)]
async fn deleted_lease_is_created_again_by_its_holder() {
    let conflict = Reply::Answer(409, status(409, "Conflict"));
    let server = Server::new([absent(), answer("a"), conflict, absent(), answer("a")]);
    let (mut election, stop) = (election(&server), CancellationToken::new());
    assert!(election.win(&stop).await);
    let kept = tokio::time::timeout(Duration::from_secs(3), election.keep(&stop)).await;
    assert!(kept.is_err(), "{kept:?}");
    let methods: Vec<Method> = server.requests().into_iter().map(|(method, _)| method).collect();
    assert_eq!(methods, [Method::GET, Method::POST, Method::PUT, Method::GET, Method::POST]);
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
