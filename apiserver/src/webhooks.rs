//! The HTTP side of the admission webhooks. What is admitted is decided by the crate `admission`.
//!
//! kube-apiserver waits at most five seconds and then refuses the write, so a call that cannot be served in four is
//! refused here, with a reason. Calls are bounded in size, memory and time. Memory is counted as it is sent, and a body
//! whose sender stalls gives it back after [`BODY_DEADLINE`]. Addresses that did not prove to be an API server have less than
//! half of the memory together, and turns and reads of their own, so that they keep no API server waiting.
//!
//! Any pod can send a review, and answers tell of objects that its sender may not see. So nothing of a request is looked at
//! unless its path has the segment that virt-controller wrote into the webhook configurations ([`Segments`]).
//!
//! ```text
//! what came                        status  body
//! a path without the segment       404     none
//! a review that can be answered    200     the answer
//! no JSON, or not a review         400     a review that refuses, without a uid
//! larger than a review can be      413     a review that refuses, without a uid
//! not sent in time                 408     a review that refuses, without a uid
//! not answered in time             503     a review that refuses, without a uid
//! ```
//!
//! Rules do not read the cluster: they say what they need to know, it is read here ([`neighbours`]) or known already
//! ([`Presets`]), and the rules are asked again.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use admission::{
    AdmissionReview, Question, WEBHOOKS,
    neighbours::{MAX_ROUNDS, MAX_WANTED, Neighbours},
};
use axum::{
    Router,
    body::Body,
    extract::{Extension, Request, State},
    response::Response,
    routing::any,
};
use http::{HeaderValue, Method, StatusCode, header, request::Parts};
use http_body_util::BodyExt;
use kube::Client;
use process::{
    config::ConfigHandle,
    tls::{Peer, TrustedAddresses},
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use crate::{metrics::Metrics, neighbours, presets::Presets, webhook_path::Segments};

/// Largest review. kube-apiserver takes objects of up to 3 MiB, of which etcd stores 1.5; a review carries the new and
/// the old one.
const MAX_BODY: usize = 5 << 20;
/// Most bytes of reviews at a time, from their arrival to their answer. Read into values they take some twenty times as
/// much. There is room for a review of the largest size and for all that others may have, so that the large ones of both do
/// not wait for each other.
const MAX_BODIES: usize = MAX_BODY + MAX_OTHER_BODIES;
/// The same of all addresses that did not prove to be an API server. Each of their reviews fits in, too.
const MAX_OTHER_BODIES: usize = 4 << 20;
/// Most values in a review: a machine of 256 disks, twice, has ten thousand.
const MAX_VALUES: usize = 32 << 10;
/// What a value counts for at least, in bytes: some take two bytes to write and a kilobyte to read.
const VALUE: usize = 160;
/// Most bytes of answers of the API server at a time, counted like those of reviews.
const MAX_ANSWERS: usize = 32 << 20;
/// The same for reviews of addresses without a proof.
const MAX_OTHER_ANSWERS: usize = 16 << 20;
/// A review that is larger than this waits for its turn among the large, lest two halves wait for each other's memory.
const LARGE_BODY: usize = 1 << 20;
/// Most bytes of a body that is too large which are thrown away so that its sender reads the answer.
const MAX_DISCARDED: usize = 32 << 20;
/// Most reviews that wait for the API server at a time.
const MAX_READERS: usize = 192;
/// The same of addresses without a proof.
const MAX_OTHER_READERS: usize = 64;
/// Longest time for a review, with the wait for its turn.
const DEADLINE: Duration = Duration::from_secs(4);
/// Longest time of a review that is spent waiting for its sender. kube-apiserver sends what it has in memory.
const BODY_DEADLINE: Duration = Duration::from_secs(2);
/// Longest time for throwing away the rest of a body that did not get its turn.
const DISCARD_DEADLINE: Duration = Duration::from_millis(800);
/// Longest time for reading what a review needs to know.
const READ_DEADLINE: Duration = Duration::from_secs(3);

/// Shared by all requests: a copy for each would copy a client, and with it a queue.
struct Webhooks {
    client: Client,
    config: ConfigHandle,
    presets: Presets,
    namespace: String,
    memory: MemoryBudget,
    trusted: Turns,
    others: Turns,
    addresses: TrustedAddresses,
    metrics: Metrics,
    segments: Segments,
}

/// Memory for the bodies of reviews.
struct MemoryBudget {
    all: Semaphore,
    /// The part that addresses without a proof may take.
    others: Semaphore,
}

/// Limits that reviews of one kind of address share.
struct Turns {
    large: Semaphore,
    readers: Semaphore,
    answers: Semaphore,
}

impl Turns {
    fn new(readers: usize, answers: usize) -> Self {
        Self { large: Semaphore::new(1), readers: Semaphore::new(readers), answers: Semaphore::new(answers) }
    }
}

/// The routes of all webhooks, behind `segments`. Addresses that show one are recorded in `addresses`.
pub fn router(
    client: Client,
    config: ConfigHandle,
    presets: Presets,
    namespace: &str,
    metrics: Metrics,
    segments: Segments,
    addresses: TrustedAddresses,
) -> Router {
    let state = Arc::new(Webhooks {
        client,
        config,
        presets,
        namespace: namespace.to_owned(),
        memory: MemoryBudget::default(),
        trusted: Turns::new(MAX_READERS, MAX_ANSWERS),
        others: Turns::new(MAX_OTHER_READERS, MAX_OTHER_ANSWERS),
        addresses,
        metrics,
        segments,
    });
    // Paths as the reference serves them say nothing about who else is served.
    let bare = WEBHOOKS.iter().fold(Router::new(), |router, webhook| router.route(webhook.path, any(not_found)));
    bare.route("/admission/{*path}", any(review)).with_state(state)
}

async fn not_found(State(webhooks): State<Arc<Webhooks>>) -> Response {
    webhooks.turn_away(StatusCode::NOT_FOUND)
}

async fn review(State(webhooks): State<Arc<Webhooks>>, Extension(peer): Extension<Peer>, request: Request) -> Response {
    let started = Instant::now();
    let (head, mut body) = request.into_parts();
    let Some(shown) = webhooks.segments.find(head.uri.path()) else {
        return webhooks.turn_away(StatusCode::NOT_FOUND);
    };
    if shown.proves {
        webhooks.addresses.record(peer.address.ip());
    }
    // From here on without the segment, which belongs neither into metrics nor into answers.
    let path = shown.path;
    if !WEBHOOKS.iter().any(|webhook| webhook.path == path) {
        return webhooks.turn_away(StatusCode::NOT_FOUND);
    }
    if head.method != Method::POST {
        return webhooks.turn_away(StatusCode::METHOD_NOT_ALLOWED);
    }
    let trusted = webhooks.addresses.contains(peer.address.ip());
    let response = match timeout(DEADLINE, webhooks.review(path, &head, &mut body, trusted)).await {
        Ok(response) => response,
        Err(_) => {
            discard(&mut body).await;
            refusal(StatusCode::SERVICE_UNAVAILABLE, "too many admission reviews, try again")
        }
    };
    let outcome = if response.status().is_success() { "answered" } else { "failed" };
    webhooks.metrics.reviews.with_label_values(&[path, outcome]).inc();
    webhooks.metrics.review_seconds.with_label_values(&[path]).observe(started.elapsed().as_secs_f64());
    response
}

/// Throws away what is left of a body, within bounds: a sender that is cut off in the middle does not read the answer.
pub(crate) async fn discard(body: &mut Body) {
    let all = async {
        let mut discarded = 0;
        while let Some(Ok(frame)) = body.frame().await {
            discarded += frame.data_ref().map_or(0, bytes::Bytes::len);
            if discarded > MAX_DISCARDED {
                break;
            }
        }
    };
    // Whoever is slower than that does not get to read the answer.
    timeout(DISCARD_DEADLINE, all).await.ok();
}

/// A review that refuses what is no review, with an HTTP status that says so.
fn refusal(status: StatusCode, message: &str) -> Response {
    answer(status, &AdmissionReview::refused("", status.as_u16(), message))
}

fn answer(status: StatusCode, review: &AdmissionReview) -> Response {
    let (status, body) = match serde_json::to_vec(review) {
        Ok(body) => (status, body),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, vec![]),
    };
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Values of a JSON text, about: each but the first comes after a bracket or a comma outside of strings.
pub(crate) fn values(json: &[u8]) -> usize {
    let mut count = 0;
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' | b',' => count += 1,
            b'"' => skip_string(&mut bytes),
            _ => {}
        }
    }
    count
}

/// Goes on behind the end of the string that has begun. Most of a review is strings, hence a loop of their own.
fn skip_string(bytes: &mut slice::Iter<'_, u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => {
                bytes.next();
            }
            _ => {}
        }
    }
}

/// What a JSON text counts for in memory.
pub(crate) fn weight(json: &[u8]) -> usize {
    values(json).saturating_mul(VALUE).max(json.len())
}

/// The body of a review in memory.
#[derive(Default)]
struct ReviewBody<'a> {
    bytes: Vec<u8>,
    memory: Option<SemaphorePermit<'a>>,
    /// The part of the memory that counts for addresses without a proof.
    others: Option<SemaphorePermit<'a>>,
    large: Option<SemaphorePermit<'a>>,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self { all: Semaphore::new(MAX_BODIES), others: Semaphore::new(MAX_OTHER_BODIES) }
    }
}

impl MemoryBudget {
    /// Reads a body. Memory is counted as the bytes arrive, so it is not taken by announcing them.
    async fn receive<'a>(
        &'a self,
        body: &mut Body,
        trusted: bool,
        large: &'a Semaphore,
    ) -> Result<ReviewBody<'a>, Response> {
        let max_body = if trusted { MAX_BODY } else { MAX_OTHER_BODIES };
        let mut received = ReviewBody::default();
        let mut discarded = 0;
        let mut patience = BODY_DEADLINE;
        loop {
            let waited = tokio::time::Instant::now();
            let Ok(frame) = timeout(patience, body.frame()).await else {
                return Err(refusal(StatusCode::REQUEST_TIMEOUT, "the review did not arrive in time"));
            };
            patience = patience.saturating_sub(waited.elapsed());
            let Some(frame) = frame else { break };
            let Ok(frame) = frame else {
                return Err(refusal(StatusCode::BAD_REQUEST, "the review ended early"));
            };
            let Ok(data) = frame.into_data() else { continue };
            if discarded > 0 || received.bytes.len() + data.len() > max_body {
                received = ReviewBody::default();
                discarded += data.len();
                if discarded > MAX_DISCARDED {
                    break;
                }
                continue;
            }
            let size = received.bytes.len() + data.len();
            self.count(&mut received, data.len(), size, trusted, large).await?;
            received.bytes.extend_from_slice(&data);
        }
        let values = values(&received.bytes);
        if values > MAX_VALUES {
            return Err(refusal(StatusCode::PAYLOAD_TOO_LARGE, &format!("a review has at most {MAX_VALUES} values")));
        }
        let weight = (values * VALUE).clamp(received.bytes.len(), max_body);
        let more = weight - received.bytes.len();
        self.count(&mut received, more, weight, trusted, large).await?;
        if discarded > 0 {
            let message = format!("a review is at most {} MiB large", max_body >> 20);
            return Err(refusal(StatusCode::PAYLOAD_TOO_LARGE, &message));
        }
        Ok(received)
    }

    /// Takes memory for `more` bytes of a review, which then counts for `size`.
    async fn count<'a>(
        &'a self,
        body: &mut ReviewBody<'a>,
        more: usize,
        size: usize,
        trusted: bool,
        large: &'a Semaphore,
    ) -> Result<(), Response> {
        if body.large.is_none() && size > LARGE_BODY {
            body.large = Some(acquire(large, 1).await?);
        }
        // Others wait for their own part first: what they hold and wait for of the whole is never more than that.
        if !trusted {
            add(&mut body.others, acquire(&self.others, more).await?);
        }
        add(&mut body.memory, acquire(&self.all, more).await?);
        Ok(())
    }
}

async fn acquire(semaphore: &Semaphore, permits: usize) -> Result<SemaphorePermit<'_>, Response> {
    let permits = u32::try_from(permits).unwrap_or(u32::MAX);
    // The semaphores are never closed.
    let closed = |_| refusal(StatusCode::SERVICE_UNAVAILABLE, "no admission reviews are taken");
    semaphore.acquire_many(permits).await.map_err(closed)
}

fn add<'a>(held: &mut Option<SemaphorePermit<'a>>, more: SemaphorePermit<'a>) {
    match held {
        Some(held) => held.merge(more),
        held @ None => *held = Some(more),
    }
}

impl Webhooks {
    /// Answers without a look at the body.
    fn turn_away(&self, status: StatusCode) -> Response {
        self.metrics.reviews.with_label_values(&["", "refused"]).inc();
        let mut response = Response::new(Body::empty());
        *response.status_mut() = status;
        response
    }

    async fn review(&self, path: &str, head: &Parts, body: &mut Body, trusted: bool) -> Response {
        let json = head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        if !json {
            return refusal(StatusCode::BAD_REQUEST, "a review has the content type application/json");
        }
        let turns = if trusted { &self.trusted } else { &self.others };
        let mut body = match self.memory.receive(body, trusted, &turns.large).await {
            Ok(body) => body,
            Err(refusal) => return refusal,
        };
        let bytes = std::mem::take(&mut body.bytes);
        match Question::read(path, &bytes) {
            Ok(question) => {
                drop(bytes);
                answer(StatusCode::OK, &self.answer(&question, turns).await)
            }
            // With the uid it is an answer that kube-apiserver shows; without one nobody could know what to.
            Err(refusal) if refusal.response.uid.is_empty() => answer(StatusCode::BAD_REQUEST, &refusal),
            Err(refusal) => answer(StatusCode::OK, &refusal),
        }
    }

    /// Asks the rules, reads what they need to know, and asks them again.
    async fn answer(&self, question: &Question, turns: &Turns) -> AdmissionReview {
        // One configuration for all rounds, or they would not be about the same question.
        let config = self.config.current();
        let started = Instant::now();
        let mut known = Neighbours::new();
        let mut room = Vec::new();
        for _ in 0..=MAX_ROUNDS {
            let wanted = match question.answer(&config, &self.namespace, &known) {
                Ok(review) => return review,
                Err(wanted) => wanted,
            };
            if known.len() + wanted.len() > MAX_WANTED {
                return question.failed("the object refers to too many other objects");
            }
            let mut unknown = Vec::with_capacity(wanted.len());
            for wanted in wanted {
                match self.presets.answer(&wanted) {
                    Some(outcome) => known.insert(wanted, outcome),
                    None => unknown.push(wanted),
                }
            }
            if unknown.is_empty() {
                continue;
            }
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let Ok(Ok(_reader)) = timeout(rest, turns.readers.acquire()).await else {
                return question.failed("too many admission reviews wait for the API server, try again");
            };
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let wishes = unknown.iter().map(ToString::to_string).take(3).collect::<Vec<_>>().join(", ");
            let reading = neighbours::read(&self.client, unknown, &mut known, &turns.answers, &mut room);
            if timeout(rest, reading).await.is_err() {
                return question.failed(format!("the API server did not answer in time: {wishes}"));
            }
        }
        question.failed("the rules ask for more and more objects")
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
    use prometheus::Registry;
    use tower::ServiceExt as _;

    use super::*;

    const SEGMENT: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const WEBHOOK: &str = "/virtualmachines-validate";

    /// The webhooks of an installation behind [`SEGMENT`].
    fn webhooks(trusted: &TrustedAddresses) -> Router {
        process::tls::install_provider();
        // Nothing that is asked here reads the cluster.
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let metrics = Metrics::register(&Registry::new()).unwrap();
        let config = ConfigHandle::fixed(ClusterConfig::default());
        let segments = Segments::fixed(SEGMENT);
        router(client, config, Presets::unknown(), "kubevirt", metrics, segments, trusted.clone())
    }

    /// The status of the answer, how many parts of the body were read for it, and the answer.
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
            // With it, to what is not there.
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
    async fn review_with_the_segment_is_read_and_its_sender_recorded() {
        let trusted = TrustedAddresses::default();
        let (code, read, answer) = status(Method::POST, &join(SEGMENT, WEBHOOK), &trusted).await;
        assert_eq!((code, read), (400, 1));
        assert!(!String::from_utf8_lossy(&answer).contains(SEGMENT));
        assert!(trusted.contains([192, 0, 2, 7].into()));
        let (code, read, _) = status(Method::GET, &join(SEGMENT, WEBHOOK), &trusted).await;
        assert_eq!((code, read), (405, 0));
    }

    /// A body that begins with so many bytes and does not go on.
    fn stalled(bytes: usize) -> Body {
        let first = futures::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from(vec![b' '; bytes]))]);
        Body::from_stream(first.chain(futures::stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_stall_keep_no_api_server_waiting() {
        let memory = MemoryBudget::default();
        let large = Semaphore::new(1);
        let stalls = (0..64).map(|_| async {
            let mut body = stalled(1 << 20);
            memory.receive(&mut body, false, &large).await.map(drop).unwrap_err().status()
        });
        let api_server = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(memory.others.available_permits(), 0);
            assert_eq!(memory.all.available_permits(), MAX_BODY);
            let own = Semaphore::new(1);
            let mut body = Body::from(vec![b' '; MAX_BODY]);
            let began = tokio::time::Instant::now();
            let received = memory.receive(&mut body, true, &own).await.map_err(|refusal| refusal.status()).unwrap();
            assert_eq!((received.bytes.len(), began.elapsed()), (MAX_BODY, Duration::ZERO));
        };
        let (statuses, ()) = futures::join!(futures::future::join_all(stalls), api_server);
        assert!(statuses.iter().all(|status| *status == StatusCode::REQUEST_TIMEOUT), "{statuses:?}");
        assert_eq!(memory.all.available_permits(), MAX_BODIES);
        assert_eq!(memory.others.available_permits(), MAX_OTHER_BODIES);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_memory_is_not_the_senders_fault() {
        let memory = MemoryBudget::default();
        let large = Semaphore::new(1);
        let taken = memory.all.acquire_many(u32::try_from(MAX_BODIES).unwrap()).await.unwrap();
        let release = async {
            tokio::time::sleep(BODY_DEADLINE * 2).await;
            drop(taken);
        };
        let mut body = Body::from(vec![b' '; 10]);
        let (received, ()) = futures::join!(memory.receive(&mut body, true, &large), release);
        assert_eq!(received.map_err(|refusal| refusal.status()).unwrap().bytes.len(), 10);
    }

    #[test]
    fn values_are_counted_without_reading_them() {
        for (json, count) in [
            ("", 0),
            ("1", 0),
            ("{}", 1),
            ("[{},{},{}]", 6),
            (r#"{"a":1,"b":[true,null]}"#, 4),
            (r#"{"a":"{[,\"{[,"}"#, 1),
            (r#"{"a":"\\","b":2}"#, 2),
        ] {
            assert_eq!(values(json.as_bytes()), count, "{json}");
        }
        let tolerations = format!("[{}]", vec!["{}"; 100_000].join(","));
        assert!(values(tolerations.as_bytes()) > MAX_VALUES && weight(tolerations.as_bytes()) > MAX_BODIES);
        let text = format!(r#"{{"userData":"{}"}}"#, ",{[".repeat(100_000));
        assert_eq!(weight(text.as_bytes()), text.len());
    }
}
