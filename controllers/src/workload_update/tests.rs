//! Tests of migrations and evictions.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::{
    launcher_pod::networks_digest,
    resources::pods::{CreatedFor, NO_NETWORKS},
};

fn deployment() -> Deployment {
    Deployment::of("kubevirt", "registry.example/virt-launcher", "", "v1")
}

fn observed(
    kubevirt: &KubeVirt,
    deployment: &Deployment,
    outdated: &[VmiWithPods],
    last_batch: Option<Timestamp>,
) -> Observed {
    Observed {
        kubevirt: Arc::new(kubevirt.clone()),
        deployment: Arc::new(deployment.clone()),
        pause: None,
        outdated_count: outdated.len(),
        outdated: outdated.to_vec(),
        changing: Vec::new(),
        config: Arc::new(ClusterConfig::default()),
        migrations: Vec::new(),
        launcher_images: LauncherImages::of_tests("launcher:2"),
        last_batch,
        now: now(),
    }
}

fn now() -> Timestamp {
    "2030-01-01T00:10:00Z".parse().unwrap()
}

fn kubevirt(strategy: &Value, status: &Value) -> KubeVirt {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"workloadUpdateStrategy": strategy}, "status": status,
    }))
    .unwrap()
}

fn vmi(number: usize, status: &Value, deleted: Option<&str>) -> VmiWithPods {
    let pod = CachedPod {
        metadata: serde_json::from_value(json!({
            "name": format!("virt-launcher-m{number}-x"), "namespace": "d", "uid": format!("p{number}"),
            "deletionTimestamp": deleted,
        }))
        .unwrap(),
        phase: "Running".to_owned(),
        ..CachedPod::default()
    };
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": format!("m{number}"), "namespace": "d", "uid": format!("u{number}")},
        "spec": {"domain": {"devices": {}}}, "status": status,
    });
    VmiWithPods { vmi: Arc::new(serde_json::from_value(vmi).unwrap()), pods: vec![Arc::new(pod)] }
}

fn evicted(decision: &Decision) -> Vec<String> {
    let mut names: Vec<String> = decision
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Evict { name, .. } => name.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    names.sort();
    names
}

#[test]
fn vmis_are_evicted_in_batches_according_to_the_strategy() {
    let running: Vec<VmiWithPods> = (0..12).map(|number| vmi(number, &json!({"phase": "Running"}), None)).collect();
    let deployment = deployment();
    let id = deployment.id();
    let deployed = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": id});
    let changing = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": "b"});
    // The status before a new virt-controller has written it.
    let former = json!({"phase": "Deployed", "observedDeploymentID": "a", "targetDeploymentID": "a"});
    let evict = json!({"workloadUpdateMethods": ["Evict"]});
    let few = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 3, "batchEvictionInterval": "5m0s"});
    let none = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 0});
    let seconds = |seconds: u64| Some(Duration::from_secs(seconds));
    // strategy, status, time of the last batch, VMIs evicted, seconds until the next decision
    for (strategy, status, last, count, wake) in [
        (&json!({}), &deployed, None, 0, None),
        (&evict, &deployed, None, 10, seconds(60)),
        (&evict, &deployed, Some("2030-01-01T00:09:15Z"), 0, seconds(15)),
        (&evict, &deployed, Some("2030-01-01T00:09:00Z"), 10, seconds(60)),
        (&evict, &changing, None, 0, None),
        (&evict, &former, None, 0, None),
        (&evict, &json!({"phase": "Deploying"}), None, 0, None),
        (&few, &deployed, None, 3, seconds(300)),
        (&few, &deployed, Some("2030-01-01T00:09:00Z"), 0, seconds(240)),
        (&none, &deployed, None, 0, seconds(60)),
    ] {
        let kubevirt = kubevirt(strategy, status);
        let last = last.map(|last: &str| last.parse().unwrap());
        let decision = decide(&observed(&kubevirt, &deployment, &running, last)).unwrap().decision;
        assert_eq!(evicted(&decision).len(), count, "{strategy} {status} {last:?}");
        assert_eq!(decision.wake_after, wake, "{strategy} {status} {last:?}");
    }
    let kubevirt = kubevirt(&evict, &deployed);
    assert_eq!(decide(&observed(&kubevirt, &deployment, &[], None)).unwrap(), Plan::default());
}

#[test]
fn only_running_vmis_that_are_not_leaving_are_evicted() {
    let vmis = [
        vmi(0, &json!({"phase": "Running"}), None),
        vmi(1, &json!({"phase": "Scheduling"}), None),
        marked(vmi(2, &migratable(&[]), None), "n", Some("LiveMigrate")),
        vmi(3, &json!({"phase": "Running"}), Some("2030-01-01T00:09:59Z")),
        vmi(4, &json!({"phase": "Succeeded"}), None),
    ];
    let deployment = deployment();
    let id = deployment.id();
    let deployed = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": id});
    let kubevirt = kubevirt(&json!({"workloadUpdateMethods": ["Evict"]}), &deployed);
    assert_eq!(
        evicted(&decide(&observed(&kubevirt, &deployment, &vmis, None)).unwrap().decision),
        ["virt-launcher-m0-x"]
    );
}

/// Returns the installation at rest, with these methods.
fn with_methods(methods: &[&str], deployment: &Deployment) -> KubeVirt {
    let id = deployment.id();
    let deployed = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": id});
    kubevirt(&json!({"workloadUpdateMethods": methods}), &deployed)
}

/// Returns the status of a running VMI that can migrate, with these conditions.
fn migratable(conditions: &[Value]) -> Value {
    let mut all = vec![json!({"type": "LiveMigratable", "status": "True"})];
    all.extend(conditions.iter().cloned());
    json!({"phase": "Running", "nodeName": "n", "conditions": all})
}

fn pending(type_: &str, reason: &str) -> Value {
    json!({"type": type_, "status": "True", "reason": reason, "lastTransitionTime": "2030-01-01T00:00:00Z"})
}

/// Returns a VMI with an outdated launcher.
fn outdated(number: usize, status: &Value) -> VmiWithPods {
    let mut outdated = vmi(number, status, None);
    let labels = [("kubevirt.io/outdatedLauncherImage".to_owned(), String::new())];
    Arc::make_mut(&mut outdated.vmi).metadata.labels = Some(labels.into());
    outdated
}

/// Returns a migration of a VMI in a phase, created by this controller or by a user.
fn unfinished(number: usize, phase: &str, by_us: bool, vmi: Option<&VmiWithPods>) -> Unfinished {
    let annotations = if by_us { json!({"kubevirt.io/workloadUpdateMigration": ""}) } else { json!({}) };
    let migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": format!("x{number}"), "namespace": "d", "uid": format!("x{number}"), "annotations": annotations},
        "spec": {"vmiName": format!("m{number}")}, "status": {"phase": phase},
    });
    let migration = Arc::new(serde_json::from_value(migration).unwrap());
    Unfinished { migration, vmi: vmi.map(|vmi| vmi.vmi.clone()) }
}

/// Returns the VMIs that are migrated, with the priority, in order, and the pods that are evicted.
fn carried_out(plan: &Plan) -> (Vec<(String, String)>, usize) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (mut migrated, mut evicted) = (Vec::new(), 0);
    for effect in &plan.decision.effects {
        match effect {
            Effect::Create { kind: Kind::Migration, object, options, .. } => {
                assert!(options.independent);
                migrated.push((text(&object["spec"]["vmiName"]), text(&object["spec"]["priority"])));
            }
            Effect::Evict { .. } => evicted += 1,
            other => panic!("{other:?}"),
        }
    }
    (migrated, evicted)
}

#[test]
fn method_follows_from_the_reason_and_the_vmi() {
    let deployment = deployment();
    let (both, migrate, evict) = (["LiveMigrate", "Evict"], ["LiveMigrate"], ["Evict"]);
    let pinned = |conditions: &[Value]| json!({"phase": "Running", "conditions": conditions});
    let held = pending("HotVCPUChange", "PodResizeInfeasible");
    let (critical, triggered) = (Some("system-critical"), Some("user-triggered"));
    let migrating = json!({"migrationState": {"startTimestamp": "2030-01-01T00:00:00Z"}});
    let with = |status: Value, change: &Value| {
        let mut status = status;
        json_patch::merge(&mut status, change);
        status
    };
    // Methods, status, outdated; priority of the migration, is evicted.
    for (methods, status, is_outdated, priority, is_evicted) in [
        (&both[..], migratable(&[]), true, critical, false),
        (&migrate[..], migratable(&[]), true, critical, false),
        (&evict[..], migratable(&[]), true, None, true),
        (&[], migratable(&[]), true, None, false),
        (&both[..], pinned(&[]), true, None, true),
        (&migrate[..], pinned(&[]), true, None, false),
        // A change that is pending never costs the guest its life.
        (&both[..], migratable(std::slice::from_ref(&held)), false, triggered, false),
        (&both[..], pinned(std::slice::from_ref(&held)), false, None, false),
        (&evict[..], migratable(std::slice::from_ref(&held)), false, None, false),
        (&both[..], migratable(&[pending("HotVCPUChange", "")]), false, None, false),
        (&migrate[..], migratable(&[pending("HotMemoryChange", "PodResizeRefused")]), false, triggered, false),
        (&migrate[..], migratable(&[pending("MigrationRequired", "")]), false, triggered, false),
        (&migrate[..], migratable(&[pending("VolumesChange", "")]), false, triggered, false),
        (&both[..], migratable(std::slice::from_ref(&held)), true, triggered, false),
        (&both[..], with(migratable(&[]), &migrating), true, None, false),
        (&both[..], with(migratable(&[]), &json!({"phase": "Scheduled"})), true, None, false),
    ] {
        let kubevirt = with_methods(methods, &deployment);
        let candidate = if is_outdated { outdated(0, &status) } else { vmi(0, &status, None) };
        let candidates = [candidate];
        let (outdated, changing) = if is_outdated { (&candidates[..], &[][..]) } else { (&[][..], &candidates[..]) };
        let plan =
            decide(&Observed { changing: changing.to_vec(), ..observed(&kubevirt, &deployment, outdated, None) })
                .unwrap();
        let (migrated, evicted) = carried_out(&plan);
        let row = format!("{methods:?} {status} {is_outdated}");
        assert_eq!(migrated.first().map(|(_, priority)| priority.as_str()), priority, "{row}");
        assert_eq!(evicted, usize::from(is_evicted), "{row}");
    }
}

#[test]
fn migrations_are_limited_and_changes_go_first() {
    let deployment = deployment();
    let kubevirt = with_methods(&["LiveMigrate"], &deployment);
    let old: Vec<VmiWithPods> = (0..6).map(|number| outdated(number, &migratable(&[]))).collect();
    let changed = [vmi(9, &migratable(&[pending("VolumesChange", "")]), None)];
    // Unfinished migrations of other VMIs: phase, created by this controller; number of new ones.
    for (unfinished_ones, count) in [
        (&[][..], 5),
        (&[("Running", false), ("Scheduling", true)], 3),
        // Those of others that wait take no slot, so that nobody can hold updates up.
        (&[("Pending", false), ("", false)], 5),
        (&[("Pending", true), ("Pending", true), ("", true)], 2),
        (&[("Running", false); 7], 0),
    ] {
        let busy = unfinished_ones.iter().map(|(phase, by_us)| unfinished(20, phase, *by_us, None));
        let migrations: Vec<Unfinished> = busy.collect();
        let observed = Observed {
            changing: changed.to_vec(),
            migrations: migrations.to_vec(),
            ..observed(&kubevirt, &deployment, &old, None)
        };
        let plan = decide(&observed).unwrap();
        let (migrated, _) = carried_out(&plan);
        assert_eq!(migrated.len(), count, "{unfinished_ones:?}");
        assert!(migrated.first().is_none_or(|(name, _)| name == "m9"), "{migrated:?}");
        assert_eq!(plan.decision.wake_after, Some(RECHECK));
    }
    // A VMI with a migration gets no second one.
    let migrations = [unfinished(0, "Pending", false, Some(&old[0]))];
    let observed = Observed { migrations: migrations.to_vec(), ..observed(&kubevirt, &deployment, &old[..1], None) };
    assert!(decide(&observed).unwrap().decision.effects.is_empty());
}

/// Returns the VMI with an eviction strategy, after a request to leave a node.
fn marked(mut marked: VmiWithPods, node: &str, strategy: Option<&str>) -> VmiWithPods {
    let vmi = Arc::make_mut(&mut marked.vmi);
    vmi.status.get_or_insert_default().evacuation_node_name = Some(node.to_owned());
    vmi.spec.eviction_strategy = serde_json::from_value(json!(strategy)).unwrap();
    marked
}

#[test]
fn vmi_that_its_evacuation_moves_is_left_to_it() {
    let deployment = deployment();
    let kubevirt = with_methods(&["LiveMigrate"], &deployment);
    // Node that it was to leave, strategies of VMI and cluster; it is left alone.
    for (node, strategy, of_cluster, is_left) in [
        ("n", Some("LiveMigrate"), "None", true),
        ("n", Some("LiveMigrateIfPossible"), "None", true),
        ("n", None, "LiveMigrate", true),
        // It has left.
        ("former", Some("LiveMigrate"), "None", false),
        // Another program moves it at some time.
        ("n", Some("External"), "LiveMigrate", false),
        ("n", None, "External", false),
        ("n", None, "None", false),
    ] {
        let candidates = [marked(outdated(0, &migratable(&[])), node, strategy)];
        let eviction_strategy = serde_json::from_value(json!(of_cluster)).unwrap();
        let config = Arc::new(ClusterConfig { eviction_strategy, ..ClusterConfig::default() });
        let plan = decide(&Observed { config, ..observed(&kubevirt, &deployment, &candidates, None) }).unwrap();
        let (migrated, _) = carried_out(&plan);
        assert_eq!(migrated.is_empty(), is_left, "{node} {strategy:?} {of_cluster}");
    }
}

#[test]
fn vmi_with_a_pod_of_a_failed_migration_is_considered_again() {
    let deployment = deployment();
    let kubevirt = with_methods(&["LiveMigrate"], &deployment);
    let mut candidate = outdated(0, &migratable(&[]));
    candidate.pods.extend(vmi(1, &json!({}), None).pods);
    let plan = decide(&observed(&kubevirt, &deployment, &[candidate], None)).unwrap();
    assert!(plan.decision.effects.is_empty(), "{:?}", plan.decision);
    assert_eq!(plan.decision.wake_after, Some(RECHECK));
}

/// Returns the decision of a virt-controller that has just become the leader, which depends on the objects alone.
#[test]
fn no_cause_leads_to_a_second_pod_for_the_same_desired_state() {
    let deployment = deployment();
    let created_for = |launcher: &str, networks: &str, vcpus: u32, memory: i64| CreatedFor {
        launcher: launcher.to_owned(),
        networks: Some(networks_digest(networks)),
        vcpus,
        memory: Some(memory),
    };
    let none = NO_NETWORKS;
    let present = || created_for("launcher:2", none, 4, 64 << 20);
    let older = |condition: Value| migratable(&[condition]);
    let required = || older(pending("MigrationRequired", "AutoMigrationDueToLiveUpdate"));
    let cpu = || older(pending("HotVCPUChange", "PodResizeInfeasible"));
    let memory = || older(pending("HotMemoryChange", "PodResizeRefused"));
    let volumes = |ended: &str, failed: bool| {
        let mut status = older(pending("VolumesChange", ""));
        status["migrationState"] = json!({"endTimestamp": ended, "completed": true, "failed": failed});
        status
    };
    let (before, after) = ("2029-12-31T23:59:00Z", "2030-01-01T00:05:00Z");
    let plain = || json!({"phase": "Running"});
    // Cause, status, its pod was created for, when (the change is of 00:00); migrations and evictions.
    for (cause, status, created_for, at, expected) in [
        ("first", migratable(&[]), Some(created_for("launcher:1", none, 4, 64 << 20)), after, (1, 0)),
        ("of an older release", migratable(&[]), None, after, (1, 0)),
        ("version", migratable(&[]), Some(present()), after, (0, 0)),
        ("first", plain(), Some(created_for("launcher:1", none, 4, 64 << 20)), after, (0, 1)),
        // The VMI is a new one after its eviction.
        ("version", plain(), Some(present()), after, (0, 0)),
        ("first", required(), Some(created_for("launcher:2", "[1]", 4, 64 << 20)), after, (1, 0)),
        ("plugged", required(), Some(CreatedFor { networks: None, ..present() }), after, (1, 0)),
        ("networks", required(), Some(present()), after, (0, 0)),
        ("first", cpu(), Some(created_for("launcher:2", none, 2, 64 << 20)), before, (1, 0)),
        // It was smaller meanwhile.
        ("again", cpu(), Some(present()), before, (1, 0)),
        ("another", cpu(), Some(created_for("launcher:2", none, 2, 64 << 20)), after, (1, 0)),
        ("cpu", cpu(), Some(present()), after, (0, 0)),
        ("first", memory(), Some(created_for("launcher:2", none, 4, 32 << 20)), after, (1, 0)),
        ("memory", memory(), Some(present()), after, (0, 0)),
        ("first", volumes(before, false), Some(present()), before, (1, 0)),
        ("failed", volumes(after, true), Some(present()), after, (1, 0)),
        ("volumes", volumes(after, false), Some(present()), after, (0, 0)),
        ("volumes, by a slow clock", volumes(before, false), Some(present()), after, (0, 0)),
    ] {
        let is_version = created_for.as_ref().is_none_or(|known| known.launcher == "launcher:1") || cause == "version";
        let mut candidate = outdated(0, &status);
        let vmi = Arc::make_mut(&mut candidate.vmi);
        if !is_version {
            vmi.metadata.labels = None;
        }
        vmi.spec.domain.cpu = serde_json::from_value(json!({"cores": 4})).unwrap();
        vmi.spec.domain.memory = serde_json::from_value(json!({"guest": "64Mi"})).unwrap();
        let pod = Arc::make_mut(&mut candidate.pods[0]);
        pod.metadata.creation_timestamp = serde_json::from_value(json!(at)).unwrap();
        pod.image = Some(if is_version { "mirror/launcher:2" } else { "launcher:2" }.to_owned());
        pod.created_for = created_for.clone().map(Box::new);
        let candidates = [candidate];
        let (outdated, changing) = if is_version { (&candidates[..], &[][..]) } else { (&[][..], &candidates[..]) };
        let kubevirt = with_methods(&["LiveMigrate", "Evict"], &deployment);
        let plan =
            decide(&Observed { changing: changing.to_vec(), ..observed(&kubevirt, &deployment, outdated, None) })
                .unwrap();
        let (migrated, evicted) = carried_out(&plan);
        assert_eq!((migrated.len(), evicted), expected, "{cause} {status} {created_for:?}");
        let causes = ineffective(&candidates[0].vmi, &candidates[0].pods[0], "launcher:2");
        assert_eq!(causes.is_empty(), expected != (0, 0), "{cause} shows {causes:?}");
    }
}

#[test]
fn migration_whose_reason_was_taken_back_is_deleted() {
    let deployment = deployment();
    let kubevirt = with_methods(&[], &deployment);
    let changing = [kubevirt.clone()].map(|mut kubevirt| {
        kubevirt.status.as_mut().unwrap().target_deployment_id = Some("b".to_owned());
        kubevirt
    });
    let state = |state: Value| {
        let mut status = migratable(&[]);
        status["migrationState"] = state;
        vmi(0, &status, None)
    };
    let plain = vmi(0, &migratable(&[]), None);
    // VMI, created by this controller, installation; the migration is deleted.
    for (candidate, by_us, kubevirt, expected) in [
        (plain.clone(), true, &kubevirt, true),
        (plain.clone(), false, &kubevirt, false),
        (plain, true, &changing[0], false),
        (outdated(0, &migratable(&[])), true, &kubevirt, false),
        (vmi(0, &migratable(&[pending("MigrationRequired", "")]), None), true, &kubevirt, false),
        // In place after all.
        (vmi(0, &migratable(&[pending("HotVCPUChange", "PodResized")]), None), true, &kubevirt, true),
        (state(json!({"migrationUid": "x0", "startTimestamp": "2030-01-01T00:00:00Z"})), true, &kubevirt, true),
        // The conditions were removed because it is done.
        (
            state(json!({"migrationUid": "x0", "targetNodeDomainReadyTimestamp": "2030-01-01T00:00:00Z"})),
            true,
            &kubevirt,
            false,
        ),
        (state(json!({"migrationUid": "x0", "endTimestamp": "2030-01-01T00:00:00Z"})), true, &kubevirt, false),
        (state(json!({"migrationUid": "former", "completed": true})), true, &kubevirt, true),
    ] {
        let migrations = [unfinished(0, "Running", by_us, Some(&candidate))];
        let observed = Observed { migrations: migrations.to_vec(), ..observed(kubevirt, &deployment, &[], None) };
        let effects = decide(&observed).unwrap().decision.effects;
        let deleted = effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::Migration, .. }));
        assert_eq!(deleted, expected, "{by_us} {:?}", candidate.vmi.status);
    }
}
