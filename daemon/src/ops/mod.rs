//! The endpoints `/metrics`, `/healthz`, `/livez`, `/readyz`, and those of the profiler.
//!
//! [`Ops`] is their router, `access` authorizes readers of metrics, [`Readiness`] holds the conditions of `/readyz`.

mod access;
mod process;
mod readiness;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    extract::{Extension, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use futures::future::BoxFuture;
use kube::Client;
use profiler::{Profiler, ProfilerAction};
use prometheus::{Encoder, Registry, TextEncoder};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::{access::MetricsAccess, process::Process};
use crate::{
    client,
    config::ConfigHandle,
    tls::{Callers, ClientPolicy, Identity, Limits, Peer, ProbeAddresses, Roots, ServerTls, TlsError, serve},
};

pub use readiness::Readiness;

/// Time for which the answer of the API server, or its failure, is reused, so that probes cause no load.
const VERSION_TTL: Duration = Duration::from_secs(10);
/// Longest wait for the API server while answering a health request.
const VERSION_TIMEOUT: Duration = Duration::from_secs(4);

/// The endpoints and the state that they report.
#[derive(Clone)]
pub struct Ops {
    client: Client,
    config: ConfigHandle,
    readiness: Readiness,
    registry: Registry,
    roots: Roots,
    profiler: Profiler,
    connectivity: Arc<tokio::sync::Mutex<Option<Connectivity>>>,
    access: Arc<MetricsAccess>,
    refresh: Option<Refresh>,
}

/// Updates metrics before they are read.
type Refresh = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

impl Ops {
    /// Creates endpoints over `registry`, to which it adds those of the process and its requests to the API server.
    /// `roots` authenticate virt-api, the only client that may request profiles.
    #[must_use]
    pub fn new(client: Client, config: ConfigHandle, readiness: Readiness, registry: Registry, roots: Roots) -> Self {
        client::metrics::register(&registry);
        if let Ok(process) = Process::new() {
            // A second server in one process finds the metrics registered.
            let _ = registry.register(Box::new(process));
        }
        Self {
            access: Arc::new(MetricsAccess::new(client.clone())),
            refresh: None,
            client,
            config,
            readiness,
            registry,
            roots,
            profiler: Profiler::default(),
            connectivity: Arc::default(),
        }
    }

    /// Sets a function that updates metrics each time before they are read.
    #[must_use]
    pub fn with_refresh(self, refresh: impl Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static) -> Self {
        Self { refresh: Some(Arc::new(refresh)), ..self }
    }

    /// Returns the router with the endpoints.
    pub fn router(self) -> Router {
        Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/livez", get(|| async { "ok" }))
            .route("/readyz", get(readyz))
            .route("/start-profiler", profiler(ProfilerAction::Start))
            .route("/stop-profiler", profiler(ProfilerAction::Stop))
            .route("/dump-profiler", profiler(ProfilerAction::Dump))
            .with_state(self)
    }

    /// Serves the endpoints and those of `more` until `stop` is cancelled. Handshakes succeed from the moment `identity` has a
    /// certificate. kubelet's probes have connections of their own.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn serve(
        self,
        listener: TcpListener,
        more: Router,
        identity: &Identity,
        clients: ClientPolicy,
        limits: Limits,
        stop: CancellationToken,
    ) -> Result<impl Future<Output = ()> + Send + use<>, TlsError> {
        let tls = ServerTls::following(identity, clients, &["http/1.1"], self.config.clone())?;
        let callers = Callers { probes: ProbeAddresses::of_this_pod(), ..Callers::default() };
        Ok(serve(listener, tls, self.router().merge(more), limits, callers, stop))
    }

    /// Returns status and body of `/healthz`: an error when the API server does not answer.
    pub async fn health(&self) -> (StatusCode, Value) {
        let resource_version = self.config.resource_version();
        let mut cached = self.connectivity.lock().await;
        let recent = cached.take().filter(|answer| answer.at.elapsed() < VERSION_TTL);
        let answer = match recent {
            Some(answer) => answer,
            None => self.connectivity().await,
        };
        *cached = Some(answer.clone());
        drop(cached);
        (answer.status, json!({"apiserver": answer.report, "config-resource-version": resource_version}))
    }

    /// Requests the version of the API server. A failure is logged here, once for each request.
    async fn connectivity(&self) -> Connectivity {
        let answer = tokio::time::timeout(VERSION_TIMEOUT, self.client.apiserver_version()).await;
        let at = Instant::now();
        let failure = match answer {
            Ok(Ok(version)) => {
                return Connectivity {
                    at,
                    status: StatusCode::OK,
                    report: json!({"connectivity": "ok", "version": version}),
                };
            }
            Ok(Err(error)) => crate::errors::chain(&error),
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::warn!(error = failure, "the API server does not answer; /healthz fails");
        let report = json!({"connectivity": "failed", "error": failure});
        Connectivity { at, status: StatusCode::INTERNAL_SERVER_ERROR, report }
    }
}

/// The last answer of the API server, or its failure, as `/healthz` reports it.
#[derive(Clone)]
struct Connectivity {
    at: Instant,
    status: StatusCode,
    report: Value,
}

/// Returns the metrics of the registry in the text format.
///
/// # Errors
/// When a metric has no valid name.
pub fn encode(registry: &Registry) -> Result<Vec<u8>, prometheus::Error> {
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    Ok(text)
}

async fn metrics(State(ops): State<Ops>, peer: Option<Extension<Peer>>, headers: HeaderMap) -> Response {
    let address = peer.map(|Extension(peer)| peer.address.ip());
    if let Err(refusal) = ops.access.check(&headers, address).await {
        return refusal.into_response();
    }
    if let Some(refresh) = &ops.refresh {
        refresh().await;
    }
    match encode(&ops.registry) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn healthz(State(ops): State<Ops>) -> Response {
    let (status, body) = ops.health().await;
    (status, Json(body)).into_response()
}

async fn readyz(State(ops): State<Ops>) -> Response {
    let missing = ops.readiness.missing();
    if missing.is_empty() {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}", missing.join(", "))).into_response()
    }
}

fn profiler(action: ProfilerAction) -> MethodRouter<Ops> {
    get(move |State(ops): State<Ops>, peer: Option<Extension<Peer>>| async move {
        if let Some(refusal) = action.check(ops.config.current().cluster_profiler) {
            return refusal.into_response();
        }
        // A profile shows the work of virt-handler, which is root on its node, and takes processor time.
        if !peer.is_some_and(|Extension(peer)| ops.roots.vouch_for(&peer, api::tls::API_CLIENT_CN)) {
            let text = format!("{} The client certificate of virt-api is required", action.refusal());
            return (StatusCode::UNAUTHORIZED, text).into_response();
        }
        let allowed = ops.config.current().cluster_profiler;
        ops.profiler.answer(action, allowed, profiles_forbidden(ops.config.clone())).await
    })
}

/// Waits until the configuration does not allow profiles.
async fn profiles_forbidden(mut config: ConfigHandle) {
    while config.current().cluster_profiler {
        config.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use api::config::ClusterConfig;
    use axum::{body::Body, http::Request};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn only_virt_api_gets_profiles_when_the_configuration_allows_them() {
        for (allowed, code) in [(false, StatusCode::FORBIDDEN), (true, StatusCode::UNAUTHORIZED)] {
            let nobody = tower::service_fn(|_: Request<kube::client::Body>| async {
                Err::<axum::http::Response<Body>, _>(std::io::Error::other("no request is expected"))
            });
            let config = ConfigHandle::fixed(ClusterConfig { cluster_profiler: allowed, ..ClusterConfig::default() });
            let ops =
                Ops::new(Client::new(nobody, "default"), config, Readiness::new(), Registry::new(), Roots::empty());
            for path in ["/start-profiler", "/stop-profiler", "/dump-profiler"] {
                let request = Request::get(path).body(Body::empty()).unwrap();
                let response = ops.clone().router().oneshot(request).await.unwrap();
                assert_eq!(response.status(), code, "{path}");
            }
        }
    }

    #[tokio::test]
    async fn metrics_need_a_token_before_anything_is_done_and_health_needs_none() {
        let nobody = tower::service_fn(|_: Request<kube::client::Body>| async {
            Err::<axum::http::Response<Body>, _>(std::io::Error::other("no request is expected"))
        });
        let config = ConfigHandle::fixed(ClusterConfig::default());
        let client = Client::new(nobody, "default");
        let ops = Ops::new(client, config, Readiness::new(), Registry::new(), Roots::empty())
            .with_refresh(|| panic!("refreshed for a stranger"));
        for (path, code) in [
            ("/metrics", StatusCode::UNAUTHORIZED),
            ("/livez", StatusCode::OK),
            ("/readyz", StatusCode::OK),
            ("/healthz", StatusCode::INTERNAL_SERVER_ERROR),
        ] {
            let request = Request::get(path).body(Body::empty()).unwrap();
            assert_eq!(ops.clone().router().oneshot(request).await.unwrap().status(), code, "{path}");
        }
    }

    #[tokio::test]
    async fn health_asks_the_api_server_once_whether_it_answers_or_fails() {
        for (answers, code) in [(true, StatusCode::OK), (false, StatusCode::INTERNAL_SERVER_ERROR)] {
            let asked = Arc::new(AtomicUsize::new(0));
            let count = asked.clone();
            let server = tower::service_fn(move |_: Request<kube::client::Body>| {
                count.fetch_add(1, Ordering::Relaxed);
                let version = json!({
                    "major": "1", "minor": "36", "gitVersion": "v1.36.0", "gitCommit": "", "gitTreeState": "",
                    "buildDate": "", "goVersion": "", "compiler": "", "platform": "",
                });
                let answer = axum::http::Response::new(Body::from(version.to_string()));
                std::future::ready(if answers { Ok(answer) } else { Err(std::io::Error::other("away")) })
            });
            let config = ConfigHandle::fixed(ClusterConfig::default());
            let client = Client::new(server, "default");
            let ops = Ops::new(client, config, Readiness::new(), Registry::new(), Roots::empty());
            for _ in 0..3 {
                let (status, body) = ops.health().await;
                assert_eq!(status, code, "{body}");
                assert_eq!(body["apiserver"]["error"].is_string(), !answers);
            }
            assert_eq!(asked.load(Ordering::Relaxed), 1, "answers: {answers}");
        }
    }
}
