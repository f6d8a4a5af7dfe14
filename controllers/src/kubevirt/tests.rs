//! Tests of the status of the installation.

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

fn workload(wanted: i32, available: i32) -> CachedWorkload {
    CachedWorkload { observed: true, wanted, available, updated: wanted, ..CachedWorkload::default() }
}

fn decided(kubevirt: &KubeVirt, handler: &CachedWorkload, bundle_in_place: bool) -> Option<serde_json::Value> {
    let ready = Arc::new(workload(2, 1));
    let components = Components {
        api: Some(ready.clone()),
        controller: Some(ready),
        handler: Some(Arc::new(handler.clone())),
        bundle_in_place,
        paths_in_place: bundle_in_place,
        api_services_available: true,
    };
    let observed = Observed {
        kubevirt: Arc::new(kubevirt.clone()),
        components,
        version: "v1",
        deployment: Deployment::of("kubevirt", "registry.example/virt/virt-launcher@sha256:0", "", "v1").into(),
        architecture: "amd64",
        outdated_vmis: 0,
        roles: Vec::new(),
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
fn missing_virt_handler_or_bundle_is_not_available() {
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
    let id = Deployment::of("kubevirt", "registry.example/virt/virt-launcher@sha256:0", "", "v1").id;
    let deployed = kubevirt(json!({"phase": "Deployed", "observedDeploymentID": id}));
    let status = decided(&deployed, &workload(2, 1), true).unwrap();
    assert_eq!(status.get("phase"), None);
    for (name, value) in [("Created", "True"), ("Available", "False"), ("Progressing", "False"), ("Degraded", "True")] {
        assert_eq!(condition_of(&status, name), value, "{name}");
    }
    assert!(status.to_string().contains("ComponentsNotReady"), "{status}");
}

#[test]
fn settings_without_effect_are_listed_until_they_are_removed() {
    let mut object = kubevirt(json!({}));
    object.spec = serde_json::from_value(json!({"infra": {"replicas": 3}, "imageTag": "v2"})).unwrap();
    let status = decided(&object, &workload(1, 1), true).unwrap();
    let conditions = status["conditions"].as_array().unwrap();
    let found = conditions.iter().find(|condition| condition["type"] == "SettingsIgnored").unwrap();
    assert_eq!((&found["status"], &found["reason"]), (&json!("True"), &json!("SettingsWithoutEffect")));
    assert_eq!(
        found["message"],
        "spec.imageTag: use the chart's value image.tag; \
         spec.infra.replicas: use the chart's values virtApi.replicas and virtController.replicas"
    );
    object.status = serde_json::from_value(status).unwrap();
    assert_eq!(decided(&object, &workload(1, 1), true), None);
    object.spec = Default::default();
    let status = decided(&object, &workload(1, 1), true).unwrap();
    assert!(!status.to_string().contains("SettingsIgnored"), "{status}");
}

#[test]
fn deleted_installation_reports_it_and_then_settles() {
    let before = json!({"phase": "Deployed", "conditions": [{"type": "Created", "status": "True"}]});
    let mut object = kubevirt(before.clone());
    object.metadata.deletion_timestamp = Some(Time("2030-01-01T00:00:00Z".parse().unwrap()));
    let mut status = before;
    json_patch::merge(&mut status, &decided(&object, &workload(1, 1), true).unwrap());
    assert_eq!(status["phase"], "Deleting");
    assert_eq!(status["conditions"].as_array().unwrap().len(), 3);
    for (name, value) in [("Available", "False"), ("Progressing", "False"), ("Degraded", "True")] {
        assert_eq!(condition_of(&status, name), value, "{name}");
    }
    object.status = serde_json::from_value(status).unwrap();
    assert_eq!(decided(&object, &workload(1, 1), true), None);
}

#[test]
fn update_lasts_until_all_pods_are_of_the_version() {
    let behind = CachedWorkload { updated: 1, ..workload(2, 2) };
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
    assert!(!status["conditions"].to_string().contains("Created"), "{status}");
    // Nodes without a pod for a while are part of it, and one that has none at all is not available.
    for (handler, available, named) in [
        (CachedWorkload { updated: 1, ..workload(2, 1) }, "True", "; virt-handler is available on 1 of 2 nodes"),
        (CachedWorkload { observed: false, ..workload(2, 2) }, "True", "; virt-handler is being updated"),
        (workload(2, 1), "True", "; virt-handler is available on 1 of 2 nodes"),
        (workload(2, 0), "False", "; virt-handler is available on 0 of 2 nodes"),
    ] {
        let mut object = kubevirt(former.clone());
        object.status.as_mut().unwrap().conditions =
            serde_json::from_value(json!([{"type": "Created", "status": "True"}])).unwrap();
        let status = decided(&object, &handler, true).unwrap();
        for (name, value) in [("Available", available), ("Progressing", "True"), ("Degraded", "True")] {
            assert_eq!(condition_of(&status, name), value, "{name} {named}");
        }
        let conditions = status["conditions"].to_string();
        assert!(conditions.contains(&format!("{text}{named}")), "{conditions}");
        assert!(conditions.contains("UpdateInProgress") && !conditions.contains("Created"), "{conditions}");
        assert_eq!(conditions.contains("ComponentsNotReady"), available == "False", "{conditions}");
    }
    // Then no pod has the former version, and a replaced pod is no update.
    let done = decided(&kubevirt(former.clone()), &workload(2, 2), true).unwrap();
    let mut all = former;
    json_patch::merge(&mut all, &done);
    assert_eq!(all["observedDeploymentID"], all["targetDeploymentID"]);
    assert_eq!(decided(&kubevirt(all), &behind, true), None);
    // A first installation is no update.
    let status = decided(&kubevirt(json!({})), &behind, true).unwrap();
    assert_eq!((&status["phase"], condition_of(&status, "Available").as_str()), (&json!("Deploying"), "False"));
}

#[test]
fn roles_are_part_of_those_of_the_cluster_unless_it_is_left_to_its_administrator() {
    let (key, manual) = ("rbac.authorization.k8s.io/aggregate-to-edit", json!({"roleAggregationStrategy": "Manual"}));
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
        let mut metadata = json!({"name": "kubevirt.io:edit", "resourceVersion": "7", "labels": {"kubevirt.io": ""}});
        if let Some(label) = label {
            metadata["labels"][key] = json!(label);
        }
        let role = CachedRole { metadata: serde_json::from_value(metadata).unwrap() };
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
    let deployment = Deployment::of("kubevirt", "registry.example/virt-launcher", "", "v1");
    let mut object = kubevirt(json!({}));
    let manual = json!({"roleAggregationStrategy": "Manual"});
    // strategy, label of the role, virt-controller manages it; condition is set, role is written
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
        let role = Arc::new(CachedRole { metadata: serde_json::from_value(metadata).unwrap() });
        let decide = |object: &KubeVirt| {
            decide(&Observed {
                kubevirt: Arc::new(object.clone()),
                components: components.clone(),
                version: "v1",
                deployment: Arc::new(deployment.clone()),
                architecture: "amd64",
                outdated_vmis: 0,
                roles: vec![role.clone()],
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
        let Some(Effect::Patch { kind: Kind::KubeVirt, patch, options, .. }) = effects.first() else {
            panic!("{case}: {effects:?}")
        };
        assert_eq!(patch.to_string().contains("RoleAggregationNotManaged"), reported, "{case}: {patch}");
        assert_eq!(options.success.is_some(), reported, "{case}: {options:?}");
        // The event is emitted once, and the condition ends with its cause.
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
    let with_port = Deployment::of("kubevirt", "localhost:5000/virt-launcher:devel", "example.com/tools:1", "v1");
    assert_eq!(with_port.registry.as_deref(), Some("localhost:5000"));
    let config: serde_json::Value = serde_json::from_str(&with_port.config).unwrap();
    assert_eq!(config["gsImage"], "example.com/tools:1");
    let bare = Deployment::of("kubevirt", "virt-launcher", "", "v1");
    assert_eq!(bare.registry, None);
    assert_ne!(bare.id, with_port.id);
}
