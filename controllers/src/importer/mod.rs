//! The importer: fills the claims of DataVolumes in clusters without CDI.
//!
//! ```text
//!                 ┌─ refused: Running=False Error                  ┌─ fatal report ──> Failed
//!   (new) ──> Pending ──> claim created ──> Bound ──> ImportScheduled ──> ImportInProgress ──> Succeeded
//!    │  ^          │           │                          │   ^              │
//!    │  │ no claim └─ quota    └─ late class:             │   └── kubelet ───┘ (restarts until it succeeds)
//!    │  └────────── <──────────── WaitForFirstConsumer    └── pod deleted or evicted: made again
//!    └── claim of the name: adopted ──────────────────────────────────────────────────────────> Succeeded
//! ```
//! The state is read from the claim and the pod, so that virt-controller can be killed between any two writes. [`decide`] is pure; the
//! runtime writes. `source.rs` reads the source, `claim.rs` and `pod.rs` render, `import.rs` judges the pod, `status.rs` shows the
//! state as CDI does, `binding.rs` adds why a claim is not bound, `progress.rs` asks running pods, `data_source/` keeps DataSources
//! current.
//!
//! The importer steps back while the kind CDI is served: it begins nothing and finishes what it began. Of the status it writes the end
//! only, since CDI shows the rest. A DataVolume that it began has the annotation [`IMPORT`](api::constants::annotation::IMPORT), and
//! the one by which CDI leaves its claim alone. Both go at the end, when the claim says for which DataVolume it is filled, which CDI
//! honours.

mod binding;
mod claim;
mod clone;
mod controller;
mod data_source;
mod import;
mod pod;
pub(crate) mod progress;
mod source;
mod status;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use api::{
    DataVolumePhase,
    cdi::{DataVolume, annotation},
    constants::annotation::{IMPORT, RESTORE},
    owner,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Toleration;
use serde_json::{Value, json};

pub(crate) use self::{controller::Importer, data_source::DataSources};
use self::{
    source::Source,
    status::{Fact, Shown, phase, reason},
};
use crate::{
    resources::{
        claim_facts::ClaimWarning, claims::CachedClaim, import_pods::CachedImportPod,
        storage_classes::CachedStorageClass, storage_profiles::CachedStorageProfile,
    },
    runtime::{Decision, Effect, Event, Failure, Failures, Kind},
};

/// Time after which a claim that cannot be rendered is tried again: a class may have appeared.
const RETRY: Duration = Duration::from_secs(30);
/// Reason under which a refused claim is remembered.
const CLAIM: &str = "FailedClaimCreate";
/// Reason under which a refused pod is remembered.
const POD: &str = "FailedImportPodCreate";
/// Reason of the event about a DataVolume that is left to CDI although the importer is switched on.
const BESIDE_CDI: &str = "ImporterBesideCDI";

/// Everything that the decision about a DataVolume depends on.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// The DataVolume.
    pub volume: Arc<DataVolume>,
    /// The claim of its name.
    pub claim: Option<Arc<CachedClaim>>,
    /// Its import pod.
    pub pod: Option<Arc<CachedImportPod>>,
    /// Storage class of the claim, or the one that it gets.
    pub class: Option<Arc<CachedStorageClass>>,
    /// The provisioner of that class is a CSI driver.
    pub is_csi: bool,
    /// Profile of that class.
    pub profile: Option<Arc<CachedStorageProfile>>,
    /// The importer begins imports.
    pub begins: bool,
    /// CDI is installed, and the importer is switched on nevertheless.
    pub beside_cdi: bool,
    /// Warnings about the claim, as far as they were read.
    pub warning: Option<Arc<ClaimWarning>>,
    /// The objects of a clone.
    clone: Option<clone::facts::Facts>,
    /// Tolerations of the VM that controls the DataVolume.
    pub tolerations: Vec<Toleration>,
    /// Progress of the pod in percent.
    pub percent: Option<f64>,
    /// Image of the importer.
    pub image: String,
    /// When kubelet pulls it.
    pub pull_policy: String,
    /// The writes that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

type Step = crate::runtime::Step<Shown>;

impl Observed {
    fn name(&self) -> &str {
        self.volume.metadata.name.as_deref().unwrap_or_default()
    }

    fn defaults(&self) -> claim::Defaults<'_> {
        claim::Defaults { class: self.class.as_deref(), profile: self.profile.as_deref() }
    }

    fn annotated(&self, key: &str) -> Option<&str> {
        self.volume.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns true if this importer began to fill the claim. The UID tells an annotation that was copied with the DataVolume.
    fn is_begun(&self) -> bool {
        self.annotated(IMPORT).is_some_and(|uid| Some(uid) == self.volume.metadata.uid.as_deref())
    }

    fn is_controlled(&self, claim: &CachedClaim) -> bool {
        owner::is_controlled_by(&claim.metadata, &*self.volume)
    }

    /// Returns true if the claim was made for the DataVolume. One that it has taken over has content that must stay.
    fn is_made(&self, claim: &CachedClaim) -> bool {
        let made_for = claim.metadata.annotations.as_ref().and_then(|all| all.get(annotation::CREATED_FOR));
        made_for.is_some() && made_for == self.volume.metadata.uid.as_ref()
    }

    /// Returns true for a claim that was made again, after the one that is shown as filled was deleted.
    fn is_made_again(&self, claim: &CachedClaim) -> bool {
        self.is_begun() && self.is_controlled(claim) && self.is_made(claim) && claim.populating
    }

    /// Returns true for a claim that another party has filled for the DataVolume in place of the former one, as a restore does.
    fn is_handed_over(&self, claim: &CachedClaim) -> bool {
        owner::controller(&claim.metadata).is_none() && claim.is_filled_for(self.name())
    }

    /// Returns true if the claim is bound without waiting for a pod of a VM.
    fn is_immediate(&self) -> bool {
        self.annotated(annotation::BIND_IMMEDIATE).is_some()
    }

    /// Returns true while the claim that could not be filled exists: another pod would fail as well. Its deletion begins anew.
    fn keeps_failure(&self) -> bool {
        let temporary = self.clone.as_ref().and_then(|facts| facts.temporary.as_ref());
        let mut claims = self.claim.iter().chain(temporary);
        !self.begins || claims.any(|claim| claim.metadata.deletion_timestamp.is_none() && !self.is_handed_over(claim))
    }

    /// Returns true for a claim with content whose volume was lost and is there again.
    fn is_back(&self, claim: &CachedClaim) -> bool {
        let shown = self.volume.condition("Bound").and_then(|bound| bound.reason.as_deref());
        self.begins
            && shown == Some(reason::LOST)
            && claim.phase == "Bound"
            && claim.metadata.deletion_timestamp.is_none()
            && !claim.populating
            && self.is_controlled(claim)
    }

    fn annotate(&self, annotations: &Value) -> Effect {
        Effect::merge(Kind::DataVolume, &self.volume.metadata, json!({"metadata": {"annotations": annotations}}))
    }

    /// Keeps CDI from the claim, before it exists, and removes the strategy of another clone that was copied with the DataVolume.
    fn begin(&self) -> Option<Effect> {
        let uid = self.volume.metadata.uid.as_deref().unwrap_or_default();
        let marks = json!({
            annotation::PRE_POPULATED: self.name(),
            annotation::USE_POPULATOR: "false",
            annotation::CLONE_TYPE: null,
            annotation::CLONE_FALLBACK_REASON: null,
            IMPORT: uid,
        });
        (!self.is_begun()).then(|| self.annotate(&marks))
    }

    /// Removes the marks of [`Observed::begin`]. That of a restore, which replaces the claim, is the same as one of them and stays.
    fn release(&self) -> Option<Effect> {
        let mut marks = json!({annotation::PRE_POPULATED: null, IMPORT: null});
        if self.is_restored() {
            marks = json!({IMPORT: null});
        }
        self.is_begun().then(|| self.annotate(&marks))
    }

    /// Returns true if a restore brings the claim.
    fn is_restored(&self) -> bool {
        self.annotated(annotation::PRE_POPULATED).is_some() && self.annotated(RESTORE).is_some()
    }

    /// Returns a refusal that is remembered, with the condition's reason for it.
    fn refusal(&self, write: &str, or: &'static str) -> Option<(&Failure, Fact)> {
        let failure = self.failures.of(write)?;
        let reason = if failure.message.contains("exceeded quota") { reason::QUOTA } else { or };
        Some((failure, Fact::no(reason, failure.message.clone())))
    }

    fn delete_pod(&self) -> Option<Effect> {
        let pod = self.pod.as_ref().filter(|pod| !pod.is_deleting())?;
        Some(Effect::delete(Kind::Pod, &pod.metadata))
    }
}

/// Decides about a DataVolume.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut step = next(observed)?.unwrap_or_default();
    if observed.beside_cdi && observed.volume.phase() == DataVolumePhase::Unset {
        let text = "value importer of the chart is \"on\", but CDI is installed and carries out this DataVolume";
        let about = Kind::DataVolume.reference(&observed.volume.metadata);
        step.before.insert(0, Effect::Event(Event::warning(about, BESIDE_CDI, text)));
    }
    // Beside CDI, its controller shows the state of every DataVolume. Two that do so would write in turn for ever.
    let is_ours = |shown: &Shown| observed.begins || [phase::SUCCEEDED, phase::FAILED].contains(&shown.phase);
    step.shown = step.shown.filter(is_ours);
    step.decided(|shown, decision| {
        let mut changed = (*observed.volume).clone();
        changed.status = Some(status::status(&observed.volume, &shown, observed.now));
        if let Some(change) = Effect::change(Kind::DataVolume, &*observed.volume, &changed, Some("status"))? {
            decision.push(change);
            decision.effects.extend(status::events(&observed.volume, &shown));
        }
        Ok(())
    })
}

/// Returns the next step. `None`: the DataVolume is none of this importer's.
fn next(observed: &Observed) -> Result<Option<Step>, serde_json::Error> {
    // Its claim and its pod are deleted with it, but not what is in another namespace.
    if observed.volume.metadata.deletion_timestamp.is_some() {
        return Ok(clone::drive::ending(observed));
    }
    if !(observed.begins || observed.is_begun()) {
        return Ok(None);
    }
    match (observed.volume.phase(), &observed.claim) {
        (DataVolumePhase::Failed, Some(claim)) if observed.is_back(claim) => Ok(Some(tidy(observed, claim))),
        (DataVolumePhase::Failed, _) if observed.keeps_failure() => {
            Ok(Some(Step::default().after(observed.delete_pod())))
        }
        // The claim is made once this is shown, so that it is never taken for the one that could not be filled.
        (DataVolumePhase::Failed, None) => {
            let running = Some(Fact::no(reason::PENDING, ""));
            Ok(Some(Step::show(Shown { running, ..without() }).after(observed.delete_pod())))
        }
        (DataVolumePhase::Succeeded, Some(claim))
            if claim.metadata.deletion_timestamp.is_none()
                && !observed.is_made_again(claim)
                && !observed.is_handed_over(claim) =>
        {
            Ok(Some(tidy(observed, claim)))
        }
        (_, Some(claim)) => with_claim(observed, claim).map(Some),
        (_, None) => without_claim(observed).map(Some),
    }
}

/// Removes what is left of an import that succeeded, and shows what becomes of its claim.
fn tidy(observed: &Observed, claim: &CachedClaim) -> Step {
    let pod = observed.delete_pod().filter(|_| !pod::is_retained(&observed.volume));
    let step = Step::default().after(observed.release()).after(clone::drive::release(&observed.volume)).after(pod);
    // CDI shows the claims of its DataVolumes.
    if !(observed.begins && observed.is_controlled(claim)) {
        return step;
    }
    let bound = bound(claim, observed.name());
    let shown = Shown { phase: phase::SUCCEEDED, bound, has_claim: true, ..Shown::default() };
    if claim.phase == "Lost" { lost(observed, shown) } else { Step { shown: Some(shown), ..step } }
}

/// Shows that the volume of the claim is lost.
fn lost(observed: &Observed, shown: Shown) -> Step {
    let about = Kind::DataVolume.reference(&observed.volume.metadata);
    let event = Effect::Event(Event::warning(about, "ErrClaimLost", format!("PVC {} lost", observed.name())));
    Step::show(Shown { phase: phase::FAILED, ..shown }).after([event]).after(observed.delete_pod())
}

/// Returns the state of a DataVolume that has no claim.
fn without() -> Shown {
    Shown { phase: phase::PENDING, bound: Fact::no(reason::NOT_FOUND, "No PVC found"), ..Shown::default() }
}

fn without_claim(observed: &Observed) -> Result<Step, serde_json::Error> {
    let volume = &observed.volume;
    let nothing = without();
    // One that has filled a former claim.
    if let Some(pod) = &observed.pod {
        let delete = (!pod.is_deleting()).then(|| Effect::delete(Kind::Pod, &pod.metadata));
        return Ok(Step::show(nothing).before(delete));
    }
    if observed.is_begun() && !observed.begins && !clone::drive::is_held(volume) {
        return Ok(Step::default().after(observed.release()));
    }
    // An annotation that was copied together with that of another import, such as from a backup, means nothing.
    let is_marked = observed.annotated(annotation::PRE_POPULATED).is_some() && observed.annotated(IMPORT).is_none();
    if is_marked || observed.is_restored() {
        return Ok(Step::show(nothing));
    }
    // Admission refuses it. CDI may have left such a DataVolume behind.
    if observed.annotated(annotation::CHECK_STATIC_VOLUME).is_some() {
        let text = format!("annotation {} needs CDI, which is not installed", annotation::CHECK_STATIC_VOLUME);
        return Ok(refused(nothing, text));
    }
    let source = match source::source(volume) {
        Ok(source) => source,
        Err(text) => return Ok(refused(nothing, text)),
    };
    if let Some(facts) = &observed.clone {
        return clone::drive::step(observed, facts, None, nothing);
    }
    let invalid = |text: String| {
        let bound = Fact::no(reason::CLAIM_NOT_VALID, text);
        Step::show(Shown { phase: phase::NONE, bound, ..Shown::default() }).wake(RETRY)
    };
    let spec = match claim::spec(volume, observed.defaults(), &|_| None) {
        Ok(spec) => spec,
        Err(text) => return Ok(invalid(text)),
    };
    let refusal = observed.refusal(CLAIM, reason::CLAIM_NOT_VALID);
    let shown = Shown { bound: refusal.as_ref().map_or(nothing.bound, |(_, fact)| fact.clone()), ..nothing };
    if let Some((failure, _)) = refusal.filter(|(failure, _)| failure.blocks(observed.now)) {
        return Ok(Step::show(shown).wake(failure.remaining(observed.now)));
    }
    let is_external = source == Source::External;
    let claim = claim::render(volume, spec, is_external);
    let create = Effect::create(Kind::Claim, volume.metadata.namespace.as_deref(), &claim)?.refused_as(CLAIM);
    let begin = observed.begin().filter(|_| !is_external);
    Ok(Step::show(shown).before(begin).before([create]))
}

/// Shows why a DataVolume is not carried out.
fn refused(nothing: Shown, text: String) -> Step {
    Step::show(Shown { running: Some(Fact::no(reason::ERROR, text)), ..nothing })
}

fn with_claim(observed: &Observed, claim: &CachedClaim) -> Result<Step, serde_json::Error> {
    let name = observed.name();
    let shown = Shown { phase: phase::PENDING, bound: bound(claim, name), has_claim: true, ..Shown::default() };
    if claim.metadata.deletion_timestamp.is_some() {
        let bound = Fact::no(reason::DELETING, format!("Resource {name:?} marked for deletion"));
        return Ok(Step::show(Shown { bound, has_claim: false, ..shown }).after(observed.delete_pod()));
    }
    if !observed.is_controlled(claim) {
        return Ok(adopt(observed, claim, shown));
    }
    let source = source::source(&observed.volume);
    let is_external = source == Ok(Source::External);
    if claim.is_filled_for(name) || (is_external && observed.is_csi) || !observed.is_made(claim) {
        return Ok(import::succeeded(observed, claim, shown, None));
    }
    if claim.phase == "Lost" {
        return Ok(lost(observed, shown));
    }
    if is_external {
        return Ok(without_driver(claim, shown));
    }
    let source = match source {
        Ok(source) => source,
        Err(text) => return Ok(refused(shown, text)),
    };
    if let Some(facts) = &observed.clone {
        return clone::drive::step(observed, facts, Some(claim), shown);
    }
    let begin = observed.begin();
    let is_late = observed.class.as_ref().is_some_and(|class| class.is_late);
    let step = match claim.phase.as_str() {
        "Bound" => import::step(observed, claim, &source, shown)?,
        _ if is_late && observed.is_immediate() => import::step(observed, claim, &source, shown)?,
        _ if is_late => Step::show(Shown { phase: phase::FIRST_CONSUMER, ..shown }),
        // Its class may be one that waits for a pod.
        _ if observed.class.is_none() => Step::show(shown).wake(RETRY),
        _ => Step::show(shown),
    };
    let step = binding::explained(observed, claim, step);
    Ok(Step { before: begin.into_iter().chain(step.before).collect(), ..step })
}

/// Shows that nobody fills a claim: provisioners without a CSI driver ignore the data source and make an empty volume.
fn without_driver(claim: &CachedClaim, shown: Shown) -> Step {
    let class = claim.storage_class.as_deref().unwrap_or_default();
    let text = format!("No CSI drivers were found: External population not supported: storage class {class:?}");
    Step::show(Shown { bound: Fact::no(reason::NO_DRIVER, text), ..shown }).wake(RETRY)
}

/// Returns condition Bound of a claim.
fn bound(claim: &CachedClaim, name: &str) -> Fact {
    match claim.phase.as_str() {
        "Bound" => Fact::yes(reason::BOUND, format!("PVC {name} Bound")),
        "Lost" => Fact::no(reason::LOST, "Claim Lost"),
        _ => Fact::no(reason::PENDING, format!("PVC {name} Pending")),
    }
}

/// Takes over a claim that exists, if it is meant for the DataVolume.
fn adopt(observed: &Observed, claim: &CachedClaim, shown: Shown) -> Step {
    let name = observed.name();
    let is_populated = claim.populated_for.as_deref() == Some(name);
    // One that an import has not filled holds a part of an image at best.
    let is_allowed = observed.annotated(annotation::ALLOW_CLAIM_ADOPTION) == Some("true") && !claim.populating;
    if owner::controller(&claim.metadata).is_some() || !(is_populated || is_allowed) {
        let text = format!("Resource {name:?} already exists and is not managed by DataVolume");
        return Step::show(Shown { bound: Fact::no(reason::EXISTS, text), has_claim: false, ..shown });
    }
    let mut owners = claim.metadata.owner_references.clone().unwrap_or_default();
    owners.push(Kind::DataVolume.owner_reference(&observed.volume.metadata));
    let own = Effect::merge(Kind::Claim, &claim.metadata, json!({"metadata": {"ownerReferences": owners}}));
    let release = observed.release();
    // As CDI does, so that the claim is never filled anew.
    let keep = (is_populated && claim.phase == "Bound" && release.is_none())
        .then(|| observed.annotate(&json!({annotation::PRE_POPULATED: name})));
    Step::show(Shown { phase: phase::SUCCEEDED, ..shown }).before([own]).after(release).after(keep)
}
