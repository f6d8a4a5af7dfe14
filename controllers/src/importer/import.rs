//! The import pod of a claim: what it shows about the import, and the end.

use std::collections::BTreeMap;

use api::cdi::annotation;
use importer::task::{Outcome, Reason, Report};
use jiff::SignedDuration;
use serde_json::json;

use super::{
    Observed, POD, Step,
    pod::{self, Content, Inputs},
    source::Source,
    status::{Fact, Shown, percent, phase, reason},
};
use crate::{
    resources::{
        claims::{CachedClaim, is_inference},
        import_pods::CachedImportPod,
    },
    runtime::{Effect, Kind},
};

/// Least age of a pod that ended without a result before another one is made.
const PACE: SignedDuration = SignedDuration::from_secs(10);
/// Waits of kubelet for an image.
const PULL_FAILURES: [&str; 4] = ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];

/// The state of an import pod.
#[derive(Debug, PartialEq)]
enum State<'a> {
    /// The claim is filled.
    Filled(Option<&'a Report>),
    /// Another attempt would fail as well.
    Fatal(&'a Report),
    /// The pod ended without a result, for this reason.
    Ended(String),
    /// It waits or runs: phase and condition Running.
    Open(&'static str, Fact),
}

/// Returns the step of a claim that a pod fills.
pub(super) fn step(
    observed: &Observed,
    claim: &CachedClaim,
    source: &Source<'_>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let content = match source {
        Source::Blank => Content::Blank,
        Source::Registry { image, secret } => Content::Registry(image, *secret),
        Source::Http(http) => Content::Http(http),
        // Clones have steps of their own.
        Source::Claim(_) | Source::Snapshot(_) | Source::External => return Ok(Step::show(shown)),
    };
    let owner = Kind::DataVolume.owner_reference(&observed.volume.metadata);
    run(
        observed,
        claim,
        Inputs {
            volume: &observed.volume,
            claim,
            owner,
            content,
            tolerations: &observed.tolerations,
            image: &observed.image,
            pull_policy: &observed.pull_policy,
        },
        shown,
    )
}

/// Returns the step of the pod that fills a claim.
pub(super) fn run(
    observed: &Observed,
    claim: &CachedClaim,
    inputs: Inputs<'_>,
    shown: Shown,
) -> Result<Step, serde_json::Error> {
    let Some(pod) = observed.pod.as_deref() else { return create(observed, &inputs, shown) };
    if pod.is_deleting() || pod.metadata.creation_timestamp < claim.metadata.creation_timestamp {
        // It filled a former claim of the name.
        return Ok(Step::show(Shown { phase: phase::SCHEDULED, ..shown }).before(observed.delete_pod()));
    }
    let shown = Shown { restarts: pod.restarts, ..shown };
    Ok(match state(pod, &inputs) {
        State::Filled(report) => succeeded(observed, claim, shown, report),
        State::Fatal(report) => failed(observed, shown, report),
        State::Ended(text) => ended(observed, pod, shown, text),
        State::Open(phase, fact) => {
            let progress = observed.percent.filter(|_| fact.holds).map(percent);
            Step::show(Shown { phase, running: Some(fact), progress, ..shown })
        }
    })
}

fn create(observed: &Observed, inputs: &Inputs<'_>, shown: Shown) -> Result<Step, serde_json::Error> {
    let shown = Shown { phase: phase::SCHEDULED, ..shown };
    let pod = match pod::render(inputs) {
        Ok(pod) => pod,
        Err(text) => return Ok(Step::show(Shown { running: Some(Fact::no(reason::ERROR, text)), ..shown })),
    };
    let name = pod.metadata.name.clone().unwrap_or_default();
    let refusal = observed.refusal(POD, reason::POD);
    let Some((failure, fact)) = refusal else {
        let fact = Fact::no(reason::PENDING, "");
        let shown = Shown { running: Some(fact), ..shown };
        return Ok(Step::show(shown).before([creation(&pod, &name)?]));
    };
    let fact = Fact { message: format!("Error starting pod '{name}': {}", fact.message), ..fact };
    let step = Step::show(Shown { running: Some(fact), ..shown });
    if failure.blocks(observed.now) {
        return Ok(step.wake(failure.remaining(observed.now)));
    }
    Ok(step.before([creation(&pod, &name)?]))
}

fn creation(pod: &k8s_openapi::api::core::v1::Pod, name: &str) -> Result<Effect, serde_json::Error> {
    let refusal = format!("Pod {name} exists and does not belong to this DataVolume");
    let create = Effect::create(Kind::Pod, pod.metadata.namespace.as_deref(), pod)?;
    Ok(create.unless_exists(refusal).refused_as(POD))
}

/// Returns the state of a pod.
fn state<'a>(pod: &'a CachedImportPod, inputs: &Inputs<'_>) -> State<'a> {
    let report = pod.last.as_ref().and_then(|last| last.report.as_deref());
    match pod.phase.as_str() {
        "Succeeded" => return State::Filled(report),
        "Failed" => return State::Ended(end(pod)),
        _ => {}
    }
    if let Some(report) = report.filter(|report| report.fatal && report.result == Outcome::Failed) {
        return State::Fatal(report);
    }
    let is_started = pod.running || pod.last.is_some() || is_pulling(pod, inputs);
    State::Open(if is_started { phase::IN_PROGRESS } else { phase::SCHEDULED }, running(pod, &inputs.content))
}

/// Returns true if kubelet cannot pull an image that CDI pulls in its import pod, which runs meanwhile: not that of the importer.
fn is_pulling(pod: &CachedImportPod, inputs: &Inputs<'_>) -> bool {
    let registry = inputs.volume.spec.source.as_ref().and_then(|source| source.registry.as_ref());
    let is_of_pod = registry.is_some_and(|registry| registry.pull_method.as_deref() != Some("node"));
    let is_of_source = |message: &str| !message.contains(inputs.image);
    is_of_pod && matches!(inputs.content, Content::Registry(..)) && cannot_pull(pod).is_some_and(is_of_source)
}

/// Returns the message about an image of the pod that kubelet cannot pull.
fn cannot_pull(pod: &CachedImportPod) -> Option<&str> {
    let (waits, message) = pod.waiting.as_ref()?;
    PULL_FAILURES.contains(&waits.as_str()).then_some(message.as_str())
}

/// Returns why a pod ended that kubelet does not start again.
fn end(pod: &CachedImportPod) -> String {
    match &pod.ended {
        Some((reason, message)) => format!("the import pod ended: {reason}: {message}"),
        None => "the import pod ended without a result".to_owned(),
    }
}

/// Returns condition Running of a pod that has not ended.
fn running(pod: &CachedImportPod, content: &Content<'_>) -> Fact {
    if pod.running {
        return Fact::yes(reason::RUNNING, "");
    }
    if let Some(message) = cannot_pull(pod) {
        return Fact::no(reason::IMAGE_PULL, pull_failure(message, content));
    }
    if let Some(last) = &pod.last {
        // The phase of the pod follows.
        if last.code == 0 {
            return Fact::no(reason::COMPLETED, "Import Complete");
        }
        let unknown = || format!("the import pod ended with code {} ({})", last.code, last.reason);
        let text = last.report.as_ref().map(|report| report.message.clone()).filter(|text| !text.is_empty());
        return Fact::no(reason::ERROR, text.unwrap_or_else(unknown));
    }
    if let Some(message) = &pod.unschedulable {
        return Fact::no(reason::UNSCHEDULABLE, format!("Importer pod cannot be scheduled: {message}"));
    }
    let waits = pod.waiting.as_ref().filter(|(waits, _)| !waits.is_empty());
    waits.map_or_else(|| Fact::no(reason::PENDING, ""), |(waits, message)| Fact::no(waits, message.clone()))
}

/// Returns the message about an image that cannot be pulled. Nothing but its pull tells what a Secret is good for: virt-controller
/// reads no Secrets of users.
fn pull_failure(message: &str, content: &Content<'_>) -> String {
    match content {
        Content::Registry(image, Some(secret)) => format!(
            "failed to pull image: {image}: {message}; Secret {secret} must exist and be of type kubernetes.io/dockerconfigjson \
             (kubectl create secret docker-registry)"
        ),
        Content::Registry(image, None) => format!("failed to pull image: {image}: {message}"),
        _ => format!("failed to pull image: {message}"),
    }
}

/// Shows the success, once the claim says for which DataVolume it is filled.
pub(super) fn succeeded(observed: &Observed, claim: &CachedClaim, shown: Shown, report: Option<&Report>) -> Step {
    let volume = &observed.volume;
    let source = volume.spec.source.as_ref();
    let is_clone = source.is_some_and(|source| source.pvc.is_some() || source.snapshot.is_some());
    let text = if is_clone { "Clone Complete" } else { "Import Complete" };
    let running = observed.is_begun().then(|| Fact::no(reason::COMPLETED, text));
    let shown = Shown { phase: phase::SUCCEEDED, running, ..shown };
    let mark = (observed.is_begun() && !claim.is_filled_for(observed.name())).then(|| {
        let preallocated = volume.spec.preallocation.unwrap_or_default().then_some("true");
        let annotations = json!({
            annotation::POPULATED_FOR: observed.name(),
            annotation::POD_PHASE: "Succeeded",
            annotation::POD_RESTARTS: shown.restarts.to_string(),
            annotation::PREALLOCATION: preallocated,
        });
        let labels = report.map(|report| inference(&report.labels)).unwrap_or_default();
        Effect::merge(Kind::Claim, &claim.metadata, json!({"metadata": {"annotations": annotations, "labels": labels}}))
    });
    let pod = observed.delete_pod().filter(|_| !pod::is_retained(volume));
    Step::show(shown).before(mark).after(observed.release()).after(pod)
}

/// Returns the labels of an image that its claim gets.
fn inference(labels: &BTreeMap<String, String>) -> BTreeMap<&String, &String> {
    let is_value = |text: &str| {
        let is_edge = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        text.len() <= api::names::LABEL_LIMIT
            && is_edge(bytes.first())
            && is_edge(bytes.last())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
    };
    labels.iter().filter(|(key, value)| is_inference(key) && is_value(value)).collect()
}

fn failed(observed: &Observed, shown: Shown, report: &Report) -> Step {
    let reason = if report.reason == Reason::ChecksumError { reason::CHECKSUM } else { reason::ERROR };
    let running = Some(Fact::no(reason, report.message.clone()));
    Step::show(Shown { phase: phase::FAILED, running, ..shown }).after(observed.delete_pod())
}

/// Replaces a pod that ended without a result, such as an evicted one.
fn ended(observed: &Observed, pod: &CachedImportPod, shown: Shown, text: String) -> Step {
    let step = Step::show(Shown { phase: phase::IN_PROGRESS, running: Some(Fact::no(reason::ERROR, text)), ..shown });
    let age = pod.metadata.creation_timestamp.as_ref().map(|created| observed.now.duration_since(created.0));
    let rest = age.map_or(SignedDuration::ZERO, |age| PACE - age);
    match std::time::Duration::try_from(rest) {
        Ok(rest) if !rest.is_zero() => step.wake(rest),
        _ => step.after(observed.delete_pod()),
    }
}
