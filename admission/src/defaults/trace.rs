//! The trace context of new VMs and VMIs.
//!
//! Only virt-api creates contexts: a user who could choose one would add spans to the trace of somebody else. virt-controller passes
//! the context of a VM on to its VMI.

use api::{constants::annotation::TRACEPARENT, traceparent::TraceParent};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Sets the context of a new object. `passed_on`: its creator may set the context, so that a valid one is kept.
pub(crate) fn of_new(metadata: &mut ObjectMeta, context: Option<TraceParent>, passed_on: bool) {
    if passed_on && TraceParent::of(metadata).is_some() {
        return;
    }
    if let Some(context) = context {
        metadata.annotations.get_or_insert_default().insert(TRACEPARENT.to_owned(), context.to_string());
    } else if let Some(annotations) = &mut metadata.annotations {
        annotations.remove(TRACEPARENT);
    }
}

/// Returns true if a change sets another context than the stored one. It may be removed.
pub(crate) fn is_set(metadata: &ObjectMeta, old: &ObjectMeta) -> bool {
    fn context(metadata: &ObjectMeta) -> Option<&String> {
        metadata.annotations.as_ref()?.get(TRACEPARENT)
    }
    context(metadata).is_some() && context(metadata) != context(old)
}

/// Restores the stored context if a change sets another one.
pub(crate) fn keep(metadata: &mut ObjectMeta, old: &ObjectMeta) {
    if !is_set(metadata, old) {
        return;
    }
    let stored = old.annotations.as_ref().and_then(|all| all.get(TRACEPARENT)).cloned();
    let annotations = metadata.annotations.get_or_insert_default();
    match stored {
        Some(stored) => annotations.insert(TRACEPARENT.to_owned(), stored),
        None => annotations.remove(TRACEPARENT),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const THEIRS: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn metadata(value: Option<&str>) -> ObjectMeta {
        let annotation = |value: &str| [(TRACEPARENT.to_owned(), value.to_owned())].into();
        ObjectMeta { annotations: value.map(annotation), ..ObjectMeta::default() }
    }

    fn value(metadata: &ObjectMeta) -> Option<&str> {
        metadata.annotations.as_ref()?.get(TRACEPARENT).map(String::as_str)
    }

    #[test]
    fn only_virt_controller_can_pass_a_context_on() {
        for (sent, on, passed_on, expected) in [
            (None, false, false, None),
            (None, true, false, Some(OURS)),
            (Some(THEIRS), false, false, None),
            (Some(THEIRS), true, false, Some(OURS)),
            (Some(THEIRS), true, true, Some(THEIRS)),
            (Some(THEIRS), false, true, Some(THEIRS)),
            (Some("forged"), true, true, Some(OURS)),
            (Some("forged"), false, true, None),
            (None, true, true, Some(OURS)),
        ] {
            let mut new = metadata(sent);
            of_new(&mut new, on.then(|| OURS.parse().unwrap()), passed_on);
            assert_eq!(value(&new), expected, "{sent:?} {on} {passed_on}");
        }
    }

    #[test]
    fn a_change_keeps_or_removes_the_context() {
        for (stored, sent, expected, set) in [
            (Some(OURS), Some(OURS), Some(OURS), false),
            (Some(OURS), None, None, false),
            (Some(OURS), Some(THEIRS), Some(OURS), true),
            (None, Some(THEIRS), None, true),
            (None, None, None, false),
        ] {
            let mut new = metadata(sent);
            assert_eq!(is_set(&new, &metadata(stored)), set, "{stored:?} {sent:?}");
            keep(&mut new, &metadata(stored));
            assert_eq!(value(&new), expected, "{stored:?} {sent:?}");
        }
    }
}
