//! Explains why a VMI cannot be used: the state of its VM, and the command that changes it.

use http::Method;
use serde_json::Value;

use crate::{Connection, Error, Kind, subresource::Stream, target::Target};

/// Returns true if a refusal may be due to a VM that does not run.
fn may_be_stopped(name: &str, error: &Error) -> bool {
    match error {
        Error::Refused { code: 404, .. } => true,
        // Screenshots fail with 500 for each of these reasons.
        Error::Refused { code: 400 | 409 | 500, message } => {
            message.contains("not running") || is_missing_vmi(name, error)
        }
        _ => false,
    }
}

/// Returns true if the refusal says that the VMI does not exist.
fn is_missing_vmi(name: &str, error: &Error) -> bool {
    matches!(error, Error::Refused { message, .. } if message.contains(&format!("{name:?} not found")))
}

/// Returns the condition of an object.
pub(crate) fn find<'a>(object: &'a Value, type_: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == type_)
}

/// Returns the run strategy of a VM.
pub(crate) fn strategy(vm: &Value) -> &str {
    match (&vm["spec"]["running"], vm["spec"]["runStrategy"].as_str()) {
        (Value::Bool(true), _) => "Always",
        (_, Some(strategy)) => strategy,
        _ => "Halted",
    }
}

/// Describes a VM whose VMI is missing or has ended. Returns `None` for a VM that runs. The status of a VM follows its VMI
/// late: a VM without a VMI does not run.
fn describe(name: &str, vm: &Value, is_missing: bool) -> Option<String> {
    let state = vm["status"]["printableStatus"].as_str().unwrap_or_default();
    let is_late = is_missing && matches!(state, "Running" | "Paused" | "Migrating" | "Stopping");
    match state {
        _ if state == "Stopped" || (is_late && strategy(vm) == "Halted") => {
            Some(format!("VM {name} is stopped; start it with: kubectl virt start {name}"))
        }
        _ if is_late => Some(format!("VM {name} has no VMI at the moment; see: kubectl describe vm {name}")),
        "Running" | "Paused" | "Migrating" => None,
        "" => Some(format!("VM {name} has no VMI yet; see: kubectl describe vm {name}")),
        _ => Some(format!("VM {name} is not running: its state is {state}; see: kubectl describe vm {name}")),
    }
}

/// Appends the command that starts a halted VM to the refusal of its restart.
pub(crate) fn with_start(name: &str, error: Error) -> Error {
    match error {
        Error::Refused { code, message }
            if code == 409
                && (message.contains("Halted") || message.contains("VM is not running"))
                && !message.contains("start it with") =>
        {
            Error::Refused { code, message: format!("{message}; start it with: kubectl virt start {name}") }
        }
        other => other,
    }
}

impl Connection {
    /// Opens a stream to a VMI.
    pub(crate) async fn stream_of(&self, name: &str, of_vm: bool, path: &str) -> Result<Stream, Error> {
        match self.stream(path).await {
            Err(error) => Err(self.explain(name, of_vm, error).await),
            opened => opened,
        }
    }

    /// Fails if the VMI of the target is missing or has ended. One that is starting passes, and so does one that the user may
    /// not read.
    pub(crate) async fn ensure_vmi(&self, target: &Target) -> Result<(), Error> {
        let name = &target.name;
        let path = self.object_path("virtualmachineinstances", name);
        match check_vmi(name, self.call(Method::GET, &path, Vec::new()).await.as_deref()) {
            Some(error) => Err(self.explain(name, target.kind == Kind::Vm, error).await),
            None => Ok(()),
        }
    }

    /// Fails if an object does not exist. One that the user may not read passes.
    pub(crate) async fn ensure_exists(&self, path: &str) -> Result<(), Error> {
        match self.call(Method::GET, path, Vec::new()).await {
            Err(missing @ Error::Refused { code: 404, .. }) => Err(missing),
            _ => Ok(()),
        }
    }

    /// Replaces a refusal that a VM which does not run may have caused. With `of_vm`, the user named a VM.
    pub(crate) async fn explain(&self, name: &str, of_vm: bool, error: Error) -> Error {
        if !may_be_stopped(name, &error) {
            return error;
        }
        let path = self.object_path("virtualmachines", name);
        match self.call(Method::GET, &path, Vec::new()).await {
            Ok(answer) => explained(name, &answer, error),
            Err(missing @ Error::Refused { code: 404, .. }) if of_vm => missing,
            // The user may not be allowed to read VMs.
            Err(_) => error,
        }
    }
}

/// Returns the refusal for a VMI that is missing or has ended.
fn check_vmi(name: &str, answer: Result<&[u8], &Error>) -> Option<Error> {
    match answer {
        Ok(vmi) => {
            let vmi = serde_json::from_slice::<Value>(vmi).ok()?;
            let is_final = matches!(vmi["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
            is_final.then(|| Error::Refused { code: 409, message: format!("VMI {name} is not running") })
        }
        Err(Error::Refused { code: 404, message }) => Some(Error::Refused { code: 404, message: message.clone() }),
        Err(_) => None,
    }
}

/// Replaces a refusal by the state of the VM.
fn explained(name: &str, vm: &[u8], error: Error) -> Error {
    let is_missing = is_missing_vmi(name, &error);
    let state = serde_json::from_slice(vm).ok().and_then(|vm| describe(name, &vm, is_missing));
    match (error, state) {
        (Error::Refused { code, .. }, Some(message)) => Error::Refused { code, message },
        (error, _) => error,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(code: u16, message: &str) -> Error {
        Error::Refused { code, message: message.to_owned() }
    }

    #[test]
    fn refusals_name_the_state_of_the_vm() {
        let vm = |state: &str| json!({"status": {"printableStatus": state}}).to_string().into_bytes();
        for (vm, expected) in [
            (vm("Stopped"), "VM m is stopped; start it with: kubectl virt start m"),
            (vm("Starting"), "VM m is not running: its state is Starting; see: kubectl describe vm m"),
            (b"{}".to_vec(), "VM m has no VMI yet; see: kubectl describe vm m"),
            (vm("Running"), "not found"),
            (b"?".to_vec(), "not found"),
        ] {
            assert_eq!(explained("m", &vm, refused(404, "not found")).to_string(), expected);
        }
    }

    #[test]
    fn late_status_of_a_vm_does_not_hide_that_its_vmi_is_gone() {
        let stopped = "VM m is stopped; start it with: kubectl virt start m";
        let missing = "virtualmachineinstance.kubevirt.io \"m\" not found";
        for (strategy, state, refusal, expected) in [
            ("Halted", "Running", missing, stopped),
            ("Halted", "Stopping", missing, stopped),
            ("Manual", "Running", missing, "VM m has no VMI at the moment; see: kubectl describe vm m"),
            ("Halted", "Running", "the server could not find it", "the server could not find it"),
        ] {
            let vm = json!({"spec": {"runStrategy": strategy}, "status": {"printableStatus": state}}).to_string();
            let said = explained("m", vm.as_bytes(), refused(404, refusal)).to_string();
            assert_eq!(said, expected, "{strategy} {state} {refusal}");
        }
    }

    #[test]
    fn strategy_is_read_from_both_fields() {
        for (spec, expected) in [
            (json!({"runStrategy": "Manual"}), "Manual"),
            (json!({"running": true}), "Always"),
            (json!({"running": false}), "Halted"),
            (json!({}), "Halted"),
        ] {
            assert_eq!(strategy(&json!({"spec": spec})), expected, "{spec}");
        }
    }

    #[test]
    fn ports_are_forwarded_only_to_vmis_that_have_not_ended() {
        let vmi = |phase: &str| json!({"status": {"phase": phase}}).to_string().into_bytes();
        for (answer, expected) in [
            (Ok(vmi("Running")), None),
            (Ok(vmi("Scheduling")), None),
            (Ok(vmi("Failed")), Some("VMI m is not running")),
            (Err(refused(404, "not found")), Some("not found")),
            (Err(refused(403, "forbidden")), None),
        ] {
            let error = check_vmi("m", answer.as_deref()).map(|error| error.to_string());
            assert_eq!(error.as_deref(), expected, "{answer:?}");
        }
    }

    #[test]
    fn only_refusals_that_a_stopped_vm_causes_are_looked_into() {
        for (error, expected) in [
            (refused(404, "not found"), true),
            (refused(409, "Operation cannot be fulfilled: VMI is not running"), true),
            (refused(400, "VMI is not running"), true),
            (refused(500, "GetScreenshot failed: domain is not running"), true),
            (refused(500, "virtualmachineinstance.kubevirt.io \"m\" not found"), true),
            (refused(500, "virtualmachineinstance.kubevirt.io \"other\" not found"), false),
            (refused(500, "no answer of virt-handler"), false),
            (refused(409, "VMI is paused"), false),
            (refused(403, "VMI is not running"), false),
            (Error::Transport("no route: not running".to_owned()), false),
        ] {
            assert_eq!(may_be_stopped("m", &error), expected, "{error}");
        }
    }

    #[test]
    fn refused_restarts_of_halted_vms_name_the_command() {
        let halted = "RunStategy Halted does not support manual restart requests";
        for (code, message, expected) in [
            (
                409,
                halted,
                "RunStategy Halted does not support manual restart requests; start it with: kubectl virt start m",
            ),
            (409, "VM is not running: Halted", "VM is not running: Halted; start it with: kubectl virt start m"),
            (409, "another request is pending", "another request is pending"),
            (
                409,
                "VM is not running: Halted: VM m is stopped; start it with: kubectl virt start m",
                "VM is not running: Halted: VM m is stopped; start it with: kubectl virt start m",
            ),
            (403, halted, halted),
        ] {
            assert_eq!(with_start("m", refused(code, message)).to_string(), expected);
        }
    }
}
