//! The server as virt-api uses it, without TLS, with a running VMI.

use std::{net::SocketAddr, time::Duration};

use axum::{
    extract::{Path, State},
    http::StatusCode,
};
use daemon::quota::{Exceeded, HOLDER_HEADER, StreamQuota};
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Bytes, Message, client::IntoClientRequest, http::HeaderValue},
};
use tokio_util::task::TaskTracker;

use super::{CALLS, MAX_STREAMS, SCREENSHOTS, Served, lifecycle, router};
use crate::{
    metrics::{Metrics, StreamKind, StreamMetrics},
    vmi::{Request, tests::Stage},
    vsock::Guests,
};

const VMI_PATH: &str = "/v1/namespaces/ns/virtualmachineinstances/m";
const PATIENCE: Duration = Duration::from_secs(10);
/// The text of a missing guest agent in KubeVirt.
const NO_AGENT: &str =
    "\"LibvirtError(Code=86, Domain=10, Message='Guest agent is not responding: QEMU guest agent is not connected')\"";

async fn served(stage: &Stage) -> SocketAddr {
    counted(stage).await.0
}

/// Starts the server and returns its metrics.
async fn counted(stage: &Stage) -> (SocketAddr, StreamMetrics, TaskTracker) {
    with_quota(stage, MAX_STREAMS).await
}

/// Starts the server with this quota of streams.
async fn with_quota(stage: &Stage, places: usize) -> (SocketAddr, StreamMetrics, TaskTracker) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (metrics, streams) = (Metrics::new().unwrap().streams, TaskTracker::new());
    let (quota, guests) = (StreamQuota::new(places), Guests::echoing());
    let router = router(stage.vmis.clone(), metrics.clone(), quota, guests, streams.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, metrics, streams)
}

/// Waits until no stream is left.
async fn nothing_left(metrics: &StreamMetrics, streams: &TaskTracker) {
    let wait = async {
        while !streams.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the task of a stream is left");
    for kind in [StreamKind::Console, StreamKind::Vnc, StreamKind::UsbRedirection, StreamKind::Vsock] {
        assert_eq!(metrics.open_now(kind), 0, "{kind:?}");
    }
}

/// Sends a request and returns status code and body.
async fn ask(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    send(address, method, path, "").await
}

async fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (code, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

async fn open(address: SocketAddr, path: &str) -> Result<WebSocketStream<TcpStream>, (u16, String)> {
    open_for(address, path, "").await
}

/// Opens a stream of `holder`.
async fn open_for(address: SocketAddr, path: &str, holder: &str) -> Result<WebSocketStream<TcpStream>, (u16, String)> {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut request = format!("ws://{address}{VMI_PATH}/{path}").into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static("plain.kubevirt.io"));
    request.headers_mut().insert(HOLDER_HEADER, HeaderValue::from_str(holder).unwrap());
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

/// Reads binary messages until `length` bytes have arrived.
async fn read(socket: &mut WebSocketStream<TcpStream>, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = async {
        while bytes.len() < length {
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

/// Reads until the other side closes and returns its reason.
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

/// Waits until the launcher has accepted the VMI and opens a console.
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

/// Length of the first output of the fake launcher's console.
const BANNER: usize = "replay=Some(false)\n".len();

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_replays_only_on_request() {
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
    let sent: Vec<u8> = (0..100_000_u32).map(|number| number as u8).collect();
    socket.send(Message::Binary(Bytes::from(sent.clone()))).await.unwrap();
    assert_eq!(read(&mut socket, sent.len()).await, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_console_ends_the_former() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut first = console(address).await;
    let mut second = console(address).await;
    assert_eq!(closed(&mut first).await, "EOF: another client has taken the stream");
    second.send(Message::Binary(Bytes::from_static(b"x"))).await.unwrap();
    assert!(read(&mut second, BANNER + 1).await.ends_with(b"x"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_ends_with_its_launcher_and_names_the_reason() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = counted(&stage).await;
    let mut socket = console(address).await;
    assert_eq!(read(&mut socket, BANNER).await.len(), BANNER);
    assert_eq!(metrics.open_now(StreamKind::Console), 1);
    stage.launcher.exit();
    assert_eq!(closed(&mut socket).await, "the connection to virt-launcher was lost");
    nothing_left(&metrics, &streams).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_with_virt_handler_and_name_the_reason() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = counted(&stage).await;
    let mut socket = console(address).await;
    assert_eq!(read(&mut socket, BANNER).await.len(), BANNER);
    stage.stop.cancel();
    assert_eq!(closed(&mut socket).await, "virt-handler is stopping");
    nothing_left(&metrics, &streams).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_gets_the_error_of_the_launcher() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    let mut socket = console(address).await;
    socket.send(Message::Binary(Bytes::from_static(b"fail"))).await.unwrap();
    assert_eq!(closed(&mut socket).await, "the client was too slow");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_clients_that_vanish() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = counted(&stage).await;
    for _ in 0..20 {
        // Without a close frame, like a client that crashed.
        let socket = console(address).await;
        drop(socket);
    }
    let mut many = Vec::new();
    for number in 0..4 {
        let mut socket = open(address, "usbredir").await.unwrap();
        let banner = format!("channel=Some({number})\n");
        assert_eq!(read(&mut socket, banner.len()).await, banner.as_bytes());
        many.push(socket);
    }
    assert_eq!(metrics.open_now(StreamKind::UsbRedirection), 4);
    assert_eq!(open(address, "usbredir").await.unwrap_err().0, 503);
    drop(many);
    nothing_left(&metrics, &streams).await;
    assert!(open(address, "usbredir").await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_beyond_the_quota_is_refused_and_counted() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = with_quota(&stage, 2).await;
    let mut socket = console(address).await;
    assert_eq!(read(&mut socket, BANNER).await.len(), BANNER);
    drop(socket);
    nothing_left(&metrics, &streams).await;
    let first = open_for(address, "usbredir", "first").await.unwrap();
    let second = open_for(address, "usbredir", "second").await.unwrap();
    let (code, body) = open_for(address, "console", "third").await.unwrap_err();
    assert_eq!((code, body.as_str()), (429, "there are too many streams of the node, try again later"));
    assert_eq!(metrics.refused_so_far(StreamKind::Console, Exceeded::Total), 1);
    drop((first, second));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_still_sends_gets_the_reason_of_the_end() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = counted(&stage).await;
    let mut first = console(address).await;
    assert_eq!(read(&mut first, BANNER).await.len(), BANNER);
    let second = console(address).await;
    // A socket that is closed with unread data is reset, and a later send would fail.
    for _ in 0..20 {
        first.send(Message::Binary(Bytes::from_static(b"typed"))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(closed(&mut first).await, "EOF: another client has taken the stream");
    drop((first, second));
    nothing_left(&metrics, &streams).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_sent_before_the_close_reaches_the_vmi() {
    let stage = Stage::running().await;
    let (address, metrics, streams) = counted(&stage).await;
    let mut socket = console(address).await;
    let sent: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
    for piece in sent.chunks(100_000) {
        socket.send(Message::Binary(Bytes::copy_from_slice(piece))).await.unwrap();
    }
    socket.close(None).await.unwrap();
    closed(&mut socket).await;
    nothing_left(&metrics, &streams).await;
    assert!(stage.launcher.typed().ends_with(&sent), "{} bytes", stage.launcher.typed().len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_of_the_guest_agent_is_returned_as_json() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    let (code, body) = ask(address, "GET", &format!("{VMI_PATH}/guestosinfo")).await;
    let info: serde_json::Value = serde_json::from_str(&body).unwrap();
    let expected = serde_json::json!({
        "guestAgentVersion": "10.0", "hostname": "web", "os": {"id": "debian"}, "fsInfo": {"disks": []},
        "userList": [{"userName": "root", "loginTime": 1.5}],
    });
    assert_eq!((code, info), (200, expected));
    let (code, body) = ask(address, "GET", &format!("{VMI_PATH}/filesystemlist")).await;
    assert_eq!(code, 200);
    assert!(body.contains(r#""mountPoint":"/""#) && body.contains(r#""metadata":{}"#), "{body}");
    let missing = (500, format!("server error. command GetUsers failed: {NO_AGENT}"));
    assert_eq!(ask(address, "GET", &format!("{VMI_PATH}/userlist")).await, missing);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_the_domain_are_returned_as_json() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    let (code, body) = ask(address, "GET", &format!("{VMI_PATH}/usage")).await;
    let usage: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((code, &usage["cpuNanoseconds"]), (200, &serde_json::json!(2_000_000_000)), "{usage}");
    assert_eq!(ask(address, "GET", "/v1/namespaces/ns/virtualmachineinstances/none/usage").await.0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_freeze_has_a_timeout_and_its_failure_is_returned() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    let path = format!("{VMI_PATH}/freeze");
    assert_eq!(send(address, "PUT", &path, r#"{"unfreezeTimeout":"1m0s"}"#).await, (202, String::new()));
    assert!(stage.launcher.calls().contains(&"freeze 60".to_owned()));
    let unset = "Unfreeze timeout in freeze request is not set".to_owned();
    assert_eq!(send(address, "PUT", &path, "").await, (400, unset));
    let failed = send(address, "PUT", &path, r#"{"unfreezeTimeout":"13s"}"#).await;
    assert_eq!(failed, (400, format!("server error. command Freeze failed: {NO_AGENT}")));
    assert!(stage.records.reasons().contains(&"FreezeError"));
    let refused = (400, "server error. command Unfreeze failed: \"too cold\"".to_owned());
    assert_eq!(ask(address, "PUT", &format!("{VMI_PATH}/unfreeze")).await, refused);
}

/// Adds a VSOCK device to the VMI.
fn attach_vsock(stage: &Stage, cid: &serde_json::Value) {
    stage.change(|vmi| {
        vmi["spec"]["domain"]["devices"]["autoattachVSOCK"] = true.into();
        vmi["status"]["VSOCKCID"] = cid.clone();
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vsock_ports_carry_bytes_both_ways_for_any_number_of_clients() {
    let stage = Stage::running().await;
    attach_vsock(&stage, &7.into());
    let (address, metrics, streams) = counted(&stage).await;
    drop(console(address).await);
    let mut first = open(address, "vsock?port=22&tls=false").await.unwrap();
    let mut second = open(address, "vsock?port=22").await.unwrap();
    let greeting = b"7:22\n";
    assert_eq!(read(&mut first, greeting.len()).await, greeting);
    assert_eq!(read(&mut second, greeting.len()).await, greeting);
    let sent: Vec<u8> = (0..100_000_u32).map(|number| number as u8).collect();
    first.send(Message::Binary(Bytes::from(sent.clone()))).await.unwrap();
    assert_eq!(read(&mut first, sent.len()).await, sent);
    first.close(None).await.unwrap();
    closed(&mut first).await;
    stage.stop.cancel();
    assert_eq!(closed(&mut second).await, "virt-handler is stopping");
    nothing_left(&metrics, &streams).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_vsock_port_is_an_error_before_the_upgrade() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    let without_certificate =
        "cannot connect to VSOCK port 22 of the guest: there is no certificate to show to guests yet";
    for (cid, query, code, message) in [
        (7.into(), "port=ssh", 400, "port \"ssh\" is not a number between 0 and 4294967295"),
        (serde_json::Value::Null, "port=22", 500, "VSOCK CID is nil"),
        (2.into(), "port=22", 500, "VSOCK CID 2 is not one of a guest"),
        (7.into(), "port=22&tls=true", 500, without_certificate),
    ] {
        attach_vsock(&stage, &cid);
        let error = open(address, &format!("vsock?{query}")).await.unwrap_err();
        assert_eq!(error, (code, message.to_owned()), "{cid} {query}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_namespace_blocks_the_calls_of_others() {
    let stage = Stage::running().await;
    let served = Served {
        vmis: stage.vmis.clone(),
        metrics: Metrics::new().unwrap().streams,
        quota: StreamQuota::new(MAX_STREAMS),
        guests: Guests::echoing(),
        streams: TaskTracker::new(),
        screenshots: StreamQuota::new(SCREENSHOTS),
        calls: StreamQuota::new(CALLS),
    };
    let held: Vec<_> = std::iter::from_fn(|| served.call_slot("ns").ok()).collect();
    assert!(served.call_slot("other").is_ok(), "{} of {CALLS} places", held.len());
    let pause = || lifecycle::ask(State(served.clone()), Path(("ns".to_owned(), "m".to_owned())), Request::Pause);
    assert_eq!(pause().await.err().map(|refusal| refusal.0), Some(StatusCode::TOO_MANY_REQUESTS));
    drop(held);
    assert_eq!(pause().await.ok(), Some(StatusCode::ACCEPTED));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_features_are_refused_by_name() {
    let stage = Stage::running().await;
    let address = served(&stage).await;
    drop(console(address).await);
    let refused = (400, "VM doesn't have VSOCK enabled".to_owned());
    assert_eq!(open(address, "vsock?port=22&tls=true").await.unwrap_err(), refused);
    for path in ["backup", "redefine-checkpoint", "sev/injectlaunchsecret"] {
        let (code, body) = ask(address, "PUT", &format!("{VMI_PATH}/{path}")).await;
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, status["code"].as_u64()), (501, Some(501)), "{path}");
    }
    let (code, body) = ask(address, "GET", "/nowhere").await;
    assert!(code == 404 && body.contains(r#""reason":"NotFound""#), "{body}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_launcher_are_returned_before_the_upgrade() {
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
    assert_eq!(ask(address, "PUT", &format!("{VMI_PATH}/pause")).await, (202, String::new()));
    assert_eq!(ask(address, "PUT", &format!("{VMI_PATH}/unpause")).await.0, 202);
    assert_eq!(ask(address, "PUT", &format!("{VMI_PATH}/softreboot")).await.0, 202);
    let refused = (500, "server error. command Reset failed: \"no button\"".to_owned());
    assert_eq!(ask(address, "PUT", &format!("{VMI_PATH}/reset")).await, refused);
    assert_eq!(ask(address, "GET", &format!("{VMI_PATH}/vnc/screenshot")).await.0, 200);
    let unknown = "/v1/namespaces/ns/virtualmachineinstances/other/pause";
    assert_eq!(ask(address, "PUT", unknown).await, (404, "VMI ns/other does not exist".to_owned()));
    assert_eq!(ask(address, "GET", &format!("{VMI_PATH}/pause")).await.0, 405);
}
