//! etcd of the test cluster, which listens in the network namespace of the control plane alone.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use ferrovirt_e2e_cluster::{host, plan::Plan};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::json;
use tokio::{task::spawn_blocking, time::sleep};

use crate::exposition::sum;

/// Port for clients.
const PORT: u16 = 2379;
/// Time limit of a read or write. A compaction answers when all old revisions are removed.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time in which etcd commits the removal of old revisions, ten times its interval of commits.
const COMMIT: Duration = Duration::from_secs(1);
/// Number of the newest revision.
const REVISION: &str = "etcd_debugging_mvcc_current_revision";
/// Size of the pages that hold data.
const IN_USE: &str = "etcd_mvcc_db_total_size_in_use_in_bytes";

/// Access to etcd.
pub(crate) struct Etcd {
    namespace: PathBuf,
}

impl Etcd {
    /// Returns access to etcd of this cluster.
    pub(crate) fn of(plan: &Plan) -> Self {
        Self { namespace: host::namespace_path(&plan.control_namespace()) }
    }

    /// Returns etcd's metrics.
    pub(crate) async fn metrics(&self) -> Result<String> {
        self.exchange("GET /metrics HTTP/1.0\r\n\r\n".to_owned()).await
    }

    /// Removes old revisions, as the API server does every five minutes, and returns the size of the rest in KiB.
    pub(crate) async fn kept_kib(&self) -> Result<f64> {
        let revision = sum(self.metrics().await?.lines(), REVISION, &[]);
        ensure!(revision > 0.0, "etcd has no metric {REVISION}");
        let body = json!({"revision": (revision as u64).to_string(), "physical": true}).to_string();
        let head = "POST /v3/kv/compaction HTTP/1.0\r\nContent-Type: application/json";
        self.exchange(format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await.context("compaction")?;
        sleep(COMMIT).await;
        Ok(sum(self.metrics().await?.lines(), IN_USE, &[]) / 1024.0)
    }

    /// Sends a request of HTTP 1.0 and returns the body of the answer.
    async fn exchange(&self, request: String) -> Result<String> {
        let namespace = self.namespace.clone();
        // A thread of its own, which cannot leave the network namespace.
        let asked = thread::spawn(move || exchange(&namespace, &request));
        let answered = spawn_blocking(move || asked.join()).await?;
        let answer = answered.map_err(|_| anyhow!("the thread of the request has ended"))??;
        body(&answer).map(str::to_owned)
    }
}

fn exchange(namespace: &Path, request: &str) -> Result<String> {
    let file = std::fs::File::open(namespace).with_context(|| namespace.display().to_string())?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter the network of the control plane")?;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)).context("cannot reach etcd")?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("etcd's answer")?;
    Ok(answer)
}

/// Returns the body of a successful answer.
fn body(answer: &str) -> Result<&str> {
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no end of its head")?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(status == "200", "etcd answers {status}: {body}");
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::body;

    #[test]
    fn only_successful_answers_have_a_body() {
        assert_eq!(body("HTTP/1.0 200 OK\r\nA: b\r\n\r\nx\r\n\r\ny").unwrap(), "x\r\n\r\ny");
        let error = body("HTTP/1.0 400 Bad Request\r\n\r\nold revision").unwrap_err().to_string();
        assert!(error.contains("400") && error.contains("old revision"), "{error}");
        assert!(body("HTTP/1.0 200 OK\r\n").is_err());
    }
}
