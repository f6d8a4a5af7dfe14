//! Exports spans in batches to a collector, by OTLP over gRPC.
//!
//! The exporter of the OpenTelemetry SDK is not used: it has one resource for all spans, while virt-handler also exports the spans
//! of virt-launcher, which has no network; and it does not count what it drops.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span as Message, Status, span::SpanKind, status::StatusCode},
};
use prometheus::IntCounterVec;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use super::{Span, outcome};
use crate::backoff;

/// Most spans of a request.
const BATCH: usize = 512;
/// Time in which spans are collected into a request.
const GATHER: Duration = Duration::from_millis(500);
/// Longest request.
const LIMIT: Duration = Duration::from_secs(5);
/// First and longest pause after a request that failed.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Sends spans until their source is closed.
pub(super) async fn run(
    endpoint: String,
    service: &'static str,
    mut waiting: mpsc::Receiver<Span>,
    spans: IntCounterVec,
) {
    let Ok(endpoint) = Endpoint::from_shared(endpoint.clone()) else {
        // Settings accept valid addresses only.
        tracing::error!(endpoint, "traces are not exported: not an address");
        while waiting.recv().await.is_some() {}
        return;
    };
    let channel = endpoint.connect_timeout(LIMIT).timeout(LIMIT).connect_lazy();
    let mut client = TraceServiceClient::new(channel);
    let mut failures = 0_u32;
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, BATCH).await > 0 {
        tokio::time::sleep(GATHER).await;
        while batch.len() < BATCH
            && let Ok(span) = waiting.try_recv()
        {
            batch.push(span);
        }
        let count = batch.len() as u64;
        match send(&mut client, service, std::mem::take(&mut batch)).await {
            Ok(refused) => {
                if failures > 0 {
                    tracing::info!("the collector of traces is back");
                }
                failures = 0;
                let refused = refused.min(count);
                spans.with_label_values(&[outcome::EXPORTED]).inc_by(count - refused);
                spans.with_label_values(&[outcome::REFUSED]).inc_by(refused);
            }
            Err(error) => {
                spans.with_label_values(&[outcome::REFUSED]).inc_by(count);
                // Once for each outage.
                if failures == 0 {
                    tracing::warn!(%error, "spans are dropped: the collector of traces does not accept them");
                }
                failures = failures.saturating_add(1);
                tokio::time::sleep(backoff::pause(PAUSE, failures)).await;
            }
        }
    }
}

/// Sends one request. Returns the number of spans that the collector refused.
async fn send(
    client: &mut TraceServiceClient<Channel>,
    service: &'static str,
    batch: Vec<Span>,
) -> Result<u64, tonic::Status> {
    // The time limit of the endpoint does not include the wait for the connection.
    let answer = tokio::time::timeout(LIMIT, client.export(request(service, batch))).await;
    let answer = answer.map_err(|_| tonic::Status::deadline_exceeded("no answer in time"))??.into_inner();
    let refused = answer.partial_success.map_or(0, |partial| partial.rejected_spans);
    Ok(u64::try_from(refused).unwrap_or(0))
}

/// Returns the request for a batch, with a resource for each process.
fn request(service: &'static str, batch: Vec<Span>) -> ExportTraceServiceRequest {
    let mut services: BTreeMap<&'static str, Vec<Message>> = BTreeMap::new();
    for span in batch {
        services.entry(span.service.unwrap_or(service)).or_default().push(message(span));
    }
    let resource_spans = services
        .into_iter()
        .map(|(service, spans)| ResourceSpans {
            resource: Some(Resource {
                attributes: vec![
                    attribute("service.name", service.to_owned()),
                    attribute("service.version", env!("CARGO_PKG_VERSION").to_owned()),
                ],
                ..Resource::default()
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(InstrumentationScope { name: "ferrovirt".to_owned(), ..InstrumentationScope::default() }),
                spans,
                ..ScopeSpans::default()
            }],
            ..ResourceSpans::default()
        })
        .collect();
    ExportTraceServiceRequest { resource_spans }
}

fn message(span: Span) -> Message {
    let status = span.error.map(|message| Status { message, code: StatusCode::Error.into() });
    Message {
        trace_id: span.context.trace_id.to_vec(),
        span_id: span.context.span_id.to_vec(),
        parent_span_id: span.parent.map(Vec::from).unwrap_or_default(),
        flags: 1,
        name: span.name.to_owned(),
        kind: SpanKind::Internal.into(),
        start_time_unix_nano: nanoseconds(span.start),
        end_time_unix_nano: nanoseconds(span.end),
        attributes: span.attributes.into_iter().map(|(key, value)| attribute(key, value)).collect(),
        status,
        ..Message::default()
    }
}

fn attribute(key: &str, value: String) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::StringValue(value)) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

fn nanoseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
