//! Deployments and DaemonSets of the installation.

use jiff::Timestamp;
use k8s_openapi::{
    api::apps::v1::{DaemonSet, Deployment},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{declaration::Declaration, metadata::slim};

/// A Deployment or DaemonSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedWorkload {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its controller has seen the present version.
    pub observed: bool,
    /// Pods wanted.
    pub wanted: i32,
    /// Pods available.
    pub available: i32,
    /// Pods that have a node (DaemonSets only).
    pub scheduled: i32,
    /// Pods of the present version.
    pub updated: i32,
    /// Pods that are ready.
    pub ready: i32,
    /// Image of the first container.
    pub image: Option<String>,
    /// When the condition Available last changed (Deployments only).
    pub availability_changed_at: Option<Timestamp>,
}

unindexed!(CachedWorkload);

/// Deployments of the install namespace.
pub(crate) enum Deployments {}

impl Declaration for Deployments {
    type Wire = Deployment;
    type Kept = CachedWorkload;
    in_install_namespace!();
}

/// DaemonSets of the install namespace.
pub(crate) enum DaemonSets {}

impl Declaration for DaemonSets {
    type Wire = DaemonSet;
    type Kept = CachedWorkload;
    in_install_namespace!();
}

impl From<Deployment> for CachedWorkload {
    fn from(deployment: Deployment) -> Self {
        let spec = deployment.spec.unwrap_or_default();
        let status = deployment.status.unwrap_or_default();
        let available = status.conditions.iter().flatten().find(|condition| condition.type_ == "Available");
        Self {
            observed: status.observed_generation >= deployment.metadata.generation,
            wanted: spec.replicas.unwrap_or(1),
            available: status.available_replicas.unwrap_or(0),
            scheduled: 0,
            updated: status.updated_replicas.unwrap_or(0),
            ready: status.ready_replicas.unwrap_or(0),
            image: spec.template.spec.and_then(|spec| spec.containers.into_iter().next()?.image),
            availability_changed_at: available
                .and_then(|condition| condition.last_transition_time.as_ref())
                .map(|at| at.0),
            metadata: slim(deployment.metadata),
        }
    }
}

impl From<DaemonSet> for CachedWorkload {
    fn from(set: DaemonSet) -> Self {
        let status = set.status.unwrap_or_default();
        Self {
            observed: status.observed_generation >= set.metadata.generation,
            wanted: status.desired_number_scheduled,
            available: status.number_available.unwrap_or(0),
            scheduled: status.current_number_scheduled,
            updated: status.updated_number_scheduled.unwrap_or(0),
            ready: status.number_ready,
            image: set.spec.and_then(|spec| spec.template.spec?.containers.into_iter().next()?.image),
            availability_changed_at: None,
            metadata: slim(set.metadata),
        }
    }
}
