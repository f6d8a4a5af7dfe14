//! Tests of the gate.

use api::config::Migrations as Limits;

use super::*;
use crate::{
    cache::Key,
    migration::gate::{Gate, View},
    resources::Caches,
};

struct Cluster {
    caches: Caches,
    gate: Gate,
    view: View,
}

impl Cluster {
    /// A cluster with VMIs on these nodes, each with a waiting migration of the same name.
    fn new(waiting: &[(&str, &str, &str)]) -> Self {
        let caches = Caches::default();
        let view = View::of(&caches);
        let cluster = Self { caches, gate: Gate::default(), view };
        for (number, (name, node, priority)) in waiting.iter().enumerate() {
            let change = json!({"metadata": {"name": name, "uid": format!("v-{name}")}, "status": {"nodeName": node}});
            cluster.caches.vmis.observe(vmi(&change));
            cluster.put(name, number, priority, "Pending", 1);
        }
        cluster
    }

    fn put(&self, name: &str, age: usize, priority: &str, phase: &str, version: usize) {
        let change = json!({
            "metadata": {"name": name, "uid": format!("g-{name}"), "resourceVersion": version.to_string(),
                "creationTimestamp": format!("2030-01-01T00:00:{age:02}Z")},
            "spec": {"vmiName": name, "priority": priority},
        });
        self.caches.migrations.observe(migration(phase, &change));
        self.gate.refresh(&self.view, &key(name), now());
    }

    fn admits(&self, name: &str, limits: &Limits) -> bool {
        self.gate.admit(&self.view, &key(name), limits, now())
    }

    fn admitted(&self, names: &[&str], limits: &Limits) -> Vec<String> {
        names.iter().filter(|name| self.admits(name, limits)).map(|name| (*name).to_owned()).collect()
    }
}

fn key(name: &str) -> Key {
    Key::new("d", name)
}

fn limits(cluster: u32, node: u32) -> Limits {
    Limits { parallel_per_cluster: cluster, parallel_outbound_per_node: node, ..Limits::default() }
}

#[test]
fn migrations_that_a_leader_has_admitted_count_at_the_next_one() {
    let names = ["first", "second", "third"];
    let mut cluster = Cluster::new(&names.map(|name| (name, name, "")));
    let shown = |number: usize, status: &str, until: &str| {
        let conditions = json!([{"type": "ferrovirt.io/Admitted", "status": status, "lastProbeTime": until}]);
        migration(
            "Pending",
            &json!({
                "metadata": {"name": names[number], "uid": format!("g-{}", names[number]), "resourceVersion": "7",
                    "creationTimestamp": format!("2030-01-01T00:00:{number:02}Z")},
                "spec": {"vmiName": names[number]}, "status": {"conditions": conditions},
            }),
        )
    };
    // The first was admitted, the second has given its place back for a time that has passed, or not.
    for (by_status, until, admitted) in [
        (true, "2030-01-01T00:09:00Z", vec!["second"]),
        (true, "2030-01-01T00:11:00Z", vec!["third"]),
        // Without shards a condition of former ones does not matter.
        (false, "2030-01-01T00:09:00Z", vec!["first", "second"]),
    ] {
        cluster.view = View::of(&cluster.caches).by_status(by_status);
        cluster.gate = Gate::default();
        cluster.caches.migrations.observe_deleted(&key("first"), None);
        cluster.caches.migrations.observe_deleted(&key("second"), None);
        for (number, status) in [(0, "True"), (1, "False")] {
            let mut migration = shown(number, status, until);
            migration.metadata.uid = Some(format!("{number}-{by_status}-{until}"));
            cluster.caches.migrations.observe(migration);
        }
        names.iter().for_each(|name| {
            cluster.gate.refresh(&cluster.view, &key(name), now());
        });
        assert_eq!(cluster.admitted(&names, &limits(2, 2)), admitted, "{by_status} {until}");
    }
}

#[test]
fn place_that_was_given_back_is_free_for_others_for_some_seconds() {
    let mut status = migration("Pending", &json!({})).status.unwrap();
    for (retry, seconds) in [(1, 10), (30, 30)] {
        admission::give_back(&mut status, now(), Duration::from_secs(retry));
        let mut given_back = migration("Pending", &json!({}));
        given_back.status = Some(status.clone());
        assert!(!admission::is_admitted(&given_back));
        let until = now().checked_add(Duration::from_secs(seconds)).unwrap();
        assert_eq!(admission::deferred_until(&given_back), Some(until));
        status.conditions.clear();
    }
}

#[test]
fn priority_goes_before_age() {
    let waiting = [
        ("old", "n1", ""),
        ("maintenance", "n2", "system-maintenance"),
        ("user", "n3", "user-triggered"),
        ("drain", "n4", "system-critical"),
        ("late", "n5", "system-critical"),
    ];
    let names = waiting.map(|(name, ..)| name);
    for (free, expected) in [
        (0, &[][..]),
        (1, &["drain"]),
        (2, &["drain", "late"]),
        (4, &["maintenance", "user", "drain", "late"]),
        (9, &["old", "maintenance", "user", "drain", "late"]),
    ] {
        assert_eq!(Cluster::new(&waiting).admitted(&names, &limits(free, 2)), expected, "{free}");
    }
}

#[test]
fn busy_node_does_not_stop_others() {
    let cluster = Cluster::new(&[
        ("a1", "a", "system-critical"),
        ("a2", "a", "system-critical"),
        ("a3", "a", "system-critical"),
        ("b1", "b", ""),
    ]);
    let limits = limits(5, 2);
    assert_eq!(cluster.admitted(&["a1", "a2", "a3", "b1"], &limits), ["a1", "a2", "b1"]);
    // One that has ended makes way for the next.
    cluster.put("a1", 0, "system-critical", "Succeeded", 2);
    assert_eq!(cluster.gate.next_fresh(&limits), [key("a3")]);
    assert!(cluster.admits("a3", &limits));
    assert!(cluster.gate.next_fresh(&limits).is_empty());
}

#[test]
fn admitted_migration_holds_its_place_until_its_attempt_fails() {
    let cluster = Cluster::new(&[("first", "a", ""), ("second", "b", "")]);
    let limits = limits(1, 2);
    assert!(cluster.admits("first", &limits) && cluster.admits("first", &limits));
    assert!(!cluster.admits("second", &limits));
    // Others go first after a refusal, for some time.
    let later = now() + jiff::SignedDuration::from_secs(10);
    cluster.gate.give_back(&cluster.view, &key("first"), later, now());
    assert_eq!(cluster.gate.next_fresh(&limits), [key("second")]);
    assert!(!cluster.admits("first", &limits) && cluster.admits("second", &limits));
    cluster.gate.give_back(&cluster.view, &key("second"), later, now());
    cluster.gate.forgive(&key("second"));
    assert!(cluster.admits("second", &limits));
}

#[test]
fn limit_that_is_reached_is_known() {
    let cluster = Cluster::new(&[("a1", "a", ""), ("a2", "a", ""), ("b1", "b", "")]);
    assert!(cluster.admits("a1", &limits(2, 1)));
    for (name, limits, expected) in [
        ("a2", limits(2, 1), Some(Full::Node("a".to_owned()))),
        ("a2", limits(1, 1), Some(Full::Cluster)),
        ("b1", limits(2, 1), None),
        ("a1", limits(1, 1), None),
    ] {
        assert_eq!(cluster.gate.full(&key(name), &limits), expected, "{name}");
    }
}

#[test]
fn migration_that_cannot_begin_stops_no_other() {
    let cluster = Cluster::new(&[("blocked", "a", "system-critical"), ("other", "b", "")]);
    let states = [
        json!({"status": {"phase": "Scheduled"}}),
        json!({"metadata": {"deletionTimestamp": "2030-01-01T00:09:50Z"}}),
        json!({"spec": {"utilityVolumes": [{"name": "x", "claimName": "c"}]}}),
        json!({"status": {"migrationState": {"migrationUid": "x"}}}),
    ];
    for (number, state) in states.iter().enumerate() {
        let mut change =
            json!({"metadata": {"name": "blocked", "uid": "v-blocked", "resourceVersion": (number + 10).to_string()}});
        json_patch::merge(&mut change, state);
        cluster.caches.vmis.observe(vmi(&change));
        cluster.gate.refresh(&cluster.view, &key("blocked"), now());
        assert_eq!(cluster.gate.next_fresh(&limits(1, 2)), [key("other")], "{state}");
    }
}

#[test]
fn migration_that_waits_for_an_operation_holds_no_turn_of_its_node() {
    let mut cluster = Cluster::new(&[("held", "a", "system-critical"), ("other", "a", "")]);
    let snapshot = json!({"operation": "Snapshot", "name": "s", "uid": "s"});
    let export = json!({"operation": "Export", "name": "e", "uid": "e"});
    // An admission by the status; without, the migration gives its place back.
    for (number, (by_status, operation, next)) in
        [(true, &snapshot, "other"), (true, &export, "held"), (true, &Value::Null, "held"), (false, &snapshot, "held")]
            .into_iter()
            .enumerate()
    {
        let vm = json!({
            "metadata": {"name": "held", "namespace": "d", "uid": "vm", "resourceVersion": (number + 10).to_string()},
            "spec": {"template": {}}, "status": {"operation": operation},
        });
        cluster.caches.vms.observe(serde_json::from_value(vm).unwrap());
        cluster.view = View::of(&cluster.caches).by_status(by_status);
        for name in ["held", "other"] {
            cluster.gate.refresh(&cluster.view, &key(name), now());
        }
        assert_eq!(cluster.gate.next_fresh(&limits(5, 1)), [key(next)], "{by_status} {operation}");
    }
}
