//! The progress of imports: running import pods are asked every two seconds.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use importer::task::{PROGRESS_LIMIT, PROGRESS_PATH, PROGRESS_PORT, Progress};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::MissedTickBehavior,
};

use crate::{
    cache::Key,
    resources::{
        Caches,
        import_pods::{CachedImportPod, ImportPodIndex, ImportProgress},
    },
};

/// Interval of the questions.
const INTERVAL: Duration = Duration::from_secs(2);
/// Longest time for an answer.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Pods that are asked at a time.
const AT_A_TIME: usize = 16;
/// Longest header of an answer.
const HEADER_LIMIT: usize = 1024;

/// Asks running import pods for ever. A pod that does not answer keeps its last progress.
pub(crate) async fn follow(caches: Arc<Caches>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut version: u64 = 0;
    loop {
        ticks.tick().await;
        version += 1;
        let pods = caches.import_pods.by(&ImportPodIndex::Running);
        // A program that kubelet starts again belongs to the same pod.
        for gone in caches.import_progress.keys().iter().filter(|key| caches.import_pods.get(key).is_none()) {
            caches.import_progress.observe_deleted(gone, None);
        }
        let answers = stream::iter(pods).map(answer).buffer_unordered(AT_A_TIME);
        let answers: Vec<_> = answers.filter_map(std::future::ready).collect().await;
        for (pod, percent) in answers {
            let known = caches.import_progress.get(&Key::of(&pod.metadata));
            if known.is_none_or(|known| known.metadata.uid != pod.metadata.uid || !is_same(known.percent, percent)) {
                caches.import_progress.observe(progress(&pod, percent, version));
            }
        }
    }
}

/// Returns true if both are shown alike.
fn is_same(left: f64, right: f64) -> bool {
    super::status::percent(left) == super::status::percent(right)
}

fn progress(pod: &CachedImportPod, percent: f64, version: u64) -> ImportProgress {
    let of = &pod.metadata;
    ImportProgress {
        metadata: ObjectMeta {
            name: of.name.clone(),
            namespace: of.namespace.clone(),
            uid: of.uid.clone(),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        },
        percent,
    }
}

/// Returns a pod with the share that is done.
async fn answer(pod: Arc<CachedImportPod>) -> Option<(Arc<CachedImportPod>, f64)> {
    let address = SocketAddr::new(pod.address.as_deref()?.parse().ok()?, PROGRESS_PORT);
    let answer = tokio::time::timeout(TIMEOUT, ask(address)).await.ok()?;
    let answer = answer.inspect_err(|error| tracing::debug!(%address, %error, "import pod does not answer"));
    let percent = parse(&answer.ok()?)?;
    Some((pod, percent))
}

/// Asks a pod. Bounded, because anybody can answer at its address.
async fn ask(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {PROGRESS_PATH} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take((HEADER_LIMIT + PROGRESS_LIMIT) as u64).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Reads the share that is done from an answer.
fn parse(answer: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(answer).ok()?;
    let (header, body) = text.split_once("\r\n\r\n")?;
    let status = header.split(' ').nth(1)?;
    let progress: Progress = (status == "200").then(|| serde_json::from_str(body).ok())??;
    progress.percent.filter(|percent| (0.0..=100.0).contains(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_read_or_ignored() {
        let answer = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{body}");
        for (text, expected) in [
            (answer(r#"{"percent": 12.5, "phase": "download"}"#), Some(12.5)),
            (answer(r#"{"phase": "convert"}"#), None),
            (answer(r#"{"percent": 112.5, "phase": "download"}"#), None),
            (answer("nonsense"), None),
            ("HTTP/1.1 500 Error\r\n\r\n{\"percent\": 1, \"phase\": \"download\"}".to_owned(), None),
            ("nonsense".to_owned(), None),
        ] {
            assert_eq!(parse(text.as_bytes()), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn endless_answer_is_cut() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        let serve = async {
            let (mut stream, _) = server.accept().await.unwrap();
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
        };
        let answer = tokio::select! {
            answer = ask(address) => answer.unwrap(),
            () = serve => Vec::new(),
        };
        assert_eq!(answer.len(), HEADER_LIMIT + PROGRESS_LIMIT);
    }
}
