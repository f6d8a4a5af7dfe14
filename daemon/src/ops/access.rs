//! Access to `/metrics`: a reader presents a token of a user who may `get` that path. TokenReview and SubjectAccessReview check
//! it, as in kube-rbac-proxy.
//!
//! Every pod reaches the port, so requests must not cause load on the API server: a request without a token is refused at once,
//! verdicts are cached for a short time, and reviews of unknown tokens are limited per address and in all. Addresses whose
//! tokens were accepted do not share that limit with others, so that no pod can keep Prometheus from reading.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::Mutex,
    time::{Duration, Instant},
};

use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use sha2::{Digest, Sha256};

use crate::lock;

/// Path that a reader has to be allowed to `get`.
const PATH: &str = "/metrics";
/// Time for which an accepted token is cached.
const ALLOWED_TTL: Duration = Duration::from_secs(60);
/// Time for which a refused token is cached.
const DENIED_TTL: Duration = Duration::from_secs(10);
/// Most tokens in the cache.
const CAPACITY: usize = 256;
/// Longest token. Those of service accounts have about a thousand characters.
const MAX_TOKEN: usize = 16 << 10;
/// Longest wait for both reviews.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Window in which reviews are counted.
const WINDOW: Duration = Duration::from_secs(10);
/// Most reviews in a window for one address.
const PER_ADDRESS: u32 = 10;
/// Most reviews in a window for all addresses from which no token was accepted lately.
const STRANGERS: u32 = 30;
/// Time for which an address is preferred after a token from it was accepted. Tokens of pods are replaced every hour.
const READER_TTL: Duration = Duration::from_secs(2 * 3600);
/// Most addresses that are preferred.
const READERS: usize = 64;

/// The reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is no valid token.
    Unauthenticated,
    /// The user is not allowed to.
    Forbidden(String),
    /// Too many tokens were reviewed in this window.
    TooMany,
    /// The API server did not answer.
    Failed,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::Unauthenticated => {
                (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "Unauthorized\n").into_response()
            }
            Self::Forbidden(user) => {
                (StatusCode::FORBIDDEN, format!("Forbidden (user={user}, verb=get, path={PATH})\n")).into_response()
            }
            Self::TooMany => {
                let retry = [(header::RETRY_AFTER, WINDOW.as_secs().to_string())];
                (StatusCode::TOO_MANY_REQUESTS, retry, "too many tokens to review, try again later\n").into_response()
            }
            Self::Failed => (StatusCode::SERVICE_UNAVAILABLE, "the token cannot be reviewed now\n").into_response(),
        }
    }
}

type Verdict = Result<(), Refusal>;
type Key = [u8; 32];

/// Results of recent reviews.
#[derive(Default)]
struct State {
    /// Verdicts by hashes of tokens, with the end of their validity.
    verdicts: HashMap<Key, (Verdict, Instant)>,
    /// Times of the last accepted token by address.
    readers: HashMap<IpAddr, Instant>,
    window: Option<Window>,
}

/// Reviews of the current [`WINDOW`].
struct Window {
    began: Instant,
    strangers: u32,
    /// No more than readers and reviews of strangers.
    addresses: HashMap<IpAddr, u32>,
}

impl State {
    fn recall(&self, key: &Key, now: Instant) -> Option<Verdict> {
        self.verdicts.get(key).filter(|(_, until)| *until > now).map(|(verdict, _)| verdict.clone())
    }

    /// Counts a review for an address, unless there were too many.
    fn admit(&mut self, address: IpAddr, now: Instant) -> bool {
        let known = self.readers.get(&address).is_some_and(|last| now.duration_since(*last) < READER_TTL);
        if self.window.as_ref().is_none_or(|window| now.duration_since(window.began) >= WINDOW) {
            self.window = Some(Window { began: now, strangers: 0, addresses: HashMap::new() });
        }
        let Some(window) = &mut self.window else { return false };
        let count = window.addresses.get(&address).copied().unwrap_or_default();
        if count >= PER_ADDRESS || (!known && window.strangers >= STRANGERS) {
            return false;
        }
        window.addresses.insert(address, count + 1);
        window.strangers += u32::from(!known);
        true
    }

    fn remember(&mut self, key: Key, verdict: &Verdict, address: IpAddr, now: Instant) {
        let ttl = if verdict.is_ok() { ALLOWED_TTL } else { DENIED_TTL };
        if !self.verdicts.contains_key(&key) && self.verdicts.len() >= CAPACITY {
            remove_first(&mut self.verdicts, |(_, until)| *until);
        }
        self.verdicts.insert(key, (verdict.clone(), now + ttl));
        if verdict.is_ok() {
            if !self.readers.contains_key(&address) && self.readers.len() >= READERS {
                remove_first(&mut self.readers, |last| *last);
            }
            self.readers.insert(address, now);
        }
    }
}

/// Removes the entry with the earliest time.
fn remove_first<K: Copy + Eq + std::hash::Hash, V>(entries: &mut HashMap<K, V>, time: impl Fn(&V) -> Instant) {
    if let Some(first) = entries.iter().min_by_key(|(_, value)| time(value)).map(|(key, _)| *key) {
        entries.remove(&first);
    }
}

/// Authorizes readers of the metrics.
pub(crate) struct MetricsAccess {
    client: Client,
    state: Mutex<State>,
}

impl MetricsAccess {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, state: Mutex::default() }
    }

    /// Refuses a request with these headers from `address` that may not read the metrics.
    pub(crate) async fn check(&self, headers: &HeaderMap, address: Option<IpAddr>) -> Verdict {
        let token = bearer(headers).ok_or(Refusal::Unauthenticated)?;
        // Without an address, which no server leaves out, requests share one.
        let address = address.unwrap_or(Ipv6Addr::UNSPECIFIED.into()).to_canonical();
        let key = Sha256::digest(token).into();
        {
            let mut state = lock(&self.state);
            let now = Instant::now();
            if let Some(verdict) = state.recall(&key, now) {
                return verdict;
            }
            if !state.admit(address, now) {
                return Err(Refusal::TooMany);
            }
        }
        let verdict = match tokio::time::timeout(TIMEOUT, self.review(token)).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => {
                tracing::warn!(error = crate::errors::chain(&error), "token for metrics was not reviewed");
                return Err(Refusal::Failed);
            }
            Err(_) => {
                tracing::warn!("token for metrics was not reviewed in time");
                return Err(Refusal::Failed);
            }
        };
        lock(&self.state).remember(key, &verdict, address, Instant::now());
        verdict
    }

    async fn review(&self, token: &str) -> Result<Verdict, kube::Error> {
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() },
            ..TokenReview::default()
        };
        let reviews = Api::<TokenReview>::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
        let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
            return Ok(Err(Refusal::Unauthenticated));
        };
        let name = user.username.clone().unwrap_or_default();
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &access_review(user)).await?.status.unwrap_or_default();
        let allowed = status.allowed && status.denied != Some(true);
        Ok(if allowed { Ok(()) } else { Err(Refusal::Forbidden(name)) })
    }
}

/// The review of a user's access to the metrics.
fn access_review(user: UserInfo) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(PATH.to_owned()),
                verb: Some("get".to_owned()),
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

/// The token in the headers of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let usable = scheme.eq_ignore_ascii_case("bearer") && (1..=MAX_TOKEN).contains(&token.len());
    usable.then_some(token)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::{body::Body, http::Request};
    use serde_json::{Value, json};

    use super::*;

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    /// Paths and specifications of reviews.
    type Calls = Arc<Mutex<Vec<(String, Value)>>>;

    /// Returns an API server with one token of an allowed and one of a denied user, which records its requests.
    fn access() -> (MetricsAccess, Calls) {
        let calls = Calls::default();
        let noted = calls.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let noted = noted.clone();
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                noted.lock().unwrap().push((path, review["spec"].clone()));
                let user = |name: &str| json!({"username": name, "groups": ["g"], "uid": "1", "extra": {"k": ["v"]}});
                review["status"] = match review["spec"]["token"].as_str() {
                    Some("good") => json!({"authenticated": true, "user": user("reader")}),
                    Some("poor") => json!({"authenticated": true, "user": user("nobody")}),
                    Some("broken") => return Err(std::io::Error::other("no answer")),
                    Some(_) => json!({"authenticated": false, "error": "unknown"}),
                    None => json!({"allowed": review["spec"]["user"] == "reader"}),
                };
                Ok(axum::http::Response::builder().status(201).body(Body::from(review.to_string())).unwrap())
            }
        });
        (MetricsAccess::new(Client::new(service, "default")), calls)
    }

    #[tokio::test]
    async fn metrics_are_for_users_who_may_get_their_path() {
        let (access, calls) = access();
        for _ in 0..2 {
            assert_eq!(access.check(&with("Bearer good"), address(1)).await, Ok(()));
            assert_eq!(access.check(&with("bearer poor"), address(1)).await, Err(Refusal::Forbidden("nobody".into())));
            assert_eq!(access.check(&with("Bearer bad"), address(1)).await, Err(Refusal::Unauthenticated));
        }
        let calls = calls.lock().unwrap();
        let paths: Vec<&str> = calls.iter().map(|(path, _)| path.rsplit('/').next().unwrap()).collect();
        let once = ["tokenreviews", "subjectaccessreviews", "tokenreviews", "subjectaccessreviews", "tokenreviews"];
        assert_eq!(paths, once, "each token is reviewed once");
        assert_eq!(
            calls[1].1,
            json!({
                "user": "reader", "groups": ["g"], "uid": "1", "extra": {"k": ["v"]},
                "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
            })
        );
    }

    #[tokio::test]
    async fn who_shows_no_token_costs_no_review() {
        let (access, calls) = access();
        let long = format!("Bearer {}", "x".repeat(MAX_TOKEN + 1));
        let headers = ["Bearer", "Bearer ", "Basic good", "good", long.as_str()].map(with);
        for headers in headers.iter().chain([&HeaderMap::new()]) {
            assert_eq!(access.check(headers, address(1)).await, Err(Refusal::Unauthenticated), "{headers:?}");
        }
        assert!(calls.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn an_api_server_that_does_not_answer_is_no_verdict() {
        let (access, _) = access();
        assert_eq!(access.check(&with("Bearer broken"), address(1)).await, Err(Refusal::Failed));
        assert!(lock(&access.state).verdicts.is_empty());
    }

    #[tokio::test]
    async fn flood_of_tokens_does_not_reach_the_api_server_and_keeps_no_reader_out() {
        let (access, calls) = access();
        assert_eq!(access.check(&with("Bearer good"), address(1)).await, Ok(()));
        for number in 0..1000 {
            let stranger = address(10 + u8::try_from(number % 100).unwrap());
            let refused = access.check(&with(&format!("Bearer flood{number}")), stranger).await.unwrap_err();
            assert!(matches!(refused, Refusal::Unauthenticated | Refusal::TooMany));
        }
        let reviews = calls.lock().unwrap().len();
        assert!(reviews <= 2 + STRANGERS as usize, "{reviews} reviews");
        // The reader's token was replaced.
        lock(&access.state).verdicts.clear();
        assert_eq!(access.check(&with("Bearer good"), address(1)).await, Ok(()));
        assert_eq!(access.check(&with("Bearer good"), address(2)).await, Ok(()), "it is known now");
    }

    #[test]
    fn one_address_has_its_share_and_the_next_window_begins_anew() {
        let (mut state, now) = (State::default(), Instant::now());
        let (first, second) = (address(1).unwrap(), address(2).unwrap());
        assert_eq!((0..20).filter(|_| state.admit(first, now)).count(), PER_ADDRESS as usize);
        assert!(state.admit(second, now));
        assert!(state.admit(first, now + WINDOW));
    }

    #[test]
    fn memory_stays_bounded_and_verdicts_end() {
        let (mut state, now) = (State::default(), Instant::now());
        state.remember([0; 32], &Ok(()), address(1).unwrap(), now);
        for number in 0..2 * CAPACITY {
            let mut key = [1; 32];
            key[..8].copy_from_slice(&number.to_le_bytes());
            state.remember(key, &Err(Refusal::Unauthenticated), address(1).unwrap(), now);
        }
        assert_eq!(state.verdicts.len(), CAPACITY);
        assert_eq!(state.recall(&[0; 32], now), Some(Ok(())), "refusals give way first");
        assert_eq!(state.recall(&[0; 32], now + ALLOWED_TTL), None);
        for last in 0..=255 {
            state.remember([0; 32], &Ok(()), address(last).unwrap(), now);
        }
        assert_eq!(state.readers.len(), READERS);
    }
}
