//! The machines of this node by name, and the watch that starts and feeds their tasks.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use api::VirtualMachineInstance;
use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use process::CancellationToken;
use prometheus::IntGauge;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::{
    host::Host,
    records::{Records, trim},
    state::{Announcement, Refusal, Request, is_here},
    task::{Asked, Feed, Task},
};
use crate::{
    launcher::Launcher,
    server::{Ending, Sessions},
};

/// VMIs on a page of a list. An object can have 1.5 MiB.
const PAGE: u32 = 50;
/// Requests that wait for one machine.
const REQUESTS: usize = 4;
/// Most VMIs that are worked on at a time: twice the largest number of pods that Kubernetes is tested with on a node (500). More than
/// kubelet can run name this node only if somebody wrote so, and each costs memory here.
const MAX_VMIS: usize = 1000;

/// What others may do with a machine of this node.
pub struct Handle {
    /// UID of its object.
    pub uid: String,
    /// Its open streams.
    pub sessions: Sessions,
    requests: mpsc::Sender<Asked>,
    launcher: watch::Sender<Option<Launcher>>,
    feed: watch::Sender<Feed>,
}

impl Handle {
    /// A handle with the ends that its task reads.
    fn new(vmi: &Arc<VirtualMachineInstance>) -> (Arc<Self>, watch::Receiver<Feed>, mpsc::Receiver<Asked>) {
        let (requests, asked) = mpsc::channel(REQUESTS);
        let (feed, news) = watch::channel(Feed::Object(vmi.clone()));
        let uid = vmi.uid().unwrap_or_default();
        let handle =
            Arc::new(Self { uid, sessions: Sessions::default(), requests, launcher: watch::Sender::new(None), feed });
        (handle, news, asked)
    }

    /// The launcher, while it is connected and has accepted the machine.
    pub fn launcher(&self) -> Result<Launcher, Refusal> {
        self.launcher.borrow().clone().ok_or_else(|| Refusal::NoLauncher(self.uid.clone()))
    }

    /// Has the machine's task carry out a request.
    pub async fn ask(&self, request: Request) -> Result<(), Refusal> {
        let (answer, answered) = oneshot::channel();
        self.requests.try_send((request, answer)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Refusal::Busy,
            mpsc::error::TrySendError::Closed(_) => Refusal::NoLauncher(self.uid.clone()),
        })?;
        answered.await.unwrap_or_else(|_| Err(Refusal::NoLauncher(self.uid.clone())))
    }

    /// The object as the watch has shown it last; `None` if it shows it no longer.
    #[must_use]
    pub fn vmi(&self) -> Option<Arc<VirtualMachineInstance>> {
        match &*self.feed.borrow() {
            Feed::Object(vmi) => Some(vmi.clone()),
            Feed::Missing | Feed::Replaced => None,
        }
    }

    pub(super) fn set_launcher(&self, launcher: Option<&Launcher>) {
        self.launcher.send_if_modified(|current| {
            let change = current.is_some() != launcher.is_some();
            if change {
                *current = launcher.cloned();
            }
            change
        });
    }
}

type Named = BTreeMap<(String, String), Arc<Handle>>;

/// The machines of this node. Cheap to clone.
#[derive(Clone)]
pub struct Machines {
    named: Arc<Mutex<Named>>,
    host: Arc<dyn Host>,
    records: Arc<dyn Records>,
    tasks: TaskTracker,
    count: IntGauge,
    /// VMIs of this node that no task was started for, since there were too many.
    left_out: Arc<Mutex<HashSet<(String, String)>>>,
    /// Told when a task ends while VMIs are left out.
    pub(super) freed: Arc<Notify>,
    stop: CancellationToken,
}

impl Machines {
    /// No machines yet. `count` shows their number.
    pub fn new(host: Arc<dyn Host>, records: Arc<dyn Records>, count: IntGauge, stop: CancellationToken) -> Self {
        Self {
            named: Arc::default(),
            host,
            records,
            tasks: TaskTracker::new(),
            count,
            left_out: Arc::default(),
            freed: Arc::default(),
            stop,
        }
    }

    /// The machine of that name.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<Handle>> {
        self.lock().get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All machines.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Handle>> {
        self.lock().values().cloned().collect()
    }

    /// Tells the users of a machine.
    pub fn announce(&self, machine: &Handle, announcement: Announcement) {
        if let Some(vmi) = machine.vmi() {
            self.records.announce(&vmi, announcement);
        }
    }

    /// A version of an object was seen: starts its task, or feeds it.
    pub fn see(&self, vmi: Arc<VirtualMachineInstance>) {
        self.see_up_to(MAX_VMIS, vmi);
    }

    /// As [`Machines::see`], with another limit.
    pub(super) fn see_up_to(&self, most: usize, vmi: Arc<VirtualMachineInstance>) {
        let key = (vmi.namespace().unwrap_or_default(), vmi.name_any());
        let uid = vmi.uid().unwrap_or_default();
        if !is_here(&vmi, self.host.name()) {
            tracing::debug!(namespace = key.0, name = key.1, "label names this node, status does not");
            self.miss(&key.0, &key.1);
            self.take_in(&key);
            return;
        }
        let mut named = self.lock();
        if let Some(known) = named.get(&key) {
            if known.uid == uid && !known.feed.is_closed() {
                known.feed.send_replace(Feed::Object(vmi));
                return;
            }
            known.feed.send_replace(Feed::Replaced);
        } else if named.len() >= most {
            drop(named);
            self.leave_out(key, most);
            return;
        }
        let (handle, feed, requests) = Handle::new(&vmi);
        named.insert(key.clone(), handle.clone());
        drop(named);
        self.take_in(&key);
        let span = tracing::info_span!("machine", namespace = %key.0, name = %key.1, uid = %uid);
        let task = Task::new(vmi, self.host.clone(), self.records.clone(), handle.clone());
        let (machines, stop) = (self.clone(), self.stop.child_token());
        self.count.inc();
        let run = async move {
            task.run(feed, requests, stop.clone()).await;
            handle.sessions.end_all(if stop.is_cancelled() { Ending::AgentStops } else { Ending::MachineGone });
            machines.count.dec();
            let mut named = machines.lock();
            // A new machine of the same name may have taken the place.
            if named.get(&key).is_some_and(|current| Arc::ptr_eq(current, &handle)) {
                named.remove(&key);
            }
            drop(named);
            if !machines.left_out().is_empty() {
                machines.freed.notify_one();
            }
        };
        self.tasks.spawn(run.instrument(span));
    }

    /// Notes that a VMI is not worked on. The number is logged once per change.
    fn leave_out(&self, key: (String, String), most: usize) {
        let mut left_out = self.left_out();
        if left_out.insert(key) {
            tracing::error!(
                left_out = left_out.len(),
                limit = most,
                "too many virtual machine instances name this node: those beyond the limit are not worked on"
            );
        }
    }

    fn take_in(&self, key: &(String, String)) {
        let mut left_out = self.left_out();
        if left_out.remove(key) {
            tracing::info!(left_out = left_out.len(), "fewer virtual machine instances are left out");
        }
    }

    pub(super) fn left_out(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The watch no longer shows an object.
    pub fn miss(&self, namespace: &str, name: &str) {
        self.take_in(&(namespace.to_owned(), name.to_owned()));
        if let Some(handle) = self.get(namespace, name) {
            handle.feed.send_replace(Feed::Missing);
        }
    }

    /// All that the watch shows was seen: what is known beyond that is missing.
    fn keep_only(&self, seen: &HashSet<(String, String)>) {
        self.left_out().retain(|key| seen.contains(key));
        for (key, handle) in self.lock().iter().filter(|(key, _)| !seen.contains(*key)) {
            tracing::debug!(namespace = key.0, name = key.1, "no longer listed");
            handle.feed.send_replace(Feed::Missing);
        }
    }

    /// Waits for all tasks after the stop.
    pub async fn stopped(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn lock(&self) -> MutexGuard<'_, Named> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows the objects of this node's machines until `stop`. `listed` is called once the first list is complete.
pub async fn follow(client: Client, machines: Machines, listed: impl FnOnce(), stop: CancellationToken) {
    let api = Api::<VirtualMachineInstance>::all(client);
    let selector = format!("{}={}", api::constants::label::NODE_NAME, machines.host.name());
    let config = watcher::Config::default().labels(&selector).page_size(PAGE);
    let watch = || watcher::watcher(api.clone(), config.clone()).default_backoff().boxed();
    let mut events = watch();
    let mut listed = Some(listed);
    let mut seen = HashSet::new();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            // There is a place for one that was left out: all are listed again.
            () = machines.freed.notified() => {
                events = watch();
                continue;
            }
            () = stop.cancelled() => return,
        };
        match event {
            Some(Ok(watcher::Event::Init)) => seen.clear(),
            Some(Ok(watcher::Event::InitApply(vmi))) => {
                seen.insert((vmi.namespace().unwrap_or_default(), vmi.name_any()));
                machines.see(trimmed(vmi));
            }
            Some(Ok(watcher::Event::InitDone)) => {
                machines.keep_only(&seen);
                seen = HashSet::new();
                if let Some(listed) = listed.take() {
                    listed();
                }
            }
            Some(Ok(watcher::Event::Apply(vmi))) => machines.see(trimmed(vmi)),
            Some(Ok(watcher::Event::Delete(vmi))) => {
                machines.miss(&vmi.namespace().unwrap_or_default(), &vmi.name_any())
            }
            Some(Err(error)) => tracing::warn!(%error, "watch of machines was interrupted"),
            None => return,
        }
    }
}

fn trimmed(mut vmi: VirtualMachineInstance) -> Arc<VirtualMachineInstance> {
    trim(&mut vmi);
    Arc::new(vmi)
}
