//! `drain-status`: the VMIs that have to leave a node, and why they have not left it yet.

use std::{collections::HashMap, fmt};

use api::constants::{condition, label};
use clap::Args;
use http::Method;
use serde_json::Value;

use crate::{
    Connection, Error,
    guest::{aligned, read, text},
    migrations::{self, Migration},
    object_name,
};

/// Options of `drain-status`.
#[derive(Args)]
pub(crate) struct DrainOptions {
    /// Name of the node
    #[arg(value_name = "NODE")]
    node: String,
}

/// How a VMI leaves its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It migrates.
    Migrates,
    /// It will migrate.
    Waits,
    /// It cannot leave the node.
    Blocked,
    /// Its eviction shuts the guest down.
    ShutDown,
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Migrates => "migrating",
            Self::Waits => "waiting",
            Self::Blocked => "blocked",
            Self::ShutDown => "shut down by an eviction",
        })
    }
}

/// A VMI on the node.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    strategy: String,
    phase: String,
    way: Way,
    detail: String,
}

pub(crate) async fn status(connection: &Connection, options: &DrainOptions) -> Result<(), Error> {
    let node = object_name(&options.node)?;
    connection.call(Method::GET, &format!("/api/v1/nodes/{node}"), Vec::new()).await?;
    let selector = format!("{}%3D{node}", label::NODE_NAME.replace('/', "%2F"));
    let path = format!("/apis/kubevirt.io/v1/virtualmachineinstances?labelSelector={selector}");
    let vmis: Vec<Value> = migrations::all(connection, &path).await?;
    let vmis: Vec<Value> = vmis.into_iter().filter(|vmi| is_on(vmi, node)).collect();
    if vmis.is_empty() {
        return say!("no VMI is on node {node}");
    }
    let found: Vec<Value> = migrations::all(connection, &migrations::path(None)).await?;
    let newest = newest(found.into_iter().map(Migration).collect());
    let default = default_strategy(connection).await?;
    let mut rows = vec![["NAMESPACE", "VMI", "STRATEGY", "MIGRATION", "STATE"].map(str::to_owned).to_vec()];
    let mut ways = Vec::new();
    for vmi in &vmis {
        let field = |name: &str| vmi["metadata"][name].as_str().unwrap_or_default().to_owned();
        let (namespace, name) = (field("namespace"), field("name"));
        let migration = newest.get(&(namespace.clone(), name.clone()));
        let row = row(vmi, migration, &default);
        ways.push(row.way);
        rows.push(vec![namespace, name, row.strategy, row.phase, format!("{}: {}", row.way, row.detail)]);
    }
    crate::print(format_args!("{}", aligned(&rows)))?;
    say!("{}", summary(node, &ways))
}

/// Returns true if the guest of a VMI is on the node.
fn is_on(vmi: &Value, node: &str) -> bool {
    let status = &vmi["status"];
    status["nodeName"] == node && status["phase"] != "Succeeded" && status["phase"] != "Failed"
}

/// Returns the newest migration of each VMI, by namespace and name. One that has not ended is the newest.
fn newest(mut found: Vec<Migration>) -> HashMap<(String, String), Migration> {
    found.sort_by_cached_key(|migration| (migration.is_active(), migration.created().to_owned()));
    let key = |one: &Migration| (one.namespace().to_owned(), one.vmi_name().to_owned());
    found.into_iter().map(|migration| (key(&migration), migration)).collect()
}

/// Returns the eviction strategy of VMIs without one.
async fn default_strategy(connection: &Connection) -> Result<String, Error> {
    let answer = connection.call(Method::GET, "/apis/kubevirt.io/v1/kubevirts", Vec::new()).await?;
    let list = read(&answer)?;
    let set = list["items"][0]["spec"]["configuration"]["evictionStrategy"].as_str();
    Ok(set.filter(|strategy| !strategy.is_empty()).unwrap_or("None").to_owned())
}

/// Decides how a VMI leaves its node, by its newest migration and its strategy, as the eviction webhook does.
fn row(vmi: &Value, migration: Option<&Migration>, default: &str) -> Row {
    let strategy = vmi["spec"]["evictionStrategy"].as_str().filter(|set| !set.is_empty()).unwrap_or(default);
    let row = |phase: &str, way, detail: &str| Row {
        strategy: strategy.to_owned(),
        phase: phase.to_owned(),
        way,
        detail: detail.to_owned(),
    };
    if let Some(active) = migration.filter(|migration| migration.is_active()) {
        let target = vmi["status"]["migrationState"]["targetNode"].as_str();
        let target = target.filter(|_| active.phase() == "Running").map(|node| format!("to node {node}"));
        let detail = active.detail(Some(vmi));
        let way = match active.blocked() {
            Some(_) => Way::Blocked,
            None if active.is_queued() => Way::Waits,
            None => Way::Migrates,
        };
        let text: Vec<String> = target.into_iter().chain(detail).collect();
        let text = if text.is_empty() { active.name().to_owned() } else { text.join(", ") };
        return row(active.phase(), way, &text);
    }
    let conditions = vmi["status"]["conditions"].as_array();
    let migratable = conditions.and_then(|all| all.iter().find(|one| one["type"] == condition::LIVE_MIGRATABLE));
    let is_migratable = migratable.is_some_and(|found| found["status"] == "True");
    let obstacle = match migratable {
        Some(found) => format!("it cannot migrate: {}: {}", text(&found["reason"]), text(&found["message"])),
        None => "it cannot migrate yet".to_owned(),
    };
    let is_marked = vmi["status"]["evacuationNodeName"].as_str().is_some_and(|node| !node.is_empty());
    match strategy {
        "LiveMigrate" if !is_migratable => row("-", Way::Blocked, &obstacle),
        "LiveMigrateIfPossible" if !is_migratable => row("-", Way::ShutDown, &obstacle),
        "External" if is_marked => row("-", Way::Waits, "another program moves it"),
        "LiveMigrate" | "LiveMigrateIfPossible" if is_marked => match migration {
            Some(last) if last.phase() == "Failed" => {
                let reason = migrations::failure(&last.0["status"]["migrationState"]);
                row(last.phase(), Way::Waits, &format!("the next migration follows; the last one failed: {reason}"))
            }
            _ => row("-", Way::Waits, "its migration follows"),
        },
        "LiveMigrate" | "LiveMigrateIfPossible" | "External" => row("-", Way::Waits, "it was not evicted yet"),
        _ => row("-", Way::ShutDown, "it has no strategy to migrate"),
    }
}

/// Returns the number of VMIs by their ways.
fn summary(node: &str, ways: &[Way]) -> String {
    let counted = [Way::Migrates, Way::Waits, Way::Blocked, Way::ShutDown].map(|way| {
        let count = ways.iter().filter(|one| **one == way).count();
        (count, way)
    });
    let parts: Vec<String> =
        counted.iter().filter(|(count, _)| *count > 0).map(|(count, way)| format!("{count} {way}")).collect();
    format!("VMIs on node {node}: {}: {}", ways.len(), parts.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vmi(strategy: &str, migratable: bool, marked: bool) -> Value {
        let condition = match migratable {
            true => json!({"type": "LiveMigratable", "status": "True"}),
            false => json!({
                "type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable", "message": "cannot",
            }),
        };
        json!({
            "metadata": {"name": "web", "namespace": "ns"}, "spec": {"evictionStrategy": strategy},
            "status": {
                "nodeName": "n1", "phase": "Running", "conditions": [condition],
                "evacuationNodeName": if marked { "n1" } else { "" }, "migrationState": {"targetNode": "n2"},
            },
        })
    }

    fn migration(phase: &str) -> Migration {
        Migration(json!({
            "metadata": {"name": "m", "namespace": "ns", "uid": "u"}, "spec": {"vmiName": "web"},
            "status": {"phase": phase, "migrationState": {"failureReason": "it broke"}},
        }))
    }

    #[test]
    fn way_of_a_vmi_follows_its_strategy_and_its_migration() {
        let cannot = "it cannot migrate: DisksNotLiveMigratable: cannot";
        for (vmi, migration, way, detail) in [
            (vmi("LiveMigrate", false, false), None, Way::Blocked, cannot),
            (vmi("LiveMigrateIfPossible", false, false), None, Way::ShutDown, cannot),
            (vmi("", true, false), None, Way::ShutDown, "it has no strategy to migrate"),
            (vmi("LiveMigrate", true, false), None, Way::Waits, "it was not evicted yet"),
            (vmi("LiveMigrate", true, true), None, Way::Waits, "its migration follows"),
            (
                vmi("LiveMigrate", true, true),
                Some(migration("Failed")),
                Way::Waits,
                "the next migration follows; the last one failed: it broke",
            ),
            (vmi("LiveMigrate", true, true), Some(migration("Pending")), Way::Migrates, "m"),
            (vmi("LiveMigrate", true, true), Some(migration("Running")), Way::Migrates, "to node n2"),
            (vmi("None", true, false), Some(migration("Running")), Way::Migrates, "to node n2"),
            (vmi("External", false, true), None, Way::Waits, "another program moves it"),
            (vmi("External", true, false), None, Way::Waits, "it was not evicted yet"),
        ] {
            let row = row(&vmi, migration.as_ref(), "None");
            assert_eq!((row.way, row.detail.as_str()), (way, detail), "{vmi}");
        }
        for (reason, way) in
            [("TargetPodUnschedulable", Way::Blocked), ("ParallelOutboundMigrationsPerNode", Way::Waits)]
        {
            let mut waiting = migration("Pending");
            let condition = json!({"type": "migrationWaiting", "status": "True", "reason": reason, "message": "full"});
            waiting.0["status"]["conditions"] = json!([condition]);
            let row = row(&vmi("", true, true), Some(&waiting), "LiveMigrate");
            assert_eq!((row.way, row.detail.as_str(), row.strategy.as_str()), (way, "full", "LiveMigrate"), "{reason}");
        }
    }

    #[test]
    fn only_living_vmis_of_the_node_count() {
        let vmi = |node: &str, phase: &str| json!({"status": {"nodeName": node, "phase": phase}});
        assert!(is_on(&vmi("n1", "Running"), "n1"));
        for other in [vmi("n2", "Running"), vmi("n1", "Failed"), vmi("n1", "Succeeded"), json!({})] {
            assert!(!is_on(&other, "n1"), "{other}");
        }
    }

    #[test]
    fn migration_under_way_precedes_later_ones() {
        let one = |name: &str, created: &str, phase: &str| {
            Migration(json!({
                "metadata": {"name": name, "namespace": "ns", "creationTimestamp": created},
                "spec": {"vmiName": "web"}, "status": {"phase": phase},
            }))
        };
        for (found, expected) in [
            (vec![one("b", "2026-01-02T00:00:00Z", "Failed"), one("a", "2026-01-01T00:00:00Z", "Failed")], "b"),
            (vec![one("b", "2026-01-02T00:00:00Z", "Failed"), one("a", "2026-01-01T00:00:00Z", "Running")], "a"),
        ] {
            let newest = newest(found);
            assert_eq!(newest[&("ns".to_owned(), "web".to_owned())].name(), expected);
        }
    }

    #[test]
    fn summary_counts_the_ways() {
        let ways = [Way::Migrates, Way::Blocked, Way::Migrates];
        assert_eq!(summary("n1", &ways), "VMIs on node n1: 3: 2 migrating, 1 blocked");
    }
}
