//! Metrics of the domains of this node, collected from their launchers on each scrape.
//!
//! Bounded: a number of concurrent calls, a deadline for each, and one for all. Answers after the deadline are left out, and
//! launchers that did not answer are called last in the next scrape. Scrapes in short succession get the same answer.

mod families;
mod gpus;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use api::VirtualMachineInstance;
use daemon::lock;
use futures::StreamExt;
use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use protocol::{MigrationReport, StatsRequest};

use self::{families::Families, gpus::Kubelet};
use crate::launcher::Launcher;

/// Launchers that are called at a time.
const AT_ONCE: usize = 16;
/// Limit of one call.
const STATS_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of all calls of a scrape. Prometheus waits ten seconds for the answer.
const DEADLINE: Duration = Duration::from_secs(8);
/// Duration for which an answer is reused.
const FRESH: Duration = Duration::from_secs(3);

/// A VMI of this node.
pub(crate) struct Domain {
    /// UID of the VMI.
    pub(crate) uid: String,
    pub(crate) vmi: Arc<VirtualMachineInstance>,
    /// The launcher, if it can be called.
    pub(crate) launcher: Option<Launcher>,
    /// Progress of the migration by which the domain leaves this node.
    pub(crate) migration: Option<MigrationReport>,
    /// Decisions about the VMI so far.
    pub(crate) syncs: u64,
}

type Source = dyn Fn() -> Vec<Domain> + Send + Sync;

/// The metrics of all domains, as last collected.
#[derive(Clone)]
pub(crate) struct DomainMetrics {
    source: Arc<Source>,
    node: String,
    kubelet: Kubelet,
    scrape: Arc<tokio::sync::Mutex<Scrape>>,
    families: Arc<Mutex<Vec<MetricFamily>>>,
}

/// The last scrape.
#[derive(Debug, Default)]
struct Scrape {
    at: Option<Instant>,
    /// UIDs of the VMIs whose launchers did not answer. They are called last: a pod that delays its answer must not cost the
    /// metrics of others.
    late: HashSet<String>,
}

impl DomainMetrics {
    /// Returns a collector for the domains of `source`. `kubelet` is kubelet's directory.
    pub(crate) fn new(source: impl Fn() -> Vec<Domain> + Send + Sync + 'static, node: String, kubelet: &Path) -> Self {
        let kubelet = Kubelet::new(kubelet);
        Self { source: Arc::new(source), node, kubelet, scrape: Arc::default(), families: Arc::default() }
    }

    /// Collects from all launchers, unless that was just done.
    pub(crate) async fn refresh(&self) {
        let mut scrape = self.scrape.lock().await;
        if scrape.at.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        let limit = tokio::time::Instant::now() + DEADLINE;
        // Every client may scrape. One that aborts and repeats its request must not cause more calls.
        scrape.at = Some(Instant::now());
        let mut domains = (self.source)();
        scrape.late.retain(|uid| domains.iter().any(|domain| domain.uid == *uid));
        domains.sort_by_key(|domain| scrape.late.contains(&domain.uid));
        let mut families = Families::default();
        for domain in &domains {
            families.add_syncs(&domain.vmi, domain.syncs);
            if let Some(report) = &domain.migration {
                families.add_migration(&domain.vmi, &self.node, report);
            }
        }
        if domains.iter().any(|domain| gpus::has_gpus(&domain.vmi)) {
            let pods = self.kubelet.pods().await;
            for domain in &domains {
                families.add_gpus(&domain.vmi, &self.node, &gpus::of(&domain.vmi, &pods));
            }
        }
        let mut answers = std::pin::pin!(
            futures::stream::iter(domains)
                .filter_map(|domain| std::future::ready(domain.launcher.clone().map(|launcher| (domain, launcher))))
                .map(|(domain, launcher)| async move {
                    let stats = launcher.call(StatsRequest {}, STATS_TIMEOUT).await;
                    if let Err(error) = &stats {
                        tracing::debug!(uid = domain.uid, %error, "no metrics from virt-launcher");
                    }
                    (domain, stats.ok())
                })
                .buffer_unordered(AT_ONCE)
        );
        while let Ok(Some((domain, stats))) = tokio::time::timeout_at(limit, answers.next()).await {
            match stats {
                Some(stats) => {
                    scrape.late.remove(&domain.uid);
                    families.add_domain(&domain.vmi, &self.node, &stats);
                }
                None => {
                    scrape.late.insert(domain.uid);
                }
            }
        }
        *lock(&self.families) = families.finish();
        scrape.at = Some(Instant::now());
    }
}

impl Collector for DomainMetrics {
    /// Empty: labels differ between VMIs.
    fn desc(&self) -> Vec<&Desc> {
        Vec::new()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        lock(&self.families).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::fake::FakeLauncher;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_scrape_calls_the_launchers() {
        let fake = FakeLauncher::new();
        let launcher = fake.connect().await;
        let source = move || {
            vec![Domain {
                uid: "u1".into(),
                vmi: Arc::default(),
                launcher: Some(launcher.clone()),
                migration: None,
                syncs: 7,
            }]
        };
        let metrics = DomainMetrics::new(source, "n1".into(), Path::new("/nonexistent"));
        let registry = prometheus::Registry::new();
        registry.register(Box::new(metrics.clone())).unwrap();
        let shows = |name: &str| registry.gather().iter().any(|family| family.name() == name);
        let answered = || shows("kubevirt_vmi_cpu_usage_seconds_total");
        assert!(registry.gather().is_empty());
        metrics.refresh().await;
        assert!(answered());
        metrics.scrape.lock().await.at = None;
        tokio::select! {
            biased;
            () = metrics.refresh() => {}
            () = std::future::ready(()) => {}
        }
        assert!(metrics.scrape.lock().await.at.is_some(), "an aborted scrape counts");
        for counts in [false, true] {
            fake.count(counts);
            metrics.scrape.lock().await.at = None;
            metrics.refresh().await;
            assert_eq!(metrics.scrape.lock().await.late.contains("u1"), !counts, "called last only while it is late");
            assert_eq!(answered(), counts);
            assert!(shows("kubevirt_vmi_sync_total"), "needs no answer of the launcher");
        }
        fake.exit();
        let gone = async {
            while answered() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                metrics.scrape.lock().await.at = None;
                metrics.refresh().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), gone).await.expect("metrics of a launcher that is gone");
    }
}
