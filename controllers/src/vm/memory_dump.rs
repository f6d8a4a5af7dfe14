//! Memory dumps of a VM: the request in its status, the volume in template and VMI, the annotation of the claim.
//!
//! ```text
//!   Associating -> InProgress -> Unmounting -> Completed      (a new request begins again)
//!                      └──────> Failed
//!   Dissociating -> (no request)
//! ```
//! The template keeps the volume until the dump is dissociated: it marks the claim as that of the VM's dumps. The VMI has the
//! volume while it is written only, and a new VMI starts without it. The end of a dump is recorded before the VMI loses the volume: a
//! request in progress whose VMI lacks the volume gives it the volume, and the dump is written.

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec, VmOperation, VmiPhase,
    constants::annotation,
    hotplug::{DUMP_FAILED, DUMPED, UNMOUNTED, status_of},
    vm::{lease::Attempt, status::VirtualMachineMemoryDumpRequest as Request},
    vmi::{
        status::VolumeStatus,
        volumes::{MemoryDumpVolumeSource, Volume},
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::json;

use super::Observed;
use crate::{
    runtime::{Decision, Effect, Event, Kind},
    vm_lease,
};

/// Reason of a refused change for a dump.
const FAILED: &str = "MemoryDumpError";
/// Annotation of a claim whose dump failed.
const FAILED_DUMP: &str = "Memory dump failed";

/// Phases of a request.
pub(super) mod phase {
    pub(crate) const ASSOCIATING: &str = "Associating";
    pub(crate) const IN_PROGRESS: &str = "InProgress";
    pub(crate) const UNMOUNTING: &str = "Unmounting";
    pub(crate) const COMPLETED: &str = "Completed";
    pub(crate) const DISSOCIATING: &str = "Dissociating";
    pub(crate) const FAILED: &str = "Failed";
}

/// The next state of a request, and the changes that lead there.
#[derive(Clone, Debug, Default, PartialEq)]
struct Next {
    /// The request, if it changes. The inner `None`: there is none any more.
    request: Option<Option<Request>>,
    /// True if the template must have the volume, false if it must not.
    in_template: Option<bool>,
    /// The same for the VMI.
    in_vmi: Option<bool>,
    /// Value of the claim's annotation.
    annotation: Option<String>,
}

/// Decides about a request. `vmi` is the VMI of the VM.
fn next(request: &Request, in_template: bool, vmi: Option<&VirtualMachineInstance>, now: &Time) -> Next {
    let claim = &request.claim_name;
    let entry = vmi.and_then(|vmi| status_of(vmi, claim));
    // A VMI that has ended keeps volume and entry as long as it exists, and uses neither.
    let live = vmi.filter(|vmi| !vmi.is_final());
    let in_vmi = live.is_some_and(|vmi| has(&vmi.spec, claim));
    let is_free = !in_vmi && live.is_none_or(|vmi| status_of(vmi, claim).is_none());
    let runs = vmi.is_some_and(|vmi| *vmi.phase() == VmiPhase::Running && !vmi.is_deleting());
    let to = |phase: &str| Request { phase: phase.to_owned(), ..request.clone() };
    // The entry of a request that has not begun is that of a former dump.
    let dump = entry.filter(|_| request.phase == phase::IN_PROGRESS).and_then(|entry| entry.memory_dump_volume.clone());
    let dump = dump.unwrap_or_default();
    let start = dump.start_timestamp.as_ref().or(request.start_timestamp.as_ref());
    let failed = |message: String| Next {
        request: Some(Some(Request {
            message: Some(message),
            start_timestamp: start.cloned(),
            end_timestamp: Some(dump.end_timestamp.as_ref().unwrap_or(now).clone()),
            ..to(phase::FAILED)
        })),
        annotation: Some(FAILED_DUMP.to_owned()),
        ..Next::default()
    };
    let ended = || failed("the VMI has ended before its memory was written".to_owned());
    match request.phase.as_str() {
        phase::ASSOCIATING if !runs => ended(),
        // The result of a former dump, or a disk of this name that leaves, would count as those of this dump.
        phase::ASSOCIATING if entry.is_some_and(|entry| !in_vmi || has_ended(entry)) => {
            Next { in_template: Some(true), in_vmi: Some(false), ..Next::default() }
        }
        phase::ASSOCIATING => Next {
            request: (in_template && in_vmi).then(|| Some(to(phase::IN_PROGRESS))),
            in_template: Some(true),
            in_vmi: Some(true),
            annotation: None,
        },
        phase::IN_PROGRESS => match entry.map(|entry| (entry, entry.phase.as_deref())) {
            Some((_, Some(DUMPED))) => Next {
                annotation: dump.target_file_name.clone(),
                request: Some(Some(Request {
                    start_timestamp: start.cloned(),
                    end_timestamp: dump.end_timestamp.clone(),
                    file_name: dump.target_file_name.clone(),
                    ..to(phase::UNMOUNTING)
                })),
                ..Next::default()
            },
            Some((entry, Some(DUMP_FAILED))) => failed(entry.message.clone().unwrap_or_default()),
            _ if !runs => ended(),
            _ => Next {
                request: (start != request.start_timestamp.as_ref())
                    .then(|| Some(Request { start_timestamp: start.cloned(), ..request.clone() })),
                in_vmi: Some(true),
                ..Next::default()
            },
        },
        phase::UNMOUNTING => {
            Next { request: is_free.then(|| Some(to(phase::COMPLETED))), in_vmi: Some(false), ..Next::default() }
        }
        phase::FAILED => Next { in_vmi: Some(false), ..Next::default() },
        phase::DISSOCIATING => Next {
            request: (is_free && !in_template).then_some(None),
            in_template: Some(false),
            in_vmi: Some(false),
            annotation: None,
        },
        _ => Next::default(),
    }
}

/// Returns true for the entry of a dump that is over.
fn has_ended(entry: &VolumeStatus) -> bool {
    matches!(entry.phase.as_deref(), Some(DUMP_FAILED | DUMPED | UNMOUNTED))
        || entry.memory_dump_volume.as_ref().is_some_and(|dump| dump.end_timestamp.is_some())
}

/// Returns true if a spec has the volume of a dump.
pub(super) fn has(spec: &VirtualMachineInstanceSpec, claim: &str) -> bool {
    spec.volumes.iter().any(|volume| volume.name == claim && volume.memory_dump.is_some())
}

/// Adds or removes the volume of a dump. Volumes of other kinds stay.
pub(super) fn put(spec: &mut VirtualMachineInstanceSpec, claim: &str, present: bool) {
    let is_present = spec.volumes.iter().any(|volume| volume.name == claim);
    if present && !is_present {
        let source = MemoryDumpVolumeSource { claim_name: claim.to_owned(), hotpluggable: true, ..Default::default() };
        spec.volumes.push(Volume { name: claim.to_owned(), memory_dump: Some(source), ..Volume::default() });
    } else if !present {
        spec.volumes.retain(|volume| volume.name != claim || volume.memory_dump.is_none());
    }
}

/// Removes the volume of the VM's dumps from the spec of a new VMI.
pub(super) fn leave_out(vm: &VirtualMachine, spec: &mut VirtualMachineInstanceSpec) {
    if let Some(request) = request(vm) {
        put(spec, &request.claim_name, false);
    }
}

fn request(vm: &VirtualMachine) -> Option<&Request> {
    vm.status.as_ref()?.memory_dump_request.as_deref()
}

/// Continues a memory dump: changes template, VMI and claim, and the request in `wanted`.
pub(super) fn update(
    observed: &Observed,
    vmi: Option<&VirtualMachineInstance>,
    wanted: &mut VirtualMachine,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let vm = &*observed.vm;
    let (Some(request), Some(template)) = (request(vm), vm.spec.template.spec.as_ref()) else {
        wanted.status.get_or_insert_default().hold(VmOperation::MemoryDump, None, &Time(observed.now));
        return Ok(());
    };
    let claim = &request.claim_name;
    let of = ObjectMeta { name: Some(claim.clone()), uid: vm.metadata.uid.clone(), ..ObjectMeta::default() };
    let held = vm_lease::forbids(vm, Attempt::Operation).filter(|lease| lease.operation != VmOperation::MemoryDump);
    if held.is_some() && request.phase == phase::ASSOCIATING {
        let message = held.map(|lease| format!("the dump waits for the end of an operation: {}", lease.holder()));
        let request = Request { message, ..request.clone() };
        wanted.status.get_or_insert_default().memory_dump_request = Some(Box::new(request));
        return Ok(());
    }
    let in_template = has(template, claim);
    let next = next(request, in_template, vmi, &Time(observed.now));
    if decision.must_wait(&observed.failures, FAILED, observed.now) {
        return Ok(());
    }
    let failed = || {
        let regarding = Kind::VirtualMachine.reference(&vm.metadata);
        Event::warning(regarding, FAILED, "Error encountered while handling memory dump request: {error}")
    };
    if let Some(present) = next.in_template {
        let mut changed = vm.clone();
        let mut spec = template.clone();
        put(&mut spec, claim, present);
        changed.spec.template.spec = Some(spec);
        let change = Effect::change(Kind::VirtualMachine, vm, &changed, None)?;
        decision.effects.extend(change.map(|change| change.on_failure(failed())));
    }
    if let (Some(present), Some(vmi)) = (next.in_vmi, vmi.filter(|vmi| !vmi.is_final())) {
        let mut changed = vmi.clone();
        put(&mut changed.spec, claim, present);
        let change = Effect::change(Kind::Instance, vmi, &changed, None)?;
        decision.effects.extend(change.map(|change| change.on_failure(failed())));
    }
    if let Some(value) = next.annotation.filter(|_| observed.claims.contains_key(claim)) {
        let patch = json!({"metadata": {"annotations": {annotation::MEMORY_DUMP: value}}});
        let of =
            ObjectMeta { namespace: vm.metadata.namespace.clone(), name: Some(claim.clone()), ..Default::default() };
        decision.push(Effect::merge(Kind::Claim, &of, patch).on_failure(failed()));
    }
    let status = wanted.status.get_or_insert_default();
    if let Some(request) = next.request {
        status.memory_dump_request = request.map(Box::new);
    }
    let is_open = status.memory_dump_request.as_ref().is_some_and(|request| {
        [phase::ASSOCIATING, phase::IN_PROGRESS, phase::UNMOUNTING].contains(&request.phase.as_str())
    });
    status.hold(VmOperation::MemoryDump, is_open.then_some(&of), &Time(observed.now));
    Ok(())
}

#[cfg(test)]
mod tests {
    use api::hotplug::DUMPING;
    use serde_json::Value;

    use super::*;

    fn request_in(phase: &str) -> Request {
        Request { claim_name: "dump".into(), phase: phase.into(), ..Request::default() }
    }

    /// Returns a VMI, with the volume in its spec and in this phase.
    fn vmi(running: bool, in_spec: bool, phase: Option<&str>) -> VirtualMachineInstance {
        let volumes: Vec<Value> =
            in_spec.then(|| json!({"name": "dump", "memoryDump": {"claimName": "dump"}})).into_iter().collect();
        let entry = phase.map(|phase| {
            let info = json!({"claimName": "dump", "targetFileName": "file"});
            json!({"name": "dump", "target": "", "phase": phase, "message": "why", "memoryDumpVolume": info})
        });
        let entries: Vec<Value> = entry.into_iter().collect();
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"devices": {}}, "volumes": volumes},
            "status": {"phase": if running { "Running" } else { "Succeeded" }, "volumeStatus": entries},
        }))
        .unwrap()
    }

    #[test]
    fn request_goes_through_its_phases() {
        let now = Time(jiff::Timestamp::UNIX_EPOCH);
        let running = |in_spec, phase| Some(vmi(true, in_spec, phase));
        let ended = || Some(vmi(false, true, Some(DUMPED)));
        // Phase, in the template, VMI; next phase, whether template and VMI have the volume, annotation.
        for (from, in_template, vmi, to, template, instance, annotation) in [
            ("Associating", false, running(false, None), None, Some(true), Some(true), None),
            ("Associating", true, running(false, None), None, Some(true), Some(true), None),
            ("Associating", true, running(true, None), Some("InProgress"), Some(true), Some(true), None),
            ("Associating", true, None, Some("Failed"), None, None, Some("Memory dump failed")),
            ("Associating", true, ended(), Some("Failed"), None, None, Some("Memory dump failed")),
            (
                "Associating",
                true,
                running(true, Some("MountedToPod")),
                Some("InProgress"),
                Some(true),
                Some(true),
                None,
            ),
            // The entry of a former dump, or of a disk, goes first.
            ("Associating", true, running(true, Some(DUMP_FAILED)), None, Some(true), Some(false), None),
            ("Associating", true, running(true, Some(DUMPED)), None, Some(true), Some(false), None),
            ("Associating", true, running(false, Some(DUMP_FAILED)), None, Some(true), Some(false), None),
            ("Associating", true, running(false, Some(UNMOUNTED)), None, Some(true), Some(false), None),
            ("Associating", true, running(false, Some("Ready")), None, Some(true), Some(false), None),
            ("InProgress", true, running(true, Some("MountedToPod")), None, None, Some(true), None),
            // Recorded first: without the volume the request in progress would ask for another dump.
            ("InProgress", true, running(true, Some(DUMPED)), Some("Unmounting"), None, None, Some("file")),
            (
                "InProgress",
                true,
                running(true, Some(DUMP_FAILED)),
                Some("Failed"),
                None,
                None,
                Some("Memory dump failed"),
            ),
            (
                "InProgress",
                true,
                Some(self::vmi(false, true, None)),
                Some("Failed"),
                None,
                None,
                Some("Memory dump failed"),
            ),
            ("Unmounting", true, running(true, Some(DUMPED)), None, None, Some(false), None),
            ("Unmounting", true, running(false, Some("Detaching")), None, None, Some(false), None),
            ("Unmounting", true, running(false, None), Some("Completed"), None, Some(false), None),
            ("Unmounting", true, None, Some("Completed"), None, Some(false), None),
            ("Unmounting", true, ended(), Some("Completed"), None, Some(false), None),
            ("Completed", true, running(false, None), None, None, None, None),
            ("Failed", true, running(true, Some(DUMP_FAILED)), None, None, Some(false), None),
            ("Dissociating", true, running(false, None), None, Some(false), Some(false), None),
            ("Dissociating", false, running(false, None), Some(""), Some(false), Some(false), None),
            ("Dissociating", false, running(true, Some(DUMPED)), None, Some(false), Some(false), None),
            ("Dissociating", false, ended(), Some(""), Some(false), Some(false), None),
        ] {
            let next = next(&request_in(from), in_template, vmi.as_ref(), &now);
            let phase = next.request.map(|request| request.map(|request| request.phase).unwrap_or_default());
            let found = (phase.as_deref(), next.in_template, next.in_vmi, next.annotation.as_deref());
            assert_eq!(found, (to, template, instance, annotation), "{from} {in_template} {vmi:?}");
        }
    }

    #[test]
    fn request_has_the_times_of_its_dump() {
        let time = |text: &str| Time(text.parse().unwrap());
        let (start, end) = (time("2030-01-01T00:00:00Z"), time("2030-01-01T00:01:00Z"));
        let now = time("2030-01-01T00:02:00Z");
        let begun = Request { start_timestamp: Some(start.clone()), ..request_in("InProgress") };
        // Request, phase of the volume and times of the dump, whether the guest runs; phase and times of the next request.
        for (from, entry, times, runs, phase, found) in [
            (request_in("InProgress"), "MountedToPod", (None, None), true, None, (None, None)),
            (request_in("InProgress"), DUMPING, (Some(&start), None), true, Some("InProgress"), (Some(&start), None)),
            (begun.clone(), DUMPING, (Some(&start), None), true, None, (None, None)),
            (begun.clone(), DUMPED, (Some(&start), Some(&end)), true, Some("Unmounting"), (Some(&start), Some(&end))),
            (begun.clone(), DUMP_FAILED, (Some(&start), Some(&end)), true, Some("Failed"), (Some(&start), Some(&end))),
            // Its VMI has ended.
            (begun, DUMPING, (None, None), false, Some("Failed"), (Some(&start), Some(&now))),
            (
                request_in("Associating"),
                DUMP_FAILED,
                (Some(&start), Some(&end)),
                false,
                Some("Failed"),
                (None, Some(&now)),
            ),
        ] {
            let mut vmi = vmi(runs, true, Some(entry));
            let dump = vmi.status.as_mut().unwrap().volume_status[0].memory_dump_volume.as_mut().unwrap();
            (dump.start_timestamp, dump.end_timestamp) = (times.0.cloned(), times.1.cloned());
            let next = next(&from, true, Some(&vmi), &now).request.flatten();
            let next_times = next
                .as_ref()
                .map(|next| (next.start_timestamp.as_ref(), next.end_timestamp.as_ref()))
                .unwrap_or_default();
            let next_phase = next.as_ref().map(|next| next.phase.as_str());
            assert_eq!((next_phase, next_times), (phase, found), "{from:?} {entry}");
        }
    }

    #[test]
    fn volume_of_a_dump_is_added_once_and_no_other_is_removed() {
        let mut spec = vmi(true, false, None).spec;
        spec.volumes.push(Volume { name: "other".into(), ..Volume::default() });
        for _ in 0..2 {
            put(&mut spec, "dump", true);
            assert_eq!(spec.volumes.len(), 2);
        }
        put(&mut spec, "other", false);
        put(&mut spec, "dump", false);
        let names: Vec<&str> = spec.volumes.iter().map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["other"]);
    }
}
