//! Parts of the pods that virt-controller makes. They are `restricted`, and their programs run as the user that owns the disks.

use std::collections::BTreeMap;

use api::constants::NON_ROOT_UID;
use k8s_openapi::{
    api::core::v1::{
        Capabilities, ConfigMapVolumeSource, EmptyDirVolumeSource, HostPathVolumeSource, ImageVolumeSource,
        PersistentVolumeClaimVolumeSource, PodSecurityContext, ResourceRequirements, SeccompProfile,
        SecretVolumeSource, SecurityContext, Volume, VolumeDevice, VolumeMount,
    },
    apimachinery::pkg::api::resource::Quantity,
};

/// User and group of the programs.
const UID: i64 = NON_ROOT_UID as i64;

pub(crate) fn pod_security() -> PodSecurityContext {
    PodSecurityContext {
        fs_group: Some(UID),
        run_as_user: Some(UID),
        run_as_group: Some(UID),
        run_as_non_root: Some(true),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
        ..PodSecurityContext::default()
    }
}

pub(crate) fn container_security() -> SecurityContext {
    SecurityContext {
        run_as_user: Some(UID),
        run_as_group: Some(UID),
        run_as_non_root: Some(true),
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { add: None, drop: Some(vec!["ALL".to_owned()]) }),
        ..SecurityContext::default()
    }
}

/// Returns requests and limits of processors and memory.
pub(crate) fn resources(requests: [&str; 2], limits: [&str; 2]) -> ResourceRequirements {
    let amounts = |[cpu, memory]: [&str; 2]| {
        let amount = |name: &str, value: &str| (name.to_owned(), Quantity(value.to_owned()));
        Some(BTreeMap::from([amount("cpu", cpu), amount("memory", memory)]))
    };
    ResourceRequirements { requests: amounts(requests), limits: amounts(limits), ..ResourceRequirements::default() }
}

pub(crate) fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

pub(crate) fn device(name: &str, path: &str) -> VolumeDevice {
    VolumeDevice { name: name.to_owned(), device_path: path.to_owned() }
}

/// Returns a volume whose source is to be set.
pub(crate) fn volume(name: &str) -> Volume {
    Volume { name: name.to_owned(), ..Volume::default() }
}

pub(crate) fn empty_dir(name: &str, source: EmptyDirVolumeSource) -> Volume {
    Volume { empty_dir: Some(source), ..volume(name) }
}

pub(crate) fn claim(name: &str, claim: &str, read_only: bool) -> Volume {
    let read_only = read_only.then_some(true);
    let source = PersistentVolumeClaimVolumeSource { claim_name: claim.to_owned(), read_only };
    Volume { persistent_volume_claim: Some(source), ..volume(name) }
}

pub(crate) fn image(name: &str, reference: &str, pull_policy: Option<&String>) -> Volume {
    let pull_policy = pull_policy.filter(|policy| !policy.is_empty()).cloned();
    Volume { image: Some(ImageVolumeSource { reference: Some(reference.to_owned()), pull_policy }), ..volume(name) }
}

pub(crate) fn host_path(name: &str, path: &str, kind: &str) -> Volume {
    let source = HostPathVolumeSource { path: path.to_owned(), type_: Some(kind.to_owned()) };
    Volume { host_path: Some(source), ..volume(name) }
}

pub(crate) fn secret(name: &str, secret_name: Option<String>, optional: Option<bool>) -> Volume {
    let source = SecretVolumeSource { secret_name, optional, ..SecretVolumeSource::default() };
    Volume { secret: Some(source), ..volume(name) }
}

pub(crate) fn config_map(name: &str, map: &str, optional: Option<bool>) -> Volume {
    let source = ConfigMapVolumeSource { name: map.to_owned(), optional, ..ConfigMapVolumeSource::default() };
    Volume { config_map: Some(source), ..volume(name) }
}
