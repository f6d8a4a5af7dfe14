//! Tests of migrations and evictions.

use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};

use super::*;

static NOTHING_LEFT: LazyLock<HashMap<String, String>> = LazyLock::new(HashMap::new);

fn deployment() -> Deployment {
    Deployment::of("kubevirt", "registry.example/virt-launcher", "", "v1")
}

fn observed<'a>(
    kubevirt: &'a KubeVirt,
    deployment: &'a Deployment,
    outdated: &'a [VmiWithPods],
    last_batch: Option<Timestamp>,
) -> Observed<'a> {
    Observed {
        kubevirt,
        deployment,
        outdated_count: outdated.len(),
        outdated,
        changing: &[],
        limit: 5,
        migrations: &[],
        left: &NOTHING_LEFT,
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
        vmi(2, &json!({"phase": "Running", "evacuationNodeName": "n"}), None),
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
    let marked = json!({"evacuationNodeName": "n"});
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
        (&both[..], with(migratable(&[]), &marked), true, None, false),
        (&both[..], with(migratable(&[]), &migrating), true, None, false),
        (&both[..], with(migratable(&[]), &json!({"phase": "Scheduled"})), true, None, false),
    ] {
        let kubevirt = with_methods(methods, &deployment);
        let candidate = if is_outdated { outdated(0, &status) } else { vmi(0, &status, None) };
        let candidates = [candidate];
        let (outdated, changing) = if is_outdated { (&candidates[..], &[][..]) } else { (&[][..], &candidates[..]) };
        let plan = decide(&Observed { changing, ..observed(&kubevirt, &deployment, outdated, None) }).unwrap();
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
        let observed =
            Observed { changing: &changed, migrations: &migrations, ..observed(&kubevirt, &deployment, &old, None) };
        let plan = decide(&observed).unwrap();
        let (migrated, _) = carried_out(&plan);
        assert_eq!(migrated.len(), count, "{unfinished_ones:?}");
        assert!(migrated.first().is_none_or(|(name, _)| name == "m9"), "{migrated:?}");
        assert_eq!(plan.decision.wake_after, Some(RECHECK));
        assert_eq!(plan.left.len(), count.saturating_sub(1));
    }
    // A VMI with a migration gets no second one.
    let migrations = [unfinished(0, "Pending", false, Some(&old[0]))];
    let observed = Observed { migrations: &migrations, ..observed(&kubevirt, &deployment, &old[..1], None) };
    assert!(decide(&observed).unwrap().decision.effects.is_empty());
}

#[test]
fn launcher_that_is_outdated_after_its_migration_stays() {
    let deployment = deployment();
    let kubevirt = with_methods(&["LiveMigrate"], &deployment);
    let old = [outdated(0, &migratable(&[]))];
    // Pod from which it was migrated; it is migrated again.
    for (left, expected) in [(None, 1), (Some("p0"), 1), (Some("former"), 0)] {
        let left: HashMap<String, String> = left.map(|pod| ("u0".to_owned(), pod.to_owned())).into_iter().collect();
        let plan = decide(&Observed { left: &left, ..observed(&kubevirt, &deployment, &old, None) }).unwrap();
        assert_eq!(carried_out(&plan).0.len(), expected, "{left:?}");
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
        let observed = Observed { migrations: &migrations, ..observed(kubevirt, &deployment, &[], None) };
        let effects = decide(&observed).unwrap().decision.effects;
        let deleted = effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::Migration, .. }));
        assert_eq!(deleted, expected, "{by_us} {:?}", candidate.vmi.status);
    }
}
