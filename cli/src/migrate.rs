//! `migrate`: moves a running virtual machine to another node, and follows its migration.

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::{
    Connection, Error,
    lifecycle::{act_on_vm, body, labels},
    migrations::{self, Migration},
    object_name,
    wait::{self, Progress},
};

/// Prefix of the names of migrations that users request.
const NAME_PREFIX: &str = "kubevirt-migrate-vm-";

/// Options of `migrate`.
#[derive(Args)]
pub(crate) struct MigrateOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Labels required of the target node in addition to the node selector of the VM
    #[arg(long, alias = "addedNodeSelector", value_name = "LABEL=VALUE,...", value_delimiter = ',')]
    added_node_selector: Vec<String>,
    /// Wait until the migration has ended, print its progress, and fail if it fails
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// Longest wait in seconds; 0: no limit. The migration goes on afterwards
    #[arg(long, value_name = "SECONDS", default_value_t = 0, requires = "wait")]
    timeout: u64,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn migrate(connection: &Connection, options: &MigrateOptions) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    let selector = labels(&options.added_node_selector)?;
    let before = if options.wait { of_vm(connection, vm).await? } else { Vec::new() };
    let body = body(&[("addedNodeSelector", selector)], options.dry_run);
    act_on_vm(connection, vm, "migrate", body, options.dry_run).await?;
    if !options.wait {
        return Ok(());
    }
    let after = of_vm(connection, vm).await?;
    let Some(created) = after.iter().find(|one| one.name.starts_with(NAME_PREFIX) && !before.contains(one)) else {
        return Err(Error::Usage(format!("the migration of VM {vm} was deleted")));
    };
    follow(connection, vm, created, options.timeout).await
}

/// Name and UID of a migration.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    name: String,
    uid: String,
}

/// Lists the migrations of a VM.
async fn of_vm(connection: &Connection, vm: &str) -> Result<Vec<Identity>, Error> {
    let found = migrations::in_namespace(connection).await?;
    let of_vm = found.into_iter().filter(|migration| migration.vmi_name() == vm);
    Ok(of_vm.map(|found| Identity { name: found.name().to_owned(), uid: found.uid().to_owned() }).collect())
}

/// Prints the progress of a migration until it has ended.
async fn follow(connection: &Connection, vm: &str, created: &Identity, timeout: u64) -> Result<(), Error> {
    let namespace = &connection.namespace;
    let migration_path = format!("{}/{}", migrations::path(Some(namespace)), created.name);
    let vmi_path = connection.object_path("virtualmachineinstances", vm);
    let late = |shown: &str| format!("the migration of VM {vm} has not ended within {timeout} s and goes on: {shown}");
    wait::follow(timeout, late, async || {
        let found = readable(connection, &migration_path).await?;
        let migration = found.map(Migration).filter(|found| found.uid() == created.uid);
        let vmi = readable(connection, &vmi_path).await?;
        Ok(match progress(migration.as_ref(), vmi.as_ref(), &created.uid) {
            Progress::Done(text) => Progress::Done(format!("VM {vm} {text}")),
            Progress::Failed(reason) => Progress::Failed(format!("the migration of VM {vm} failed: {reason}")),
            waiting => waiting,
        })
    })
    .await
}

/// Reads an object; `None` if it does not exist or the user may not read it.
async fn readable(connection: &Connection, path: &str) -> Result<Option<Value>, Error> {
    match connection.find(path).await {
        Err(Error::Refused { code: 403, .. }) => Ok(None),
        found => found,
    }
}

/// Returns the progress of the migration `uid`, of which the VMI knows more while it runs, and alone after it was deleted.
fn progress(migration: Option<&Migration>, vmi: Option<&Value>, uid: &str) -> Progress {
    let in_vmi = vmi.map(|vmi| &vmi["status"]["migrationState"]).filter(|state| state["migrationUid"] == uid);
    let Some(migration) = migration else {
        return match in_vmi {
            Some(state) if state["completed"] == true && state["failed"] != true => Progress::Done(moved(state)),
            Some(state) if state["failed"] == true => Progress::Failed(migrations::failure(state)),
            _ => Progress::Failed("it was deleted".to_owned()),
        };
    };
    let own = Some(&migration.0["status"]["migrationState"]).filter(|state| !state.is_null());
    let none = Value::Null;
    let known = own.or(in_vmi).unwrap_or(&none);
    match migration.phase() {
        "Succeeded" => Progress::Done(moved(known)),
        "Failed" => Progress::Failed(migrations::failure(known)),
        phase => Progress::Waiting(match migration.detail(vmi) {
            Some(detail) => format!("{phase}: {detail}"),
            None => phase.to_owned(),
        }),
    }
}

/// Describes a migration that succeeded.
fn moved(state: &Value) -> String {
    let node = |field: &str| state[field].as_str().unwrap_or("?").to_owned();
    let time = |field: &str| state[field].as_str()?.parse::<Timestamp>().ok();
    let took = time("startTimestamp").zip(time("endTimestamp"));
    let took = took.map(|(start, end)| format!(" within {} s", end.as_second().saturating_sub(start.as_second())));
    format!("was migrated from node {} to node {}{}", node("sourceNode"), node("targetNode"), took.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::command_line::{Command, parse};

    fn shown(status: Option<Value>, vmi: Option<Value>) -> Progress {
        let migration = status.map(|status| Migration(json!({"metadata": {"uid": "u"}, "status": status})));
        progress(migration.as_ref(), vmi.as_ref(), "u")
    }

    fn vmi(state: Value) -> Option<Value> {
        Some(json!({
            "metadata": {"annotations": {"ferrovirt.io/migration-progress":
                r#"{"migration": "u", "total": 1073741824, "processed": 536870912, "remaining": 268435456, "rate": 33554432}"#}},
            "status": {"migrationState": state},
        }))
    }

    #[test]
    fn state_is_read_from_both_objects() {
        let failed = |reason: &str| Progress::Failed(reason.to_owned());
        let goes = |text: &str| Progress::Waiting(text.to_owned());
        let done = json!({
            "migrationUid": "u", "completed": true, "sourceNode": "n1", "targetNode": "n2",
            "startTimestamp": "2026-01-01T00:00:00Z", "endTimestamp": "2026-01-01T00:00:07Z",
        });
        let moved = || Progress::Done("was migrated from node n1 to node n2 within 7 s".to_owned());
        let aborted = json!({"migrationUid": "u", "completed": true, "failed": true, "failureReason": "it broke"});
        let other = json!({"migrationUid": "other", "completed": true});
        for (status, vmi, expected) in [
            (Some(json!({})), None, goes("Pending")),
            (Some(json!({"phase": "Scheduling"})), None, goes("Scheduling")),
            (
                Some(json!({"phase": "Running"})),
                vmi(json!({"migrationUid": "u"})),
                goes("Running: 512.0 MiB of 1.0 GiB copied, 256.0 MiB remain, 32.0 MiB/s"),
            ),
            (Some(json!({"phase": "Running"})), None, goes("Running")),
            (Some(json!({"phase": "Succeeded", "migrationState": done})), None, moved()),
            (Some(json!({"phase": "Succeeded"})), vmi(done.clone()), moved()),
            (Some(json!({"phase": "Failed", "migrationState": aborted})), None, failed("it broke")),
            (Some(json!({"phase": "Failed"})), vmi(aborted.clone()), failed("it broke")),
            (Some(json!({"phase": "Failed"})), vmi(other.clone()), failed("its events say why")),
            // Deleted.
            (None, vmi(done.clone()), moved()),
            (None, vmi(aborted), failed("it broke")),
            (None, vmi(other), failed("it was deleted")),
            (None, None, failed("it was deleted")),
        ] {
            assert_eq!(shown(status.clone(), vmi), expected, "{status:?}");
        }
    }

    #[test]
    fn options_are_those_of_virtctl_and_a_wait() {
        let read = |words: &[&str]| match parse([&["kubectl-virt", "migrate", "vm"], words].concat()) {
            Ok(cli) => match cli.command {
                Command::Migrate(options) => Some(options),
                _ => None,
            },
            Err(_) => None,
        };
        let options = read(&["--addedNodeSelector=a=b,c=d", "--wait", "--timeout=60"]).unwrap();
        assert_eq!(options.added_node_selector, ["a=b", "c=d"]);
        assert_eq!((options.wait, options.timeout), (true, 60));
        assert!(read(&["--dry-run"]).is_some_and(|options| options.dry_run));
        for refused in [&["--wait", "--dry-run"][..], &["--timeout=60"], &["--wait", "--timeout=soon"]] {
            assert!(read(refused).is_none(), "{refused:?}");
        }
    }
}
