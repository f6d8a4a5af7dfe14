//! The spans of virt-handler and virt-launcher in the trace of a start.
//!
//! virt-launcher has no network, so it reports the times of its steps in the answer to Sync, and virt-handler records their spans.
//! The launcher is hostile: it chooses neither names nor identities, each step counts once, and its times are brought within the time
//! that virt-handler knows the VMI. So it can falsify the times of its own steps only.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use api::{VirtualMachineInstance, VmiPhase, constants::component, traceparent::TraceParent};
use daemon::telemetry::{OpenSpan, Span, Traces};
use jiff::Timestamp;
use protocol::{StartStep, StepTiming};

/// Most calls of a start that are recorded. A start that succeeds at once has five.
const MAX_SPANS: u32 = 64;

/// The trace of the start of one VMI.
pub(super) struct StartTrace {
    traces: Traces,
    /// Since when virt-handler knows the VMI.
    since: SystemTime,
    /// The trace, while the VMI starts.
    parent: Option<TraceParent>,
    object: [String; 3],
    spans: u32,
}

impl Default for StartTrace {
    fn default() -> Self {
        Self::new(Traces::default())
    }
}

impl StartTrace {
    /// Returns a trace without an object.
    pub(super) fn new(traces: Traces) -> Self {
        Self { traces, since: SystemTime::now(), parent: None, object: <_>::default(), spans: 0 }
    }

    /// Belongs to the trace of this VMI as long as it starts.
    pub(super) fn follow(&mut self, vmi: &VirtualMachineInstance) {
        if !self.traces.is_on() {
            return;
        }
        let metadata = &vmi.metadata;
        let is_starting = !matches!(vmi.phase(), VmiPhase::Running | VmiPhase::Succeeded | VmiPhase::Failed)
            && metadata.deletion_timestamp.is_none();
        self.parent = TraceParent::of_start(metadata, Timestamp::now()).filter(|_| is_starting);
        if self.parent.is_some() {
            self.object =
                [&metadata.namespace, &metadata.name, &metadata.uid].map(|text| text.clone().unwrap_or_default());
        }
    }

    /// Opens the span of a call.
    pub(super) fn span(&mut self, name: &'static str) -> Option<OpenSpan> {
        let parent = self.parent.as_ref().filter(|_| self.spans < MAX_SPANS)?;
        let span = self.traces.child(name, parent)?;
        self.spans += 1;
        let [namespace, name, uid] = &self.object;
        Some(span.with("namespace", namespace).with("name", name).with("uid", uid))
    }

    /// Returns the recorder of the launcher's steps during a Sync.
    pub(super) fn steps(&self, sync: &OpenSpan) -> Option<LauncherSteps> {
        let (traces, since) = (self.traces.clone(), self.since);
        Some(LauncherSteps { traces, since, parent: self.parent?, sync: *sync.context() })
    }
}

/// Records the steps of a launcher.
pub(super) struct LauncherSteps {
    traces: Traces,
    since: SystemTime,
    parent: TraceParent,
    sync: TraceParent,
}

impl LauncherSteps {
    /// Returns the context that the launcher gets.
    pub(super) const fn context(&self) -> &TraceParent {
        &self.sync
    }

    /// Records the steps. Steps before Sync are beneath the start, the others beneath Sync.
    pub(super) fn record(&self, timings: &[StepTiming], now: SystemTime) {
        let mut seen = BTreeSet::new();
        for timing in timings {
            let (name, parent) = match timing.step() {
                StartStep::Worker => ("start worker", &self.parent),
                StartStep::Daemon => ("start libvirt", &self.parent),
                StartStep::Prepare => ("prepare", &self.sync),
                StartStep::Define => ("define", &self.sync),
                StartStep::Create => ("create", &self.sync),
                StartStep::Guest => ("first instruction", &self.sync),
                StartStep::Unspecified => continue,
            };
            if !seen.insert(timing.step) {
                continue;
            }
            let within = |nanoseconds| {
                let at = UNIX_EPOCH.checked_add(Duration::from_nanos(nanoseconds)).unwrap_or(now);
                at.min(now).max(self.since)
            };
            let begin = within(timing.begin);
            self.traces.record(Span {
                service: Some(component::VIRT_LAUNCHER),
                name,
                context: Traces::identity(parent),
                parent: Some(parent.span_id),
                start: begin,
                end: within(timing.end).max(begin),
                attributes: Vec::new(),
                error: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: TraceParent = TraceParent { trace_id: [1; 16], span_id: [2; 8], sampled: true };
    const SYNC: TraceParent = TraceParent { span_id: [3; 8], ..PARENT };

    fn timing(step: StartStep, begin: u64, end: u64) -> StepTiming {
        StepTiming { step: step.into(), begin, end }
    }

    /// Returns the recorded spans: name, parent, begin and end in seconds.
    fn recorded(timings: &[StepTiming]) -> Vec<(&'static str, u8, u64, u64)> {
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        LauncherSteps { traces, since: at(100), parent: PARENT, sync: SYNC }.record(timings, at(200));
        let mut found = Vec::new();
        while let Ok(span) = spans.try_recv() {
            assert_eq!((span.context.trace_id, span.service), (PARENT.trace_id, Some("virt-launcher")));
            assert!(![PARENT.span_id, SYNC.span_id].contains(&span.context.span_id));
            let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap().as_secs();
            found.push((span.name, span.parent.unwrap()[0], seconds(span.start), seconds(span.end)));
        }
        found
    }

    #[test]
    fn steps_of_a_launcher_are_spans_beneath_the_start_or_the_sync() {
        const SECOND: u64 = 1_000_000_000;
        let found = recorded(&[
            timing(StartStep::Worker, 110 * SECOND, 111 * SECOND),
            timing(StartStep::Create, 120 * SECOND, 130 * SECOND),
            timing(StartStep::Guest, 130 * SECOND, 130 * SECOND),
        ]);
        assert_eq!(found, [("start worker", 2, 110, 111), ("create", 3, 120, 130), ("first instruction", 3, 130, 130)]);
    }

    #[test]
    fn a_hostile_launcher_records_each_step_once_and_within_the_life_of_its_vmi() {
        let many = vec![timing(StartStep::Create, 0, u64::MAX); 1000];
        assert_eq!(recorded(&many), [("create", 3, 100, 200)]);
        let unknown = [StepTiming { step: 99, begin: 0, end: 0 }, StepTiming { step: -1, begin: 0, end: 0 }];
        assert_eq!(recorded(&unknown), []);
        // The end lies before the begin.
        assert_eq!(recorded(&[timing(StartStep::Define, u64::MAX, 0)]), [("define", 3, 200, 200)]);
    }

    #[test]
    fn calls_are_recorded_while_a_traced_vmi_starts() {
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let mut trace = StartTrace::new(traces);
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now()));
        trace.follow(&vmi);
        assert!(trace.span("hello").is_none());
        let annotation = (api::constants::annotation::TRACEPARENT.to_owned(), PARENT.to_string());
        vmi.metadata.annotations = Some([annotation].into());
        vmi.status.get_or_insert_default().phase = Some(VmiPhase::Scheduling);
        trace.follow(&vmi);
        drop(trace.span("hello"));
        let span = spans.try_recv().unwrap();
        assert_eq!((span.name, span.context.trace_id, span.parent), ("hello", [1; 16], Some([2; 8])));
        vmi.status.get_or_insert_default().phase = Some(VmiPhase::Running);
        trace.follow(&vmi);
        assert!(trace.span("sync").is_none());
    }

    #[test]
    fn the_calls_of_a_start_that_never_succeeds_are_bounded() {
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let mut trace = StartTrace { parent: Some(PARENT), ..StartTrace::new(traces) };
        (0..1000).for_each(|_| drop(trace.span("connect")));
        let count = std::iter::from_fn(|| spans.try_recv().ok()).count();
        assert_eq!(count, MAX_SPANS as usize);
    }
}
