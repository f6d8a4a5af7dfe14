//! The silence of nodes: the time since this process has seen the heartbeat change. The clocks of nodes can be wrong, so that the time
//! in a heartbeat is not compared with that of this process. A process that has just become the leader begins to count.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use api::constants::annotation;

use crate::resources::nodes::CachedNode;

/// The last heartbeats.
#[derive(Debug, Default)]
pub(super) struct Heartbeats(BTreeMap<String, (String, Instant)>);

impl Heartbeats {
    /// Notes the heartbeat of a node. Returns the time since it has changed; `None` without node or heartbeat.
    pub(super) fn note(&mut self, name: &str, node: Option<&CachedNode>, now: Instant) -> Option<Duration> {
        let heartbeat = node.and_then(|node| node.metadata.annotations.as_ref()?.get(annotation::HEARTBEAT));
        let Some(heartbeat) = heartbeat else {
            self.0.remove(name);
            return None;
        };
        match self.0.get(name) {
            Some((known, since)) if known == heartbeat => Some(now.saturating_duration_since(*since)),
            _ => {
                self.0.insert(name.to_owned(), (heartbeat.clone(), now));
                Some(Duration::ZERO)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn silence_is_counted_from_the_change_that_this_process_has_seen() {
        let begin = Instant::now();
        let mut beats = Heartbeats::default();
        // Second, heartbeat; silence. The node's clock is years ahead or behind, or is set back.
        for (second, heartbeat, expected) in [
            (0, Some("2030-01-01T00:00:00Z"), Some(0)),
            (299, Some("2030-01-01T00:00:00Z"), Some(299)),
            (300, Some("1970-01-01T00:00:00Z"), Some(0)),
            (360, Some("1970-01-01T00:01:00Z"), Some(0)),
            (400, Some("1970-01-01T00:00:00Z"), Some(0)),
            (700, Some("1970-01-01T00:00:00Z"), Some(300)),
            (701, Some("noon"), Some(0)),
            (702, None, None),
            (710, Some("noon"), Some(0)),
        ] {
            let mut node = CachedNode::default();
            let annotations = heartbeat.map(|at| json!({"kubevirt.io/heartbeat": at}));
            node.metadata.annotations = annotations.map(|all| serde_json::from_value(all).unwrap());
            let silence = beats.note("n", Some(&node), begin + Duration::from_secs(second));
            assert_eq!(silence, expected.map(Duration::from_secs), "{second}");
            assert_eq!(beats.note("m", None, begin), None);
        }
        assert_eq!(beats.0.len(), 1);
    }
}
