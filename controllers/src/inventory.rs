//! Metrics about the machines there are, made of the caches when somebody asks for metrics.
//!
//! Names and labels are those that dashboards look for. Only the replica that leads has caches, so only it tells.

mod details;

use std::sync::Arc;

use api::{
    EvictionStrategy, VirtualMachine, VirtualMachineInstance,
    condition::Condition,
    constants::{annotation, condition, label},
    instancetype::{
        MatchedKind,
        matcher::{Matcher, Role},
    },
};
use kube::ResourceExt;
use process::config::ConfigHandle;
use prometheus::{
    GaugeVec, IntGauge, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use self::details::Details;
use crate::{runtime::Key, world::World};

/// Prefix of the annotations by which a template says what it is for.
const TEMPLATE: &str = "vm.kubevirt.io/";
/// Stands for what nobody has said.
const NONE: &str = "<none>";
/// Stands for names of instance types and preferences that are the user's own: they may be many, and private.
const OTHER: &str = "<other>";

const MACHINE: [&str; 3] = ["node", "namespace", "name"];
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

/// The metrics of what is in the caches.
pub struct Inventory {
    world: Arc<World>,
    config: ConfigHandle,
}

impl Inventory {
    /// Metrics of what `world` holds.
    #[must_use]
    pub fn new(world: Arc<World>, config: ConfigHandle) -> Self {
        Self { world, config }
    }

    fn families(&self) -> Result<Vec<MetricFamily>, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        let vmi_info = gauge("kubevirt_vmi_info", "What a machine is", &VMI_INFO)?;
        let stuck = gauge("kubevirt_vmi_non_evictable", "1 if a machine is to move when asked but cannot", &MACHINE)?;
        let addresses = gauge("kubevirt_vmi_status_addresses", "Addresses of machines", &ADDRESSES)?;
        let outdated =
            IntGauge::new("kubevirt_vmi_number_of_outdated", "Machines whose launcher is of a former version")?;
        let vm_info = gauge("kubevirt_vm_info", "What a VirtualMachine is", &VM_INFO)?;
        let created = gauge(
            "kubevirt_vm_create_date_timestamp_seconds",
            "When a VirtualMachine was made",
            &["name", "namespace"],
        )?;
        let emulation =
            IntGauge::new("kubevirt_configuration_emulation_enabled", "1 while guests may run without KVM")?;

        let details = Details::new()?;
        let config = self.config.current();
        emulation.set(i64::from(config.use_emulation));
        let usual = &config.eviction_strategy;
        for vmi in self.world.instances.filter(|_| true) {
            let (namespace, name) = (vmi.namespace().unwrap_or_default(), vmi.name_any());
            let node = vmi.status.as_ref().and_then(|status| status.node_name.clone()).unwrap_or_default();
            let machine = [node.as_str(), &namespace, &name];
            let is_stuck = is_stuck(&vmi, usual);
            stuck.with_label_values(&machine).set(f64::from(u8::from(is_stuck)));
            if is_outdated(&vmi) {
                outdated.inc();
            }
            let labels = self.of_machine(&vmi, &machine, is_stuck);
            vmi_info.with_label_values(&labels.each_ref().map(String::as_str)).set(1.0);
            details.machine(&vmi);
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
        for vm in self.world.vms.filter(|_| true) {
            let labels = self.of_vm(&vm);
            vm_info.with_label_values(&labels.each_ref().map(String::as_str)).set(1.0);
            details.vm(&vm, &labels[9]);
            if let Some(at) = &vm.metadata.creation_timestamp {
                created.with_label_values(&[&labels[0], &labels[1]]).set(at.0.as_second() as f64);
            }
        }
        let collectors: [&dyn Collector; 7] =
            [&vmi_info, &stuck, &addresses, &outdated, &vm_info, &created, &emulation];
        let families = collectors.iter().flat_map(|collector| collector.collect()).chain(details.families());
        Ok(families.filter(|family| !family.get_metric().is_empty()).collect())
    }

    fn of_machine(&self, vmi: &VirtualMachineInstance, machine: &[&str; 3], is_stuck: bool) -> [String; 17] {
        let [node, namespace, name] = machine.map(str::to_owned);
        let status = vmi.status.clone().unwrap_or_default();
        let guest = status.guest_os_info;
        let phase = status.phase.map(|phase| phase.as_str().to_lowercase()).unwrap_or_default();
        let [os, workload, flavor] =
            ["os", "workload", "flavor"].map(|word| annotated(vmi.annotations(), &format!("{TEMPLATE}{word}")));
        let named = |name: &str, cluster: &str, kinds: [MatchedKind; 2]| {
            let names = [name, cluster].map(|key| vmi.annotations().get(key).map(String::as_str));
            let found = names.into_iter().zip(kinds).find_map(|(name, kind)| Some((kind, name?)));
            found.map_or_else(|| NONE.to_owned(), |(kind, name)| self.public_name(kind, &namespace, name))
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
        let pods = self.world.pods_of(vmi);
        let pod = pods.iter().find(|pod| {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            status.active_pods.get(uid).is_some_and(|on| *on == node)
        });
        let pod = pod.and_then(|pod| pod.metadata.name.clone()).unwrap_or_else(|| NONE.to_owned());
        let hardware = status.machine.map(|machine| machine.type_).unwrap_or_default();
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
        let machine = vm.spec.template.spec.as_ref().and_then(|spec| spec.domain.machine.as_ref());
        let [instance_type, preference] = Role::ALL.map(|role| {
            let matcher = Matcher::of(vm, role).filter(|matcher| !matcher.name.is_empty());
            let found = matcher.and_then(|matcher| Some((role.kind(&matcher.kind).ok()?, matcher.name)));
            found.map_or_else(|| NONE.to_owned(), |(kind, name)| self.public_name(kind, &namespace, &name))
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
            machine.map_or_else(|| NONE.to_owned(), |machine| machine.type_.clone()),
            instance_type,
            preference,
            status,
            group,
        ]
    }

    /// The name of an instance type or preference, if it comes from a vendor that is known.
    fn public_name(&self, kind: MatchedKind, namespace: &str, name: &str) -> String {
        let namespace = if kind.is_cluster_wide() { "" } else { namespace };
        let found = self.world.matched(kind).get(&Key::new(namespace, name));
        if found.is_some_and(|view| view.is_vendors) { name.to_owned() } else { OTHER.to_owned() }
    }
}

impl Collector for Inventory {
    /// None: what there is to tell differs from time to time.
    fn desc(&self) -> Vec<&Desc> {
        Vec::new()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.families().unwrap_or_else(|error| {
            tracing::warn!(%error, "the machines cannot be counted");
            Vec::new()
        })
    }
}

fn annotated(annotations: &std::collections::BTreeMap<String, String>, key: &str) -> String {
    annotations.get(key).map_or(NONE, String::as_str).to_owned()
}

fn is_outdated(vmi: &VirtualMachineInstance) -> bool {
    vmi.labels().contains_key(label::OUTDATED_LAUNCHER_IMAGE)
}

/// Whether a machine is to move when its node is drained, but cannot.
fn is_stuck(vmi: &VirtualMachineInstance, usual: &EvictionStrategy) -> bool {
    let strategy = vmi.spec.eviction_strategy.as_ref().unwrap_or(usual);
    let conditions = vmi.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let moves =
        conditions.iter().find(|known| known.type_ == condition::LIVE_MIGRATABLE).is_some_and(Condition::is_true);
    *strategy == EvictionStrategy::LiveMigrate && !moves
}

/// The group of a status in lower case.
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

    fn told(vms: &[Value], vmis: &[Value]) -> String {
        let world = Arc::new(World::default());
        vms.iter().for_each(|vm| world.vms.observe(serde_json::from_value(vm.clone()).unwrap()));
        vmis.iter().for_each(|vmi| world.instances.observe(serde_json::from_value(vmi.clone()).unwrap()));
        let registry = prometheus::Registry::new();
        let inventory = Inventory::new(world, ConfigHandle::fixed(ClusterConfig::default()));
        registry.register(Box::new(inventory)).unwrap();
        String::from_utf8(process::ops::encode(&registry).unwrap()).unwrap()
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
    fn machines_are_told_with_the_labels_that_dashboards_know() {
        let text = told(&[], &[vmi("None")]);
        let line = text.lines().find(|line| line.starts_with("kubevirt_vmi_info{")).unwrap();
        for part in [
            r#"evictable="true""#,
            r#"flavor="<none>""#,
            r#"guest_os_arch="x86_64""#,
            r#"guest_os_machine="pc-q35-10.0""#,
            r#"instance_type="<other>""#,
            r#"name="m",namespace="ns",node="n1""#,
            r#"os="debian13""#,
            r#"outdated="false""#,
            r#"phase="running""#,
            r#"preference="<none>""#,
            r#"vmi_pod="<none>""#,
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
        let stuck = told(&[], &[vmi("LiveMigrate")]);
        assert!(stuck.contains(r#"kubevirt_vmi_non_evictable{name="m",namespace="ns",node="n1"} 1"#), "{stuck}");
    }

    #[test]
    fn virtual_machines_are_told_with_their_status() {
        let text = told(
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
            r#"instance_type="<none>",machine_type="<none>""#,
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
    fn each_status_is_in_a_group() {
        for status in api::PrintableStatus::KNOWN {
            let group = status_group(&status.as_str().to_lowercase());
            let expected = status.as_str() == "WaitingForReceiver";
            assert_eq!(group == "<unknown>", expected, "{}", status.as_str());
        }
    }
}
