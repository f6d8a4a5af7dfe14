//! Defaults of VMI specs.
//!
//! [`spec`] sets the defaults that VM templates and VMIs share; it is also applied to a copy of a VM's template before the
//! template is validated. [`vmi`] sets the others when a VMI is created. [`trace`] sets the trace context.

mod features;
pub(crate) mod trace;
pub mod vmi;

use api::{
    VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::{VERSION, annotation},
    quantity::{self, QuantityError},
    vmi::{
        cpu::Cpu,
        disks::Disk,
        domain::Machine,
        memory::Memory,
        network::{Interface, InterfaceBridge, InterfaceMasquerade, Network, PodNetwork},
    },
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta};

use crate::context::addresses;

/// Name of the default network and interface.
const DEFAULT_NETWORK: &str = "default";
/// CPU request in thousandths that is not written into specs, because it is the default of the cluster.
const PLAIN_CPU_REQUEST: i64 = 100;

/// A default network of the cluster that is not allowed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DefaultNetworkError {
    /// Bridges on the pod network are forbidden.
    #[error("bridge interface is not enabled in kubevirt-config")]
    BridgeNotEnabled,
    /// Slirp was removed.
    #[error("slirp interface is deprecated as of v1.3")]
    SlirpDeprecated,
}

/// Sets the defaults that templates and VMIs share. Fails if the cluster's default network is not allowed.
pub fn spec(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) -> Result<(), DefaultNetworkError> {
    addresses::normalize(spec);
    platform(spec, config);
    resources(spec, config);
    topology(spec);
    pull_policies(spec);
    if spec.eviction_strategy.is_none() {
        spec.eviction_strategy = Some(config.eviction_strategy.clone());
    }
    network(spec, config)?;
    disks(spec);
    Ok(())
}

/// Records the API version of a new object in annotations, for migrations between API versions.
pub fn observed_version(metadata: &mut ObjectMeta) {
    let annotations = metadata.annotations.get_or_insert_default();
    for key in [annotation::LATEST_OBSERVED_API_VERSION, annotation::STORAGE_OBSERVED_API_VERSION] {
        annotations.insert(key.to_owned(), VERSION.to_owned());
    }
}

/// Adds default disks and the default network. Fails if the cluster's default network is not allowed.
pub fn attach(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) -> Result<(), DefaultNetworkError> {
    disks(spec);
    network(spec, config)
}

/// Sets architecture and machine type.
pub(crate) fn platform(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) {
    if is_empty(spec.architecture.as_ref()) {
        spec.architecture = Some(config.default_architecture.clone());
    }
    let default = &config.arch(spec.architecture.as_deref().unwrap_or_default()).machine_type;
    let machine = spec.domain.machine.get_or_insert_with(Machine::default);
    if machine.type_.is_empty() {
        machine.type_.clone_from(default);
    }
}

/// Sets requests from limits, and guest memory from requests, limits or the page size. A malformed amount is not copied, so
/// that it is rejected only where the user wrote it.
fn resources(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) {
    let domain = &mut spec.domain;
    let dedicated = domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement);
    let resources = &mut domain.resources;
    if let Some(limit) = resources.limits.get("cpu").filter(|limit| is_amount(limit) && !is_zero(limit))
        && resources.requests.get("cpu").is_none_or(is_zero)
    {
        resources.requests.insert("cpu".to_owned(), limit.clone());
    }
    if quantity::milli(&config.cpu_request) != Ok(PLAIN_CPU_REQUEST) && !dedicated {
        resources.requests.entry("cpu".to_owned()).or_insert_with(|| config.cpu_request.clone());
    }

    let memory = domain.memory.get_or_insert_with(Memory::default);
    if memory.guest.is_none() {
        let page = memory.hugepages.as_ref().and_then(|pages| pages.page_size.clone()).map(Quantity);
        let nonzero = |amounts: &std::collections::BTreeMap<String, Quantity>| {
            amounts.get("memory").filter(|amount| !is_zero(amount)).cloned()
        };
        let first = nonzero(&resources.requests).or_else(|| nonzero(&resources.limits)).or(page);
        memory.guest = first.filter(is_amount);
    }
}

/// Sets the CPU topology if it is not set at all.
fn topology(spec: &mut VirtualMachineInstanceSpec) {
    let resources = &spec.domain.resources;
    let cpus = |amount: Option<&Quantity>| {
        amount
            .and_then(|amount| quantity::units(amount).ok())
            .and_then(|cpus| u32::try_from(cpus).ok())
            .filter(|n| *n > 0)
    };
    let sockets = cpus(resources.limits.get("cpu")).or_else(|| cpus(resources.requests.get("cpu"))).unwrap_or(1);
    let cpu = spec.domain.cpu.get_or_insert_with(Cpu::default);
    let unset = |part: Option<u32>| part.unwrap_or(0) == 0;
    if unset(cpu.sockets) && unset(cpu.cores) && unset(cpu.threads) {
        cpu.sockets = Some(sockets);
        cpu.cores = Some(1);
        cpu.threads = Some(1);
    }
}

fn pull_policies(spec: &mut VirtualMachineInstanceSpec) {
    for disk in spec.volumes.iter_mut().filter_map(|volume| volume.container_disk.as_mut()) {
        if is_empty(disk.image_pull_policy.as_ref()) {
            disk.image_pull_policy = Some(pull_policy(&disk.image).to_owned());
        }
    }
}

/// Returns the pull policy of an image. An image without tag or with tag `latest` can change.
fn pull_policy(image: &str) -> &'static str {
    let moving = image.ends_with(":latest") || !image.contains([':', '@']);
    if moving { "Always" } else { "IfNotPresent" }
}

fn network(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) -> Result<(), DefaultNetworkError> {
    let devices = &mut spec.domain.devices;
    if devices.autoattach_pod_interface == Some(false) || !spec.networks.is_empty() || !devices.interfaces.is_empty() {
        return Ok(());
    }
    let mut interface = Interface { name: DEFAULT_NETWORK.to_owned(), ..Interface::default() };
    match config.default_network_interface.as_str() {
        "bridge" if !config.permit_bridge_interface_on_pod_network => {
            return Err(DefaultNetworkError::BridgeNotEnabled);
        }
        "bridge" => interface.bridge = Some(InterfaceBridge::default()),
        "slirp" => return Err(DefaultNetworkError::SlirpDeprecated),
        _ => interface.masquerade = Some(InterfaceMasquerade::default()),
    }
    devices.interfaces.push(interface);
    spec.networks.push(Network {
        name: DEFAULT_NETWORK.to_owned(),
        pod: Some(PodNetwork::default()),
        ..Network::default()
    });
    Ok(())
}

/// Adds a disk for each volume without disk or filesystem. The guest sees no claim of a memory dump or of saved memory.
pub fn disks(spec: &mut VirtualMachineInstanceSpec) {
    let devices = &mut spec.domain.devices;
    for volume in spec.volumes.iter().filter(|volume| volume.memory_dump.is_none()) {
        let used = devices.disks.iter().any(|disk| disk.name == volume.name)
            || devices.filesystems.iter().any(|filesystem| filesystem.name == volume.name);
        if !used {
            devices.disks.push(Disk { name: volume.name.clone(), ..Disk::default() });
        }
    }
}

/// Records the PCI topology of a guest with slots for hotplug.
pub(crate) fn pci_topology(spec: &VirtualMachineInstanceSpec, metadata: &mut ObjectMeta) {
    if has_pcie_hotplug(spec) {
        let annotations = metadata.annotations.get_or_insert_default();
        let version = annotations.entry(annotation::PCI_TOPOLOGY_VERSION.to_owned());
        version.or_insert_with(|| annotation::PCI_TOPOLOGY_V3.to_owned());
    }
}

/// Returns true if the machine type has PCI Express slots for hotplug.
fn has_pcie_hotplug(spec: &VirtualMachineInstanceSpec) -> bool {
    let arch = matches!(spec.architecture.as_deref(), None | Some("" | "amd64" | "arm64"));
    let machine_type = spec.domain.machine.as_ref().map(|machine| machine.type_.as_str());
    arch && machine_type.is_none_or(|type_| type_.contains("q35") || type_.starts_with("virt"))
}

/// Returns true if a text is missing or empty.
pub(crate) fn is_empty(text: Option<&String>) -> bool {
    text.is_none_or(String::is_empty)
}

/// Returns true if an amount is zero.
pub(crate) fn is_zero(amount: &Quantity) -> bool {
    quantity::milli(amount) == Ok(0)
}

/// Returns true if a text is a well-formed amount of any size.
pub(crate) fn is_amount(amount: &Quantity) -> bool {
    !matches!(quantity::units(amount), Err(QuantityError::Malformed(_)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn defaulted(object: Value, config: &ClusterConfig) -> Value {
        let mut vmi_spec: VirtualMachineInstanceSpec = serde_json::from_value(object).unwrap();
        spec(&mut vmi_spec, config).unwrap();
        serde_json::to_value(&vmi_spec).unwrap()
    }

    #[test]
    fn smallest_vmi_gets_platform_topology_and_network() {
        let spec = defaulted(
            json!({"domain": {"devices": {}, "memory": {"guest": "128Mi"}}, "volumes": [{"name": "cd", "containerDisk": {"image": "a:b"}}]}),
            &ClusterConfig::default(),
        );
        assert_eq!(
            spec,
            json!({
                "architecture": "amd64",
                "domain": {
                    "cpu": {"sockets": 1, "cores": 1, "threads": 1},
                    "devices": {
                        "disks": [{"name": "cd"}],
                        "interfaces": [{"name": "default", "bridge": {}}],
                    },
                    "machine": {"type": "q35"},
                    "memory": {"guest": "128Mi"},
                    "resources": {},
                },
                "evictionStrategy": "None",
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "cd", "containerDisk": {"image": "a:b", "imagePullPolicy": "IfNotPresent"}}],
            })
        );
    }

    #[test]
    fn defaults_are_set_once() {
        let config = ClusterConfig::default();
        let once = defaulted(json!({"domain": {"devices": {}}}), &config);
        assert_eq!(defaulted(once.clone(), &config), once);
    }

    #[test]
    fn guest_memory_follows_request_then_limit_then_page() {
        for (domain, want) in [
            (json!({"devices": {}, "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}}), "1Gi"),
            (json!({"devices": {}, "resources": {"limits": {"memory": "2Gi"}}}), "2Gi"),
            (json!({"devices": {}, "memory": {"hugepages": {"pageSize": "2Mi"}}}), "2Mi"),
        ] {
            let spec = defaulted(json!({"domain": domain}), &ClusterConfig::default());
            assert_eq!(spec["domain"]["memory"]["guest"], want);
        }
    }

    #[test]
    fn malformed_amounts_are_not_copied() {
        for domain in [
            json!({"devices": {}, "resources": {"requests": {"memory": "much"}, "limits": {"cpu": "all"}}}),
            json!({"devices": {}, "resources": {"limits": {"memory": "much"}}}),
            json!({"devices": {}, "memory": {"hugepages": {"pageSize": "2Mb"}}}),
        ] {
            let spec = defaulted(json!({"domain": domain}), &ClusterConfig::default());
            assert_eq!(spec["domain"]["memory"].get("guest"), None);
            assert_eq!(spec["domain"]["resources"].pointer("/requests/cpu"), None);
        }
    }

    #[test]
    fn cpu_request_follows_the_limit_then_the_cluster() {
        let request = |limits: Value, cluster: &str| {
            let config = ClusterConfig { cpu_request: Quantity(cluster.to_owned()), ..ClusterConfig::default() };
            let spec = defaulted(json!({"domain": {"devices": {}, "resources": {"limits": limits}}}), &config);
            spec["domain"]["resources"]["requests"]["cpu"].as_str().map(str::to_owned)
        };
        for (limits, cluster, want) in [
            (json!({"cpu": "2"}), "100m", Some("2")),
            (json!({"cpu": "2"}), "50m", Some("2")),
            (json!({"cpu": "0"}), "100m", None),
            (json!({"cpu": "0"}), "50m", Some("50m")),
            (json!({}), "50m", Some("50m")),
            (json!({}), "0.1", None),
        ] {
            assert_eq!(request(limits.clone(), cluster).as_deref(), want, "{limits} {cluster}");
        }
    }

    #[test]
    fn sockets_follow_the_cpu_limit_and_partial_topologies_stay() {
        let config = ClusterConfig::default();
        let spec = defaulted(json!({"domain": {"devices": {}, "resources": {"limits": {"cpu": "1500m"}}}}), &config);
        assert_eq!(spec["domain"]["cpu"]["sockets"], 2);
        assert_eq!(spec["domain"]["resources"]["requests"]["cpu"], "1500m");
        let spec = defaulted(json!({"domain": {"devices": {}, "cpu": {"cores": 3}}}), &config);
        assert_eq!(spec["domain"]["cpu"], json!({"cores": 3}));
    }

    #[test]
    fn vmi_without_pod_interface_gets_no_network() {
        let spec =
            defaulted(json!({"domain": {"devices": {"autoattachPodInterface": false}}}), &ClusterConfig::default());
        assert_eq!(spec.get("networks"), None);
    }

    #[test]
    fn default_network_follows_the_cluster() {
        let mut config = ClusterConfig { permit_bridge_interface_on_pod_network: false, ..ClusterConfig::default() };
        assert!(super::spec(&mut VirtualMachineInstanceSpec::default(), &config).is_err());
        config.default_network_interface = "masquerade".to_owned();
        let spec = defaulted(json!({"domain": {"devices": {}}}), &config);
        assert_eq!(spec["domain"]["devices"]["interfaces"], json!([{"name": "default", "masquerade": {}}]));
        config.default_network_interface = "slirp".to_owned();
        assert!(super::spec(&mut VirtualMachineInstanceSpec::default(), &config).is_err());
    }

    #[test]
    fn pull_policy_follows_the_tag() {
        for (image, want) in [
            ("a", "Always"),
            ("a:latest", "Always"),
            ("a:1", "IfNotPresent"),
            ("a@sha256:0", "IfNotPresent"),
            ("host:5000/a", "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(image), want, "{image}");
        }
    }
}
