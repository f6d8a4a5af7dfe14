//! Cost of VMs to the cluster: CPU time of kube-apiserver, etcd and virt-api, bytes that etcd writes, admission reviews and evaluations
//! of policies. All are counters of these programs.

use std::collections::BTreeMap;

use anyhow::Result;
use ferrovirt_e2e_tests::Story;
use http::Request;

use crate::{Figures, etcd::Etcd, exposition::sum};

/// End of the names of CPU times, of which the use at rest is subtracted.
const CPU: &str = "_cpu_ms_per_vm";
/// CPU time of a program, in seconds.
const CPU_SECONDS: &str = "process_cpu_seconds_total";

/// Counters by the name of their figure.
pub(super) type Counters = BTreeMap<&'static str, f64>;

/// Access to the counters.
pub(super) struct Meter<'a> {
    story: &'a Story,
    /// etcd of the test cluster. The counters of etcd in another cluster cannot be read.
    etcd: Option<Etcd>,
}

impl<'a> Meter<'a> {
    pub(super) fn of(story: &'a Story, etcd: Option<Etcd>) -> Self {
        Self { story, etcd }
    }

    /// Reads all counters.
    pub(super) async fn read(&self) -> Result<Counters> {
        let server = self.story.client.request_text(Request::get("/metrics").body(Vec::new())?).await?;
        let mut counters = of_api_server(&server);
        let virt_api = self.story.metrics("virt-api").await?;
        let seconds = sum(virt_api.iter().map(String::as_str), CPU_SECONDS, &[]);
        counters.insert("virt_api_cpu_ms_per_vm", seconds * 1000.0);
        if let Some(etcd) = &self.etcd {
            counters.extend(of_etcd(&etcd.metrics().await?));
        }
        Ok(counters)
    }

    /// Removes old revisions from etcd, and returns the size of the rest in KiB.
    pub(super) async fn kept_kib(&self) -> Result<Option<f64>> {
        match &self.etcd {
            Some(etcd) => etcd.kept_kib().await.map(Some),
            None => Ok(None),
        }
    }
}

fn of_api_server(metrics: &str) -> Counters {
    let of = |metric, labels: &[&str]| sum(metrics.lines(), metric, labels);
    let evaluations = "apiserver_admission_match_condition_evaluation_seconds_count";
    let plugin = "apiserver_admission_controller_admission_duration_seconds_sum";
    Counters::from([
        ("api_server_cpu_ms_per_vm", of(CPU_SECONDS, &[]) * 1000.0),
        ("reviews_per_vm", of("apiserver_admission_webhook_request_total", &[])),
        ("policy_evaluations_per_vm", of(evaluations, &["kind=\"policy\""])),
        ("policies_ms_per_vm", of(plugin, &["name=\"ValidatingAdmissionPolicy\""]) * 1000.0),
    ])
}

fn of_etcd(metrics: &str) -> Counters {
    let of = |metric| sum(metrics.lines(), metric, &[]);
    Counters::from([
        ("etcd_cpu_ms_per_vm", of(CPU_SECONDS) * 1000.0),
        ("etcd_written_kib_per_vm", of("etcd_disk_wal_write_bytes_total") / 1024.0),
    ])
}

/// Growth of the counters while VMs were created, and at rest.
#[derive(Default)]
pub(super) struct Growth {
    busy: Counters,
    busy_seconds: f64,
    rest: Counters,
    rest_seconds: f64,
}

impl Growth {
    /// Adds the growth of a time in which VMs were created.
    pub(super) fn add_busy(&mut self, before: &Counters, after: &Counters, seconds: f64) {
        add(&mut self.busy, before, after);
        self.busy_seconds += seconds;
    }

    /// Adds the growth of a time without changes.
    pub(super) fn add_rest(&mut self, before: &Counters, after: &Counters, seconds: f64) {
        add(&mut self.rest, before, after);
        self.rest_seconds += seconds;
    }

    /// Adds the figures of this number of VMs.
    pub(super) fn report(&self, vms: usize, suffix: &str, figures: &mut Figures) {
        for (name, growth) in &self.busy {
            let rest = self.rest.get(name).filter(|_| name.ends_with(CPU) && self.rest_seconds > 0.0);
            let at_rest = rest.map_or(0.0, |rest| rest / self.rest_seconds * self.busy_seconds);
            figures.insert(format!("{name}{suffix}"), (growth - at_rest).max(0.0) / vms as f64);
        }
    }

    /// Adds the CPU time of each program at rest.
    pub(super) fn report_rest(&self, suffix: &str, figures: &mut Figures) {
        for (name, growth) in &self.rest {
            if let Some(program) = name.strip_suffix(CPU) {
                figures.insert(format!("{program}_cpu_at_rest{suffix}_ms_per_s"), growth / self.rest_seconds);
            }
        }
    }
}

fn add(sums: &mut Counters, before: &Counters, after: &Counters) {
    for (name, value) in after {
        *sums.entry(name).or_default() += value - before.get(name).copied().unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_at_rest_is_subtracted_from_cpu_time_alone() {
        let counters =
            |cpu: f64, reviews: f64| Counters::from([("etcd_cpu_ms_per_vm", cpu), ("reviews_per_vm", reviews)]);
        let mut growth = Growth::default();
        growth.add_busy(&counters(1000.0, 5.0), &counters(1600.0, 25.0), 20.0);
        growth.add_busy(&counters(2000.0, 30.0), &counters(2400.0, 50.0), 10.0);
        growth.add_rest(&counters(0.0, 0.0), &counters(100.0, 10.0), 10.0);
        let mut figures = Figures::new();
        growth.report(10, "", &mut figures);
        growth.report_rest("", &mut figures);
        let expected = [("etcd_cpu_ms_per_vm", 70.0), ("reviews_per_vm", 4.0), ("etcd_cpu_at_rest_ms_per_s", 10.0)];
        assert_eq!(figures, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }

    #[test]
    fn counters_are_read_from_metrics() {
        let server = "process_cpu_seconds_total 1.5\n\
            apiserver_admission_webhook_request_total{name=\"a\",operation=\"CREATE\",type=\"admit\"} 3\n\
            apiserver_admission_webhook_request_total{name=\"b\",operation=\"UPDATE\",type=\"validating\"} 4\n\
            apiserver_admission_match_condition_evaluation_seconds_count{kind=\"policy\",name=\"c\"} 5\n\
            apiserver_admission_match_condition_evaluation_seconds_count{kind=\"webhook\",name=\"d\"} 6\n\
            apiserver_admission_controller_admission_duration_seconds_sum{name=\"ValidatingAdmissionPolicy\",type=\"validate\"} 0.25\n\
            apiserver_admission_controller_admission_duration_seconds_sum{name=\"NodeRestriction\",type=\"admit\"} 9\n";
        let expected = [
            ("api_server_cpu_ms_per_vm", 1500.0),
            ("reviews_per_vm", 7.0),
            ("policy_evaluations_per_vm", 5.0),
            ("policies_ms_per_vm", 250.0),
        ];
        assert_eq!(of_api_server(server), expected.into());
        let etcd = of_etcd("process_cpu_seconds_total 2\netcd_disk_wal_write_bytes_total 3072\n");
        assert_eq!(etcd, [("etcd_cpu_ms_per_vm", 2000.0), ("etcd_written_kib_per_vm", 3.0)].into());
    }
}
