//! Statistics of launchers as metric families with the names of the reference. Pure.

use std::collections::{BTreeMap, BTreeSet};

use api::VirtualMachineInstance;
use kube::ResourceExt;
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use protocol::{DiskStats, GuestFileSystem, InterfaceStats, MigrationReport, StatsReply, VcpuStats};

use super::gpus::Gpu;

/// Most labels of a VMI that become labels of its metrics.
const LABELS: usize = 64;
/// Most file systems of a VMI, and longest text of the guest in a label.
const FILE_SYSTEMS: usize = 32;
const TEXT: usize = 256;
/// File systems that are always full. Alerts leave them out.
const FULL: [&str; 5] = ["CDFS", "cramfs", "iso9660", "squashfs", "udf"];
const NANOSECONDS: f64 = 1e9;
const KIB: f64 = 1024.0;

/// Families to which domains are added.
#[derive(Default)]
pub(super) struct Families {
    by_name: BTreeMap<&'static str, (MetricType, &'static str, Vec<Metric>)>,
}

impl Families {
    pub(super) fn finish(self) -> Vec<MetricFamily> {
        let family = |(name, (kind, help, metrics)): (&'static str, (MetricType, &'static str, Vec<Metric>))| {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            family.set_metric(metrics);
            family
        };
        self.by_name.into_iter().map(family).collect()
    }

    /// Adds the progress of the migration of a domain that leaves this node.
    pub(super) fn add_migration(&mut self, vmi: &VirtualMachineInstance, node: &str, report: &MigrationReport) {
        let own = || identity(vmi, node);
        self.counter(
            "kubevirt_vmi_migration_data_bytes_total",
            "Bytes of the guest to be migrated",
            own(),
            report.total as f64,
        );
        for (name, help, value) in [
            ("kubevirt_vmi_migration_data_processed_bytes", "Bytes of the guest that were migrated", report.processed),
            (
                "kubevirt_vmi_migration_data_remaining_bytes",
                "Bytes of the guest that remain to be migrated",
                report.remaining,
            ),
            (
                "kubevirt_vmi_migration_dirty_memory_rate_bytes",
                "Rate at which the guest changes its memory during the migration, in bytes a second",
                report.dirty_rate,
            ),
            (
                "kubevirt_vmi_migration_memory_transfer_rate_bytes",
                "Rate at which the memory is migrated, in bytes a second",
                report.rate,
            ),
        ] {
            self.gauge(name, help, own(), value as f64);
        }
    }

    /// Adds the number of decisions about a VMI. The metric of virt-controller has the same name and labels.
    pub(super) fn add_syncs(&mut self, vmi: &VirtualMachineInstance, syncs: u64) {
        let labels = vec![label("namespace", &vmi.namespace().unwrap_or_default()), label("name", &vmi.name_any())];
        self.counter("kubevirt_vmi_sync_total", "Decisions about a VMI", labels, syncs as f64);
    }

    /// Adds the GPUs of a VMI.
    pub(super) fn add_gpus(&mut self, vmi: &VirtualMachineInstance, node: &str, gpus: &[Gpu<'_>]) {
        for gpu in gpus {
            let mut labels = identity(vmi, node);
            labels.extend([label("pod", gpu.pod), label("resource", gpu.resource), label("uuid", gpu.id)]);
            self.gauge("kubevirt_vmi_gpu_info", "GPUs of VMIs, by the IDs of their device plugins", labels, 1.0);
        }
    }

    fn counter(&mut self, name: &'static str, help: &'static str, labels: Vec<LabelPair>, value: f64) {
        let mut metric = Metric::from_label(labels);
        let mut counter = Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
        self.add(name, MetricType::COUNTER, help, metric);
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, labels: Vec<LabelPair>, value: f64) {
        let mut metric = Metric::from_label(labels);
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
        self.add(name, MetricType::GAUGE, help, metric);
    }

    fn add(&mut self, name: &'static str, kind: MetricType, help: &'static str, metric: Metric) {
        self.by_name.entry(name).or_insert_with(|| (kind, help, Vec::new())).2.push(metric);
    }

    /// Adds the statistics of a domain.
    pub(super) fn add_domain(&mut self, vmi: &VirtualMachineInstance, node: &str, stats: &StatsReply) {
        let own = labels_of(vmi, node);
        let own = |more: &[(&str, &str)]| {
            let mut labels = own.clone();
            labels.extend(more.iter().map(|(name, value)| label(name, value)));
            labels
        };
        if let Some(cpu) = &stats.cpu {
            for (name, help, value) in [
                ("kubevirt_vmi_cpu_usage_seconds_total", "CPU time of the VMI", cpu.time),
                ("kubevirt_vmi_cpu_user_usage_seconds_total", "CPU time of the VMI in user mode", cpu.user),
                ("kubevirt_vmi_cpu_system_usage_seconds_total", "CPU time of the VMI in kernel mode", cpu.system),
            ] {
                self.counter(name, help, own(&[]), seconds(value));
            }
        }
        self.memory(stats, &own);
        self.load(stats, &own);
        // Only devices of the spec, each once: every name that a launcher invents would be a new series.
        let devices = &vmi.spec.domain.devices;
        let (vcpus, mut seen) = (api::overhead::vcpus(&vmi.spec.domain), BTreeSet::new());
        for vcpu in stats.vcpus.iter().filter(|vcpu| vcpu.id < vcpus && seen.insert(vcpu.id)) {
            self.vcpu(vcpu, &own);
        }
        for interface in &devices.interfaces {
            if let Some(stats) = stats.interfaces.iter().find(|known| known.name == interface.name) {
                self.interface(stats, &own);
            }
        }
        for disk in &devices.disks {
            if let Some(stats) = stats.disks.iter().find(|known| known.name == disk.name) {
                self.disk(stats, &own);
            }
        }
        for system in shown(&stats.file_systems) {
            let labels = own(&[
                ("disk_name", &system.name),
                ("mount_point", &system.mount_point),
                ("file_system_type", &system.r#type),
            ]);
            let (used, total) = (system.used_bytes as f64, system.total_bytes as f64);
            self.gauge(
                "kubevirt_vmi_filesystem_capacity_bytes",
                "Size of a file system of the guest",
                labels.clone(),
                total,
            );
            self.gauge(
                "kubevirt_vmi_filesystem_used_bytes",
                "Bytes in use of a file system of the guest",
                labels,
                used,
            );
        }
    }

    fn memory(&mut self, stats: &StatsReply, own: &impl Fn(&[(&str, &str)]) -> Vec<LabelPair>) {
        let Some(memory) = &stats.memory else { return };
        for (name, help, value) in [
            ("kubevirt_vmi_memory_resident_bytes", "Resident memory of the domain's process", memory.resident),
            ("kubevirt_vmi_memory_available_bytes", "Memory that the guest sees", memory.available),
            ("kubevirt_vmi_memory_unused_bytes", "Memory that the guest does not use at all", memory.unused),
            ("kubevirt_vmi_memory_cached_bytes", "Memory of the guest that holds copies of disks", memory.cached),
            ("kubevirt_vmi_memory_actual_balloon_bytes", "Size of the balloon", memory.actual_balloon),
            ("kubevirt_vmi_memory_usable_bytes", "Memory that the guest can give up without swapping", memory.usable),
            ("kubevirt_vmi_memory_domain_bytes", "Memory assigned to the domain", memory.domain),
            ("kubevirt_vmi_memory_swap_in_traffic_bytes", "Bytes that the guest has read from swap", memory.swap_in),
            ("kubevirt_vmi_memory_swap_out_traffic_bytes", "Bytes that the guest has written to swap", memory.swap_out),
        ] {
            if let Some(value) = value {
                self.gauge(name, help, own(&[]), value as f64 * KIB);
            }
        }
        for (name, help, value) in [
            ("kubevirt_vmi_memory_pgmajfault_total", "Page faults that needed a disk", memory.major_faults),
            ("kubevirt_vmi_memory_pgminfault_total", "Page faults that needed no disk", memory.minor_faults),
        ] {
            if let Some(value) = value {
                self.counter(name, help, own(&[]), value as f64);
            }
        }
    }

    fn load(&mut self, stats: &StatsReply, own: &impl Fn(&[(&str, &str)]) -> Vec<LabelPair>) {
        if let Some(pairs) = stats.cpu_affinity {
            self.gauge(
                "kubevirt_vmi_node_cpu_affinity",
                "Pairs of a virtual processor and a processor of the node on which it may run",
                own(&[]),
                pairs as f64,
            );
        }
        let Some(load) = &stats.load else { return };
        for (name, help, value) in [
            ("kubevirt_vmi_guest_load_1m", "Load of the guest in the last minute", load.one_minute),
            ("kubevirt_vmi_guest_load_5m", "Load of the guest in the last five minutes", load.five_minutes),
            ("kubevirt_vmi_guest_load_15m", "Load of the guest in the last fifteen minutes", load.fifteen_minutes),
        ] {
            if value.is_finite() && value >= 0.0 {
                self.gauge(name, help, own(&[]), value);
            }
        }
    }

    fn vcpu(&mut self, vcpu: &VcpuStats, own: &impl Fn(&[(&str, &str)]) -> Vec<LabelPair>) {
        let id = vcpu.id.to_string();
        // libvirt's virVcpuState.
        let state = match vcpu.state {
            0 => "offline",
            1 => "running",
            2 => "blocked",
            _ => "unknown",
        };
        self.counter(
            "kubevirt_vmi_vcpu_seconds_total",
            "Time that a virtual processor has spent, by its state now",
            own(&[("id", &id), ("state", state)]),
            seconds(vcpu.time),
        );
        for (name, help, value) in [
            ("kubevirt_vmi_vcpu_wait_seconds_total", "Time that a virtual processor has waited for input", vcpu.wait),
            ("kubevirt_vmi_vcpu_delay_seconds_total", "Time that a virtual processor was kept waiting", vcpu.delay),
        ] {
            if let Some(value) = value {
                self.counter(name, help, own(&[("id", &id)]), seconds(value));
            }
        }
    }

    fn interface(&mut self, stats: &InterfaceStats, own: &impl Fn(&[(&str, &str)]) -> Vec<LabelPair>) {
        let name = ("interface", stats.name.as_str());
        for (family, help, value) in [
            ("kubevirt_vmi_network_receive_bytes_total", "Bytes received", stats.receive_bytes),
            ("kubevirt_vmi_network_receive_packets_total", "Packets received", stats.receive_packets),
            ("kubevirt_vmi_network_receive_errors_total", "Errors while receiving", stats.receive_errors),
            ("kubevirt_vmi_network_receive_packets_dropped_total", "Packets dropped on receipt", stats.receive_drops),
            ("kubevirt_vmi_network_transmit_bytes_total", "Bytes sent", stats.transmit_bytes),
            ("kubevirt_vmi_network_transmit_packets_total", "Packets sent", stats.transmit_packets),
            ("kubevirt_vmi_network_transmit_errors_total", "Errors while sending", stats.transmit_errors),
            ("kubevirt_vmi_network_transmit_packets_dropped_total", "Packets dropped on sending", stats.transmit_drops),
        ] {
            self.counter(family, help, own(&[name]), value as f64);
        }
        for (direction, value) in [("rx", stats.receive_bytes), ("tx", stats.transmit_bytes)] {
            self.counter(
                "kubevirt_vmi_network_traffic_bytes_total",
                "Bytes received and sent; deprecated",
                own(&[name, ("type", direction)]),
                value as f64,
            );
        }
    }

    fn disk(&mut self, stats: &DiskStats, own: &impl Fn(&[(&str, &str)]) -> Vec<LabelPair>) {
        let name = ("drive", stats.name.as_str());
        for (family, help, value) in [
            ("kubevirt_vmi_storage_iops_read_total", "Reads", stats.read_requests as f64),
            ("kubevirt_vmi_storage_iops_write_total", "Writes", stats.write_requests as f64),
            ("kubevirt_vmi_storage_read_traffic_bytes_total", "Bytes read", stats.read_bytes as f64),
            ("kubevirt_vmi_storage_write_traffic_bytes_total", "Bytes written", stats.write_bytes as f64),
            ("kubevirt_vmi_storage_read_times_seconds_total", "Time spent reading", seconds(stats.read_time)),
            ("kubevirt_vmi_storage_write_times_seconds_total", "Time spent writing", seconds(stats.write_time)),
            ("kubevirt_vmi_storage_flush_requests_total", "Flushes", stats.flush_requests as f64),
            ("kubevirt_vmi_storage_flush_times_seconds_total", "Time spent flushing", seconds(stats.flush_time)),
        ] {
            self.counter(family, help, own(&[name]), value);
        }
    }
}

/// Returns the file systems that have metrics, each once. Guest agents list the last mount first, and the root last.
fn shown(systems: &[GuestFileSystem]) -> Vec<&GuestFileSystem> {
    let mut seen = BTreeSet::new();
    let once = systems.iter().rev().filter(|system| seen.insert((&system.name, &system.mount_point, &system.r#type)));
    let (full, mut shown): (Vec<_>, Vec<_>) = once.partition(|system| FULL.contains(&system.r#type.as_str()));
    shown.extend(full);
    shown.truncate(FILE_SYSTEMS);
    shown
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / NANOSECONDS
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value.chars().take(TEXT).collect());
    pair
}

/// Returns the labels: node, namespace, name, and the labels of the VMI.
fn identity(vmi: &VirtualMachineInstance, node: &str) -> Vec<LabelPair> {
    vec![label("node", node), label("namespace", &vmi.namespace().unwrap_or_default()), label("name", &vmi.name_any())]
}

fn labels_of(vmi: &VirtualMachineInstance, node: &str) -> Vec<LabelPair> {
    let mut list = identity(vmi, node);
    let mut own: BTreeMap<String, &str> = BTreeMap::new();
    for (name, value) in vmi.labels().iter().take(LABELS) {
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        own.insert(format!("kubernetes_vmi_label_{name}"), value);
    }
    list.extend(own.iter().map(|(name, value)| label(name, value)));
    list
}

#[cfg(test)]
mod tests {
    use api::vmi::{disks::Disk, network::Interface};
    use prometheus::{Encoder, TextEncoder};
    use protocol::{CpuStats, GuestLoad, MemoryStats};

    use super::*;

    #[test]
    fn metrics_have_the_names_and_units_of_the_reference() {
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.name = Some("m".into());
        vmi.metadata.namespace = Some("ns".into());
        vmi.metadata.labels = Some([("app.kubernetes.io/part-of".to_owned(), "shop".to_owned())].into());
        vmi.spec.domain.devices.interfaces = vec![Interface { name: "default".into(), ..Interface::default() }];
        vmi.spec.domain.devices.disks = vec![Disk { name: "root".into(), ..Disk::default() }];
        let stats = StatsReply {
            cpu: Some(CpuStats { time: 1_500_000_000, user: 0, system: 0 }),
            memory: Some(MemoryStats { resident: Some(4), ..MemoryStats::default() }),
            vcpus: vec![VcpuStats { id: 0, state: 1, time: 2_000_000_000, wait: None, delay: Some(500_000_000) }],
            interfaces: vec![InterfaceStats { name: "default".into(), receive_bytes: 7, ..InterfaceStats::default() }],
            disks: vec![DiskStats { name: "root".into(), flush_time: 3_000_000_000, ..DiskStats::default() }],
            file_systems: Vec::new(),
            load: Some(GuestLoad { one_minute: 1.5, five_minutes: f64::NAN, fifteen_minutes: -1.0 }),
            cpu_affinity: Some(8),
        };
        let mut families = Families::default();
        families.add_domain(&vmi, "n1", &stats);
        let mut text = Vec::new();
        TextEncoder::new().encode(&families.finish(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let own = r#"node="n1",namespace="ns",name="m",kubernetes_vmi_label_app_kubernetes_io_part_of="shop""#;
        for line in [
            format!("kubevirt_vmi_cpu_usage_seconds_total{{{own}}} 1.5"),
            format!("kubevirt_vmi_memory_resident_bytes{{{own}}} 4096"),
            format!(r#"kubevirt_vmi_vcpu_seconds_total{{{own},id="0",state="running"}} 2"#),
            format!(r#"kubevirt_vmi_vcpu_delay_seconds_total{{{own},id="0"}} 0.5"#),
            format!("kubevirt_vmi_node_cpu_affinity{{{own}}} 8"),
            format!("kubevirt_vmi_guest_load_1m{{{own}}} 1.5"),
            format!(r#"kubevirt_vmi_network_receive_bytes_total{{{own},interface="default"}} 7"#),
            format!(r#"kubevirt_vmi_storage_flush_times_seconds_total{{{own},drive="root"}} 3"#),
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
        assert!(!text.contains("kubevirt_vmi_memory_unused_bytes"), "not reported by the guest");
        assert!(!text.contains("vcpu_wait"));
        assert!(!text.contains("guest_load_5m") && !text.contains("guest_load_15m"), "no possible load");
    }

    #[test]
    fn migrations_have_the_metrics_of_the_reference() {
        let report = MigrationReport {
            total: 100,
            processed: 60,
            remaining: 40,
            rate: 7,
            dirty_rate: 3,
            ..MigrationReport::default()
        };
        let mut families = Families::default();
        families.add_migration(&VirtualMachineInstance::default(), "n1", &report);
        let mut text = Vec::new();
        TextEncoder::new().encode(&families.finish(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for (name, value) in [
            ("data_bytes_total", 100),
            ("data_processed_bytes", 60),
            ("data_remaining_bytes", 40),
            ("dirty_memory_rate_bytes", 3),
            ("memory_transfer_rate_bytes", 7),
        ] {
            let line = format!(r#"kubevirt_vmi_migration_{name}{{node="n1",namespace="",name=""}} {value}"#);
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn a_guest_with_many_mounts_has_metrics_of_its_root() {
        let system = |name: String, mount_point: String, kind: &str| GuestFileSystem {
            name,
            mount_point,
            r#type: kind.into(),
            ..GuestFileSystem::default()
        };
        for kind in ["ext4", "squashfs"] {
            let mount = |n: usize| system(format!("dev{n}"), format!("/mnt/{n}"), kind);
            let mut systems: Vec<_> = std::iter::repeat_with(|| mount(0)).take(40).collect();
            systems.extend((0..39).map(mount));
            systems.push(system("vda1".into(), "/".into(), "ext4"));
            let shown = shown(&systems);
            assert_eq!((shown[0].mount_point.as_str(), shown.len()), ("/", FILE_SYSTEMS), "{kind}");
        }
        let list = ["ext4", "squashfs", "xfs"].map(|kind| system(kind.into(), format!("/{kind}"), kind));
        let kinds: Vec<&str> = shown(&list).iter().map(|system| system.r#type.as_str()).collect();
        assert_eq!(kinds, ["xfs", "ext4", "squashfs"]);
    }

    #[test]
    fn cve_2026_13322_statistics_of_devices_that_the_vmi_lacks_are_ignored() {
        const MANY: usize = 10_000;
        let long = |n: usize| GuestFileSystem {
            name: n.to_string(),
            mount_point: "x".repeat(MANY),
            ..GuestFileSystem::default()
        };
        let stats = StatsReply {
            vcpus: vec![VcpuStats::default(); MANY],
            interfaces: vec![InterfaceStats::default(); MANY],
            disks: vec![DiskStats::default(); MANY],
            file_systems: (0..MANY).map(long).collect(),
            ..StatsReply::default()
        };
        let mut families = Families::default();
        families.add_domain(&VirtualMachineInstance::default(), "n1", &stats);
        let families = families.finish();
        let metrics: Vec<&Metric> = families.iter().flat_map(|family| family.get_metric()).collect();
        assert!(metrics.len() <= 2 * FILE_SYSTEMS + 3, "{}", metrics.len());
        let labels = metrics.iter().flat_map(|metric| metric.get_label());
        assert!(labels.into_iter().all(|label| label.value().len() <= TEXT));
    }

    #[test]
    fn cve_2024_31420_an_empty_reply_of_a_launcher_breaks_no_metrics() {
        let empty = StatsReply {
            cpu: None,
            memory: None,
            vcpus: vec![VcpuStats { id: u32::MAX, state: u32::MAX, time: u64::MAX, wait: None, delay: None }],
            interfaces: vec![InterfaceStats::default()],
            disks: vec![DiskStats::default()],
            file_systems: vec![GuestFileSystem::default()],
            load: None,
            cpu_affinity: None,
        };
        for stats in [StatsReply::default(), empty] {
            let mut families = Families::default();
            families.add_domain(&VirtualMachineInstance::default(), "n1", &stats);
            let families: Vec<MetricFamily> =
                families.finish().into_iter().filter(|family| !family.get_metric().is_empty()).collect();
            let mut text = Vec::new();
            TextEncoder::new().encode(&families, &mut text).unwrap();
        }
    }

    #[test]
    fn names_that_a_launcher_invents_are_no_series() {
        let mut vmi = VirtualMachineInstance::default();
        vmi.spec.domain.devices.interfaces = vec![Interface { name: "default".into(), ..Interface::default() }];
        vmi.spec.domain.devices.disks = vec![Disk { name: "root".into(), ..Disk::default() }];
        let interface = |name: &str| InterfaceStats { name: name.into(), ..InterfaceStats::default() };
        let disk = |name: &str| DiskStats { name: name.into(), ..DiskStats::default() };
        let vcpu = |id| VcpuStats { id, ..VcpuStats::default() };
        let stats = StatsReply {
            vcpus: vec![vcpu(7), vcpu(0), vcpu(0)],
            interfaces: vec![interface("a"), interface("default"), interface("default")],
            disks: vec![disk("b"), disk("root"), disk("root")],
            file_systems: vec![GuestFileSystem::default(); 2],
            ..StatsReply::default()
        };
        let mut families = Families::default();
        families.add_domain(&vmi, "n1", &stats);
        let families = families.finish();
        let mut series = BTreeSet::new();
        for family in &families {
            for metric in family.get_metric() {
                let labels: Vec<_> = metric.get_label().iter().map(|label| (label.name(), label.value())).collect();
                assert!(!labels.iter().any(|(_, value)| ["a", "b", "7"].contains(value)), "{labels:?}");
                assert!(series.insert((family.name(), labels)), "{} has one series twice", family.name());
            }
        }
        for name in ["kubevirt_vmi_vcpu_seconds_total", "kubevirt_vmi_network_receive_bytes_total"] {
            assert!(families.iter().any(|family| family.name() == name), "{name}");
        }
    }
}
