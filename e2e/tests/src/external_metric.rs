//! The API of external metrics with one metric, which an APIService makes an API of the cluster.

use std::{
    convert::Infallible,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context, Result};
use bytes::Bytes;
use daemon::tls::provider;
use http::{Request, Response, header::CONTENT_TYPE};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::jiff::Timestamp;
use rustls::ServerConfig;
use rustls_pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::AbortHandle};
use tokio_rustls::TlsAcceptor;

/// Path of the API.
const API: &str = "/apis/external.metrics.k8s.io/v1beta1";

/// A server of a metric, of any name in any namespace. Dropping it ends it.
pub struct ExternalMetric {
    /// Its port on all addresses of this host.
    pub port: u16,
    value: Arc<AtomicU32>,
    server: AbortHandle,
}

impl ExternalMetric {
    /// Starts a server on a free port of all addresses. The metric is 0.
    ///
    /// # Errors
    /// Fails if it cannot listen.
    pub async fn serve() -> Result<Self> {
        let key = rcgen::generate_simple_self_signed(["metrics".to_owned()])?;
        let certificate = key.cert.der().clone();
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], PrivateKeyDer::from(key.signing_key))?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.context("cannot listen for metrics")?;
        let port = listener.local_addr()?.port();
        let value = Arc::new(AtomicU32::new(0));
        let served = value.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, value) = (acceptor.clone(), served.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let answer = service_fn(move |request: Request<Incoming>| {
                        let answer = answer(request.uri().path(), value.load(Ordering::Relaxed));
                        async move { Ok::<_, Infallible>(answer) }
                    });
                    // The API server closes connections.
                    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await);
                });
            }
        });
        Ok(Self { port, value, server: server.abort_handle() })
    }

    /// Sets the metric.
    pub fn set(&self, value: u32) {
        self.value.store(value, Ordering::Relaxed);
    }
}

impl Drop for ExternalMetric {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn answer(path: &str, value: u32) -> Response<Full<Bytes>> {
    let (code, body) = match path.strip_prefix(API) {
        Some("" | "/") => (
            200,
            json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": []}),
        ),
        Some(metric) => (200, list(metric.rsplit('/').next().unwrap_or_default(), value)),
        None => (404, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})),
    };
    let mut response = Response::new(Full::from(body.to_string()));
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn list(metric: &str, value: u32) -> Value {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({
        "kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": {},
        "items": [{"metricName": metric, "metricLabels": {}, "timestamp": now, "value": value.to_string()}],
    })
}
