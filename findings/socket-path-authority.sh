#!/bin/sh
# Version: google.golang.org/grpc 1.76.0, the Rust crate http 1.5.0.
# Expected: a gRPC client that connects to a socket by its path, as kubelet does to register plugins, reaches servers of any language.
# Seen: grpc-go sends the path, percent-encoded, as :authority. RFC 3986 permits percent-encoding in a host, but the crate http
# accepts it only before an @, so that servers on h2 (hyper, tonic) reset each call as a protocol error before they see it. A
# path with an @ in its last part is accepted.
# Consequence: the socket of a plugin for kubelet that is written in Rust needs an @ in its name.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
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
	"google.golang.org/grpc/metadata"
)

func main() {
	path := os.Args[1]
	listener, err := net.Listen("unix", path)
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		received, _ := metadata.FromIncomingContext(stream.Context())
		fmt.Println(received.Get(":authority")[0])
		return nil
	}))
	go server.Serve(listener)
	dialer := func(ctx context.Context, path string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	client, err := grpc.NewClient("passthrough:"+path, grpc.WithContextDialer(dialer), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stream, err := client.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, "/pluginregistration.Registration/GetInfo")
	if err == nil {
		stream.CloseSend()
		stream.RecvMsg(nil)
	}
	server.Stop()
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o client .
mkdir plugins
plain=$(./client plugins/a.sock | tail -n 1)
at=$(./client plugins/a@b.sock | tail -n 1)
mkdir -p crate/src
cat >crate/Cargo.toml <<'TOML'
[package]
name = "finding"
version = "0.0.0"
edition = "2024"
[dependencies]
http = "=1.5.0"
TOML
cat >crate/src/main.rs <<'RUST'
fn main() {
    for name in std::env::args().skip(1) {
        println!("{name}: {:?}", name.parse::<http::uri::Authority>().map(drop));
    }
}
RUST
cargo build --quiet --manifest-path crate/Cargo.toml --target-dir crate/target || exit 3
parsed=$(crate/target/debug/finding "$plain" "$at")
echo "$parsed"
case $plain in *%2Fa.sock) ;; *) exit 1 ;; esac
[ "$(echo "$parsed" | sed 's/.*: //')" = "$(printf 'Err(InvalidUri(InvalidAuthority))\nOk(())')" ]
