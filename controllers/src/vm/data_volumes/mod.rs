//! DataVolumes of a VM: those of its templates are created and hold back its start. Those that its volumes name otherwise show
//! in its status only. Start with [`DataVolumes::of`]; `state.rs` reads one DataVolume, `manifest.rs` makes one.
//!
//! ```text
//!            created              bound and filled
//!  missing ──────────> working ─────────────────────> usable
//!                       │   ^
//!         errors repeat v   │ the import is tried again
//!                      failing
//!
//!  it existed at the last start and is deleted: lost ──explicit start without saved memory──> missing
//! ```

mod manifest;
mod state;

use std::time::Duration;

use api::{
    Condition, VirtualMachine, VirtualMachineInstance,
    cdi::{DataVolume, data_volume::DataVolumeImportSource},
    constants::{annotation, condition, event, reason},
    owner,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use self::state::{State, Work};
use super::{
    Observed, SyncError, hibernation,
    run_strategy::{self, Action},
};
use crate::{
    resources::{
        claims::CachedClaim,
        vms::{data_volume_names, templated},
    },
    runtime::{DataVolumeCreation, Decision, Effect, Event, Kind},
};

/// Context of errors in condition Failure.
const CONTEXT: &str = "Error encountered while creating DataVolumes";
/// Phase of a claim that has a volume.
const BOUND: &str = "Bound";
/// Error of a cluster that does not serve DataVolumes, as the API server words it.
const NOT_SERVED: &str =
    "failed to create DataVolume: the server could not find the requested resource (post datavolumes.cdi.kubevirt.io)";
/// Its cause.
const NOT_INSTALLED: &str = "CustomResourceDefinition datavolumes.cdi.kubevirt.io is not installed; install CDI or enable the importer of Ferrovirt (without hooks: apply importer-crds.yaml)";

/// The DataVolumes of a VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DataVolumes(Vec<Entry>);

/// The source of the DataVolume of a template at present.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Source {
    /// The source.
    pub source: DataVolumeImportSource,
    /// The claim, if it does not exist.
    pub absent_claim: Option<String>,
    /// A DataSource names it, and may name another one later.
    pub is_referenced: bool,
}

/// One DataVolume.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    name: String,
    /// A template of the VM describes it.
    is_templated: bool,
    state: State,
}

impl DataVolumes {
    /// Returns the states of the DataVolumes that the templates and the volumes of a VM name.
    pub(super) fn of(observed: &Observed) -> Self {
        let own = templated(&observed.vm).map(|name| Entry {
            name: name.to_owned(),
            is_templated: true,
            state: of_template(observed, name),
        });
        let others =
            data_volume_names(&observed.vm).filter(|name| !templated(&observed.vm).any(|known| known == *name));
        let others = others.filter_map(|name| {
            let state = state::of(observed.data_volumes.get(name)?, observed.now);
            Some(Entry { name: name.to_owned(), is_templated: false, state })
        });
        Self(own.chain(others).collect())
    }

    fn templated(&self) -> impl Iterator<Item = &Entry> {
        self.0.iter().filter(|entry| entry.is_templated)
    }

    /// Returns true if the VMI can be created as far as the DataVolumes of templates are concerned.
    pub(super) fn permit_start(&self) -> bool {
        self.templated().all(|entry| matches!(entry.state, State::Usable { .. } | State::Adoptable))
    }

    /// Returns true if a DataVolume whose data the VM has used was deleted and not created again.
    pub(super) fn await_reset(&self) -> bool {
        self.templated().any(|entry| matches!(entry.state, State::Lost | State::Missing))
    }

    /// Returns true if a user must act before the VM can start.
    pub(super) fn fail(&self, must_run: bool) -> bool {
        self.0.iter().any(|entry| match entry.state {
            State::Failing(_) => true,
            State::Lost | State::Foreign(_) => must_run,
            _ => false,
        })
    }

    /// Returns true if a DataVolume is being created, bound or filled.
    pub(super) fn are_provisioned(&self, must_run: bool) -> bool {
        self.0.iter().any(|entry| match entry.state {
            State::Working(_) | State::Usable { is_filled: true } => true,
            State::Missing | State::Unserved => must_run,
            _ => false,
        })
    }

    /// Returns true if a DataVolume is being filled: the launcher pod that waits for it has no node although nothing is wrong.
    pub(super) fn are_filled(&self) -> bool {
        self.0.iter().any(|entry| matches!(&entry.state, State::Working(work) if work.fills))
    }

    /// Returns the condition of a VM without VMI. `None`: all DataVolumes are usable.
    pub(super) fn condition(&self, now: &Time) -> Option<Condition> {
        let texts: Vec<String> = self
            .0
            .iter()
            .filter_map(|entry| Some(format!("DataVolume {}: {}", entry.name, entry.state.text()?)))
            .collect();
        let message = texts.join("; ");
        let ready =
            || Condition::new(condition::DATA_VOLUMES_READY, false, reason::NOT_ALL_DATA_VOLUMES_READY, &message, now);
        (!texts.is_empty()).then(ready)
    }

    /// Returns the error for condition Failure.
    pub(super) fn error(&self, observed: &Observed) -> Option<SyncError> {
        let refused = failure(observed).map(|failure| failure.message.clone());
        let creates = |entry: &&Entry| matches!(entry.state, State::Missing | State::Adoptable);
        let texts = self.templated().find_map(|entry| entry.state.error(&entry.name));
        let text = texts.or_else(|| refused.filter(|_| self.templated().any(|entry| creates(&entry))))?;
        Some(SyncError::new(event::FAILED_CREATE, format!("{CONTEXT}: {text}")))
    }

    /// Returns the time after which the state of a DataVolume counts as another one although nothing changes.
    fn wake_after(&self) -> Option<Duration> {
        self.0.iter().filter_map(|entry| if let State::Working(work) = &entry.state { work.wake } else { None }).min()
    }
}

/// Returns the last refused creation of a DataVolume.
fn failure(observed: &Observed) -> Option<&crate::runtime::Failure> {
    observed.failures.of(event::FAILED_DATA_VOLUME_CREATE)
}

/// Returns true if the VM has used the data of a DataVolume: the record of the last start names it.
fn was_used(observed: &Observed, name: &str) -> bool {
    observed.starts.iter().any(|record| record.data_volumes.iter().any(|known| known == name))
}

/// Returns the state of the DataVolume of a template.
fn of_template(observed: &Observed, name: &str) -> State {
    let claim = observed.claims.get(name).map(|claim| &**claim);
    let was_used = was_used(observed, name);
    let leaving =
        || if was_used { State::Lost } else { State::waits("the former DataVolume or its claim is being deleted") };
    match (observed.data_volumes.get(name), claim) {
        (Some(present), _) if present.metadata.deletion_timestamp.is_some() || is_left(&observed.vm, present) => {
            leaving()
        }
        (Some(present), _) => match owner::controller(&present.metadata) {
            Some(other) if !owner::is_controlled_by(&present.metadata, &*observed.vm) => {
                State::Foreign(format!("it belongs to {} {}", other.kind, other.name))
            }
            _ => state::of(present, observed.now),
        },
        // The claims of DataVolumes stay usable when the kind is gone.
        (None, Some(claim)) if !observed.serves_data_volumes => {
            let is_usable = claim.phase == BOUND && !claim.populating;
            if is_usable { State::Usable { is_filled: false } } else { State::Unserved }
        }
        (None, None) if !observed.serves_data_volumes => State::Unserved,
        (None, Some(claim)) if is_leaving(claim) => leaving(),
        (None, Some(claim)) if claim.populating => State::waits("its claim is being filled"),
        (None, Some(claim)) if owner::controller(&claim.metadata).is_some() => State::Usable { is_filled: false },
        (None, Some(_)) => State::Adoptable,
        (None, None) if was_used && !is_reset(&observed.vm) => State::Lost,
        (None, None) => State::Missing,
    }
}

/// Returns true for a DataVolume of a former VM of the same name: the garbage collector deletes it.
fn is_left(vm: &VirtualMachine, data_volume: &DataVolume) -> bool {
    let former = owner::controller_of_kind::<VirtualMachine>(&data_volume.metadata);
    former.is_some_and(|former| {
        vm.metadata.name.as_ref() == Some(&former.name) && vm.metadata.uid.as_ref() != Some(&former.uid)
    })
}

/// Returns true for the claim of a DataVolume that does not exist: the garbage collector deletes it.
fn is_leaving(claim: &CachedClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some()
        || owner::controller_of_kind::<DataVolume>(&claim.metadata).map(|owner| &owner.name)
            == claim.metadata.name.as_ref()
}

/// Returns true if the VM may start with new data. Saved memory belongs to the former data.
fn is_reset(vm: &VirtualMachine) -> bool {
    is_explicit_start(vm) && !hibernation::is_hibernated(vm) && !hibernation::is_in_progress(vm)
}

/// Returns true if a user has requested the start, or set the VM to run since it was stopped.
fn is_explicit_start(vm: &VirtualMachine) -> bool {
    let has_switched = || run_strategy::has_switched(vm, &vm.spec.effective_run_strategy());
    run_strategy::start_request(vm).is_some() || (run_strategy::must_run(vm, None) && has_switched())
}

/// Creates and adopts the DataVolumes of templates.
pub(super) fn synchronize(
    observed: &Observed,
    owned: Option<&VirtualMachineInstance>,
    states: &DataVolumes,
    decision: &mut Decision,
) {
    let vm = &*observed.vm;
    states.wake_after().into_iter().for_each(|wait| decision.wake(wait));
    adopt(observed, states, decision);
    replace(observed, states, decision);
    report(observed, owned, states, decision);
    let delayed = vm.metadata.annotations.as_ref().and_then(|all| all.get(annotation::IMMEDIATE_DATA_VOLUME_CREATION));
    let starts = || matches!(run_strategy::next(vm, owned, observed.now), Action::Start { .. });
    let is_delayed = delayed.is_some_and(|value| value == "false") && !starts();
    let is_created = |entry: &&Entry| match entry.state {
        State::Missing => !is_delayed,
        // If it is refused, the claim is used without a DataVolume. A restored claim has no other owner, and would outlive the VM.
        State::Adoptable => owned.is_none() && (!is_delayed || is_restored(observed, &entry.name)),
        _ => false,
    };
    let mut created = states.templated().filter(is_created).peekable();
    if let Some(failure) = failure(observed).filter(|failure| created.peek().is_some() && failure.blocks(observed.now))
    {
        decision.wake(failure.remaining(observed.now));
        return;
    }
    for entry in created {
        let Some(data_volume) = manifest::of(vm, &entry.name) else { continue };
        warn_about_source(observed, &data_volume, decision);
        let creation = DataVolumeCreation {
            data_volume,
            service_account: manifest::service_account(vm),
            adopts_claim: entry.state == State::Adoptable,
            regarding: Kind::VirtualMachine.reference(&vm.metadata),
        };
        decision.push(Effect::create_data_volume(creation));
    }
}

/// Returns true if a restore has made the claim for the DataVolume of this name.
fn is_restored(observed: &Observed, name: &str) -> bool {
    let is_marked = |claim: &CachedClaim| {
        claim.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(annotation::RESTORE))
    };
    observed.claims.get(name).is_some_and(|claim| claim.is_filled_for(name) && is_marked(claim))
}

/// Makes the VM the controller of DataVolumes of its templates that have none, such as those of an orphaned VM.
fn adopt(observed: &Observed, states: &DataVolumes, decision: &mut Decision) {
    let orphans = states.templated().filter_map(|entry| observed.data_volumes.get(&entry.name));
    for orphan in orphans
        .filter(|known| owner::controller(&known.metadata).is_none() && known.metadata.deletion_timestamp.is_none())
    {
        let controller = Kind::VirtualMachine.owner_reference(&observed.vm.metadata);
        let others = orphan.metadata.owner_references.iter().flatten().filter(|owner| owner.uid != controller.uid);
        let owners: Vec<_> = others.chain([&controller]).collect();
        let patch = json!({"metadata": {"uid": orphan.metadata.uid, "ownerReferences": owners}});
        decision.push(Effect::merge(Kind::DataVolume, &orphan.metadata, patch));
    }
}

/// Deletes DataVolumes whose source was deleted before the clone began, if their DataSource names another one by now. They hold
/// no data and are created again.
fn replace(observed: &Observed, states: &DataVolumes, decision: &mut Decision) {
    for entry in states.templated() {
        let State::Working(Work { refusal: Some(refusal), .. }) = &entry.state else { continue };
        let (present, source) = (observed.data_volumes.get(&entry.name), observed.sources.get(&entry.name));
        let Some((present, source)) = present.zip(source) else { continue };
        let is_replaced = source.is_referenced && present.spec.source.as_ref() != Some(&source.source);
        if !refusal.lacks_source || !is_replaced || was_used(observed, &entry.name) {
            continue;
        }
        let message =
            format!("Deleted DataVolume {}, whose source is gone: its DataSource names another one", entry.name);
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        let deleted = Event::normal(regarding, event::DATA_VOLUME_REPLACED, message);
        decision.push(Effect::delete(Kind::DataVolume, &present.metadata).on_success(deleted));
    }
}

/// Emits events about DataVolumes that fail, once each. The VMI controller reports them when there is a VMI.
fn report(observed: &Observed, owned: Option<&VirtualMachineInstance>, states: &DataVolumes, decision: &mut Decision) {
    let shown = observed.vm.condition(condition::DATA_VOLUMES_READY).and_then(|shown| shown.message.as_deref());
    for entry in states.0.iter().filter(|_| owned.is_none()) {
        let Some(text) = entry.state.text() else { continue };
        if shown.is_some_and(|shown| shown.contains(&text)) {
            continue;
        }
        let message = match &entry.state {
            State::Failing(_) => format!("DataVolume {} failed to import disk image: {text}", entry.name),
            State::Working(Work { refusal: Some(refusal), .. }) if refusal.is_quota => {
                format!("DataVolume {} exceeds quota limits: {}", entry.name, refusal.message)
            }
            State::Working(Work { refusal: Some(refusal), .. }) => {
                format!("DataVolume {} cannot be filled: {}", entry.name, refusal.message)
            }
            _ => continue,
        };
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        decision.push(Effect::Event(Event::warning(regarding, event::FAILED_DATA_VOLUME_IMPORT, message)));
    }
}

/// Emits an event about a source claim that does not exist. The DataVolume waits for it.
fn warn_about_source(observed: &Observed, data_volume: &DataVolume, decision: &mut Decision) {
    let target = data_volume.metadata.name.as_deref().unwrap_or_default();
    let Some(source) = observed.sources.get(target).and_then(|source| source.absent_claim.as_ref()) else { return };
    let message = format!(
        "Source PVC {source} not available: Target PVC {target} will remain unpopulated until source is created"
    );
    let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
    decision.push(Effect::Event(Event::warning(regarding, event::SOURCE_PVC_NOT_AVAILABLE, message)));
}
