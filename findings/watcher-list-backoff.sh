#!/bin/sh
# Version: the Rust crate kube 5.0.0.
# Expected: watcher(api, config).default_backoff().applied_objects(), as in its README, retries a failing list at growing pauses: 0.8 s
# doubled up to 30 s, each with a jitter of up to its own length. It does so for failing watches.
# Seen: the pauses stay between 0.8 s and 1.6 s. The watcher emits Init before each list request, and StreamBackoff resets after any Ok.
# reflect() passes Init on and changes nothing. The pauses do grow for a watch that fails after a list, for the strategy StreamingList,
# which emits Init after the answer, and for Controller::new, which drops Init before it backs off.
# Consequence: a client without permission to list, or of a resource that is not installed, sends about 50 requests a minute instead
# of 1 or 2. (A client built from a Config first retries 429, 503 and 504 itself, at growing pauses.) Back off last, after
# applied_objects() or touched_objects(). To keep the events, wrap DefaultBackoff in a Backoff whose reset() does nothing: it still
# resets itself after 120 s without an error.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir src
cat >Cargo.toml <<'TOML'
[package]
name = "finding"
version = "0.0.0"
edition = "2024"
[dependencies]
futures = "0.3"
http = "1"
k8s-openapi = { version = "=0.29.0", features = ["latest"] }
kube = { version = "=5.0.0", default-features = false, features = ["client", "runtime"] }
tokio = { version = "1", features = ["macros", "rt", "test-util", "time"] }
tower = { version = "0.5", features = ["util"] }
[profile.dev]
debug = false
TOML
cat >src/main.rs <<'RUST'
use std::{
    convert::Infallible,
    future::ready,
    process::exit,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{Stream, StreamExt};
use http::{Request, Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    client::Body,
    runtime::{
        Controller, WatchStreamExt,
        controller::Action,
        reflector,
        utils::Backoff,
        watcher::{Config, DefaultBackoff, watcher},
    },
};
use tokio::time::{Instant, timeout};

const FAILURE: &str =
    r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"broken","reason":"InternalError","code":500}"#;
const EMPTY: &str = r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}"#;

/// A backoff that only time resets.
struct Patient(DefaultBackoff);

impl Iterator for Patient {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl Backoff for Patient {
    fn reset(&mut self) {}
}

/// Counts the requests that fail in a minute. The clock is tokio's and advances whenever all tasks wait.
async fn check<S: Stream>(name: &str, lists_fail: bool, grows: bool, start: impl FnOnce(Api<ConfigMap>) -> S) {
    let failures = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&failures);
    let server = tower::service_fn(move |request: Request<Body>| {
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let (status, text) = if is_watch || lists_fail { (500, FAILURE) } else { (200, EMPTY) };
        if status == 500 {
            recorded.lock().unwrap().push(Instant::now());
        }
        let answer = Response::builder().status(status).body(Body::from(text.as_bytes().to_vec())).unwrap();
        ready(Ok::<_, Infallible>(answer))
    });
    let api = Api::default_namespaced(Client::new(server, "default"));
    let _ = timeout(Duration::from_secs(60), start(api).for_each(|_| ready(()))).await;
    let times = failures.lock().unwrap();
    let pauses: Vec<String> =
        times.windows(2).map(|pair| format!("{:.1}", (pair[1] - pair[0]).as_secs_f64())).collect();
    println!("{name}: {} requests, pauses {}", times.len(), pauses.join(" "));
    // The first pause is 0.8 s to 1.6 s long. If pauses double, 6 or 7 requests fit in a minute, else 38 to 76.
    let expected = if grows { 6..=7 } else { 38..=76 };
    if !expected.contains(&times.len()) {
        exit(1);
    }
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    check("README", true, false, |api| watcher(api, Config::default()).default_backoff().applied_objects()).await;
    check("reflector", true, false, |api| {
        watcher(api, Config::default()).reflect(reflector::store().1).default_backoff()
    })
    .await;
    check("backoff last", true, true, |api| watcher(api, Config::default()).applied_objects().default_backoff()).await;
    check("reset ignored", true, true, |api| {
        watcher(api, Config::default()).backoff(Patient(DefaultBackoff::default()))
    })
    .await;
    check("watch fails", false, true, |api| watcher(api, Config::default()).default_backoff()).await;
    check("StreamingList", true, true, |api| watcher(api, Config::default().streaming_lists()).default_backoff()).await;
    check("Controller", true, true, |api| {
        Controller::new(api, Config::default()).run(
            |_, _| ready(Ok::<_, Infallible>(Action::await_change())),
            |_, _, _| Action::await_change(),
            Arc::new(()),
        )
    })
    .await;
}
RUST
cargo build --quiet --target-dir target || exit 3
target/debug/finding
