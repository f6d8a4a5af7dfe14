//! `restore` and `clone`: a VM gets its state at a snapshot, or another VM gets that of a VM or a snapshot.

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error,
    create::clone::mac_addresses,
    failed_while, object_name,
    wait::{self, Progress, WaitOptions},
};

const RESTORES: &str = "snapshot.kubevirt.io/v1beta1";
const CLONES: &str = "clone.kubevirt.io/v1beta1";

/// Options of `restore`.
#[derive(Args)]
pub(crate) struct RestoreOptions {
    /// Name of the VirtualMachine; one that does not exist is created
    #[arg(value_name = "VM")]
    vm: String,
    /// VirtualMachineSnapshot that is restored
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
    /// Name of the VirtualMachineRestore; default: generated
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Stop the VM if it runs. By default the restore waits five minutes until somebody does
    #[arg(long)]
    stop: bool,
    /// Names of the restored claims
    #[arg(long, value_name = "POLICY", value_parser = ["RandomizeNames", "InPlace", "PrefixTargetName"])]
    volume_restore_policy: Option<String>,
    /// JSON patch of a created VM, one operation; can be repeated
    #[arg(long, value_name = "JSON")]
    patch: Vec<String>,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `clone`.
#[derive(Args)]
pub(crate) struct CloneOptions {
    /// Name of the VirtualMachine that is cloned
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Name of the new VirtualMachine; default: generated
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    /// The source is a VirtualMachineSnapshot
    #[arg(long)]
    snapshot: bool,
    /// Name of the VirtualMachineClone; default: generated
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// MAC address of the new VM as INTERFACE:ADDRESS; can be repeated. Others are generated
    #[arg(long, value_name = "INTERFACE:ADDRESS")]
    new_mac_address: Vec<String>,
    /// Serial number of the new VM; default: generated
    #[arg(long, value_name = "SERIAL")]
    new_smbios_serial: Option<String>,
    /// Names of the new claims
    #[arg(long, value_name = "POLICY", value_parser = ["RandomizeNames", "PrefixTargetName"])]
    volume_name_policy: Option<String>,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Creates a restore, and waits for it if that is wanted.
pub(crate) async fn restore(connection: &Connection, options: &RestoreOptions) -> Result<(), Error> {
    let (vm, snapshot) = (object_name(&options.vm)?, object_name(&options.snapshot)?);
    let restore = restore_object(vm, snapshot, options)?;
    connection.ensure_exists(&snapshot_path(connection, snapshot)).await?;
    let created = create(connection, RESTORES, "virtualmachinerestores", &restore, options.dry_run);
    let path = created.await.map_err(failed_while("creating the restore"))?;
    let Some(path) = path.filter(|_| options.waiting.wait) else {
        return say!("Restore of VM {vm} from snapshot {snapshot} was requested");
    };
    let timeout = options.waiting.timeout;
    let late = |shown: &str| format!("the restore of VM {vm} is not complete within {timeout} s and goes on: {shown}");
    wait::follow(timeout, late, async || Ok(restored(vm, connection.find(&path).await?.as_ref()))).await
}

/// Creates a clone, and waits for it if that is wanted.
pub(crate) async fn clone(connection: &Connection, options: &CloneOptions) -> Result<(), Error> {
    let source = object_name(&options.source)?;
    let clone = clone_object(source, options)?;
    let kept = if options.snapshot {
        snapshot_path(connection, source)
    } else {
        connection.object_path("virtualmachines", source)
    };
    connection.ensure_exists(&kept).await?;
    let created = create(connection, CLONES, "virtualmachineclones", &clone, options.dry_run);
    let path = created.await.map_err(failed_while("creating the clone"))?;
    let Some(path) = path.filter(|_| options.waiting.wait) else { return say!("Clone of {source} was requested") };
    let timeout = options.waiting.timeout;
    let late = |shown: &str| format!("the clone of {source} is not complete within {timeout} s and goes on: {shown}");
    wait::follow(timeout, late, async || Ok(cloned(source, connection.find(&path).await?.as_ref()))).await
}

/// Returns the path of a snapshot. Admission accepts restores and clones of snapshots and VMs that do not exist yet.
fn snapshot_path(connection: &Connection, name: &str) -> String {
    format!("/apis/{RESTORES}/namespaces/{}/virtualmachinesnapshots/{name}", connection.namespace)
}

/// Returns metadata with a name, or with one that the server generates.
fn metadata(name: Option<&String>, of: &str) -> Result<Value, Error> {
    match name {
        Some(name) => Ok(json!({"name": object_name(name)?})),
        None => Ok(json!({"generateName": format!("{of}-")})),
    }
}

fn restore_object(vm: &str, snapshot: &str, options: &RestoreOptions) -> Result<Value, Error> {
    let mut spec = json!({
        "target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": vm},
        "virtualMachineSnapshotName": snapshot,
    });
    if options.stop {
        spec["targetReadinessPolicy"] = json!("StopTarget");
    }
    if let Some(policy) = &options.volume_restore_policy {
        spec["volumeRestorePolicy"] = json!(policy);
    }
    if !options.patch.is_empty() {
        spec["patches"] = json!(options.patch);
    }
    let metadata = metadata(options.name.as_ref(), &format!("restore-{vm}"))?;
    Ok(json!({"apiVersion": RESTORES, "kind": "VirtualMachineRestore", "metadata": metadata, "spec": spec}))
}

fn clone_object(source: &str, options: &CloneOptions) -> Result<Value, Error> {
    let (group, kind) = match options.snapshot {
        true => ("snapshot.kubevirt.io", "VirtualMachineSnapshot"),
        false => ("kubevirt.io", "VirtualMachine"),
    };
    let mut spec = json!({"source": {"apiGroup": group, "kind": kind, "name": source}});
    if let Some(target) = &options.target {
        spec["target"] = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": object_name(target)?});
    }
    let addresses = mac_addresses(&options.new_mac_address)?;
    for (field, value) in [
        ("newMacAddresses", addresses),
        ("newSMBiosSerial", json!(options.new_smbios_serial)),
        ("volumeNamePolicy", json!(options.volume_name_policy)),
    ] {
        if !value.is_null() {
            spec[field] = value;
        }
    }
    let metadata = metadata(options.name.as_ref(), &format!("clone-{source}"))?;
    Ok(json!({"apiVersion": CLONES, "kind": "VirtualMachineClone", "metadata": metadata, "spec": spec}))
}

/// Creates an object and returns its path; `None` after a dry run.
async fn create(
    connection: &Connection,
    version: &str,
    plural: &str,
    object: &Value,
    dry_run: bool,
) -> Result<Option<String>, Error> {
    let path = format!("/apis/{version}/namespaces/{}/{plural}", connection.namespace);
    let query = if dry_run { "?dryRun=All" } else { "" };
    let answer = connection.call(Method::POST, &format!("{path}{query}"), object.to_string().into_bytes()).await?;
    let answer: Value =
        serde_json::from_slice(&answer).map_err(|error| Error::Transport(format!("unreadable answer: {error}")))?;
    let name = answer["metadata"]["name"].as_str().filter(|_| !dry_run);
    Ok(name.map(|name| format!("{path}/{name}")))
}

/// Returns a text of the condition of a type that is true or false.
fn condition<'a>(object: &'a Value, type_: &str, status: &str) -> Option<&'a str> {
    let conditions = object["status"]["conditions"].as_array()?;
    let known = conditions.iter().find(|known| known["type"] == type_ && known["status"] == status)?;
    [&known["message"], &known["reason"]].into_iter().filter_map(Value::as_str).find(|text| !text.is_empty())
}

/// Returns how far a restore is.
pub(crate) fn restored(vm: &str, restore: Option<&Value>) -> Progress {
    let Some(restore) = restore else { return Progress::Failed(format!("the restore of VM {vm} was deleted")) };
    if restore["status"]["complete"] == true {
        let snapshot = restore["spec"]["virtualMachineSnapshotName"].as_str().unwrap_or_default();
        return Progress::Done(format!("VM {vm} was restored from snapshot {snapshot}"));
    }
    match condition(restore, "Failure", "True") {
        Some(text) => Progress::Failed(format!("the restore of VM {vm} failed: {text}")),
        None => Progress::Waiting(condition(restore, "Ready", "False").unwrap_or("not begun yet").to_owned()),
    }
}

/// Returns how far a clone is.
pub(crate) fn cloned(source: &str, clone: Option<&Value>) -> Progress {
    let Some(clone) = clone else { return Progress::Failed(format!("the clone of {source} was deleted")) };
    let text = || condition(clone, "Ready", "False").unwrap_or_default();
    match clone["status"]["phase"].as_str().unwrap_or_default() {
        "Succeeded" => {
            let target = clone["status"]["targetName"].as_str().unwrap_or_default();
            Progress::Done(format!("VM {target} was cloned from {source}"))
        }
        "Failed" => Progress::Failed(format!("the clone of {source} failed: {}", text())),
        "" => Progress::Waiting(format!("Pending: {}", text())),
        phase => Progress::Waiting(phase.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn object(words: &[&str]) -> Value {
        let cli = parse([&["kubectl-virt"], words].concat()).unwrap();
        match cli.command {
            Command::Restore(options) => restore_object(&options.vm, &options.snapshot, &options).unwrap(),
            Command::Clone(options) => clone_object(&options.source, &options).unwrap(),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn requests_hold_what_was_asked_for() {
        let vm = |name: &str| json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name});
        let plain = object(&["restore", "a", "s"]);
        assert_eq!(plain["metadata"], json!({"generateName": "restore-a-"}));
        assert_eq!(plain["spec"], json!({"target": vm("a"), "virtualMachineSnapshotName": "s"}));
        let full =
            object(&["restore", "a", "s", "--name=r", "--stop", "--volume-restore-policy=InPlace", "--patch={}"]);
        assert_eq!(full["metadata"], json!({"name": "r"}));
        assert_eq!(full["spec"]["targetReadinessPolicy"], "StopTarget");
        assert_eq!(
            (&full["spec"]["volumeRestorePolicy"], &full["spec"]["patches"]),
            (&json!("InPlace"), &json!(["{}"]))
        );
        assert_eq!(object(&["clone", "a"])["spec"], json!({"source": vm("a")}));
        let full = object(&["clone", "s", "b", "--snapshot", "--new-mac-address=i:02:00:00:00:00:01"]);
        assert_eq!(full["spec"]["source"]["kind"], "VirtualMachineSnapshot");
        assert_eq!(full["spec"]["target"], vm("b"));
        assert_eq!(full["spec"]["newMacAddresses"], json!({"i": "02:00:00:00:00:01"}));
        for refused in [&["restore", "a"][..], &["restore", "a", "s", "--volume-restore-policy=x"], &["clone"]] {
            assert!(parse([&["kubectl-virt"], refused].concat()).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn progress_follows_the_status() {
        let with = |status: Value| json!({"spec": {"virtualMachineSnapshotName": "s"}, "status": status});
        let says =
            |type_: &str, status: &str, reason: &str| json!([{"type": type_, "status": status, "reason": reason}]);
        for (status, expected) in [
            (json!({"complete": true}), Progress::Done("VM a was restored from snapshot s".to_owned())),
            (
                json!({"complete": false, "conditions": says("Failure", "True", "why")}),
                Progress::Failed("the restore of VM a failed: why".to_owned()),
            ),
            (json!({"conditions": says("Ready", "False", "waits")}), Progress::Waiting("waits".to_owned())),
            (json!({}), Progress::Waiting("not begun yet".to_owned())),
        ] {
            assert_eq!(restored("a", Some(&with(status.clone()))), expected, "{status}");
        }
        for (status, expected) in [
            (json!({"phase": "Succeeded", "targetName": "b"}), Progress::Done("VM b was cloned from a".to_owned())),
            (
                json!({"phase": "Failed", "conditions": says("Ready", "False", "why")}),
                Progress::Failed("the clone of a failed: why".to_owned()),
            ),
            (json!({"phase": "RestoreInProgress"}), Progress::Waiting("RestoreInProgress".to_owned())),
            (
                json!({"conditions": says("Ready", "False", "Pending")}),
                Progress::Waiting("Pending: Pending".to_owned()),
            ),
        ] {
            assert_eq!(cloned("a", Some(&with(status.clone()))), expected, "{status}");
        }
    }
}
