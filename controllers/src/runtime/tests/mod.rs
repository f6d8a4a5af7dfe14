//! Tests of the runtime over a scripted API server.

mod data_volumes;
mod leases;
mod pods;
mod refusals;
mod snapshots;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use daemon::{tasks::Tasks, telemetry::Traces};
use http::Method;
use k8s_openapi::{
    api::core::v1::{Event as PodEvent, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::api::ObjectList;
use prometheus::Registry;
use serde_json::{Value, json};

use super::{
    Answers, Attempt, ClaimUser, Controller, Decision, Effect, Event, Executor, Failures, Kind, Metrics, Needs,
    Recorder, Run, Runner, Times, Wake, clock::Moment, executor::Outcome, lease::Leadership,
};
use crate::{
    cache::Key,
    scripted::{Reply, Server, status},
    shards::{LEADER, shard_of},
};

/// Answers that were stored, as kind and name.
#[derive(Default)]
struct Stored(Mutex<Vec<(Kind, String)>>);

impl Answers for Stored {
    fn is_terminating(&self, namespace: &str) -> bool {
        namespace == "ending"
    }
    fn written(&self, kind: Kind, object: Value) {
        self.0.lock().unwrap().push((kind, object["metadata"]["name"].as_str().unwrap().to_owned()));
    }
    fn deleted(&self, _kind: Kind, _namespace: Option<&str>, _name: &str, _uid: Option<&str>) {}
    fn warned(&self, _: &str, pod: &str, _: &str, events: &ObjectList<PodEvent>) {
        let known = events.items.iter().filter_map(|event| event.reason.clone());
        self.0.lock().unwrap().extend(known.map(|reason| (Kind::Pod, format!("{pod}: {reason}"))));
    }
    fn warned_of_claim(&self, _: &str, _: &str, _: &str, _: &ObjectList<PodEvent>) {}
    fn users(&self, _: &str, _: &str, _: &str, _: Vec<ClaimUser>, _: Option<String>) {}
}

struct Fixture {
    executor: Arc<Executor>,
    leadership: Leadership,
    metrics: Metrics,
    stored: Arc<Stored>,
    tasks: Tasks,
}

/// Trace context of the fake objects.
const CONTEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn fixture(server: &Server) -> Fixture {
    traced(server, Traces::default())
}

fn traced(server: &Server, traces: Traces) -> Fixture {
    let metrics = Metrics::new(&Registry::new()).unwrap();
    let hour = Duration::from_secs(3600);
    let leadership = Leadership::new(Times { duration: hour, deadline: hour, ..Times::default() });
    leadership.set(Some(Moment::now()));
    let tasks = Tasks::new();
    let recorder = Recorder::start(Server::default().client(), metrics.clone(), &tasks.spawner());
    let stored = Arc::new(Stored::default());
    let executor =
        Executor::new(server.client(), leadership.clone(), recorder, metrics.clone(), stored.clone(), traces);
    Fixture { executor, leadership, metrics, stored, tasks }
}

fn patch(name: &str) -> Effect {
    let meta = serde_json::from_value(json!({"name": name, "namespace": "n", "resourceVersion": "1"})).unwrap();
    Effect::merge(Kind::Instance, &meta, json!({"metadata": {"labels": {"a": "b"}}}))
}

fn object(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "n", "resourceVersion": "2"}})
}

type Decide = dyn Fn(usize, &Attempt<'_>) -> Decision + Send + Sync;

/// A controller that decides by a function of the number of decisions so far.
struct Fake {
    decide: Box<Decide>,
    decisions: Arc<AtomicUsize>,
    /// The object that starts.
    subject: ObjectMeta,
}

impl Controller for Fake {
    const NAME: &'static str = "fake";
    const NEEDS: Needs = Needs::NONE;
    type Caches = ();
    type Observed = (ObjectMeta, Key, Failures, jiff::Timestamp);

    fn watch(&self, _caches: &Arc<()>, wake: &Wake) {
        wake.at_start(|| vec![Key::new("n", "a"), Key::new("n", "b")]);
    }

    fn observe(&self, _caches: &(), attempt: &Attempt<'_>) -> Option<Self::Observed> {
        Some((self.subject.clone(), attempt.key.clone(), attempt.failures.clone(), attempt.now))
    }

    fn subject<'a>(&self, (subject, ..): &'a Self::Observed) -> Option<&'a ObjectMeta> {
        Some(subject)
    }

    fn is_starting(&self, _observed: &Self::Observed) -> bool {
        true
    }

    fn decide(&self, (_, key, failures, now): &Self::Observed) -> Result<Decision, serde_json::Error> {
        let attempt = Attempt { key, failures, now: *now };
        Ok((self.decide)(self.decisions.fetch_add(1, Ordering::Relaxed), &attempt))
    }
}

/// Runs a controller for keys `a` and `b`. Returns the number of decisions.
fn run(
    fixture: &Fixture,
    decide: impl Fn(usize, &Attempt<'_>) -> Decision + Send + Sync + 'static,
) -> Arc<AtomicUsize> {
    let decisions = Arc::new(AtomicUsize::new(0));
    let annotation = ("ferrovirt.io/traceparent".to_owned(), CONTEXT.to_owned());
    let subject = ObjectMeta {
        annotations: Some([annotation].into()),
        creation_timestamp: Some(Time(jiff::Timestamp::now())),
        ..ObjectMeta::default()
    };
    let controller = Fake { decide: Box::new(decide), decisions: decisions.clone(), subject };
    let runner = Arc::new(Runner::new(controller, Arc::new(())));
    runner.watch();
    runner.start(LEADER, &fixture.executor, &fixture.tasks.spawner());
    decisions
}

#[tokio::test(start_paused = true)]
async fn reconciles_that_write_are_spans_with_their_writes_beneath() {
    let server = Server::new([Reply::Answer(200, object("a")), Reply::Answer(403, status(403, "Forbidden"))]);
    let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
    let fixture = traced(&server, traces);
    let decisions = run(&fixture, |count, attempt| {
        let mut decision = Decision::settled();
        if count < 2 {
            decision.push(patch(&attempt.key.name));
        }
        decision
    });
    while decisions.load(Ordering::Relaxed) < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let context: api::traceparent::TraceParent = CONTEXT.parse().unwrap();
    for error in [false, true] {
        let [write, reconcile] = [spans.try_recv().unwrap(), spans.try_recv().unwrap()];
        assert_eq!((write.name, reconcile.name), ("patch", "reconcile"));
        assert_eq!((write.parent, reconcile.parent), (Some(reconcile.context.span_id), Some(context.span_id)));
        assert_eq!(write.error.is_some(), error, "{write:?}");
        assert!(reconcile.attributes.contains(&("controller", "fake".to_owned())));
    }
    // Later reconciles write nothing.
    assert!(spans.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_after_leadership_was_lost_between_effects() {
    let former: Arc<Mutex<Option<Leadership>>> = Arc::default();
    let lost = former.clone();
    let lose = move || lost.lock().unwrap().as_ref().unwrap().set(None);
    let server = Server::new([Reply::After(Box::new(lose), object("a")), Reply::Answer(200, object("b"))]);
    let fixture = fixture(&server);
    *former.lock().unwrap() = Some(fixture.leadership.clone());
    let outcome = fixture.executor.carry_out("fake", vec![patch("a"), patch("b")], None).await;
    assert_eq!(outcome, Outcome::NotLeading);
    assert_eq!(server.requests().len(), 1);
    // The answer to the first write counts.
    assert_eq!(*fixture.stored.0.lock().unwrap(), [(Kind::Instance, "a".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn no_pod_is_restored_after_leadership_was_lost_during_the_search() {
    let former: Arc<Mutex<Option<Leadership>>> = Arc::default();
    let lost = former.clone();
    let lose = move || lost.lock().unwrap().as_ref().unwrap().set(None);
    let found = json!({"metadata": {}, "items": [{"metadata": {"name": "p", "namespace": "n", "uid": "u"}}]});
    let server = Server::new([Reply::After(Box::new(lose), found), Reply::Answer(200, object("p"))]);
    let fixture = fixture(&server);
    *former.lock().unwrap() = Some(fixture.leadership.clone());
    let restore = Effect::Restore {
        namespace: Some("n".to_owned()),
        name: Some("p".to_owned()),
        uids: vec!["u".to_owned()],
        labels: [("kubevirt.io".to_owned(), "virt-launcher".to_owned())].into(),
        owner: Kind::Instance.owner_reference(&Default::default()),
    };
    assert_eq!(fixture.executor.carry_out("fake", vec![restore], None).await, Outcome::NotLeading);
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn writes_that_were_held_back_without_leadership_are_repeated() {
    let server = Server::new([Reply::Answer(200, object("a"))]);
    let fixture = fixture(&server);
    fixture.leadership.set(None);
    run(&fixture, |_, attempt| {
        let mut decision = Decision::settled();
        if attempt.key.name == "a" {
            decision.push(patch("a"));
        }
        decision
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.requests(), []);
    fixture.leadership.set(Some(Moment::now()));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(server.requests().len(), 1);
}

/// A sharded controller that records the keys that it decides about, each every ten seconds.
struct Divided(Arc<Mutex<Vec<String>>>);

impl Controller for Divided {
    const NAME: &'static str = "divided";
    const SHARDED: bool = true;
    const NEEDS: Needs = Needs::NONE;
    type Caches = Vec<Key>;
    type Observed = Key;

    fn watch(&self, caches: &Arc<Vec<Key>>, wake: &Wake) {
        let keys = caches.clone();
        wake.at_start(move || keys.to_vec());
    }

    fn observe(&self, _caches: &Vec<Key>, attempt: &Attempt<'_>) -> Option<Key> {
        Some(attempt.key.clone())
    }

    fn decide(&self, observed: &Key) -> Result<Decision, serde_json::Error> {
        self.0.lock().unwrap().push(observed.name.clone());
        let mut decision = Decision::settled();
        decision.wake(Duration::from_secs(10));
        Ok(decision)
    }
}

#[tokio::test(start_paused = true)]
async fn keys_are_worked_on_as_long_as_their_shard_is_held() {
    let fixture = fixture(&Server::default());
    let keys: Vec<Key> = (0..40).map(|number| Key::new("n", format!("vm-{number}"))).collect();
    let of = |shards: &[u32]| {
        let mut names: Vec<String> =
            keys.iter().filter(|key| shards.contains(&shard_of(key, 3))).map(|key| key.name.clone()).collect();
        names.sort();
        names
    };
    let decided: Arc<Mutex<Vec<String>>> = Arc::default();
    let runner = Arc::new(Runner::new(Divided(decided.clone()), Arc::new(keys.clone())).divided(3));
    runner.watch();
    let within = async |seconds: u64| {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let mut names = std::mem::take(&mut *decided.lock().unwrap());
        names.sort();
        names
    };
    let start = |shard: u32| runner.clone().start(shard, &fixture.executor, &fixture.tasks.spawner());
    start(1);
    assert_eq!(within(1).await, of(&[1]));
    start(2);
    assert_eq!(within(1).await, of(&[2]));
    // The wake-ups of both.
    assert_eq!(within(10).await, of(&[1, 2]));
    runner.stop(1);
    assert!(runner.is_idle(1));
    assert_eq!(within(10).await, of(&[2]));
    start(1);
    assert_eq!(within(1).await, of(&[1]));
}

#[test]
fn decision_that_waits_is_not_settled() {
    let mut decision = Decision::settled();
    assert!(decision.is_settled());
    decision.wake(Duration::from_secs(1));
    assert!(!decision.is_settled());
}

#[tokio::test(start_paused = true)]
async fn conflict_is_decided_on_anew_after_a_delay() {
    let server = Server::new([Reply::Answer(409, status(409, "Conflict")), Reply::Answer(200, object("a"))]);
    let fixture = fixture(&server);
    let decisions = run(&fixture, |count, attempt| {
        let mut decision = Decision::settled();
        if attempt.key.name == "a" && count < 3 {
            decision.push(patch("a"));
        }
        assert!(attempt.failures.is_empty(), "a conflict is no refusal");
        decision
    });
    tokio::time::sleep(Duration::from_millis(90)).await;
    assert_eq!(decisions.load(Ordering::Relaxed), 2, "once for each key");
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(decisions.load(Ordering::Relaxed), 3);
    let path = "/apis/kubevirt.io/v1/namespaces/n/virtualmachineinstances/a".to_owned();
    assert_eq!(server.requests(), [(Method::PATCH, path.clone()), (Method::PATCH, path)]);
    assert_eq!(fixture.stored.0.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn warnings_are_read_and_a_failure_to_read_them_stops_nothing() {
    let event = json!({"metadata": {}, "involvedObject": {}, "reason": "FailedMount"});
    let list = json!({"kind": "EventList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": [event]});
    let server = Server::new([Reply::Answer(200, list), Reply::Answer(403, status(403, "Forbidden"))]);
    let fixture = fixture(&server);
    let read = || Effect::ReadWarnings { namespace: "n".to_owned(), pod: "p".to_owned(), uid: "u".to_owned() };
    let outcome = fixture.executor.carry_out("fake", vec![read(), read()], None).await;
    assert_eq!(outcome, Outcome::Done { succeeded: vec![] });
    let path = "/api/v1/namespaces/n/events".to_owned();
    assert_eq!(server.requests(), [(Method::GET, path.clone()), (Method::GET, path)]);
    assert_eq!(*fixture.stored.0.lock().unwrap(), [(Kind::Pod, "p: FailedMount".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn write_without_an_answer_is_given_up_and_repeated() {
    let server = Server::new([Reply::Silence, Reply::Answer(200, object("a"))]);
    let fixture = fixture(&server);
    let decisions = run(&fixture, |count, attempt| {
        let mut decision = Decision::settled();
        if attempt.key.name == "a" && count < 3 {
            decision.push(patch("a"));
        }
        decision
    });
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(server.requests().len(), 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(server.requests().len(), 2);
    assert_eq!(decisions.load(Ordering::Relaxed), 3);
    assert_eq!(fixture.stored.0.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn panic_is_counted_and_retried_and_locks_no_key() {
    let server = Server::default();
    let mut fixture = fixture(&server);
    let decisions = run(&fixture, |count, attempt| {
        assert!(attempt.key.name != "a" || count > 2, "a defect");
        Decision::settled()
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(decisions.load(Ordering::Relaxed), 2, "the other key is decided on");
    assert_eq!(fixture.metrics.panics("fake"), 1);
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The second attempt panics as well, the third does not.
    assert_eq!(decisions.load(Ordering::Relaxed), 4);
    assert_eq!(fixture.metrics.panics("fake"), 2);
    let ended = tokio::time::timeout(Duration::from_secs(1), fixture.tasks.ended()).await;
    assert!(ended.is_err(), "the worker lives on");
}

#[tokio::test(start_paused = true)]
async fn refusal_of_an_independent_write_ends_nothing() {
    for (is_independent, requests) in [(true, 2), (false, 1)] {
        let server = Server::new([Reply::Answer(403, status(403, "Forbidden")), Reply::Answer(200, object("b"))]);
        let fixture = fixture(&server);
        let first = if is_independent { patch("a").independent() } else { patch("a") };
        let outcome = fixture.executor.carry_out("fake", vec![first, patch("b")], None).await;
        assert_eq!(matches!(outcome, Outcome::Done { .. }), is_independent);
        assert_eq!(server.requests().len(), requests);
    }
}

#[tokio::test(start_paused = true)]
async fn image_volumes_are_tried_once_and_their_removal_is_a_refusal() {
    let image = json!([{"name": "root", "image": {"reference": "r"}}]);
    let sent = json!({"metadata": {"name": "p"}, "spec": {"volumes": image}});
    let kept = || json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"volumes": image}});
    let lost = || json!({"metadata": {"name": "p", "uid": "u"}, "spec": {}});
    let reply = |answer: Value| Reply::Answer(201, answer);
    let create = |pod: &Value| Effect::create(Kind::Pod, Some("n"), pod).unwrap();
    // The gate is off, then on, then off again.
    let gone = json!({"kind": "Status", "status": "Success"});
    let server = Server::new([lost(), kept(), kept(), kept(), lost(), gone, lost()].map(reply));
    let fixture = fixture(&server);
    let outcome = async || fixture.executor.carry_out("fake", vec![create(&sent)], None).await;
    let refused = |outcome: Outcome| matches!(outcome, Outcome::Refused { message, .. } if message.contains("(root)"));
    assert!(refused(outcome().await));
    assert!(matches!(outcome().await, Outcome::Done { .. }));
    assert!(matches!(outcome().await, Outcome::Done { .. }));
    assert!(refused(outcome().await));
    assert!(refused(outcome().await));
    assert_eq!(server.dry_runs(), [true, true, false, false, false, false, true]);
    let methods: Vec<Method> = server.requests().into_iter().map(|(method, _)| method).collect();
    assert_eq!(methods[5], Method::DELETE);
    assert_eq!(methods.iter().filter(|method| **method == Method::POST).count(), 6);
    assert_eq!(fixture.stored.0.lock().unwrap().len(), 2, "only pods that stay are stored");
}

#[tokio::test(start_paused = true)]
async fn pod_without_image_volumes_is_created_by_one_request() {
    let server = Server::new([Reply::Answer(201, object("p"))]);
    let fixture = fixture(&server);
    let create = Effect::create(Kind::Pod, Some("n"), &json!({"metadata": {"name": "p"}, "spec": {}})).unwrap();
    assert!(matches!(fixture.executor.carry_out("fake", vec![create], None).await, Outcome::Done { .. }));
    assert_eq!(server.dry_runs(), [false]);
}

#[tokio::test(start_paused = true)]
async fn writes_after_one_of_an_object_that_is_gone_are_decided_anew() {
    let note = || Effect::Event(super::Event::normal(Kind::Instance.reference(&ObjectMeta::default()), "R", "m"));
    for (effects, is_done) in [
        (vec![patch("a")], true),
        (vec![patch("a"), note()], true),
        (vec![patch("a"), patch("b")], false),
        (vec![patch("a"), note(), patch("b")], false),
    ] {
        let server = Server::new([Reply::Answer(404, status(404, "NotFound"))]);
        let fixture = fixture(&server);
        let outcome = fixture.executor.carry_out("fake", effects.clone(), None).await;
        let expected = if is_done { Outcome::Done { succeeded: vec![] } } else { Outcome::Stale };
        assert_eq!(outcome, expected, "{effects:?}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn object_is_deleted_in_the_background_unless_the_effect_says_otherwise() {
    let meta = serde_json::from_value(json!({"name": "a", "namespace": "n", "uid": "u"})).unwrap();
    let delete = Effect::delete(Kind::VirtualMachine, &meta);
    for (effect, policy) in [(delete.clone(), "Background"), (delete.in_foreground(), "Foreground")] {
        let server = Server::new([Reply::Answer(200, object("a"))]);
        let outcome = fixture(&server).executor.carry_out("fake", vec![effect], None).await;
        assert_eq!(outcome, Outcome::Done { succeeded: vec![] });
        let bodies = server.bodies();
        assert_eq!(bodies[0]["propagationPolicy"], policy);
        assert_eq!(bodies[0]["preconditions"]["uid"], "u");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_created_in_a_namespace_that_is_being_deleted() {
    let create = |namespace: &str| {
        let note = Event::warning(ObjectReference::default(), "FailedCreate", "{error}");
        Effect::create(Kind::Instance, Some(namespace), &json!({"metadata": {"name": "a"}})).unwrap().on_failure(note)
    };
    let done = Outcome::Done { succeeded: vec![] };
    // The watch shows the deletion.
    let server = Server::new([]);
    let outcome = fixture(&server).executor.carry_out("fake", vec![create("ending"), create("n")], None).await;
    assert_eq!(outcome, done);
    assert!(server.requests().is_empty());
    // The API server reports it first. No other refusal is final.
    let mut terminating = status(403, "Forbidden");
    terminating["details"] = json!({"causes": [{"reason": "NamespaceTerminating", "message": "", "field": ""}]});
    for (reply, is_final) in [(terminating, true), (status(403, "Forbidden"), false)] {
        let server = Server::new([Reply::Answer(403, reply)]);
        let outcome = fixture(&server).executor.carry_out("fake", vec![create("n")], None).await;
        assert_eq!(outcome == done, is_final, "{outcome:?}");
        assert_eq!(server.requests().len(), 1);
    }
}
