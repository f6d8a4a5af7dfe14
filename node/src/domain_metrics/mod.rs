//! Metrics of the machines of this node, asked of their launchers when somebody asks for metrics.
//!
//! Bounded: so many launchers at once, each with a deadline, and one for all together. What comes too late is left out of
//! that answer, and whoever did not answer is asked last the next time. Scrapes that follow closely get the same answer.

mod families;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt;
use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use self::families::Families;
use crate::machine::Machines;

/// Launchers that are asked at a time.
const AT_ONCE: usize = 16;
/// Longest wait for all of them.
const DEADLINE: Duration = Duration::from_secs(8);
/// How long an answer is good for.
const FRESH: Duration = Duration::from_secs(3);

/// The metrics of all machines as last asked for.
#[derive(Clone)]
pub struct DomainMetrics {
    machines: Machines,
    node: String,
    asked: Arc<tokio::sync::Mutex<Asked>>,
    families: Arc<Mutex<Vec<MetricFamily>>>,
}

/// When launchers were asked, and what came of it.
#[derive(Debug, Default)]
struct Asked {
    at: Option<Instant>,
    /// UIDs of the machines whose launchers did not answer. They are asked after the others: a pod that keeps the agent
    /// waiting shall not cost anybody else's metrics.
    late: HashSet<String>,
}

impl DomainMetrics {
    /// Nothing asked for yet.
    #[must_use]
    pub fn new(machines: Machines, node: String) -> Self {
        Self { machines, node, asked: Arc::default(), families: Arc::default() }
    }

    /// Asks all launchers, unless that was just done.
    pub async fn refresh(&self) {
        let mut asked = self.asked.lock().await;
        if asked.at.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        // Anybody may ask for metrics: who hangs up at once and asks again does not have the launchers asked again.
        asked.at = Some(Instant::now());
        let mut machines = self.machines.all();
        asked.late.retain(|uid| machines.iter().any(|machine| machine.uid == *uid));
        machines.sort_by_key(|machine| asked.late.contains(&machine.uid));
        let mut answers = std::pin::pin!(
            futures::stream::iter(machines)
                .map(|machine| async move {
                    let (launcher, vmi) = (machine.launcher().ok()?, machine.vmi()?);
                    let stats = launcher.stats().await;
                    if let Err(error) = &stats {
                        tracing::debug!(uid = machine.uid, %error, "the launcher does not tell its metrics");
                    }
                    Some((machine.uid.clone(), vmi, stats.ok()))
                })
                .buffer_unordered(AT_ONCE)
        );
        let mut families = Families::default();
        let limit = tokio::time::Instant::now() + DEADLINE;
        while let Ok(Some(answer)) = tokio::time::timeout_at(limit, answers.next()).await {
            let Some((uid, vmi, stats)) = answer else { continue };
            match stats {
                Some(stats) => {
                    asked.late.remove(&uid);
                    families.machine(&vmi, &self.node, &stats);
                }
                None => {
                    asked.late.insert(uid);
                }
            }
        }
        *self.families.lock().unwrap_or_else(PoisonError::into_inner) = families.finish();
        asked.at = Some(Instant::now());
    }
}

impl Collector for DomainMetrics {
    /// None: the labels differ from machine to machine.
    fn desc(&self) -> Vec<&Desc> {
        Vec::new()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::Stage;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_scrape_asks_the_launchers() {
        let stage = Stage::running().await;
        let metrics = DomainMetrics::new(stage.machines.clone(), "n1".into());
        let registry = prometheus::Registry::new();
        registry.register(Box::new(metrics.clone())).unwrap();
        assert!(registry.gather().is_empty());
        // The machine runs before its launcher counts as having accepted it.
        let name = "kubevirt_vmi_cpu_usage_seconds_total";
        let told = async {
            loop {
                metrics.asked.lock().await.at = None;
                metrics.refresh().await;
                if registry.gather().iter().any(|family| family.name() == name) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), told).await.unwrap();
        metrics.asked.lock().await.at = None;
        tokio::select! {
            biased;
            () = metrics.refresh() => {}
            () = std::future::ready(()) => {}
        }
        assert!(metrics.asked.lock().await.at.is_some(), "a scrape that is given up counts");
        for counts in [false, true] {
            stage.launcher.count(counts);
            metrics.asked.lock().await.at = None;
            metrics.refresh().await;
            assert_eq!(
                metrics.asked.lock().await.late.contains("u1"),
                !counts,
                "asked last only as long as it is late"
            );
            assert_eq!(registry.gather().is_empty(), !counts);
        }
        stage.launcher.exit();
        let gone = async {
            loop {
                metrics.asked.lock().await.at = None;
                metrics.refresh().await;
                if registry.gather().is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), gone).await.expect("metrics of a machine that is gone");
    }
}
