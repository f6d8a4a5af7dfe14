#!/bin/sh
# Version: the Rust crate tonic 0.14.9.
# Expected: a timeout of a gRPC call limits the whole call, as in other implementations: a stream that is still open ends, and the
# status is DEADLINE_EXCEEDED. tonic has three of them: set_timeout() of a request, which is "the max duration the request is
# allowed to take" and which the server receives as grpc-timeout, timeout() of an Endpoint, and timeout() of a Server.
# Seen: each of the three ends when the answer begins. A stream whose headers have arrived runs on past the timeout for as long as the
# server sends, and neither side ends it. The status of a call that does time out is CANCELLED.
# Consequence: a client limits the reading of a stream by a timer of its own, also between messages. Code that retries or reports
# timeouts must not look for DEADLINE_EXCEEDED alone.
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
hyper-util = { version = "0.1", features = ["tokio"] }
tokio = { version = "1", features = ["io-util", "macros", "rt", "test-util", "time"] }
tonic = "=0.14.9"
tonic-prost = "=0.14.9"
tower = { version = "0.5", features = ["util"] }
[profile.dev]
debug = false
TOML
cat >src/main.rs <<'RUST'
use std::{
    convert::Infallible,
    future::{Future, pending, ready},
    io,
    pin::Pin,
    process::exit,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use http::{Uri, uri::PathAndQuery};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep};
use tonic::{
    Code, Request, Response, Status,
    body::Body,
    client,
    server::{self, NamedService},
    transport::{Channel, Endpoint, Server},
};
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};

const TIMEOUT: Duration = Duration::from_secs(2);

/// A service with a call that is never answered and a stream of a message every second.
#[derive(Clone)]
struct Calls;

impl NamedService for Calls {
    const NAME: &'static str = "finding.Calls";
}

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let mut grpc = server::Grpc::new(ProstCodec::<(), ()>::default());
        Box::pin(async move {
            Ok(if request.uri().path().ends_with("/Wait") {
                grpc.unary(service_fn(|_: Request<()>| pending::<Result<Response<()>, Status>>()), request).await
            } else {
                let watch = service_fn(|_: Request<()>| ready(Ok::<_, Status>(Response::new(ticks()))));
                grpc.server_streaming(watch, request).await
            })
        })
    }
}

fn ticks() -> impl Stream<Item = Result<(), Status>> + Send {
    stream::unfold((), |()| async {
        sleep(Duration::from_secs(1)).await;
        Some((Ok(()), ()))
    })
}

/// Connects through memory. The clock is tokio's and advances whenever all tasks wait.
async fn connect(mut server: Server, endpoint: Endpoint) -> Channel {
    let (near, far) = tokio::io::duplex(65536);
    let incoming = stream::iter([Ok::<_, io::Error>(far)]).chain(stream::pending());
    tokio::spawn(server.add_service(Calls).serve_with_incoming(incoming));
    let mut near = Some(near);
    let connector =
        service_fn(move |_: Uri| ready(near.take().map(TokioIo::new).ok_or(io::Error::from(io::ErrorKind::NotConnected))));
    endpoint.connect_with_connector(connector).await.unwrap()
}

async fn check(name: &str, channel: Channel, is_in_request: bool) {
    let request = || {
        let mut request = Request::new(());
        if is_in_request {
            request.set_timeout(TIMEOUT);
        }
        request
    };
    let mut grpc = client::Grpc::new(channel);
    let start = Instant::now();
    grpc.ready().await.unwrap();
    let path = PathAndQuery::from_static("/finding.Calls/Wait");
    let ended = grpc.unary::<(), (), _>(request(), path, ProstCodec::default()).await.unwrap_err();
    println!("{name}: call: {:?} ({}) after {} s", ended.code(), ended.message(), start.elapsed().as_secs());

    let start = Instant::now();
    grpc.ready().await.unwrap();
    let path = PathAndQuery::from_static("/finding.Calls/Watch");
    let answer = grpc.server_streaming::<(), (), _>(request(), path, ProstCodec::default()).await.unwrap();
    let messages = answer.into_inner().take(60).filter(|message| ready(message.is_ok())).count().await;
    println!("{name}: stream: {messages} messages in {} s", start.elapsed().as_secs());
    if ended.code() != Code::Cancelled || messages != 60 {
        exit(1);
    }
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    let endpoint = || Endpoint::from_static("http://localhost");
    check("set_timeout of the request", connect(Server::builder(), endpoint()).await, true).await;
    check("timeout of the endpoint", connect(Server::builder(), endpoint().timeout(TIMEOUT)).await, false).await;
    check("timeout of the server", connect(Server::builder().timeout(TIMEOUT), endpoint()).await, false).await;
}
RUST
cargo build --quiet --target-dir target || exit 3
echo "tonic 0.14.9"
target/debug/finding
