//! Tests against a collector in the same process.

use std::{sync::Mutex, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use super::*;
use crate::tasks::Tasks;

/// Time limit of a test.
const SOON: Duration = Duration::from_secs(10);

/// A collector that keeps requests and refuses so many spans of each.
#[derive(Clone, Default)]
struct Collector {
    requests: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    refused: i64,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.requests.lock().unwrap().push(request.into_inner());
        let partial = ExportTracePartialSuccess { rejected_spans: self.refused, error_message: String::new() };
        Ok(Response::new(ExportTraceServiceResponse { partial_success: Some(partial) }))
    }
}

impl Collector {
    /// Serves on a free port and returns the address.
    async fn serve(self, tasks: &Tasks) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tasks.spawn("collector", async move {
            let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(self));
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        format!("http://{address}")
    }
}

fn on(endpoint: String, tasks: &Tasks) -> Traces {
    let settings = Settings { endpoint, ratio: 1.0 };
    Traces::export("virt-test", settings, &Registry::new(), &tasks.spawner()).unwrap()
}

/// Returns the counts of exported, dropped and refused spans.
fn counts(traces: &Traces) -> [u64; 3] {
    let recorder = traces.0.as_ref().unwrap();
    [outcome::EXPORTED, outcome::QUEUE_FULL, outcome::REFUSED]
        .map(|outcome| recorder.spans.with_label_values(&[outcome]).get())
}

async fn until(what: impl Fn() -> bool) {
    let waiting = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap();
}

#[tokio::test]
async fn spans_reach_the_collector_with_their_parents_and_processes() {
    let tasks = Tasks::new();
    let collector = Collector::default();
    let traces = on(collector.clone().serve(&tasks).await, &tasks);
    let root = traces.root().unwrap();
    let mut review = traces.open("review", root, None).unwrap().with("name", "x".repeat(1000));
    let hello = traces.child("hello", review.context()).unwrap();
    let hello_id = hello.context().span_id;
    drop(hello);
    let now = SystemTime::now();
    traces.record(Span {
        service: Some("virt-launcher"),
        name: "prepare",
        context: TraceParent { span_id: [7; 8], ..root },
        parent: Some(hello_id),
        start: now,
        end: now + Duration::from_millis(3),
        attributes: vec![],
        error: None,
    });
    review.fail("denied");
    drop(review);
    until(|| counts(&traces) == [3, 0, 0]).await;

    let requests = collector.requests.lock().unwrap();
    let mut found: Vec<_> = requests
        .iter()
        .flat_map(|request| &request.resource_spans)
        .flat_map(|resource| {
            let service = resource.resource.as_ref().unwrap().attributes[0].value.clone().unwrap().value.unwrap();
            let Value::StringValue(service) = service else { panic!("{service:?}") };
            resource.scope_spans.iter().flat_map(|scope| &scope.spans).map(move |span| (service.clone(), span.clone()))
        })
        .collect();
    found.sort_by(|a, b| a.1.name.cmp(&b.1.name));
    let names: Vec<_> = found.iter().map(|(service, span)| (service.as_str(), span.name.as_str())).collect();
    assert_eq!(names, [("virt-test", "hello"), ("virt-launcher", "prepare"), ("virt-test", "review")]);
    assert!(found.iter().all(|(_, span)| span.trace_id == root.trace_id));
    let [hello, prepare, review] = [0, 1, 2].map(|index| found[index].1.clone());
    assert_eq!((hello.parent_span_id.as_slice(), hello.span_id.as_slice()), (&root.span_id[..], &hello_id[..]));
    assert_eq!((prepare.parent_span_id.as_slice(), prepare.span_id), (&hello_id[..], vec![7; 8]));
    assert_eq!(prepare.end_time_unix_nano - prepare.start_time_unix_nano, 3_000_000);
    assert_eq!((review.parent_span_id, review.status.unwrap().message), (vec![], "denied".to_owned()));
    let Some(Value::StringValue(name)) = review.attributes[0].value.clone().unwrap().value else { panic!() };
    assert_eq!(name.len(), TEXT_LIMIT);
    assert!(review.start_time_unix_nano <= hello.start_time_unix_nano);
}

#[tokio::test]
async fn refused_spans_are_counted() {
    let tasks = Tasks::new();
    let traces = on(Collector { refused: 1, ..Collector::default() }.serve(&tasks).await, &tasks);
    for _ in 0..3 {
        drop(traces.open("review", traces.root().unwrap(), None));
    }
    until(|| counts(&traces) == [2, 0, 1]).await;
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_is_away_costs_dropped_spans_and_no_time() {
    let tasks = Tasks::new();
    // Nothing listens on this port.
    let traces = on("http://127.0.0.1:1".to_owned(), &tasks);
    for _ in 0..QUEUE + 10 {
        drop(traces.open("review", traces.root().unwrap(), None));
    }
    // Nothing yields above, so the queue is not emptied meanwhile.
    assert_eq!(counts(&traces), [0, 10, 0]);
    until(|| counts(&traces)[2] > 0).await;
    assert_eq!(counts(&traces)[0], 0);
}

#[tokio::test]
async fn nothing_is_recorded_without_a_collector() {
    let traces = Traces::default();
    assert_eq!(traces.root(), None);
    let parent = TraceParent { trace_id: [1; 16], span_id: [1; 8], sampled: true };
    assert!(!traces.is_on() && traces.child("hello", &parent).is_none());
}

#[tokio::test]
async fn the_share_of_sampled_traces_follows_the_ratio() {
    for (ratio, at_least, at_most) in [(0.0, 0, 0), (1.0, 1000, 1000), (0.5, 350, 650)] {
        let (traces, mut spans) = Traces::to_receiver(ratio).unwrap();
        let sampled = (0..1000).filter(|_| traces.root().unwrap().sampled).count();
        assert!((at_least..=at_most).contains(&sampled), "{ratio}: {sampled}");
        let unsampled = TraceParent { sampled: false, ..traces.root().unwrap() };
        assert!(traces.child("hello", &unsampled).is_none());
        assert!(spans.try_recv().is_err());
    }
}

#[tokio::test]
async fn a_span_begins_when_its_work_began_and_ends_when_dropped() {
    let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
    let began = Instant::now() - Duration::from_secs(2);
    drop(traces.open("review", traces.root().unwrap(), None).unwrap().began(began));
    let span = spans.try_recv().unwrap();
    let took = span.end.duration_since(span.start).unwrap();
    assert!((Duration::from_secs(2)..Duration::from_secs(3)).contains(&took), "{took:?}");
}
