//! The calls to a launcher, one row each.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use api::{VirtualMachineInstance, dedicated};
use daemon::errors;
use protocol::{
    AbortJobRequest, AbortMigrationRequest, Done, DumpMemoryRequest, FinishRequest, HelloRequest, KillRequest,
    MigrateRequest, Nic, PrepareMigrationRequest, SaveMemoryRequest, ShutdownRequest, SyncReply, SyncRequest,
    TRACEPARENT, VmiOptions, abort_job_request,
    features::{self, Feature},
    start_job_request::Job,
};
use tonic::Request;

use super::{
    call::{Answer, Call, Connected},
    event::Event,
    launcher_volumes::LauncherVolumes,
    migration::target,
    nics,
    observed::{Link, MIGRATE, Now, Observed, RefusedMigration, SYNC, Stopping, pause},
    resize,
    role::Role,
};
use crate::{
    launcher::{CALL_TIMEOUT, LauncherError, bounded},
    volumes::{Volumes, Work},
};

/// Pause before a launcher is asked for a memory dump again.
const DUMP_RETRY: Duration = Duration::from_secs(5);
/// Pause before a launcher that did not answer, or whose abort failed, is asked again to begin or abort a migration.
const MIGRATE_RETRY: Duration = Duration::from_secs(5);

/// Calls Hello with the UID of the VMI and the node's data; the launcher starts libvirtd. The launcher of another VMI refuses.
#[derive(Debug, PartialEq)]
pub(super) struct Hello;

impl Call for Hello {
    type Reply = BTreeSet<Feature>;
    const NAME: &'static str = "hello";
    /// With the grant of devices before it.
    const LIMIT: Duration = Duration::from_secs(35);

    async fn send(&self, to: &Connected) -> Answer<BTreeSet<Feature>> {
        let capabilities_cache = to.host.equip(&to.peer, &to.vmi).await.map_err(|error| {
            let message = errors::chain(&error);
            if to.peer.is_alive() {
                LauncherError::Refused { call: "Hello", message, irrecoverable: false }
            } else {
                // Nothing else notices the end of a connection over which Hello was not answered.
                LauncherError::Lost(message)
            }
        })?;
        let request = HelloRequest {
            capabilities_cache,
            allow_emulation: to.host.settings().allow_emulation,
            uid: to.vmi.metadata.uid.clone().unwrap_or_default(),
            features: features::own(),
        };
        let reply = to.launcher.call(request, CALL_TIMEOUT).await?;
        let features = features::common(&reply.features);
        tracing::debug!(version = bounded(&reply.launcher_version), ?features, "virt-launcher answered Hello");
        Ok(features)
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<Self::Reply>, now: Now) -> Vec<Event> {
        match answer {
            Ok(of_launcher) => {
                observed.hello_at.get_or_insert(now.wall);
                if let Some(Link::Up { greeted, features, .. }) = observed.link_of(connection) {
                    (*greeted, *features) = (true, of_launcher);
                }
                Vec::new()
            }
            Err(error) => {
                // Nothing follows the connection yet that could notice its end.
                if error.is_lost() {
                    tracing::warn!(%error, "Hello failed");
                    observed.apply_disconnect(connection, now);
                }
                observed.failed(&error, now)
            }
        }
    }
}

/// Hands hot-plugged volumes to the launcher, and takes them back.
#[derive(Debug, Default, PartialEq)]
pub(super) struct HandVolumes {
    /// UID of the launcher's pod.
    pub(super) pod: String,
    /// The volumes.
    pub(super) work: Work,
}

impl Call for HandVolumes {
    type Reply = Volumes;
    const NAME: &'static str = "volumes";
    /// Two calls of some seconds for each volume, all at the same time.
    const LIMIT: Duration = Duration::from_secs(20);

    fn begin(&self, observed: &mut Observed, _: Now) {
        observed.handing_over = self.work.attach.iter().map(|handover| handover.volume.clone()).collect();
    }

    async fn send(&self, to: &Connected) -> Answer<Volumes> {
        let volumes = to.host.hand_volumes(&to.peer, &self.pod, &to.vmi, self.work.clone()).await;
        volumes.map_err(|error| LauncherError::Lost(error.to_string()))
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<Volumes>, now: Now) -> Vec<Event> {
        observed.handing_over.clear();
        if observed.link_of(connection).is_none() {
            return Vec::new();
        }
        let before = observed.volumes.take();
        // The launcher has ended: the next connection shows its volumes.
        let known = || before.as_ref().map(|before| before.volumes.clone()).unwrap_or_default();
        let after = LauncherVolumes::after(before.as_ref(), answer.unwrap_or_else(|_| known()), now.since_start);
        let events = after.events(before.as_ref());
        observed.volumes = Some(after);
        events
    }
}

/// Sends the desired VMI.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Sync {
    /// The VMI as the launcher may carry it out now.
    pub(super) vmi: VirtualMachineInstance,
    /// The network devices that are set up.
    pub(super) nics: Vec<Nic>,
    /// Fingerprint of the object.
    pub(super) fingerprint: u64,
}

impl Sync {
    /// Returns the Sync of what is observed.
    pub(super) fn of(observed: &Observed) -> Self {
        let nics = observed.nics();
        let mut vmi = resize::for_launcher(&target::for_owner(observed), &observed.link).into_owned();
        if observed.domain().is_alive() {
            nics::leave_out_unconnected(&mut vmi, &nics, observed.report.as_ref());
        }
        Self { vmi, nics, fingerprint: observed.facts.fingerprint }
    }
}

impl Call for Sync {
    type Reply = SyncReply;
    const NAME: &'static str = SYNC;
    /// libvirtd may still start, and disk images are created.
    const LIMIT: Duration = Duration::from_secs(95);

    async fn send(&self, to: &Connected) -> Answer<SyncReply> {
        let (vmi, options) = encode("Sync", to, &self.vmi, &self.nics)?;
        let mut request = Request::new(SyncRequest { vmi, options });
        if let Some(context) = to.steps.as_ref().and_then(|steps| steps.context().to_string().parse().ok()) {
            request.metadata_mut().insert(TRACEPARENT, context);
        }
        let reply = to.send::<SyncRequest>(request).await?;
        if let Some(steps) = &to.steps {
            steps.record(&reply.timings, SystemTime::now());
        }
        tracing::info!(started = reply.started, "Sync succeeded");
        Ok(reply)
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<SyncReply>, now: Now) -> Vec<Event> {
        observed.delay_retries(now);
        match answer {
            Ok(SyncReply { started, state_sequence, .. }) => {
                observed.failure = None;
                observed.network_failure = nics::failure(observed).cloned();
                observed.ran |= started;
                if let Some(Link::Up { synced, results_from, .. }) = observed.link_of(connection) {
                    (*synced, *results_from) = (Some(self.fingerprint), state_sequence);
                }
                // Once, independent of later answers of the launcher.
                let is_new = started && !std::mem::replace(&mut observed.created_sent, true);
                is_new.then(|| Event::normal("Created", "VirtualMachineInstance defined.")).into_iter().collect()
            }
            Err(error) => {
                // The files are looked at again before the next attempt.
                observed.host_disks = None;
                let events = observed.failed(&error, now);
                observed.spare_guest();
                events
            }
        }
    }
}

/// Requests a memory dump to a file that was handed over. Another job may be in progress; the request is repeated.
impl Call for DumpMemoryRequest {
    type Reply = Done;
    const NAME: &'static str = "dump";

    fn begin(&self, observed: &mut Observed, now: Now) {
        observed.dump_at = now.since_start + DUMP_RETRY;
    }

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.start("DumpMemory", Job::MemoryDump(self.clone())).await
    }
}

/// Requests to save the memory to a file that was handed over, and to end the domain. It is repeated as that of a dump is.
impl Call for SaveMemoryRequest {
    type Reply = Done;
    const NAME: &'static str = "save";

    fn begin(&self, observed: &mut Observed, now: Now) {
        observed.dump_at = now.since_start + DUMP_RETRY;
        observed.note_save_request();
    }

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.start("SaveMemory", Job::MemorySave(self.clone())).await
    }

    fn apply(&self, observed: &mut Observed, _: u64, answer: Answer<Done>, _: Now) -> Vec<Event> {
        let Some(error) = answer.err().filter(|error| !error.is_lost()) else { return Vec::new() };
        if let LauncherError::Refused { message, .. } = &error {
            observed.note_save_refusal(message);
        }
        vec![Event::warning("SyncFailed", error.to_string())]
    }
}

/// Prepares the launcher to receive the domain.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PrepareMigration {
    /// UID of the migration.
    pub(super) migration: String,
    pub(super) vmi: VirtualMachineInstance,
    /// The network devices that are set up.
    pub(super) nics: Vec<Nic>,
}

impl PrepareMigration {
    /// Returns the preparation for a migration to this node.
    pub(super) fn of(observed: &Observed, migration: &str) -> Self {
        let nics = observed.nics();
        let mut vmi = resize::for_launcher(&target::for_launcher(&observed.vmi), &observed.link).into_owned();
        // The pod has CPUs for vCPUs that are plugged later, and the source assigns these, too.
        if dedicated::is_dedicated(&vmi.spec.domain) {
            vmi.spec.domain.cpu.clone_from(&observed.vmi.spec.domain.cpu);
        }
        // The domain lacks what was plugged into its pod only.
        nics::leave_out_unconnected(&mut vmi, &nics, None);
        Self { migration: migration.to_owned(), vmi, nics }
    }
}

impl Call for PrepareMigration {
    type Reply = Done;
    const NAME: &'static str = "prepare";
    const LIMIT: Duration = Sync::LIMIT;

    async fn send(&self, to: &Connected) -> Answer<Done> {
        let (vmi, options) = encode("PrepareMigration", to, &self.vmi, &self.nics)?;
        let request = PrepareMigrationRequest { migration: self.migration.clone(), vmi, options };
        to.start("PrepareMigration", Job::MigrationIn(request)).await
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<Done>, now: Now) -> Vec<Event> {
        if let Err(error) = answer {
            return observed.failed(&error, now);
        }
        observed.failure = None;
        if observed.link_of(connection).is_some() {
            observed.prepared_migration = Some(self.migration.clone());
        }
        // A restarted virt-handler prepares the launcher once more.
        let is_known = observed.facts.migration.as_ref().is_some_and(|migration| migration.endpoint.is_some());
        let prepared = "VirtualMachineInstance Migration Target Prepared.";
        (!is_known).then(|| Event::normal("PreparingTarget", prepared)).into_iter().collect()
    }
}

/// Begins to move the domain to another launcher.
impl Call for MigrateRequest {
    type Reply = Done;
    const NAME: &'static str = MIGRATE;

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.start("Migrate", Job::MigrationOut(self.clone())).await
    }

    fn apply(&self, observed: &mut Observed, _: u64, answer: Answer<Done>, now: Now) -> Vec<Event> {
        let migration = self.migration.clone();
        match answer {
            Ok(_) => {
                tracing::info!(migration, "the migration has begun");
                observed.called_migration = Some(migration);
                return vec![Event::normal("Migrating", "VirtualMachineInstance is migrating.")];
            }
            Err(LauncherError::Refused { message, irrecoverable: permanent, .. }) => {
                let known = observed.refused_migration.take().filter(|known| known.migration == migration);
                let count = known.map_or(0, |known| known.count).saturating_add(1);
                observed.refused_migration = Some(RefusedMigration { migration, message, count, permanent });
                observed.hold_until = now.since_start + pause(count);
            }
            // The migration may have begun: the call is repeated.
            Err(_) => observed.hold_until = now.since_start + MIGRATE_RETRY,
        }
        Vec::new()
    }
}

/// Aborts the migration in progress.
impl Call for AbortMigrationRequest {
    type Reply = Done;
    const NAME: &'static str = "abort";

    fn begin(&self, observed: &mut Observed, now: Now) {
        observed.aborted_migration = Some(self.migration.clone());
        observed.abort_at = now.since_start + MIGRATE_RETRY;
    }

    async fn send(&self, to: &Connected) -> Answer<Done> {
        if to.features.contains(&Feature::Jobs) {
            let job = Some(abort_job_request::Job::Migration(self.clone()));
            return to.send(AbortJobRequest { job }).await;
        }
        to.send(self.clone()).await
    }

    fn apply(&self, observed: &mut Observed, _: u64, answer: Answer<Done>, now: Now) -> Vec<Event> {
        match answer {
            Ok(_) => return vec![Event::normal("Migrating", "VirtualMachineInstance is aborting migration.")],
            Err(LauncherError::Refused { .. }) => {}
            Err(_) => {
                observed.aborted_migration = None;
                observed.hold_until = now.since_start + MIGRATE_RETRY;
            }
        }
        Vec::new()
    }
}

/// Requests the shutdown of the guest; the launcher stops it by force after the grace period.
impl Call for ShutdownRequest {
    type Reply = Done;
    const NAME: &'static str = "shutdown";
    const SLOT: &'static str = KillRequest::SLOT;

    fn begin(&self, observed: &mut Observed, now: Now) {
        signal(observed, false, now);
    }

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.start("Shutdown", Job::Shutdown(*self)).await
    }
}

/// Stops the domain at once. A launcher that is gone has stopped it; after any other failure the next signal follows.
impl Call for KillRequest {
    type Reply = Done;
    const NAME: &'static str = "kill";
    const SLOT: &'static str = "power";

    fn begin(&self, observed: &mut Observed, now: Now) {
        signal(observed, true, now);
    }

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.send(*self).await
    }
}

/// Permits the launcher to exit after the final state was written.
impl Call for FinishRequest {
    type Reply = Done;
    const NAME: &'static str = "finish";

    async fn send(&self, to: &Connected) -> Answer<Done> {
        to.send(*self).await
    }

    fn apply(&self, observed: &mut Observed, _: u64, answer: Answer<Done>, now: Now) -> Vec<Event> {
        observed.finished = answer.map_or_else(|error| error.is_lost(), |_| true);
        if !observed.finished {
            observed.note_failure("virt-launcher did not accept Finish".into(), false, now);
        }
        let ends = observed.finished && observed.role == Role::Owner;
        ends.then(|| Event::normal("Deleted", "Signaled Deletion")).into_iter().collect()
    }
}

fn signal(observed: &mut Observed, killed: bool, now: Now) {
    let since = observed.stopping.map_or(now.since_start, |stopping| stopping.since);
    observed.stopping = Some(Stopping { since, signalled: now.since_start, killed });
}

/// Returns the VMI as JSON, and the options with its network devices.
fn encode(
    call: &'static str,
    to: &Connected,
    vmi: &VirtualMachineInstance,
    nics: &[Nic],
) -> Answer<(Vec<u8>, Option<VmiOptions>)> {
    let json = serde_json::to_vec(vmi).map_err(|error| LauncherError::Refused {
        call,
        message: error.to_string(),
        irrecoverable: true,
    })?;
    Ok((json, Some(VmiOptions { nics: nics.to_vec(), ..to.host.settings().options })))
}
