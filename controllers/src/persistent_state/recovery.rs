//! The pod that finds out if a migration took the state of a VMI to another claim. It reads the marker that the source of a migration
//! writes to its claim once the guest runs at the target.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstanceMigration,
    constants::{component, label},
    names, persistent_state,
};
use k8s_openapi::{
    api::core::v1::{Container, Pod, PodSpec, SecurityContext, Toleration},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use crate::{pod_parts, resources::recoveries::CachedRecovery, runtime::Kind};

/// Beginning of the names of these pods.
const PREFIX: &str = "recover-";
/// Mount of the claim.
const DIRECTORY: &str = "/state";

/// The answer of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The state is in the claim of the target.
    Moved,
    /// The state is in the claim of the source.
    Stayed,
    /// The pod has failed, and another one is asked.
    Failed,
}

/// Returns the answer of a pod that has ended.
pub(crate) fn verdict(pod: &CachedRecovery) -> Option<Verdict> {
    match pod.phase.as_str() {
        "Succeeded" => Some(Verdict::Moved),
        "Failed" if pod.code == Some(i32::from(persistent_state::NOT_MIGRATED)) => Some(Verdict::Stayed),
        "Failed" => Some(Verdict::Failed),
        _ => None,
    }
}

/// Returns the name of the pod of a migration.
pub(crate) fn pod_name(migration: &str) -> String {
    format!("{PREFIX}{}", names::shortened(migration, names::LABEL_LIMIT - PREFIX.len()))
}

/// Renders the pod. `source`: the claim of the migration's source.
pub(crate) fn render(
    migration: &VirtualMachineInstanceMigration,
    source: &str,
    tolerations: Vec<Toleration>,
    (image, pull_policy): (&str, &str),
) -> Pod {
    let of = &migration.metadata;
    Pod {
        metadata: ObjectMeta {
            name: Some(pod_name(of.name.as_deref().unwrap_or_default())),
            labels: Some(BTreeMap::from([(label::APP.to_owned(), component::STATE_RECOVERY.to_owned())])),
            owner_references: Some(vec![OwnerReference {
                block_owner_deletion: None,
                ..Kind::Migration.owner_reference(of)
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            restart_policy: Some("Never".to_owned()),
            tolerations: Some(tolerations),
            security_context: Some(pod_parts::pod_security()),
            containers: vec![container(of.uid.as_deref().unwrap_or_default(), image, pull_policy)],
            volumes: Some(vec![pod_parts::claim(persistent_state::POD_VOLUME, source, false)]),
            ..PodSpec::default()
        }),
        ..Pod::default()
    }
}

fn container(migration: &str, image: &str, pull_policy: &str) -> Container {
    let words = ["/usr/bin/virt-launcher", "find-migrated", "--directory", DIRECTORY, "--migration", migration];
    Container {
        name: component::STATE_RECOVERY_CONTAINER.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some(pull_policy.to_owned()),
        command: Some(words.map(str::to_owned).to_vec()),
        security_context: Some(SecurityContext {
            read_only_root_filesystem: Some(true),
            ..pod_parts::container_security()
        }),
        resources: Some(pod_parts::resources(["10m", "8M"], ["200m", "60M"])),
        volume_mounts: Some(vec![pod_parts::mount(persistent_state::POD_VOLUME, DIRECTORY, true)]),
        ..Container::default()
    }
}
