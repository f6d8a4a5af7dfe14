//! `snapshot`: takes a snapshot of a VM.

use api::constants::annotation;
use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error, failed_while, object_name,
    wait::{self, Progress, WaitOptions},
};

const VERSION: &str = "snapshot.kubevirt.io/v1beta1";

/// Options of `snapshot`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Name of the VirtualMachineSnapshot; default: generated
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Keep the content when the snapshot is deleted
    #[arg(long)]
    retain: bool,
    /// Time after which an incomplete snapshot fails, such as 10m; 0: never; default: 5 minutes
    #[arg(long, value_name = "DURATION")]
    failure_deadline: Option<String>,
    /// Leave out a volume; a restore leaves it as it is. Can be repeated
    #[arg(long, value_name = "VOLUME")]
    exclude_volume: Vec<String>,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn run(connection: &Connection, options: &Options) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    let snapshot = object(vm, options)?.to_string().into_bytes();
    // Admission accepts snapshots of VMs that do not exist yet.
    connection.ensure_exists(&connection.object_path("virtualmachines", vm)).await?;
    let snapshots = format!("/apis/{VERSION}/namespaces/{}/virtualmachinesnapshots", connection.namespace);
    let query = if options.dry_run { "?dryRun=All" } else { "" };
    let created = connection.call(Method::POST, &format!("{snapshots}{query}"), snapshot).await;
    let created = created.map_err(failed_while("creating the snapshot"))?;
    let created: Value =
        serde_json::from_slice(&created).map_err(|error| Error::Transport(format!("unreadable answer: {error}")))?;
    let name = created["metadata"]["name"].as_str().unwrap_or_default();
    if !options.waiting.wait {
        return say!("Snapshot {name} of VM {vm} was requested");
    }
    let (path, timeout) = (format!("{snapshots}/{name}"), options.waiting.timeout);
    let late = |shown: &str| format!("snapshot {name} is not complete within {timeout} s and goes on: {shown}");
    wait::follow(timeout, late, async || Ok(progress(name, connection.find(&path).await?.as_ref()))).await
}

fn object(vm: &str, options: &Options) -> Result<Value, Error> {
    let mut metadata = match &options.name {
        Some(name) => json!({"name": object_name(name)?}),
        None => json!({"generateName": format!("{vm}-")}),
    };
    if !options.exclude_volume.is_empty() {
        metadata["annotations"] = json!({annotation::EXCLUDED_VOLUMES: options.exclude_volume.join(",")});
    }
    let mut spec = json!({"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": vm}});
    if options.retain {
        spec["deletionPolicy"] = json!("Retain");
    }
    if let Some(deadline) = &options.failure_deadline {
        spec["failureDeadline"] = json!(deadline);
    }
    Ok(json!({"apiVersion": VERSION, "kind": "VirtualMachineSnapshot", "metadata": metadata, "spec": spec}))
}

/// Returns how far a snapshot is. It is complete once it can be restored.
pub(crate) fn progress(name: &str, snapshot: Option<&Value>) -> Progress {
    let Some(snapshot) = snapshot else { return Progress::Failed(format!("snapshot {name} was deleted")) };
    let status = &snapshot["status"];
    let conditions = status["conditions"].as_array();
    let reason = |type_: &str| {
        let shown = conditions.into_iter().flatten().find(|shown| shown["type"] == type_)?;
        shown["reason"].as_str()
    };
    let error = status["error"]["message"].as_str();
    match status["phase"].as_str().unwrap_or_default() {
        "Failed" => {
            let cause = error.or_else(|| reason("Failure")).unwrap_or_default();
            Progress::Failed(format!("snapshot {name} failed: {cause}"))
        }
        "Succeeded" if status["readyToUse"] == true => Progress::Done(done(name, status)),
        "Succeeded" => Progress::Waiting(error.unwrap_or("taken, the storage completes it").to_owned()),
        _ => Progress::Waiting(error.or_else(|| reason("Progressing")).unwrap_or("not begun yet").to_owned()),
    }
}

/// Returns the result: the volumes, and the state of the guest.
fn done(name: &str, status: &Value) -> String {
    let names = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
    };
    let text = |names: Vec<String>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let mut lines = vec![
        format!("Snapshot {name} is ready"),
        format!("volumes: {}", text(names(&status["snapshotVolumes"]["includedVolumes"]))),
        format!("not included: {}", text(names(&status["snapshotVolumes"]["excludedVolumes"]))),
    ];
    for indication in status["sourceIndications"].as_array().into_iter().flatten() {
        lines.push(indication["message"].as_str().unwrap_or_default().to_owned());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn options(words: &[&str]) -> Options {
        let cli = parse([&["kubectl-virt", "snapshot"], words].concat()).unwrap();
        let Command::Snapshot(options) = cli.command else { panic!("another command") };
        options
    }

    #[test]
    fn request_holds_what_was_asked_for() {
        let plain = object("a", &options(&["a"])).unwrap();
        assert_eq!(plain["metadata"], json!({"generateName": "a-"}));
        assert_eq!(
            plain["spec"],
            json!({"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "a"}})
        );
        let excluding = ["--exclude-volume=b", "--exclude-volume=c"];
        let words = [&["a", "s", "--retain", "--failure-deadline=0"][..], &excluding].concat();
        let full = object("a", &options(&words)).unwrap();
        let annotations = json!({"ferrovirt.io/excluded-volumes": "b,c"});
        assert_eq!(full["metadata"], json!({"name": "s", "annotations": annotations}));
        assert_eq!(
            (&full["spec"]["deletionPolicy"], &full["spec"]["failureDeadline"]),
            (&json!("Retain"), &json!("0"))
        );
        assert!(parse(vec!["kubectl-virt", "snapshot"]).is_err());
    }

    #[test]
    fn progress_follows_the_status() {
        let waits = json!([{"type": "Progressing", "status": "False", "reason": "Source not locked"}]);
        let fails = json!([{"type": "Failure", "status": "True", "reason": "snapshot deadline exceeded"}]);
        let ready = json!({
            "phase": "Succeeded", "readyToUse": true,
            "snapshotVolumes": {"includedVolumes": ["root"], "excludedVolumes": []},
            "sourceIndications": [{"indication": "Online", "message": "It ran."}],
        });
        for (status, expected) in [
            (json!({}), Progress::Waiting("not begun yet".to_owned())),
            (json!({"phase": "InProgress", "conditions": waits}), Progress::Waiting("Source not locked".to_owned())),
            (json!({"phase": "InProgress", "error": {"message": "why"}}), Progress::Waiting("why".to_owned())),
            (
                json!({"phase": "Failed", "conditions": fails}),
                Progress::Failed("snapshot s failed: snapshot deadline exceeded".to_owned()),
            ),
            (json!({"phase": "Succeeded"}), Progress::Waiting("taken, the storage completes it".to_owned())),
            (ready, Progress::Done("Snapshot s is ready\nvolumes: root\nnot included: none\nIt ran.".to_owned())),
        ] {
            assert_eq!(progress("s", Some(&json!({"status": status}))), expected, "{status}");
        }
        assert_eq!(progress("s", None), Progress::Failed("snapshot s was deleted".to_owned()));
    }
}
