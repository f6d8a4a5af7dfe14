//! `set`: sockets and memory of a virtual machine, which its running guest follows.

use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error,
    guest::read,
    object_name,
    state::find,
    wait::{self, WaitOptions},
};

/// Reasons for which the guest does not follow, unless its node changes or the request is taken back.
const GIVEN_UP: [&str; 2] = ["PodResizeInfeasible", "PodResizeRefused"];

/// Beginning of the text about a size that the guest has not taken yet.
const OFFERED: &str = "the size is offered";
/// Part of the refusal of more sockets than the maximum.
const TOO_MANY_SOCKETS: &str = "greater than the maximum sockets allowed";

/// The size that is set.
#[derive(Subcommand)]
pub(crate) enum SetCommand {
    /// Set the number of CPU sockets of a VM
    Cpu(CpuOptions),
    /// Set the memory of a VM
    Memory(MemoryOptions),
}

/// Options of `set cpu`.
#[derive(Args)]
pub(crate) struct CpuOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Number of sockets
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    sockets: u32,
    #[command(flatten)]
    common: CommonOptions,
}

/// Options of `set memory`.
#[derive(Args)]
pub(crate) struct MemoryOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Memory of the guest, such as 2Gi
    #[arg(long, value_name = "SIZE")]
    guest: String,
    #[command(flatten)]
    common: CommonOptions,
}

/// Options of both.
#[derive(Args)]
struct CommonOptions {
    #[command(flatten)]
    waiting: WaitOptions,
    /// Check the request without changing anything
    #[arg(long)]
    dry_run: bool,
}

/// What is set, and where it shows.
struct Target {
    /// Condition of the VMI.
    condition: &'static str,
    /// Merge patch of `spec.template.spec.domain`.
    patch: Value,
    /// Field of `spec.domain` of the VMI.
    spec: &'static str,
    /// Field of `status` of the VMI with the size that the guest is offered.
    status: &'static str,
    /// Part of `status` of the VMI that shows if the guest has taken the size.
    taken: Taken,
    /// Likely causes of a size that the guest does not take.
    causes: &'static str,
    /// The value: sockets, or bytes.
    value: i64,
}

/// Part of `status` that shows if the guest has taken its size.
enum Taken {
    /// Field with the size that it has taken.
    Field(&'static str),
    /// Condition, which exists if the guest agent reports it.
    Condition(&'static str),
}

/// State of a change.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// The guest has the size.
    Done,
    /// The guest is offered the size, and nothing shows if it uses it.
    Unknown,
    /// The guest is offered the size, and this is what it uses.
    Offered(String),
    /// The VM does not run.
    NextStart,
    /// The guest does not follow, for this reason.
    Failed(String),
    /// The guest is about to follow.
    Waiting(String),
}

pub(crate) async fn set(connection: &Connection, command: &SetCommand) -> Result<(), Error> {
    let (vm, target, common) = match command {
        SetCommand::Cpu(options) => (object_name(&options.vm)?, Target::cpu(options.sockets), &options.common),
        SetCommand::Memory(options) => (object_name(&options.vm)?, Target::memory(&options.guest)?, &options.common),
    };
    let vm_path = connection.object_path("virtualmachines", vm);
    let query = if common.dry_run { "?dryRun=All" } else { "" };
    let body = json!({"spec": {"template": {"spec": {"domain": target.patch}}}}).to_string().into_bytes();
    let patched = match connection.patch(&format!("{vm_path}{query}"), body).await {
        Err(Error::Refused { code, message }) if message.contains(TOO_MANY_SOCKETS) => {
            let vm_object = connection.call(Method::GET, &vm_path, Vec::new()).await;
            let said = vm_object.ok().and_then(|vm_object| above_maximum(vm, target.value, &vm_object));
            return Err(Error::Refused { code, message: said.unwrap_or(message) });
        }
        patched => patched?,
    };
    if common.dry_run {
        return say!("VM {vm} can get the size (dry run)");
    }
    let vmi_path = connection.object_path("virtualmachineinstances", vm);
    if !common.waiting.wait {
        // The VM is changed, even if the user may not read its VMI.
        let vmi = connection.find(&vmi_path).await;
        return say!("VM {vm} was changed: {}", outlook(vm, vmi.as_ref().map(Option::as_ref)));
    }
    say!("VM {vm} was changed")?;
    let generation = read(&patched)?["metadata"]["generation"].as_i64();
    let timeout = common.waiting.timeout;
    let late = |shown: &str| {
        let late = format!("the guest of VM {vm} has not got the size within {timeout} s: {shown}");
        if !shown.starts_with(OFFERED) {
            return late;
        }
        format!("{late}; offered, not taken by the guest: it may {}", target.causes)
    };
    wait::follow(timeout, late, async || {
        let vm_object = read(&connection.call(Method::GET, &vm_path, Vec::new()).await?)?;
        let vmi = connection.find(&vmi_path).await?;
        Ok(progress(&target, generation, &vm_object, vmi.as_ref()).of_vm(vm))
    })
    .await
}

impl Progress {
    /// Describes the progress to the user.
    fn of_vm(self, vm: &str) -> wait::Progress {
        match self {
            Self::Done => wait::Progress::Done(format!("the guest of VM {vm} has the size")),
            Self::Unknown => {
                let text = format!("the guest of VM {vm} is offered the size; check in the guest that it uses it");
                wait::Progress::Done(text)
            }
            Self::NextStart => wait::Progress::Done(format!("VM {vm} does not run: its next start has the size")),
            Self::Failed(reason) => wait::Progress::Failed(format!("the guest of VM {vm} keeps its size: {reason}")),
            Self::Offered(present) => wait::Progress::Waiting(format!("{OFFERED}, {present}")),
            Self::Waiting(text) => wait::Progress::Waiting(text),
        }
    }
}

/// Says when the guest of a VM that was changed has the size.
fn outlook(vm: &str, vmi: Result<Option<&Value>, &Error>) -> String {
    match vmi {
        Ok(vmi) if vmi.is_none_or(is_final) => "it does not run, its next start has the size".to_owned(),
        _ => format!(
            "its running guest follows, unless the condition RestartRequired of the VM says why not (kubectl describe \
             vm {vm}); --wait waits for it"
        ),
    }
}

/// Returns true if the guest of a VMI has ended.
fn is_final(vmi: &Value) -> bool {
    matches!(vmi["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

/// Describes a refusal for too many sockets, which the API server reports once per rule and without the maximum.
fn above_maximum(name: &str, sockets: i64, vm: &[u8]) -> Option<String> {
    let field = "spec.template.spec.domain.cpu.maxSockets";
    let most = read(vm).ok()?.pointer(&format!("/{}", field.replace('.', "/")))?.as_i64()?;
    Some(format!("VM {name} cannot have {sockets} sockets: its maximum is {most} ({field})"))
}

fn text<'a>(condition: &'a Value, field: &str) -> &'a str {
    condition[field].as_str().unwrap_or_default()
}

impl Target {
    fn cpu(sockets: u32) -> Self {
        Self {
            condition: "HotVCPUChange",
            patch: json!({"cpu": {"sockets": sockets}}),
            spec: "/spec/domain/cpu/sockets",
            status: "/status/currentCPUTopology/sockets",
            taken: Taken::Condition("GuestVCPUsOnline"),
            causes: "not be configured to use new vCPUs (echo 1 >/sys/devices/system/cpu/cpu1/online), or ignore \
                     them under software emulation",
            value: i64::from(sockets),
        }
    }

    fn memory(guest: &str) -> Result<Self, Error> {
        let bytes = bytes(guest).ok_or_else(|| Error::Usage(not_an_amount(guest)))?;
        Ok(Self {
            condition: "HotMemoryChange",
            patch: json!({"memory": {"guest": guest}}),
            spec: "/spec/domain/memory/guest",
            status: "/status/memory/guestRequested",
            taken: Taken::Field("/status/memory/guestCurrent"),
            causes: "lack the driver virtio_mem, use the memory that it has to give back, or be slow under \
                     software emulation",
            value: bytes,
        })
    }

    /// Returns the progress of a guest that is offered the size.
    fn taken(&self, vmi: &Value) -> Progress {
        match self.taken {
            Taken::Field(field) if self.is_in(vmi, field) => Progress::Done,
            Taken::Field(field) => {
                let current = vmi.pointer(field).and_then(Value::as_str);
                Progress::Offered(format!("the guest has {}", current.unwrap_or("an unknown size")))
            }
            Taken::Condition(type_) => match find(vmi, type_) {
                Some(online) if online["status"] == "True" => Progress::Done,
                Some(offline) => Progress::Offered(text(offline, "message").to_owned()),
                None => Progress::Unknown,
            },
        }
    }

    /// Returns true if the field of an object has the value.
    fn is_in(&self, object: &Value, field: &str) -> bool {
        match object.pointer(field) {
            Some(Value::String(amount)) => bytes(amount) == Some(self.value),
            Some(value) => value.as_i64() == Some(self.value),
            None => false,
        }
    }
}

/// Describes text that is no amount of memory. Kubernetes has no unit `GB`.
fn not_an_amount(text: &str) -> String {
    let wrong = format!("{text:?} is not an amount of memory");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[number.len()..].to_ascii_uppercase();
    let prefix = unit.trim_end_matches('B').trim_end_matches('I');
    match prefix {
        "K" | "M" | "G" | "T" if bytes(number).is_some() => {
            let decimal = if prefix == "K" { "k" } else { prefix };
            format!("{wrong}: use {number}{decimal} or {number}{prefix}i")
        }
        _ => format!("{wrong}; examples: 512Mi, 2Gi"),
    }
}

/// Parses an amount of memory.
fn bytes(amount: &str) -> Option<i64> {
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(amount.to_owned());
    api::quantity::units(&quantity).ok().filter(|bytes| *bytes > 0)
}

/// Decides how far the change is, from the VM and its VMI.
fn progress(target: &Target, generation: Option<i64>, vm: &Value, vmi: Option<&Value>) -> Progress {
    let Some(vmi) = vmi.filter(|vmi| !is_final(vmi)) else { return Progress::NextStart };
    // The status of an older generation says nothing about this change.
    let is_seen = vm["status"]["desiredGeneration"].as_i64() >= generation;
    if is_seen && let Some(restart) = find(vm, "RestartRequired").filter(|restart| restart["status"] == "True") {
        return Progress::Failed(format!("a restart is required: {}", text(restart, "message")));
    }
    if !target.is_in(vmi, target.spec) {
        let failure = find(vm, "Failure").filter(|failure| is_seen && failure["status"] == "True");
        let waits = failure.map_or("the VM's controller", |failure| text(failure, "message"));
        return Progress::Waiting(format!("waiting for {waits}"));
    }
    let change = find(vmi, target.condition);
    if target.is_in(vmi, target.status) {
        // A change that was taken back leaves its reason until the pod has followed.
        let is_settled = change.is_none_or(|change| text(change, "reason").is_empty());
        return if is_settled {
            target.taken(vmi)
        } else {
            Progress::Waiting("the launcher pod is being resized".to_owned())
        };
    }
    match change {
        None => Progress::Waiting("the launcher pod is about to be resized".to_owned()),
        Some(change) => {
            let (reason, message) = (text(change, "reason"), text(change, "message"));
            if change["status"] == "False" || GIVEN_UP.contains(&reason) {
                return Progress::Failed(message.to_owned());
            }
            Progress::Waiting(match reason {
                "PodResized" => "the launcher pod was resized, the guest follows".to_owned(),
                "" => "the launcher pod is being resized".to_owned(),
                _ => message.to_owned(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::command_line::Cli;

    #[test]
    fn progress_follows_the_conditions() {
        let vm = |conditions: Value| json!({"status": {"desiredGeneration": 3, "conditions": conditions}});
        let vmi = |sockets: u32, present: u32, condition: Value| {
            json!({
                "spec": {"domain": {"cpu": {"sockets": sockets}}},
                "status": {"phase": "Running", "currentCPUTopology": {"sockets": present}, "conditions": [condition]},
            })
        };
        let change = |status: &str, reason: &str| json!({"type": "HotVCPUChange", "status": status, "reason": reason, "message": "why"});
        let online = |status: &str| json!({"type": "GuestVCPUsOnline", "status": status, "message": "1 of 2"});
        let none = || json!({"type": "Ready", "status": "True"});
        let restart = json!([{"type": "RestartRequired", "status": "True", "message": "fewer"}]);
        let busy = json!([{"type": "Failure", "status": "True", "message": "another change"}]);
        let waiting = |text: &str| Progress::Waiting(text.to_owned());
        for (vm, vmi, expected) in [
            (vm(json!([])), None, Progress::NextStart),
            (vm(json!([])), Some(vmi(1, 1, none())), waiting("waiting for the VM's controller")),
            (vm(busy), Some(vmi(1, 1, none())), waiting("waiting for another change")),
            (vm(restart), Some(vmi(1, 1, none())), Progress::Failed("a restart is required: fewer".to_owned())),
            (vm(json!([])), Some(vmi(2, 1, none())), waiting("the launcher pod is about to be resized")),
            (vm(json!([])), Some(vmi(2, 1, change("True", ""))), waiting("the launcher pod is being resized")),
            (
                vm(json!([])),
                Some(vmi(2, 1, change("True", "PodResized"))),
                waiting("the launcher pod was resized, the guest follows"),
            ),
            (vm(json!([])), Some(vmi(2, 1, change("True", "PodResizeDeferred"))), waiting("why")),
            (vm(json!([])), Some(vmi(2, 1, change("True", "PodResizeRefused"))), Progress::Failed("why".to_owned())),
            (vm(json!([])), Some(vmi(2, 1, change("False", "CPUHotplugFailed"))), Progress::Failed("why".to_owned())),
            (vm(json!([])), Some(vmi(2, 2, none())), Progress::Unknown),
            (vm(json!([])), Some(vmi(2, 2, online("True"))), Progress::Done),
            (vm(json!([])), Some(vmi(2, 2, online("False"))), Progress::Offered("1 of 2".to_owned())),
            (
                vm(json!([])),
                Some(vmi(2, 2, change("True", "PodResizeRefused"))),
                waiting("the launcher pod is being resized"),
            ),
        ] {
            assert_eq!(progress(&Target::cpu(2), Some(3), &vm, vmi.as_ref()), expected, "{vm} {vmi:?}");
        }
    }

    #[test]
    fn memory_is_waited_for_until_the_guest_has_it() {
        let vm = json!({"status": {"desiredGeneration": 3}});
        let vmi = |memory: Value| {
            json!({
                "spec": {"domain": {"memory": {"guest": "2Gi"}}},
                "status": {"phase": "Running", "memory": memory},
            })
        };
        for (memory, expected) in [
            (
                json!({"guestRequested": "2Gi", "guestCurrent": "1Gi"}),
                Progress::Offered("the guest has 1Gi".to_owned()),
            ),
            (json!({"guestRequested": "2Gi"}), Progress::Offered("the guest has an unknown size".to_owned())),
            (json!({"guestRequested": "2Gi", "guestCurrent": "2048Mi"}), Progress::Done),
        ] {
            let target = Target::memory("2Gi").unwrap();
            assert_eq!(progress(&target, Some(3), &vm, Some(&vmi(memory.clone()))), expected, "{memory}");
        }
    }

    #[test]
    fn change_without_a_wait_says_when_the_guest_has_the_size() {
        let vmi = |phase: &str| json!({"status": {"phase": phase}});
        let forbidden = Error::Refused { code: 403, message: "forbidden".to_owned() };
        let later = "it does not run, its next start has the size";
        let follows = "its running guest follows, unless the condition RestartRequired of the VM says why not (kubectl describe \
                       vm m); --wait waits for it";
        for (vmi, expected) in [
            (Ok(None), later),
            (Ok(Some(&vmi("Failed"))), later),
            (Ok(Some(&vmi("Running"))), follows),
            (Err(&forbidden), follows),
        ] {
            assert_eq!(outlook("m", vmi), expected, "{vmi:?}");
        }
    }

    #[test]
    fn too_many_sockets_name_the_maximum() {
        let vm = br#"{"spec": {"template": {"spec": {"domain": {"cpu": {"maxSockets": 4}}}}}}"#;
        let expected = "VM m cannot have 8 sockets: its maximum is 4 (spec.template.spec.domain.cpu.maxSockets)";
        assert_eq!(above_maximum("m", 8, vm).as_deref(), Some(expected));
        assert_eq!(above_maximum("m", 8, b"{}"), None);
    }

    #[test]
    fn amounts_are_compared_by_value() {
        let target = Target::memory("2Gi").unwrap();
        assert!(target.is_in(&json!({"spec": {"domain": {"memory": {"guest": "2048Mi"}}}}), target.spec));
        assert!(!target.is_in(&json!({"status": {}}), target.status));
        assert!(Target::memory("much").is_err() && Target::memory("-1Gi").is_err());
    }

    #[test]
    fn wrong_units_name_the_right_ones() {
        for (text, expected) in [
            ("2GB", "\"2GB\" is not an amount of memory: use 2G or 2Gi"),
            ("1.5GiB", "\"1.5GiB\" is not an amount of memory: use 1.5G or 1.5Gi"),
            ("512mb", "\"512mb\" is not an amount of memory: use 512M or 512Mi"),
            ("9KB", "\"9KB\" is not an amount of memory: use 9k or 9Ki"),
            ("much", "\"much\" is not an amount of memory; examples: 512Mi, 2Gi"),
            ("-2GB", "\"-2GB\" is not an amount of memory; examples: 512Mi, 2Gi"),
        ] {
            assert_eq!(Target::memory(text).err().map(|error| error.to_string()).as_deref(), Some(expected));
        }
    }

    #[test]
    fn wrong_arguments_are_rejected_before_any_request() {
        for words in
            [&["set", "cpu", "vm"][..], &["set", "cpu", "vm", "--sockets=0"], &["set", "memory", "vm"], &["set"]]
        {
            assert!(Cli::try_parse_from([&["kubectl-virt"], words].concat()).is_err(), "{words:?}");
        }
        let words = ["kubectl-virt", "set", "memory", "vm", "--guest=2Gi", "--wait", "--timeout=60"];
        assert!(Cli::try_parse_from(words).is_ok());
    }
}
