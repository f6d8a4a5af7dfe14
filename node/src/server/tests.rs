//! The server as virt-api meets it, TLS aside, with a machine that runs behind it.

use std::{net::SocketAddr, time::Duration};

use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Bytes, Message, client::IntoClientRequest, http::HeaderValue},
};

use super::router;
use crate::{machine::tests::Stage, metrics::Metrics};

const MACHINE: &str = "/v1/namespaces/ns/virtualmachineinstances/m";
const PATIENCE: Duration = Duration::from_secs(10);

async fn served(stage: &Stage) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = router(stage.machines.clone(), Metrics::new().unwrap().streams);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// Status code and body of a request.
async fn ask(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (code, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

async fn open(address: SocketAddr, path: &str) -> Result<WebSocketStream<TcpStream>, (u16, String)> {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut request = format!("ws://{address}{MACHINE}/{path}").into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static("plain.kubevirt.io"));
    match tokio_tungstenite::client_async(request, stream).await {
        Ok((socket, response)) => {
            assert_eq!(response.headers()["sec-websocket-protocol"], "plain.kubevirt.io");
            Ok(socket)
        }
        Err(tokio_tungstenite::tungstenite::Error::Http(response)) => {
            let body = response.body().clone().unwrap_or_default();
            Err((response.status().as_u16(), String::from_utf8_lossy(&body).into_owned()))
        }
        Err(error) => panic!("{error}"),
    }
}

/// Reads binary messages until `wanted` bytes are there.
async fn read(socket: &mut WebSocketStream<TcpStream>, wanted: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = async {
        while bytes.len() < wanted {
            match socket.next().await {
                Some(Ok(Message::Binary(data))) => bytes.extend_from_slice(&data),
                Some(Ok(_)) => {}
                other => panic!("the stream ended: {other:?}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, read).await.unwrap();
    bytes
}

/// Reads until the other side closes; returns the reason it gives.
async fn closed(socket: &mut WebSocketStream<TcpStream>) -> String {
    let read = async {
        loop {
            match socket.next().await {
                Some(Ok(Message::Close(frame))) => {
                    return frame.map(|frame| frame.reason.to_string()).unwrap_or_default();
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return String::new(),
            }
        }
    };
    tokio::time::timeout(PATIENCE, read).await.unwrap()
}

/// Waits until streams reach the launcher: it has accepted the machine.
async fn console(address: SocketAddr) -> WebSocketStream<TcpStream> {
    let connect = async {
        loop {
            if let Ok(socket) = open(address, "console").await {
                return socket;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, connect).await.unwrap()
}

/// Length of what the stand-in for a launcher says first on a console.
const BANNER: usize = "replay=Some(false)\n".len();

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_replays_only_for_who_asks() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut plain = console(address).await;
    let banner = b"replay=Some(false)\n";
    assert_eq!(read(&mut plain, banner.len()).await, banner);
    let mut asking = open(address, "console?replay=true").await.unwrap();
    let banner = b"replay=Some(true)\n";
    assert_eq!(read(&mut asking, banner.len()).await, banner);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_carries_bytes_both_ways() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut socket = console(address).await;
    assert_eq!(read(&mut socket, BANNER).await.len(), BANNER);
    // Larger than one chunk: arrives in order and complete.
    let sent: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
    socket.send(Message::Binary(Bytes::from(sent.clone()))).await.unwrap();
    assert_eq!(read(&mut socket, sent.len()).await, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_console_ends_the_former() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut first = console(address).await;
    let mut second = console(address).await;
    assert_eq!(closed(&mut first).await, "another client has taken the stream");
    second.send(Message::Binary(Bytes::from_static(b"x"))).await.unwrap();
    assert!(read(&mut second, BANNER + 1).await.ends_with(b"x"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_ends_with_its_launcher() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut socket = console(address).await;
    stage.launcher.exit();
    closed(&mut socket).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_launcher_cannot_do_is_said_before_the_upgrade() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    assert_eq!(open(address, "vnc").await.unwrap_err(), (500, "no display".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_with_the_codes_and_texts_of_the_reference() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    assert_eq!(ask(address, "PUT", &format!("{MACHINE}/pause")).await, (202, String::new()));
    assert_eq!(ask(address, "PUT", &format!("{MACHINE}/unpause")).await.0, 202);
    assert_eq!(ask(address, "PUT", &format!("{MACHINE}/softreboot")).await.0, 202);
    assert_eq!(ask(address, "PUT", &format!("{MACHINE}/reset")).await, (500, "no button".to_owned()));
    assert_eq!(ask(address, "GET", &format!("{MACHINE}/vnc/screenshot")).await.0, 200);
    let unknown = "/v1/namespaces/ns/virtualmachineinstances/other/pause";
    assert_eq!(ask(address, "PUT", unknown).await, (404, "VMI ns/other does not exist".to_owned()));
    assert_eq!(ask(address, "GET", &format!("{MACHINE}/pause")).await.0, 405);
}
