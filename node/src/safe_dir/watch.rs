//! Waiting for an entry to appear, by one inotify instance for the whole process (a node allows few of them).

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::sync::watch;

use super::{Error, SafeDir, beneath, descriptor_path, names};

/// How often to look although inotify said nothing: a lost event must not cost more than this.
const WATCHED_RECHECK: Duration = Duration::from_secs(2);
/// How often to look where inotify cannot be had.
const POLL: Duration = Duration::from_millis(100);
/// So often a wait looks as soon as something happens, which is more often than kubelet and a launcher need. Somebody may
/// make things happen in a pod's directory all the time: then it looks as where inotify cannot be had.
const PROMPT_LOOKS: u32 = 64;
/// Room for the events of one read.
const BUFFER: usize = 8 * 1024;

/// The inotify instance and who waits on it.
struct Watches {
    inotify: OwnedFd,
    directories: Mutex<HashMap<i32, Directory>>,
}

struct Directory {
    subscribers: usize,
    changed: watch::Sender<()>,
}

/// Tells of changes in one directory. A directory is watched once, however many wait for it.
struct Subscription {
    watches: Arc<Watches>,
    descriptor: i32,
    changed: watch::Receiver<()>,
}

impl Watches {
    /// The instance of this process; `None` if the node has none left.
    fn shared() -> Option<Arc<Self>> {
        static SHARED: OnceLock<Option<Arc<Watches>>> = OnceLock::new();
        SHARED
            .get_or_init(|| match Self::start() {
                Ok(watches) => Some(watches),
                Err(error) => {
                    tracing::warn!(%error, "inotify is not available, directories are looked at repeatedly");
                    None
                }
            })
            .clone()
    }

    fn start() -> std::io::Result<Arc<Self>> {
        let watches = Arc::new(Self { inotify: inotify::init(CreateFlags::CLOEXEC)?, directories: Mutex::default() });
        let reader = Arc::clone(&watches);
        // A thread, not a task: it outlives any one runtime and sleeps in the kernel.
        std::thread::Builder::new().name("inotify".to_owned()).stack_size(64 * 1024).spawn(move || reader.read())?;
        Ok(watches)
    }

    fn read(&self) {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    self.lock().values().for_each(|directory| directory.notify());
                }
                Ok(event) => {
                    if let Some(directory) = self.lock().get(&event.wd()) {
                        directory.notify();
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    // Waiting goes on by the recheck.
                    tracing::error!(%error, "inotify cannot be read any more");
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
        // Locked across the call, so that the reader cannot see an event of a watch that is not in the map yet.
        let mut directories = self.lock();
        let descriptor = inotify::add_watch(&self.inotify, descriptor_path(dir), flags)?;
        let directory = directories
            .entry(descriptor)
            .or_insert_with(|| Directory { subscribers: 0, changed: watch::channel(()).0 });
        directory.subscribers += 1;
        let changed = directory.changed.subscribe();
        Ok(Subscription { watches: Arc::clone(self), descriptor, changed })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Directory>> {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directory {
    fn notify(&self) {
        self.changed.send_replace(());
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut directories = self.watches.lock();
        let Some(directory) = directories.get_mut(&self.descriptor) else { return };
        directory.subscribers -= 1;
        if directory.subscribers == 0 {
            directories.remove(&self.descriptor);
            // Fails if the directory itself is gone, and its watch with it.
            let _ = inotify::remove_watch(&self.watches.inotify, self.descriptor);
        }
    }
}

/// Changes in one directory since [`SafeDir::changes`] was called.
pub struct Changes(Option<Subscription>);

impl Changes {
    /// Returns when something may have changed in the directory, and after `recheck` even if nothing has.
    pub async fn changed(&mut self, recheck: Duration) {
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
    /// Tells of entries that come, go or change their attributes in this directory from now on.
    #[must_use]
    pub fn changes(&self) -> Changes {
        // No watch left on this node: look repeatedly instead.
        Changes(Watches::shared().and_then(|watches| watches.subscribe(self).ok()))
    }

    /// Waits until there is something at `path`. None of the directories on the way need be there yet.
    pub async fn wait_for(&self, path: impl AsRef<Path>, within: Duration) -> Result<(), Error> {
        let path = beneath(path.as_ref())?;
        match tokio::time::timeout(within, self.appear(path)).await {
            Ok(outcome) => outcome.map(|_looks| ()),
            Err(_) => Err(Error::Timeout(path.to_owned())),
        }
    }

    /// Returns when there is something at `path`, and says how often it was looked for.
    pub(super) async fn appear(&self, path: &Path) -> Result<u32, Error> {
        let mut looks = 1_u32;
        while !self.exists(path)? {
            looks = looks.saturating_add(1);
            if looks > PROMPT_LOOKS {
                tokio::time::sleep(POLL).await;
            }
            let mut dir = self.clone();
            for name in names(path) {
                // Subscribed before it is looked at: what appears in between is told.
                let mut changes = dir.changes();
                match dir.open_dir(name) {
                    Ok(next) => dir = next,
                    // Nothing there; or, under the last name, something that is no directory.
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
