//! The status of the installation, which tools wait for, and whether its roles are part of those of the cluster.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    Condition, KubeVirt,
    condition::{remove, set},
    constants::{component, condition},
    gates,
    kubevirt::status::KubeVirtStatus,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use sha1::{Digest, Sha1};

use crate::{
    runtime::{Decision, Effect, Kind, Note},
    views::{RoleView, WorkloadView},
};

/// What has to work for machines to be served.
#[derive(Clone, Copy, Debug, Default)]
pub struct Components<'a> {
    /// virt-api.
    pub api: Option<&'a WorkloadView>,
    /// virt-controller.
    pub controller: Option<&'a WorkloadView>,
    /// virt-handler.
    pub handler: Option<&'a WorkloadView>,
    /// API services and webhooks hold the CA bundle in force.
    pub bundle_in_place: bool,
    /// Webhooks have paths that virt-api accepts.
    pub paths_in_place: bool,
    /// The API server reaches virt-api.
    pub api_services_available: bool,
}

/// What is installed, in the words that tools look for it in.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Deployment {
    registry: Option<String>,
    config: String,
    id: String,
}

impl Deployment {
    /// The installation in `namespace` with these images; an empty one is not set.
    #[must_use]
    pub fn new(namespace: &str, launcher_image: &str, guestfs_image: &str, version: &str) -> Self {
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

/// Everything the status rests on.
pub struct Observed<'a> {
    /// The object.
    pub kubevirt: &'a KubeVirt,
    /// The components.
    pub components: Components<'a>,
    /// Version of this installation.
    pub version: &'a str,
    /// What this installation consists of.
    pub deployment: &'a Deployment,
    /// Architecture of the control plane.
    pub architecture: &'a str,
    /// Machines whose launcher is of an older version.
    pub outdated_machines: usize,
    /// Cluster roles that may be part of those that each cluster has, as far as they are known.
    pub roles: &'a [Arc<RoleView>],
    /// True where virt-controller has the right to change these roles.
    pub manages_roles: bool,
    /// Now.
    pub now: Timestamp,
}

/// Cluster roles whose rights `admin`, `edit` and `view` of each cluster may include.
pub const AGGREGATED_ROLES: [&str; 3] = ["kubevirt.io:admin", "kubevirt.io:edit", "kubevirt.io:view"];
/// Start of the labels that say into which role another is taken up.
const AGGREGATE_TO: &str = "rbac.authorization.k8s.io/aggregate-to-";
/// Feature gate of the strategy below.
const OPT_OUT_GATE: &str = "OptOutRoleAggregation";
/// Strategy that leaves it to the cluster's administrator who gets which role.
const MANUAL: &str = "Manual";
/// Reason of a strategy that is not carried out.
const ROLES_NOT_MANAGED: &str = "RoleAggregationNotManaged";

const DEPLOYED: &str = "Deployed";

/// Decides on the status.
pub fn decide(observed: &Observed<'_>) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    let kubevirt = observed.kubevirt;
    if kubevirt.metadata.deletion_timestamp.is_some() {
        return Ok(decision);
    }
    let mut status = kubevirt.status.clone().unwrap_or_default();
    let missing = missing(&observed.components);
    // Which version a pod is of matters until all are of this one; later a pod that is made anew is no update.
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
    let outdated = i32::try_from(observed.outdated_machines).unwrap_or(i32::MAX);
    status.outdated_virtual_machine_instance_workloads = Some(outdated);
    conditions(&mut status, &missing, &updating, was_deployed, observed);
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

fn is_manual(kubevirt: &KubeVirt) -> bool {
    let configuration = &kubevirt.spec.configuration;
    let developer = configuration.developer_configuration.as_ref();
    let (on, off) = developer.map_or((&[][..], &[][..]), |developer| {
        (developer.feature_gates.as_slice(), developer.disabled_feature_gates.as_slice())
    });
    configuration.role_aggregation_strategy.as_deref() == Some(MANUAL) && gates::enabled(OPT_OUT_GATE, on, off)
}

/// Reports a strategy that is not carried out, in a condition that is there only then. Returns the event for a new report.
fn report_roles(status: &mut KubeVirtStatus, observed: &Observed<'_>, differs: bool) -> Option<Note> {
    if !differs {
        remove(&mut status.conditions, condition::SYNCHRONIZED);
        return None;
    }
    let strategy = if is_manual(observed.kubevirt) { MANUAL } else { "AggregateToDefault" };
    let message = format!(
        "roleAggregationStrategy {strategy} is not carried out: virt-controller has no right to change the cluster roles \
         kubevirt.io:admin, kubevirt.io:edit and kubevirt.io:view. Install the chart with rbac.aggregate=false to keep \
         them out of admin, edit and view, or with rbac.manageAggregation=true to let virt-controller follow the strategy"
    );
    let now = Time(observed.now);
    let report = Condition::new(condition::SYNCHRONIZED, false, ROLES_NOT_MANAGED, &message, &now);
    let regarding = Kind::KubeVirt.reference(&observed.kubevirt.metadata);
    set(&mut status.conditions, report).then(|| Note::warning(regarding, ROLES_NOT_MANAGED, message))
}

/// Puts the labels of a role right. One that has none was installed to stay by itself.
fn aggregation(role: &RoleView, manual: bool) -> Option<Effect> {
    let value = if manual { "false" } else { "true" };
    let labels = role.metadata.labels.iter().flatten();
    let changes: BTreeMap<&str, &str> = labels
        .filter(|(key, known)| key.starts_with(AGGREGATE_TO) && *known != value)
        .map(|(key, _)| (key.as_str(), value))
        .collect();
    let patch = json!({"metadata": {"labels": changes}});
    (!changes.is_empty()).then(|| Effect::merge(Kind::ClusterRole, &role.metadata, patch))
}

/// What was to be installed is.
fn put_observed(status: &mut KubeVirtStatus, observed: &Observed<'_>) {
    status.observed_kubevirt_version = Some(observed.version.to_owned());
    status.observed_kubevirt_registry.clone_from(&observed.deployment.registry);
    status.observed_deployment_config = Some(observed.deployment.config.clone());
    status.observed_deployment_id = Some(observed.deployment.id.clone());
}

impl<'a> Components<'a> {
    fn workloads(&self) -> [(&'static str, Option<&'a WorkloadView>); 3] {
        [
            (component::VIRT_API, self.api),
            (component::VIRT_CONTROLLER, self.controller),
            (component::VIRT_HANDLER, self.handler),
        ]
    }
}

/// What still has pods of a former version, for people.
fn updating(components: &Components<'_>) -> Vec<String> {
    let behind = |view: &&WorkloadView| view.updated < view.wanted;
    let parts = components.workloads().into_iter();
    parts
        .filter_map(|(name, workload)| {
            let view = workload.filter(behind)?;
            Some(format!("{name} has {} of {} pods of this version", view.updated, view.wanted))
        })
        .collect()
}

/// What is missing, for people.
fn missing(components: &Components<'_>) -> Vec<String> {
    let mut missing = Vec::new();
    for (name, workload) in components.workloads() {
        match workload {
            None => missing.push(format!("{name} does not exist")),
            Some(view) if !view.observed => missing.push(format!("{name} is being updated")),
            // One replica serves; the others are for when it does not. Each node needs its own agent.
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
    was_deployed: bool,
    observed: &Observed<'_>,
) {
    let now = Time(observed.now);
    let transition = transition(status);
    let mut put = |type_: &str, holds: bool, reason: &str, message: &str| {
        set(&mut status.conditions, Condition::new(type_, holds, reason, message, &now));
    };
    put(condition::CREATED, true, "AllResourcesCreated", "All resources were created.");
    if missing.is_empty() && updating.is_empty() {
        let (reason, message) = ("AllComponentsReady", "All components are ready.");
        put(condition::AVAILABLE, true, reason, message);
        put(condition::PROGRESSING, false, reason, message);
        put(condition::DEGRADED, false, reason, message);
    } else if missing.is_empty() && was_deployed {
        // Degraded as well, as tools expect it of an update.
        for type_ in [condition::AVAILABLE, condition::PROGRESSING, condition::DEGRADED] {
            put(type_, true, "UpdateInProgress", &transition);
        }
    } else {
        let message = [missing, updating].concat().join("; ");
        let reason = if was_deployed { "ComponentsNotReady" } else { "DeploymentInProgress" };
        put(condition::AVAILABLE, false, reason, &message);
        put(condition::PROGRESSING, !was_deployed, reason, &message);
        put(condition::DEGRADED, was_deployed, reason, &message);
    }
}

/// From which version to which, for people.
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kubevirt(status: serde_json::Value) -> KubeVirt {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt", "generation": 3, "resourceVersion": "1"},
            "spec": {}, "status": status,
        }))
        .unwrap()
    }

    fn workload(wanted: i32, available: i32) -> WorkloadView {
        WorkloadView { observed: true, wanted, available, updated: wanted, ..WorkloadView::default() }
    }

    fn decided(kubevirt: &KubeVirt, handler: &WorkloadView, bundle_in_place: bool) -> Option<serde_json::Value> {
        let ready = workload(2, 1);
        let components = Components {
            api: Some(&ready),
            controller: Some(&ready),
            handler: Some(handler),
            bundle_in_place,
            paths_in_place: bundle_in_place,
            api_services_available: true,
        };
        let observed = Observed {
            kubevirt,
            components,
            version: "v1",
            deployment: &Deployment::new("kubevirt", "registry.example/virt/virt-launcher@sha256:0", "", "v1"),
            architecture: "amd64",
            outdated_machines: 0,
            roles: &[],
            manages_roles: true,
            now: "2030-01-01T00:00:00Z".parse().unwrap(),
        };
        let effects = decide(&observed).unwrap().effects;
        effects.into_iter().find_map(|effect| match effect {
            Effect::Patch { patch, .. } => Some(patch["status"].clone()),
            _ => None,
        })
    }

    fn condition_of(status: &serde_json::Value, type_: &str) -> String {
        let conditions = status["conditions"].as_array().unwrap();
        let found = conditions.iter().find(|condition| condition["type"] == type_).unwrap();
        found["status"].as_str().unwrap().to_owned()
    }

    #[test]
    fn all_components_available_is_deployed_and_then_settled() {
        let status = decided(&kubevirt(json!({})), &workload(1, 1), true).unwrap();
        assert_eq!(status["phase"], "Deployed");
        assert_eq!(status["observedGeneration"], 3);
        assert_eq!(status["observedKubeVirtRegistry"], "registry.example/virt");
        for name in ["KubeVirtRegistry", "KubeVirtVersion", "DeploymentConfig", "DeploymentID"] {
            let (observed, target) = (&status[format!("observed{name}")], &status[format!("target{name}")]);
            assert!(observed.is_string() && observed == target, "{name}: {observed} {target}");
        }
        assert_eq!(condition_of(&status, "Available"), "True");
        assert_eq!(decided(&kubevirt(status), &workload(1, 1), true), None);
    }

    #[test]
    fn missing_agent_or_bundle_is_not_available() {
        for (handler, bundle) in [(workload(2, 1), true), (workload(1, 1), false)] {
            let status = decided(&kubevirt(json!({})), &handler, bundle).unwrap();
            assert_eq!(status["phase"], "Deploying");
            assert!(status["targetDeploymentID"].is_string() && status["observedDeploymentID"].is_null());
            assert_eq!(condition_of(&status, "Available"), "False");
            assert_eq!(condition_of(&status, "Progressing"), "True");
        }
    }

    #[test]
    fn failure_after_deployment_is_degraded_and_stays_deployed() {
        let status = decided(&kubevirt(json!({"phase": "Deployed"})), &workload(2, 1), true).unwrap();
        assert_eq!(status.get("phase"), None);
        assert_eq!(condition_of(&status, "Degraded"), "True");
    }

    #[test]
    fn update_lasts_until_all_pods_are_of_the_version() {
        let behind = WorkloadView { updated: 1, ..workload(2, 2) };
        let former = json!({
            "phase": "Deployed", "observedDeploymentID": "former", "observedKubeVirtVersion": "v0",
            "observedKubeVirtRegistry": "registry.example/old",
        });
        let status = decided(&kubevirt(former.clone()), &behind, true).unwrap();
        assert!(status["targetDeploymentID"].is_string() && status.get("observedDeploymentID").is_none(), "{status}");
        for name in ["Available", "Progressing", "Degraded"] {
            assert_eq!(condition_of(&status, name), "True", "{name}");
        }
        let text = "Transitioning from previous version v0 with registry registry.example/old \
                    to target version v1 using registry registry.example/virt";
        assert!(status["conditions"].to_string().contains(text), "{status}");
        // Then nothing is of the former version, and a pod that is made anew is no update.
        let done = decided(&kubevirt(former.clone()), &workload(2, 2), true).unwrap();
        let mut all = former;
        json_patch::merge(&mut all, &done);
        assert_eq!(all["observedDeploymentID"], all["targetDeploymentID"]);
        assert_eq!(decided(&kubevirt(all), &behind, true), None);
        // What was never there is not updated but installed.
        let status = decided(&kubevirt(json!({})), &behind, true).unwrap();
        assert_eq!((&status["phase"], condition_of(&status, "Available").as_str()), (&json!("Deploying"), "False"));
    }

    #[test]
    fn roles_are_part_of_those_of_the_cluster_unless_it_is_left_to_its_administrator() {
        let (key, manual) =
            ("rbac.authorization.k8s.io/aggregate-to-edit", json!({"roleAggregationStrategy": "Manual"}));
        let gate_off = json!({
            "roleAggregationStrategy": "Manual",
            "developerConfiguration": {"disabledFeatureGates": ["OptOutRoleAggregation"]},
        });
        // configuration, label of the role, what is written to it
        for (configuration, label, written) in [
            (json!({}), Some("true"), None),
            (json!({}), Some("false"), Some("true")),
            (json!({"roleAggregationStrategy": "AggregateToDefault"}), Some("true"), None),
            (manual.clone(), Some("true"), Some("false")),
            (manual.clone(), Some("false"), None),
            (manual, None, None),
            (gate_off, Some("true"), None),
        ] {
            let mut object = kubevirt(json!({}));
            object.spec.configuration = serde_json::from_value(configuration.clone()).unwrap();
            let mut metadata =
                json!({"name": "kubevirt.io:edit", "resourceVersion": "7", "labels": {"kubevirt.io": ""}});
            if let Some(label) = label {
                metadata["labels"][key] = json!(label);
            }
            let role = RoleView { metadata: serde_json::from_value(metadata).unwrap() };
            let patch = aggregation(&role, is_manual(&object)).map(|effect| match effect {
                Effect::Patch { kind: Kind::ClusterRole, patch, .. } => patch,
                other => panic!("{other:?}"),
            });
            let expected = written.map(|value| json!({"metadata": {"labels": {key: value}}}));
            assert_eq!(patch, expected, "{configuration} {label:?}");
        }
    }

    #[test]
    fn strategy_that_virt_controller_may_not_carry_out_is_reported() {
        let key = "rbac.authorization.k8s.io/aggregate-to-edit";
        let components = Components::default();
        let deployment = Deployment::new("kubevirt", "registry.example/virt-launcher", "", "v1");
        let mut object = kubevirt(json!({}));
        let manual = json!({"roleAggregationStrategy": "Manual"});
        // strategy, label of the role, whether virt-controller manages it; what the condition says, whether a role is written
        for (configuration, label, manages_roles, reported, written) in [
            (json!({}), Some("true"), false, false, false),
            (json!({}), Some("false"), false, true, false),
            (manual.clone(), Some("true"), false, true, false),
            (manual.clone(), Some("true"), true, false, true),
            (manual.clone(), Some("false"), false, false, false),
            (manual.clone(), None, false, false, false),
        ] {
            object.spec.configuration = serde_json::from_value(configuration.clone()).unwrap();
            let mut metadata = json!({"name": "kubevirt.io:edit", "labels": {"kubevirt.io": ""}});
            if let Some(label) = label {
                metadata["labels"][key] = json!(label);
            }
            let role = Arc::new(RoleView { metadata: serde_json::from_value(metadata).unwrap() });
            let decide = |object: &KubeVirt| {
                decide(&Observed {
                    kubevirt: object,
                    components,
                    version: "v1",
                    deployment: &deployment,
                    architecture: "amd64",
                    outdated_machines: 0,
                    roles: std::slice::from_ref(&role),
                    manages_roles,
                    now: "2030-01-01T00:00:00Z".parse().unwrap(),
                })
                .unwrap()
                .effects
            };
            let case = format!("{configuration} {label:?} {manages_roles}");
            let effects = decide(&object);
            let is_role = |effect: &Effect| matches!(effect, Effect::Patch { kind: Kind::ClusterRole, .. });
            assert_eq!(effects.iter().any(is_role), written, "{case}");
            let Some(Effect::Patch { kind: Kind::KubeVirt, patch, notes, .. }) = effects.first() else {
                panic!("{case}: {effects:?}")
            };
            assert_eq!(patch.to_string().contains("RoleAggregationNotManaged"), reported, "{case}: {patch}");
            assert_eq!(notes.success.is_some(), reported, "{case}: {notes:?}");
            // The event comes once, and the condition goes with its cause.
            let mut status = json!({});
            json_patch::merge(&mut status, &patch["status"]);
            let settled = KubeVirt { status: Some(serde_json::from_value(status).unwrap()), ..object.clone() };
            assert!(!decide(&settled).iter().any(|effect| !is_role(effect)), "{case}: {:?}", decide(&settled));
            let mut followed = settled.clone();
            followed.spec.configuration = KubeVirt::new("a", Default::default()).spec.configuration;
            if reported && label == Some("true") {
                let effects = decide(&followed);
                assert!(format!("{effects:?}").contains("conditions"), "{case}: {effects:?}");
                assert!(!format!("{effects:?}").contains("RoleAggregationNotManaged"), "{case}: {effects:?}");
            }
        }
    }

    #[test]
    fn deployment_names_registry_and_images() {
        let with_port = Deployment::new("kubevirt", "localhost:5000/virt-launcher:devel", "example.com/tools:1", "v1");
        assert_eq!(with_port.registry.as_deref(), Some("localhost:5000"));
        let config: serde_json::Value = serde_json::from_str(&with_port.config).unwrap();
        assert_eq!(config["gsImage"], "example.com/tools:1");
        let bare = Deployment::new("kubevirt", "virt-launcher", "", "v1");
        assert_eq!(bare.registry, None);
        assert_ne!(bare.id, with_port.id);
    }
}
