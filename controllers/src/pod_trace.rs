//! The part of a start that the scheduler and kubelet have: spans between the changes of launcher pods that the watch shows.
//!
//! The times in pods are whole seconds, which is longer than most of these spans. So the times of the watch are used; a leader that
//! has not seen the creation of a pod records nothing about it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use api::{VirtualMachineInstance, owner, traceparent::TraceParent};
use daemon::{
    lock,
    telemetry::{OpenSpan, Traces},
};
use jiff::Timestamp;

use crate::{
    cache::{Key, Seen},
    resources::{Caches, pods::CachedPod},
};

/// Most pods on their way. Further ones are not traced.
const MAX_PODS: usize = 4096;

/// Records spans about launcher pods from now on. Call on the leader only.
pub(crate) fn follow(caches: &Arc<Caches>, traces: &Traces) {
    if !traces.is_on() {
        return;
    }
    let (vmis, pods, traces) = (caches.vmis.clone(), Pods::default(), traces.clone());
    caches.pods.listen(move |seen| {
        if seen.1.or(seen.0).is_some_and(|pod| pod.temporary) {
            return;
        }
        pods.changed(seen, Instant::now(), &traces, |pod| {
            let owner = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata)?;
            let vmi = vmis.get(&Key::new(pod.metadata.namespace.clone()?, owner.name.clone()))?;
            let is_owner = vmi.metadata.uid.as_deref() == Some(owner.uid.as_str());
            TraceParent::of_start(&vmi.metadata, Timestamp::now()).filter(|_| is_owner)
        });
    });
}

/// The step of a pod on its way.
enum Step {
    /// It waits for a node.
    Scheduling(Instant),
    /// kubelet starts it.
    Starting(Instant),
}

/// The pods on their way, by UID.
#[derive(Default)]
struct Pods(Mutex<HashMap<String, (TraceParent, Step)>>);

impl Pods {
    fn changed(
        &self,
        (former, present): Seen<'_, CachedPod>,
        now: Instant,
        traces: &Traces,
        trace: impl FnOnce(&CachedPod) -> Option<TraceParent>,
    ) {
        let Some(pod) = present.or(former) else { return };
        let Some(uid) = pod.metadata.uid.as_deref() else { return };
        let mut pods = lock(&self.0);
        if present.is_none_or(CachedPod::is_going_down) {
            pods.remove(uid);
            return;
        }
        if former.is_none() && pod.node_name.is_none() && pods.len() < MAX_PODS {
            if let Some(parent) = trace(pod) {
                pods.insert(uid.to_owned(), (parent, Step::Scheduling(now)));
            }
            return;
        }
        let Some((parent, step)) = pods.get_mut(uid) else { return };
        if let (Step::Scheduling(began), Some(_)) = (&*step, &pod.node_name) {
            record(traces.child("schedule pod", parent), *began, pod);
            *step = Step::Starting(now);
        }
        if let (Step::Starting(began), true) = (&*step, pod.compute_running) {
            record(traces.child("start pod", parent), *began, pod);
            pods.remove(uid);
        }
    }
}

/// Ends a span that began at `began`.
fn record(span: Option<OpenSpan>, began: Instant, pod: &CachedPod) {
    let Some(span) = span else { return };
    let span = span
        .began(began)
        .with("namespace", pod.metadata.namespace.as_deref().unwrap_or_default())
        .with("pod", pod.metadata.name.as_deref().unwrap_or_default());
    drop(span.with("node", pod.node_name.as_deref().unwrap_or_default()));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PARENT: TraceParent = TraceParent { trace_id: [1; 16], span_id: [2; 8], sampled: true };

    fn pod(node: Option<&str>, compute_running: bool) -> CachedPod {
        let mut pod = CachedPod { node_name: node.map(str::to_owned), compute_running, ..CachedPod::default() };
        pod.metadata.uid = Some("u".to_owned());
        pod
    }

    #[test]
    fn scheduling_and_start_of_a_new_pod_are_spans() {
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let (pods, began) = (Pods::default(), Instant::now());
        let versions =
            [pod(None, false), pod(None, false), pod(Some("n"), false), pod(Some("n"), true), pod(Some("n"), true)];
        let mut former = None;
        for (index, present) in versions.iter().enumerate() {
            let now = began + Duration::from_secs(index as u64);
            pods.changed((former, Some(present)), now, &traces, |_| Some(PARENT));
            former = Some(present);
        }
        let [schedule, start] = [spans.try_recv().unwrap(), spans.try_recv().unwrap()];
        assert_eq!((schedule.name, start.name), ("schedule pod", "start pod"));
        assert_eq!((schedule.parent, start.context.trace_id), (Some([2; 8]), [1; 16]));
        assert!(start.attributes.contains(&("node", "n".to_owned())));
        assert!(spans.try_recv().is_err());
        assert!(pods.0.lock().unwrap().is_empty());
    }

    #[test]
    fn pods_without_a_trace_or_of_unknown_age_are_not_followed() {
        let (traces, mut spans) = Traces::to_receiver(1.0).unwrap();
        let (pods, now) = (Pods::default(), Instant::now());
        let (waiting, bound, running) = (pod(None, false), pod(Some("n"), false), pod(Some("n"), true));
        pods.changed((None, Some(&waiting)), now, &traces, |_| None);
        pods.changed((Some(&waiting), Some(&bound)), now, &traces, |_| Some(PARENT));
        // The leader has not seen its creation.
        pods.changed((None, Some(&bound)), now, &traces, |_| Some(PARENT));
        pods.changed((Some(&bound), Some(&running)), now, &traces, |_| Some(PARENT));
        assert!(spans.try_recv().is_err());
        // A deleted pod is forgotten.
        pods.changed((None, Some(&waiting)), now, &traces, |_| Some(PARENT));
        pods.changed((Some(&waiting), None), now, &traces, |_| Some(PARENT));
        assert!(pods.0.lock().unwrap().is_empty());
    }
}
