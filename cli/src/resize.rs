//! `set`: sockets and memory of a virtual machine, which its running guest follows.

use std::time::Duration;

use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Connection, Error, object_name};

/// Pause between looks at the objects.
const POLL: Duration = Duration::from_millis(500);
/// Reasons for which the guest does not follow, unless its node changes or the request is taken back.
const GIVEN_UP: [&str; 2] = ["PodResizeInfeasible", "PodResizeRefused"];

/// Likely causes of a size that the guest does not take.
const NOT_TAKEN: &str = "; offered, not taken by the guest: it may lack the driver virtio_mem, use the memory that it has to \
                         give back, or be slow under software emulation";
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
    /// Wait until the running guest has the size, and print the progress
    #[arg(long)]
    wait: bool,
    /// Longest wait in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
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
    /// Field of `status` of the VMI with the size that the guest has taken. No field has the processors that it uses.
    taken: Option<&'static str>,
    /// The value: sockets, or bytes.
    value: i64,
}

/// State of a change.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// The guest has the size, as far as the status of the VMI has it.
    Done,
    /// The guest is offered the size, and still has this one.
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
    let namespace = &connection.namespace;
    let vm_path = format!("/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{vm}");
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
    say!("VM {vm} was changed")?;
    if !common.wait {
        return Ok(());
    }
    let generation = parse(&patched)?["metadata"]["generation"].as_i64();
    let vmi_path = format!("/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{vm}");
    let end = Instant::now() + Duration::from_secs(common.timeout);
    let mut shown = String::new();
    loop {
        let vm_object = parse(&connection.call(Method::GET, &vm_path, Vec::new()).await?)?;
        let vmi = match connection.call(Method::GET, &vmi_path, Vec::new()).await {
            Ok(answer) => Some(parse(&answer)?),
            Err(Error::Refused { code: 404, .. }) => None,
            Err(error) => return Err(error),
        };
        let progress = progress(&target, generation, &vm_object, vmi.as_ref());
        let is_offered = matches!(progress, Progress::Offered(_));
        match progress {
            Progress::Done if target.taken.is_some() => return say!("the guest of VM {vm} has the size"),
            Progress::Done => {
                return say!("the guest of VM {vm} is offered the size; check in the guest that it uses it");
            }
            Progress::NextStart => return say!("VM {vm} does not run: its next start has the size"),
            Progress::Failed(reason) => {
                return Err(Error::Usage(format!("the guest of VM {vm} keeps its size: {reason}")));
            }
            Progress::Waiting(text) | Progress::Offered(text) => {
                let text = if is_offered { format!("the size is offered, the guest has {text}") } else { text };
                if text != shown {
                    say!("{text}")?;
                    shown = text;
                }
            }
        }
        if Instant::now() >= end {
            let seconds = common.timeout;
            let cause = if is_offered { NOT_TAKEN } else { "" };
            let message = format!("the guest of VM {vm} has not got the size within {seconds} s: {shown}{cause}");
            return Err(Error::Usage(message));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Describes a refusal for too many sockets, which the API server reports once per rule and without the maximum.
fn above_maximum(name: &str, sockets: i64, vm: &[u8]) -> Option<String> {
    let field = "spec.template.spec.domain.cpu.maxSockets";
    let most = parse(vm).ok()?.pointer(&format!("/{}", field.replace('.', "/")))?.as_i64()?;
    Some(format!("VM {name} cannot have {sockets} sockets: its maximum is {most} ({field})"))
}

fn parse(answer: &[u8]) -> Result<Value, Error> {
    serde_json::from_slice(answer).map_err(|error| Error::Transport(error.to_string()))
}

/// Returns the condition of an object.
fn condition<'a>(object: &'a Value, type_: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == type_)
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
            taken: None,
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
            taken: Some("/status/memory/guestCurrent"),
            value: bytes,
        })
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
    let is_final = |vmi: &Value| matches!(vmi["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    let Some(vmi) = vmi.filter(|vmi| !is_final(vmi)) else { return Progress::NextStart };
    // The status of an older generation says nothing about this change.
    let is_seen = vm["status"]["desiredGeneration"].as_i64() >= generation;
    if is_seen && let Some(restart) = condition(vm, "RestartRequired").filter(|restart| restart["status"] == "True") {
        return Progress::Failed(format!("a restart is required: {}", text(restart, "message")));
    }
    if !target.is_in(vmi, target.spec) {
        let failure = condition(vm, "Failure").filter(|failure| is_seen && failure["status"] == "True");
        let waits = failure.map_or("the VM's controller", |failure| text(failure, "message"));
        return Progress::Waiting(format!("waiting for {waits}"));
    }
    let change = condition(vmi, target.condition);
    if target.is_in(vmi, target.status) {
        // A change that was taken back leaves its reason until the pod has followed.
        let is_settled = change.is_none_or(|change| text(change, "reason").is_empty());
        let waiting = || Progress::Waiting("the launcher pod is being resized".to_owned());
        let missing = target.taken.filter(|field| !target.is_in(vmi, field));
        return match missing {
            _ if !is_settled => waiting(),
            Some(field) => {
                let current = vmi.pointer(field).and_then(Value::as_str);
                Progress::Offered(current.unwrap_or("an unknown size").to_owned())
            }
            None => Progress::Done,
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
    use crate::Cli;

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
            (vm(json!([])), Some(vmi(2, 2, none())), Progress::Done),
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
            (json!({"guestRequested": "2Gi", "guestCurrent": "1Gi"}), Progress::Offered("1Gi".to_owned())),
            (json!({"guestRequested": "2Gi"}), Progress::Offered("an unknown size".to_owned())),
            (json!({"guestRequested": "2Gi", "guestCurrent": "2048Mi"}), Progress::Done),
        ] {
            let target = Target::memory("2Gi").unwrap();
            assert_eq!(progress(&target, Some(3), &vm, Some(&vmi(memory.clone()))), expected, "{memory}");
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
