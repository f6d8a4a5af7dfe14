//! The VMIs of this node by name, and the watch that starts and feeds their tasks.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use api::VirtualMachineInstance;
use daemon::{CancellationToken, telemetry::Traces};
use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::{
    event::Event,
    handle::{Feed, Handle},
    host::Host,
    records::{Records, trim},
    restart::{self, Shared},
    role::{self, Role},
    sessions::Ending,
};
use crate::metrics::{VmiMetrics, domains::Domain};

/// VMIs on a page of a list. An object can have 1.5 MiB.
const PAGE: u32 = 50;
/// Most VMIs that are managed at a time: twice the largest number of pods that Kubernetes is tested with on a node (500). More
/// name this node only if a user wrote so, and each costs memory here.
const MAX_VMIS: usize = 1000;

type Named = BTreeMap<(String, String), Arc<Handle>>;

/// The VMIs of this node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Vmis {
    named: Arc<Mutex<Named>>,
    host: Arc<dyn Host>,
    records: Arc<dyn Records>,
    tasks: TaskTracker,
    metrics: VmiMetrics,
    traces: Traces,
    /// VMIs of this node without a task, because the limit is reached.
    left_out: Arc<Mutex<HashSet<(String, String)>>>,
    /// Notified when a task ends while VMIs are left out.
    pub(super) freed: Arc<Notify>,
    stop: CancellationToken,
}

impl Vmis {
    /// Returns an empty directory.
    pub(crate) fn new(
        host: Arc<dyn Host>,
        records: Arc<dyn Records>,
        metrics: VmiMetrics,
        stop: CancellationToken,
    ) -> Self {
        Self {
            named: Arc::default(),
            host,
            records,
            tasks: TaskTracker::new(),
            metrics,
            traces: Traces::default(),
            left_out: Arc::default(),
            freed: Arc::default(),
            stop,
        }
    }

    /// Records the steps of starts in the traces of their VMIs.
    pub(crate) fn with_traces(self, traces: Traces) -> Self {
        Self { traces, ..self }
    }

    /// Returns the VMI of this name.
    #[must_use]
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<Arc<Handle>> {
        self.lock().get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Returns all VMIs.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the domains whose launchers can be called.
    pub(crate) fn domains(&self) -> Vec<Domain> {
        let domain = |handle: Arc<Handle>| {
            Some(Domain { vmi: handle.vmi()?, launcher: handle.launcher().ok()?, uid: handle.uid.clone() })
        };
        self.all().into_iter().filter_map(domain).collect()
    }

    /// Publishes an event about a VMI.
    pub(crate) fn publish(&self, handle: &Handle, event: Event) {
        if let Some(vmi) = handle.vmi() {
            self.records.publish(&vmi, event);
        }
    }

    /// Applies a version of an object: starts its task, or feeds it.
    pub(crate) fn apply(&self, vmi: Arc<VirtualMachineInstance>) {
        self.apply_up_to(MAX_VMIS, vmi);
    }

    /// Applies a version of an object with another limit.
    pub(super) fn apply_up_to(&self, most: usize, vmi: Arc<VirtualMachineInstance>) {
        let key = (vmi.namespace().unwrap_or_default(), vmi.name_any());
        let uid = vmi.uid().unwrap_or_default();
        match role::decide(&vmi, self.host.name()) {
            Role::Owner => {}
            role => {
                tracing::debug!(namespace = key.0, name = key.1, ?role, "this node is not the owner of the VMI");
                self.remove(&key.0, &key.1);
                return;
            }
        }
        let mut named = self.lock();
        if let Some(known) = named.get(&key) {
            if known.uid == uid && known.has_task() {
                known.feed(Feed::Object(vmi));
                return;
            }
            known.feed(Feed::Replaced);
        } else if named.len() >= most {
            drop(named);
            self.leave_out(key, most);
            return;
        }
        let (handle, feed, requests) = Handle::new(&vmi);
        named.insert(key.clone(), handle.clone());
        drop(named);
        self.no_longer_left_out(&key);
        let span = tracing::info_span!("vmi", namespace = %key.0, name = %key.1, uid = %uid);
        let shared = Shared {
            host: self.host.clone(),
            records: self.records.clone(),
            handle: handle.clone(),
            metrics: self.metrics.clone(),
            traces: self.traces.clone(),
        };
        let (vmis, stop) = (self.clone(), self.stop.child_token());
        self.metrics.count.inc();
        let run = async move {
            restart::run(vmi, shared, feed, requests, stop.clone()).await;
            handle.sessions.end_all(if stop.is_cancelled() { Ending::HandlerStops } else { Ending::VmiGone });
            vmis.metrics.count.dec();
            let mut named = vmis.lock();
            // A new VMI of the same name may have replaced the handle.
            if named.get(&key).is_some_and(|current| Arc::ptr_eq(current, &handle)) {
                named.remove(&key);
            }
            drop(named);
            if !vmis.left_out().is_empty() {
                vmis.freed.notify_one();
            }
        };
        self.tasks.spawn(run.instrument(span));
    }

    /// Records that a VMI is not managed. Logs once per change of the number.
    fn leave_out(&self, key: (String, String), most: usize) {
        let mut left_out = self.left_out();
        if left_out.insert(key) {
            tracing::error!(
                left_out = left_out.len(),
                limit = most,
                "too many VMIs name this node; those beyond the limit are not managed"
            );
        }
    }

    fn no_longer_left_out(&self, key: &(String, String)) {
        let mut left_out = self.left_out();
        if left_out.remove(key) {
            tracing::info!(left_out = left_out.len(), "fewer VMIs are left out");
        }
    }

    pub(super) fn left_out(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the removal of an object from the watch.
    pub(crate) fn remove(&self, namespace: &str, name: &str) {
        self.no_longer_left_out(&(namespace.to_owned(), name.to_owned()));
        if let Some(handle) = self.get(namespace, name) {
            handle.feed(Feed::Missing);
        }
    }

    /// Applies the end of a list: other VMIs than the listed ones are missing.
    fn keep_only(&self, listed: &HashSet<(String, String)>) {
        self.left_out().retain(|key| listed.contains(key));
        for (key, handle) in self.lock().iter().filter(|(key, _)| !listed.contains(*key)) {
            tracing::debug!(namespace = key.0, name = key.1, "no longer listed");
            handle.feed(Feed::Missing);
        }
    }

    /// Waits for all tasks after the stop.
    pub(crate) async fn stopped(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn lock(&self) -> MutexGuard<'_, Named> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows the VMIs that are labelled with this node until `stop`. Calls `listed` once the first list is complete.
pub(crate) async fn follow(client: Client, vmis: Vmis, listed: impl FnOnce(), stop: CancellationToken) {
    let api = Api::<VirtualMachineInstance>::all(client);
    let selector = format!("{}={}", api::constants::label::NODE_NAME, vmis.host.name());
    let config = watcher::Config::default().labels(&selector).page_size(PAGE);
    let watch = || watcher::watcher(api.clone(), config.clone()).default_backoff().boxed();
    let mut events = watch();
    let mut listed = Some(listed);
    let mut seen = HashSet::new();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            // The limit permits one more VMI: a new list contains those that were left out.
            () = vmis.freed.notified() => {
                events = watch();
                continue;
            }
            () = stop.cancelled() => return,
        };
        match event {
            Some(Ok(watcher::Event::Init)) => seen.clear(),
            Some(Ok(watcher::Event::InitApply(vmi))) => {
                seen.insert((vmi.namespace().unwrap_or_default(), vmi.name_any()));
                vmis.apply(trimmed(vmi));
            }
            Some(Ok(watcher::Event::InitDone)) => {
                vmis.keep_only(&seen);
                seen = HashSet::new();
                if let Some(listed) = listed.take() {
                    listed();
                }
            }
            Some(Ok(watcher::Event::Apply(vmi))) => vmis.apply(trimmed(vmi)),
            Some(Ok(watcher::Event::Delete(vmi))) => {
                vmis.remove(&vmi.namespace().unwrap_or_default(), &vmi.name_any());
            }
            Some(Err(error)) => tracing::warn!(%error, "watch of VMIs was interrupted"),
            None => return,
        }
    }
}

fn trimmed(mut vmi: VirtualMachineInstance) -> Arc<VirtualMachineInstance> {
    trim(&mut vmi);
    Arc::new(vmi)
}
