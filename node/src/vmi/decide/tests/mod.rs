//! Tables of observations and the effects that are decided. This module holds the fixtures.

mod hotplug;
mod launcher;
mod migration;
mod report;
mod write;

use std::{collections::BTreeSet, sync::Arc};

use api::{VirtualMachineInstance, VirtualMachineInstanceStatus};
use protocol::{Done, LauncherState, Lifecycle, SyncReply, features::Feature};
use serde_json::json;

use super::*;
use crate::vmi::{
    host::ConnectError,
    observed::{Outcome, Stage},
};

const NODE: &str = "n1";

fn vmi(phase: &str) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "m", "namespace": "ns", "uid": "u", "resourceVersion": "1", "labels": {"kubevirt.io/nodeName": NODE},
        },
        "spec": {"domain": {"devices": {}}, "terminationGracePeriodSeconds": 60},
        "status": {"phase": phase, "nodeName": NODE, "activePods": {"pod-1": NODE}},
    }))
    .unwrap()
}

fn all_features() -> BTreeSet<Feature> {
    Feature::ALL.into_iter().collect()
}

fn at(seconds: u64) -> Now {
    Now {
        since_start: Duration::from_secs(seconds),
        wall: jiff::Timestamp::from_second(1_800_000_000 + seconds as i64).unwrap(),
    }
}

fn state(lifecycle: Lifecycle, reason: &str) -> LauncherState {
    let mut state = LauncherState { reason: reason.into(), acpi: true, ..LauncherState::default() };
    state.set_lifecycle(lifecycle);
    state
}

/// Returns the answer to a Sync of a launcher that does not number its results.
fn answered(started: bool) -> SyncReply {
    SyncReply { started, ..SyncReply::default() }
}

/// Returns a Sync of an object with this fingerprint.
fn sync(fingerprint: u64) -> Sync {
    Sync { fingerprint, ..Sync::default() }
}

/// Returns a VMI with a connection, after Hello and network setup.
fn prepared(phase: &str, lifecycle: Lifecycle, reason: &str) -> Observed {
    let mut observed = Observed::new(Arc::new(vmi(phase)), NODE);
    observed.link = Link::Up {
        connection: 1,
        greeted: true,
        features: all_features(),
        networked: true,
        synced: None,
        results_from: 0,
    };
    observed.apply_report(state(lifecycle, reason), at(0));
    observed
}

/// Returns a running VMI with an up-to-date status.
fn live() -> Observed {
    let mut observed = prepared("Running", Lifecycle::Running, "booted");
    observed.link = Link::Up {
        connection: 1,
        greeted: true,
        features: all_features(),
        networked: true,
        synced: Some(observed.facts.fingerprint),
        results_from: 0,
    };
    settle(&mut observed);
    observed
}

/// Applies the desired status as written.
fn settle(observed: &mut Observed) {
    if let Some(desired) = status::desired(observed, at(0)) {
        let mut written = (*observed.vmi).clone();
        written.status = Some(desired.status);
        observed.apply_object(Arc::new(written), NODE);
    }
    observed.guest_changed_at = None;
}

fn deleting(observed: &mut Observed) {
    let mut vmi = (*observed.vmi).clone();
    vmi.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    observed.apply_object(Arc::new(vmi), NODE);
}

/// Returns the names of the effects.
fn names(decision: &Decision) -> Vec<&'static str> {
    decision
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Connect { .. } => "connect",
            Effect::Call(call) => call.row().0,
            Effect::Relay(Some(_)) => "relay",
            Effect::Relay(None) => "relay none",
            Effect::Write(..) => "write",
            Effect::WriteProgress(_) => "progress",
            Effect::Read => "read",
            Effect::Publish(event) => event.reason,
            Effect::Retire => "retire",
        })
        .collect()
}

fn written(decision: &Decision) -> Option<&VirtualMachineInstanceStatus> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Write(desired) => Some(&desired.status),
        _ => None,
    })
}
