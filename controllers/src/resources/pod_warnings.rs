//! Warnings of the kubelet, its volumes and its network plugins about pods that do not start. Only events tell them. They are
//! read for single pods (see [`crate::runtime::Effect::ReadWarnings`]), never watched.

use api::constants::reason;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{api::core::v1::Event, apimachinery::pkg::apis::meta::v1::ObjectMeta};

/// Reasons of events that name the cause before the pod has a network.
const BEFORE_SANDBOX: [&str; 6] = [
    "FailedMount",
    "FailedAttachVolume",
    "FailedMapVolume",
    "FailedCreatePodSandBox",
    "NetworkNotReady",
    // Multus.
    "NoNetworkFound",
];
/// Reason and beginning of the message of an event about an image.
const PULL: (&str, &str) = ("Failed", "Failed to pull image");
/// Messages about the symptom. Another event names the cause.
const VAGUE: [&str; 2] = ["timed out waiting for the condition", "context deadline exceeded"];
/// Mark that the kubelet puts in front of a message that stands for several.
const COMBINED: &str = "(combined from similar events): ";
/// Longest message that is kept, in bytes.
const LONGEST: usize = 512;
/// Length of a hexadecimal number that is an identifier. Each attempt of the kubelet has another one.
const IDENTIFIER: usize = 32;
/// Shortest time between two reads of the events of a pod.
pub(crate) const SHORTEST_INTERVAL: SignedDuration = SignedDuration::from_secs(10);
/// Longest time.
const LONGEST_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// Reason and message of the events of a pod that does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Warning {
    /// Reason of a condition.
    pub reason: &'static str,
    /// Message, bounded and without identifiers.
    pub message: String,
}

/// The outcome of a read of the events of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodWarning {
    /// Name, namespace and UID of the pod, and the version of the list of events.
    pub metadata: ObjectMeta,
    /// Time of the read.
    pub read_at: Timestamp,
    /// Why the pod does not start.
    pub warning: Option<Warning>,
}

unindexed!(PodWarning);

impl PodWarning {
    /// Returns the time after which the events are read again: it grows with the age of the pod.
    pub(crate) fn read_again_after(&self, created: Timestamp) -> SignedDuration {
        (self.read_at.duration_since(created) / 2).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
    }
}

/// Returns the reason of a condition that only a warning can cause.
#[must_use]
pub(crate) fn known(reason: &str) -> Option<&'static str> {
    BEFORE_SANDBOX.into_iter().find(|known| *known == reason)
}

/// Returns the newest warning that names the cause. `has_network`: volumes and networks of the pod are ready, so that warnings
/// about them are over.
#[must_use]
pub(crate) fn newest(events: &[Event], has_network: bool) -> Option<Warning> {
    let shown = events.iter().filter_map(|event| Some((reason_of(event, has_network)?, event)));
    let (reason, event) = shown.max_by_key(|(_, event)| (!is_vague(event), seen(event)))?;
    Some(Warning { reason, message: text(event.message.as_deref().unwrap_or_default()) })
}

fn reason_of(event: &Event, has_network: bool) -> Option<&'static str> {
    let reason = event.reason.as_deref()?;
    let message = event.message.as_deref().unwrap_or_default();
    if reason == PULL.0 && message.starts_with(PULL.1) {
        return Some(reason::ERR_IMAGE_PULL);
    }
    known(reason).filter(|_| !has_network)
}

fn is_vague(event: &Event) -> bool {
    event.message.as_deref().is_some_and(|message| VAGUE.iter().any(|vague| message.contains(vague)))
}

/// Returns when the cause of an event was seen last.
pub(super) fn seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|at| at.0);
    let last = event.last_timestamp.as_ref().map(|at| at.0);
    series.max(last).or_else(|| event.event_time.as_ref().map(|at| at.0))
}

/// Returns a message on one line, bounded, and without what differs between attempts.
pub(super) fn text(message: &str) -> String {
    let message = message.strip_prefix(COMBINED).unwrap_or(message);
    let is_identifier = |word: &str| word.len() >= IDENTIFIER && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut text = String::new();
    for part in message.split_inclusive(|letter: char| !letter.is_ascii_alphanumeric()) {
        let word = part.trim_end_matches(|letter: char| !letter.is_ascii_alphanumeric());
        text.push_str(if is_identifier(word) { "..." } else { word });
        text.push_str(&part[word.len()..]);
    }
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = (0..=LONGEST.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    if end < text.len() { format!("{}...", &text[..end]) } else { text }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(reason: &str, message: &str, minute: u32) -> Event {
        serde_json::from_value(json!({
            "metadata": {}, "involvedObject": {}, "reason": reason, "message": message,
            "lastTimestamp": format!("2030-01-01T00:{minute:02}:00Z"),
        }))
        .unwrap()
    }

    #[test]
    fn newest_warning_that_names_the_cause_is_shown() {
        let secret = event("FailedMount", "MountVolume.SetUp failed for volume \"seed\" : secret \"s\" not found", 1);
        let vague = event("FailedMount", "Unable to attach or mount volumes: timed out waiting for the condition", 2);
        let network = event("NoNetworkFound", "cannot find network blue", 3);
        let pull = event("Failed", "Failed to pull image \"i\": no such host", 2);
        let other = event("Failed", "Error: something else", 5);
        let unhealthy = event("Unhealthy", "probe failed", 5);
        for (events, has_network, expected) in [
            (vec![], false, None),
            (vec![unhealthy, other], false, None),
            (vec![secret.clone(), vague.clone()], false, Some("FailedMount")),
            (vec![vague.clone()], false, Some("FailedMount")),
            (vec![secret.clone(), network.clone()], false, Some("NoNetworkFound")),
            (vec![network.clone(), secret.clone()], true, None),
            (vec![secret.clone(), pull.clone()], true, Some("ErrImagePull")),
        ] {
            assert_eq!(newest(&events, has_network).map(|warning| warning.reason), expected, "{events:?}");
        }
        let message = newest(&[vague, secret], false).unwrap().message;
        assert_eq!(message, "MountVolume.SetUp failed for volume \"seed\" : secret \"s\" not found");
    }

    #[test]
    fn text_is_bounded_and_the_same_for_each_attempt() {
        let attempt = |digit: &str| {
            text(&format!(
                "(combined from similar events): failed to setup network for sandbox \"{}\": no\nlink",
                digit.repeat(64)
            ))
        };
        assert_eq!(attempt("a"), "failed to setup network for sandbox \"...\": no link");
        assert_eq!(attempt("a"), attempt("b"));
        assert_eq!(text("plain"), "plain");
        assert_eq!(text(&"é".repeat(1000)), format!("{}...", "é".repeat(256)));
    }

    #[test]
    fn events_are_read_less_often_as_time_passes() {
        let created = Timestamp::from_second(1000).unwrap();
        for (age, expected) in [(5, 10), (40, 20), (1000, 60)] {
            let read_at = Timestamp::from_second(1000 + age).unwrap();
            let warning = PodWarning { read_at, ..PodWarning::default() };
            assert_eq!(warning.read_again_after(created), SignedDuration::from_secs(expected), "{age}");
        }
    }
}
