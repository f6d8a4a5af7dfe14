//! Attacks on the channels of migrations from pods. Unit tests cover the certificates of other nodes and replayed UIDs.

use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_cluster::certificates::{Authority, Subject};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_alone, webhook::Endpoint};
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::LogParams};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    cve_launcher_socket::{Intruder, refuses_descriptors},
    moves::{MINUTES, alone, begin, console, has_ended, two_nodes, vm},
    virt_handlers,
    witness::Witness,
};

/// Port of virt-handler for migrations.
const PORT: u16 = 8187;
/// Metric of refused channels.
const REFUSED: &str = "ferrovirt_handler_migration_channels_refused_total";

#[test]
fn channels_without_the_certificate_of_a_virt_handler_are_refused_and_logged() {
    story("migration-intruder", async |s| {
        let handlers = s.pods_of("virt-handler").await?;
        let handler = handlers.first().context("no virt-handler")?;
        let address = handler.status.as_ref().and_then(|status| status.pod_ip.clone()).context("no address")?;
        let before = refused(s).await?;
        // From another pod, with what is no TLS.
        s.toolbox("intruder").await?;
        let dial = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {address} {PORT} | wc -c");
        let received = s.exec("intruder", &["sh", "-c", &dial]).await?;
        ensure!(received.trim().parse::<u32>()? < 64, "plain bytes are answered with {received} bytes");
        // With no certificate, and with that of another authority which claims to be a virt-handler of this node.
        let server = Endpoint::of_pod(&s.client, handler, PORT)?;
        ensure_closed(&server).await.context("without a certificate")?;
        let node = handler.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        let (authority, _) = Authority::create("kubevirt.io", SystemTime::now())?;
        let forged = authority.sign(&Subject {
            common_name: format!("kubevirt.io:system:node:{node}"),
            organization: Some("kubevirt.io:system".to_owned()),
            names: vec![node],
            client: true,
        })?;
        let forged = server.with_client_certificate(&forged.certificate, &forged.key)?;
        ensure_closed(&forged).await.context("with a certificate of another authority")?;

        let deadline = Instant::now() + TIMEOUT;
        while refused(s).await? < before + 2.0 {
            ensure!(Instant::now() < deadline, "the refusals are not counted: {before}, {}", refused(s).await?);
            sleep(Duration::from_millis(500)).await;
        }
        let pods: Api<Pod> = Api::namespaced(s.client.clone(), "kubevirt");
        let name = handler.metadata.name.as_deref().context("pod without name")?;
        let log = pods.logs(name, &LogParams { since_seconds: Some(300), ..LogParams::default() }).await?;
        ensure!(log.contains("channel of a migration is refused"), "the refusals are not logged");
        Ok(())
    });
}

/// Checks that a connection ends without an answer. With TLS 1.3 a client learns of its rejection after the handshake.
async fn ensure_closed(server: &Endpoint) -> Result<()> {
    let Ok(mut connection) = server.connect().await else { return Ok(()) };
    match connection.request(Method::GET, "/", &[], "".into()).await {
        Err(_) => Ok(()),
        Ok(answer) => bail!("it is answered with {}", answer.status),
    }
}

/// Returns the number of refused channels.
async fn refused(s: &Story) -> Result<f64> {
    let lines = s.metrics("virt-handler").await?;
    let values = lines.iter().filter(|line| line.starts_with(REFUSED));
    Ok(values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

#[test]
fn launcher_that_sends_garbage_harms_no_other_vm() {
    story_alone("migration-garbage", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        for name in ["prey", "bystander"] {
            s.apply(&vm(name, "Always")).await?;
        }
        for name in ["prey", "bystander"] {
            s.wait_running(name).await?;
        }
        let mut guest = console(s, "prey").await?;
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;
        let intruder = Intruder::enter(s, "prey").await?;
        let restarts = virt_handlers::restarts(s).await?;
        // The source's launcher answers virt-handler with bytes of its own.
        intruder.run("[ ! -e migration-sock ] || mv migration-sock aside").await?;
        // Endless bytes, with a descriptor where the kernel lets virt-handler refuse it.
        let refuses = refuses_descriptors(s, &s.node_of("prey").await?).await?;
        let mode = if refuses { "passes" } else { "bytes" };
        let hostile = format!("hostile-launcher {mode} $PWD/migration-sock >/tmp/hostile 2>&1 </dev/null &");
        intruder.run(&hostile).await?;
        intruder.wait_for("test -S migration-sock").await?;
        let mut before = vec![];
        for node in &nodes {
            before.push(s.memory(node, "virt-handler").await?);
        }
        let source = s.node_of("prey").await?;
        let migration = begin(s, "prey").await?;
        intruder.wait_for("grep -q connected /tmp/hostile").await.context("virt-handler does not dial")?;
        sleep(Duration::from_secs(5)).await;
        if refuses {
            let refused = "grep EPERM /tmp/hostile || { cat /tmp/hostile >&2; false; }";
            intruder.wait_for(refused).await.context("virt-handler takes a descriptor")?;
        }
        virt_handlers::serves(s, "bystander").await.context("another VM")?;
        for (node, before) in nodes.iter().zip(before) {
            let grown = s.memory(node, "virt-handler").await?.saturating_sub(before);
            ensure!(grown < 32 * 1024, "{node}: virt-handler takes {grown} KiB more");
        }
        if !has_ended(&s.get("vmim", &migration).await?) {
            s.delete("vmim", &migration).await?;
            s.wait_gone("vmim", &migration, MINUTES).await?;
        }
        intruder
            .run("killall hostile-launcher; rm -f migration-sock; [ ! -e aside ] || mv aside migration-sock")
            .await?;
        ensure!(s.node_of("prey").await? == source, "the VMI has left its node");
        alone(s, "prey").await?;
        let mut guest = console(s, "prey").await?;
        Witness::goes_on(&mut guest, &witness).await?;
        guest.leave().await?;
        ensure!(virt_handlers::restarts(s).await? == restarts, "virt-handler was restarted");
        Ok(())
    });
}
