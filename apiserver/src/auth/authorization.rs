//! Authorizes users with SubjectAccessReviews and a short cache.
//!
//! An allowance is cached longer than a denial, so that a new right is effective soon. Both times are far below the time in
//! which a cluster notices a revoked certificate.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::{Duration, Instant},
};

use daemon::lock;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use sha2::{Digest, Sha256};

use super::authentication::User;

/// Time for which an allowance is cached.
const ALLOWED_TTL: Duration = Duration::from_secs(10);
/// Time for which a denial is cached.
const DENIED_TTL: Duration = Duration::from_secs(5);
/// Most decisions in the cache. With hashed keys and bounded reasons, 1024 of them take less than 1.2 MiB.
const CAPACITY: usize = 1024;
/// Longest reason repeated to the client.
const MAX_REASON: usize = 1024;
/// Longest wait for the API server.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Attributes of a request, in the terms of a SubjectAccessReview.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Attributes {
    /// Authorization verb.
    pub verb: &'static str,
    /// API group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Namespace.
    pub namespace: String,
    /// Plural resource.
    pub resource: String,
    /// Object, empty for a request on the collection.
    pub name: String,
    /// Subresource, empty for none.
    pub subresource: String,
}

/// Result of a review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The user has the right.
    Allowed,
    /// The user does not have the right, for this reason.
    Denied(String),
}

/// Errors of a review.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthorizationError {
    /// The API server refused or failed the review.
    #[error("access review failed")]
    Review(#[source] kube::Error),
    /// The API server was too slow.
    #[error("access review took too long")]
    Timeout,
    /// The review came back without a status.
    #[error("access review has no status")]
    NoStatus,
}

/// Returns the review of a request.
#[must_use]
pub(crate) fn review(user: &User, attributes: &Attributes) -> SubjectAccessReview {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            groups: Some(user.groups.clone()),
            uid: user.uid.clone(),
            extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                verb: some(attributes.verb),
                group: some(&attributes.group),
                version: some(&attributes.version),
                namespace: some(&attributes.namespace),
                resource: some(&attributes.resource),
                name: some(&attributes.name),
                subresource: some(&attributes.subresource),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

type Key = [u8; 32];

/// Returns a key that differs if user or attributes differ. Each part follows its length, so that different sequences of parts
/// give different bytes.
fn key(user: &User, attributes: &Attributes) -> Key {
    let mut hash = Sha256::new();
    let mut part = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    let mut list = |values: &[String]| {
        part(&values.len().to_string());
        values.iter().for_each(|value| part(value));
    };
    list(std::slice::from_ref(&user.name));
    list(&user.groups);
    list(user.uid.as_slice());
    list(&[user.extra.len().to_string()]);
    let extra: &BTreeMap<String, Vec<String>> = &user.extra;
    for (name, values) in extra {
        list(std::slice::from_ref(name));
        list(values);
    }
    let Attributes { verb, group, version, namespace, resource, name, subresource } = attributes;
    for text in [*verb, group, version, namespace, resource, name, subresource] {
        part(text);
    }
    hash.finalize().into()
}

/// Cached decisions.
#[derive(Debug)]
struct Cache {
    entries: HashMap<Key, (Decision, Instant)>,
    capacity: usize,
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self { entries: HashMap::new(), capacity }
    }

    fn get(&self, key: &Key, now: Instant) -> Option<Decision> {
        self.entries.get(key).filter(|(_, until)| *until > now).map(|(decision, _)| decision.clone())
    }

    fn insert(&mut self, key: Key, decision: Decision, now: Instant) {
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            self.entries.retain(|_, (_, until)| *until > now);
        }
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            // The entry that expires next.
            if let Some(oldest) = self.entries.iter().min_by_key(|(_, (_, until))| *until).map(|(key, _)| *key) {
                self.entries.remove(&oldest);
            }
        }
        let ttl = if decision == Decision::Allowed { ALLOWED_TTL } else { DENIED_TTL };
        self.entries.insert(key, (decision, now + ttl));
    }
}

/// Posts reviews and caches their decisions.
pub(crate) struct Authorizer {
    reviews: Api<SubjectAccessReview>,
    cache: Mutex<Cache>,
}

impl Authorizer {
    /// Returns an authorizer that posts reviews with `client`.
    #[must_use]
    pub(crate) fn new(client: Client) -> Self {
        Self { reviews: Api::all(client), cache: Mutex::new(Cache::new(CAPACITY)) }
    }

    /// Authorizes a request of `user`.
    pub(crate) async fn authorize(&self, user: &User, attributes: &Attributes) -> Result<Decision, AuthorizationError> {
        let key = key(user, attributes);
        if let Some(known) = lock(&self.cache).get(&key, Instant::now()) {
            return Ok(known);
        }
        let review = review(user, attributes);
        let answer = tokio::time::timeout(TIMEOUT, self.reviews.create(&PostParams::default(), &review))
            .await
            .map_err(|_| AuthorizationError::Timeout)?
            .map_err(AuthorizationError::Review)?;
        let status = answer.status.ok_or(AuthorizationError::NoStatus)?;
        let decision = if status.allowed && status.denied != Some(true) {
            Decision::Allowed
        } else {
            Decision::Denied(status.reason.unwrap_or_default().chars().take(MAX_REASON).collect())
        };
        let now = Instant::now();
        lock(&self.cache).insert(key, decision.clone(), now);
        Ok(decision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alice() -> User {
        User {
            name: "alice".into(),
            groups: vec!["dev".into(), "system:authenticated".into()],
            uid: Some("u1".into()),
            extra: BTreeMap::from([("scopes".into(), vec!["a".into()])]),
        }
    }

    fn start(name: &str) -> Attributes {
        Attributes {
            verb: "update",
            group: "subresources.kubevirt.io".into(),
            version: "v1".into(),
            namespace: "ns".into(),
            resource: "virtualmachines".into(),
            name: name.to_owned(),
            subresource: "start".into(),
        }
    }

    #[test]
    fn review_contains_user_and_subresource() {
        let spec = review(&alice(), &start("vm")).spec;
        assert_eq!(spec.user.as_deref(), Some("alice"));
        assert_eq!(spec.groups.unwrap(), ["dev", "system:authenticated"]);
        assert_eq!(spec.extra.unwrap()["scopes"], ["a"]);
        let attributes = spec.resource_attributes.unwrap();
        assert_eq!(attributes.verb.as_deref(), Some("update"));
        assert_eq!(attributes.group.as_deref(), Some("subresources.kubevirt.io"));
        assert_eq!(attributes.version.as_deref(), Some("v1"));
        assert_eq!(attributes.namespace.as_deref(), Some("ns"));
        assert_eq!(attributes.resource.as_deref(), Some("virtualmachines"));
        assert_eq!(attributes.name.as_deref(), Some("vm"));
        assert_eq!(attributes.subresource.as_deref(), Some("start"));
    }

    #[test]
    fn keys_differ_by_each_part_of_user_and_request() {
        let base = key(&alice(), &start("vm"));
        assert_eq!(base, key(&alice(), &start("vm")));
        let changed = [
            (User { name: "bob".into(), ..alice() }, start("vm")),
            (User { groups: vec!["dev".into()], ..alice() }, start("vm")),
            (User { groups: vec!["devsystem:authenticated".into()], ..alice() }, start("vm")),
            (User { uid: None, ..alice() }, start("vm")),
            (User { extra: BTreeMap::new(), ..alice() }, start("vm")),
            (User { extra: BTreeMap::from([("scopes".into(), vec!["a".into(), "b".into()])]), ..alice() }, start("vm")),
            (alice(), start("other")),
            (alice(), Attributes { verb: "get", ..start("vm") }),
            (alice(), Attributes { namespace: "other".into(), ..start("vm") }),
        ];
        for (user, attributes) in changed {
            assert_ne!(base, key(&user, &attributes), "{user:?} {attributes:?}");
        }
    }

    #[test]
    fn denials_expire_before_allowances() {
        let mut cache = Cache::new(8);
        let now = Instant::now();
        cache.insert([1; 32], Decision::Allowed, now);
        cache.insert([2; 32], Decision::Denied("no".into()), now);
        let later = now + Duration::from_secs(4);
        assert_eq!(cache.get(&[1; 32], later), Some(Decision::Allowed));
        assert_eq!(cache.get(&[2; 32], later), Some(Decision::Denied("no".into())));
        let later = now + Duration::from_secs(6);
        assert_eq!(cache.get(&[1; 32], later), Some(Decision::Allowed));
        assert_eq!(cache.get(&[2; 32], later), None);
        assert_eq!(cache.get(&[1; 32], now + Duration::from_secs(11)), None);
    }

    #[test]
    fn cache_is_bounded_and_drops_the_next_to_expire() {
        let mut cache = Cache::new(2);
        let now = Instant::now();
        cache.insert([1; 32], Decision::Denied(String::new()), now);
        cache.insert([2; 32], Decision::Allowed, now);
        cache.insert([3; 32], Decision::Allowed, now);
        assert_eq!(cache.entries.len(), 2);
        assert_eq!(cache.get(&[1; 32], now), None);
        assert_eq!(cache.get(&[2; 32], now), Some(Decision::Allowed));
        cache.insert([3; 32], Decision::Denied(String::new()), now);
        assert_eq!(cache.entries.len(), 2);
        assert_eq!(cache.get(&[3; 32], now), Some(Decision::Denied(String::new())));
    }
}
