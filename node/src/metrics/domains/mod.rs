//! Metrics of the domains of this node, collected from their launchers on each scrape.
//!
//! Bounded: a number of concurrent calls, a deadline for each, and one for all. Answers after the deadline are left out, and
//! launchers that answered slowly or not at all are called last in the next scrape. Scrapes in short succession get the same
//! answer.

mod families;
mod gpus;

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use api::VirtualMachineInstance;
use daemon::lock;
use futures::{StreamExt, stream::FuturesUnordered};
use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use protocol::{MigrationReport, StatsReply, StatsRequest};

use self::{families::Families, gpus::Kubelet};
use crate::launcher::Launcher;

/// Launchers that are called at a time.
const AT_ONCE: usize = 16;
/// Limit of one call.
const STATS_TIMEOUT: Duration = Duration::from_secs(5);
/// Duration of a call from which on a launcher is called last in the next scrape. It waits up to a second for its guest agent.
const SLOW: Duration = Duration::from_secs(2);
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
    /// Grows by two with each scrape.
    turn: u64,
    /// Turns of the VMIs whose launchers were slow, by UID. They are called last: a pod that delays its answer must not cost the
    /// metrics of others.
    late: HashMap<String, u64>,
}

impl Scrape {
    /// Makes calls, a bounded number at a time, and passes on the answers that arrive until `limit`. Each call has the UID of its
    /// VMI.
    async fn gather<T, F: Future<Output = Option<T>>>(
        &mut self,
        limit: tokio::time::Instant,
        calls: impl IntoIterator<Item = (String, F)>,
        mut take: impl FnMut(T),
    ) {
        let mut waiting: Vec<_> = calls.into_iter().collect();
        self.late.retain(|uid, _| waiting.iter().any(|(known, _)| known == uid));
        waiting.sort_by_key(|(uid, _)| self.late.get(uid).copied());
        self.turn += 2;
        let mut waiting = waiting.into_iter();
        let mut open = FuturesUnordered::new();
        loop {
            while open.len() < AT_ONCE
                && let Some((uid, call)) = waiting.next()
            {
                // Late until it answers, also if the client aborts the scrape.
                self.late.insert(uid.clone(), self.turn);
                open.push(async move {
                    let begin = tokio::time::Instant::now();
                    let answer = call.await;
                    (uid, answer, begin.elapsed())
                });
            }
            let Ok(Some((uid, answer, took))) = tokio::time::timeout_at(limit, open.next()).await else { break };
            if answer.is_some() && took < SLOW {
                self.late.remove(&uid);
            } else {
                // Those that the deadline has cut off go before this one.
                self.late.insert(uid, self.turn + 1);
            }
            if let Some(answer) = answer {
                take(answer);
            }
        }
    }
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
        let domains = (self.source)();
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
        let calls = domains.into_iter().filter_map(|domain| {
            let Domain { uid, vmi, launcher, .. } = domain;
            let (launcher, name) = (launcher?, uid.clone());
            let call = async move {
                let stats = launcher.call(StatsRequest {}, STATS_TIMEOUT).await;
                if let Err(error) = &stats {
                    tracing::debug!(uid = name, %error, "no metrics from virt-launcher");
                }
                Some((vmi, stats.ok()?))
            };
            Some((uid, call))
        });
        let add = |(vmi, stats): (Arc<VirtualMachineInstance>, StatsReply)| {
            families.add_domain(&vmi, &self.node, &stats);
        };
        scrape.gather(limit, calls, add).await;
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
    use std::collections::HashSet;

    use super::*;
    use crate::launcher::fake::FakeLauncher;

    #[tokio::test(start_paused = true)]
    async fn launchers_that_answer_slowly_cost_no_metrics_of_others() {
        let call = |uid: String, milliseconds: u64| {
            let name = uid.clone();
            let answer = async move {
                tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                Some(name)
            };
            (uid, answer)
        };
        let (mut scrape, mut scrapes) = (Scrape::default(), Vec::new());
        for _ in 0..2 {
            let slow = (0..2 * AT_ONCE).map(|number| call(format!("slow-{number}"), 4900));
            let calls: Vec<_> = slow.chain([call("fast".into(), 10)]).collect();
            let (mut answers, limit) = (HashSet::new(), tokio::time::Instant::now() + DEADLINE);
            let take = |uid: String| {
                answers.insert(uid);
            };
            scrape.gather(limit, calls, take).await;
            scrapes.push(answers);
        }
        assert!(!scrapes[0].contains("fast"), "it is behind the others");
        assert!(scrapes[1].contains("fast") && !scrape.late.contains_key("fast"));
        // The slow ones take turns.
        assert_eq!(scrapes[0].union(&scrapes[1]).count(), 2 * AT_ONCE + 1);
        assert_eq!(scrape.late.len(), 2 * AT_ONCE);
    }

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
            let is_late = metrics.scrape.lock().await.late.contains_key("u1");
            assert_eq!(is_late, !counts, "called last only while it is late");
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
