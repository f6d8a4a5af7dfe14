//! The place of a review in the trace of a VM's start.

use api::traceparent::{TraceParent, is_new};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::{AdmissionRequest, Operation, TrustedUsers};

/// JSON pointer to [`api::constants::annotation::TRACEPARENT`].
const CONTEXT: &str = "/metadata/annotations/ferrovirt.io~1traceparent";

/// The place of a review in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewTrace {
    /// It begins a trace.
    First,
    /// It belongs to this trace.
    Part(TraceParent),
}

/// Returns the place of a review of a VM or VMI: the mutating review of a new object begins a trace, unless virt-controller passes on
/// that of its VM. Changes of a VMI belong to the trace until the guest runs. `mutates`: the webhook sets the context.
pub(crate) fn of(
    request: &AdmissionRequest,
    mutates: bool,
    trusted: &TrustedUsers,
    now: Timestamp,
) -> Option<ReviewTrace> {
    let text = |pointer: &str| request.object.pointer(pointer).and_then(Value::as_str);
    let known = || text(CONTEXT)?.parse::<TraceParent>().ok();
    match request.operation {
        Operation::Create if mutates => {
            let is_vmi = request.resource.resource == "virtualmachineinstances";
            let passed_on = trusted.is(&request.user_info, api::constants::component::CONTROLLER_SERVICE_ACCOUNT);
            let known = known().filter(|_| is_vmi && passed_on);
            Some(known.map_or(ReviewTrace::First, ReviewTrace::Part))
        }
        Operation::Create => known().map(ReviewTrace::Part),
        Operation::Update => {
            // VMs have no such phases.
            let phase = request.old_object.pointer("/status/phase").and_then(Value::as_str)?;
            let created = text("/metadata/creationTimestamp")?.parse().ok()?;
            let is_starting = matches!(phase, "Pending" | "Scheduling" | "Scheduled");
            known().filter(|_| is_starting && is_new(created, now)).map(ReviewTrace::Part)
        }
        Operation::Delete | Operation::Connect => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KNOWN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn place(operation: &str, plural: &str, user: &str, mutates: bool, phase: &str, context: &str) -> &'static str {
        let request: AdmissionRequest = serde_json::from_value(json!({
            "uid": "u",
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": plural},
            "operation": operation,
            "userInfo": {"username": user},
            "object": {"metadata": {
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {api::constants::annotation::TRACEPARENT: context},
            }},
            "oldObject": {"status": {"phase": phase}},
        }))
        .unwrap();
        let trusted = TrustedUsers::new("kubevirt");
        match of(&request, mutates, &trusted, "2026-01-01T00:01:00Z".parse().unwrap()) {
            None => "none",
            Some(ReviewTrace::First) => "first",
            Some(ReviewTrace::Part(part)) => {
                assert_eq!(part.to_string(), context);
                "part"
            }
        }
    }

    #[test]
    fn the_first_review_begins_a_trace_and_others_belong_to_it() {
        const CONTROLLER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";
        let (vms, vmis) = ("virtualmachines", "virtualmachineinstances");
        for (operation, plural, user, mutates, phase, context, expected) in [
            ("CREATE", vms, "alice", true, "", "", "first"),
            // Of a user it is not believed.
            ("CREATE", vms, "alice", true, "", KNOWN, "first"),
            ("CREATE", vms, CONTROLLER, true, "", KNOWN, "first"),
            ("CREATE", vmis, "alice", true, "", KNOWN, "first"),
            ("CREATE", vmis, CONTROLLER, true, "", KNOWN, "part"),
            ("CREATE", vmis, CONTROLLER, true, "", "forged", "first"),
            // The mutating webhook has set it.
            ("CREATE", vms, "alice", false, "", KNOWN, "part"),
            ("CREATE", vms, "alice", false, "", "", "none"),
            ("UPDATE", vms, "alice", true, "", KNOWN, "none"),
            ("UPDATE", vmis, CONTROLLER, true, "Scheduled", KNOWN, "part"),
            ("UPDATE", vmis, CONTROLLER, false, "Pending", KNOWN, "part"),
            ("UPDATE", vmis, CONTROLLER, true, "Running", KNOWN, "none"),
            ("UPDATE", vmis, CONTROLLER, true, "Scheduled", "forged", "none"),
            ("DELETE", vmis, "alice", false, "Scheduled", KNOWN, "none"),
        ] {
            let found = place(operation, plural, user, mutates, phase, context);
            assert_eq!(found, expected, "{operation} {plural} {user} {mutates} {phase} {context}");
        }
    }
}
