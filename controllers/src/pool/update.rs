//! Changes of the template: which VMs get it, and which VMIs are restarted, so that never more VMs are down than permitted.

use api::{
    RunStrategy, StateChangeAction, VirtualMachine,
    constants::{condition, event, label},
    pool::VirtualMachinePoolSpec,
    vm::status::VirtualMachineStateChangeRequest,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::json;

use super::{Member, Observed, preservation::preserves, selection::select, wanted_replicas};
use crate::{
    resources::{pool_revisions::PoolTemplate, vms::is_leased},
    runtime::{Effect, Event, Kind},
};

/// Reason under which the refused change of a VMI is remembered. Its event and its condition have that of VMs.
pub(super) const FAILED_ROLL: &str = "FailedVmiUpdate";

/// How a VMI of a former template is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Roll {
    /// Nothing that it depends on has changed: only its label.
    Relabel,
    /// Only templates of disks have changed, and its disks stay: its label, without an event that reports an update.
    KeepDisks,
    /// It is started again.
    Restart,
    /// The VM is deleted and created again, with disks from the new templates.
    Replace,
}

/// Returns the VMs that updates concern, in their order. `None`: VMs are not updated.
pub(super) fn candidates<'a>(pool: &VirtualMachinePoolSpec, active: &[&'a Member]) -> Option<Vec<&'a Member>> {
    let strategy = pool.update_strategy.as_ref();
    if strategy.is_some_and(|strategy| strategy.unmanaged.is_some()) {
        return None;
    }
    let proactive = strategy.and_then(|strategy| strategy.proactive.as_ref());
    Some(select(proactive.and_then(|proactive| proactive.selection_policy.as_ref()), active.to_vec()))
}

/// Returns true if VMIs are restarted.
pub(super) fn is_proactive(pool: &VirtualMachinePoolSpec) -> bool {
    pool.update_strategy
        .as_ref()
        .is_none_or(|strategy| strategy.opportunistic.is_none() && strategy.unmanaged.is_none())
}

/// Returns the VMIs to handle now. `current` are VMs with the present template in the order of updates, `active` all VMs that stay.
pub(super) fn rolled<'a>(
    observed: &Observed,
    current: &[&'a Member],
    active: &[&'a Member],
    template: &PoolTemplate,
) -> Vec<(&'a Member, Roll)> {
    let pool = &observed.pool.spec;
    let missing = wanted_replicas(pool).saturating_sub(active.len());
    let down = missing + active.iter().filter(|member| !member.is_available()).count();
    let mut budget = max_unavailable(pool).saturating_sub(down);
    let mut rolled = Vec::new();
    for member in current {
        let Some(roll) = roll(observed, member, template) else { continue };
        // A VM that is down already is updated at once.
        if matches!(roll, Roll::Restart | Roll::Replace) && member.is_available() {
            if budget == 0 {
                continue;
            }
            budget -= 1;
        }
        rolled.push((*member, roll));
    }
    rolled
}

/// Returns the number of VMs that may be down.
fn max_unavailable(pool: &VirtualMachinePoolSpec) -> usize {
    let wanted = wanted_replicas(pool);
    let limit = match &pool.max_unavailable {
        None => wanted,
        Some(IntOrString::Int(number)) => usize::try_from(*number).unwrap_or(0),
        Some(IntOrString::String(text)) => {
            // Admission rejects other text.
            let percent = text.strip_suffix('%').and_then(|number| number.parse::<usize>().ok()).unwrap_or(0);
            wanted.saturating_mul(percent) / 100
        }
    };
    limit.max(1)
}

/// Returns how the VMI of a VM with the present template is handled. `None`: it stays.
fn roll(observed: &Observed, member: &Member, template: &PoolTemplate) -> Option<Roll> {
    member.live()?;
    if member.vmi_revision() == member.revision() {
        return None;
    }
    let former = member.vmi_revision().and_then(|name| template_of(observed, name));
    let roll = match former {
        Some(former) if former.data_volumes != template.data_volumes && !preserves(&observed.pool.spec) => {
            Roll::Replace
        }
        Some(former) if former.vmi != template.vmi => Roll::Restart,
        // A VM that takes its place would use the same disks.
        Some(former) if former.data_volumes != template.data_volumes => Roll::KeepDisks,
        Some(_) => Roll::Relabel,
        // Without a record the VM controller knows better, once it has seen the change.
        None if !is_observed(&member.vm) => return None,
        None if member.vm.condition(condition::RESTART_REQUIRED).is_some_and(api::Condition::is_true) => Roll::Restart,
        None => Roll::Relabel,
    };
    // Its disks would go at once, also under a snapshot of them that is being taken. The end of the lease changes the VM.
    if roll == Roll::Replace && is_leased(&member.vm) {
        return None;
    }
    let is_pending = member.vm.status.as_ref().is_some_and(|status| !status.state_change_requests.is_empty());
    (roll != Roll::Restart || (restarts(&member.vm) && !is_pending)).then_some(roll)
}

/// Returns the template that a revision of the pool records.
pub(super) fn template_of<'a>(observed: &'a Observed, name: &str) -> Option<&'a PoolTemplate> {
    let revision = observed.revisions.iter().find(|known| known.metadata.name.as_deref() == Some(name))?;
    revision.template.as_ref()
}

fn is_observed(vm: &VirtualMachine) -> bool {
    let observed = vm.status.as_ref().and_then(|status| status.desired_generation);
    observed.is_some() && observed == vm.metadata.generation
}

/// Returns true if a VM runs again after a restart. With the other strategies the guest ends by itself.
fn restarts(vm: &VirtualMachine) -> bool {
    matches!(vm.spec.effective_run_strategy(), RunStrategy::Always | RunStrategy::RerunOnFailure | RunStrategy::Manual)
}

/// Returns the write that handles a VMI.
pub(super) fn write(observed: &Observed, member: &Member, roll: Roll) -> Result<Option<Effect>, serde_json::Error> {
    let Some(vmi) = &member.vmi else { return Ok(None) };
    let vm = &*member.vm;
    let effect = match roll {
        // As in KubeVirt: the number is free when the former disks are gone.
        Roll::Replace => Some(Effect::delete(Kind::VirtualMachine, &vm.metadata).in_foreground()),
        Roll::Relabel | Roll::KeepDisks => {
            let patch = json!({"metadata": {"labels": {label::POOL_REVISION: member.revision()}}});
            Some(Effect::merge(Kind::Instance, &vmi.metadata, patch))
        }
        Roll::Restart if vm.spec.effective_run_strategy() == RunStrategy::Always => {
            Some(Effect::delete(Kind::Instance, &vmi.metadata))
        }
        // A VMI that is deleted is not started again: the VM is asked to restart.
        Roll::Restart => {
            let mut restarted = vm.clone();
            let request = |action, uid| VirtualMachineStateChangeRequest { action, uid, ..Default::default() };
            restarted.status.get_or_insert_default().state_change_requests = vec![
                request(StateChangeAction::Stop, vmi.metadata.uid.clone()),
                request(StateChangeAction::Start, None),
            ];
            Effect::change(Kind::VirtualMachine, vm, &restarted, Some("status"))?
        }
    };
    let path = member.path();
    let updated = format!("Successfully updated resource {path}");
    let failed = format!("Error updating resource {path}: {{error}}");
    let regarding = Kind::Pool.reference(&observed.pool.metadata);
    if roll == Roll::KeepDisks {
        let failed = Event::warning(regarding, event::FAILED_UPDATE, failed);
        return Ok(effect.map(|effect| effect.on_failure(failed).refused_as(FAILED_ROLL)));
    }
    let (done, refused) = ((event::SUCCESSFUL_DELETE, updated), (event::FAILED_UPDATE, failed));
    Ok(effect.map(|effect| effect.reported(regarding, done, refused).refused_as(FAILED_ROLL)))
}
