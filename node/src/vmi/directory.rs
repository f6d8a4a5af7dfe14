//! The VMIs of this node by name, and the watch that starts and feeds their tasks.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use api::{VirtualMachineInstance, constants::label};
use daemon::{CancellationToken, lock, telemetry::Traces};
use futures::StreamExt;
use kube::{Api, Client, ResourceExt, runtime::watcher};
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
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<Arc<Handle>> {
        lock(&self.named).get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Returns all VMIs.
    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        lock(&self.named).values().cloned().collect()
    }

    /// Returns the VMIs for metrics.
    pub(crate) fn domains(&self) -> Vec<Domain> {
        let domain = |handle: Arc<Handle>| {
            let (vmi, launcher, migration) = (handle.vmi()?, handle.launcher().ok(), handle.migration());
            Some(Domain { uid: handle.uid.clone(), vmi, launcher, migration, syncs: handle.syncs() })
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
        let role = role::decide(&vmi, self.host.name());
        let mut named = lock(&self.named);
        if let Some(known) = named.get(&key) {
            if known.uid == uid && known.has_task() {
                // A task whose role has ended finishes its work.
                known.feed(Feed::Object(vmi));
                return;
            }
            known.feed(Feed::Replaced);
        }
        if !matches!(role, Role::Owner | Role::MigrationTarget) {
            tracing::debug!(namespace = key.0, name = key.1, ?role, "this node has no part in the VMI");
            drop(named);
            self.no_longer_left_out(&key);
            return;
        }
        if !named.contains_key(&key) && named.len() >= most {
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
            let mut named = lock(&vmis.named);
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
        lock(&self.left_out)
    }

    /// Applies the removal of an object from the watch.
    pub(crate) fn remove(&self, namespace: &str, name: &str) {
        self.no_longer_left_out(&(namespace.to_owned(), name.to_owned()));
        if let Some(handle) = self.get(namespace, name) {
            handle.feed(Feed::Missing);
        }
    }

    /// Applies the end of a list: VMIs that are not listed are missing.
    fn keep_only(&self, is_listed: impl Fn(&(String, String)) -> bool) {
        self.left_out().retain(&is_listed);
        for (key, handle) in lock(&self.named).iter().filter(|(key, _)| !is_listed(key)) {
            tracing::debug!(namespace = key.0, name = key.1, "no longer listed");
            handle.feed(Feed::Missing);
        }
    }

    /// Waits for all tasks after the stop.
    pub(crate) async fn stopped(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// VMIs with a label that names this node, as the watch of that label shows them.
#[derive(Default)]
struct Labelled {
    /// The VMIs of the last complete list, and those that came since.
    members: HashSet<(String, String)>,
    /// The VMIs of a list that is not complete.
    seen: HashSet<(String, String)>,
    /// A list was complete.
    listed: bool,
}

impl Labelled {
    /// Applies an event of the watch. `other` are the VMIs of the other label.
    fn apply(&mut self, event: watcher::Event<VirtualMachineInstance>, other: &Self, vmis: &Vmis) {
        let key = |vmi: &VirtualMachineInstance| (vmi.namespace().unwrap_or_default(), vmi.name_any());
        match event {
            watcher::Event::Init => self.seen.clear(),
            watcher::Event::InitApply(vmi) => {
                self.seen.insert(key(&vmi));
                vmis.apply(trimmed(vmi));
            }
            watcher::Event::InitDone => {
                self.members = std::mem::take(&mut self.seen);
                self.listed = true;
                vmis.keep_only(|key| self.members.contains(key) || other.members.contains(key));
            }
            watcher::Event::Apply(vmi) => {
                self.members.insert(key(&vmi));
                vmis.apply(trimmed(vmi));
            }
            watcher::Event::Delete(vmi) => {
                let (namespace, name) = key(&vmi);
                self.members.remove(&(namespace.clone(), name.clone()));
                // Its task reads the object: it may have got the other label in the same write.
                vmis.remove(&namespace, &name);
            }
        }
    }
}

/// Follows the VMIs that are labelled with this node, as that of their domain or as the target of their migration, until `stop`.
/// Calls `listed` once the first lists are complete.
pub(crate) async fn follow(client: Client, vmis: Vmis, listed: impl FnOnce(), stop: CancellationToken) {
    let api = Api::<VirtualMachineInstance>::all(client);
    let watch = |label: &str| {
        let selector = format!("{label}={}", vmis.host.name());
        let config = watcher::Config::default().labels(&selector).page_size(PAGE);
        daemon::watch::events(api.clone(), config).boxed()
    };
    let (mut owned, mut targets) = (Labelled::default(), Labelled::default());
    let (mut of_owned, mut of_targets) = (watch(label::NODE_NAME), watch(label::MIGRATION_TARGET_NODE_NAME));
    let mut listed = Some(listed);
    loop {
        let interrupted = |error| tracing::warn!(%error, "watch of VMIs was interrupted");
        tokio::select! {
            event = of_owned.next() => match event {
                Some(Ok(event)) => owned.apply(event, &targets, &vmis),
                Some(Err(error)) => interrupted(error),
                None => return,
            },
            event = of_targets.next() => match event {
                Some(Ok(event)) => targets.apply(event, &owned, &vmis),
                Some(Err(error)) => interrupted(error),
                None => return,
            },
            // The limit permits one more VMI: new lists contain those that were left out.
            () = vmis.freed.notified() => {
                (of_owned, of_targets) = (watch(label::NODE_NAME), watch(label::MIGRATION_TARGET_NODE_NAME));
            }
            () = stop.cancelled() => return,
        }
        if owned.listed
            && targets.listed
            && let Some(listed) = listed.take()
        {
            listed();
        }
    }
}

fn trimmed(mut vmi: VirtualMachineInstance) -> Arc<VirtualMachineInstance> {
    trim(&mut vmi);
    Arc::new(vmi)
}
