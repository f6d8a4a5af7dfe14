//! A review: rules are evaluated until all their queries are answered, then their effects are carried out.

use std::time::{Duration, Instant};

use admission::{
    AdmissionRequest, AdmissionReview, Evaluation, Lookups, Review,
    context::{
        Operation,
        lookups::{MAX_QUERIES, MAX_ROUNDS},
    },
};
use axum::body::Body;
use http::{StatusCode, header, request::Parts};
use serde_json::Value;
use tokio::time::timeout;

use super::{Answered, ReviewLimits, Webhooks, lookups, outcome::Outcome, trace};
use crate::limits::Reservation;

/// Longest time for the queries of a review.
const READ_DEADLINE: Duration = Duration::from_secs(3);
/// Path of the webhook that validates VMs.
const VM_VALIDATION: &str = "/virtualmachines-validate";

impl Webhooks {
    /// Reads and answers a review. The current span gets the facts of the request.
    pub(super) async fn review(
        &self,
        path: &str,
        head: &Parts,
        body: &mut Body,
        trusted: bool,
        began: Instant,
    ) -> Answered {
        let json = head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        if !json {
            return Answered::refusal(StatusCode::BAD_REQUEST, "a review has the content type application/json");
        }
        let limits = if trusted { &self.trusted } else { &self.others };
        let mut body = match self.memory.receive(body, trusted, &limits.large).await {
            Ok(body) => body,
            Err(refusal) => return refusal,
        };
        let bytes = std::mem::take(&mut body.bytes);
        match Review::parse(path, &bytes) {
            Ok(review) => {
                drop(bytes);
                record(review.request());
                let (review, span) = trace::begin(&self.traces, review, &self.namespace, path, began);
                let answered = Answered::decided(self.answer(&review, limits).await);
                if answered.outcome == Outcome::Allowed
                    && let Some(namespace) = created_in(path, review.request())
                {
                    self.metrics.vm_created(namespace);
                }
                trace::end(span, &answered);
                answered
            }
            // With a uid kube-apiserver shows the answer; without one it cannot match it.
            Err(refusal) if refusal.response.uid.is_empty() => Answered::failed(StatusCode::BAD_REQUEST, *refusal),
            Err(refusal) => Answered::failed(StatusCode::OK, *refusal),
        }
    }

    /// Evaluates the rules until no lookups are missing, then carries out their effects.
    async fn answer(&self, review: &Review, limits: &ReviewLimits) -> AdmissionReview {
        // All rounds have the same configuration.
        let config = self.config.current();
        let started = Instant::now();
        let mut known = Lookups::new();
        // Held until the answer is made.
        let mut memory = Reservation::default();
        for _ in 0..=MAX_ROUNDS {
            let queries = match review.evaluate(&config, &self.namespace, &known) {
                Ok(evaluation) => return self.apply(review, evaluation, limits, started).await,
                Err(queries) => queries,
            };
            if known.len() + queries.len() > MAX_QUERIES {
                return review.failed("the object refers to too many other objects");
            }
            let mut unknown = Vec::with_capacity(queries.len());
            for query in queries {
                match self.presets.answer(&query) {
                    Some(result) => known.insert(query, result),
                    None => unknown.push(query),
                }
            }
            if unknown.is_empty() {
                continue;
            }
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let Ok(Ok(_reader)) = timeout(rest, limits.readers.acquire()).await else {
                return review.failed("too many admission reviews wait for the API server, try again");
            };
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let pending = unknown.iter().map(ToString::to_string).take(3).collect::<Vec<_>>().join(", ");
            let reading = lookups::read(&self.client, unknown, &mut known, &limits.answers, &mut memory);
            if timeout(rest, reading).await.is_err() {
                return review.failed(format!("the API server did not answer in time: {pending}"));
            }
        }
        review.failed("the rules ask for more and more objects")
    }

    /// Carries out the effects of an evaluation and returns its response, or the failure of an effect.
    async fn apply(
        &self,
        review: &Review,
        Evaluation { review: mut response, effects }: Evaluation,
        limits: &ReviewLimits,
        started: Instant,
    ) -> AdmissionReview {
        for effect in &effects {
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            let Ok(Ok(_reader)) = timeout(rest, limits.readers.acquire()).await else {
                return review.failed("too many admission reviews wait for the API server, try again");
            };
            let rest = READ_DEADLINE.saturating_sub(started.elapsed());
            match timeout(rest, lookups::apply(&self.client, effect, &limits.answers)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => response = review.effect_failed(effect, &error.to_string(), response),
                Err(_) => {
                    return review.failed(format!("the API server did not answer in time: {effect}"));
                }
            }
        }
        response
    }
}

/// Returns the namespace of a VM that this request creates, if `path` is that of the last webhook for it.
fn created_in<'r>(path: &str, request: &'r AdmissionRequest) -> Option<&'r str> {
    let is_creation = request.operation == Operation::Create && !request.dry_run.unwrap_or(false);
    request.namespace.as_deref().filter(|_| path == VM_VALIDATION && is_creation)
}

/// Records the facts of a request in the current span.
fn record(request: &AdmissionRequest) {
    let span = tracing::Span::current();
    let metadata = |field: &str| {
        let object = if request.object.is_null() { &request.old_object } else { &request.object };
        object.get("metadata").and_then(|metadata| metadata.get(field)).and_then(Value::as_str).unwrap_or_default()
    };
    let name = request.name.as_deref().filter(|name| !name.is_empty());
    span.record("request", request.uid.as_str());
    span.record("operation", tracing::field::debug(request.operation));
    span.record("resource", request.resource.resource.as_str());
    span.record("namespace", request.namespace.as_deref().unwrap_or_default());
    span.record("name", name.unwrap_or_else(|| metadata("name")));
    span.record("uid", metadata("uid"));
    span.record("user", request.user_info.username.as_deref().unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_creations_that_are_stored_count() {
        let webhook = admission::WEBHOOKS.iter().find(|webhook| webhook.path == VM_VALIDATION);
        assert_eq!(webhook.and_then(|webhook| webhook.resource), Some(("kubevirt.io", "virtualmachines")));
        for (path, operation, dry_run, counts) in [
            (VM_VALIDATION, "CREATE", json!(null), true),
            (VM_VALIDATION, "CREATE", json!(false), true),
            (VM_VALIDATION, "CREATE", json!(true), false),
            (VM_VALIDATION, "UPDATE", json!(null), false),
            ("/virtualmachines-mutate", "CREATE", json!(null), false),
        ] {
            let request: AdmissionRequest = serde_json::from_value(json!({
                "uid": "u", "operation": operation, "namespace": "ns", "dryRun": dry_run,
                "resource": {"group": "kubevirt.io", "version": "v1", "resource": "virtualmachines"},
            }))
            .unwrap();
            assert_eq!(created_in(path, &request), counts.then_some("ns"), "{path} {operation} {dry_run}");
        }
    }
}
