//! Metrics of VMs and VMIs, computed from the caches at each scrape.
//!
//! Dashboards depend on their names and labels. Only the leader exports them.

mod amounts;
mod chosen;
mod copies;
mod details;
mod disks;
mod labels;
mod migrations;

use std::sync::Arc;

use api::{
    EvictionStrategy, VirtualMachine, VirtualMachineInstance,
    condition::Condition,
    constants::{annotation, condition},
    instancetype::{
        MatchedKind,
        matcher::{Matcher, Role, status_ref},
    },
};
use daemon::config::ConfigHandle;
use jiff::Timestamp;
use kube::ResourceExt;
use prometheus::{
    GaugeVec, IntCounterVec, IntGauge, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use self::{
    amounts::Amounts,
    chosen::Chosen,
    copies::Copies,
    details::Details,
    disks::Disks,
    labels::{Filter, VmLabels},
    migrations::Migrations,
};
use crate::{
    cache::Key,
    resources::{
        Caches,
        config_maps::VM_LABELS_FILTER,
        migrations::MigrationIndex,
        vmis::{counts_as_outdated, is_outdated},
        vms::instancetype_key,
    },
    runtime::Metrics,
};

/// Prefix of the annotations that describe the purpose of a template.
const TEMPLATE: &str = "vm.kubevirt.io/";
/// Replaces names of users' own instance types and preferences, which can be many and private.
const OTHER: &str = "<other>";

const VMI: [&str; 3] = ["node", "namespace", "name"];
const VMI_INFO: [&str; 17] = [
    "node",
    "namespace",
    "name",
    "phase",
    "os",
    "workload",
    "flavor",
    "instance_type",
    "preference",
    "guest_os_kernel_release",
    "guest_os_machine",
    "guest_os_arch",
    "guest_os_name",
    "guest_os_version_id",
    "evictable",
    "outdated",
    "vmi_pod",
];
const ADDRESSES: [&str; 7] = ["node", "namespace", "name", "vnic_name", "interface_name", "address", "type"];
const VM_INFO: [&str; 10] = [
    "name",
    "namespace",
    "os",
    "workload",
    "flavor",
    "machine_type",
    "instance_type",
    "preference",
    "status",
    "status_group",
];

/// Metrics of the objects in the caches.
pub(crate) struct Inventory {
    caches: Arc<Caches>,
    config: ConfigHandle,
    metrics: Metrics,
}

impl Inventory {
    /// Creates the metrics of the objects in `caches`.
    #[must_use]
    pub(crate) fn new(caches: Arc<Caches>, config: ConfigHandle, metrics: Metrics) -> Self {
        Self { caches, config, metrics }
    }

    fn families(&self) -> Result<Vec<MetricFamily>, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        let vmi_info = gauge("kubevirt_vmi_info", "Properties of VMIs", &VMI_INFO)?;
        let stuck = gauge("kubevirt_vmi_non_evictable", "1 if a VMI must migrate on eviction but cannot", &VMI)?;
        let addresses = gauge("kubevirt_vmi_status_addresses", "Addresses of VMIs", &ADDRESSES)?;
        let outdated = IntGauge::new(
            "kubevirt_vmi_number_of_outdated",
            "VMIs whose launcher has another version, or that wait for a migration",
        )?;
        let emulation =
            IntGauge::new("kubevirt_configuration_emulation_enabled", "1 while guests may run without KVM")?;

        let details = Details::new()?;
        let migrations = Migrations::new()?;
        self.caches.migrations.all().iter().for_each(|migration| migrations.migration(migration));
        let copies = Copies::new(Timestamp::now())?;
        self.caches.vm_snapshots.all().iter().for_each(|snapshot| copies.snapshot(snapshot));
        self.caches.vm_snapshot_contents.all().iter().for_each(|content| copies.content(content));
        self.caches.vm_restores.all().iter().for_each(|restore| copies.restore(restore));
        self.caches.vm_clones.all().iter().for_each(|clone| copies.clone(clone));
        let config = self.config.current();
        emulation.set(i64::from(config.use_emulation));
        let usual = &config.eviction_strategy;
        for vmi in self.caches.vmis.all() {
            let (namespace, name) = (vmi.namespace().unwrap_or_default(), vmi.name_any());
            let node = vmi.status.as_ref().and_then(|status| status.node_name.clone()).unwrap_or_default();
            let vmi_labels = [node.as_str(), &namespace, &name];
            let is_stuck = is_stuck(&vmi, usual);
            stuck.with_label_values(&vmi_labels).set(f64::from(u8::from(is_stuck)));
            if counts_as_outdated(&vmi) {
                outdated.inc();
            }
            let labels = self.of_vmi(&vmi, &vmi_labels, is_stuck);
            vmi_info.with_label_values(&labels.each_ref().map(String::as_str)).set(1.0);
            details.vmi(&vmi);
            migrations.vmi(&vmi, |uid| {
                let all = self.caches.migrations.by(&MigrationIndex::Vmi(Key::of(&vmi.metadata)));
                all.iter()
                    .find(|migration| migration.metadata.uid.as_deref() == Some(uid))
                    .map(|known| known.name_any())
            });
            for interface in vmi.status.iter().flat_map(|status| &status.interfaces) {
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                let address = text(&interface.ip_address);
                let kind = if address.is_empty() { "SystemInterface" } else { "ExternalInterface" };
                let (vnic, own) = (text(&interface.name), text(&interface.interface_name));
                if address.is_empty() && vnic.is_empty() && own.is_empty() {
                    continue;
                }
                let labels = [node.as_str(), &namespace, &name, &vnic, &own, &address, kind];
                addresses.with_label_values(&labels).set(1.0);
            }
        }
        let collectors: [&dyn Collector; 5] = [&vmi_info, &stuck, &addresses, &outdated, &emulation];
        let families = collectors.iter().flat_map(|collector| collector.collect()).chain(self.syncs()?);
        let families = families.chain(self.vm_families(&details)?).chain(details.families());
        let families = families.chain(migrations.families()).chain(copies.families());
        Ok(families.filter(|family| !family.get_metric().is_empty()).collect())
    }

    /// Returns the numbers of decisions of this replica.
    fn syncs(&self) -> Result<Vec<MetricFamily>, prometheus::Error> {
        let syncs = Opts::new("kubevirt_vmi_sync_total", "Decisions about a VMI");
        let syncs = IntCounterVec::new(syncs, &["namespace", "name"])?;
        for (vmi, count) in self.metrics.syncs() {
            syncs.with_label_values(&[&vmi.namespace, &vmi.name]).inc_by(count);
        }
        Ok(syncs.collect().into_iter().filter(|family| !family.get_metric().is_empty()).collect())
    }

    /// Returns the metrics of VMs, except those in `details`, to which it adds the VMs.
    fn vm_families(&self, details: &Details) -> Result<Vec<MetricFamily>, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        let info = gauge("kubevirt_vm_info", "Properties of VMs", &VM_INFO)?;
        let created =
            gauge("kubevirt_vm_create_date_timestamp_seconds", "Creation time of VMs", &["name", "namespace"])?;
        let (amounts, disks, chosen) = (Amounts::new()?, Disks::new()?, Chosen::new(&self.caches));
        let mut vm_labels = VmLabels::new(self.filter());
        for vm in self.caches.vms.all() {
            let labels = self.of_vm(&vm);
            let (name, namespace) = (labels[0].as_str(), labels[1].as_str());
            info.with_label_values(&labels.each_ref().map(String::as_str)).set(1.0);
            details.vm(&vm, &labels[9]);
            if let Some(domain) = chosen.domain(&vm) {
                amounts.vm(name, namespace, &domain);
            }
            disks.vm(&vm, |claim| self.caches.claims.get(&Key::new(namespace, claim)));
            vm_labels.vm(&vm);
            if let Some(at) = &vm.metadata.creation_timestamp {
                created.with_label_values(&[name, namespace]).set(at.0.as_second() as f64);
            }
        }
        let families = [info.collect(), created.collect(), amounts.families(), disks.families(), vm_labels.families()];
        Ok(families.into_iter().flatten().collect())
    }

    /// Returns the filter of the labels of VMs. The cache contains ConfigMaps of the install namespace only.
    fn filter(&self) -> Filter {
        let maps = self.caches.config_maps.all();
        let map = maps.iter().find(|map| map.metadata.name.as_deref() == Some(VM_LABELS_FILTER));
        Filter::of(map.map(|map| &**map))
    }

    fn of_vmi(&self, vmi: &VirtualMachineInstance, names: &[&str; 3], is_stuck: bool) -> [String; 17] {
        let [node, namespace, name] = names.map(str::to_owned);
        let status = vmi.status.clone().unwrap_or_default();
        let guest = status.guest_os_info;
        let phase = status.phase.map(|phase| phase.as_str().to_lowercase()).unwrap_or_default();
        let [os, workload, flavor] =
            ["os", "workload", "flavor"].map(|word| annotated(vmi.annotations(), &format!("{TEMPLATE}{word}")));
        let named = |name: &str, cluster: &str, kinds: [MatchedKind; 2]| {
            let names = [name, cluster].map(|key| vmi.annotations().get(key).map(String::as_str));
            let found = names.into_iter().zip(kinds).find_map(|(name, kind)| Some((kind, name?)));
            found.map(|(kind, name)| self.public_name(kind, &namespace, name)).unwrap_or_default()
        };
        let instance_type = named(
            annotation::INSTANCETYPE,
            annotation::CLUSTER_INSTANCETYPE,
            [MatchedKind::Instancetype, MatchedKind::ClusterInstancetype],
        );
        let preference = named(
            annotation::PREFERENCE,
            annotation::CLUSTER_PREFERENCE,
            [MatchedKind::Preference, MatchedKind::ClusterPreference],
        );
        let pods = self.caches.pods_of(vmi);
        let pod = pods.iter().find(|pod| {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            status.active_pods.get(uid).is_some_and(|on| *on == node)
        });
        let pod = pod.and_then(|pod| pod.metadata.name.clone()).unwrap_or_default();
        let hardware = status.machine.map(|hardware| hardware.type_).unwrap_or_default();
        [
            node,
            namespace.clone(),
            name,
            phase,
            os,
            workload,
            flavor,
            instance_type,
            preference,
            guest.kernel_release.unwrap_or_default(),
            hardware,
            guest.machine.unwrap_or_default(),
            guest.name.unwrap_or_default(),
            guest.version_id.unwrap_or_default(),
            (!is_stuck).to_string(),
            is_outdated(vmi).to_string(),
            pod,
        ]
    }

    fn of_vm(&self, vm: &VirtualMachine) -> [String; 10] {
        let namespace = vm.namespace().unwrap_or_default();
        let annotations = vm.spec.template.metadata.annotations.clone().unwrap_or_default();
        let [os, workload, flavor] =
            ["os", "workload", "flavor"].map(|word| annotated(&annotations, &format!("{TEMPLATE}{word}")));
        let hardware = vm.spec.template.spec.as_ref().and_then(|spec| spec.domain.machine.as_ref());
        let [instance_type, preference] = Role::ALL.map(|role| {
            let matcher = Matcher::of(vm, role).filter(|matcher| !matcher.name.is_empty());
            let found = matcher.and_then(|matcher| {
                let kind = matcher.matched_kind(role, status_ref(vm, role)).ok()?;
                Some((kind, matcher.name))
            });
            found.map(|(kind, name)| self.public_name(kind, &namespace, &name)).unwrap_or_default()
        });
        let status = vm.status.as_ref().and_then(|status| status.printable_status.as_ref());
        let status = status.map(|status| status.as_str().to_lowercase()).unwrap_or_default();
        let group = status_group(&status).to_owned();
        [
            vm.name_any(),
            namespace,
            os,
            workload,
            flavor,
            hardware.map(|hardware| hardware.type_.clone()).unwrap_or_default(),
            instance_type,
            preference,
            status,
            group,
        ]
    }

    /// Returns the name of an instance type or preference if it comes from a known vendor.
    fn public_name(&self, kind: MatchedKind, namespace: &str, name: &str) -> String {
        let found = self.caches.instancetypes(kind).get(&instancetype_key(kind, namespace, name));
        if found.is_some_and(|object| object.is_vendors) { name.to_owned() } else { OTHER.to_owned() }
    }
}

impl Collector for Inventory {
    /// Returns none: the metrics differ between scrapes.
    fn desc(&self) -> Vec<&Desc> {
        Vec::new()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Every replica has caches. With metrics of all of them, dashboards would count each object several times. Decisions are those of
        // one replica, which need not be the leader.
        let families = if self.metrics.is_leading() { self.families() } else { self.syncs() };
        families.unwrap_or_else(|error| {
            tracing::warn!(%error, "metrics of VMs and VMIs cannot be computed");
            Vec::new()
        })
    }
}

fn annotated(annotations: &std::collections::BTreeMap<String, String>, key: &str) -> String {
    annotations.get(key).cloned().unwrap_or_default()
}

/// Returns true for a VMI that must migrate when its node is drained, but cannot.
fn is_stuck(vmi: &VirtualMachineInstance, usual: &EvictionStrategy) -> bool {
    let strategy = vmi.spec.eviction_strategy.as_ref().unwrap_or(usual);
    let conditions = vmi.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let moves =
        conditions.iter().find(|known| known.type_ == condition::LIVE_MIGRATABLE).is_some_and(Condition::is_true);
    *strategy == EvictionStrategy::LiveMigrate && !moves
}

/// Returns the group of a status in lower case.
fn status_group(status: &str) -> &'static str {
    match status {
        "provisioning" | "starting" | "waitingforvolumebinding" => "starting",
        "running" => "running",
        "migrating" => "migrating",
        "stopped" | "paused" | "stopping" | "terminating" => "non_running",
        "crashloopbackoff" | "unknown" | "errorunschedulable" | "errimagepull" | "imagepullbackoff"
        | "errorpvcnotfound" | "datavolumeerror" => "error",
        _ => "<unknown>",
    }
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;
    use serde_json::{Value, json};

    use super::*;

    fn shown(vms: &[Value], vmis: &[Value]) -> String {
        let caches = Arc::new(Caches::default());
        vms.iter().for_each(|vm| caches.vms.observe(serde_json::from_value(vm.clone()).unwrap()));
        vmis.iter().for_each(|vmi| caches.vmis.observe(serde_json::from_value(vmi.clone()).unwrap()));
        let registry = prometheus::Registry::new();
        let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
        metrics.set_leading(true);
        let inventory = Inventory::new(caches, ConfigHandle::fixed(ClusterConfig::default()), metrics);
        registry.register(Box::new(inventory)).unwrap();
        String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap()
    }

    fn vmi(eviction: &str) -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "namespace": "ns", "uid": "u", "annotations": {
                "vm.kubevirt.io/os": "debian13", "kubevirt.io/instancetype-name": "secret"}},
            "spec": {"domain": {"devices": {}}, "evictionStrategy": eviction},
            "status": {
                "phase": "Running", "nodeName": "n1", "machine": {"type": "pc-q35-10.0"},
                "guestOSInfo": {"machine": "x86_64"},
                "interfaces": [{"name": "default", "interfaceName": "eth0", "ipAddress": "10.1.0.9"}],
            },
        })
    }

    #[test]
    fn vmis_are_shown_with_the_labels_that_dashboards_use() {
        let text = shown(&[], &[vmi("None")]);
        let line = text.lines().find(|line| line.starts_with("kubevirt_vmi_info{")).unwrap();
        for part in [
            r#"evictable="true""#,
            r#"flavor="""#,
            r#"guest_os_arch="x86_64""#,
            r#"guest_os_machine="pc-q35-10.0""#,
            r#"instance_type="<other>""#,
            r#"name="m",namespace="ns",node="n1""#,
            r#"os="debian13""#,
            r#"outdated="false""#,
            r#"phase="running""#,
            r#"preference="""#,
            r#"vmi_pod="""#,
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        let known = |wanted: &str| assert!(text.lines().any(|line| line == wanted), "{wanted} is not in {text}");
        known(
            r#"kubevirt_vmi_status_addresses{address="10.1.0.9",interface_name="eth0",name="m",namespace="ns",node="n1",type="ExternalInterface",vnic_name="default"} 1"#,
        );
        known(r#"kubevirt_vmi_non_evictable{name="m",namespace="ns",node="n1"} 0"#);
        known("kubevirt_vmi_number_of_outdated 0");
        known("kubevirt_configuration_emulation_enabled 0");
        let stuck = shown(&[], &[vmi("LiveMigrate")]);
        assert!(stuck.contains(r#"kubevirt_vmi_non_evictable{name="m",namespace="ns",node="n1"} 1"#), "{stuck}");
    }

    #[test]
    fn vms_are_shown_with_their_status() {
        let text = shown(
            &[json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
                "metadata": {"name": "v", "namespace": "ns", "creationTimestamp": "2030-01-01T00:00:00Z"},
                "spec": {"preference": {"name": "p"}, "template": {"spec": {"domain": {"devices": {}}}}},
                "status": {"printableStatus": "ErrImagePull"},
            })],
            &[],
        );
        let line = text.lines().find(|line| line.starts_with("kubevirt_vm_info{")).unwrap();
        for part in [
            r#"instance_type="",machine_type="""#,
            r#"preference="<other>""#,
            r#"status="errimagepull",status_group="error""#,
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(
            text.contains(r#"kubevirt_vm_create_date_timestamp_seconds{name="v",namespace="ns"} 1893456000"#),
            "{text}"
        );
        assert!(!text.contains("kubevirt_vmi_info"), "{text}");
    }

    #[test]
    fn vms_are_shown_with_resources_disks_and_admitted_labels() {
        let caches = Arc::new(Caches::default());
        let map = json!({
            "metadata": {"name": "kubevirt-vm-labels-config", "namespace": "kubevirt", "resourceVersion": "1"},
            "data": {"ignorelist": "secret"},
        });
        caches.config_maps.observe(serde_json::from_value(map).unwrap());
        let claim = json!({
            "metadata": {"name": "c", "namespace": "ns", "resourceVersion": "1"},
            "spec": {"resources": {"requests": {"storage": "1Gi"}}},
        });
        let claim: k8s_openapi::api::core::v1::PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        caches.claims.observe(claim.into());
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "v", "namespace": "ns", "labels": {"app": "shop", "secret": "x"}},
            "spec": {"template": {"spec": {
                "domain": {"cpu": {"cores": 2}, "devices": {}},
                "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}],
            }}},
        });
        caches.vms.observe(serde_json::from_value(vm).unwrap());
        let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
        metrics.set_leading(true);
        for _ in 0..3 {
            metrics.synced(&Key::new("ns", "v"));
        }
        metrics.synced(&Key::new("ns", "gone"));
        metrics.forget_syncs(&Key::new("ns", "gone"));
        let registry = prometheus::Registry::new();
        let inventory = Inventory::new(caches, ConfigHandle::fixed(ClusterConfig::default()), metrics);
        registry.register(Box::new(inventory)).unwrap();
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        for line in [
            r#"kubevirt_vm_labels{name="v",namespace="ns",label_app="shop"} 1"#,
            r#"kubevirt_vm_disk_allocated_size_bytes{device="root",name="v",namespace="ns",persistentvolumeclaim="c",volume_mode="Filesystem"} 1073741824"#,
            r#"kubevirt_vm_resource_requests{name="v",namespace="ns",resource="cpu",source="domain",unit="cores"} 2"#,
            r#"kubevirt_vmi_sync_total{name="v",namespace="ns"} 3"#,
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
        assert!(!text.contains("gone"), "{text}");
    }

    #[test]
    fn each_status_is_in_a_group() {
        for status in api::PrintableStatus::KNOWN {
            let group = status_group(&status.as_str().to_lowercase());
            let expected = status.as_str() == "WaitingForReceiver";
            assert_eq!(group == "<unknown>", expected, "{}", status.as_str());
        }
    }
}
