//! Metrics of the CPUs and the memory that VMs request.

use std::collections::BTreeMap;

use api::{quantity, vmi::domain::DomainSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use prometheus::{GaugeVec, Opts, core::Collector, proto::MetricFamily};

const REQUEST: [&str; 5] = ["name", "namespace", "resource", "unit", "source"];
const LIMIT: [&str; 4] = ["name", "namespace", "resource", "unit"];

/// An amount: resource, unit, source, value.
type Amount = (&'static str, &'static str, &'static str, f64);

/// The metrics.
pub(super) struct Amounts {
    requests: GaugeVec,
    limits: GaugeVec,
}

impl Amounts {
    /// Creates empty metrics.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let requests = Opts::new("kubevirt_vm_resource_requests", "What a VirtualMachine asks for");
        let limits = Opts::new("kubevirt_vm_resource_limits", "What a VirtualMachine is limited to");
        Ok(Self { requests: GaugeVec::new(requests, &REQUEST)?, limits: GaugeVec::new(limits, &LIMIT)? })
    }

    /// Adds a VM with the domain of its template.
    pub(super) fn vm(&self, name: &str, namespace: &str, domain: &DomainSpec) {
        for (resource, unit, source, value) in requests(domain) {
            self.requests.with_label_values(&[name, namespace, resource, unit, source]).set(value);
        }
        let limits = &domain.resources.limits;
        for (resource, unit, value) in [("memory", "bytes", bytes_in(limits)), ("cpu", "cores", cores_in(limits))] {
            if let Some(value) = value {
                self.limits.with_label_values(&[name, namespace, resource, unit]).set(value);
            }
        }
    }

    /// Returns the metrics.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        [&self.requests, &self.limits].into_iter().flat_map(|gauge| gauge.collect()).collect()
    }
}

/// Returns what a domain requests. Each amount has the source from which it comes.
fn requests(domain: &DomainSpec) -> Vec<Amount> {
    let (requests, limits) = (&domain.resources.requests, &domain.resources.limits);
    let mut amounts = Vec::new();
    let memory = domain.memory.as_ref();
    let guest = memory.and_then(|memory| bytes(memory.guest.as_ref()?));
    let page = memory.and_then(|memory| memory.hugepages.as_ref()?.page_size.clone());
    let requested = bytes_in(requests);
    for (source, value) in [
        ("domain", requested),
        ("guest", guest),
        // The size of a page, as in the reference.
        ("hugepages", page.and_then(|size| bytes(&Quantity(size)))),
        // A limit counts without a request only.
        ("guest_effective", guest.or(requested).or_else(|| bytes_in(limits))),
    ] {
        amounts.extend(value.map(|value| ("memory", "bytes", source, value)));
    }
    let requested = cores_in(requests);
    amounts.extend(requested.map(|value| ("cpu", "cores", "requests", value)));
    match &domain.cpu {
        Some(cpu) => {
            for (unit, count) in [("cores", cpu.cores), ("threads", cpu.threads), ("sockets", cpu.sockets)] {
                let count = count.filter(|count| *count > 0);
                amounts.extend(count.map(|count| ("cpu", unit, "domain", f64::from(count))));
            }
        }
        None if requested.is_none() => {
            amounts.extend(["cores", "threads", "sockets"].map(|unit| ("cpu", unit, "default", 1.0)));
        }
        None => {}
    }
    let vcpus = domain.cpu.as_ref().map_or(1, |cpu| cpu.vcpus());
    amounts.push(("cpu", "cores", "guest_effective", f64::from(vcpus)));
    amounts
}

/// Returns an amount of memory, unless it is 0.
fn bytes(amount: &Quantity) -> Option<f64> {
    quantity::units(amount).ok().filter(|bytes| *bytes != 0).map(|bytes| bytes as f64)
}

fn bytes_in(amounts: &BTreeMap<String, Quantity>) -> Option<f64> {
    bytes(amounts.get("memory")?)
}

fn cores_in(amounts: &BTreeMap<String, Quantity>) -> Option<f64> {
    let milli = quantity::milli(amounts.get("cpu")?).ok().filter(|milli| *milli != 0)?;
    Some(milli as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GI: f64 = 1_073_741_824.0;

    #[test]
    fn amounts_have_the_sources_of_the_reference() {
        for (domain, wanted) in [
            (
                json!({"devices": {}}),
                vec![
                    ("cpu", "cores", "default", 1.0),
                    ("cpu", "threads", "default", 1.0),
                    ("cpu", "sockets", "default", 1.0),
                    ("cpu", "cores", "guest_effective", 1.0),
                ],
            ),
            (
                json!({"devices": {}, "cpu": {"cores": 2, "sockets": 3}, "memory": {"guest": "2Gi", "hugepages": {"pageSize": "1Gi"}}}),
                vec![
                    ("memory", "bytes", "guest", 2.0 * GI),
                    ("memory", "bytes", "hugepages", GI),
                    ("memory", "bytes", "guest_effective", 2.0 * GI),
                    ("cpu", "cores", "domain", 2.0),
                    ("cpu", "sockets", "domain", 3.0),
                    ("cpu", "cores", "guest_effective", 6.0),
                ],
            ),
            (
                json!({"devices": {}, "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}}),
                vec![
                    ("memory", "bytes", "domain", GI),
                    ("memory", "bytes", "guest_effective", GI),
                    ("cpu", "cores", "requests", 1.5),
                    ("cpu", "cores", "guest_effective", 1.0),
                ],
            ),
            (
                json!({"devices": {}, "cpu": {}, "resources": {"requests": {"cpu": "0"}, "limits": {"memory": "1Gi"}}}),
                vec![("memory", "bytes", "guest_effective", GI), ("cpu", "cores", "guest_effective", 1.0)],
            ),
        ] {
            assert_eq!(requests(&serde_json::from_value(domain.clone()).unwrap()), wanted, "{domain}");
        }
    }

    #[test]
    fn limits_that_are_set_are_shown() {
        let amounts = Amounts::new().unwrap();
        let domain = json!({"devices": {}, "resources": {"limits": {"memory": "2Gi", "cpu": "0"}}});
        amounts.vm("v", "ns", &serde_json::from_value(domain).unwrap());
        let registry = prometheus::Registry::new();
        registry.register(Box::new(amounts.limits.clone())).unwrap();
        registry.register(Box::new(amounts.requests.clone())).unwrap();
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        let wanted =
            r#"kubevirt_vm_resource_limits{name="v",namespace="ns",resource="memory",unit="bytes"} 2147483648"#;
        assert!(text.lines().any(|line| line == wanted), "{text}");
        assert!(!text.contains(r#"kubevirt_vm_resource_limits{name="v",namespace="ns",resource="cpu""#), "{text}");
    }
}
