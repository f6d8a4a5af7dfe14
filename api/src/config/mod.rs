//! Cluster configuration: values of the `KubeVirt` object merged over the defaults.
//!
//! Zero values (0, false, empty text or list) in the object do not override a default, except for fields with a meaningful
//! zero (`memBalloonStatsPeriod`, log verbosity and all explicit booleans).

mod attachment;
mod live_update;
mod machine;
mod migrations;
mod placement;
mod request_limits;

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{NodeSelectorTerm, ResourceRequirements},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector},
};
use thiserror::Error;

pub use self::{
    live_update::LiveUpdateLimits,
    machine::{ArchConfig, Smbios},
    migrations::Migrations,
    request_limits::{RequestLimit, RequestLimits},
};

use crate::{
    FeatureGate,
    constants::{annotation, component},
    enums::EvictionStrategy,
    kubevirt::{
        configuration::{ArchSpecificConfiguration, KubeVirtConfiguration, TlsConfiguration, VirtualMachineOptions},
        developer::LogVerbosity,
        network::PermittedHostDevices,
        spec::KubeVirt,
    },
};

/// Reasons why a configuration is invalid.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ConfigError {
    /// The pull policy is unknown to Kubernetes.
    #[error("imagePullPolicy {0:?} is none of Always, IfNotPresent, Never")]
    ImagePullPolicy(String),
    /// The memory overcommit must be positive.
    #[error("developerConfiguration.memoryOvercommit {0} must be greater than 0")]
    MemoryOvercommit(i32),
    /// The CPU ratio must be positive.
    #[error("developerConfiguration.cpuAllocationRatio {0} must be greater than 0")]
    CpuAllocationRatio(i32),
    /// The tolerated percentage is out of range.
    #[error("developerConfiguration.pvcTolerateLessSpaceUpToPercent {0} must be between 0 and 100")]
    PvcTolerateLessSpace(i32),
    /// The binding of the default interface is unknown.
    #[error("network.defaultNetworkInterface {0:?} is none of bridge, slirp, masquerade")]
    DefaultNetworkInterface(String),
    /// The ratio is not a valid number.
    #[error("additionalGuestMemoryOverheadRatio {0:?} must be a number of at least 1")]
    OverheadRatio(String),
    /// The number of VMIs per node is out of range.
    #[error("virtualMachineInstancesPerNode {0} must be between 1 and {max}", max = MAX_INSTANCES_PER_NODE)]
    InstancesPerNode(i32),
    /// A quantity is invalid.
    #[error("{field}: {source}")]
    Quantity {
        /// Path below `spec.configuration`.
        field: &'static str,
        /// The cause.
        source: crate::quantity::QuantityError,
    },
}

/// Effect of changes of a VM's template on its running VMI.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RolloutStrategy {
    /// Changes are applied to the running VMI if possible.
    #[default]
    LiveUpdate,
    /// Changes are applied at the next start.
    Stage,
}

/// Treatment of the instance type and preference that a VM refers to.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ReferencePolicy {
    /// The VM keeps its references, and copies are stored.
    #[default]
    Reference,
    /// The specs are written into the VM, unless copies are stored already.
    Expand,
    /// The specs are written into the VM, and stored copies are deleted.
    ExpandAll,
}

/// The effective configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterConfig {
    /// `resourceVersion` of the source object; empty for the built-in defaults.
    pub resource_version: String,
    /// Run VMIs without KVM.
    pub use_emulation: bool,
    /// Pull policy of launcher images.
    pub image_pull_policy: String,
    /// Default CPU model; `None` stands for `host-model`.
    pub cpu_model: Option<String>,
    /// Default CPU request per vCPU.
    pub cpu_request: Quantity,
    /// vCPUs per requested host CPU.
    pub cpu_allocation_ratio: u32,
    /// Guest memory per requested memory in percent.
    pub memory_overcommit: u32,
    /// Factor for the memory overhead.
    pub overhead_ratio: Option<f64>,
    /// Default architecture.
    pub default_architecture: String,
    /// Settings of amd64.
    pub amd64: ArchConfig,
    /// Settings of arm64.
    pub arm64: ArchConfig,
    /// Settings of s390x.
    pub s390x: ArchConfig,
    /// CPU models that are never offered.
    pub obsolete_cpu_models: BTreeMap<String, bool>,
    /// SMBIOS system strings.
    pub smbios: Smbios,
    /// Node labels required by all VMIs.
    pub node_selectors: BTreeMap<String, String>,
    /// Terms for the nodes of all VMIs, of which a node must match one; empty for no restriction.
    pub workload_terms: Vec<NodeSelectorTerm>,
    /// Runtime class of launcher pods.
    pub default_runtime_class: Option<String>,
    /// Interval of balloon statistics in seconds; 0 disables them.
    pub mem_balloon_stats_period: u32,
    /// Default eviction strategy of VMIs.
    pub eviction_strategy: EvictionStrategy,
    /// Effect of template changes on running VMIs.
    pub vm_rollout_strategy: RolloutStrategy,
    /// Sizes to which VMIs can grow while they run.
    pub live_update: LiveUpdateLimits,
    /// Treatment of instance types and preferences that VMs refer to.
    pub reference_policy: ReferencePolicy,
    /// Taint of nodes that are being drained.
    pub node_drain_taint_key: String,
    /// Settings of live migrations.
    pub migrations: Migrations,
    /// Binding of the default interface: `bridge` or `masquerade`.
    pub default_network_interface: String,
    /// Allows bridge binding on the pod network.
    pub permit_bridge_interface_on_pod_network: bool,
    /// Host devices that VMIs may use; any resource if unset.
    pub permitted_host_devices: Option<PermittedHostDevices>,
    /// Allows SCSI persistent reservations.
    pub persistent_reservation: bool,
    /// Storage class of claims with the state of VMs; default: the default class.
    pub vm_state_storage_class: Option<String>,
    /// Percentage by which a claim may be too small for its disk.
    pub pvc_tolerate_less_space_up_to_percent: u32,
    /// Bytes left free on a claim.
    pub minimum_reserve_pvc_bytes: u64,
    /// TSC frequency in Hz that all nodes support.
    pub minimum_cluster_tsc_frequency: Option<i64>,
    /// SELinux type of launcher pods.
    pub selinux_launcher_type: Option<String>,
    /// Seccomp profile for launcher pods below the kubelet's directory; default: the profile of the runtime.
    pub seccomp_localhost_profile: Option<String>,
    /// Maximum number of VMIs per node; default: the flag of virt-handler.
    pub virtual_machine_instances_per_node: Option<u32>,
    /// Copies serial consoles to the pod's log by default.
    pub log_serial_console: bool,
    /// Enables free page reporting by default.
    pub free_page_reporting: bool,
    /// Namespaces whose VMIs get a CPU limit automatically.
    pub auto_cpu_limit_namespaces: Option<LabelSelector>,
    /// Nodes with kernel same-page merging; none without a selector.
    pub ksm_nodes: Option<LabelSelector>,
    /// Lowest TLS version and ciphers of servers.
    pub tls: TlsConfiguration,
    /// Gives EFI guests VGA instead of bochs.
    pub vga_display_for_efi: bool,
    /// Omits the backup hooks of launcher pods, which freeze guests.
    pub skip_backup_hooks: bool,
    /// New VMIs with an isolated emulator have an even number of CPUs; the value of their annotation.
    pub even_cpus: Option<String>,
    /// False disables virt-template; its feature gate must be enabled too.
    pub virt_template: bool,
    /// Allows profiling of components.
    pub cluster_profiler: bool,
    /// Enabled feature gates.
    pub feature_gates: Vec<String>,
    /// Disabled feature gates.
    pub disabled_feature_gates: Vec<String>,
    /// Verbosity by component.
    pub log_verbosity: LogVerbosity,
    /// Limits of requests to the API server.
    pub request_limits: RequestLimits,
    /// Resources of attachment pods.
    pub attachment_resources: ResourceRequirements,
}

const DEFAULT_VERBOSITY: u64 = 2;
/// Limits device units per node, since kubelet receives each one separately.
const MAX_INSTANCES_PER_NODE: u32 = 10_000;

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            resource_version: String::new(),
            use_emulation: false,
            image_pull_policy: "IfNotPresent".to_owned(),
            cpu_model: None,
            cpu_request: Quantity("100m".to_owned()),
            cpu_allocation_ratio: 10,
            memory_overcommit: 100,
            overhead_ratio: None,
            default_architecture: "amd64".to_owned(),
            amd64: ArchConfig::new("q35", &["q35*", "pc-q35*"], "/usr/share/OVMF"),
            arm64: ArchConfig::new("virt", &["virt*"], "/usr/share/AAVMF"),
            s390x: ArchConfig::new("s390-ccw-virtio", &["s390-ccw-virtio*"], ""),
            obsolete_cpu_models: BTreeMap::new(),
            smbios: Smbios::default(),
            node_selectors: BTreeMap::new(),
            workload_terms: Vec::new(),
            default_runtime_class: None,
            mem_balloon_stats_period: 10,
            eviction_strategy: EvictionStrategy::None,
            vm_rollout_strategy: RolloutStrategy::LiveUpdate,
            live_update: LiveUpdateLimits::default(),
            reference_policy: ReferencePolicy::Reference,
            node_drain_taint_key: "kubevirt.io/drain".to_owned(),
            migrations: Migrations::default(),
            default_network_interface: "bridge".to_owned(),
            permit_bridge_interface_on_pod_network: true,
            permitted_host_devices: None,
            persistent_reservation: false,
            vm_state_storage_class: None,
            pvc_tolerate_less_space_up_to_percent: 10,
            minimum_reserve_pvc_bytes: 131_072,
            minimum_cluster_tsc_frequency: None,
            selinux_launcher_type: None,
            seccomp_localhost_profile: None,
            virtual_machine_instances_per_node: None,
            log_serial_console: true,
            free_page_reporting: true,
            auto_cpu_limit_namespaces: None,
            ksm_nodes: None,
            tls: TlsConfiguration::default(),
            vga_display_for_efi: false,
            skip_backup_hooks: false,
            even_cpus: None,
            virt_template: true,
            cluster_profiler: false,
            feature_gates: Vec::new(),
            disabled_feature_gates: Vec::new(),
            log_verbosity: LogVerbosity::default(),
            request_limits: RequestLimits::default(),
            attachment_resources: attachment::defaults(),
        }
    }
}

impl ClusterConfig {
    /// Reads the configuration from a KubeVirt object.
    pub fn from_kubevirt(object: &KubeVirt) -> Result<Self, ConfigError> {
        let from = &object.spec.configuration;
        let mut config =
            Self { resource_version: object.metadata.resource_version.clone().unwrap_or_default(), ..Self::default() };
        if let Some(architecture) = object
            .status
            .as_ref()
            .and_then(|status| status.default_architecture.as_deref())
            .filter(|architecture| !architecture.is_empty())
        {
            config.default_architecture = architecture.to_owned();
        }
        let annotation = |key: &str| object.metadata.annotations.as_ref()?.get(key);
        config.vga_display_for_efi = annotation("kubevirt.io/vga-display-efi-x86").is_some();
        config.skip_backup_hooks = annotation(annotation::SKIP_BACKUP_HOOKS).is_some_and(|value| crate::is_true(value));
        config.even_cpus = annotation(annotation::EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY).cloned();
        config.virt_template =
            from.virt_template_deployment.as_ref().and_then(|deployment| deployment.enabled).unwrap_or(true);
        config.workload_terms =
            placement::terms(object.spec.workloads.as_ref().and_then(|workloads| workloads.node_placement.as_ref()));
        config.request_limits = RequestLimits::read(from);
        config.attachment_resources = attachment::read(from)?;
        config.overlay_developer(from)?;
        config.overlay_machine(from)?;
        config.overlay_network(from)?;
        config.overlay_cluster(from);
        config.live_update.overlay(from)?;
        let drain = from.migrations.as_ref().and_then(|migrations| migrations.node_drain_taint_key.as_ref());
        overlay_text(&mut config.node_drain_taint_key, drain);
        config.migrations = Migrations::read(from.migrations.as_ref())?;
        Ok(config)
    }

    /// Returns true if a feature gate is enabled.
    pub fn enabled(&self, gate: FeatureGate) -> bool {
        gate.enabled(&self.feature_gates, &self.disabled_feature_gates)
    }

    /// Returns the settings of an architecture, or those of the default one if the name is unknown.
    pub fn arch(&self, architecture: &str) -> &ArchConfig {
        match architecture {
            "arm64" => &self.arm64,
            "s390x" => &self.s390x,
            _ => &self.amd64,
        }
    }

    /// Returns the log verbosity of a component (see [`component`]). virt-handler can have a verbosity per `node`.
    pub fn verbosity(&self, name: &str, node: Option<&str>) -> u64 {
        let levels = &self.log_verbosity;
        if let Some(level) = node.and_then(|node| levels.node_verbosity.get(node)) {
            return *level;
        }
        let level = match name {
            component::VIRT_API => levels.virt_api,
            component::VIRT_CONTROLLER => levels.virt_controller,
            component::VIRT_HANDLER => levels.virt_handler,
            component::VIRT_LAUNCHER => levels.virt_launcher,
            _ => None,
        };
        level.unwrap_or(DEFAULT_VERBOSITY)
    }

    fn overlay_developer(&mut self, from: &KubeVirtConfiguration) -> Result<(), ConfigError> {
        let Some(developer) = &from.developer_configuration else {
            return Ok(());
        };
        self.use_emulation = developer.use_emulation;
        self.cluster_profiler = developer.cluster_profiler;
        self.feature_gates.clone_from(&developer.feature_gates);
        self.disabled_feature_gates.clone_from(&developer.disabled_feature_gates);
        self.node_selectors.clone_from(&developer.node_selectors);
        self.minimum_cluster_tsc_frequency = developer.minimum_cluster_tsc_frequency;
        if let Some(levels) = &developer.log_verbosity {
            self.log_verbosity.clone_from(levels);
        }
        if let Some(percent) = nonzero(developer.memory_overcommit) {
            self.memory_overcommit = positive(percent).ok_or(ConfigError::MemoryOvercommit(percent))?;
        }
        if let Some(ratio) = nonzero(developer.cpu_allocation_ratio) {
            self.cpu_allocation_ratio = positive(ratio).ok_or(ConfigError::CpuAllocationRatio(ratio))?;
        }
        if let Some(percent) = nonzero(developer.pvc_tolerate_less_space_up_to_percent) {
            self.pvc_tolerate_less_space_up_to_percent = positive(percent)
                .filter(|percent| *percent <= 100)
                .ok_or(ConfigError::PvcTolerateLessSpace(percent))?;
        }
        if let Some(bytes) = developer.minimum_reserve_pvc_bytes.filter(|bytes| *bytes != 0) {
            self.minimum_reserve_pvc_bytes = bytes;
        }
        // The value is only validated: launchers read no more than the first 512 bytes of an image.
        if let Some(check) = &developer.disk_verification {
            check_quantity("developerConfiguration.diskVerification.memoryLimit", &check.memory_limit)?;
        }
        Ok(())
    }

    fn overlay_machine(&mut self, from: &KubeVirtConfiguration) -> Result<(), ConfigError> {
        self.cpu_model = text(from.cpu_model.as_ref());
        if let Some(request) = &from.cpu_request {
            check_quantity("cpuRequest", request)?;
            self.cpu_request = request.clone();
        }
        if let Some(ratio) = text(from.additional_guest_memory_overhead_ratio.as_ref()) {
            let number = ratio.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 1.0);
            self.overhead_ratio = Some(number.ok_or(ConfigError::OverheadRatio(ratio))?);
        }
        if let Some(policy) = text(from.image_pull_policy.as_ref()) {
            if !["Always", "IfNotPresent", "Never"].contains(&policy.as_str()) {
                return Err(ConfigError::ImagePullPolicy(policy));
            }
            self.image_pull_policy = policy;
        }
        if let Some(arch) = &from.architecture_configuration {
            self.amd64.overlay(arch.amd64.as_ref());
            self.arm64.overlay(arch.arm64.as_ref());
            self.s390x.overlay(arch.s390x.as_ref());
        }
        // The older settings without architecture take precedence.
        let global = ArchSpecificConfiguration {
            emulated_machines: from.emulated_machines.clone(),
            machine_type: from.machine_type.clone(),
            ovmf_path: from.ovmf_path.clone(),
        };
        for arch in [&mut self.amd64, &mut self.arm64, &mut self.s390x] {
            arch.overlay(Some(&global));
        }
        self.obsolete_cpu_models.clone_from(&from.obsolete_cpu_models);
        if let Some(smbios) = &from.smbios {
            self.smbios.overlay(smbios);
        }
        if let Some(period) = from.mem_balloon_stats_period {
            self.mem_balloon_stats_period = period;
        }
        if let Some(most) = nonzero(from.virtual_machine_instances_per_node) {
            let number = positive(most).filter(|number| *number <= MAX_INSTANCES_PER_NODE);
            self.virtual_machine_instances_per_node = Some(number.ok_or(ConfigError::InstancesPerNode(most))?);
        }
        Ok(())
    }

    fn overlay_network(&mut self, from: &KubeVirtConfiguration) -> Result<(), ConfigError> {
        let Some(network) = &from.network else {
            return Ok(());
        };
        if let Some(binding) = text(network.default_network_interface.as_ref()) {
            if !["bridge", "slirp", "masquerade"].contains(&binding.as_str()) {
                return Err(ConfigError::DefaultNetworkInterface(binding));
            }
            self.default_network_interface = binding;
        }
        self.permit_bridge_interface_on_pod_network = network.permit_bridge_interface_on_pod_network.unwrap_or(true);
        Ok(())
    }

    fn overlay_cluster(&mut self, from: &KubeVirtConfiguration) {
        self.default_runtime_class = text(from.default_runtime_class.as_ref());
        if let Some(strategy) = &from.eviction_strategy {
            self.eviction_strategy = strategy.clone();
        }
        if from.vm_rollout_strategy.as_deref() == Some("Stage") {
            self.vm_rollout_strategy = RolloutStrategy::Stage;
        }
        match from.instancetype.as_ref().and_then(|settings| settings.reference_policy.as_deref()) {
            Some("expand") => self.reference_policy = ReferencePolicy::Expand,
            Some("expandAll") => self.reference_policy = ReferencePolicy::ExpandAll,
            _ => {}
        }
        self.permitted_host_devices.clone_from(&from.permitted_host_devices);
        self.persistent_reservation = from
            .persistent_reservation_configuration
            .as_ref()
            .and_then(|reservation| reservation.enabled)
            .unwrap_or_else(|| FeatureGate::PersistentReservation.is_in(&self.feature_gates));
        self.vm_state_storage_class = text(from.vm_state_storage_class.as_ref());
        self.selinux_launcher_type = text(from.selinux_launcher_type.as_ref());
        self.seccomp_localhost_profile = from
            .seccomp_configuration
            .as_ref()
            .and_then(|seccomp| seccomp.virtual_machine_instance_profile.as_ref())
            .and_then(|profile| profile.custom_profile.as_ref())
            .and_then(|profile| text(profile.localhost_profile.as_ref()));
        let options = VirtualMachineOptions::default();
        let options = from.virtual_machine_options.as_ref().unwrap_or(&options);
        self.log_serial_console = options.disable_serial_console_log.is_none();
        self.free_page_reporting = options.disable_free_page_reporting.is_none();
        self.auto_cpu_limit_namespaces.clone_from(&from.auto_cpu_limit_namespace_label_selector);
        self.ksm_nodes = from.ksm_configuration.as_ref().and_then(|ksm| ksm.node_label_selector.clone());
        if let Some(tls) = &from.tls_configuration {
            self.tls.clone_from(tls);
        }
    }
}

fn check_quantity(field: &'static str, quantity: &Quantity) -> Result<(), ConfigError> {
    match crate::quantity::units(quantity) {
        Ok(_) => Ok(()),
        Err(source) => Err(ConfigError::Quantity { field, source }),
    }
}

fn text(from: Option<&String>) -> Option<String> {
    from.filter(|text| !text.is_empty()).cloned()
}

fn overlay_text(to: &mut String, from: Option<&String>) {
    if let Some(text) = text(from) {
        *to = text;
    }
}

fn nonzero(number: Option<i32>) -> Option<i32> {
    number.filter(|number| *number != 0)
}

fn positive(number: i32) -> Option<u32> {
    u32::try_from(number).ok().filter(|number| *number > 0)
}

#[cfg(test)]
mod tests;
