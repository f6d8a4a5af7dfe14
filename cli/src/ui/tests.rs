use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// Answers the requests that the pages cause at the API server.
fn api_server(method: &Method, path: &str) -> (StatusCode, String) {
    match (method, path) {
        (&Method::PUT, path) if path.ends_with("/namespaces/a/virtualmachines/box/start") => {
            (StatusCode::ACCEPTED, String::new())
        }
        _ => (StatusCode::CONFLICT, json!({"kind": "Status", "message": "VM is already running"}).to_string()),
    }
}

/// Starts a server whose API server is a function. Returns its port and the path of its token.
async fn start() -> (u16, String) {
    let api = tower::service_fn(|request: Request<Body>| async move {
        let (code, body) = api_server(request.method(), request.uri().path());
        Response::builder().status(code).body(Body::from(body.into_bytes()))
    });
    let connection = Connection {
        client: kube::Client::new(api, "a"),
        namespace: "a".to_owned(),
        request_timeout: Duration::ZERO,
        verbosity: 0,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let guard = Guard::new(port).unwrap();
    let path = guard.url().split_once(&port.to_string()).unwrap().1.to_owned();
    let server = Arc::new(Server { guard, files: Files::load().unwrap(), connection, namespace: None });
    tokio::spawn(async move { accept(&listener, server).await });
    (port, path)
}

/// Sends a request and returns the whole answer.
async fn exchange(port: u16, request: String) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn pages_are_sent_only_with_the_token_and_forbid_other_servers() {
    let (port, base) = start().await;
    let get = |path: String| format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n");
    for (path, status, text) in [
        (base.clone(), "HTTP/1.1 200", "<title>Virtual machines</title>"),
        (format!("{base}licences.txt"), "HTTP/1.1 200", "Mozilla Public License"),
        (format!("{base}none.js"), "HTTP/1.1 404", "404"),
        (format!("{base}watch"), "HTTP/1.1 400", "WebSocket"),
        (format!("{base}vms/a/box/start"), "HTTP/1.1 405", "405"),
        ("/".to_owned(), "HTTP/1.1 403", "open the URL that kubectl virt ui printed"),
        (format!("/{}/", "0".repeat(64)), "HTTP/1.1 403", "open the URL that kubectl virt ui printed"),
    ] {
        let answer = exchange(port, get(path.clone())).await;
        assert!(answer.starts_with(status) && answer.contains(text), "{path}: {answer}");
        for header in
            ["content-security-policy: default-src 'none'; script-src 'self'", "x-content-type-options: nosniff"]
        {
            assert!(answer.contains(header), "{path}: {answer}");
        }
        assert!(!answer.contains("unsafe-inline"), "{path}: {answer}");
    }
    let console = exchange(port, get(format!("{base}console.html"))).await;
    assert!(console.contains("script-src 'self'; style-src 'self' 'unsafe-inline'"), "{console}");
}

#[tokio::test]
async fn actions_are_sent_to_the_api_server_and_its_messages_are_returned() {
    let (port, base) = start().await;
    for (action, origin, status, text) in [
        ("start", format!("http://127.0.0.1:{port}"), "HTTP/1.1 200", "\r\n\r\n"),
        ("migrate", format!("http://127.0.0.1:{port}"), "HTTP/1.1 409", "VM is already running"),
        ("start", "http://example.com".to_owned(), "HTTP/1.1 403", "only the pages of this server"),
    ] {
        let request = format!(
            "POST {base}vms/a/box/{action} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\norigin: {origin}\r\nconnection: close\r\n\
             content-length: 0\r\n\r\n"
        );
        let answer = exchange(port, request).await;
        assert!(answer.starts_with(status) && answer.contains(text), "{action} {origin}: {answer}");
    }
}

#[tokio::test]
async fn stream_of_a_vmi_that_cannot_be_opened_reports_the_reason() {
    use futures::StreamExt;
    use tokio_tungstenite::tungstenite::client::IntoClientRequest;

    let (port, base) = start().await;
    let mut request = format!("ws://127.0.0.1:{port}{base}vms/a/box/console").into_client_request().unwrap();
    request.headers_mut().insert("origin", format!("http://127.0.0.1:{port}").parse().unwrap());
    let (mut page, _) = tokio_tungstenite::connect_async(request).await.unwrap();
    assert_eq!(page.next().await.unwrap().unwrap().into_text().unwrap(), "VM is already running");
    assert!(page.next().await.unwrap().unwrap().is_close());
}

#[test]
fn modules_of_the_pages_pass_their_own_tests() {
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ui/page/rows.test.mjs");
    match std::process::Command::new("node").args(["--test", tests]).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout)),
        Err(_) => skips::skip("node"),
    }
}
