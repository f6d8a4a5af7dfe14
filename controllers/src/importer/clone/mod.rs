//! DataVolumes that are clones: of a claim or of a snapshot, of the same namespace or another.
//!
//! ```text
//!                        ┌── same namespace ── driver ── target claim with data source ──────────────┐
//!   source exists,       │                 └── copy ──── target claim, import pod mounts both ───────┤
//!   permitted, filled, ──┤                                                                           ├──> Succeeded
//!   not in use           │                 ┌── driver ── tmp-pvc with data source ────┐              │
//!                        └── other one ────┴── copy ──── tmp-pvc, import pod mounts both ── hand-over ┘
//!                                                        (in the namespace of the source)
//!   driver ── refused for good ──> the reason and the strategy `copy` are recorded ──> claim deleted ──> copy
//! ```
//! No driver clones across namespaces, so that the volume of a temporary claim is handed over (`handover.rs`). `source.rs` says when a
//! source can be cloned, `strategy.rs` how. The strategy is recorded at the DataVolume before the first claim is made. Everything
//! else is read from the claims and the volume, so that virt-controller can be killed between any two writes.
//!
//! A clone from another namespace needs the mark that only virt-api writes (see [`Observed::is_permitted`]). A source that a pod can
//! write to is not cloned: the pods of its namespace are listed before a claim or a pod is made for the clone.
//!
//! A class that waits for the first consumer gets one: for a clone by the driver in the same namespace the pod of the VMI, for a copy
//! the pod that copies, and otherwise a pod that mounts the claim and ends (`consumer.rs`). A clone from another namespace does not
//! wait for the VM: its volume must exist to be handed over.

mod consumer;
pub(super) mod drive;
pub(super) mod facts;
mod handover;
mod source;
mod strategy;
mod temporary;
#[cfg(test)]
mod tests;

use api::cdi::annotation::{CLONE_FALLBACK_REASON as FALLBACK, CLONE_TYPE as STRATEGY};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaimSpec, TypedLocalObjectReference},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::json;

use self::{
    handover::{Objects, Step},
    source::{Source, Use},
    strategy::{Class, Strategy},
};
use crate::{
    cache::Key,
    importer::{CLAIM, binding},
    resources::{
        claim_facts::{ClaimUsers, ClaimWarning},
        claims::CachedClaim,
        volumes::CachedVolume,
    },
    runtime::{Effect, Event, Kind},
};

/// Reason of the events about a copy instead of a clone by the driver.
const FALLBACK_EVENT: &str = "CloneFallback";
/// Time between two looks at what no watch shows.
const RETRY: SignedDuration = SignedDuration::from_secs(10);
/// Reason of the condition and the event about a source that is in use.
const IN_USE: &str = "CloneSourceInUse";

/// Phases of a DataVolume that is a clone.
pub(super) mod phase {
    /// The claim is bound once a pod uses it.
    pub(in crate::importer) const FIRST_CONSUMER: &str = "WaitForFirstConsumer";
    /// It waits for its source.
    pub(in crate::importer) const SCHEDULED: &str = "CloneScheduled";
    /// A pod copies.
    pub(in crate::importer) const COPIES: &str = "CloneInProgress";
    /// The driver clones a claim.
    pub(in crate::importer) const DRIVER: &str = "CSICloneInProgress";
    /// The driver makes a volume from a snapshot.
    pub(in crate::importer) const SNAPSHOT: &str = "CloneFromSnapshotSourceInProgress";
    /// The volume is handed over.
    pub(in crate::importer) const REBIND: &str = "RebindInProgress";
}

/// Everything that the decision about a clone depends on.
#[derive(Clone, Debug)]
pub(super) struct Observed<'a> {
    /// Metadata of the DataVolume.
    pub data_volume: &'a ObjectMeta,
    /// Namespace and name of the source.
    pub source_key: &'a Key,
    /// The source.
    pub source: Source<'a>,
    /// The source is a claim that no DataVolume is filling.
    pub source_is_filled: bool,
    /// Provisioner of the storage class of the source.
    pub source_provisioner: Option<&'a str>,
    /// The importer began this clone. Before, the strategy at the DataVolume is that of another one, with which it was copied.
    pub is_begun: bool,
    /// The mark of virt-api permits the clone of this source. Not needed in the same namespace.
    pub is_permitted: bool,
    /// Spec of the claim of the DataVolume, complete.
    pub spec: &'a PersistentVolumeClaimSpec,
    /// Its storage class.
    pub class: Option<&'a Class>,
    /// A claim of a class that waits for the first consumer is bound at once.
    pub is_immediate: bool,
    /// The claim of the DataVolume, which controls it.
    pub target: Option<&'a CachedClaim>,
    /// The claim with the name of the temporary one, in the namespace of the source.
    pub temporary: Option<&'a CachedClaim>,
    /// The volume that is marked for the DataVolume.
    pub volume: Option<&'a CachedVolume>,
    /// The pods that can write to the source, as far as they were read.
    pub users: Option<&'a ClaimUsers>,
    /// Warnings about the target or the temporary claim, as far as they were read.
    pub warning: Option<&'a ClaimWarning>,
    /// The import pod of the clone exists.
    pub is_copying: bool,
    /// The current time.
    pub now: Timestamp,
}

/// A reason to wait: the condition Bound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hold {
    /// Reason of the condition.
    pub reason: &'static str,
    /// Message of the condition.
    pub message: String,
}

impl Hold {
    fn bound(reason: &'static str, message: String) -> Self {
        Self { reason, message }
    }
}

/// The work that the importer does for a clone as for other sources.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Work {
    /// None now.
    None,
    /// The claim of the DataVolume is created with this data source. It is filled once it is bound.
    Provision(TypedLocalObjectReference),
    /// An import pod fills the claim of the DataVolume from the source in the same namespace.
    Copy,
    /// An import pod in the namespace of the source fills this claim, which exists.
    CopyInto(Key),
    /// A pod uses this claim, so that its driver makes the volume.
    Consume(Key),
    /// The claim of the DataVolume is created with the volume of this name.
    Take(String),
    /// The claim of the DataVolume is filled and bound; after the deletion of the DataVolume: nothing is left of the clone.
    Complete,
}

/// A decision about a clone.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Next {
    /// Phase of the DataVolume.
    pub phase: &'static str,
    /// The work of the importer.
    pub work: Work,
    /// Writes and reads, before the work.
    pub effects: Vec<Effect>,
    /// The reason to wait.
    pub hold: Option<Hold>,
    /// Time after which to look again.
    pub wake: Option<SignedDuration>,
}

impl Next {
    fn work(phase: &'static str, work: Work) -> Self {
        Self { phase, work, effects: Vec::new(), hold: None, wake: None }
    }

    fn hold(phase: &'static str, hold: Hold) -> Self {
        Self { hold: Some(hold), ..Self::work(phase, Work::None) }
    }

    fn effect(phase: &'static str, effects: impl IntoIterator<Item = Effect>) -> Self {
        Self { effects: effects.into_iter().collect(), ..Self::work(phase, Work::None) }
    }
}

impl<'a> Observed<'a> {
    /// Returns true if the source is in another namespace.
    pub(super) fn is_remote(&self) -> bool {
        self.data_volume.namespace.as_deref() != Some(&*self.source_key.namespace)
    }

    fn uid(&self) -> &'a str {
        self.data_volume.uid.as_deref().unwrap_or_default()
    }

    fn annotation(&self, key: &str) -> Option<&'a str> {
        self.data_volume.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the claim that is made from the source: the target, or the temporary one.
    fn made(&self) -> Option<&'a CachedClaim> {
        if self.is_remote() { self.temporary } else { self.target }
    }
}

/// Returns the name of the temporary claim of a DataVolume.
pub(super) fn temporary_claim(data_volume: &ObjectMeta) -> String {
    temporary::name(data_volume.uid.as_deref().unwrap_or_default())
}

/// Decides about the clone of a DataVolume that is not complete.
pub(super) fn decide(observed: &Observed<'_>) -> Result<Next, serde_json::Error> {
    if observed.is_remote() {
        return decide_remote(observed);
    }
    if let Some(next) = observed.target.and_then(|target| pending(observed, target)) {
        return Ok(next);
    }
    Ok(match begin(observed) {
        Begin::Wait(next) => next,
        Begin::Driver(_, phase) if observed.target.is_some_and(|target| target.phase == "Bound") => {
            Next::work(phase, Work::Complete)
        }
        Begin::Driver(source, phase) => Next::work(phase, Work::Provision(source)),
        Begin::Copy => Next::work(phase::SCHEDULED, Work::Copy),
    })
}

fn decide_remote(observed: &Observed<'_>) -> Result<Next, serde_json::Error> {
    let receiver = Key::of(observed.data_volume);
    let uid = observed.uid();
    let temporary = match observed.temporary {
        Some(claim) if !temporary::is_of(claim, uid) => {
            let key = Key::of(&claim.metadata);
            let text = format!("PersistentVolumeClaim {key} exists and is not the temporary claim of this clone");
            return Ok(Next::hold(phase::SCHEDULED, Hold::bound("ErrResourceExists", text)));
        }
        claim => claim,
    };
    if let Some(next) = temporary.and_then(|claim| pending(observed, claim)) {
        return Ok(next);
    }
    let objects = Objects {
        uid,
        receiver: &receiver,
        // A claim that a pod is still filling has nothing to hand over.
        temporary: temporary.filter(|claim| {
            observed.volume.is_some() || claim.data_source.is_some() || claim.is_filled() || claim.phase == "Lost"
        }),
        target: observed.target,
        volume: observed.volume,
    };
    let step = handover::next(&objects);
    Ok(match step {
        Step::Fill => return fill(observed, temporary, &receiver),
        Step::Create(volume) => Next::work(phase::REBIND, Work::Take(volume)),
        Step::Complete => Next::work(phase::REBIND, Work::Complete),
        Step::Refuse(text) => Next::hold(phase::REBIND, Hold::bound("CloneError", text)),
        step => Next::effect(phase::REBIND, handover::write(&objects, &step)),
    })
}

/// Returns the next step of a DataVolume that is being deleted.
pub(super) fn end(observed: &Observed<'_>) -> Next {
    let uid = observed.uid();
    let receiver = Key::of(observed.data_volume);
    let temporary = observed.temporary.filter(|claim| temporary::is_of(claim, uid));
    let objects = Objects { uid, receiver: &receiver, temporary, target: observed.target, volume: observed.volume };
    match handover::next_of_end(&objects) {
        Step::Complete => Next::work(phase::REBIND, Work::Complete),
        step => Next::effect(phase::REBIND, handover::write(&objects, &step)),
    }
}

/// Makes the temporary claim and fills it.
fn fill(observed: &Observed<'_>, temporary: Option<&CachedClaim>, receiver: &Key) -> Result<Next, serde_json::Error> {
    let (data_source, phase) = match begin(observed) {
        Begin::Wait(next) => return Ok(next),
        Begin::Driver(source, phase) => (Some(source), phase),
        Begin::Copy => (None, phase::SCHEDULED),
    };
    if let Some(claim) = temporary {
        let is_copied = data_source.is_none() && claim.metadata.deletion_timestamp.is_none();
        return Ok(Next::work(phase, if is_copied { Work::CopyInto(Key::of(&claim.metadata)) } else { Work::None }));
    }
    let namespace = &observed.source_key.namespace;
    // The author of the DataVolume chooses neither another source nor a volume in this namespace.
    let spec = PersistentVolumeClaimSpec {
        data_source,
        data_source_ref: None,
        volume_name: None,
        selector: None,
        ..observed.spec.clone()
    };
    let claim = temporary::render(observed.uid(), namespace, receiver, spec);
    Ok(Next::effect(phase, [Effect::create(Kind::Claim, Some(namespace), &claim)?.refused_as(CLAIM)]))
}

/// The beginning of a clone.
enum Begin {
    /// It cannot begin yet.
    Wait(Next),
    /// The driver makes the volume of a claim with this data source, in this phase.
    Driver(TypedLocalObjectReference, &'static str),
    /// A pod copies.
    Copy,
}

/// Checks the source and chooses the strategy. A clone that has begun is not checked again.
fn begin(observed: &Observed<'_>) -> Begin {
    let waits = |hold| Begin::Wait(Next::hold(phase::SCHEDULED, hold));
    if observed.is_remote() && !observed.is_permitted {
        let text = format!("the clone of a source in namespace {} is not permitted", observed.source_key.namespace);
        return waits(Hold::bound("CloneNotPermitted", text));
    }
    // The claim that exists tells the strategy, which users can change at the DataVolume.
    let made = observed.made().map(|claim| claim.data_source.is_some());
    let recorded = observed.annotation(STRATEGY).filter(|_| observed.is_begun);
    let by_driver = made.or(recorded.map(|strategy| strategy == strategy::DRIVER));
    if made != Some(true) && !observed.is_copying {
        if let Err(hold) = source::check(observed) {
            // No watch shows a storage class or driver that appears.
            let wake = matches!(observed.source, Source::Snapshot(_)).then_some(RETRY);
            return Begin::Wait(Next { wake, ..Next::hold(phase::SCHEDULED, hold) });
        }
        if let Source::Claim(Some(claim)) = observed.source
            && let Some(next) = in_use(observed, claim)
        {
            return Begin::Wait(next);
        }
    }
    match by_driver {
        None => Begin::Wait(record(observed)),
        Some(true) => {
            let (data_source, phase) = data_source(observed);
            Begin::Driver(data_source, phase)
        }
        Some(false) => Begin::Copy,
    }
}

/// Returns the data source of a claim that the driver makes, and the phase in which it does.
fn data_source(observed: &Observed<'_>) -> (TypedLocalObjectReference, &'static str) {
    let (kind, api_group, phase) = match observed.source {
        Source::Claim(_) => ("PersistentVolumeClaim", None, phase::DRIVER),
        Source::Snapshot(_) => ("VolumeSnapshot", Some("snapshot.storage.k8s.io".to_owned()), phase::SNAPSHOT),
    };
    let name = observed.source_key.name.clone();
    (TypedLocalObjectReference { api_group, kind: kind.to_owned(), name }, phase)
}

/// Waits until no pod can write to the source.
fn in_use(observed: &Observed<'_>, claim: &CachedClaim) -> Option<Next> {
    let read = || Effect::ReadUsers {
        namespace: observed.source_key.namespace.clone(),
        claims: [(observed.source_key.name.clone(), claim.metadata.uid.clone().unwrap_or_default())].into(),
    };
    let next = match source::users(observed, claim) {
        Use::Free => return None,
        Use::Unknown => Next::effect(phase::SCHEDULED, [read()]),
        Use::Used(message) => Next::hold(phase::SCHEDULED, Hold::bound(IN_USE, message)),
    };
    Some(Next { wake: Some(RETRY), ..next })
}

/// Records the strategy.
fn record(observed: &Observed<'_>) -> Next {
    let strategy = match observed.source {
        Source::Claim(Some(claim)) => strategy::choose(observed, claim),
        _ => Strategy::Driver,
    };
    let annotations = match strategy {
        Strategy::Driver => json!({STRATEGY: strategy::DRIVER}),
        Strategy::Copy(reason) => json!({STRATEGY: strategy::COPY, FALLBACK: reason}),
    };
    let patch = json!({"metadata": {"annotations": annotations}});
    Next::effect(phase::SCHEDULED, [Effect::merge(Kind::DataVolume, observed.data_volume, patch)])
}

/// Waits for the driver that makes the volume of a claim. Falls back to a copy if it has refused to clone: records that, and then
/// deletes the claim, which no volume was made for. Returns `None` if no driver is at work.
fn pending(observed: &Observed<'_>, claim: &CachedClaim) -> Option<Next> {
    if claim.phase != "Pending" || claim.data_source.is_none() {
        return None;
    }
    let (_, phase) = data_source(observed);
    if observed.annotation(STRATEGY) == Some(strategy::COPY) {
        let is_deleting = claim.metadata.deletion_timestamp.is_some();
        return Some(Next::effect(phase, (!is_deleting).then(|| Effect::delete(Kind::Claim, &claim.metadata))));
    }
    let known = binding::known(claim, observed.warning);
    let warning = known.and_then(|known| known.warning.as_ref());
    let is_claim = matches!(observed.source, Source::Claim(_));
    if let Some((_, message)) = warning.filter(|(reason, message)| is_claim && strategy::is_refusal(reason, message)) {
        return Some(Next::effect(phase, [fall_back(observed, message)]));
    }
    let work = if consumer::is_needed(observed, claim) { Work::Consume(Key::of(&claim.metadata)) } else { Work::None };
    // Without a node no driver has been asked.
    let is_asked = claim.has_node || !observed.class.is_some_and(|class| class.is_late);
    if !is_asked {
        let is_of_vm = work == Work::None && !observed.is_remote();
        return Some(Next::work(if is_of_vm { phase::FIRST_CONSUMER } else { phase }, work));
    }
    let read = binding::read(claim, known, observed.now, RETRY);
    let hold = known.and_then(|known| binding::text(claim, known)).map(|text| Hold::bound("Pending", text));
    Some(Next { effects: read.into_iter().collect(), hold, wake: Some(RETRY), ..Next::work(phase, work) })
}

/// Records that a pod copies, and why.
fn fall_back(observed: &Observed<'_>, message: &str) -> Effect {
    let text = format!("the driver does not clone the claim, which is copied instead: {message}");
    let event = Event::warning(Kind::DataVolume.reference(observed.data_volume), FALLBACK_EVENT, text);
    let annotations = json!({STRATEGY: strategy::COPY, FALLBACK: message});
    Effect::merge(Kind::DataVolume, observed.data_volume, json!({"metadata": {"annotations": annotations}}))
        .on_success(event)
}
