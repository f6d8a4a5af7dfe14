//! `/metrics`, `/healthz`, `/livez`, `/readyz`, and profiles.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
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
use prometheus::{Encoder, IntGauge, Registry, TextEncoder};
use serde_json::{Value, json};

use crate::{
    config::ConfigHandle,
    metrics_access::MetricsAccess,
    profiler::{Asked, Profiler},
    rest_metrics,
    tls::{Peer, Roots},
};

/// How long an answer of the API server about its version is reused, so that probes cause no load.
const VERSION_TTL: Duration = Duration::from_secs(10);
/// Longest wait for the API server while answering a health request.
const VERSION_TIMEOUT: Duration = Duration::from_secs(4);

/// Named conditions that have to hold before the process takes traffic.
#[derive(Clone, Default)]
pub struct Readiness {
    /// What is missing for each; `None` where it holds.
    gates: Arc<Mutex<BTreeMap<&'static str, Option<String>>>>,
}

impl Readiness {
    /// No conditions yet: ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says whether the condition `name` holds. A condition first mentioned as false keeps the process unready.
    pub fn set(&self, name: &'static str, holds: bool) {
        self.put(name, (!holds).then(String::new));
    }

    /// Says that the condition `name` does not hold, and why, for who asks.
    pub fn hold_back(&self, name: &'static str, why: impl Into<String>) {
        self.put(name, Some(why.into()));
    }

    fn put(&self, name: &'static str, missing: Option<String>) {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).insert(name, missing);
    }

    /// The conditions that do not hold, with the reason where one was given.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = gates.iter().filter_map(|(name, missing)| missing.as_ref().map(|why| (name, why)));
        missing.map(|(name, why)| if why.is_empty() { (*name).to_owned() } else { format!("{name} ({why})") }).collect()
    }
}

/// What the endpoints report on.
#[derive(Clone)]
pub struct Ops {
    client: Client,
    config: ConfigHandle,
    readiness: Readiness,
    registry: Registry,
    roots: Roots,
    profiler: Profiler,
    resident: Option<IntGauge>,
    version: Arc<tokio::sync::Mutex<Option<(Instant, Value)>>>,
    access: Arc<MetricsAccess>,
    refresh: Option<Refresh>,
}

/// Brings metrics up to date before they are read.
type Refresh = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

impl Ops {
    /// Endpoints over `registry`; adds the process's own memory and its requests to the API server to it. `roots` vouch
    /// for virt-api, which alone may ask for profiles.
    #[must_use]
    pub fn new(client: Client, config: ConfigHandle, readiness: Readiness, registry: Registry, roots: Roots) -> Self {
        rest_metrics::register(&registry);
        let resident = IntGauge::new("process_resident_memory_bytes", "Resident memory of the process")
            .ok()
            // A registry that has the gauge already (two servers in one process) is no reason to fail.
            .filter(|gauge| registry.register(Box::new(gauge.clone())).is_ok());
        Self {
            access: Arc::new(MetricsAccess::new(client.clone())),
            refresh: None,
            client,
            config,
            readiness,
            registry,
            roots,
            profiler: Profiler::default(),
            resident,
            version: Arc::default(),
        }
    }

    /// Has `refresh` bring metrics up to date each time before they are read.
    #[must_use]
    pub fn with_refresh(self, refresh: impl Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static) -> Self {
        Self { refresh: Some(Arc::new(refresh)), ..self }
    }

    /// The router with the endpoints.
    pub fn router(self) -> Router {
        Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/livez", get(|| async { "ok" }))
            .route("/readyz", get(readyz))
            .route("/start-profiler", profiler(Asked::Start))
            .route("/stop-profiler", profiler(Asked::Stop))
            .route("/dump-profiler", profiler(Asked::Dump))
            .with_state(self)
    }

    /// The body of `/healthz` and whether the API server answered.
    pub async fn health(&self) -> (StatusCode, Value) {
        let resource_version = self.config.resource_version();
        let mut cached = self.version.lock().await;
        if let Some((at, version)) = cached.as_ref()
            && at.elapsed() < VERSION_TTL
        {
            return (StatusCode::OK, healthy(version, &resource_version));
        }
        let answer = tokio::time::timeout(VERSION_TIMEOUT, self.client.apiserver_version()).await;
        let failure = match answer {
            Ok(Ok(info)) => {
                let version = serde_json::to_value(&info).unwrap_or(Value::Null);
                let body = healthy(&version, &resource_version);
                *cached = Some((Instant::now(), version));
                return (StatusCode::OK, body);
            }
            Ok(Err(error)) => crate::object::chain(&error),
            Err(_) => "no answer in time".to_owned(),
        };
        let body = json!({
            "apiserver": {"connectivity": "failed", "error": failure},
            "config-resource-version": resource_version,
        });
        (StatusCode::INTERNAL_SERVER_ERROR, body)
    }
}

fn healthy(version: &Value, resource_version: &str) -> Value {
    json!({
        "apiserver": {"connectivity": "ok", "version": version},
        "config-resource-version": resource_version,
    })
}

/// The metrics of the registry in the text format.
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
    if let (Some(gauge), Some(bytes)) = (&ops.resident, resident_bytes()) {
        gauge.set(bytes);
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

fn profiler(asked: Asked) -> MethodRouter<Ops> {
    get(move |State(ops): State<Ops>, peer: Option<Extension<Peer>>| async move {
        if let Some(refusal) = asked.check(ops.config.current().cluster_profiler) {
            return refusal.into_response();
        }
        // It tells what an agent that is root on its node is doing, and takes processor time.
        if !peer.is_some_and(|Extension(peer)| ops.roots.vouch_for(&peer, api::tls::API_CLIENT_CN)) {
            let text = format!("{} The client certificate of virt-api is required", asked.refusal());
            return (StatusCode::UNAUTHORIZED, text).into_response();
        }
        ops.profiler.answer(asked, &ops.config).await
    })
}

fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;
    use axum::{body::Body, http::Request};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn profiles_are_for_virt_api_where_the_configuration_allows_them() {
        for (allowed, code) in [(false, StatusCode::FORBIDDEN), (true, StatusCode::UNAUTHORIZED)] {
            let nobody = tower::service_fn(|_: Request<kube::client::Body>| async {
                Err::<axum::http::Response<Body>, _>(std::io::Error::other("nobody is to be asked"))
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
            Err::<axum::http::Response<Body>, _>(std::io::Error::other("nobody is to be asked"))
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

    #[test]
    fn readiness_names_what_is_missing() {
        let readiness = Readiness::new();
        assert!(readiness.missing().is_empty());
        readiness.set("certificate", false);
        readiness.set("caches", true);
        assert_eq!(readiness.missing(), ["certificate"]);
        readiness.hold_back("caches", "the list is awaited");
        assert_eq!(readiness.missing(), ["caches (the list is awaited)", "certificate"]);
        readiness.set("certificate", true);
        readiness.set("caches", true);
        assert!(readiness.missing().is_empty());
    }

    #[test]
    fn own_memory_can_be_read() {
        assert!(resident_bytes().is_some_and(|bytes| bytes > 0));
    }
}
