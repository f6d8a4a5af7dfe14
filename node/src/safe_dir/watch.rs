//! Waits for directory entries, with one inotify instance for the whole process, because a node permits few.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use daemon::lock;
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::sync::watch;

use super::{Error, SafeDir, beneath, descriptor_path, names};

/// Interval of checks with inotify: the cost of a lost event.
const WATCHED_RECHECK: Duration = Duration::from_secs(2);
/// Interval of checks without inotify.
const POLL: Duration = Duration::from_millis(100);
/// Checks that follow events at once, more than kubelet and a launcher need. A pod can cause events all the time: further
/// checks are polls.
const PROMPT_LOOKS: u32 = 64;
/// Buffer for the events of one read.
const BUFFER: usize = 8 * 1024;

/// The inotify instance and its subscriptions.
struct Watches {
    inotify: OwnedFd,
    directories: Mutex<HashMap<i32, Directory>>,
}

struct Directory {
    subscribers: usize,
    changed: watch::Sender<()>,
}

/// Notifies of changes in one directory. Subscriptions of a directory share one watch.
struct Subscription {
    watches: Arc<Watches>,
    descriptor: i32,
    changed: watch::Receiver<()>,
}

impl Watches {
    /// Returns the instance of this process; `None` if the node permits no more.
    fn shared() -> Option<Arc<Self>> {
        static SHARED: OnceLock<Option<Arc<Watches>>> = OnceLock::new();
        SHARED
            .get_or_init(|| match Self::start() {
                Ok(watches) => Some(watches),
                Err(error) => {
                    tracing::warn!(%error, "inotify is not available, directories are polled");
                    None
                }
            })
            .clone()
    }

    fn start() -> std::io::Result<Arc<Self>> {
        let watches = Arc::new(Self { inotify: inotify::init(CreateFlags::CLOEXEC)?, directories: Mutex::default() });
        let reader = Arc::clone(&watches);
        // A thread: it outlives every runtime and sleeps in the kernel.
        std::thread::Builder::new().name("inotify".to_owned()).stack_size(64 * 1024).spawn(move || reader.read())?;
        Ok(watches)
    }

    fn read(&self) {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    lock(&self.directories).values().for_each(|directory| directory.notify());
                }
                Ok(event) => {
                    if let Some(directory) = lock(&self.directories).get(&event.wd()) {
                        directory.notify();
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    // Waits continue with polls.
                    tracing::error!(%error, "cannot read inotify events, directories are polled");
                    return;
                }
            }
        }
    }

    fn subscribe(self: &Arc<Self>, dir: &SafeDir) -> Result<Subscription, Errno> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        // Locked during the call, so that the reader sees no event of an unregistered watch.
        let mut directories = lock(&self.directories);
        let descriptor = inotify::add_watch(&self.inotify, descriptor_path(dir), flags)?;
        let directory = directories
            .entry(descriptor)
            .or_insert_with(|| Directory { subscribers: 0, changed: watch::channel(()).0 });
        directory.subscribers += 1;
        let changed = directory.changed.subscribe();
        Ok(Subscription { watches: Arc::clone(self), descriptor, changed })
    }
}

impl Directory {
    fn notify(&self) {
        self.changed.send_replace(());
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut directories = lock(&self.watches.directories);
        let Some(directory) = directories.get_mut(&self.descriptor) else { return };
        directory.subscribers -= 1;
        if directory.subscribers == 0 {
            directories.remove(&self.descriptor);
            // Fails if the directory and its watch are gone.
            let _ = inotify::remove_watch(&self.watches.inotify, self.descriptor);
        }
    }
}

/// Changes in one directory since [`SafeDir::changes`] was called.
pub(crate) struct Changes(Option<Subscription>);

impl Changes {
    /// Returns when the directory may have changed, and after `recheck` in any case.
    pub(crate) async fn changed(&mut self, recheck: Duration) {
        match &mut self.0 {
            Some(subscription) => {
                // The sender lives as long as the subscription.
                let _ = tokio::time::timeout(recheck, subscription.changed.changed()).await;
            }
            None => tokio::time::sleep(POLL.min(recheck)).await,
        }
    }
}

impl SafeDir {
    /// Subscribes to changes of entries in this directory.
    #[must_use]
    pub(crate) fn changes(&self) -> Changes {
        // Without a watch: polls.
        Changes(Watches::shared().and_then(|watches| watches.subscribe(self).ok()))
    }

    /// Waits until something exists at `path`. Its parent directories may be created meanwhile.
    pub(crate) async fn wait_for(&self, path: impl AsRef<Path>, within: Duration) -> Result<(), Error> {
        let path = beneath(path.as_ref())?;
        match tokio::time::timeout(within, self.appear(path)).await {
            Ok(outcome) => outcome.map(|_looks| ()),
            Err(_) => Err(Error::Timeout(path.to_owned())),
        }
    }

    /// Waits until something exists at `path` and returns the number of checks.
    pub(super) async fn appear(&self, path: &Path) -> Result<u32, Error> {
        let mut looks = 1_u32;
        while !self.exists(path)? {
            looks = looks.saturating_add(1);
            if looks > PROMPT_LOOKS {
                tokio::time::sleep(POLL).await;
            }
            let mut dir = self.clone();
            for name in names(path) {
                // Subscribed before the check, so that no change is missed.
                let mut changes = dir.changes();
                match dir.open_dir(name) {
                    Ok(next) => dir = next,
                    // Missing; or the last name is not a directory.
                    Err(error) if error.is_not_found() && !self.exists(path)? => {
                        changes.changed(WATCHED_RECHECK).await;
                        break;
                    }
                    Err(_) if self.exists(path)? => return Ok(looks),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(looks)
    }
}
