//! The spans of reviews in the trace of a start.

use std::time::Instant;

use admission::{AdmissionRequest, Review, ReviewTrace};
use daemon::telemetry::{OpenSpan, Traces};
use k8s_openapi::jiff::Timestamp;

use super::outcome::{Answered, Outcome};

/// Name of the spans.
const NAME: &str = "review";

/// Opens the span of a review that belongs to a start. The first review of an object gives it a trace.
pub(super) fn begin(
    traces: &Traces,
    review: Review,
    namespace: &str,
    path: &str,
    began: Instant,
) -> (Review, Option<OpenSpan>) {
    if !traces.is_on() {
        return (review, None);
    }
    let (review, span) = match review.trace(namespace, Timestamp::now()) {
        None => (review, None),
        Some(ReviewTrace::First) => {
            let context = traces.root();
            let span = context.and_then(|context| traces.open(NAME, context, None));
            (review.with_trace(context), span)
        }
        Some(ReviewTrace::Part(parent)) => {
            let span = traces.child(NAME, &parent);
            (review, span)
        }
    };
    let span = span.map(|span| describe(span.began(began), review.request(), path));
    (review, span)
}

/// Ends the span of a review.
pub(super) fn end(span: Option<OpenSpan>, answered: &Answered) {
    if let Some(mut span) = span {
        span.set("outcome", answered.outcome.label());
        if answered.outcome != Outcome::Allowed {
            span.fail(answered.message());
        }
    }
}

fn describe(span: OpenSpan, request: &AdmissionRequest, path: &str) -> OpenSpan {
    let name = |object: &serde_json::Value| {
        object.pointer("/metadata/name").and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    };
    span.with("webhook", path)
        .with("operation", format!("{:?}", request.operation).to_uppercase())
        .with("resource", &request.resource.resource)
        .with("namespace", request.namespace.as_deref().unwrap_or_default())
        .with("name", name(&request.object))
}

#[cfg(test)]
mod tests {
    use admission::{AdmissionReview, Lookups};
    use api::{config::ClusterConfig, constants::annotation::TRACEPARENT, traceparent::TraceParent};
    use base64::{Engine, engine::general_purpose::STANDARD};
    use serde_json::{Value, json};

    use super::*;

    fn review(path: &str, plural: &str, user: &str, context: Option<&str>, dry_run: bool) -> Review {
        let annotations = context.map(|context| json!({TRACEPARENT: context}));
        let spec = json!({"domain": {"devices": {}, "memory": {"guest": "128Mi"}}});
        let spec = if plural == "virtualmachines" { json!({"template": {"spec": spec}}) } else { spec };
        let review = json!({"request": {
            "uid": "u",
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": plural},
            "namespace": "ns",
            "operation": "CREATE",
            "userInfo": {"username": user},
            "dryRun": dry_run,
            "object": {"metadata": {"name": "box", "annotations": annotations}, "spec": spec},
        }});
        Review::parse(path, review.to_string().as_bytes()).unwrap()
    }

    /// Returns the context that the answer sets.
    fn context(review: &Review) -> Option<TraceParent> {
        let lookups = Lookups::new();
        let answer = match review.evaluate(&ClusterConfig::default(), "kubevirt", &lookups) {
            Ok(evaluation) => evaluation.review,
            Err(queries) => {
                let mut known = Lookups::new();
                for query in queries {
                    known.insert(query, admission::LookupResult::List(vec![]));
                }
                review.evaluate(&ClusterConfig::default(), "kubevirt", &known).unwrap().review
            }
        };
        assert!(answer.response.allowed, "{:?}", answer.response.status);
        let patch = STANDARD.decode(answer.response.patch.unwrap()).unwrap();
        let patch: Vec<Value> = serde_json::from_slice(&patch).unwrap();
        let mut values = patch.iter().filter_map(|change| {
            let path = change["path"].as_str()?;
            match path.strip_prefix("/metadata/annotations")? {
                "" => change["value"][TRACEPARENT].as_str(),
                "/ferrovirt.io~1traceparent" => change["value"].as_str(),
                _ => None,
            }
        });
        values.next_back().map(|value| value.parse().unwrap())
    }

    #[tokio::test]
    async fn a_new_vm_gets_the_context_of_its_review() {
        const FORGED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for forged in [None, Some(FORGED)] {
            let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
            let path = "/virtualmachines-mutate";
            let first = review(path, "virtualmachines", "alice", forged, false);
            let (first, span) = begin(&traces, first, "kubevirt", path, Instant::now());
            let given = context(&first).unwrap();
            end(span, &Answered::decided(AdmissionReview::failed("u", 422, "spec is missing")));
            let span = spans.try_recv().unwrap();
            assert_eq!((span.context, span.parent), (given, None));
            assert_ne!(given.to_string(), FORGED);
            assert_eq!(span.error.as_deref(), Some("spec is missing"));
            assert!(span.attributes.contains(&("name", "box".to_owned())), "{:?}", span.attributes);
            assert!(span.attributes.contains(&("outcome", "denied".to_owned())), "{:?}", span.attributes);
        }
    }

    #[tokio::test]
    async fn the_review_of_a_vmi_of_virt_controller_belongs_to_the_trace_of_its_vm() {
        const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        const CONTROLLER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let path = "/virtualmachineinstances-mutate";
        let part = review(path, "virtualmachineinstances", CONTROLLER, Some(GIVEN), false);
        let (part, span) = begin(&traces, part, "kubevirt", path, Instant::now());
        // Unchanged.
        assert_eq!(context(&part), None);
        drop(span);
        let (span, given) = (spans.try_recv().unwrap(), GIVEN.parse::<TraceParent>().unwrap());
        assert_eq!((span.context.trace_id, span.parent), (given.trace_id, Some(given.span_id)));
    }

    #[tokio::test]
    async fn no_annotation_is_written_when_off_and_no_span_for_a_dry_run() {
        let path = "/virtualmachines-mutate";
        let new = |dry_run| review(path, "virtualmachines", "alice", None, dry_run);
        let (off, span) = begin(&Traces::default(), new(false), "kubevirt", path, Instant::now());
        assert!(span.is_none() && context(&off).is_none());
        let (traces, _spans) = Traces::to_receiver(1.0).unwrap();
        let (tried, span) = begin(&traces, new(true), "kubevirt", path, Instant::now());
        assert!(span.is_none() && context(&tried).is_none());
        // The decision not to sample is passed on, so that no later process begins a trace.
        let (traces, _spans) = Traces::to_receiver(0.0).unwrap();
        let (unsampled, span) = begin(&traces, new(false), "kubevirt", path, Instant::now());
        assert!(span.is_none() && !context(&unsampled).unwrap().sampled);
    }
}
