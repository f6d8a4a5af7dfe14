//! The silence of programs on nodes: the time since this process has seen their last sign of life change. The clocks of nodes can be
//! wrong, so that the time in a sign is not compared with that of this process. A process that has just become the leader begins to
//! count.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The last signs of life, by the names of their senders.
#[derive(Debug, Default)]
pub(crate) struct Signs(BTreeMap<String, (String, Instant)>);

impl Signs {
    /// Notes the present sign of a sender. Returns the time since it has changed; `None` without a sign.
    pub(crate) fn note(&mut self, name: &str, sign: Option<&str>, now: Instant) -> Option<Duration> {
        let Some(sign) = sign else {
            self.0.remove(name);
            return None;
        };
        match self.0.get(name) {
            Some((known, since)) if known == sign => Some(now.saturating_duration_since(*since)),
            _ => {
                self.0.insert(name.to_owned(), (sign.to_owned(), now));
                Some(Duration::ZERO)
            }
        }
    }

    /// Forgets the sign of an object that is gone, by its UID. Another one can have its name.
    pub(crate) fn forget_gone(&mut self, former: Option<&ObjectMeta>, present: Option<&ObjectMeta>) {
        let former = former.and_then(|metadata| metadata.uid.as_ref());
        let present = present.and_then(|metadata| metadata.uid.as_ref());
        if let Some(uid) = former.filter(|_| former != present) {
            self.0.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_counted_from_the_change_that_this_process_has_seen() {
        let begin = Instant::now();
        let mut signs = Signs::default();
        // Second, sign; silence. The node's clock is years ahead or behind, or is set back.
        for (second, sign, expected) in [
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
            let silence = signs.note("n", sign, begin + Duration::from_secs(second));
            assert_eq!(silence, expected.map(Duration::from_secs), "{second}");
            assert_eq!(signs.note("m", None, begin), None);
        }
        assert_eq!(signs.0.len(), 1);
    }

    #[test]
    fn object_that_is_gone_is_forgotten_although_nobody_decides_about_it_any_more() {
        let object = |uid: &str| ObjectMeta { uid: Some(uid.to_owned()), ..ObjectMeta::default() };
        // The present object after the former one with UID a; the former one is known.
        for (present, is_known) in [(Some("a"), true), (Some("b"), false), (None, false)] {
            let mut signs = Signs::default();
            for uid in ["a", "other"] {
                signs.note(uid, Some("sign"), Instant::now());
            }
            signs.forget_gone(None, Some(&object("a")));
            signs.forget_gone(Some(&object("a")), present.map(object).as_ref());
            assert_eq!(signs.0.contains_key("a"), is_known, "{present:?}");
            assert!(signs.0.contains_key("other"));
        }
    }
}
