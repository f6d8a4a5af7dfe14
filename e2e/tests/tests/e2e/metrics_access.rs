//! Access to the metrics of the components.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, repository, story};
use http::Method;
use serde_json::Value;

#[test]
fn only_authorized_accounts_read_metrics() {
    story("metrics-access", async |s| {
        let (reader, stranger) = (s.metrics_token().await?, s.token("default").await?);
        for component in ["virt-api", "virt-controller", "virt-handler"] {
            asked(s, component, &reader, &stranger).await.with_context(|| component.to_owned())?;
        }
        Ok(())
    });
}

async fn asked(s: &Story, component: &str, reader: &str, stranger: &str) -> Result<()> {
    let pod = s.pods_of(component).await?.into_iter().next().context("no pod")?;
    let code =
        async |path: &str, token: Option<&str>| anyhow::Ok(s.get_from_component(&pod, path, token).await?.status);
    for path in ["/healthz", "/livez", "/readyz"] {
        let status = code(path, None).await?;
        ensure!(status == 200, "{path}: {status}");
    }
    let status = code("/metrics", None).await?;
    ensure!(status == 401, "without a token: {status}");
    let lines = s.metrics(component).await?;
    ensure!(lines.iter().any(|line| line.starts_with("process_resident_memory_bytes ")), "no metrics");
    let list = std::fs::read_to_string(repository().join("docs/reference/metrics.md"))?;
    for name in lines.iter().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        ensure!(list.contains(&format!("| `{name}` |")), "docs/reference/metrics.md does not list {name}");
    }

    // kube-apiserver does not forward the user's credentials.
    let name = pod.metadata.name.clone().unwrap_or_default();
    let proxied = format!("/api/v1/namespaces/kubevirt/pods/https:{name}:8443/proxy/metrics");
    let answer = s.call(&Method::GET, &proxied, &Value::Null).await?;
    ensure!(answer.code == 401, "through the API server: {} {}", answer.code, answer.message());

    // Many unknown tokens, more than are reviewed, do not affect an authorized reader.
    let status = code("/metrics", Some(stranger)).await?;
    ensure!([403, 429].contains(&status), "an account without the right: {status}");
    let mut refused = 0;
    for number in 0..50 {
        let status = code("/metrics", Some(&format!("made-up-{number}"))).await?;
        ensure!([401, 429].contains(&status), "a token that is none: {status}");
        refused += usize::from(status == 429);
    }
    ensure!(refused > 0, "50 tokens were reviewed at once");
    let status = code("/metrics", Some(reader)).await?;
    ensure!(status == 200, "a reader after a flood of tokens: {status}");
    Ok(())
}
