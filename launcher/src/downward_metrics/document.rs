//! Renders metrics as the XML document of vhostmd. Pure.

use protocol::StatsReply;

use super::host::HostMetrics;
use crate::domain::xml::Element;

/// State of a vCPU that is not plugged in, in libvirt's numbers.
const OFFLINE: u32 = 0;

/// Values of one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Metrics {
    /// Name of the node.
    pub(crate) node: String,
    /// Version of QEMU.
    pub(crate) version: String,
    /// Statistics of the domain; empty if there are none.
    pub(crate) stats: StatsReply,
    /// Metrics of the node.
    pub(crate) host: HostMetrics,
}

/// The place of a value.
const HOST: &str = "host";
const VM: &str = "vm";

impl Metrics {
    /// Renders the document, in the order of the reference.
    pub(crate) fn document(&self) -> String {
        let text = |name, value: &str| metric(HOST, name, "string", None, value.to_owned());
        let fixed = [
            text("HostName", &self.node),
            text("HostSystemInfo", "linux"),
            text("VirtualizationVendor", "kubevirt.io"),
            text("VirtProductInfo", &self.version),
        ];
        let document = Element::new("metrics").children(fixed).children(self.of_domain()).children(self.of_host());
        document.to_xml()
    }

    fn of_domain(&self) -> impl Iterator<Item = Element> {
        let StatsReply { vcpus, memory, .. } = &self.stats;
        let time = (!vcpus.is_empty()).then(|| seconds(vcpus.iter().map(|vcpu| vcpu.time).sum(), 1e9));
        let count = (!vcpus.is_empty()).then(|| vcpus.iter().filter(|vcpu| vcpu.state != OFFLINE).count());
        let memory = memory.as_ref().and_then(|memory| memory.actual_balloon);
        let number = |name, kind, unit, value: Option<String>| value.map(|value| metric(VM, name, kind, unit, value));
        [
            number("TotalCPUTime", "real64", Some("s"), time),
            number("ResourceProcessorLimit", "int64", None, count.map(|count| count.to_string())),
            number("PhysicalMemoryAllocatedToVirtualSystem", "uint64", Some("KiB"), memory.map(|kib| kib.to_string())),
            number("ResourceMemoryLimit", "uint64", Some("KiB"), memory.map(|kib| kib.to_string())),
        ]
        .into_iter()
        .flatten()
    }

    fn of_host(&self) -> impl Iterator<Item = Element> {
        let host = &self.host;
        let kib =
            |name, value: Option<u64>| value.map(|kib| metric(HOST, name, "uint64", Some("KiB"), kib.to_string()));
        let cpus = host.processors.map(|count| metric(HOST, "NumberOfPhysicalCPUs", "int64", None, count.to_string()));
        let time = host.cpu_ticks.map(|ticks| {
            metric(HOST, "TotalCPUTime", "real64", Some("s"), seconds(ticks, super::host::TICKS_PER_SECOND))
        });
        let now = host.time.map(|now| metric(HOST, "Time", "int64", Some("s"), now.to_string()));
        [
            cpus,
            time,
            kib("FreePhysicalMemory", host.memory.free),
            kib("FreeVirtualMemory", host.memory.free_virtual()),
            kib("MemoryAllocatedToVirtualServers", host.memory.used()),
            kib("UsedVirtualMemory", host.memory.used_virtual()),
            kib("PagedInMemory", host.paged_in),
            kib("PagedOutMemory", host.paged_out),
            now,
        ]
        .into_iter()
        .flatten()
    }
}

fn metric(context: &str, name: &str, kind: &str, unit: Option<&str>, value: String) -> Element {
    Element::new("metric")
        .with("type", kind)
        .with("context", context)
        .with_some("unit", unit)
        .child(Element::new("name").text(name))
        .child(Element::new("value").text(value))
}

/// Returns a time in seconds with six decimals.
#[allow(clippy::cast_precision_loss, reason = "a time of years keeps its microseconds")]
fn seconds(time: u64, per_second: f64) -> String {
    format!("{:.6}", time as f64 / per_second)
}

#[cfg(test)]
mod tests {
    use protocol::{MemoryStats, VcpuStats};

    use super::*;
    use crate::downward_metrics::host::Memory;

    #[test]
    fn the_document_has_the_metrics_of_the_reference_in_its_order() {
        let vcpu = |id, state, time| VcpuStats { id, state, time, wait: None, delay: None };
        let metrics = Metrics {
            node: "node<1>".into(),
            version: "QEMU 10".into(),
            stats: StatsReply {
                vcpus: vec![vcpu(0, 1, 1_500_000_000), vcpu(1, OFFLINE, 0)],
                memory: Some(MemoryStats { actual_balloon: Some(2048), ..MemoryStats::default() }),
                ..StatsReply::default()
            },
            host: HostMetrics {
                processors: Some(2),
                cpu_ticks: Some(250),
                memory: Memory {
                    total: Some(100),
                    free: Some(10),
                    buffers: Some(5),
                    cached: Some(20),
                    swap_total: Some(50),
                    swap_free: Some(40),
                    swap_cached: Some(1),
                },
                paged_in: Some(4),
                paged_out: Some(8),
                time: Some(1_700_000_000),
            },
        };
        let document = metrics.document();
        let begin = "<metrics>\n  <metric type='string' context='host'>\n    <name>HostName</name>\n    \
                     <value>node&lt;1&gt;</value>\n  </metric>\n";
        assert!(document.starts_with(begin), "{document}");
        let parsed = roxmltree::Document::parse(&document).unwrap();
        let text = |node: roxmltree::Node<'_, '_>, name: &str| {
            node.children().find(|child| child.has_tag_name(name)).and_then(|child| child.text()).unwrap().to_owned()
        };
        let found: Vec<[String; 5]> = parsed
            .root_element()
            .children()
            .filter(roxmltree::Node::is_element)
            .map(|node| {
                let attribute = |name| node.attribute(name).unwrap_or_default().to_owned();
                [attribute("context"), text(node, "name"), attribute("type"), attribute("unit"), text(node, "value")]
            })
            .collect();
        let expected = [
            ["host", "HostName", "string", "", "node<1>"],
            ["host", "HostSystemInfo", "string", "", "linux"],
            ["host", "VirtualizationVendor", "string", "", "kubevirt.io"],
            ["host", "VirtProductInfo", "string", "", "QEMU 10"],
            ["vm", "TotalCPUTime", "real64", "s", "1.500000"],
            ["vm", "ResourceProcessorLimit", "int64", "", "1"],
            ["vm", "PhysicalMemoryAllocatedToVirtualSystem", "uint64", "KiB", "2048"],
            ["vm", "ResourceMemoryLimit", "uint64", "KiB", "2048"],
            ["host", "NumberOfPhysicalCPUs", "int64", "", "2"],
            ["host", "TotalCPUTime", "real64", "s", "2.500000"],
            ["host", "FreePhysicalMemory", "uint64", "KiB", "10"],
            ["host", "FreeVirtualMemory", "uint64", "KiB", "50"],
            ["host", "MemoryAllocatedToVirtualServers", "uint64", "KiB", "65"],
            ["host", "UsedVirtualMemory", "uint64", "KiB", "114"],
            ["host", "PagedInMemory", "uint64", "KiB", "4"],
            ["host", "PagedOutMemory", "uint64", "KiB", "8"],
            ["host", "Time", "int64", "s", "1700000000"],
        ];
        assert_eq!(found, expected.map(|row| row.map(str::to_owned)));
    }

    /// A missing metric crashed virt-handler of the reference.
    #[test]
    fn cve_2024_31420_metrics_that_are_missing_are_left_out() {
        let document = Metrics::default().document();
        assert_eq!(document.matches("<metric ").count(), 4, "{document}");
    }
}
