//! Migrations of VMIs, for the commands about them.

use api::constants::{annotation, label};
use http::Method;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Connection, Error,
    guest::{read, size, text},
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

    /// Returns true while the target pod may wait for a node.
    pub(crate) fn needs_pod(&self) -> bool {
        matches!(self.phase(), "Pending" | "Scheduling")
    }

    /// Returns why the migration does not proceed.
    pub(crate) fn blocked(&self) -> Option<&'static str> {
        let conditions = self.0["status"]["conditions"].as_array()?;
        let is_set = |name: &str| conditions.iter().any(|one| one["type"] == name && one["status"] == "True");
        BLOCKED.iter().find(|(name, _)| is_set(name)).map(|(_, text)| *text)
    }

    /// Returns the reason for which the migration waits, or its progress.
    pub(crate) fn detail(&self, vmi: Option<&Value>, waiting_pod: Option<String>) -> Option<String> {
        let blocked = self.blocked().map(str::to_owned);
        blocked.or_else(|| waiting_pod.filter(|_| self.needs_pod())).or_else(|| progress(vmi?, self.uid()))
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

/// Returns the scheduler's message about a target pod without a node. A user without rights on pods gets none.
pub(crate) async fn waiting_pod(connection: &Connection, namespace: &str, uid: &str) -> Option<String> {
    // The UID becomes part of a URL.
    if uid.is_empty() || !uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return None;
    }
    let label = label::MIGRATION_JOB_UID.replace('/', "%2F");
    let path = format!("/api/v1/namespaces/{namespace}/pods?labelSelector={label}%3D{uid}&limit=2");
    let answer = connection.call(Method::GET, &path, Vec::new()).await.ok()?;
    unscheduled(&read(&answer).ok()?)
}

/// Returns the message of the first pod of a list that no node takes.
fn unscheduled(pods: &Value) -> Option<String> {
    let conditions =
        pods["items"].as_array()?.iter().filter_map(|pod| pod["status"]["conditions"].as_array()).flatten();
    let mut waiting = conditions.filter(|one| one["type"] == "PodScheduled" && one["status"] == "False");
    waiting.next().map(|condition| format!("the target pod has no node: {}", text(&condition["message"])))
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
        let condition = |name: &str| json!([{"type": name, "status": "True"}]);
        let of = |conditions: Value| Migration(json!({"status": {"phase": "Scheduling", "conditions": conditions}}));
        let waiting = || Some("no node".to_owned());
        let quota = "the quota of the namespace has no room for the target pod";
        assert_eq!(of(condition("migrationRejectedByResourceQuota")).detail(None, waiting()).as_deref(), Some(quota));
        assert_eq!(of(json!([])).detail(None, waiting()).as_deref(), Some("no node"));
        assert_eq!(of(json!([])).detail(None, None), None);
        let pods = |status: &str| {
            json!({"items": [{"status": {"conditions": [
                {"type": "PodScheduled", "status": status, "message": "0/2 nodes are available"},
            ]}}]})
        };
        let expected = "the target pod has no node: 0/2 nodes are available";
        assert_eq!(unscheduled(&pods("False")).as_deref(), Some(expected));
        assert_eq!(unscheduled(&pods("True")), None);
        assert_eq!(unscheduled(&json!({"items": []})), None);
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
