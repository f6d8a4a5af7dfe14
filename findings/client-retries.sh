#!/bin/sh
# Version: the Rust crate kube 5.0.0.
# Expected: a client repeats a request that fails only if that is safe or the server asks for it by Retry-After, as client-go does. A
# pod that a disruption budget protects is reported at once, and a 504, after which the API server goes on with the write, is returned.
# Seen: a client made from a Config repeats every request that is answered 429, 503 or 504, up to 15 times, POST included.
# While a budget allows no eviction, the API server answers 429 without Retry-After: evict() returns that after 16 requests and about
# five minutes. A create with generateName whose first answer was 504 is Ok and leaves two objects; with a name it is 409
# AlreadyExists, for the object that it has just made.
# Consequence: set default_retry of the Config to false and retry where that is known to be safe. A time limit around evict() alone
# loses the answer: it looks like a server that does not respond.
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
http = "1"
http-body-util = "0.1"
hyper = { version = "1", features = ["http1", "server"] }
hyper-util = { version = "0.1", features = ["tokio"] }
k8s-openapi = { version = "=0.29.0", features = ["latest"] }
kube = { version = "=5.0.0", default-features = false, features = ["client"] }
serde_json = "1"
tokio = { version = "1", features = ["net", "rt", "test-util", "time"] }
tower = { version = "0.5", features = ["retry", "util"] }
[profile.dev]
debug = false
TOML
cat >src/main.rs <<'RUST'
use std::{
    process::exit,
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config, Error,
    api::PostParams,
    client::{Body, retry::RetryPolicy},
};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    runtime::Builder,
    time::{Instant, timeout},
};
use tower::{BoxError, ServiceBuilder, retry::RetryLayer};

/// Counted evictions and the names of stored pods.
#[derive(Default)]
struct State {
    evictions: usize,
    pods: Vec<String>,
}

/// Returns the answer of the API server: a budget that allows no eviction is 429 without Retry-After. The first create is slow, so
/// that its answer is 504 although the pod is stored.
fn answer(state: &Mutex<State>, path: &str, body: &[u8]) -> Response<Body> {
    let mut state = state.lock().unwrap();
    let (code, reason) = if path.ends_with("/eviction") {
        state.evictions += 1;
        (429, "TooManyRequests")
    } else {
        let mut pod: Value = serde_json::from_slice(body).unwrap();
        let prefix = pod["metadata"]["generateName"].as_str().map(|prefix| format!("{prefix}{}", state.pods.len()));
        let name = prefix.unwrap_or_else(|| pod["metadata"]["name"].as_str().unwrap().to_owned());
        if state.pods.contains(&name) {
            (409, "AlreadyExists")
        } else {
            state.pods.push(name.clone());
            pod["metadata"]["name"] = json!(name);
            if state.pods.len() > 1 {
                return Response::builder().status(201).body(Body::from(pod.to_string().into_bytes())).unwrap();
            }
            (504, "Timeout")
        }
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
    Response::builder().status(code).body(Body::from(status.to_string().into_bytes())).unwrap()
}

/// Serves at a port of the loopback interface and returns a client as anybody makes it.
async fn serve(default_retry: bool) -> (Api<Pod>, Arc<Mutex<State>>) {
    let state = Arc::<Mutex<State>>::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
    if !default_retry {
        config.default_retry = false;
    }
    let shared = Arc::clone(&state);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let shared = Arc::clone(&shared);
            let service = service_fn(move |request: Request<Incoming>| {
                let shared = Arc::clone(&shared);
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await?.to_bytes();
                    Ok::<_, hyper::Error>(answer(&shared, &path, &body))
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    (Api::namespaced(Client::try_from(config).unwrap(), "default"), state)
}

fn pod(metadata: Value) -> Pod {
    serde_json::from_value(json!({"metadata": metadata})).unwrap()
}

/// Returns the answer to a create: the name of the pod, or the code of the error.
async fn create(api: &Api<Pod>, metadata: Value) -> String {
    match api.create(&PostParams::default(), &pod(metadata)).await {
        Ok(pod) => pod.metadata.name.unwrap_or_default(),
        Err(Error::Api(status)) => status.code.to_string(),
        Err(error) => error.to_string(),
    }
}

async fn over_http(default_retry: bool) -> [(String, usize); 3] {
    let (api, state) = serve(default_retry).await;
    let generated = create(&api, json!({"generateName": "guest-"})).await;
    let generated = (generated, state.lock().unwrap().pods.len());

    let (api, state) = serve(default_retry).await;
    let named = create(&api, json!({"name": "guest"})).await;
    let named = (named, state.lock().unwrap().pods.len());

    let evicted = match timeout(Duration::from_secs(5), api.evict("guest", &Default::default())).await {
        Ok(Err(Error::Api(status))) => status.code.to_string(),
        Ok(other) => format!("{other:?}"),
        Err(_) => "none after 5 s".to_owned(),
    };
    let evicted = (evicted, state.lock().unwrap().evictions);
    [generated, named, evicted]
}

/// Evicts with the policy of the default client until the answer arrives. The clock is tokio's and advances whenever all tasks wait.
async fn evict() -> (u64, usize) {
    let state = Arc::<Mutex<State>>::default();
    let shared = Arc::clone(&state);
    let service = ServiceBuilder::new().layer(RetryLayer::new(RetryPolicy::server_retry())).service(tower::service_fn(
        move |request: Request<Body>| {
            let answered = answer(&shared, request.uri().path(), &[]);
            async move { Ok::<_, BoxError>(answered) }
        },
    ));
    let start = Instant::now();
    let api: Api<Pod> = Api::namespaced(Client::new(service, "default"), "default");
    let _ = api.evict("guest", &Default::default()).await;
    (start.elapsed().as_secs(), state.lock().unwrap().evictions)
}

fn main() {
    let runtime = |paused| Builder::new_current_thread().enable_all().start_paused(paused).build().unwrap();
    let default = runtime(false).block_on(over_http(true));
    let without = runtime(false).block_on(over_http(false));
    for (name, [generated, named, evicted]) in [("default", &default), ("default_retry off", &without)] {
        println!("{name}: create with generateName: {}, {} pods stored", generated.0, generated.1);
        println!("{name}: create with a name: {}, {} pods stored", named.0, named.1);
        println!("{name}: evict: {}, {} requests", evicted.0, evicted.1);
    }
    let (seconds, requests) = runtime(true).block_on(evict());
    println!("default: evict: 429 after {seconds} s and {requests} requests");
    let expected = |answers: &[(String, usize); 3], generated: (&str, usize), named: &str, evicted: &str| {
        answers[0] == (generated.0.to_owned(), generated.1)
            && answers[1] == (named.to_owned(), 1)
            && answers[2].0 == evicted
    };
    if !expected(&default, ("guest-1", 2), "409", "none after 5 s")
        || !expected(&without, ("504", 1), "504", "429")
        || default[2].1 < 5
        || without[2].1 != 1
        // 15 pauses, which double from 5 ms, each prolonged by up to twice its length.
        || !(160..=492).contains(&seconds)
        || requests != 16
    {
        exit(1);
    }
}
RUST
cargo build --quiet --target-dir target || exit 3
echo "kube 5.0.0"
target/debug/finding
