//! Plays steps in a world, compares it with the model after each, and reduces steps that fail.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use super::actions::{Guest, Model, Step, Vm};

/// A VM as it is.
#[derive(Clone, Debug, Default)]
pub(super) struct SeenVm {
    /// Guests that live.
    pub(super) guests: usize,
    pub(super) strategy: String,
    /// The signs of an operation that holds it.
    pub(super) holder: Option<String>,
    /// The number on the disk of a guest that runs, if it was read.
    pub(super) data: Option<u32>,
}

/// The objects that exist.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) vms: BTreeMap<String, SeenVm>,
    /// Snapshots that can be restored.
    pub(super) snapshots: BTreeSet<String>,
    /// Objects that nothing needs, and needed ones that are missing.
    pub(super) wrong: Vec<String>,
}

/// The cluster, or a fake of it.
pub(super) trait World {
    /// Does a step.
    async fn act(&mut self, step: Step, before: &Model, after: &Model) -> Result<()>;

    /// Returns what exists once it is as in the model, or when it has had time enough.
    async fn look(&mut self, model: &Model) -> Result<Seen>;
}

/// Returns the differences between the model and what exists: one guest for each VM that runs, no lease, the model's data, no more
/// and no fewer objects.
pub(super) fn violations(model: &Model, seen: &Seen) -> Vec<String> {
    let mut found = seen.wrong.clone();
    for (name, vm) in &model.vms {
        let Some(is) = seen.vms.get(*name) else {
            found.push(format!("VM {name} is missing"));
            continue;
        };
        let guests = usize::from(vm.guest == Guest::Runs);
        if is.guests != guests {
            found.push(format!("VM {name} has {} guests instead of {guests}", is.guests));
        }
        if is.strategy != format!("{:?}", vm.strategy) {
            found.push(format!("VM {name} has run strategy {} instead of {:?}", is.strategy, vm.strategy));
        }
        if let Some(holder) = &is.holder {
            found.push(format!("VM {name} is held: {holder}"));
        }
        if let Some(data) = is.data.filter(|data| *data != vm.data) {
            found.push(format!("the disk of VM {name} has {data} instead of {}", vm.data));
        }
    }
    let more = seen.vms.keys().filter(|name| !model.vms.contains_key(name.as_str()));
    found.extend(more.map(|name| format!("VM {name} exists")));
    let lacking = model.snapshots.keys().filter(|name| !seen.snapshots.contains(**name));
    found.extend(lacking.map(|name| format!("snapshot {name} is missing or not ready")));
    let more = seen.snapshots.iter().filter(|name| !model.snapshots.contains_key(name.as_str()));
    found.extend(more.map(|name| format!("snapshot {name} exists")));
    found
}

/// Plays the steps that are possible. Fails at the first difference.
pub(super) async fn play(world: &mut impl World, steps: &[Step]) -> Result<()> {
    let mut model = Model::default();
    for (number, step) in steps.iter().enumerate() {
        let Some(step) = model.permitted(*step) else { continue };
        let after = model.after(step.action);
        let at = || format!("step {number}: {step}");
        world.act(step, &model, &after).await.with_context(at)?;
        let found = violations(&after, &world.look(&after).await.with_context(at)?);
        ensure!(found.is_empty(), "{}: {}", at(), found.join("; "));
        model = after;
    }
    Ok(())
}

/// Returns as few of these steps as still fail, after so many attempts at most (delta debugging).
pub(super) async fn shrink(
    mut steps: Vec<Step>,
    mut attempts: usize,
    mut fails: impl AsyncFnMut(&[Step]) -> Result<bool>,
) -> Result<Vec<Step>> {
    let mut parts = 2;
    while steps.len() > 1 {
        let size = steps.len().div_ceil(parts);
        let mut is_reduced = false;
        for begin in (0..steps.len()).step_by(size) {
            if attempts == 0 {
                return Ok(steps);
            }
            attempts -= 1;
            let end = (begin + size).min(steps.len());
            let rest = [&steps[..begin], &steps[end..]].concat();
            if fails(&rest).await? {
                steps = rest;
                is_reduced = true;
                break;
            }
        }
        match (is_reduced, size) {
            (true, _) => parts = (parts - 1).max(2),
            (false, 1) => break,
            (false, _) => parts = (2 * parts).min(steps.len()),
        }
    }
    Ok(steps)
}

/// Returns the number of the step at which a run has failed.
pub(super) fn failed_at(error: &anyhow::Error) -> Option<usize> {
    error.to_string().strip_prefix("step ")?.split(':').next()?.parse().ok()
}

/// Returns the VMs whose guests run.
pub(super) fn running(model: &Model) -> impl Iterator<Item = Vm> + '_ {
    model.vms.iter().filter(|(_, vm)| vm.guest == Guest::Runs).map(|(name, _)| *name)
}
