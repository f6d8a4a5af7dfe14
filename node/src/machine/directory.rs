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
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::{
    host::Host,
    records::{Records, trim},
    state::{Announcement, Refusal, Request},
    task::{Asked, Feed, Task},
};
use crate::{
    launcher::Launcher,
    server::{Ending, Sessions},
};

/// Requests that wait for one machine.
const REQUESTS: usize = 4;

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
    stop: CancellationToken,
}

impl Machines {
    /// No machines yet. `count` shows their number.
    pub fn new(host: Arc<dyn Host>, records: Arc<dyn Records>, count: IntGauge, stop: CancellationToken) -> Self {
        Self { named: Arc::default(), host, records, tasks: TaskTracker::new(), count, stop }
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
        let key = (vmi.namespace().unwrap_or_default(), vmi.name_any());
        let uid = vmi.uid().unwrap_or_default();
        let mut named = self.lock();
        if let Some(known) = named.get(&key) {
            if known.uid == uid && !known.feed.is_closed() {
                known.feed.send_replace(Feed::Object(vmi));
                return;
            }
            known.feed.send_replace(Feed::Replaced);
        }
        let (handle, feed, requests) = Handle::new(&vmi);
        named.insert(key.clone(), handle.clone());
        drop(named);
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
        };
        self.tasks.spawn(run.instrument(span));
    }

    /// The watch no longer shows an object.
    pub fn miss(&self, namespace: &str, name: &str) {
        if let Some(handle) = self.get(namespace, name) {
            handle.feed.send_replace(Feed::Missing);
        }
    }

    /// All that the watch shows was seen: what is known beyond that is missing.
    fn keep_only(&self, seen: &HashSet<(String, String)>) {
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
    let watched = watcher::watcher(api, watcher::Config::default().labels(&selector)).default_backoff();
    let mut events = std::pin::pin!(watched);
    let mut listed = Some(listed);
    let mut seen = HashSet::new();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
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
