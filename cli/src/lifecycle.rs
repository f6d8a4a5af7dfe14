//! `start`, `stop`, `restart`, `pause`, `unpause`: commands of one request each.

use clap::{Args, ValueEnum};
use http::Method;
use serde_json::{Map, Value, json};

use crate::{
    Connection, Error, Kind, failed_while, object_name,
    running::{self, Goal},
    state::with_start,
    wait::WaitOptions,
};

/// Options of `start`.
#[derive(Args)]
pub(crate) struct StartOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Start the VM paused
    #[arg(long)]
    paused: bool,
    /// Remove the saved memory of a hibernated VM, and boot instead of resuming
    #[arg(long, conflicts_with = "paused")]
    discard: bool,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `stop`.
#[derive(Args)]
pub(crate) struct StopOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Seconds that the guest has for shutdown before it is stopped by force
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    grace_period: Option<i64>,
    /// Stop by force; needs --grace-period
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `restart`.
#[derive(Args)]
pub(crate) struct RestartOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Seconds that the guest has for shutdown; only 0 is supported, together with --force
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    grace_period: Option<i64>,
    /// Restart by force, without waiting for the guest; needs --grace-period=0
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `pause` and `unpause`.
#[derive(Args)]
pub(crate) struct PauseOptions {
    /// Target: vm NAME, vmi NAME, or NAME alone
    #[arg(value_names = ["TYPE", "NAME"], num_args = 1..=2, required = true)]
    words: Vec<String>,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// Options of `soft-reboot` and `reset`.
#[derive(Args)]
pub(crate) struct InstanceOptions {
    /// Name of the VirtualMachineInstance
    #[arg(value_name = "VMI")]
    vmi: String,
}

/// Renders the options as a request body. Without options the body is empty.
pub(crate) fn body(fields: &[(&str, Option<Value>)], dry_run: bool) -> Vec<u8> {
    let mut object: Map<String, Value> =
        fields.iter().filter_map(|(key, value)| value.clone().map(|v| ((*key).to_owned(), v))).collect();
    if dry_run {
        object.insert("dryRun".into(), json!(["All"]));
    }
    if object.is_empty() { Vec::new() } else { Value::Object(object).to_string().into_bytes() }
}

/// Calls a subresource of a VM, and reports that the action follows.
pub(crate) async fn act_on_vm(
    connection: &Connection,
    vm: &str,
    action: &str,
    body: Vec<u8>,
    dry_run: bool,
) -> Result<(), Error> {
    let name = object_name(vm)?;
    connection.call(Method::PUT, &connection.path("virtualmachines", name, action), body).await?;
    if dry_run {
        say!("Dry Run execution")?;
    }
    say!("VM {name} was scheduled to {action}")?;
    Ok(())
}

pub(crate) async fn start(connection: &Connection, options: &StartOptions) -> Result<(), Error> {
    let body = body(&[("paused", options.paused.then_some(Value::Bool(true)))], options.dry_run);
    let action = async {
        if options.discard {
            let name = object_name(&options.vm)?;
            discard(connection, name, options.dry_run).await?;
            let path = format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachines/{name}", connection.namespace);
            if !options.dry_run && connection.find(&path).await?.is_some_and(|vm| is_kept_running(&vm)) {
                return say!("VM {name} was scheduled to start");
            }
        }
        act_on_vm(connection, &options.vm, "start", body, options.dry_run).await
    };
    completed(connection, &options.vm, Goal::Running, &options.waiting, action).await
}

/// Requests to remove the saved memory of a VM.
pub(crate) async fn discard(connection: &Connection, vm: &str, dry_run: bool) -> Result<(), Error> {
    let body = body(&[("discard", Some(json!(true)))], dry_run);
    let answer = connection.call(Method::PUT, &connection.path("virtualmachines", vm, "hibernate"), body).await;
    answer.map(drop).map_err(failed_while("discarding the saved memory"))
}

/// Returns true for a VM that its run strategy starts, so that a request to start it is refused.
fn is_kept_running(vm: &Value) -> bool {
    let spec = &vm["spec"];
    matches!(spec["runStrategy"].as_str(), Some("Always" | "Once")) || spec["running"] == true
}

/// Carries out an action on a VM, and waits until it has its goal if the user asked for this.
async fn completed(
    connection: &Connection,
    vm: &str,
    goal: Goal,
    options: &WaitOptions,
    action: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    if !options.wait {
        return action.await;
    }
    let name = object_name(vm)?;
    let before = running::uid(connection, name).await?;
    action.await?;
    running::reach(connection, name, goal, before.as_deref(), options.timeout).await
}

impl StopOptions {
    fn check(&self) -> Result<(), Error> {
        match self.grace_period {
            Some(seconds) if seconds < 0 => Err(Error::Usage("--grace-period must not be negative".into())),
            None if self.force => Err(Error::Usage("--force requires --grace-period".into())),
            _ => Ok(()),
        }
    }
}

impl RestartOptions {
    fn check(&self) -> Result<(), Error> {
        match (self.force, self.grace_period) {
            (false, None) | (true, Some(0)) => Ok(()),
            (false, Some(_)) => Err(Error::Usage("--grace-period requires --force".into())),
            (true, _) => {
                Err(Error::Usage("--force requires --grace-period=0; other grace periods are not supported".into()))
            }
        }
    }
}

pub(crate) async fn stop(connection: &Connection, options: &StopOptions) -> Result<(), Error> {
    options.check()?;
    let body = body(&[("gracePeriod", options.grace_period.map(|s| json!(s)))], options.dry_run);
    let action = act_on_vm(connection, &options.vm, "stop", body, options.dry_run);
    completed(connection, &options.vm, Goal::Stopped, &options.waiting, action).await
}

pub(crate) async fn restart(connection: &Connection, options: &RestartOptions) -> Result<(), Error> {
    options.check()?;
    let body = body(&[("gracePeriodSeconds", options.grace_period.map(|s| json!(s)))], options.dry_run);
    let action = act_on_vm(connection, &options.vm, "restart", body, options.dry_run);
    let done = completed(connection, &options.vm, Goal::Running, &options.waiting, action).await;
    done.map_err(|error| with_start(object_name(&options.vm).unwrap_or_default(), error))
}

/// Calls a subresource of a running VMI. Its name is the command without the hyphen.
pub(crate) async fn act_on_instance(
    connection: &Connection,
    options: &InstanceOptions,
    command: &str,
) -> Result<(), Error> {
    let name = object_name(&options.vmi)?;
    let path = connection.path("virtualmachineinstances", name, &command.replace('-', ""));
    if let Err(error) = connection.call(Method::PUT, &path, Vec::new()).await {
        return Err(connection.explain(name, false, error).await);
    }
    say!("VMI {name} was scheduled to {command}")?;
    Ok(())
}

/// Parses labels of the form `LABEL=VALUE` into an object.
pub(crate) fn labels(words: &[String]) -> Result<Option<Value>, Error> {
    let pair = |word: &String| match word.split_once('=') {
        Some((label, value)) if !label.is_empty() => Ok((label.to_owned(), json!(value))),
        _ => Err(Error::Usage(format!("{word:?} is not of the form LABEL=VALUE"))),
    };
    let labels = words.iter().map(pair).collect::<Result<Map<_, _>, _>>()?;
    Ok((!labels.is_empty()).then_some(Value::Object(labels)))
}

impl PauseOptions {
    /// Returns the name, and true if the target is a VirtualMachine.
    fn target(&self) -> Result<(&str, bool), Error> {
        let (kind, name) = match self.words.as_slice() {
            [kind, name] => (Some(kind.as_str()), name),
            // A kind alone is a forgotten name.
            [kind] if Kind::from_str(kind, true).is_ok() => {
                let usage = "usage: kubectl virt pause|unpause vm|vmi NAME";
                return Err(Error::Usage(format!("the name of the {kind} is missing; {usage}")));
            }
            [name] => (name.split_once('/').map(|(kind, _)| kind), name),
            _ => return Err(Error::Usage("name one VM or VMI".into())),
        };
        let kind = kind.map(|kind| {
            Kind::from_str(kind, true)
                .map_err(|_| Error::Usage(format!("unknown resource type {kind:?}: use vm NAME or vmi NAME")))
        });
        Ok((object_name(name)?, kind.transpose()? == Some(Kind::Vm)))
    }
}

pub(crate) async fn pause(connection: &Connection, options: &PauseOptions, action: &str) -> Result<(), Error> {
    let (name, of_vm) = options.target()?;
    // A VirtualMachine and its VMI have the same name.
    let path = connection.path("virtualmachineinstances", name, action);
    if let Err(error) = connection.call(Method::PUT, &path, body(&[], options.dry_run)).await {
        return Err(connection.explain(name, of_vm, error).await);
    }
    if options.dry_run {
        say!("Dry Run execution")?;
    }
    say!("VMI {name} was scheduled to {action}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Command, parse};

    fn read(words: &[&str]) -> Option<Command> {
        parse([&["kubectl-virt"], words].concat()).ok().map(|cli| cli.command)
    }

    #[test]
    fn switches_take_values_as_those_of_kubectl_do() {
        for (switch, expected) in [
            (None, Some(false)),
            (Some("--paused"), Some(true)),
            (Some("--paused=true"), Some(true)),
            (Some("--paused=1"), Some(true)),
            (Some("--paused=false"), Some(false)),
            (Some("--paused=perhaps"), None),
        ] {
            let words = ["start", "a"].into_iter().chain(switch).collect::<Vec<_>>();
            let paused = match read(&words) {
                Some(Command::Start(options)) => Some(options.paused),
                _ => None,
            };
            assert_eq!(paused, expected, "{switch:?}");
        }
    }

    #[test]
    fn force_and_grace_period_go_together() {
        for (words, taken) in [
            (&["stop", "a"][..], true),
            (&["stop", "a", "--grace-period=5"], true),
            (&["stop", "a", "--grace-period=0", "--force"], true),
            (&["stop", "a", "--force=true"], false),
            (&["stop", "a", "--grace-period=-1"], false),
            (&["restart", "a", "--force=false"], true),
            (&["restart", "a", "--grace-period=0", "--force=true"], true),
            (&["restart", "a", "--grace-period", "0", "--force=false"], false),
            (&["restart", "a", "--grace-period=5", "--force"], false),
            (&["restart", "a", "--force"], false),
        ] {
            let checked = match read(words) {
                Some(Command::Stop(options)) => options.check(),
                Some(Command::Restart(options)) => options.check(),
                _ => panic!("another command: {words:?}"),
            };
            assert_eq!(checked.is_ok(), taken, "{words:?}");
        }
    }

    #[test]
    fn some_run_strategies_start_a_vm_without_saved_memory() {
        for (spec, expected) in [
            (json!({"runStrategy": "Always"}), true),
            (json!({"runStrategy": "Once"}), true),
            (json!({"running": true}), true),
            (json!({"running": false}), false),
            (json!({"runStrategy": "Manual"}), false),
            (json!({"runStrategy": "RerunOnFailure"}), false),
            (json!({"runStrategy": "Halted"}), false),
        ] {
            assert_eq!(is_kept_running(&json!({"spec": spec})), expected, "{spec}");
        }
        assert!(read(&["start", "a", "--discard", "--wait"]).is_some());
        assert!(read(&["start", "a", "--discard", "--paused"]).is_none());
    }

    #[test]
    fn actions_on_vms_can_wait() {
        for (words, expected) in [
            (&["start", "a"][..], Some((false, 300))),
            (&["start", "a", "--wait", "--timeout=0"], Some((true, 0))),
            (&["stop", "a", "--wait"], Some((true, 300))),
            (&["restart", "a", "--wait", "--timeout=60"], Some((true, 60))),
            (&["start", "a", "--timeout=60"], None),
            (&["stop", "a", "--wait", "--dry-run"], None),
        ] {
            let waiting = match read(words) {
                Some(Command::Start(options)) => Some(options.waiting),
                Some(Command::Stop(options)) => Some(options.waiting),
                Some(Command::Restart(options)) => Some(options.waiting),
                _ => None,
            };
            assert_eq!(waiting.map(|waiting| (waiting.wait, waiting.timeout)), expected, "{words:?}");
        }
    }

    #[test]
    fn paused_vms_are_named_with_and_without_their_kind() {
        for (words, expected) in [
            (&["vm", "a"][..], Some(("a", true))),
            (&["VirtualMachineInstances", "a"], Some(("a", false))),
            (&["a"], Some(("a", false))),
            (&["vm/a"], Some(("a", true))),
            (&["pod", "a"], None),
            (&["vm"], None),
            (&["vmis"], None),
            (&["vmi/vm"], Some(("vm", false))),
            (&["pod/a"], None),
            (&["vm", "a", "b"], None),
            (&[], None),
        ] {
            let words = [&["pause"], words].concat();
            let Some(Command::Pause(options)) = read(&words) else {
                assert_eq!(expected, None, "{words:?}");
                continue;
            };
            assert_eq!(options.target().ok(), expected, "{words:?}");
        }
    }

    #[test]
    fn labels_are_pairs() {
        assert_eq!(labels(&[]).unwrap(), None);
        assert_eq!(labels(&["a=b".into(), "c=".into()]).unwrap(), Some(json!({"a": "b", "c": ""})));
        assert!(labels(&["a".into()]).is_err());
    }

    #[test]
    fn bodies_contain_only_set_options() {
        for (made, expected) in [
            (body(&[("paused", None)], false), ""),
            (body(&[("paused", Some(json!(true)))], false), r#"{"paused":true}"#),
            (body(&[("gracePeriod", Some(json!(0)))], true), r#"{"dryRun":["All"],"gracePeriod":0}"#),
        ] {
            assert_eq!(String::from_utf8(made).unwrap(), expected);
        }
    }
}
