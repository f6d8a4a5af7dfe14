//! Tests of refused writes and their pauses.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use jiff::Timestamp;

use super::{fixture, object, patch, run};
use crate::{
    cache::Key,
    runtime::{Attempt, Decision, Effect, Event, Failure, Kind, Wake},
    scripted::{Reply, Server, status},
};

/// Returns the change of an object whose refusal has a reason.
fn refusable(name: &str, reason: &'static str) -> Effect {
    let regarding = Kind::Instance.reference(&Default::default());
    patch(name).on_failure(Event::warning(regarding, reason, "{error}"))
}

#[tokio::test(start_paused = true)]
async fn refusal_is_passed_to_the_next_decision() {
    let server = Server::new([Reply::Answer(403, status(403, "Forbidden")), Reply::Answer(200, object("a"))]);
    let fixture = fixture(&server);
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let attempts = seen.clone();
    run(&fixture, move |_, attempt| {
        let mut decision = Decision::settled();
        if attempt.key.name != "a" || attempts.lock().unwrap().len() >= 2 {
            return decision;
        }
        attempts.lock().unwrap().push(attempt.failures.newest().map_or(0, |failure| failure.attempts));
        decision.push(refusable("a", "FailedCreate"));
        decision
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*seen.lock().unwrap(), [0, 1]);
}

/// Returns the refusals in a row for two reasons.
fn counts(attempt: &Attempt<'_>) -> [u32; 2] {
    ["R1", "R2"].map(|reason| attempt.failures.of(reason).map_or(0, |failure| failure.attempts))
}

/// Returns the names of the objects whose changes were requested.
fn requested(server: &Server) -> Vec<String> {
    server.requests().iter().filter_map(|(_, path)| Some(path.rsplit_once('/')?.1.to_owned())).collect()
}

#[tokio::test(start_paused = true)]
async fn writes_that_are_refused_for_two_reasons_wait_for_their_own_times() {
    let server = Server::new((0..9).map(|_| Reply::Answer(403, status(403, "Forbidden"))));
    let fixture = fixture(&server);
    let seen: Arc<Mutex<Vec<[u32; 2]>>> = Arc::default();
    let attempts = seen.clone();
    run(&fixture, move |_, attempt| {
        let mut decision = Decision::settled();
        if attempt.key.name != "a" {
            return decision;
        }
        attempts.lock().unwrap().push(counts(attempt));
        for (name, reason) in [("x", "R1"), ("y", "R2")] {
            if !decision.must_wait(attempt.failures, reason, attempt.now) {
                decision.push(refusable(name, reason));
            }
        }
        decision
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(requested(&server), ["x", "y"]);
    assert_eq!(*seen.lock().unwrap(), [[0, 0], [1, 0], [1, 1]]);
}

#[tokio::test(start_paused = true)]
async fn success_before_a_refusal_counts() {
    let refused = || Reply::Answer(403, status(403, "Forbidden"));
    let server = Server::new([refused(), Reply::Answer(200, object("x")), refused()]);
    let fixture = fixture(&server);
    let seen: Arc<Mutex<Vec<[u32; 2]>>> = Arc::default();
    let attempts = seen.clone();
    run(&fixture, move |_, attempt| {
        let mut decision = Decision::settled();
        let mut seen = attempts.lock().unwrap();
        if attempt.key.name != "a" || seen.len() >= 3 {
            return decision;
        }
        seen.push(counts(attempt));
        if seen.len() < 3 {
            decision.push(refusable("x", "R1"));
            decision.push(refusable("y", "R2"));
        }
        decision
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(requested(&server), ["x", "x", "y"]);
    assert_eq!(*seen.lock().unwrap(), [[0, 0], [1, 0], [0, 1]]);
}

#[test]
fn refusals_of_a_shard_are_forgotten_with_it() {
    let wake = Wake::placed(|key| u32::from(key.name == "b"));
    let key = |name: &str| Key::new("n", name);
    for name in ["a", "b"] {
        let retry_at = Timestamp::UNIX_EPOCH;
        let failure = Failure { reason: "R", message: String::new(), retry_at, attempts: 1 };
        wake.failures().entry(key(name)).or_default().add(failure);
    }
    wake.close(1);
    assert!(!wake.failures_of(&key("a")).is_empty() && wake.failures_of(&key("b")).is_empty());
}
