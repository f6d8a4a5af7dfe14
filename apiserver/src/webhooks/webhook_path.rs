//! Segments of webhook paths that prove that a review comes from an API server.
//!
//! virt-controller creates and rotates them (`controllers/src/webhook_path`). A segment counts as long as the Secret contains
//! it. Without a usable Secret the last segments stay in force: virt-controller creates a new Secret with the segment that
//! kube-apiserver uses.

use std::{hint::black_box, sync::Arc};

use api::webhook_path::{
    CURRENT_KEY, EXPOSED_AT, NEXT_KEY, PREVIOUS_EXPOSED_AT, PREVIOUS_KEY, SECRET, is_segment, split,
};
use arc_swap::ArcSwap;
use daemon::tasks::Spawner;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tokio::sync::watch;

/// The segments in force. Cheap to clone; all clones change together.
#[derive(Clone)]
pub struct Segments {
    known: Arc<ArcSwap<Vec<Segment>>>,
    read: watch::Sender<bool>,
}

#[derive(Debug, PartialEq)]
struct Segment {
    text: String,
    /// True if no user has seen it.
    is_secret: bool,
}

/// The path of a request with a segment in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matched<'a> {
    /// Path of the webhook, after the segment.
    pub(super) path: &'a str,
    /// True if only API servers know the segment. One that users may have seen is accepted for some seconds more, and proves
    /// nothing about an address.
    pub(super) proves: bool,
}

impl Segments {
    fn new(known: Vec<Segment>) -> Self {
        Self { read: watch::Sender::new(!known.is_empty()), known: Arc::new(ArcSwap::from_pointee(known)) }
    }

    /// Returns one segment that never changes.
    #[must_use]
    pub fn fixed(segment: &str) -> Self {
        Self::new(vec![Segment { text: segment.to_owned(), is_secret: true }])
    }

    /// Follows the Secret in `namespace` in a task of its own.
    #[must_use]
    pub fn follow(client: Client, namespace: &str, tasks: &Spawner) -> Self {
        let followed = Self::new(Vec::new());
        let (this, api) = (followed.clone(), Api::<Secret>::namespaced(client, namespace));
        tasks.spawn("webhook path", async move {
            let mut versions = std::pin::pin!(daemon::watch::versions(api, SECRET));
            while let Some(version) = versions.next().await {
                match version {
                    Ok(secret) => this.apply(secret.as_ref()),
                    Err(error) => tracing::warn!(object = SECRET, error = %error, "watch was interrupted"),
                }
            }
        });
        followed
    }

    fn apply(&self, secret: Option<&Secret>) {
        let known = secret.map(parse).unwrap_or_default();
        if known.is_empty() {
            tracing::debug!(object = SECRET, "no segment in the Secret; the last ones stay in force");
            return;
        }
        self.known.store(Arc::new(known));
        self.read.send_replace(true);
    }

    /// Waits until a segment is known.
    pub async fn ready(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.read.subscribe().wait_for(|read| *read).await;
    }

    /// Returns the webhook's path in the path of a request with a segment in force.
    pub(super) fn find<'a>(&self, path: &'a str) -> Option<Matched<'a>> {
        let (shown, path) = split(path)?;
        // All are compared, so that the time does not depend on the segment.
        let known = self.known.load();
        let matching = known.iter().filter(|segment| is_same(segment.text.as_bytes(), shown.as_bytes()));
        matching.fold(None, |_, segment| Some(Matched { path, proves: segment.is_secret }))
    }
}

/// Returns the segments in a Secret.
fn parse(secret: &Secret) -> Vec<Segment> {
    let is_marked = |name: &str| secret.metadata.annotations.iter().flatten().any(|(key, _)| key == name);
    let keys =
        [(CURRENT_KEY, !is_marked(EXPOSED_AT)), (NEXT_KEY, true), (PREVIOUS_KEY, !is_marked(PREVIOUS_EXPOSED_AT))];
    keys.into_iter()
        .filter_map(|(key, is_secret)| {
            let text = String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok()?;
            is_segment(&text).then_some(Segment { text, is_secret })
        })
        .collect()
}

/// Compares in a time that depends on the lengths only.
fn is_same(left: &[u8], right: &[u8]) -> bool {
    let difference = left.iter().zip(right).fold(0, |difference, (left, right)| black_box(difference | (left ^ right)));
    left.len() == right.len() && difference == 0
}

#[cfg(test)]
mod tests {
    use api::webhook_path::{SEGMENT_BYTES, join, segment};
    use serde_json::{Value, json};

    use super::*;

    const WEBHOOK: &str = "/virtualmachines-validate";

    fn text(byte: u8) -> String {
        segment([byte; SEGMENT_BYTES])
    }

    fn secret(segments: &[(&str, &str)], annotations: &Value) -> Secret {
        let data = segments
            .iter()
            .map(|(key, text)| ((*key).to_owned(), k8s_openapi::ByteString(text.as_bytes().to_vec())))
            .collect();
        Secret {
            data: Some(data),
            ..serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap()
        }
    }

    fn shown(segments: &Segments, byte: u8) -> Option<bool> {
        let path = join(&text(byte), WEBHOOK);
        let found = segments.find(&path)?;
        assert_eq!(found.path, WEBHOOK);
        Some(found.proves)
    }

    #[tokio::test]
    async fn segments_count_as_long_as_the_secret_contains_them() {
        let segments = Segments::new(Vec::new());
        assert_eq!(shown(&segments, 1), None);
        let current = text(1);
        segments.apply(Some(&secret(&[(CURRENT_KEY, &current)], &json!({}))));
        segments.ready().await;
        assert_eq!(shown(&segments, 1), Some(true));
        let (next, previous) = (text(2), text(1));
        segments.apply(Some(&secret(&[(CURRENT_KEY, &next), (PREVIOUS_KEY, &previous)], &json!({}))));
        assert_eq!((shown(&segments, 1), shown(&segments, 2)), (Some(true), Some(true)));
        segments.apply(Some(&secret(&[(CURRENT_KEY, &next)], &json!({}))));
        assert_eq!((shown(&segments, 1), shown(&segments, 2)), (None, Some(true)));
    }

    #[test]
    fn last_segments_stay_in_force_without_a_usable_secret() {
        let segments = Segments::fixed(&text(1));
        for unusable in [
            None,
            Some(secret(&[], &json!({}))),
            Some(secret(&[(CURRENT_KEY, "")], &json!({}))),
            Some(secret(&[(CURRENT_KEY, "admin"), (NEXT_KEY, "")], &json!({}))),
        ] {
            segments.apply(unusable.as_ref());
            assert_eq!(shown(&segments, 1), Some(true));
            assert_eq!(segments.find(&join("", WEBHOOK)), None);
            assert_eq!(segments.find(&join("admin", WEBHOOK)), None);
        }
    }

    #[test]
    fn segment_that_users_may_have_seen_proves_no_address() {
        let (current, next, previous) = (text(1), text(2), text(3));
        let all = [(CURRENT_KEY, current.as_str()), (NEXT_KEY, &next), (PREVIOUS_KEY, &previous)];
        for (annotation, proofs) in [
            ("other", [true, true, true]),
            (EXPOSED_AT, [false, true, true]),
            (PREVIOUS_EXPOSED_AT, [true, true, false]),
        ] {
            let segments = Segments::new(parse(&secret(&all, &json!({annotation: "2030-01-01T00:00:00Z"}))));
            assert_eq!([1, 2, 3].map(|byte| shown(&segments, byte)), proofs.map(Some), "{annotation}");
        }
    }

    #[test]
    fn comparison_looks_at_every_byte() {
        for (left, right, same) in [("ab", "ab", true), ("ab", "ac", false), ("ab", "bb", false), ("ab", "a", false)] {
            assert_eq!(is_same(left.as_bytes(), right.as_bytes()), same, "{left} {right}");
        }
        assert!(!is_same(b"", b"a") && !is_same(b"a", b"") && !is_same(b"ab", b"abc"));
    }
}
