//! The status of the installation, on which tools wait, and the aggregation of its cluster roles.

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    Condition, FeatureGate, KubeVirt,
    condition::{remove, set},
    constants::{component, condition},
    kubevirt::status::KubeVirtStatus,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use sha1::{Digest, Sha1};

pub(crate) use self::controller::Installation;
use crate::{
    options::Options,
    resources::{roles::CachedRole, workloads::CachedWorkload},
    runtime::{Decision, Effect, Event, Kind},
    setup::VERSION,
};

/// Components that VMs depend on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Components {
    /// virt-api.
    pub api: Option<Arc<CachedWorkload>>,
    /// virt-controller.
    pub controller: Option<Arc<CachedWorkload>>,
    /// virt-handler.
    pub handler: Option<Arc<CachedWorkload>>,
    /// API services and webhooks hold the CA bundle in force.
    pub bundle_in_place: bool,
    /// Webhooks have paths that virt-api accepts.
    pub paths_in_place: bool,
    /// The API server reaches virt-api.
    pub api_services_available: bool,
}

/// The installation in the form that tools read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Deployment {
    registry: Option<String>,
    config: String,
    id: String,
}

impl Deployment {
    /// Returns the installation that the command line describes.
    #[must_use]
    pub(crate) fn new(options: &Options) -> Self {
        Self::of(&options.namespace, &options.launcher_image, &options.guestfs_image, VERSION)
    }

    /// Returns its ID.
    #[must_use]
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the installation in `namespace` with these images. An empty image is not set.
    #[must_use]
    pub(crate) fn of(namespace: &str, launcher_image: &str, guestfs_image: &str, version: &str) -> Self {
        // Everything before the last part of the image's path; digests and tags have no slash.
        let registry = launcher_image.rsplit_once('/').map(|(registry, _)| registry.to_owned());
        let config = json!({
            "namespace": namespace,
            "registry": registry.as_deref().unwrap_or_default(),
            "imagePrefix": "",
            "kubeVirtVersion": version,
            "virtLauncherImage": launcher_image,
            "gsImage": guestfs_image,
        })
        .to_string();
        let id = Sha1::digest(&config).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { registry, config, id }
    }
}

/// Everything that the status depends on.
pub(crate) struct Observed {
    /// The object.
    pub kubevirt: Arc<KubeVirt>,
    /// The components.
    pub components: Components,
    /// Version of this installation.
    pub version: &'static str,
    /// This installation.
    pub deployment: Arc<Deployment>,
    /// Architecture of the control plane.
    pub architecture: &'static str,
    /// VMIs whose launcher has another version, or that wait for a migration.
    pub outdated_vmis: usize,
    /// Known cluster roles that can be aggregated into the default ones.
    pub roles: Vec<Arc<CachedRole>>,
    /// True where virt-controller has the right to change these roles.
    pub manages_roles: bool,
    /// The current time.
    pub now: Timestamp,
}

/// Prefix of the labels that aggregate a role into another.
const AGGREGATE_TO: &str = "rbac.authorization.k8s.io/aggregate-to-";
/// Feature gate of the strategy below.
const OPT_OUT_GATE: FeatureGate = FeatureGate::OptOutRoleAggregation;
/// Strategy that leaves the aggregation of roles to the cluster's administrator.
const MANUAL: &str = "Manual";
/// Reason of the condition for a strategy that is not carried out.
const ROLES_NOT_MANAGED: &str = "RoleAggregationNotManaged";

/// Reason of the condition about settings without effect.
const NO_EFFECT: &str = "SettingsWithoutEffect";

const DEPLOYED: &str = "Deployed";
/// Reason of the conditions while a deployed component is missing.
const NOT_READY: &str = "ComponentsNotReady";

/// Decides on the status.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    let kubevirt = &*observed.kubevirt;
    if kubevirt.metadata.deletion_timestamp.is_some() {
        decision.effects.extend(deleting(kubevirt, observed.now)?);
        return Ok(decision);
    }
    let mut status = kubevirt.status.clone().unwrap_or_default();
    let missing = missing(&observed.components);
    // Versions of pods matter until all have this one. Later a replaced pod is no update.
    let is_new = status.observed_deployment_id.as_deref() != Some(observed.deployment.id.as_str());
    let updating = if is_new { updating(&observed.components) } else { Vec::new() };
    let was_deployed = status.phase.as_deref() == Some(DEPLOYED);
    if missing.is_empty() && updating.is_empty() {
        status.phase = Some(DEPLOYED.to_owned());
        put_observed(&mut status, observed);
    } else if !was_deployed {
        status.phase = Some("Deploying".to_owned());
    }
    status.operator_version = Some(observed.version.to_owned());
    status.target_kubevirt_version = Some(observed.version.to_owned());
    status.target_kubevirt_registry.clone_from(&observed.deployment.registry);
    status.target_deployment_config = Some(observed.deployment.config.clone());
    status.target_deployment_id = Some(observed.deployment.id.clone());
    status.observed_generation = kubevirt.metadata.generation;
    status.default_architecture = Some(observed.architecture.to_owned());
    let outdated = i32::try_from(observed.outdated_vmis).unwrap_or(i32::MAX);
    status.outdated_virtual_machine_instance_workloads = Some(outdated);
    conditions(&mut status, &missing, &updating, (was_deployed, is_new), observed);
    report_ignored(&mut status, observed);
    let roles: Vec<Effect> = observed.roles.iter().filter_map(|role| aggregation(role, is_manual(kubevirt))).collect();
    let note = if observed.manages_roles {
        remove(&mut status.conditions, condition::SYNCHRONIZED);
        None
    } else {
        report_roles(&mut status, observed, !roles.is_empty())
    };
    let wanted = KubeVirt { status: Some(status), ..kubevirt.clone() };
    let change = Effect::change(Kind::KubeVirt, kubevirt, &wanted, Some("status"))?;
    decision.effects.extend(change.map(|change| match note {
        Some(note) => change.on_success(note),
        None => change,
    }));
    if observed.manages_roles {
        decision.effects.extend(roles);
    }
    Ok(decision)
}

/// Returns the change to the status of an installation whose object is deleted.
fn deleting(kubevirt: &KubeVirt, now: Timestamp) -> Result<Option<Effect>, serde_json::Error> {
    let mut status = kubevirt.status.clone().unwrap_or_default();
    status.phase = Some("Deleting".to_owned());
    for type_ in [condition::CREATED, condition::SYNCHRONIZED] {
        remove(&mut status.conditions, type_);
    }
    let now = Time(now);
    for (type_, holds) in [(condition::AVAILABLE, false), (condition::PROGRESSING, false), (condition::DEGRADED, true)]
    {
        let reported = Condition::new(type_, holds, "DeletionInProgress", "Deletion was triggered", &now);
        set(&mut status.conditions, reported);
    }
    let wanted = KubeVirt { status: Some(status), ..kubevirt.clone() };
    Effect::change(Kind::KubeVirt, kubevirt, &wanted, Some("status"))
}

/// Lists settings without effect in a condition.
fn report_ignored(status: &mut KubeVirtStatus, observed: &Observed) {
    let ignored = admission::kinds::kubevirt::ignored_settings(&observed.kubevirt.spec);
    if ignored.is_empty() {
        remove(&mut status.conditions, condition::SETTINGS_IGNORED);
        return;
    }
    let (message, now) = (ignored.join("; "), Time(observed.now));
    set(&mut status.conditions, Condition::new(condition::SETTINGS_IGNORED, true, NO_EFFECT, &message, &now));
}

fn is_manual(kubevirt: &KubeVirt) -> bool {
    let configuration = &kubevirt.spec.configuration;
    let developer = configuration.developer_configuration.as_ref();
    let (on, off) = developer.map_or((&[][..], &[][..]), |developer| {
        (developer.feature_gates.as_slice(), developer.disabled_feature_gates.as_slice())
    });
    configuration.role_aggregation_strategy.as_deref() == Some(MANUAL) && OPT_OUT_GATE.enabled(on, off)
}

/// Reports a strategy that is not carried out in a condition. Returns the event of a new report.
fn report_roles(status: &mut KubeVirtStatus, observed: &Observed, differs: bool) -> Option<Event> {
    if !differs {
        remove(&mut status.conditions, condition::SYNCHRONIZED);
        return None;
    }
    let strategy = if is_manual(&observed.kubevirt) { MANUAL } else { "AggregateToDefault" };
    let message = format!(
        "roleAggregationStrategy {strategy} is not carried out: virt-controller has no right to change the cluster roles \
         kubevirt.io:admin, kubevirt.io:edit and kubevirt.io:view. Install the chart with rbac.aggregate=false to keep \
         them out of admin, edit and view, or with rbac.manageAggregation=true to let virt-controller follow the strategy"
    );
    let now = Time(observed.now);
    let report = Condition::new(condition::SYNCHRONIZED, false, ROLES_NOT_MANAGED, &message, &now);
    let regarding = Kind::KubeVirt.reference(&observed.kubevirt.metadata);
    set(&mut status.conditions, report).then(|| Event::warning(regarding, ROLES_NOT_MANAGED, message))
}

/// Returns the change of a role's labels. A role without such labels was installed to stay unaggregated.
fn aggregation(role: &CachedRole, manual: bool) -> Option<Effect> {
    let value = if manual { "false" } else { "true" };
    let labels = role.metadata.labels.iter().flatten();
    let changes: BTreeMap<&str, &str> = labels
        .filter(|(key, known)| key.starts_with(AGGREGATE_TO) && *known != value)
        .map(|(key, _)| (key.as_str(), value))
        .collect();
    let patch = json!({"metadata": {"labels": changes}});
    (!changes.is_empty()).then(|| Effect::merge(Kind::ClusterRole, &role.metadata, patch))
}

/// Records that the target is installed.
fn put_observed(status: &mut KubeVirtStatus, observed: &Observed) {
    status.observed_kubevirt_version = Some(observed.version.to_owned());
    status.observed_kubevirt_registry.clone_from(&observed.deployment.registry);
    status.observed_deployment_config = Some(observed.deployment.config.clone());
    status.observed_deployment_id = Some(observed.deployment.id.clone());
}

impl Components {
    fn workloads(&self) -> [(&'static str, Option<&CachedWorkload>); 3] {
        [
            (component::VIRT_API, self.api.as_deref()),
            (component::VIRT_CONTROLLER, self.controller.as_deref()),
            (component::VIRT_HANDLER, self.handler.as_deref()),
        ]
    }

    /// Returns true if each component has a pod that is available.
    fn serve(&self) -> bool {
        let mut parts = self.workloads().into_iter();
        parts.all(|(_, workload)| workload.is_some_and(|view| view.wanted < 1 || view.available > 0))
    }
}

/// Lists the components with pods of a former version.
fn updating(components: &Components) -> Vec<String> {
    let behind = |view: &&CachedWorkload| view.updated < view.wanted;
    let parts = components.workloads().into_iter();
    parts
        .filter_map(|(name, workload)| {
            let view = workload.filter(behind)?;
            Some(format!("{name} has {} of {} pods of this version", view.updated, view.wanted))
        })
        .collect()
}

/// Lists the components that are missing.
fn missing(components: &Components) -> Vec<String> {
    let mut missing = Vec::new();
    for (name, workload) in components.workloads() {
        match workload {
            None => missing.push(format!("{name} does not exist")),
            Some(view) if !view.observed => missing.push(format!("{name} is being updated")),
            // One replica is enough to serve. Each node needs its own virt-handler.
            Some(view) if name == component::VIRT_HANDLER && view.available < view.wanted => {
                missing.push(format!("{name} is available on {} of {} nodes", view.available, view.wanted));
            }
            Some(view) if view.wanted > 0 && view.available < 1 => missing.push(format!("{name} is not available")),
            Some(_) => {}
        }
    }
    if !components.bundle_in_place {
        missing.push("the CA bundle is not in place".to_owned());
    } else if !components.paths_in_place {
        missing.push("the paths of the webhooks are not in place".to_owned());
    } else if !components.api_services_available {
        missing.push("the API services are not available".to_owned());
    }
    missing
}

fn conditions(
    status: &mut KubeVirtStatus,
    missing: &[String],
    updating: &[String],
    (was_deployed, is_new): (bool, bool),
    observed: &Observed,
) {
    let now = Time(observed.now);
    let is_ready = missing.is_empty() && updating.is_empty();
    let is_update = is_new && was_deployed && !is_ready;
    let transition = transition(status);
    if is_update {
        remove(&mut status.conditions, condition::CREATED);
    }
    let mut put = |type_: &str, holds: bool, reason: &str, message: &str| {
        set(&mut status.conditions, Condition::new(type_, holds, reason, message, &now));
    };
    if !is_update {
        put(condition::CREATED, true, "AllResourcesCreated", "All resources were created.");
    }
    if is_ready {
        let (reason, message) = ("AllComponentsReady", "All components are ready.");
        put(condition::AVAILABLE, true, reason, message);
        put(condition::PROGRESSING, false, reason, message);
        put(condition::DEGRADED, false, reason, message);
    } else if is_update {
        let parts: Vec<&str> = std::iter::once(&transition).chain(missing).map(String::as_str).collect();
        let (reason, message) = ("UpdateInProgress", parts.join("; "));
        // Pods of both versions serve. A component without any does not.
        if observed.components.serve() {
            put(condition::AVAILABLE, true, reason, &message);
        } else {
            put(condition::AVAILABLE, false, NOT_READY, &missing.join("; "));
        }
        // Tools expect Degraded during an update.
        put(condition::PROGRESSING, true, reason, &message);
        put(condition::DEGRADED, true, reason, &message);
    } else {
        let message = [missing, updating].concat().join("; ");
        let reason = if was_deployed { NOT_READY } else { "DeploymentInProgress" };
        put(condition::AVAILABLE, false, reason, &message);
        put(condition::PROGRESSING, !was_deployed, reason, &message);
        put(condition::DEGRADED, was_deployed, reason, &message);
    }
}

/// Returns the message about an update in progress.
fn transition(status: &KubeVirtStatus) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    format!(
        "Transitioning from previous version {} with registry {} to target version {} using registry {}",
        text(&status.observed_kubevirt_version),
        text(&status.observed_kubevirt_registry),
        text(&status.target_kubevirt_version),
        text(&status.target_kubevirt_registry),
    )
}
