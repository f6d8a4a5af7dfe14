//! The outcomes of effects.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use daemon::backoff;
use protocol::{SyncReply, features::Feature};
use sha2::{Digest, Sha256};

use super::{Failure, Link, Now, ObjectState, Observed, RefusedMigration, WRITE_INTERVAL, link::RECONNECT};
use crate::{
    launcher::LauncherError,
    network::PodNetwork,
    vmi::{
        event::Event,
        host::{ConnectError, NetworkFailure, PodError},
        launcher_volumes::LauncherVolumes,
        records::WriteError,
        role::{self, Role},
    },
    volumes::Volumes,
};

/// First and longest pause after failures in a row.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Pause before a launcher that did not answer is asked again to begin or abort a migration.
const MIGRATE_RETRY: Duration = Duration::from_secs(5);

/// The outcome of an effect.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The attempt to connect ended.
    Connected(Result<u64, ConnectError>),
    /// Hello was answered over this connection, with the features of the launcher.
    Greeted(u64, Result<BTreeSet<Feature>, LauncherError>),
    /// The network was set up over this connection.
    Network(u64, Result<PodNetwork, NetworkFailure>),
    /// Hot-plugged volumes were handed over or taken back over this connection.
    Volumes(u64, Result<Volumes, PodError>),
    /// Sync of this fingerprint was answered over this connection.
    Synced(u64, u64, Result<SyncReply, LauncherError>),
    /// The request of a memory dump was answered.
    DumpRequested(Result<(), LauncherError>),
    /// PrepareMigration of this migration was answered over this connection.
    Prepared(u64, String, Result<(), LauncherError>),
    /// Migrate of this migration was answered.
    Migrating(String, Result<(), LauncherError>),
    /// AbortMigration was answered.
    Aborted(Result<(), LauncherError>),
    /// Shutdown or Kill was answered.
    Signalled(Result<(), LauncherError>),
    /// Finish was answered.
    Finished(Result<(), LauncherError>),
    /// The object was written; the new version, and the events to publish.
    Written(Result<Arc<VirtualMachineInstance>, WriteError>, Vec<Event>),
    /// The progress of a migration was written; the new version.
    ProgressWritten(Result<Arc<VirtualMachineInstance>, WriteError>),
    /// The object was read; `None` if it does not exist.
    Read(Result<Option<Arc<VirtualMachineInstance>>, WriteError>),
    /// The request of a user was carried out.
    Requested,
}

impl Observed {
    /// Applies the outcome of an effect. Returns events for users.
    pub(in crate::vmi) fn apply_outcome(&mut self, outcome: Outcome, node: &str, now: Now) -> Vec<Event> {
        match outcome {
            Outcome::Connected(result) => {
                self.busy.connect = false;
                self.apply_connect(result, now);
            }
            Outcome::Greeted(connection, result) => {
                self.busy.hello = false;
                match result {
                    Ok(of_launcher) => {
                        self.hello_at.get_or_insert(now.wall);
                        if let Some(Link::Up { greeted, features, .. }) = self.link_of(connection) {
                            (*greeted, *features) = (true, of_launcher);
                        }
                    }
                    Err(error) => return self.failed(&error, now),
                }
            }
            Outcome::Network(connection, result) => {
                self.busy.network = false;
                match result {
                    Ok(mut ready) => {
                        for nic in ready.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
                            nic.mac = generated_mac(&self.facts.uid, &nic.name);
                        }
                        let names = |network: &PodNetwork| -> BTreeSet<String> {
                            network.nics.iter().map(|nic| nic.name.clone()).collect()
                        };
                        let is_other = self.network.as_deref().is_some_and(|former| names(former) != names(&ready));
                        let is_changed = is_other || self.failure.is_some();
                        self.network = Some(Arc::new(ready));
                        if let Some(Link::Up { networked, synced, .. }) = self.link_of(connection) {
                            *networked = true;
                            // The launcher attaches what is new.
                            *synced = synced.filter(|_| !is_changed);
                        }
                    }
                    Err(failure) => {
                        let message = format!("failed to configure vmi network: {}", failure.message);
                        let mut events = self.note_failure(message, failure.permanent, now);
                        if matches!(self.link, Link::Up { networked: true, .. }) {
                            events.iter_mut().for_each(|event| event.reason = "NicHotplug");
                        }
                        self.spare_guest();
                        return events;
                    }
                }
            }
            Outcome::Volumes(connection, result) => {
                self.busy.volumes = false;
                return self.apply_volumes(connection, result, now);
            }
            Outcome::Synced(connection, fingerprint, result) => {
                self.busy.sync = false;
                self.delay_retries(now);
                match result {
                    Ok(SyncReply { started, state_sequence, .. }) => {
                        self.failure = None;
                        self.ran |= started;
                        if let Some(Link::Up { synced, results_from, .. }) = self.link_of(connection) {
                            (*synced, *results_from) = (Some(fingerprint), state_sequence);
                        }
                        // Once, independent of later answers of the launcher.
                        if started && !std::mem::replace(&mut self.created_sent, true) {
                            return vec![Event::normal("Created", "VirtualMachineInstance defined.")];
                        }
                    }
                    Err(error) => {
                        let events = self.failed(&error, now);
                        self.spare_guest();
                        return events;
                    }
                }
            }
            Outcome::DumpRequested(result) => {
                self.busy.dump = false;
                // Another job may be in progress; the request is repeated.
                if let Err(error) = result
                    && !error.is_lost()
                {
                    return vec![Event::warning("SyncFailed", error.to_string())];
                }
            }
            Outcome::Prepared(connection, migration, result) => {
                self.busy.prepare = false;
                match result {
                    Ok(()) => {
                        self.failure = None;
                        if self.link_of(connection).is_some() {
                            self.prepared_migration = Some(migration);
                        }
                        // A restarted virt-handler prepares the launcher once more.
                        let is_known =
                            self.facts.migration.as_ref().is_some_and(|migration| migration.endpoint.is_some());
                        let prepared = "VirtualMachineInstance Migration Target Prepared.";
                        return (!is_known).then(|| Event::normal("PreparingTarget", prepared)).into_iter().collect();
                    }
                    Err(error) => return self.failed(&error, now),
                }
            }
            Outcome::Migrating(migration, result) => {
                self.busy.migrate = false;
                match result {
                    Ok(()) => {
                        self.called_migration = Some(migration);
                        return vec![Event::normal("Migrating", "VirtualMachineInstance is migrating.")];
                    }
                    Err(LauncherError::Refused { message, irrecoverable: permanent, .. }) => {
                        let known = self.refused_migration.take().filter(|known| known.migration == migration);
                        let count = known.map_or(0, |known| known.count).saturating_add(1);
                        self.refused_migration = Some(RefusedMigration { migration, message, count, permanent });
                        self.hold_until = now.since_start + backoff::pause(PAUSE, count);
                    }
                    // The migration may have begun: the call is repeated.
                    Err(_) => self.hold_until = now.since_start + MIGRATE_RETRY,
                }
            }
            Outcome::Aborted(result) => {
                self.busy.abort = false;
                match result {
                    Ok(()) => {
                        return vec![Event::normal("Migrating", "VirtualMachineInstance is aborting migration.")];
                    }
                    Err(LauncherError::Refused { .. }) => {}
                    Err(_) => {
                        self.aborted_migration = None;
                        self.hold_until = now.since_start + MIGRATE_RETRY;
                    }
                }
            }
            Outcome::Signalled(result) => {
                self.busy.power = false;
                // A launcher that is gone has stopped its domain; after any other failure the next signal follows.
                if let Err(error) = result
                    && !error.is_lost()
                {
                    return vec![Event::warning("SyncFailed", error.to_string())];
                }
            }
            Outcome::Finished(result) => {
                self.busy.finish = false;
                self.finished = match result {
                    Ok(()) => true,
                    Err(error) => error.is_lost(),
                };
                if self.finished {
                    let ends = self.role == Role::Owner;
                    return ends.then(|| Event::normal("Deleted", "Signaled Deletion")).into_iter().collect();
                }
                self.note_failure("virt-launcher did not accept Finish".into(), false, now);
            }
            Outcome::Written(result, events) => {
                self.busy.record = false;
                let written = result.is_ok();
                self.apply_write(result, node, now);
                if written {
                    return events;
                }
            }
            Outcome::ProgressWritten(result) => {
                self.busy.record = false;
                match result {
                    Ok(vmi) => self.replace_object(vmi, node),
                    // The next progress is another one.
                    Err(WriteError::Conflict | WriteError::Gone) => self.object = ObjectState::Unverified,
                    Err(WriteError::Other(error)) => tracing::debug!(error, "the progress was not written"),
                }
            }
            Outcome::Read(result) => {
                self.busy.record = false;
                self.apply_read(result, node, now);
            }
            Outcome::Requested => self.busy.request = false,
        }
        Vec::new()
    }

    fn apply_volumes(&mut self, connection: u64, result: Result<Volumes, PodError>, now: Now) -> Vec<Event> {
        if self.link_of(connection).is_none() {
            return Vec::new();
        }
        let before = self.volumes.take();
        let volumes = result.unwrap_or_else(|error| {
            // The launcher has ended: the next connection shows its volumes.
            tracing::debug!(%error, "cannot observe the launcher's hot-plugged volumes");
            before.as_ref().map(|before| before.volumes.clone()).unwrap_or_default()
        });
        let after = LauncherVolumes::after(before.as_ref(), volumes, now.since_start);
        let events = after.events(before.as_ref());
        self.volumes = Some(after);
        events
    }

    fn failed(&mut self, error: &LauncherError, now: Now) -> Vec<Event> {
        // The state stream reports the end of the connection, and a new one is opened.
        if error.is_lost() {
            self.hold_until = now.since_start + RECONNECT;
            return Vec::new();
        }
        let permanent = matches!(error, LauncherError::Refused { irrecoverable: true, .. });
        self.note_failure(error.to_string(), permanent, now)
    }

    /// Makes a failure temporary if the guest runs: a running guest must not fail because its launcher rejects a Sync, or
    /// because a restarted virt-handler rejects its network.
    fn spare_guest(&mut self) {
        let runs = match &self.report {
            Some(_) => self.domain().is_alive(),
            None => self.facts.phase == Phase::Running,
        };
        if let Some(failure) = self.failure.as_mut().filter(|_| runs) {
            failure.permanent = false;
        }
    }

    /// Records a failure with a doubling pause. Returns an event for each new message.
    fn note_failure(&mut self, message: String, permanent: bool, now: Now) -> Vec<Event> {
        let known = self.failure.take();
        let count = known.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
        let new = known.is_none_or(|failure| failure.message != message);
        let failure = Failure {
            message: message.clone(),
            count,
            retry_at: now.since_start + backoff::pause(PAUSE, count),
            permanent,
        };
        self.failure = Some(failure);
        if new { vec![Event::warning("SyncFailed", message)] } else { Vec::new() }
    }

    fn apply_write(&mut self, result: Result<Arc<VirtualMachineInstance>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(vmi) => {
                self.write_retry = None;
                self.guest_changed_at = None;
                self.guest_written_at = Some(now.since_start);
                self.paced = self.paced.max(now.since_start) + WRITE_INTERVAL;
                self.replace_object(vmi, node);
            }
            Err(WriteError::Gone) => self.object = ObjectState::Unverified,
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, true),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }

    /// Delays the next write. `stale`: the object has to be read first, and the first attempts follow at once.
    fn delay_write(&mut self, message: String, now: Now, stale: bool) {
        let count = self.write_retry.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
        let wait = if stale && count <= 3 { Duration::ZERO } else { backoff::pause(PAUSE, count) };
        self.write_retry = Some(Failure { message, count, retry_at: now.since_start + wait, permanent: false });
        if stale {
            self.object = ObjectState::Unverified;
        }
    }

    fn apply_read(&mut self, result: Result<Option<Arc<VirtualMachineInstance>>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(Some(vmi)) if vmi.metadata.uid.as_deref() != Some(self.facts.uid.as_str()) => {
                self.object = ObjectState::Deleted(now.since_start);
            }
            Ok(None) | Err(WriteError::Gone) => self.object = ObjectState::Deleted(now.since_start),
            Ok(Some(vmi)) => {
                self.object = ObjectState::Current;
                self.role = role::decide(&vmi, node);
                self.replace_object(vmi, node);
            }
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, false),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }
}

/// Returns the MAC address of an interface whose object names none: the same after each restart, with the prefix of QEMU's own
/// addresses. It is visible inside the pod only.
fn generated_mac(uid: &str, name: &str) -> String {
    let digest = Sha256::new().chain_update(uid).chain_update([0]).chain_update(name).finalize();
    match digest.as_slice() {
        [a, b, c, ..] => format!("52:54:00:{a:02x}:{b:02x}:{c:02x}"),
        _ => String::new(),
    }
}
