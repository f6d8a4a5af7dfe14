//! The HTTP side of the admission webhooks. What is admitted is decided by the crate `admission`.
//!
//! kube-apiserver waits at most five seconds and then refuses the write, so a call that cannot be served in four is
//! refused here, with a reason. Calls are bounded in size, number and time; a flood of them costs the flooder waiting.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    response::Response,
    routing::post,
};
use http::{HeaderValue, StatusCode, header};
use process::config::ConfigHandle;
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    error::{empty_response, text_response},
    metrics::Metrics,
};

/// Largest review. An object is at most 1.5 MiB in etcd, and a review carries the old and the new one.
const MAX_BODY: usize = 3 << 20;
/// Most reviews at a time.
const MAX_REVIEWS: usize = 16;
/// Longest time for a review, with the wait for its turn.
const DEADLINE: Duration = Duration::from_secs(4);

#[derive(Clone)]
struct Webhooks {
    config: ConfigHandle,
    namespace: Arc<str>,
    slots: Arc<Semaphore>,
    metrics: Metrics,
}

/// The routes of all webhooks.
pub fn router(config: ConfigHandle, namespace: &str, metrics: Metrics) -> Router {
    let state = Webhooks { config, namespace: namespace.into(), slots: Arc::new(Semaphore::new(MAX_REVIEWS)), metrics };
    admission::PATHS.into_iter().fold(Router::new(), |router, path| router.route(path, post(review))).with_state(state)
}

async fn review(State(webhooks): State<Webhooks>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let started = Instant::now();
    let response = match timeout(DEADLINE, webhooks.review(&path, request)).await {
        Ok(response) => response,
        Err(_) => text_response(StatusCode::SERVICE_UNAVAILABLE, "too many admission reviews, try again"),
    };
    let outcome = if response.status().is_success() { "answered" } else { "failed" };
    webhooks.metrics.reviews.with_label_values(&[path.as_str(), outcome]).inc();
    webhooks.metrics.review_seconds.with_label_values(&[path.as_str()]).observe(started.elapsed().as_secs_f64());
    response
}

impl Webhooks {
    async fn review(&self, path: &str, request: Request) -> Response {
        let json = request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        if !json {
            return empty_response(StatusCode::BAD_REQUEST);
        }
        // Held while the body is read, too: it is the body that takes the memory.
        let Ok(_slot) = self.slots.acquire().await else {
            return empty_response(StatusCode::SERVICE_UNAVAILABLE);
        };
        let body: Bytes = match axum::body::to_bytes(request.into_body(), MAX_BODY).await {
            Ok(body) => body,
            Err(_) => return empty_response(StatusCode::PAYLOAD_TOO_LARGE),
        };
        match admission::handle(path, &body, &self.config.current(), &self.namespace) {
            Some(answer) => {
                let mut response = Response::new(Body::from(answer));
                response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
            None => empty_response(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}
