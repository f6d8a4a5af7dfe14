//! Components that the test serves, each with a certificate for its own name.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use daemon::tls::{ClientPolicy, Identity, Roots, client_config, server_config};
use http_body_util::Full;
use hyper::{Response, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let pem = params.self_signed(&key).unwrap().pem();
    Authority { pem, issuer: Issuer::new(params, key) }
}

/// Serves a component and counts the connections that were opened. Each connection answers `requests` requests. The first
/// request for `/cut` ends its connection without an answer.
async fn serve(authority: &Authority, name: &str, requests: usize) -> (Component, Arc<AtomicUsize>) {
    daemon::tls::install_provider();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority.issuer).unwrap();
    let identity = Identity::empty();
    identity.set_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    let acceptor = TlsAcceptor::from(server_config(&identity, ClientPolicy::Unjudged, &["http/1.1"]).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let opened = Arc::new(AtomicUsize::new(0));
    let counter = opened.clone();
    let cut = Arc::new(AtomicBool::new(false));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, counter, cut) = (acceptor.clone(), counter.clone(), cut.clone());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                counter.fetch_add(1, Ordering::SeqCst);
                let answered = AtomicUsize::new(0);
                let answer = service_fn(|request: Request<Incoming>| {
                    let last = answered.fetch_add(1, Ordering::SeqCst) + 1 >= requests;
                    let path = request.uri().path().to_owned();
                    let cuts = path == "/cut" && !cut.swap(true, Ordering::SeqCst);
                    async move {
                        if cuts {
                            return Err(std::io::Error::other("cut"));
                        }
                        let status = if path == "/refused" { 409 } else { 200 };
                        let mut answer = Response::builder().status(status);
                        if last {
                            answer = answer.header(header::CONNECTION, "close");
                        }
                        answer.body(Full::new(Bytes::from(path))).map_err(std::io::Error::other)
                    }
                });
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
            });
        }
    });
    (Component { name: name.to_owned(), address, server_name: name.to_owned() }, opened)
}

fn client(authority: &Authority) -> ComponentClient {
    let roots = Roots::empty();
    roots.set_pem(authority.pem.as_bytes()).unwrap();
    ComponentClient::new(client_config(&roots, None, &["http/1.1"]).unwrap())
}

fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

#[tokio::test]
async fn calls_to_one_component_share_a_connection() {
    let authority = authority();
    let (component, opened) = serve(&authority, "n1.virt-handler", usize::MAX).await;
    let client = client(&authority);
    for _ in 0..3 {
        assert_eq!(client.call(&component, get("/a"), 100).await.unwrap(), "/a");
        tokio::task::yield_now().await;
    }
    let refusal = client.call(&component, get("/refused"), 100).await.unwrap_err();
    assert!(matches!(refusal, ComponentError::Refused { status: StatusCode::CONFLICT, .. }), "{refusal}");
    client.call(&component, get("/b"), 100).await.unwrap();
    assert_eq!(opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn pooled_connection_serves_no_other_node() {
    let authority = authority();
    let (component, opened) = serve(&authority, "n1.virt-handler", usize::MAX).await;
    let client = client(&authority);
    client.call(&component, get("/a"), 100).await.unwrap();
    // The same address, as after a pod of another node has received it.
    for server_name in ["n2.virt-handler", "virt-api.kubevirt.svc"] {
        let other = Component { server_name: server_name.to_owned(), ..component.clone() };
        let error = client.call(&other, get("/a"), 100).await.unwrap_err();
        assert!(matches!(error, ComponentError::Connect { .. }), "{error}");
        let error = client.open(&other, get("/a")).await.unwrap_err();
        assert!(matches!(error, ComponentError::Connect { .. }), "{error}");
    }
    assert_eq!(opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn certificate_of_another_authority_is_refused() {
    let (component, _) = serve(&authority(), "n1.virt-handler", usize::MAX).await;
    let error = client(&authority()).call(&component, get("/a"), 100).await.unwrap_err();
    assert!(matches!(error, ComponentError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn closed_connection_is_replaced() {
    let authority = authority();
    let (component, opened) = serve(&authority, "n1.virt-handler", 1).await;
    let client = client(&authority);
    for number in 1..=3 {
        client.call(&component, get("/a"), 100).await.unwrap();
        assert_eq!(opened.load(Ordering::SeqCst), number);
    }
}

#[tokio::test]
async fn streams_and_large_answers_have_connections_of_their_own() {
    let authority = authority();
    let (component, opened) = serve(&authority, "n1.virt-handler", usize::MAX).await;
    let client = client(&authority);
    client.call(&component, get("/a"), 100).await.unwrap();
    client.open(&component, get("/a")).await.unwrap();
    let body = client.fetch(&component, get("/a")).await.unwrap();
    assert_eq!(body.collect().await.unwrap().to_bytes(), "/a");
    assert_eq!(opened.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn answer_beyond_its_limit_is_an_error() {
    let authority = authority();
    let (component, _) = serve(&authority, "n1.virt-handler", usize::MAX).await;
    let error = client(&authority).call(&component, get("/too-long"), 3).await.unwrap_err();
    assert!(matches!(error, ComponentError::Body { .. }), "{error}");
}

#[tokio::test]
async fn only_a_request_that_changes_nothing_is_repeated_after_it_was_sent() {
    let authority = authority();
    for (method, repeated) in [("GET", true), ("PUT", false)] {
        let (component, opened) = serve(&authority, "n1.virt-handler", usize::MAX).await;
        let client = client(&authority);
        client.call(&component, get("/a"), 100).await.unwrap();
        let request = || Request::builder().method(method).uri("/cut").body(Body::empty()).unwrap();
        let answer = client.call(&component, request(), 100).await;
        if repeated {
            assert_eq!(answer.unwrap(), "/cut");
        } else {
            let error = answer.unwrap_err();
            assert!(matches!(error, ComponentError::Interrupted { .. }), "{error}");
            assert_eq!(opened.load(Ordering::SeqCst), 1, "it was sent again");
            assert_eq!(client.call(&component, request(), 100).await.unwrap(), "/cut");
        }
        assert_eq!(opened.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test]
async fn request_on_a_new_connection_is_not_repeated() {
    let authority = authority();
    let (component, opened) = serve(&authority, "n1.virt-handler", usize::MAX).await;
    let error = client(&authority).call(&component, get("/cut"), 100).await.unwrap_err();
    assert!(matches!(error, ComponentError::Interrupted { .. }), "{error}");
    assert_eq!(opened.load(Ordering::SeqCst), 1);
}
