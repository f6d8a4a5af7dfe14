//! Migrations of VMIs, for the commands about them.

use api::constants::{annotation, condition};
use http::Method;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Connection, Error,
    guest::{size, text},
};

/// Objects per list request.
const PAGE: u32 = 500;

/// Conditions of a migration that does not proceed, with their texts.
const BLOCKED: [(&str, &str); 4] = [
    ("migrationAbortRequested", "it is being cancelled"),
    ("migrationRejectedByResourceQuota", "the quota of the namespace has no room for the target pod"),
    ("migrationBlockedByUtilityVolumes", "utility volumes are attached"),
    ("migrationBlockedByBackup", "a backup is running"),
];

/// Reasons of waits that end by themselves.
const PASSING: [&str; 4] =
    ["Backoff", "FormerMigration", "ParallelMigrationsPerCluster", "ParallelOutboundMigrationsPerNode"];

#[derive(Deserialize)]
struct List<T> {
    #[serde(default)]
    metadata: Page,
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Page {
    #[serde(rename = "continue")]
    next: String,
}

/// Reads all pages of a list. The path may have a query.
pub(crate) async fn all<T: DeserializeOwned>(connection: &Connection, path: &str) -> Result<Vec<T>, Error> {
    let separator = if path.contains('?') { '&' } else { '?' };
    let mut items = Vec::new();
    let mut next = String::new();
    loop {
        let page = format!("{path}{separator}limit={PAGE}&continue={next}");
        let answer = connection.call(Method::GET, &page, Vec::new()).await?;
        let list: List<T> =
            serde_json::from_slice(&answer).map_err(|error| Error::Transport(format!("unreadable list: {error}")))?;
        items.extend(list.items);
        next = list.metadata.next;
        if next.is_empty() {
            return Ok(items);
        }
        // The token becomes part of a URL.
        if !next.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.~".contains(&b)) {
            return Err(Error::Transport("the list has an invalid continue token".into()));
        }
    }
}

/// Returns the path of the migrations of a namespace, or of all.
pub(crate) fn path(namespace: Option<&str>) -> String {
    let namespace = namespace.map(|namespace| format!("namespaces/{namespace}/")).unwrap_or_default();
    format!("/apis/kubevirt.io/v1/{namespace}virtualmachineinstancemigrations")
}

/// Lists the migrations of the connection's namespace.
pub(crate) async fn in_namespace(connection: &Connection) -> Result<Vec<Migration>, Error> {
    let found: Vec<Value> = all(connection, &path(Some(&connection.namespace))).await?;
    Ok(found.into_iter().map(Migration).collect())
}

/// A VirtualMachineInstanceMigration.
#[derive(Debug)]
pub(crate) struct Migration(pub(crate) Value);

impl Migration {
    fn metadata(&self, field: &str) -> &str {
        self.0["metadata"][field].as_str().unwrap_or_default()
    }

    /// Returns the name.
    pub(crate) fn name(&self) -> &str {
        self.metadata("name")
    }

    /// Returns the namespace.
    pub(crate) fn namespace(&self) -> &str {
        self.metadata("namespace")
    }

    /// Returns the UID.
    pub(crate) fn uid(&self) -> &str {
        self.metadata("uid")
    }

    /// Returns the time of creation.
    pub(crate) fn created(&self) -> &str {
        self.metadata("creationTimestamp")
    }

    /// Returns the name of the VMI.
    pub(crate) fn vmi_name(&self) -> &str {
        self.0["spec"]["vmiName"].as_str().unwrap_or_default()
    }

    /// Returns the phase; a new migration is pending.
    pub(crate) fn phase(&self) -> &str {
        self.0["status"]["phase"].as_str().filter(|phase| !phase.is_empty()).unwrap_or("Pending")
    }

    /// Returns true if the migration has not ended.
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.phase(), "Succeeded" | "Failed")
    }

    /// Returns why the migration does not proceed.
    pub(crate) fn blocked(&self) -> Option<String> {
        let known = BLOCKED.iter().find(|(name, _)| self.condition(name).is_some()).map(|(_, text)| (*text).to_owned());
        known.or_else(|| self.waiting().filter(|waiting| !PASSING.contains(&waiting.0)).map(|waiting| waiting.1))
    }

    /// Returns the reason for which the migration waits, or its progress.
    pub(crate) fn detail(&self, vmi: Option<&Value>) -> Option<String> {
        let waits = self.blocked().or_else(|| self.waiting().map(|waiting| waiting.1));
        waits.or_else(|| progress(vmi?, self.uid()))
    }

    /// Returns true if the migration waits for its turn.
    pub(crate) fn is_queued(&self) -> bool {
        self.waiting().is_some_and(|waiting| PASSING.contains(&waiting.0))
    }

    /// Returns reason and message of a wait.
    fn waiting(&self) -> Option<(&str, String)> {
        let waiting = self.condition(condition::MIGRATION_WAITING)?;
        Some((waiting["reason"].as_str().unwrap_or_default(), text(&waiting["message"])))
    }

    /// Returns a condition that is true.
    fn condition(&self, name: &str) -> Option<&Value> {
        let conditions = self.0["status"]["conditions"].as_array()?;
        conditions.iter().find(|one| one["type"] == name && one["status"] == "True")
    }
}

/// Returns the reason of a failure in the state of a migration.
pub(crate) fn failure(state: &Value) -> String {
    match state["failureReason"].as_str() {
        None | Some("") if state["abortRequested"] == true => "it was cancelled".to_owned(),
        None | Some("") => "its events say why".to_owned(),
        Some(_) => text(&state["failureReason"]),
    }
}

/// Describes the progress in the annotation of a VMI, if it is about this migration.
fn progress(vmi: &Value, uid: &str) -> Option<String> {
    let annotation = vmi["metadata"]["annotations"][annotation::MIGRATION_PROGRESS].as_str()?;
    let progress: Value = serde_json::from_str(annotation).ok()?;
    let amount = |field: &str| progress[field].is_u64().then(|| size(&progress[field]));
    let (processed, total, remaining) = (amount("processed")?, amount("total")?, amount("remaining")?);
    let rate = amount("rate").map(|rate| format!(", {rate}/s")).unwrap_or_default();
    (progress["migration"] == uid).then(|| format!("{processed} of {total} copied, {remaining} remain{rate}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn new_migration_is_pending_and_an_ended_one_is_not_active() {
        for (phase, expected, active) in [
            (json!(null), "Pending", true),
            (json!(""), "Pending", true),
            (json!("Running"), "Running", true),
            (json!("Succeeded"), "Succeeded", false),
            (json!("Failed"), "Failed", false),
        ] {
            let migration = Migration(json!({"status": {"phase": phase}}));
            assert_eq!((migration.phase(), migration.is_active()), (expected, active), "{phase}");
        }
    }

    #[test]
    fn progress_is_shown_for_the_own_migration_only() {
        let vmi = |value: &str| json!({"metadata": {"annotations": {"ferrovirt.io/migration-progress": value}}});
        let complete = r#"{"migration": "u", "total": 4096, "processed": 1024, "remaining": 3072, "rate": 0}"#;
        assert_eq!(progress(&vmi(complete), "u").as_deref(), Some("1.0 KiB of 4.0 KiB copied, 3.0 KiB remain, 0 B/s"));
        assert_eq!(progress(&vmi(complete), "v"), None);
        for other in [r#"{"migration": "u"}"#, "soon", "[]", r#"{"migration": "u", "total": -1}"#] {
            assert_eq!(progress(&vmi(other), "u"), None, "{other}");
        }
        assert_eq!(progress(&json!({"metadata": {}}), "u"), None);
    }

    #[test]
    fn reason_of_a_waiting_migration_is_shown() {
        let waits =
            |reason: &str| json!({"type": "migrationWaiting", "status": "True", "reason": reason, "message": "m"});
        let quota = json!({"type": "migrationRejectedByResourceQuota", "status": "True"});
        let no_room = "the quota of the namespace has no room for the target pod";
        for (conditions, blocked, queued, detail) in [
            (json!([]), None, false, None),
            (json!([waits("TargetPodUnschedulable")]), Some("m"), false, Some("m")),
            (json!([waits("ParallelMigrationsPerCluster")]), None, true, Some("m")),
            (json!([waits("FailedCreate"), quota]), Some(no_room), false, Some(no_room)),
        ] {
            let migration = Migration(json!({"status": {"phase": "Pending", "conditions": conditions}}));
            assert_eq!(migration.blocked().as_deref(), blocked, "{conditions}");
            assert_eq!(migration.is_queued(), queued, "{conditions}");
            assert_eq!(migration.detail(None).as_deref(), detail, "{conditions}");
        }
    }

    #[test]
    fn failure_without_a_reason_names_the_next_step() {
        for (state, expected) in [
            (json!({"failureReason": "Live migration stuck"}), "Live migration stuck"),
            (json!({"failureReason": "", "abortRequested": true}), "it was cancelled"),
            (json!({}), "its events say why"),
            (Value::Null, "its events say why"),
        ] {
            assert_eq!(failure(&state), expected);
        }
    }
}
