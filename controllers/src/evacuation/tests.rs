//! Tests of evacuations.

use serde_json::{Value, json};

use super::*;
use crate::runtime::Failure;

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

/// Returns a running VMI on node `n` that can migrate.
fn vmi(change: &Value) -> VirtualMachineInstance {
    let mut vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "d", "uid": "u"},
        "spec": {"domain": {"devices": {}}, "evictionStrategy": "LiveMigrate"},
        "status": {
            "phase": "Running", "nodeName": "n", "evacuationNodeName": "n",
            "conditions": [{"type": "LiveMigratable", "status": "True"}],
        },
    });
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

fn observed(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> Observed {
    let (vmi, config) = (Arc::new(vmi.clone()), Arc::new(config.clone()));
    Observed {
        vmi,
        is_drained: false,
        is_migrated: false,
        active_pods: 1,
        config,
        failures: Failures::default(),
        now: now(),
    }
}

fn migrations(decision: &Decision) -> Vec<&Value> {
    let created = |effect| match effect {
        &Effect::Create { kind: Kind::Migration, ref object, .. } => Some(object),
        _ => None,
    };
    decision.effects.iter().filter_map(created).collect()
}

#[test]
fn marked_vmi_that_can_migrate_gets_a_migration() {
    let strategy = |strategy: Value| json!({"spec": {"evictionStrategy": strategy}});
    let unmigratable = |strategy: &str| {
        let conditions = json!([{"type": "LiveMigratable", "status": "False"}]);
        json!({"spec": {"evictionStrategy": strategy}, "status": {"conditions": conditions}})
    };
    let status = |status: Value| json!({ "status": status });
    let usual = ClusterConfig::default();
    let migrating = ClusterConfig { eviction_strategy: EvictionStrategy::LiveMigrate, ..ClusterConfig::default() };
    let state = json!({"migrationUid": "x", "startTimestamp": "2030-01-01T00:00:00Z"});
    // Change of the VMI, configuration; it gets a migration.
    for (change, config, expected) in [
        (json!({}), &usual, true),
        (strategy(json!("LiveMigrateIfPossible")), &usual, true),
        (strategy(json!("External")), &usual, false),
        (strategy(json!("None")), &usual, false),
        (strategy(json!("None")), &migrating, false),
        (strategy(Value::Null), &usual, false),
        (strategy(Value::Null), &migrating, true),
        (unmigratable("LiveMigrate"), &usual, false),
        (unmigratable("LiveMigrateIfPossible"), &usual, false),
        (status(json!({"evacuationNodeName": null})), &usual, false),
        (status(json!({"evacuationNodeName": ""})), &usual, false),
        // It has left the node.
        (status(json!({"evacuationNodeName": "former"})), &usual, false),
        (status(json!({"phase": "Failed"})), &usual, false),
        (status(json!({"migrationState": state})), &usual, false),
        (json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}), &usual, false),
    ] {
        let vmi = vmi(&change);
        let decision = decide(&observed(&vmi, config)).unwrap();
        assert_eq!(migrations(&decision).len(), usize::from(expected), "{change}");
    }
}

#[test]
fn vmi_of_a_drained_node_needs_no_mark() {
    let config = ClusterConfig::default();
    let unmarked = vmi(&json!({"status": {"evacuationNodeName": null}}));
    for (is_drained, expected) in [(true, 1), (false, 0)] {
        let decision = decide(&Observed { is_drained, ..observed(&unmarked, &config) }).unwrap();
        assert_eq!(migrations(&decision).len(), expected);
    }
    let external = vmi(&json!({"spec": {"evictionStrategy": "External"}}));
    assert_eq!(decide(&Observed { is_drained: true, ..observed(&external, &config) }).unwrap(), Decision::settled());
}

#[test]
fn one_migration_at_a_time_is_created() {
    let (vmi, config) = (vmi(&json!({})), ClusterConfig::default());
    assert_eq!(decide(&Observed { is_migrated: true, ..observed(&vmi, &config) }).unwrap(), Decision::settled());
    let decision = decide(&Observed { active_pods: 2, ..observed(&vmi, &config) }).unwrap();
    assert_eq!((decision.effects.len(), decision.wake_after), (0, Some(POD_ENDS)));
    let failure = Failure {
        reason: "FailedCreate",
        message: "in-flight migration detected".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let decision = decide(&Observed { failures: Some(failure.clone()).into(), ..observed(&vmi, &config) }).unwrap();
    assert_eq!((decision.effects.len(), decision.wake_after), (0, Some(Duration::from_secs(10))));
}

#[test]
fn migration_names_its_origin() {
    let config = ClusterConfig::default();
    for (source, priority) in [(None, "system-critical"), (Some("descheduler"), "system-maintenance")] {
        let vmi = vmi(&json!({"metadata": {"annotations": {"kubevirt.io/eviction-source": source}}}));
        let decision = decide(&observed(&vmi, &config)).unwrap();
        let [Effect::Create { namespace, object, options, .. }] = &decision.effects[..] else { panic!("{decision:?}") };
        assert_eq!(namespace.as_deref(), Some("d"));
        assert_eq!(object["metadata"]["generateName"], "kubevirt-evacuation-");
        assert_eq!(object["metadata"]["annotations"], json!({"kubevirt.io/evacuationMigration": "n"}));
        assert_eq!(object["spec"], json!({"vmiName": "m", "priority": priority}));
        let messages = [&options.success, &options.failure].map(|note| note.as_ref().unwrap().message.as_str());
        assert_eq!(messages, ["Created Migration {name}", "Error creating a Migration: {error}"]);
    }
}
