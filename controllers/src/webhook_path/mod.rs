//! The unguessable segment in the paths of the webhooks, and its rotation.
//!
//! ```text
//!            ROTATION over, or exposed    SETTLE passed                  configurations carry it, OVERLAP passed
//!  current ───────────────────────────> current + next ─> current + previous ────────────────────────────────> current
//! ```
//! virt-api accepts all segments that the Secret holds. kube-apiserver uses the one that the webhook configurations
//! carry, and shows it to the user whose call fails because virt-api does not answer. All times are by the wall clock, so
//! that a process that starts late catches up; the Secret holds all state, so that any replica continues.

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::webhook_path::{
    CURRENT_KEY, EXPOSED_AT, NEXT_KEY, PREVIOUS_EXPOSED_AT, PREVIOUS_KEY, SECRET, SEGMENT_BYTES, is_segment, join,
    segment, split,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::json;

pub(crate) use self::controller::WebhookPaths;
use crate::{
    certificates::owned_labels,
    resources::bundle_carriers::BundleCarrier,
    runtime::{Decision, Effect, Kind},
};

/// Time that a segment is used. A call that times out while other replicas serve exposes it as well; an hour bounds its use.
const ROTATION: SignedDuration = SignedDuration::from_hours(1);
/// Time that the next segment is in the Secret before kube-apiserver uses it. virt-api follows the Secret by a watch and
/// has it in milliseconds; a watch that broke tries again after 0.8, 1.6, 3.2 and 6.4 s.
const SETTLE: SignedDuration = SignedDuration::from_secs(20);
/// The same where the current segment was exposed: virt-api knows the next one when it starts, or soon after, and the
/// Service has its endpoints by then. Earlier, a failing call could show the next segment as well.
const SETTLE_EXPOSED: SignedDuration = SignedDuration::from_secs(10);
/// Time that the previous segment is accepted. A write reads the configurations before its first webhook; another webhook
/// may take 30 s, ours 5 s, and API servers follow the configurations by watches.
const OVERLAP: SignedDuration = SignedDuration::from_secs(40);
/// The same where it was exposed: a call takes 5 s, the rest is for the watches. A write that another webhook holds up
/// for longer fails, which is the price of a short life.
const OVERLAP_EXPOSED: SignedDuration = SignedDuration::from_secs(10);
/// A time further in the future was written by a wrong clock.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(1);
/// Longest time between decisions, so that a changed clock is noticed.
const LONGEST_WAIT: Duration = Duration::from_secs(1800);
/// Wait after the system returned no random numbers.
const RANDOM_RETRY: Duration = Duration::from_secs(30);

/// Annotation of the Secret: since when it has held the next segment.
const NEXT_SINCE: &str = "ferrovirt.io/next-published-at";
/// Annotation of the Secret: since when all webhook configurations carry the current segment.
const PLACED_AT: &str = "ferrovirt.io/placed-at";

/// A webhook configuration and its kind.
pub(crate) type Configuration = (Kind, Arc<BundleCarrier>);

/// Everything that decisions about the segment depend on.
pub(crate) struct Observed {
    /// Install namespace.
    pub namespace: Arc<str>,
    /// The Secret.
    pub secret: Option<Arc<Secret>>,
    /// The webhook configurations.
    pub configurations: Vec<Configuration>,
    /// At least one virt-api is ready.
    pub ready: bool,
    /// Time at which the availability of virt-api last changed, if no replica led then and saw that none was ready.
    pub missed: Option<Timestamp>,
    /// The current time.
    pub now: Timestamp,
}

/// A change of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Create the Secret, or replace an unusable one. The segment in the configurations stays accepted and is replaced at once,
    /// because its age is not known.
    Make {
        /// That segment.
        adopted: Option<String>,
    },
    /// Publish the next segment.
    Stage,
    /// Promote the next segment.
    Promote,
    /// Record the time since which the configurations hold the current segment.
    MarkPlaced,
    /// Record that users may have seen segments, and withdraw the next one.
    MarkExposed {
        /// The current segment was exposed.
        current: bool,
        /// The previous segment was exposed.
        previous: bool,
    },
    /// Reject the previous segment.
    Drop,
}

/// The content of a usable Secret.
struct State<'a> {
    current: &'a str,
    next: Option<&'a str>,
    previous: Option<&'a str>,
    next_since: Option<Timestamp>,
    placed_at: Option<Timestamp>,
    exposed: bool,
    previous_exposed: bool,
}

impl<'a> State<'a> {
    fn read(secret: &'a Secret) -> Option<Self> {
        let segment = |key: &str| {
            let text = std::str::from_utf8(&secret.data.as_ref()?.get(key)?.0).ok()?;
            is_segment(text).then_some(text)
        };
        let annotation = |name: &str| secret.metadata.annotations.as_ref()?.get(name);
        let time = |name: &str| annotation(name)?.parse::<Timestamp>().ok();
        Some(Self {
            current: segment(CURRENT_KEY)?,
            next: segment(NEXT_KEY),
            previous: segment(PREVIOUS_KEY),
            next_since: time(NEXT_SINCE),
            placed_at: time(PLACED_AT),
            exposed: annotation(EXPOSED_AT).is_some(),
            previous_exposed: annotation(PREVIOUS_EXPOSED_AT).is_some(),
        })
    }

    /// Returns the exposure that is not recorded yet, if any.
    fn exposure(&self, carried: &BTreeSet<&str>) -> Option<Step> {
        let current = carried.contains(self.current);
        let previous = self.previous.is_some_and(|previous| carried.contains(previous));
        let news = (current && (!self.exposed || self.next.is_some())) || (previous && !self.previous_exposed);
        news.then_some(Step::MarkExposed { current, previous })
    }
}

/// Segments in the paths of the configurations.
fn carried(configurations: &[Configuration]) -> BTreeSet<&str> {
    let webhooks = configurations.iter().flat_map(|(_, object)| &object.webhooks);
    let segments = webhooks.filter_map(|webhook| Some(split(webhook.path.as_deref()?)?.0));
    segments.filter(|segment| is_segment(segment)).collect()
}

/// Returns true when every webhook has its path behind one of these segments.
fn are_placed(configurations: &[Configuration], segments: &[&str]) -> bool {
    configurations.iter().flat_map(|(_, object)| &object.webhooks).all(|webhook| {
        let parts = webhook.path.as_deref().and_then(split);
        parts.is_some_and(|(segment, path)| segments.contains(&segment) && webhook.wanted_path.as_deref() == Some(path))
    })
}

/// Returns true when virt-api accepts the paths in all configurations.
#[must_use]
pub(crate) fn in_place(secret: Option<&Secret>, configurations: &[Configuration]) -> bool {
    secret.and_then(State::read).is_some_and(|state| {
        let accepted: Vec<_> = [Some(state.current), state.previous].into_iter().flatten().collect();
        are_placed(configurations, &accepted)
    })
}

/// Decides on the Secret. Pure; [`perform`] carries the step out.
pub(crate) fn plan(observed: &Observed) -> (Option<Step>, Duration) {
    let now = observed.now;
    let carried = carried(&observed.configurations);
    let Some(state) = observed.secret.as_deref().and_then(State::read) else {
        return (Some(Step::Make { adopted: carried.first().map(|&segment| segment.to_owned()) }), LONGEST_WAIT);
    };
    if !observed.ready {
        // Segments do not age while they are not used. The Deployment wakes this when a virt-api is ready.
        return (state.exposure(&carried), LONGEST_WAIT);
    }
    let is_future = |at: Timestamp| at.duration_since(now) > CLOCK_SKEW;
    let Some(placed_at) = state.placed_at.filter(|at| !is_future(*at)) else {
        let placed = are_placed(&observed.configurations, &[state.current]);
        return (placed.then_some(Step::MarkPlaced), LONGEST_WAIT);
    };
    let mut wait = LONGEST_WAIT;
    let mut is_over = |since: Timestamp, time: SignedDuration| {
        let left = time - now.duration_since(since);
        let is_over = left <= SignedDuration::ZERO;
        if !is_over {
            wait = wait.min(Duration::try_from(left).unwrap_or_default().max(Duration::from_secs(1)));
        }
        is_over
    };
    if state.previous.is_some() {
        let overlap = if state.previous_exposed { OVERLAP_EXPOSED } else { OVERLAP };
        if is_over(placed_at, overlap) {
            return (Some(Step::Drop), LONGEST_WAIT);
        }
    }
    let step = match (state.next, state.next_since) {
        (Some(_), Some(since)) if !is_future(since) => {
            let settle = if state.exposed { SETTLE_EXPOSED } else { SETTLE };
            is_over(since, settle).then_some(Step::Promote)
        }
        (Some(_), _) => Some(Step::Stage),
        (None, _) => {
            let missed = observed.missed.is_some_and(|at| at > placed_at && !is_future(at));
            (state.exposed || missed || is_over(placed_at, ROTATION)).then_some(Step::Stage)
        }
    };
    (step, wait)
}

/// Decides on the Secret and the paths in the configurations.
///
/// # Errors
/// When an object cannot be written as JSON.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let (step, wait) = plan(observed);
    let mut decision = Decision::settled();
    decision.wake(wait);
    if let Some(step) = step {
        let Some(generated) = random_segment() else {
            tracing::error!("no random numbers; the webhook paths stay as they are");
            decision.wake(RANDOM_RETRY);
            return Ok(decision);
        };
        tracing::info!(step = step.name(), "webhook paths change");
        decision.effects.extend(perform(observed, &step, generated)?);
        return Ok(decision);
    }
    // Calls fail while no virt-api is ready, and would expose a new segment.
    if observed.ready
        && let Some(state) = observed.secret.as_deref().and_then(State::read)
    {
        let objects = observed.configurations.iter();
        decision.effects.extend(objects.filter_map(|(kind, object)| inject(*kind, object, state.current)));
    }
    Ok(decision)
}

fn random_segment() -> Option<String> {
    let mut random = [0; SEGMENT_BYTES];
    daemon::tls::provider().secure_random.fill(&mut random).ok()?;
    Some(segment(random))
}

impl Step {
    fn name(&self) -> &'static str {
        match self {
            Self::Make { .. } => "make segment",
            Self::Stage => "publish next segment",
            Self::Promote => "replace segment",
            Self::MarkPlaced => "mark segment as placed",
            Self::MarkExposed { .. } => "mark segment as exposed",
            Self::Drop => "drop previous segment",
        }
    }
}

/// Carries a step out. `generated` is a segment that was never used.
fn perform(observed: &Observed, step: &Step, generated: String) -> Result<Option<Effect>, serde_json::Error> {
    let now = observed.now.to_string();
    let mut wanted = observed.secret.as_deref().cloned().unwrap_or_default();
    let data = wanted.data.get_or_insert_default();
    let annotations = wanted.metadata.annotations.get_or_insert_default();
    let mut put = |key: &str, segment: String| data.insert(key.to_owned(), ByteString(segment.into_bytes()));
    match step {
        Step::Make { adopted } => {
            for name in [EXPOSED_AT, PREVIOUS_EXPOSED_AT, NEXT_SINCE, PLACED_AT] {
                annotations.remove(name);
            }
            match adopted {
                Some(adopted) => {
                    put(CURRENT_KEY, adopted.clone());
                    put(NEXT_KEY, generated);
                    annotations.insert(PLACED_AT.to_owned(), now.clone());
                    annotations.insert(NEXT_SINCE.to_owned(), now);
                }
                None => {
                    put(CURRENT_KEY, generated);
                    data.remove(NEXT_KEY);
                }
            }
            data.remove(PREVIOUS_KEY);
        }
        Step::Stage => {
            put(NEXT_KEY, generated);
            annotations.insert(NEXT_SINCE.to_owned(), now);
        }
        Step::Promote => {
            annotations.remove(NEXT_SINCE);
            annotations.remove(PLACED_AT);
            match annotations.remove(EXPOSED_AT) {
                Some(at) => annotations.insert(PREVIOUS_EXPOSED_AT.to_owned(), at),
                None => annotations.remove(PREVIOUS_EXPOSED_AT),
            };
            if let Some(current) = data.remove(CURRENT_KEY) {
                data.insert(PREVIOUS_KEY.to_owned(), current);
            }
            if let Some(next) = data.remove(NEXT_KEY) {
                data.insert(CURRENT_KEY.to_owned(), next);
            }
        }
        Step::MarkPlaced => {
            annotations.insert(PLACED_AT.to_owned(), now);
        }
        Step::MarkExposed { current, previous } => {
            if *current {
                annotations.insert(EXPOSED_AT.to_owned(), now.clone());
            }
            if *previous {
                annotations.insert(PREVIOUS_EXPOSED_AT.to_owned(), now);
            }
            annotations.remove(NEXT_SINCE);
            data.remove(NEXT_KEY);
        }
        Step::Drop => {
            annotations.remove(PREVIOUS_EXPOSED_AT);
            data.remove(PREVIOUS_KEY);
        }
    }
    let Some(former) = observed.secret.as_deref() else {
        wanted.metadata = ObjectMeta {
            name: Some(SECRET.to_owned()),
            namespace: Some(observed.namespace.to_string()),
            labels: Some(owned_labels()),
            ..wanted.metadata
        };
        wanted.type_ = Some("Opaque".to_owned());
        return Effect::create(Kind::Secret, Some(&observed.namespace), &wanted).map(Some);
    };
    Effect::change(Kind::Secret, former, &wanted, None)
}

/// Returns the change of a configuration whose paths differ. A webhook without an entry in the annotation keeps its path.
fn inject(kind: Kind, object: &BundleCarrier, segment: &str) -> Option<Effect> {
    let mut is_stale = false;
    // All of them in their order, which becomes that of the configuration.
    let webhooks: Vec<_> = object
        .webhooks
        .iter()
        .map(|webhook| {
            let Some(path) = &webhook.wanted_path else { return json!({"name": webhook.name}) };
            let path = join(segment, path);
            is_stale |= webhook.path.as_ref() != Some(&path);
            json!({"name": webhook.name, "clientConfig": {"service": {"path": path}}})
        })
        .collect();
    if !is_stale {
        return None;
    }
    // Merged by the webhooks' names.
    Some(Effect::merge(kind, &object.metadata, json!({"webhooks": webhooks})).by_keys())
}
