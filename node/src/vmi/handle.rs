//! The handle of a VMI: its task's inputs and its launcher, for the directory and the server.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use api::VirtualMachineInstance;
use daemon::lock;
use kube::ResourceExt;
use protocol::MigrationReport;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    request::{PendingRequest, Refusal, Request},
    sessions::Sessions,
};
use crate::launcher::Launcher;

/// Requests that can wait for one VMI.
const REQUESTS: usize = 4;

/// The newest state of the watch of objects.
#[derive(Clone, Debug)]
pub(super) enum Feed {
    /// A version of the object.
    Object(Arc<VirtualMachineInstance>),
    /// The watch does not contain the object.
    Missing,
    /// Another object has the same name.
    Replaced,
}

/// Access to a VMI of this node.
pub(crate) struct Handle {
    /// UID of the object.
    pub(crate) uid: String,
    /// Open streams.
    pub(crate) sessions: Sessions,
    requests: mpsc::Sender<PendingRequest>,
    launcher: watch::Sender<Option<Launcher>>,
    migration: Mutex<Option<MigrationReport>>,
    syncs: AtomicU64,
    feed: watch::Sender<Feed>,
}

impl Handle {
    /// Returns a handle with the receivers of its task.
    pub(super) fn new(
        vmi: &Arc<VirtualMachineInstance>,
    ) -> (Arc<Self>, watch::Receiver<Feed>, mpsc::Receiver<PendingRequest>) {
        let (requests, pending) = mpsc::channel(REQUESTS);
        let (feed, newest) = watch::channel(Feed::Object(vmi.clone()));
        let uid = vmi.uid().unwrap_or_default();
        let handle = Arc::new(Self {
            uid,
            sessions: Sessions::default(),
            requests,
            launcher: watch::Sender::new(None),
            migration: Mutex::default(),
            syncs: AtomicU64::new(0),
            feed,
        });
        (handle, newest, pending)
    }

    /// Returns the launcher if it is connected and has accepted the VMI.
    pub(crate) fn launcher(&self) -> Result<Launcher, Refusal> {
        self.launcher.borrow().clone().ok_or_else(|| Refusal::NoLauncher(self.uid.clone()))
    }

    /// Returns the progress of the migration by which the domain leaves this node.
    pub(crate) fn migration(&self) -> Option<MigrationReport> {
        lock(&self.migration).clone()
    }

    /// Sets the progress of a migration.
    pub(super) fn set_migration(&self, report: Option<&MigrationReport>) {
        *lock(&self.migration) = report.cloned();
    }

    /// Returns the number of decisions of the task.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// Counts a decision of the task.
    pub(super) fn count_sync(&self) {
        self.syncs.fetch_add(1, Ordering::Relaxed);
    }

    /// Sends a request to the task and waits for the answer.
    pub(crate) async fn request(&self, request: Request) -> Result<(), Refusal> {
        let (answer, answered) = oneshot::channel();
        self.requests.try_send(PendingRequest { request, answer }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Refusal::Busy,
            mpsc::error::TrySendError::Closed(_) => Refusal::NoLauncher(self.uid.clone()),
        })?;
        answered.await.unwrap_or_else(|_| Err(Refusal::NoLauncher(self.uid.clone())))
    }

    /// Returns the newest object of the watch; `None` if the watch does not contain it.
    pub(crate) fn vmi(&self) -> Option<Arc<VirtualMachineInstance>> {
        match &*self.feed.borrow() {
            Feed::Object(vmi) => Some(vmi.clone()),
            Feed::Missing | Feed::Replaced => None,
        }
    }

    /// Feeds the task with the newest state of the watch.
    pub(super) fn feed(&self, newest: Feed) {
        self.feed.send_replace(newest);
    }

    /// Returns true until the task ends.
    pub(super) fn has_task(&self) -> bool {
        !self.feed.is_closed()
    }

    /// Makes the launcher available, or unavailable.
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
