//! The desired status of a VMI with the metadata and events that belong to its write, as plain values.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance, VirtualMachineInstanceStatus, VmiPhase as Phase,
    vmi::status::VirtualMachineInstancePhaseTransitionTimestamp,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::event::Event;

/// The desired status and the events about the change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Desired {
    /// The whole status.
    pub(super) status: VirtualMachineInstanceStatus,
    /// Changes of the metadata.
    pub(super) metadata: Metadata,
    /// Events to publish after the write.
    pub(super) events: Vec<Event>,
    /// Only changes by the guest itself differ: the write may wait.
    pub(super) may_wait: bool,
}

/// Changes of metadata that belong to a write of the status: `None` removes the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) labels: BTreeMap<&'static str, Option<String>>,
    pub(super) annotations: BTreeMap<&'static str, Option<String>>,
}

impl Metadata {
    /// Returns true if nothing changes.
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }

    /// Removes a label if the VMI has it.
    pub(super) fn remove_label(&mut self, vmi: &VirtualMachineInstance, key: &'static str) {
        if vmi.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(key)) {
            self.labels.insert(key, None);
        }
    }

    /// Removes an annotation if the VMI has it.
    pub(super) fn remove_annotation(&mut self, vmi: &VirtualMachineInstance, key: &'static str) {
        if vmi.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(key)) {
            self.annotations.insert(key, None);
        }
    }
}

/// Enters a phase, and records its time. `hello_at`: the time of the launcher's first answer.
pub(super) fn enter(
    next: &mut VirtualMachineInstanceStatus,
    phase: Phase,
    hello_at: Option<jiff::Timestamp>,
    now: jiff::Timestamp,
) {
    let list = &mut next.phase_transition_timestamps;
    let mut add = |phase: Phase, at: jiff::Timestamp| {
        if !list.iter().any(|known| known.phase.as_ref() == Some(&phase)) {
            list.push(VirtualMachineInstancePhaseTransitionTimestamp {
                phase: Some(phase),
                phase_transition_timestamp: Some(Time(at)),
            });
        }
    };
    if let Some(hello_at) = hello_at {
        add(Phase::Scheduled, hello_at);
    }
    add(phase.clone(), now);
    next.phase = Some(phase);
}
