//! The HTTP side of the admission webhooks. The crate `admission` decides.
//!
//! kube-apiserver waits at most five seconds and then refuses the write, so a review that takes longer than four is refused
//! here with a reason. Reviews are bounded in size, memory and time ([`body`]). Addresses that did not prove to be an API
//! server have less than half of the memory, and limits of their own, so they delay no API server.
//!
//! Any pod can send a review, and answers contain facts about objects that its sender may not read. So a request is read only
//! if its path has the segment that virt-controller wrote into the webhook configurations ([`webhook_path`]).
//!
//! ```text
//! request                           status  body
//! a path without the segment        404     none
//! a review that can be answered     200     the answer
//! not JSON, or not a review         400     a review that refuses, without a uid
//! larger than a review can be       413     a review that refuses, without a uid
//! not sent in time                  408     a review that refuses, without a uid
//! not answered in time              503     a review that refuses, without a uid
//! ```
//!
//! Rules do not read the cluster: they return queries, which are answered by [`presets`] or the API server ([`lookups`]), and are
//! evaluated again with the results ([`review`]). Rules do not write either: they return effects, which are carried out here.
//! [`trace`] begins the trace of a start with the review of its object.

mod body;
mod lookups;
mod outcome;
pub(crate) mod presets;
mod review;
mod trace;
pub(crate) mod webhook_path;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use admission::WEBHOOKS;
use axum::{
    Router,
    body::Body,
    extract::{Extension, Request, State},
    response::Response,
    routing::any,
};
use daemon::{
    config::ConfigHandle,
    telemetry::Traces,
    tls::{Peer, TrustedAddresses},
};
use http::{Method, StatusCode};
use kube::Client;
use tokio::{sync::Semaphore, time::timeout};
use tracing::{Instrument, field::Empty};

use self::{body::ReviewMemory, outcome::Answered};
pub use self::{presets::Presets, webhook_path::Segments};
use crate::{
    limits::{MemoryBudget, body::discard},
    metrics::Metrics,
};

/// Bytes of answers of the API server at a time, counted like those of reviews.
const MAX_ANSWERS: usize = 32 << 20;
/// The same for reviews of addresses without a proof.
const MAX_OTHER_ANSWERS: usize = 16 << 20;
/// Most reviews that wait for the API server at a time.
const MAX_READERS: usize = 192;
/// The same for addresses without a proof.
const MAX_OTHER_READERS: usize = 64;
/// Longest time for a review, with the wait for its turn.
const DEADLINE: Duration = Duration::from_secs(4);

/// State of the webhooks, shared by all requests.
struct Webhooks {
    client: Client,
    config: ConfigHandle,
    presets: Presets,
    namespace: String,
    memory: ReviewMemory,
    trusted: ReviewLimits,
    others: ReviewLimits,
    addresses: TrustedAddresses,
    metrics: Metrics,
    traces: Traces,
    segments: Segments,
}

/// Limits that reviews of one kind of address share.
struct ReviewLimits {
    large: Semaphore,
    readers: Semaphore,
    answers: MemoryBudget,
}

impl ReviewLimits {
    fn new(readers: usize, answers: usize) -> Self {
        Self { large: Semaphore::new(1), readers: Semaphore::new(readers), answers: MemoryBudget::new(answers) }
    }
}

/// Returns the routes of all webhooks, behind `segments`. Addresses that use one are recorded in `addresses`.
pub fn router(
    client: Client,
    config: ConfigHandle,
    presets: Presets,
    namespace: &str,
    (metrics, traces): (Metrics, Traces),
    segments: Segments,
    addresses: TrustedAddresses,
) -> Router {
    let state = Arc::new(Webhooks {
        client,
        config,
        presets,
        namespace: namespace.to_owned(),
        memory: ReviewMemory::default(),
        trusted: ReviewLimits::new(MAX_READERS, MAX_ANSWERS),
        others: ReviewLimits::new(MAX_OTHER_READERS, MAX_OTHER_ANSWERS),
        addresses,
        metrics,
        traces,
        segments,
    });
    // The reference's own paths are not found either, like all others without the segment.
    let bare = WEBHOOKS.iter().fold(Router::new(), |router, webhook| router.route(webhook.path, any(not_found)));
    bare.route("/admission/{*path}", any(serve)).with_state(state)
}

async fn not_found(State(webhooks): State<Arc<Webhooks>>) -> Response {
    webhooks.refuse_unread(StatusCode::NOT_FOUND)
}

async fn serve(State(webhooks): State<Arc<Webhooks>>, Extension(peer): Extension<Peer>, request: Request) -> Response {
    let started = Instant::now();
    let (head, mut body) = request.into_parts();
    let Some(matched) = webhooks.segments.find(head.uri.path()) else {
        return webhooks.refuse_unread(StatusCode::NOT_FOUND);
    };
    if matched.proves {
        webhooks.addresses.record(peer.address.ip());
    }
    // From here on without the segment, which must not appear in metrics and answers.
    let path = matched.path;
    if !WEBHOOKS.iter().any(|webhook| webhook.path == path) {
        return webhooks.refuse_unread(StatusCode::NOT_FOUND);
    }
    if head.method != Method::POST {
        return webhooks.refuse_unread(StatusCode::METHOD_NOT_ALLOWED);
    }
    let trusted = webhooks.addresses.contains(peer.address.ip());
    let span = tracing::info_span!(
        "review",
        webhook = path,
        request = Empty,
        operation = Empty,
        resource = Empty,
        namespace = Empty,
        name = Empty,
        uid = Empty,
        user = Empty,
    );
    let review = webhooks.review(path, &head, &mut body, trusted, started).instrument(span.clone());
    let answered = match timeout(DEADLINE, review).await {
        Ok(answered) => answered,
        Err(_) => {
            discard(&mut body).await;
            Answered::refusal(StatusCode::SERVICE_UNAVAILABLE, "too many admission reviews, try again")
        }
    };
    span.in_scope(|| answered.log());
    webhooks.metrics.reviews.with_label_values(&[path, answered.outcome.label()]).inc();
    webhooks.metrics.review_seconds.with_label_values(&[path]).observe(started.elapsed().as_secs_f64());
    answered.into_response()
}

impl Webhooks {
    /// Answers without reading the body.
    fn refuse_unread(&self, status: StatusCode) -> Response {
        self.metrics.reviews.with_label_values(&["", "refused"]).inc();
        let mut response = Response::new(Body::empty());
        *response.status_mut() = status;
        response
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use api::{config::ClusterConfig, webhook_path::join};
    use bytes::Bytes;
    use futures::{StreamExt, stream};
    use http::header;
    use http_body_util::BodyExt;
    use prometheus::Registry;
    use tower::ServiceExt as _;

    use super::*;

    const SEGMENT: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const WEBHOOK: &str = "/virtualmachines-validate";

    /// Returns the webhooks of an installation behind [`SEGMENT`].
    fn webhooks(trusted: &TrustedAddresses) -> Router {
        daemon::tls::install_provider();
        // No request here reads the cluster.
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let metrics = Metrics::register(&Registry::new(), &[]).unwrap();
        let config = ConfigHandle::fixed(ClusterConfig::default());
        let segments = Segments::fixed(SEGMENT);
        let own = (metrics, Traces::default());
        router(client, config, Presets::unknown(), "kubevirt", own, segments, trusted.clone())
    }

    /// Returns the status of the answer, the number of parts of the body that were read, and the answer.
    async fn status(method: Method, path: &str, trusted: &TrustedAddresses) -> (u16, usize, Bytes) {
        let read = Arc::new(AtomicUsize::new(0));
        let reads = read.clone();
        let part = move |_| {
            reads.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Infallible>("{}")
        };
        let body = Body::from_stream(stream::iter(0..1).map(part));
        let mut request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
        let peer = Peer::new(([192, 0, 2, 7], 40_000).into(), &[]);
        request = request.extension(peer);
        let response = webhooks(trusted).oneshot(request.body(body).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let answer = response.into_body().collect().await.unwrap().to_bytes();
        (status, read.load(Ordering::Relaxed), answer)
    }

    #[tokio::test]
    async fn review_without_the_segment_is_not_read() {
        let other = format!("{}0", &SEGMENT[1..]);
        for path in [
            WEBHOOK.to_owned(),
            format!("/admission{WEBHOOK}"),
            format!("/admission/{WEBHOOK}"),
            format!("/admission//{WEBHOOK}"),
            format!("//admission/{SEGMENT}{WEBHOOK}"),
            format!("/{SEGMENT}{WEBHOOK}"),
            join(&other, WEBHOOK),
            join(&SEGMENT[1..], WEBHOOK),
            join(&format!("{SEGMENT}0"), WEBHOOK),
            join(&SEGMENT.to_uppercase(), WEBHOOK),
            join(&SEGMENT.replace('0', "%30"), WEBHOOK),
            join("", WEBHOOK),
            join(".", WEBHOOK),
            join("next", WEBHOOK),
            // With the segment, but an unknown path.
            join(SEGMENT, ""),
            join(SEGMENT, "/"),
            join(SEGMENT, "/nothing"),
            join(SEGMENT, &format!("/{WEBHOOK}")),
            join(SEGMENT, &format!("{WEBHOOK}/")),
            join(SEGMENT, &format!("{WEBHOOK}-create")),
            join(SEGMENT, "/virtualmachines%2Dvalidate"),
        ] {
            for method in [Method::POST, Method::GET] {
                let (status, read, answer) = status(method, &path, &TrustedAddresses::default()).await;
                assert_eq!((status, read, &*answer), (404, 0, &b""[..]), "{path}");
            }
        }
        let trusted = TrustedAddresses::default();
        status(Method::POST, &join(&other, WEBHOOK), &trusted).await;
        assert!(!trusted.contains([192, 0, 2, 7].into()));
    }

    #[tokio::test]
    async fn review_with_the_segment_is_read_and_its_address_recorded() {
        let trusted = TrustedAddresses::default();
        let (code, read, answer) = status(Method::POST, &join(SEGMENT, WEBHOOK), &trusted).await;
        assert_eq!((code, read), (400, 1));
        assert!(!String::from_utf8_lossy(&answer).contains(SEGMENT));
        assert!(trusted.contains([192, 0, 2, 7].into()));
        let (code, read, _) = status(Method::GET, &join(SEGMENT, WEBHOOK), &trusted).await;
        assert_eq!((code, read), (405, 0));
    }
}
