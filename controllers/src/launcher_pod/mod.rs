//! The launcher pod of a VMI: a pure function of the VMI and the cluster's settings. Start with [`render`].
//!
//! One container, `compute`. Container disks are image volumes; everything else of a VMI is in ordinary volumes,
//! resources and scheduling fields of a pod, so that quota, pod security and the scheduler treat it as any pod.

mod container;
mod images;
mod metadata;
mod networks;
mod pod_name;
mod requirements;
mod resources;
mod scheduling;
mod target;
mod temporary;
#[cfg(test)]
mod tests;
mod volumes;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    FeatureGate, VirtualMachineInstance,
    config::ClusterConfig,
    constants::{NUMA_SECCOMP_PROFILE, annotation::HOOK_SIDECARS, condition},
    fields,
    quantity::QuantityError,
    virtiofs,
};
use k8s_openapi::api::core::v1::{
    LocalObjectReference, Pod, PodReadinessGate, PodResourceClaim, PodSecurityContext, PodSpec, SELinuxOptions,
    SeccompProfile,
};

pub(crate) use self::images::LauncherImages;
pub(crate) use self::metadata::identity_labels;
pub(crate) use self::metadata::{backup_hooks, created_for, hooks_backups, networks_digest};
pub(crate) use self::networks::network_request;
pub(crate) use self::pod_name::{Use, pod_names};
pub(crate) use self::requirements::{required_labels, required_of_target, with_unoffered};
pub(crate) use self::target::{Target, is_target_of, render_target};
pub(crate) use self::temporary::render_temporary;
use crate::{
    pod_parts,
    resources::{claims::CachedClaim, networks::CachedNetwork, pods::ComputeResources},
};

/// Seconds by which each of launcher and pod outlast the guest's own grace period.
const GRACE_PADDING: i64 = 15;

/// The error of a VMI that has no pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RenderError {
    /// A claim does not exist (yet).
    #[error("didn't find PVC {0}")]
    ClaimNotFound(String),
    /// A feature that this version does not support. Admission rejects it, but older objects may have it.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// The claim for the state of the VMI does not exist (yet).
    #[error("can't generate manifest without backend-storage PVC, waiting for the PVC to be created")]
    NoStateClaim,
    /// The installation has no image with QEMU for the architecture.
    #[error("guests of {0} need the option --launcher-image-{0} of virt-controller, which the chart sets")]
    NoImage(String),
    /// A feature gate is off, which admission does not check.
    #[error("{0}")]
    ContainerPathsDisabled(&'static str),
    /// The configuration does not permit a device.
    #[error("{0}")]
    NotPermitted(String),
    /// The definition of a network does not exist (yet).
    #[error("failed to locate network attachment definition {0}")]
    DefinitionNotFound(String),
    /// The node of the VMI has no labels about its CPU.
    #[error("node {0} has no label with its CPU model")]
    NoHostModel(String),
    /// The label with the log verbosity is no number.
    #[error("label logVerbosity: {0:?} is not a number")]
    Verbosity(String),
    /// An invalid quantity.
    #[error("{field}: {source}")]
    Quantity {
        /// Field path.
        field: &'static str,
        /// The cause.
        source: QuantityError,
    },
}

/// Limits that the quotas and labels of a namespace make necessary.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct NamespaceLimits {
    /// A quota on memory limits: each pod needs one.
    pub memory: bool,
    /// A quota on CPU limits, or the configured namespace selector: each pod needs one.
    pub cpu: bool,
    /// Ratio of memory limit to request, if the namespace sets one.
    pub memory_ratio: Option<f64>,
    /// The pod exists and its memory limit is below its guest, as former versions made some: a resize leaves it so.
    pub below_guest: bool,
}

/// Everything that a pod is rendered from.
pub(crate) struct Inputs<'a> {
    /// The VMI.
    pub instance: &'a VirtualMachineInstance,
    /// The cluster's configuration.
    pub config: &'a ClusterConfig,
    /// Image of the launcher.
    pub launcher_image: &'a str,
    /// Existing claims of the VMI's namespace by name.
    pub claims: &'a BTreeMap<String, Arc<CachedClaim>>,
    /// Limits of the namespace.
    pub limits: NamespaceLimits,
    /// Definitions of the VMI's networks by `namespace/name`, if the pod requests the resources that they need.
    pub definitions: Option<&'a BTreeMap<String, Arc<CachedNetwork>>>,
    /// The claim for the state of the VMI.
    pub state: Option<&'a StateMount>,
}

/// A claim with the state of a VMI, as a launcher pod mounts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateMount {
    /// Its name.
    pub claim: String,
    /// Several nodes can mount it.
    pub shared: bool,
}

/// Renders the pod, without a name.
pub(crate) fn render(inputs: &Inputs<'_>) -> Result<Pod, RenderError> {
    let instance = inputs.instance;
    let spec = &instance.spec;
    refuse_unsupported(instance)?;
    require_container_paths(inputs)?;
    if inputs.launcher_image.is_empty() {
        return Err(RenderError::NoImage(spec.architecture.clone().unwrap_or_default()));
    }
    let resources = resources::resources(inputs)?;
    let mounts = volumes::volumes(inputs)?;
    // An empty name is none.
    let service_account = spec.service_account_name.clone().filter(|name| !name.is_empty()).or_else(|| {
        let mut accounts = spec.volumes.iter().filter_map(|volume| volume.service_account.as_ref());
        accounts.next().and_then(|account| account.service_account_name.clone())
    });
    let has_service_account_disk = spec.volumes.iter().any(|volume| volume.service_account.is_some());
    let istio = annotation(instance, metadata::ISTIO_INJECT).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let security = pod_parts::pod_security();
    let pod = Pod {
        metadata: metadata::metadata(inputs, resources.overhead),
        spec: Some(PodSpec {
            hostname: Some(instance.hostname()),
            subdomain: spec.subdomain.clone(),
            restart_policy: Some("Never".to_owned()),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(grace_of_pod(instance)),
            dns_config: spec.dns_config.as_deref().cloned(),
            dns_policy: spec.dns_policy.clone(),
            scheduler_name: spec.scheduler_name.clone(),
            priority_class_name: spec.priority_class_name.clone().filter(|name| !name.is_empty()),
            runtime_class_name: inputs.config.default_runtime_class.clone(),
            tolerations: some(spec.tolerations.clone()),
            topology_spread_constraints: some(spec.topology_spread_constraints.clone()),
            resource_claims: some(
                spec.resource_claims
                    .iter()
                    .map(|claim| PodResourceClaim {
                        name: claim.name.clone(),
                        resource_claim_name: claim.resource_claim_name.clone(),
                        resource_claim_template_name: claim.resource_claim_template_name.clone(),
                    })
                    .collect(),
            ),
            readiness_gates: Some(vec![PodReadinessGate { condition_type: condition::POD_UNPAUSED.to_owned() }]),
            image_pull_secrets: some(image_pull_secrets(instance)),
            service_account_name: service_account,
            automount_service_account_token: Some(has_service_account_disk || istio),
            node_selector: Some(scheduling::node_selector(instance, inputs.config)),
            affinity: Some(scheduling::affinity(inputs)),
            security_context: Some(PodSecurityContext {
                // Without OnRootMismatch: root may write an image after the directory got its group.
                se_linux_options: inputs
                    .config
                    .selinux_launcher_type
                    .clone()
                    .map(|type_| SELinuxOptions { type_: Some(type_), ..SELinuxOptions::default() }),
                seccomp_profile: seccomp_profile(inputs).or(security.seccomp_profile),
                ..security
            }),
            containers: vec![container::compute(inputs, resources, &mounts, instance.grace_seconds())?],
            volumes: Some(mounts.volumes),
            ..PodSpec::default()
        }),
        ..Pod::default()
    };
    Ok(pod)
}

/// Computes CPU and memory of the compute container, and the memory overhead that they contain.
pub(crate) fn compute_resources(inputs: &Inputs<'_>) -> Result<(ComputeResources, i64), RenderError> {
    let resources = resources::resources(inputs)?;
    Ok((ComputeResources::of(&resources.requirements), resources.overhead))
}

/// Returns the seconds that the pod has to end.
pub(crate) fn grace_of_pod(instance: &VirtualMachineInstance) -> i64 {
    instance.grace_seconds().saturating_add(2 * GRACE_PADDING)
}

/// Returns the profile that the configuration names, or that of guests which see NUMA nodes: the runtime's forbids to bind memory.
fn seccomp_profile(inputs: &Inputs<'_>) -> Option<SeccompProfile> {
    let of_numa = || inputs.instance.spec.domain.maps_numa().then(|| NUMA_SECCOMP_PROFILE.to_owned());
    let profile = inputs.config.seccomp_localhost_profile.clone().or_else(of_numa)?;
    Some(SeccompProfile { type_: "Localhost".to_owned(), localhost_profile: Some(profile) })
}

/// Returns true if QEMU emulates the processor of a VMI: by configuration, or since nodes and images are of amd64.
fn is_emulated(instance: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    config.use_emulation || instance.spec.is_arm64()
}

fn refuse_unsupported(instance: &VirtualMachineInstance) -> Result<(), RenderError> {
    if annotation(instance, HOOK_SIDECARS).is_some() {
        return Err(RenderError::Unsupported(format!("annotation {HOOK_SIDECARS}")));
    }
    if let Some(name) = virtiofs::unshareable(&instance.spec) {
        return Err(RenderError::Unsupported(format!("file system {name} without a volume that can be shared")));
    }
    let refused = fields::refused_by_pod(&instance.spec).into_iter().next();
    refused.map_or(Ok(()), |(path, _)| Err(RenderError::Unsupported(format!("spec.{path}"))))
}

/// Fails for volumes with paths of the container while their gate is off.
fn require_container_paths(inputs: &Inputs<'_>) -> Result<(), RenderError> {
    let uses = inputs.instance.spec.volumes.iter().any(|volume| volume.container_path.is_some());
    let refusal = gate_refusal(inputs, "volumes[].containerPath.path", FeatureGate::ContainerPathVolumes);
    refusal.filter(|_| uses).map_or(Ok(()), |message| Err(RenderError::ContainerPathsDisabled(message)))
}

/// Returns the refusal of a field whose gate is off. The gate may have been on when the VMI was stored.
fn gate_refusal(inputs: &Inputs<'_>, path: &str, gate: FeatureGate) -> Option<&'static str> {
    fields::gated(path, gate).filter(|_| !inputs.config.enabled(gate)).map(|gated| gated.message)
}

fn image_pull_secrets(instance: &VirtualMachineInstance) -> Vec<LocalObjectReference> {
    let disks = instance.spec.volumes.iter().filter_map(|volume| volume.container_disk.as_ref());
    let kernel = kernel_boot(instance).and_then(|container| container.image_pull_secret.clone());
    let mut names: Vec<String> = Vec::new();
    for name in disks.filter_map(|disk| disk.image_pull_secret.clone()).chain(kernel) {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names.into_iter().map(|name| LocalObjectReference { name }).collect()
}

fn kernel_boot(instance: &VirtualMachineInstance) -> Option<&api::vmi::firmware::KernelBootContainer> {
    instance.spec.domain.firmware.as_ref()?.kernel_boot.as_ref()?.container.as_ref()
}

fn annotation<'a>(instance: &'a VirtualMachineInstance, key: &str) -> Option<&'a str> {
    instance.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Returns `None` for an empty list.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
