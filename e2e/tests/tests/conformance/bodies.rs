//! Malformed and oversized bodies.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use ferrovirt_e2e_tests::{TIMEOUT, skip, webhook::Endpoint};
use http::Method;
use serde_json::json;

use crate::{
    answers::{allowed, response, turned_away},
    conformance, objects,
    reviews::{Review, paths},
};

const PATH: &str = "/virtualmachines-validate";
const JSON: (&str, &str) = ("content-type", "application/json");
/// Measurements beside clients that stall.
const ATTEMPTS: usize = 5;

/// Sends malformed bodies, each to every webhook on its own connection.
async fn turn_away(endpoint: &Endpoint, bodies: &[(&str, Bytes)]) -> Result<()> {
    for path in paths() {
        for (what, body) in bodies {
            let answer = endpoint.connect().await?.review(path, body.clone()).await;
            let answer = answer.with_context(|| format!("{what} to {path}"))?;
            turned_away(&answer, &format!("{what} to {path}"))?;
        }
    }
    Ok(())
}

fn bytes(text: impl Into<String>) -> Bytes {
    Bytes::from(text.into())
}

#[test]
fn other_content_types_are_refused() {
    conformance(async |endpoint| {
        for headers in [
            &[][..],
            &[("content-type", "")],
            &[("content-type", "text/plain")],
            &[("content-type", "application/yaml")],
            &[("content-type", "application/x-www-form-urlencoded")],
            &[("content-type", "application/vnd.kubernetes.protobuf")],
            &[("content-type", "\u{7f}")][..0],
        ] {
            let review = Review::create(PATH, objects::vm());
            let mut connection = endpoint.connect().await?;
            let answer = connection.request(Method::POST, PATH, headers, review.body().into()).await?;
            turned_away(&answer, &format!("{headers:?}"))?;
        }
        Ok(())
    });
}

#[test]
fn other_methods_get_an_answer() {
    conformance(async |endpoint| {
        for method in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS, Method::PATCH] {
            let answer = endpoint.connect().await?.request(method.clone(), PATH, &[JSON], Bytes::new()).await?;
            turned_away(&answer, method.as_str())?;
        }
        Ok(())
    });
}

#[test]
fn bodies_that_are_not_reviews_are_refused() {
    conformance(async |endpoint| {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}).to_string();
        let mut other = Review::create(PATH, objects::vm()).wire();
        other["apiVersion"] = json!("admission.k8s.io/v9");
        let operation = json!({"request": {"uid": "u", "operation": "DANCE"}}).to_string();
        turn_away(
            endpoint,
            &[
                ("nothing", Bytes::new()),
                ("null", bytes("null")),
                ("a number", bytes("0")),
                ("a huge number", bytes("1e999")),
                ("a text", bytes("\"text\"")),
                ("a list", bytes("[]")),
                ("an empty object", bytes("{}")),
                ("an empty request", bytes(r#"{"request":{}}"#)),
                ("a uid that is a number", bytes(r#"{"request":{"uid":1}}"#)),
                ("a pod", bytes(pod)),
                ("a review of another version", bytes(other.to_string())),
                ("an operation that does not exist", bytes(operation)),
                ("two documents", bytes("{}{}")),
                ("YAML", bytes("apiVersion: admission.k8s.io/v1\nkind: AdmissionReview\n")),
                ("a zero byte", Bytes::from_static(b"\0")),
            ],
        )
        .await
    });
}

#[test]
fn truncated_reviews_are_refused() {
    conformance(async |endpoint| {
        let body = Review::create(PATH, objects::vm()).body();
        let cuts = [1, 10, body.len() / 4, body.len() / 2, body.len() - 20, body.len() - 1];
        let bodies: Vec<_> = cuts.iter().map(|cut| ("a part", Bytes::copy_from_slice(&body[..*cut]))).collect();
        turn_away(endpoint, &bodies).await
    });
}

#[test]
fn text_that_is_not_utf_8_is_refused() {
    conformance(async |endpoint| {
        let inside = |odd: &[u8]| {
            let mut body = Review::create(PATH, objects::vm()).wire().to_string().into_bytes();
            let at = body.windows(6).position(|part| part == b"\"jane\"").map_or(0, |at| at + 2);
            body.splice(at..at, odd.iter().copied());
            Bytes::from(body)
        };
        turn_away(
            endpoint,
            &[
                ("bytes", Bytes::from_static(b"\xff\xfe\x80")),
                ("a name with a stray byte", inside(b"\xff")),
                ("a name with half a character", inside(b"\xc3")),
                ("a name with an overlong character", inside(b"\xc0\xaf")),
                ("a name with half a pair", inside(br"\ud800")),
                ("UTF-16", Bytes::from_static(b"\xff\xfe{\0}\0")),
            ],
        )
        .await
    });
}

#[test]
fn deeply_nested_values_do_no_harm() {
    conformance(async |endpoint| {
        let depth = 100_000;
        let lists = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let objects_ = format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        let wrapped = |inner: &str| {
            let text = Review::create(PATH, json!("HERE")).wire().to_string();
            bytes(text.replace("\"HERE\"", inner))
        };
        turn_away(
            endpoint,
            &[
                ("nested lists", bytes(lists.clone())),
                ("nested objects", bytes(objects_.clone())),
                ("nested lists that do not end", bytes("[".repeat(depth))),
                ("nested lists as the object", wrapped(&lists)),
                ("nested objects as the object", wrapped(&objects_)),
            ],
        )
        .await?;
        // Deep, but within the limit: any answer is valid.
        let mut inner = json!(1);
        for _ in 0..60 {
            inner = json!({"a": inner});
        }
        for path in paths() {
            let mut vm = objects::vm();
            vm["spec"]["template"]["spec"]["deep"] = inner.clone();
            let review = Review::create(path, vm);
            response(&endpoint.connect().await?.review(path, review.body()).await?, &review.uid)?;
        }
        Ok(())
    });
}

#[test]
fn reviews_of_three_mebibytes_are_answered() {
    conformance(async |endpoint| {
        if !carries_large_bodies(endpoint)? {
            return Ok(());
        }
        let large = "x".repeat(3 << 20);
        let mut vm = objects::vm();
        vm["metadata"]["annotations"] = json!({"example.org/large": large});
        // The size limit of objects in kube-apiserver.
        for review in [Review::create(PATH, vm.clone()), Review::create("/virtualmachines-mutate", vm)] {
            allowed(&endpoint.connect().await?.review(review.path, review.body()).await?, &review.uid)?;
        }
        turn_away(
            endpoint,
            &[
                ("3 MiB of nothing", bytes(" ".repeat(3 << 20))),
                ("3 MiB of brackets", bytes("[".repeat(3 << 20))),
                ("3 MiB of numbers", bytes(format!("[{}0]", "0,".repeat((3 << 19) - 2)))),
                ("3 MiB of digits", bytes("1".repeat(3 << 20))),
            ],
        )
        .await
    });
}

#[test]
fn endless_bodies_are_refused() {
    conformance(async |endpoint| {
        if !carries_large_bodies(endpoint)? {
            return Ok(());
        }
        let body = Bytes::from(vec![b' '; 24 << 20]);
        turned_away(&endpoint.connect().await?.review(PATH, body).await?, "24 MiB")?;
        // The server need not read to the end.
        let body = Bytes::from(vec![b' '; 96 << 20]);
        if let Ok(answer) = endpoint.connect().await?.review(PATH, body).await {
            turned_away(&answer, "96 MiB")?;
        }
        Ok(())
    });
}

#[test]
fn many_large_reviews_at_a_time_do_no_harm() {
    conformance(async |endpoint| {
        if !carries_large_bodies(endpoint)? {
            return Ok(());
        }
        let numbers = bytes(format!("[{}0]", "0,".repeat((3 << 19) - 2)));
        let calls = (0..32).map(|_| async {
            let deadline = tokio::time::Instant::now() + TIMEOUT;
            loop {
                let answered = async { endpoint.connect().await?.review(PATH, numbers.clone()).await };
                match answered.await {
                    // The server closes connections of slow senders, which may be all 32 on a busy host.
                    Err(_) if tokio::time::Instant::now() < deadline => {}
                    answered => break answered,
                }
            }
        });
        for answer in futures::future::join_all(calls).await {
            turned_away(&answer?, "3 MiB of numbers")?;
        }
        Ok(())
    });
}

#[test]
fn stalled_clients_do_not_delay_others() {
    conformance(async |endpoint| {
        let mut took = vec![];
        // A review on a busy host takes as long at times, and one behind clients that stall each time.
        for _ in 0..ATTEMPTS {
            took.push(behind_stalled_clients(endpoint).await?);
            // Below the time limit of stalled requests, which is seconds.
            if took.iter().any(|took| *took < Duration::from_secs(2)) {
                return Ok(());
            }
        }
        bail!("reviews waited {took:?} behind clients that stall")
    });
}

/// Returns the time of a review beside clients that stall.
async fn behind_stalled_clients(endpoint: &Endpoint) -> Result<Duration> {
    let review = Review::create(PATH, objects::vm());
    let mut stalled = vec![];
    for mut connection in endpoint.connect_many(64).await? {
        // Incomplete bodies.
        stalled.push(tokio::spawn(async move { connection.stall(PATH, 1 << 20, b"{\"request\":").await }));
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut connection = endpoint.connect().await?;
    let started = tokio::time::Instant::now();
    let answer = connection.review(PATH, review.body()).await;
    let took = started.elapsed();
    stalled.iter().for_each(tokio::task::JoinHandle::abort);
    allowed(&answer?, &review.uid)?;
    Ok(took)
}

/// Returns false after a skip if connections are forwarded by kubelet. It may be slower than the server's time limit for a body, and
/// drops an answer that ends before its request.
fn carries_large_bodies(endpoint: &Endpoint) -> Result<bool> {
    if !endpoint.is_direct() {
        skip("route to pods")?;
    }
    Ok(endpoint.is_direct())
}
