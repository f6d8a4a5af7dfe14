//! `hibernate`: saves the memory of a running VM to a claim and stops it, or discards saved memory.

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error, failed_while,
    lifecycle::{body, discard},
    object_name,
    wait::{self, Progress, WaitOptions},
};

/// Options of `hibernate`.
#[derive(Args)]
pub(crate) struct Options {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// PersistentVolumeClaim for the memory; default: one is made, and removed after the resume
    #[arg(long, value_name = "NAME", conflicts_with = "discard")]
    claim: Option<String>,
    /// Remove the saved memory, so that the next start boots
    #[arg(long)]
    discard: bool,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn run(connection: &Connection, options: &Options) -> Result<(), Error> {
    let vm = object_name(&options.vm)?;
    let claim = options.claim.as_deref().map(object_name).transpose()?;
    let verb = if options.discard {
        discard(connection, vm, options.dry_run).await?;
        "discard"
    } else {
        let path = connection.path("virtualmachines", vm, "hibernate");
        let body = body(&[("claimName", claim.map(|name| json!(name)))], options.dry_run);
        connection.call(Method::PUT, &path, body).await.map_err(failed_while("hibernating the VM"))?;
        "hibernation"
    };
    if !options.waiting.wait {
        return say!("VM {vm}: {verb} was requested");
    }
    let path = format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachines/{vm}", connection.namespace);
    let timeout = options.waiting.timeout;
    let late = |shown: &str| format!("the {verb} of VM {vm} is not complete within {timeout} s and goes on: {shown}");
    wait::follow(timeout, late, async || Ok(progress(vm, options.discard, connection.find(&path).await?.as_ref())))
        .await
}

/// Returns how far a hibernation, or the removal of its memory, is.
fn progress(name: &str, discards: bool, vm: Option<&Value>) -> Progress {
    let Some(vm) = vm else { return Progress::Failed(format!("VM {name} was deleted")) };
    let (hibernation, created) = (&vm["status"]["hibernation"], vm["status"]["created"] == true);
    let message = hibernation["message"].as_str();
    match (hibernation["phase"].as_str(), discards) {
        (None, true) => Progress::Done(format!("VM {name} boots at its next start")),
        (None, false) => Progress::Failed(format!("the hibernation of VM {name} was discarded")),
        (Some(_), true) => Progress::Waiting(message.unwrap_or("the saved memory is removed").to_owned()),
        (Some("Failed"), false) => {
            Progress::Failed(format!("VM {name} was not hibernated: {}", message.unwrap_or_default()))
        }
        (Some("Hibernated"), false) if created => Progress::Waiting("the VMI is removed".to_owned()),
        (Some("Hibernated"), false) => Progress::Done(format!(
            "VM {name} is hibernated in claim {}",
            hibernation["claimName"].as_str().unwrap_or_default()
        )),
        (Some(_), false) => Progress::Waiting(message.unwrap_or("the guest's memory is saved").to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::parse;

    #[test]
    fn a_claim_is_not_for_memory_that_is_discarded() {
        for (words, accepted) in [
            (&["a"][..], true),
            (&["a", "--claim=c", "--wait", "--timeout=9"], true),
            (&["a", "--discard", "--wait"], true),
            (&["a", "--discard", "--claim=c"], false),
            (&[], false),
        ] {
            assert_eq!(parse([&["kubectl-virt", "hibernate"], words].concat()).is_ok(), accepted, "{words:?}");
        }
    }

    #[test]
    fn progress_follows_the_status() {
        let vm = |phase: &str, created: bool| {
            json!({"status": {
                "created": created, "hibernation": {"phase": phase, "claimName": "c", "message": "why"},
            }})
        };
        for (vm, discards, expected) in [
            (vm("Requested", true), false, Progress::Waiting("why".into())),
            (vm("Failed", true), false, Progress::Failed("VM v was not hibernated: why".into())),
            (vm("Hibernated", true), false, Progress::Waiting("the VMI is removed".into())),
            (vm("Hibernated", false), false, Progress::Done("VM v is hibernated in claim c".into())),
            (vm("Removing", false), true, Progress::Waiting("why".into())),
            (json!({}), true, Progress::Done("VM v boots at its next start".into())),
            (json!({}), false, Progress::Failed("the hibernation of VM v was discarded".into())),
        ] {
            assert_eq!(progress("v", discards, Some(&vm)), expected, "{vm}");
        }
        assert_eq!(progress("v", false, None), Progress::Failed("VM v was deleted".into()));
    }
}
