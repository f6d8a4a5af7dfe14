//! Live updates of a running VMI: the observed generation, annotations for backups and deschedulers, hot-plugged volumes,
//! interfaces, and, depending on the cluster's rollout strategy, its size, the placement for its next pod, and claims to which
//! its volumes move.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance,
    constants::annotation::{self, PCI_TOPOLOGY, PCI_TOPOLOGY_VERSION},
    vm::lease::Attempt,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use super::{
    Observed, SyncError, blocked, hotplug,
    nics::{self, Macs},
    resize,
    restart::{self, Template},
    start,
};
use crate::{
    runtime::{Decision, Effect, Event, Kind},
    vm_lease,
    volume_migration::{self, Step},
};

/// Reason of a refused update.
const FAILED_UPDATE: &str = "FailedUpdateError";
/// Reason of a refused change of the template.
const FAILED_TEMPLATE: &str = "FailedTemplateUpdate";
/// Message of a refused change of the template.
const TEMPLATE_CONTEXT: &str = "Failure while updating the template";
/// Reason of a refused change of interfaces.
const FAILED_NICS: &str = "HotPlugNetworkInterfaceError";
/// Message of a refused change of interfaces.
const NICS_CONTEXT: &str = "error encountered when trying to patch vmi";
/// Reason of a refused change of volumes.
const FAILED_HOTPLUG: &str = "HotPlugVolumeError";
/// Message of a refused change of volumes.
const HOTPLUG_CONTEXT: &str = "Error encountered while handling declarative hotplug volumes";

/// Reason of refused claims.
const FAILED_VOLUMES: &str = "VolumesUpdateError";
/// Message of refused claims.
const VOLUMES_CONTEXT: &str = "error encountered while handling volumes update requests";

/// Updates the VMI. Returns an error for condition Failure.
pub(super) fn update(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    template: Option<&Template>,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    if instance.is_final() || instance.is_deleting() {
        return Ok(None);
    }
    let mut wanted = instance.clone();
    if let Some(generation) = restart::observed_generation(observed, instance, template) {
        let annotations = wanted.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::VM_GENERATION.to_owned(), generation.to_string());
    }
    // These annotations are not part of the guest, so that they do not depend on the strategy.
    let template_annotations = observed.vm.spec.template.metadata.annotations.as_ref();
    let evictions = [annotation::DESCHEDULER_EVICT, annotation::DESCHEDULER_PREFER_NO_EVICTION]
        .map(|key| (key, template_annotations.and_then(|all| all.get(key))));
    for (key, value) in
        evictions.into_iter().chain([(annotation::SKIP_BACKUP_HOOKS, start::skip_backup_hooks(&observed.vm))])
    {
        match value {
            Some(value) => {
                wanted.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.clone());
            }
            None => {
                if let Some(annotations) = &mut wanted.metadata.annotations {
                    annotations.remove(key);
                }
            }
        }
    }
    let started = restart::started(observed, instance);
    // A VMI that waits for a restart gets everything then.
    let live = template.filter(|template| restart::is_live(observed) && template.is_current(started, instance));
    let unchanged = live.and_then(|template| change_live(observed, instance, template, &mut wanted));
    let refused = unchanged.or(plug(observed, instance, template, decision)?);
    let refused = refused.or(plug_nics(observed, instance, template, decision)?);
    let refused = match live {
        Some(template) => refused.or(move_volumes(observed, instance, template, decision)?),
        None => refused,
    };
    if wanted == *instance {
        return Ok(refused);
    }
    let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? else { return Ok(refused) };
    if !decision.must_wait(&observed.failures, FAILED_UPDATE, observed.now) {
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        let message = "Error updating the virtual machine instance: {error}";
        decision.push(change.on_failure(Event::warning(regarding, FAILED_UPDATE, message)));
    }
    Ok(refused.or(blocked(observed, FAILED_UPDATE, "Failure while updating VMI")))
}

/// Changes the size of the VMI and the placement of its next pod. Returns the first error: the changes after it wait.
fn change_live(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    template: &Template,
    wanted: &mut VirtualMachineInstance,
) -> Option<SyncError> {
    let resize = resize::decide(&observed.config, &template.size, instance);
    let now = Time(observed.now);
    if let Some(error) = resize.put_cpu(wanted, &now) {
        return Some(error);
    }
    if instance.is_migrating()
        && let Some(error) = template.placement.refused_while_migrating(&instance.spec)
    {
        return Some(error);
    }
    template.placement.put(&mut wanted.spec);
    resize.put_memory(wanted, &now)
}

/// Plugs and unplugs volumes. This does not depend on the rollout strategy: the flag of each volume permits it. Returns an error
/// for condition Failure.
fn plug(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    template: Option<&Template>,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let is_free = vm_lease::forbids(&observed.vm, Attempt::VolumeChange).is_none();
    let Some(template) = template.filter(|_| is_free && hotplug::is_on(&observed.config)) else { return Ok(None) };
    let keeps_claims = volume_migration::is_wanted(&observed.vm.spec);
    let Some(storage) = hotplug::reconcile(&template.storage, instance, keeps_claims) else { return Ok(None) };
    let mut wanted = instance.clone();
    storage.put(&mut wanted.spec);
    change_spec(observed, instance, &wanted, (FAILED_HOTPLUG, HOTPLUG_CONTEXT), decision)
}

/// Moves volumes to other claims. Returns an error for condition Failure.
fn move_volumes(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    template: &Template,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let step = restart::volume_step(observed, instance, template);
    if let Step::Refused(message) = step {
        return Ok(Some(SyncError::new(FAILED_VOLUMES, format!("{VOLUMES_CONTEXT}: {message}"))));
    }
    if let Some(lease) = vm_lease::forbids(&observed.vm, Attempt::Operation)
        && matches!(step, Step::Begin { .. })
    {
        return Ok(Some(SyncError::new(FAILED_VOLUMES, format!("{VOLUMES_CONTEXT}: {}", lease.holder()))));
    }
    let mut refused = None;
    for wanted in step.apply(instance, &Time(observed.now)) {
        let error = change_spec(observed, instance, &wanted, (FAILED_VOLUMES, VOLUMES_CONTEXT), decision)?;
        refused = refused.or(error);
    }
    Ok(refused)
}

/// Plugs and unplugs interfaces, and changes the template: those that are gone leave it, plugged ones keep their MAC addresses, and the
/// layout of the PCI buses stays. Returns an error for condition Failure.
fn plug_nics(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    template: Option<&Template>,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let Some(template) = template else { return Ok(None) };
    let changes = template.nics(restart::started(observed, instance), instance);
    let mut macs = Macs::of(&template.nics, instance, changes.vmi.as_ref());
    let mut wanted = (*observed.vm).clone();
    if let Some(spec) = &mut wanted.spec.template.spec {
        nics::remove(&changes.gone, spec);
        macs.put(spec);
    }
    keep_pci_topology(instance, &mut wanted.spec.template.metadata);
    let mut refused = None;
    if let Some(change) = Effect::change(Kind::VirtualMachine, &*observed.vm, &wanted, None)? {
        refused = blocked(observed, FAILED_TEMPLATE, TEMPLATE_CONTEXT);
        if decision.must_wait(&observed.failures, FAILED_TEMPLATE, observed.now) {
            // The template gets the addresses later.
            macs.waiting.extend(macs.known.drain(..).map(|(name, _)| name));
            macs.waiting.sort();
        } else {
            let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
            let message = format!("{TEMPLATE_CONTEXT}: {{error}}");
            decision.push(change.on_failure(Event::warning(regarding, FAILED_TEMPLATE, message)));
        }
    }
    let mut wanted = instance.clone();
    macs.mark(&mut wanted);
    if let Some(nics) = changes.vmi {
        nics.mark(&mut wanted);
        nics.put(&mut wanted.spec);
    }
    Ok(refused.or(change_spec(observed, instance, &wanted, (FAILED_NICS, NICS_CONTEXT), decision)?))
}

/// Copies the layout of the PCI buses to a template without one, so that devices keep their addresses at the next start.
fn keep_pci_topology(instance: &VirtualMachineInstance, template: &mut ObjectMeta) {
    let has_version = |annotations: &BTreeMap<String, String>| annotations.contains_key(PCI_TOPOLOGY_VERSION);
    let Some(chosen) = instance.metadata.annotations.as_ref().filter(|annotations| has_version(annotations)) else {
        return;
    };
    if template.annotations.as_ref().is_some_and(has_version) {
        return;
    }
    let annotations = template.annotations.get_or_insert_default();
    for key in PCI_TOPOLOGY {
        if let Some(value) = chosen.get(key) {
            annotations.insert(key.to_owned(), value.clone());
        }
    }
}

/// Changes the VMI. Returns the error of the last attempt.
fn change_spec(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    wanted: &VirtualMachineInstance,
    (reason, context): (&'static str, &str),
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let Some(change) = Effect::change(Kind::Instance, instance, wanted, None)? else { return Ok(None) };
    if !decision.must_wait(&observed.failures, reason, observed.now) {
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        decision.push(change.on_failure(Event::warning(regarding, reason, format!("{context}: {{error}}"))));
    }
    Ok(blocked(observed, reason, context))
}
