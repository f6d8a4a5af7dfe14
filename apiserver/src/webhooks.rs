//! The HTTP side of the admission webhooks. What is admitted is decided by the crate `admission`.
//!
//! kube-apiserver waits at most five seconds and then refuses the write, so a call that cannot be served in four is
//! refused here, with a reason. Calls are bounded in size, number and time; a flood of them costs the flooder waiting.
//!
//! Rules do not read the cluster: they say what they need to know, it is read here ([`neighbours`]), and the rules are
//! asked again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use admission::{
    AdmissionReview, Question, WEBHOOKS,
    neighbours::{MAX_ROUNDS, MAX_WANTED, Neighbours},
};
use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    response::Response,
    routing::post,
};
use http::{HeaderValue, StatusCode, header};
use kube::Client;
use process::config::ConfigHandle;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use crate::{
    error::{empty_response, text_response},
    metrics::Metrics,
    neighbours,
};

/// Largest review. An object is at most 1.5 MiB in etcd, and a review carries the old and the new one.
const MAX_BODY: usize = 3 << 20;
/// Most reviews at a time.
const MAX_REVIEWS: usize = 16;
/// Most reviews that wait for the API server at a time. They do not count as the former: what they ask for may itself
/// be reviewed here.
const MAX_READERS: usize = 256;
/// Longest time for a review, with the wait for its turn.
const DEADLINE: Duration = Duration::from_secs(4);
/// Longest time for reading what a review needs to know.
const READ_DEADLINE: Duration = Duration::from_secs(3);

#[derive(Clone)]
struct Webhooks {
    client: Client,
    config: ConfigHandle,
    namespace: Arc<str>,
    slots: Arc<Semaphore>,
    readers: Arc<Semaphore>,
    metrics: Metrics,
}

/// The routes of all webhooks.
pub fn router(client: Client, config: ConfigHandle, namespace: &str, metrics: Metrics) -> Router {
    let state = Webhooks {
        client,
        config,
        namespace: namespace.into(),
        slots: Arc::new(Semaphore::new(MAX_REVIEWS)),
        readers: Arc::new(Semaphore::new(MAX_READERS)),
        metrics,
    };
    WEBHOOKS.iter().fold(Router::new(), |router, webhook| router.route(webhook.path, post(review))).with_state(state)
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
        let Ok(slot) = self.slots.acquire().await else {
            return empty_response(StatusCode::SERVICE_UNAVAILABLE);
        };
        let body: Bytes = match axum::body::to_bytes(request.into_body(), MAX_BODY).await {
            Ok(body) => body,
            Err(_) => return empty_response(StatusCode::PAYLOAD_TOO_LARGE),
        };
        let review = match Question::read(path, &body) {
            Ok(question) => {
                drop(body);
                self.answer(&question, slot).await
            }
            Err(refusal) => *refusal,
        };
        match serde_json::to_vec(&review) {
            Ok(answer) => {
                let mut response = Response::new(Body::from(answer));
                response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
            Err(_) => empty_response(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    /// Asks the rules, reads what they need to know, and asks them again.
    async fn answer(&self, question: &Question, slot: SemaphorePermit<'_>) -> AdmissionReview {
        // One configuration for all rounds, or they would not be about the same question.
        let config = self.config.current();
        let started = Instant::now();
        let mut known = Neighbours::new();
        let mut slot = Some(slot);
        for _ in 0..=MAX_ROUNDS {
            let wanted = match question.answer(&config, &self.namespace, &known) {
                Ok(review) => return review,
                Err(wanted) => wanted,
            };
            if known.len() + wanted.len() > MAX_WANTED {
                return question.failed("the object refers to too many other objects");
            }
            drop(slot.take());
            let Ok(_reader) = self.readers.try_acquire() else {
                return question.failed("too many admission reviews wait for the API server, try again");
            };
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let wishes = wanted.iter().map(ToString::to_string).take(3).collect::<Vec<_>>().join(", ");
            if timeout(rest, neighbours::read(&self.client, wanted, &mut known)).await.is_err() {
                return question.failed(format!("the API server did not answer in time: {wishes}"));
            }
            slot = self.slots.acquire().await.ok();
        }
        drop(slot);
        question.failed("the rules ask for more and more objects")
    }
}
