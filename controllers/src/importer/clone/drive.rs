//! Clones as steps of the importer: their state as the status shows it, the claim, and the pod that copies.

use api::{cdi::DataVolume, constants::finalizer};
use jiff::SignedDuration;
use k8s_openapi::{api::core::v1::PersistentVolumeClaimSpec, apimachinery::pkg::apis::meta::v1::OwnerReference};
use serde_json::json;

use super::{Hold, Next, Observed as View, Work, consumer, decide, end, facts::Facts, phase, source};
use crate::{
    cache::Key,
    importer::{
        CLAIM, Observed, RETRY, Step, binding, claim, import,
        pod::{Content, Inputs},
        status::{self, Fact, Shown, reason},
    },
    resources::claims::CachedClaim,
    runtime::{Effect, Kind, has_finalizer},
};

/// Annotation of a claim with the phase of the pod that fills it.
const POD_PHASE: &str = api::cdi::annotation::POD_PHASE;

/// Returns the step of a DataVolume that is a clone.
pub(in crate::importer) fn step(
    observed: &Observed,
    facts: &Facts,
    target: Option<&CachedClaim>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let is_late = observed.class.as_ref().is_some_and(|class| class.is_late);
    // The pod that copies is the first consumer.
    let is_first = is_late && observed.is_immediate();
    let is_empty = |claim: &CachedClaim| claim.data_source.is_none() && claim.volume.is_none();
    if let Some(target) = target.filter(|claim| claim.phase == "Pending" && is_empty(claim) && !is_first) {
        let phase = if is_late { phase::FIRST_CONSUMER } else { shown.phase };
        let step = Step::show(Shown { phase, ..shown });
        let step = if observed.class.is_none() { step.wake(RETRY) } else { step };
        return Ok(binding::explained(observed, target, step));
    }
    let source = facts.view();
    // Once the volume exists its size counts, and the source may be gone.
    let made = facts.temporary.as_deref().or(target);
    let known = made.and_then(CachedClaim::requested_bytes);
    let known = known.or_else(|| facts.volume.as_ref()?.size);
    let size = |spec: &PersistentVolumeClaimSpec| known.or_else(|| source::size(&source, spec, claim::overhead()));
    let spec = match claim::spec(&observed.volume, observed.defaults(), &size) {
        Ok(spec) => spec,
        // The size of a source that is missing. That of one that may not be cloned is not shown.
        Err(_) if facts.is_missing() || !is_permitted(observed, facts) => PersistentVolumeClaimSpec::default(),
        Err(text) => {
            let bound = Fact::no(reason::CLAIM_NOT_VALID, text);
            return Ok(Step::show(Shown { phase: phase::SCHEDULED, bound, ..shown }).wake(RETRY));
        }
    };
    let next = decide(&view(observed, facts, &spec, target))?;
    carry_out(observed, facts, spec, target, next, shown)
}

/// Returns the step of a clone whose DataVolume is being deleted. `None`: nothing holds it.
pub(in crate::importer) fn ending(observed: &Observed) -> Option<Step> {
    if !is_held(&observed.volume) {
        return None;
    }
    let Some(facts) = &observed.clone else { return Some(Step::default().before(release(&observed.volume))) };
    let spec = PersistentVolumeClaimSpec::default();
    let next = end(&view(observed, facts, &spec, observed.claim.as_deref()));
    let done = (next.work == Work::Complete).then(|| release(&observed.volume)).flatten();
    Some(Step::default().before(delete_pod(facts)).before(next.effects).before(done))
}

/// Deletes the pod that uses the temporary claim. Any pod of a claim, even one that has ended, keeps it from being removed.
fn delete_pod(facts: &Facts) -> Option<Effect> {
    let pod = facts.pod.as_ref().filter(|pod| !pod.is_deleting())?;
    Some(Effect::delete(Kind::Pod, &pod.metadata))
}

/// Returns true if virt-api permits the clone of the source, or it is in the same namespace.
fn is_permitted(observed: &Observed, facts: &Facts) -> bool {
    !is_remote(observed, facts) || observed.volume.permits_clone()
}

fn is_remote(observed: &Observed, facts: &Facts) -> bool {
    observed.volume.metadata.namespace.as_deref() != Some(&*facts.key.namespace)
}

fn view<'a>(
    observed: &'a Observed,
    facts: &'a Facts,
    spec: &'a PersistentVolumeClaimSpec,
    target: Option<&'a CachedClaim>,
) -> View<'a> {
    View {
        data_volume: &observed.volume.metadata,
        source_key: &facts.key,
        source: facts.view(),
        source_is_filled: facts.is_filled,
        source_provisioner: facts.provisioner.as_deref(),
        is_begun: observed.is_begun(),
        is_permitted: is_permitted(observed, facts),
        spec,
        class: facts.class.as_ref(),
        is_immediate: observed.is_immediate(),
        target: target.filter(|claim| observed.is_controlled(claim)),
        temporary: facts.temporary.as_deref(),
        volume: facts.volume.as_deref(),
        users: facts.users.as_deref(),
        warning: facts.warning.as_deref(),
        is_copying: facts.pod.is_some() || observed.pod.is_some(),
        now: observed.now,
    }
}

fn carry_out(
    observed: &Observed,
    facts: &Facts,
    spec: PersistentVolumeClaimSpec,
    target: Option<&CachedClaim>,
    next: Next,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let mut shown = Shown { phase: next.phase, ..shown };
    if let Some(Hold { reason, message }) = &next.hold {
        shown.bound = Fact::no(reason, message.clone());
    }
    let makes_temporary = next.effects.iter().any(|effect| matches!(effect, Effect::Create { .. }));
    if let Some((failure, fact)) = observed.refusal(CLAIM, reason::CLAIM_NOT_VALID).filter(|_| makes_temporary) {
        shown.bound = fact;
        if failure.blocks(observed.now) {
            return Ok(Step::show(shown).wake(failure.remaining(observed.now)));
        }
    }
    let writes = !next.effects.is_empty() || next.work != Work::None;
    // Before anything exists that the deletion of the DataVolume would leave behind.
    let finalizer = (is_remote(observed, facts) && writes).then(|| finalizer_of(&observed.volume, true)).flatten();
    let is_done = facts.temporary.as_deref().is_some_and(consumer::is_done);
    let pod = delete_pod(facts).filter(|_| is_done);
    let begin = observed.begin().filter(|_| writes).into_iter().chain(finalizer).chain(pod).chain(next.effects);
    let step = match (next.work, target) {
        (Work::Complete, Some(target)) => {
            import::succeeded(observed, target, shown, None).after(release(&observed.volume))
        }
        (Work::Provision(source), None) => {
            create(observed, PersistentVolumeClaimSpec { data_source: Some(source), ..spec }, shown)?
        }
        (Work::Take(volume), None) => {
            create(observed, PersistentVolumeClaimSpec { volume_name: Some(volume), ..spec }, shown)?
        }
        (Work::Copy, None) => create(observed, spec, shown)?,
        (Work::Copy, Some(target)) => copy(observed, facts, target, shown)?,
        (Work::CopyInto(key), _) => copy_into(observed, facts, &key, shown)?,
        (Work::Consume(key), _) => consume(observed, facts, &key, target, shown)?,
        _ => Step::show(shown),
    };
    let step = Step { before: begin.chain(step.before).collect(), ..step };
    let wake = next.wake.and_then(|time: SignedDuration| std::time::Duration::try_from(time).ok());
    Ok(match (wake, step.wake) {
        (Some(wake), None) => step.wake(wake),
        _ => step,
    })
}

/// Creates the claim of the DataVolume.
fn create(observed: &Observed, spec: PersistentVolumeClaimSpec, mut shown: Shown) -> Result<Step, serde_json::Error> {
    if let Some((failure, fact)) = observed.refusal(CLAIM, reason::CLAIM_NOT_VALID) {
        shown.bound = fact;
        if failure.blocks(observed.now) {
            return Ok(Step::show(shown).wake(failure.remaining(observed.now)));
        }
    }
    let claim = claim::render(&observed.volume, spec, false);
    let create = Effect::create(Kind::Claim, observed.volume.metadata.namespace.as_deref(), &claim)?.refused_as(CLAIM);
    Ok(Step::show(shown).before([create]))
}

/// Runs the pod that copies in the namespace of the DataVolume.
fn copy(observed: &Observed, facts: &Facts, target: &CachedClaim, shown: Shown) -> Result<Step, serde_json::Error> {
    let Some(source) = facts.source.as_deref() else { return Ok(Step::show(shown)) };
    run(observed, target, Content::Claim(source), shown)
}

fn run(
    observed: &Observed,
    target: &CachedClaim,
    content: Content<'_>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let inputs = Inputs {
        volume: &observed.volume,
        claim: target,
        owner: Kind::DataVolume.owner_reference(&observed.volume.metadata),
        content,
        tolerations: &observed.tolerations,
        image: &observed.image,
        pull_policy: &observed.pull_policy,
    };
    import::run(observed, target, inputs, shown).map(|step| renamed(binding::explained(observed, target, step)))
}

/// Runs the pod that copies in the namespace of the source.
fn copy_into(observed: &Observed, facts: &Facts, key: &Key, shown: Shown) -> Result<Step, serde_json::Error> {
    let temporary = facts.temporary.as_deref().filter(|claim| Key::of(&claim.metadata) == *key);
    let (Some(temporary), Some(source)) = (temporary, facts.source.as_deref()) else { return Ok(Step::show(shown)) };
    if facts.pod.as_ref().is_some_and(|pod| pod.phase == "Succeeded") {
        let filled = json!({"metadata": {"annotations": {POD_PHASE: "Succeeded"}}});
        let shown = Shown { phase: phase::REBIND, ..shown };
        return Ok(Step::show(shown).before([Effect::merge(Kind::Claim, &temporary.metadata, filled)]));
    }
    run_remote(observed, facts, temporary, Content::Claim(source), shown)
}

fn run_remote(
    observed: &Observed,
    facts: &Facts,
    temporary: &CachedClaim,
    content: Content<'_>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let volume = unprivileged(&observed.volume);
    let inputs = Inputs {
        volume: &volume,
        claim: temporary,
        // An API server may ask for a right to block the deletion of claims, which virt-controller lacks.
        owner: OwnerReference { block_owner_deletion: None, ..Kind::Claim.owner_reference(&temporary.metadata) },
        content,
        tolerations: &[],
        image: &observed.image,
        pull_policy: &observed.pull_policy,
    };
    let warning = facts.warning.clone();
    let remote = Observed { pod: facts.pod.clone(), percent: facts.percent, warning, ..observed.clone() };
    import::run(&remote, temporary, inputs, shown).map(|step| renamed(binding::explained(&remote, temporary, step)))
}

/// Runs the pod that is the first consumer of a claim.
fn consume(
    observed: &Observed,
    facts: &Facts,
    key: &Key,
    target: Option<&CachedClaim>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let is_remote = is_remote(observed, facts);
    let (claim, pod) = if is_remote { (facts.temporary.as_deref(), &facts.pod) } else { (target, &observed.pod) };
    let claim = claim.filter(|claim| Key::of(&claim.metadata) == *key);
    // The claim shows its volume soon.
    let has_ended = pod.as_ref().is_some_and(|pod| pod.phase == "Succeeded" && !pod.is_deleting());
    let Some(claim) = claim.filter(|_| !has_ended) else { return Ok(Step::show(shown)) };
    let phase = shown.phase;
    let mut step = if is_remote {
        run_remote(observed, facts, claim, Content::Existing, shown)?
    } else {
        run(observed, claim, Content::Existing, shown)?
    };
    if let Some(shown) = step.shown.as_mut().filter(|shown| shown.phase != status::phase::FAILED) {
        shown.phase = phase;
    }
    Ok(step)
}

/// Returns the DataVolume without what its author may not choose for a pod in the namespace of the source: service account, priority
/// and networks. Tolerations are left out there as well.
fn unprivileged(volume: &DataVolume) -> DataVolume {
    let mut volume = volume.clone();
    volume.metadata.annotations = None;
    volume.spec.service_account_name = None;
    volume.spec.priority_class_name = None;
    volume
}

/// Names the phases of a pod that copies as those of a clone.
fn renamed(mut step: Step) -> Step {
    if let Some(shown) = &mut step.shown {
        shown.phase = match shown.phase {
            "ImportScheduled" => phase::SCHEDULED,
            "ImportInProgress" => phase::COPIES,
            other => other,
        };
    }
    step
}

/// Returns true if a clone from another namespace has begun, which may have left something there.
pub(in crate::importer) fn is_held(volume: &DataVolume) -> bool {
    has_finalizer(&volume.metadata, finalizer::CLONE)
}

/// Removes the finalizer of clones from other namespaces.
pub(in crate::importer) fn release(volume: &DataVolume) -> Option<Effect> {
    finalizer_of(volume, false)
}

/// Adds or removes the finalizer of clones from other namespaces, unless that is done.
fn finalizer_of(volume: &DataVolume, present: bool) -> Option<Effect> {
    Effect::finalizer(Kind::DataVolume, &volume.metadata, finalizer::CLONE, present)
}
