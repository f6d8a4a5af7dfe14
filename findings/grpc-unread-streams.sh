#!/bin/sh
# Version: the Rust crate tonic 0.14.9 (on h2 0.4), compared with grpc-go 1.76.0.
# Expected: HTTP/2 limits each stream by a window of its own, so that a gRPC stream that nobody reads for a while delays no other call
# of the channel. grpc-go behaves like this.
# Seen: h2 gives room back to the window of the connection only as the application reads, and the defaults of tonic let few streams
# use it up. A server has 1 MiB for a stream and 1 MiB for the connection: while one handler does not read the messages that it is
# sent, no message of that connection arrives, those of one byte included. A client has 2 MiB and 5 MiB: three answers that are
# not read stop all calls of all clones of the channel. With http2_adaptive_window, meant for throughput, both begin at 64 KiB, and
# one suffices in either direction. The others go on when the stream is read or ends; keep-alive pings are answered meanwhile.
# Consequence: set initial_connection_window_size above the stream window times the number of streams that can pause, read streams
# in a task that never waits for their consumer, or give them a connection of their own.
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
use tokio::time::{sleep, timeout};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    client,
    server::{self, NamedService},
    transport::{Channel, Endpoint, Server},
};
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};

const MIB: u32 = 1 << 20;

type Bytes = Vec<u8>;

/// Echo answers, Upload never reads its messages, Download sends more than anybody reads.
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
        let mut grpc = server::Grpc::new(ProstCodec::<Bytes, Bytes>::default());
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/finding.Calls/Echo" => {
                    let echo = |request: Request<Bytes>| ready(Ok::<_, Status>(Response::new(request.into_inner())));
                    grpc.unary(service_fn(echo), request).await
                }
                "/finding.Calls/Upload" => {
                    let upload = |unread: Request<Streaming<Bytes>>| async move {
                        pending::<()>().await;
                        drop(unread);
                        Ok::<_, Status>(Response::new(Bytes::new()))
                    };
                    grpc.client_streaming(service_fn(upload), request).await
                }
                _ => {
                    let download =
                        |_: Request<Bytes>| ready(Ok::<_, Status>(Response::new(messages().map(Ok::<_, Status>))));
                    grpc.server_streaming(service_fn(download), request).await
                }
            })
        })
    }
}

fn messages() -> impl Stream<Item = Bytes> + Send + 'static {
    stream::repeat_with(|| vec![0; 65536])
}

/// Connects through memory. The clock is tokio's and advances whenever all tasks wait.
async fn connect(mut server: Server, endpoint: Endpoint) -> client::Grpc<Channel> {
    let (near, far) = tokio::io::duplex(65536);
    let incoming = stream::iter([Ok::<_, io::Error>(far)]).chain(stream::pending());
    tokio::spawn(server.add_service(Calls).serve_with_incoming(incoming));
    let mut near = Some(near);
    let connector = service_fn(move |_: Uri| {
        ready(near.take().map(TokioIo::new).ok_or(io::Error::from(io::ErrorKind::NotConnected)))
    });
    client::Grpc::new(endpoint.connect_with_connector(connector).await.unwrap())
}

/// Returns true if another call of the channel is answered within a minute.
async fn answers(channel: &client::Grpc<Channel>) -> bool {
    let mut grpc = channel.clone();
    let path = PathAndQuery::from_static("/finding.Calls/Echo");
    grpc.ready().await.unwrap();
    let call = grpc.unary::<Bytes, Bytes, _>(Request::new(vec![1]), path, ProstCodec::default());
    timeout(Duration::from_secs(60), call).await.is_ok_and(|answer| answer.unwrap().into_inner() == [1])
}

/// Counts the calls with an unread stream, up to 8, after which another call of the channel is not answered.
async fn count(name: &str, channel: client::Grpc<Channel>, uploads: bool, expected: Option<usize>) {
    let (mut unread, mut tasks) = (Vec::new(), Vec::new());
    let mut blocked = None;
    for calls in 1..=8 {
        let mut grpc = channel.clone();
        grpc.ready().await.unwrap();
        if uploads {
            let path = PathAndQuery::from_static("/finding.Calls/Upload");
            tasks.push(tokio::spawn(async move {
                let request = Request::new(messages());
                let _ = grpc.client_streaming::<_, Bytes, Bytes, _>(request, path, ProstCodec::default()).await;
            }));
        } else {
            let path = PathAndQuery::from_static("/finding.Calls/Download");
            let request = Request::new(Bytes::new());
            let call = grpc.server_streaming::<Bytes, Bytes, _>(request, path, ProstCodec::default());
            unread.push(timeout(Duration::from_secs(60), call).await.unwrap().unwrap());
        }
        sleep(Duration::from_secs(1)).await;
        if !answers(&channel).await {
            blocked = Some(calls);
            break;
        }
    }
    match blocked {
        Some(calls) => println!("{name}: other calls wait beside {calls} unread"),
        None => println!("{name}: other calls are answered beside 8 unread"),
    }
    // They go on when the streams end.
    drop(unread);
    tasks.iter().for_each(|task| task.abort());
    sleep(Duration::from_secs(1)).await;
    if blocked != expected || !answers(&channel).await {
        exit(1);
    }
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() {
    let endpoint = || Endpoint::from_static("http://localhost").http2_keep_alive_interval(Duration::from_secs(5));
    count("uploads", connect(Server::builder(), endpoint()).await, true, Some(1)).await;
    count("downloads", connect(Server::builder(), endpoint()).await, false, Some(3)).await;
    let adaptive = Server::builder().http2_adaptive_window(Some(true));
    count("uploads, adaptive", connect(adaptive, endpoint()).await, true, Some(1)).await;
    let adaptive = endpoint().http2_adaptive_window(true);
    count("downloads, adaptive", connect(Server::builder(), adaptive).await, false, Some(1)).await;
    let server = Server::builder().initial_connection_window_size(16 * MIB);
    count("uploads, server's connection window of 16 MiB", connect(server, endpoint()).await, true, None).await;
    let client = endpoint().initial_connection_window_size(17 * MIB);
    count("downloads, client's connection window of 17 MiB", connect(Server::builder(), client).await, false, None)
        .await;
}
RUST
cargo build --quiet --target-dir target || exit 3
echo "tonic 0.14.9"
target/debug/finding

export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get google.golang.org/grpc@v1.76.0 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func serve(_ any, stream grpc.ServerStream) error {
	message := &wrapperspb.BytesValue{}
	switch name, _ := grpc.MethodFromServerStream(stream); name {
	case "/finding.Calls/Echo":
		if err := stream.RecvMsg(message); err != nil {
			return err
		}
		return stream.SendMsg(message)
	case "/finding.Calls/Download":
		for stream.SendMsg(wrapperspb.Bytes(make([]byte, 65536))) == nil {
		}
	}
	<-stream.Context().Done()
	return nil
}

func main() {
	listener, _ := net.Listen("tcp", "127.0.0.1:0")
	go grpc.NewServer(grpc.UnknownServiceHandler(serve)).Serve(listener)
	both := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	for _, name := range []string{"Upload", "Download"} {
		client, _ := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		for range 8 {
			unread, err := client.NewStream(context.Background(), both, "/finding.Calls/"+name)
			if err != nil {
				os.Exit(1)
			}
			go func() {
				for name == "Upload" && unread.SendMsg(wrapperspb.Bytes(make([]byte, 65536))) == nil {
				}
			}()
		}
		time.Sleep(time.Second)
		limited, end := context.WithTimeout(context.Background(), 20*time.Second)
		answer := &wrapperspb.BytesValue{}
		if err := client.Invoke(limited, "/finding.Calls/Echo", wrapperspb.Bytes([]byte{1}), answer); err != nil {
			fmt.Println(name, err)
			os.Exit(1)
		}
		end()
		fmt.Printf("grpc-go %s, %s: other calls are answered beside 8 unread\n", grpc.Version, name)
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding . && ./finding
