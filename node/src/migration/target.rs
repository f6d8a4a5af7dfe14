//! The migrations that this node receives.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use daemon::{CancellationToken, lock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::{
    sync::DropGuard,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

use super::{LauncherSocket, Migration, refusal::Refusal};

/// Most channels of one migration at a time: one for libvirt, nine for memory, the others for disks.
pub(super) const CHANNELS: usize = 48;

/// The registered migrations. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Targets(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    next: u64,
    entries: HashMap<Migration, Entry>,
}

struct Entry {
    number: u64,
    source_node: String,
    launcher: Arc<dyn LauncherSocket>,
    channels: Arc<Semaphore>,
    stop: CancellationToken,
    /// Counts the migration as in progress from its first channel on.
    in_progress: Option<TaskTrackerToken>,
    _end: DropGuard,
}

/// A registration. Dropping it ends its channels.
pub(super) struct Registered {
    targets: Targets,
    migration: Migration,
    number: u64,
}

/// The way of a channel to its launcher.
pub(super) struct Admitted {
    pub(super) launcher: Arc<dyn LauncherSocket>,
    /// Cancelled when the migration is no longer received.
    pub(super) stop: CancellationToken,
    /// Place of the channel.
    pub(super) _place: OwnedSemaphorePermit,
}

impl Targets {
    pub(super) fn register(
        &self,
        migration: Migration,
        source_node: String,
        launcher: Arc<dyn LauncherSocket>,
        stop: CancellationToken,
    ) -> Registered {
        let mut state = lock(&self.0);
        let number = state.next;
        state.next += 1;
        let channels = Arc::new(Semaphore::new(CHANNELS));
        let entry = Entry {
            number,
            source_node,
            launcher,
            channels,
            stop: stop.clone(),
            in_progress: None,
            _end: stop.drop_guard(),
        };
        // A former entry ends its channels when it is dropped.
        state.entries.insert(migration.clone(), entry);
        Registered { targets: self.clone(), migration, number }
    }

    /// Finds the launcher for a channel of `migration` that a node opens. `is_node` compares the node of the peer's certificate. The
    /// first channel counts the migration in `in_progress`, and is refused once that is closed.
    pub(super) fn admit(
        &self,
        migration: &Migration,
        in_progress: &TaskTracker,
        is_node: impl Fn(&str) -> bool,
    ) -> Result<Admitted, Refusal> {
        let mut state = lock(&self.0);
        let is_known = state.entries.keys().any(|known| known.vmi == migration.vmi);
        let unknown = if is_known { Refusal::UnknownMigration } else { Refusal::UnknownVmi };
        let entry = state.entries.get_mut(migration).ok_or(unknown)?;
        if !is_node(&entry.source_node) {
            return Err(Refusal::Node);
        }
        if entry.in_progress.is_none() {
            if in_progress.is_closed() {
                return Err(Refusal::Stopping);
            }
            entry.in_progress = Some(in_progress.token());
        }
        let place = entry.channels.clone().try_acquire_owned().map_err(|_| Refusal::Full)?;
        Ok(Admitted { launcher: entry.launcher.clone(), stop: entry.stop.clone(), _place: place })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut state = lock(&self.targets.0);
        if state.entries.get(&self.migration).is_some_and(|entry| entry.number == self.number) {
            state.entries.remove(&self.migration);
        }
    }
}

#[cfg(test)]
impl Targets {
    /// Returns the number of registered migrations.
    pub(super) fn count(&self) -> usize {
        lock(&self.0).entries.len()
    }
}
