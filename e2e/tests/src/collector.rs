//! A collector of traces: receives OTLP over gRPC and keeps the spans.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
};
use tokio::{net::TcpListener, task::AbortHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// Spans that are kept at most.
const MAX_SPANS: usize = 100_000;

/// A received span.
#[derive(Clone, Debug)]
pub struct CollectedSpan {
    /// The process.
    pub service: String,
    /// Its name.
    pub name: String,
    /// The trace, in hexadecimal digits.
    pub trace: String,
    /// The span, in hexadecimal digits.
    pub id: String,
    /// The parent; empty for the first span of a trace.
    pub parent: String,
    /// Its begin and end, in nanoseconds since 1970.
    pub times: (u64, u64),
    /// Its attributes.
    pub attributes: BTreeMap<String, String>,
    /// The error with which it ended.
    pub error: Option<String>,
}

/// A running collector. Dropping it ends it.
pub struct Collector {
    /// Its port on all addresses of this host.
    pub port: u16,
    spans: Spans,
    server: AbortHandle,
}

#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<CollectedSpan>>>);

impl Collector {
    /// Starts a collector on a free port of all addresses.
    ///
    /// # Errors
    /// Fails if it cannot listen.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.context("cannot listen for traces")?;
        let port = listener.local_addr()?.port();
        let spans = Spans::default();
        let service = TraceServiceServer::new(spans.clone());
        let server = Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move {
            if let Err(error) = server.await {
                eprintln!("the collector of traces ended: {error}");
            }
        });
        Ok(Self { port, spans, server: server.abort_handle() })
    }

    /// Returns the spans of a trace, the oldest first.
    #[must_use]
    pub fn trace(&self, trace: &str) -> Vec<CollectedSpan> {
        let spans = self.spans.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = spans.iter().filter(|span| span.trace == trace).cloned().collect();
        found.sort_by_key(|span| span.times);
        found
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tonic::async_trait]
impl TraceService for Spans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let attributes = texts(resource.resource.map(|resource| resource.attributes).unwrap_or_default());
            let service = attributes.get("service.name").cloned().unwrap_or_default();
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                if kept.len() >= MAX_SPANS {
                    return Err(Status::resource_exhausted("too many spans"));
                }
                kept.push(CollectedSpan {
                    service: service.clone(),
                    name: span.name,
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    times: (span.start_time_unix_nano, span.end_time_unix_nano),
                    attributes: texts(span.attributes),
                    error: span.status.map(|status| status.message),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| match attribute.value?.value? {
        Value::StringValue(text) => Some((attribute.key, text)),
        _ => None,
    };
    attributes.into_iter().filter_map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
