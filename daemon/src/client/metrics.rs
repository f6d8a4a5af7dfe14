//! Counts and times of requests to the API server, under the metric names of the reference.

use std::{
    sync::{Arc, LazyLock},
    task::{Context, Poll},
    time::Instant,
};

use futures::{FutureExt, future::BoxFuture};
use http::{Method, Request, Response};
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};
use tower::{Layer, Service};

use super::{limit, silence::is_watch};

/// Metrics of all clients of this process.
#[derive(Clone)]
struct RestMetrics {
    requests: IntCounterVec,
    latency: HistogramVec,
    waits: HistogramVec,
}

/// Created once: the clients of a process exist before its registry.
static METRICS: LazyLock<Option<RestMetrics>> = LazyLock::new(|| {
    let requests = Opts::new("kubevirt_rest_client_requests_total", "Requests to the API server");
    let latency =
        HistogramOpts::new("kubevirt_rest_client_request_latency_seconds", "Time of requests to the API server")
            .buckets(vec![0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0]);
    let waits = HistogramOpts::new(
        "kubevirt_rest_client_rate_limiter_duration_seconds",
        "Time for which requests waited for the limit of the configuration, where it sets one",
    )
    .buckets(prometheus::exponential_buckets(0.001, 2.0, 10).ok()?);
    Some(RestMetrics {
        requests: IntCounterVec::new(requests, &["code", "method", "host", "resource", "verb"]).ok()?,
        latency: HistogramVec::new(latency, &["verb", "url"]).ok()?,
        waits: HistogramVec::new(waits, &["verb", "url"]).ok()?,
    })
});

/// Registers the metrics. A registry that has them already is left as it is.
pub(crate) fn register(registry: &Registry) {
    if let Some(metrics) = METRICS.as_ref() {
        let _ = registry.register(Box::new(metrics.requests.clone()));
        let _ = registry.register(Box::new(metrics.latency.clone()));
        let _ = registry.register(Box::new(metrics.waits.clone()));
    }
}

/// The resource and verb of a request, in the words of authorization.
#[derive(Debug, PartialEq, Eq)]
struct Attributes {
    resource: String,
    verb: &'static str,
    /// The path without names, so that the number of values stays small.
    url: String,
}

fn attributes(method: &Method, path: &str, query: Option<&str>) -> Attributes {
    let mut elements = path.split('/').filter(|element| !element.is_empty()).collect::<Vec<_>>();
    let prefix = match elements.first() {
        Some(&"api") => 2,
        Some(&"apis") => 3,
        // No resource: "/version", "/readyz".
        _ => {
            return Attributes {
                resource: "none".to_owned(),
                verb: verb(method, false, false),
                url: path_url(&elements),
            };
        }
    };
    let mut url = elements.drain(..prefix.min(elements.len())).map(str::to_owned).collect::<Vec<_>>();
    if elements.first() == Some(&"namespaces") && elements.len() > 2 {
        elements.drain(..2);
        url.extend(["namespaces".to_owned(), "{namespace}".to_owned()]);
    }
    let resource = elements.first().copied().unwrap_or("none").to_owned();
    let named = elements.len() > 1;
    url.push(resource.clone());
    if named {
        url.push("{name}".to_owned());
    }
    url.extend(elements.iter().skip(2).map(|element| (*element).to_owned()));
    Attributes { resource, verb: verb(method, named, is_watch(query)), url: format!("/{}", url.join("/")) }
}

fn path_url(elements: &[&str]) -> String {
    // Only the first element: the rest is not bounded.
    format!("/{}", elements.first().copied().unwrap_or_default())
}

fn verb(method: &Method, named: bool, watch: bool) -> &'static str {
    match (method.as_str(), named, watch) {
        ("GET", _, true) => "WATCH",
        ("GET", true, _) => "GET",
        ("GET", false, _) => "LIST",
        ("POST", ..) => "CREATE",
        ("PUT", ..) => "UPDATE",
        ("PATCH", ..) => "PATCH",
        ("DELETE", true, _) => "DELETE",
        ("DELETE", false, _) => "DELETECOLLECTION",
        _ => "none",
    }
}

/// Counts the requests of a client.
#[derive(Clone)]
pub(crate) struct CountLayer {
    /// Host and port of the API server.
    pub(crate) host: Arc<str>,
}

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;

    fn layer(&self, inner: S) -> Count<S> {
        Count { inner, host: self.host.clone() }
    }
}

/// A service that counts requests.
#[derive(Clone)]
pub(crate) struct Count<S> {
    inner: S,
    host: Arc<str>,
}

impl<S, B, R> Service<Request<B>> for Count<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let attributes = attributes(request.method(), request.uri().path(), request.uri().query());
        let method = request.method().clone();
        let host = self.host.clone();
        let path = request.uri().path().to_owned();
        // Nothing is sent before the future is polled.
        let answer = self.inner.call(request);
        async move {
            let waited = limit::wait(&path).await;
            let started = Instant::now();
            let answer = answer.await;
            if let Some(metrics) = METRICS.as_ref() {
                if let Some(waited) = waited {
                    let labels = [attributes.verb, attributes.url.as_str()];
                    metrics.waits.with_label_values(&labels).observe(waited.as_secs_f64());
                }
                let code = answer.as_ref().map_or_else(|_| "<error>".to_owned(), |a| a.status().as_u16().to_string());
                metrics
                    .requests
                    .with_label_values(&[code.as_str(), method.as_str(), &host, &attributes.resource, attributes.verb])
                    .inc();
                metrics
                    .latency
                    .with_label_values(&[attributes.verb, &attributes.url])
                    .observe(started.elapsed().as_secs_f64());
            }
            answer
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_verb_and_resource_without_names() {
        for (method, path, query, resource, verb, url) in [
            ("GET", "/api/v1/namespaces/ns/pods", None, "pods", "LIST", "/api/v1/namespaces/{namespace}/pods"),
            ("GET", "/api/v1/nodes/n1", None, "nodes", "GET", "/api/v1/nodes/{name}"),
            ("GET", "/api/v1/nodes", Some("watch=true&a=b"), "nodes", "WATCH", "/api/v1/nodes"),
            ("GET", "/api/v1/namespaces/ns", None, "namespaces", "GET", "/api/v1/namespaces/{name}"),
            (
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/ns/virtualmachines/a/status",
                None,
                "virtualmachines",
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{name}/status",
            ),
            (
                "POST",
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                None,
                "subjectaccessreviews",
                "CREATE",
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            ),
            ("GET", "/version", None, "none", "LIST", "/version"),
            ("GET", "/apis", None, "none", "LIST", "/apis/none"),
        ] {
            let found = attributes(&method.parse().unwrap(), path, query);
            assert_eq!(found, Attributes { resource: resource.into(), verb, url: url.into() }, "{method} {path}");
        }
    }
}
