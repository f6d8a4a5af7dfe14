//! The calls to the launchers at both ends of a migration.

use std::time::Duration;

use api::VirtualMachineInstance;
use protocol::{
    AbortJobRequest, AbortMigrationRequest, MigrateRequest, Nic, PrepareMigrationRequest, abort_job_request,
    features::Feature, start_job_request::Job,
};

use super::{source, target};
use crate::{
    launcher::LauncherError,
    vmi::{
        call::{Call, Connected, encode},
        event::Event,
        nics,
        observed::{MIGRATE, Now, Observed, RefusedMigration, pause},
        resize,
    },
};

/// Pause before a launcher that did not answer is asked again to begin or abort a migration.
const MIGRATE_RETRY: Duration = Duration::from_secs(5);

/// Prepares the launcher to receive the domain.
#[derive(Debug, Default, PartialEq)]
pub(in crate::vmi) struct PrepareMigration {
    /// UID of the migration.
    pub(in crate::vmi) migration: String,
    /// The VMI.
    pub(in crate::vmi) vmi: VirtualMachineInstance,
    /// The network devices that are set up.
    pub(in crate::vmi) nics: Vec<Nic>,
}

impl PrepareMigration {
    /// Returns the preparation for a migration to this node.
    pub(in crate::vmi) fn of(observed: &Observed, migration: &str) -> Self {
        let nics = observed.network.as_ref().map(|network| network.nics.clone()).unwrap_or_default();
        let mut vmi = resize::for_launcher(&target::for_launcher(&observed.vmi), &observed.link).into_owned();
        // The domain lacks what was plugged into its pod only.
        nics::leave_out_unconnected(&mut vmi, &nics, None);
        Self { migration: migration.to_owned(), vmi, nics }
    }
}

impl Call for PrepareMigration {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = "prepare";
    const LIMIT: Duration = Duration::from_secs(95);

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        let (vmi, options) = (encode("PrepareMigration", &self.vmi)?, Some(to.options(&self.nics)));
        let request = PrepareMigrationRequest { migration: self.migration.clone(), vmi, options };
        to.start(Job::MigrationIn(request)).await
    }

    fn apply(
        &self,
        observed: &mut Observed,
        connection: u64,
        result: Result<(), LauncherError>,
        now: Now,
    ) -> Vec<Event> {
        if let Err(error) = result {
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
#[derive(Debug, PartialEq)]
pub(in crate::vmi) struct Migrate(pub(in crate::vmi) MigrateRequest);

impl Migrate {
    /// Returns the call that begins a migration from this node.
    pub(in crate::vmi) fn of(observed: &Observed, migration: &str) -> Self {
        Self(source::request(&observed.vmi, migration))
    }
}

impl Call for Migrate {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = MIGRATE;

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        to.start(Job::MigrationOut(self.0.clone())).await
    }

    fn apply(&self, observed: &mut Observed, _: u64, result: Result<(), LauncherError>, now: Now) -> Vec<Event> {
        let migration = self.0.migration.clone();
        match result {
            Ok(()) => {
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
#[derive(Debug, PartialEq)]
pub(in crate::vmi) struct AbortMigration {
    /// UID of the migration.
    pub(in crate::vmi) migration: String,
}

impl Call for AbortMigration {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = "abort";

    fn begin(&self, observed: &mut Observed, _: Now) {
        observed.aborted_migration = Some(self.migration.clone());
    }

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        let request = AbortMigrationRequest { migration: self.migration.clone() };
        if to.features.contains(&Feature::Jobs) {
            let job = Some(abort_job_request::Job::Migration(request));
            return to.call(AbortJobRequest { job }).await.map(drop);
        }
        to.call(request).await.map(drop)
    }

    fn apply(&self, observed: &mut Observed, _: u64, result: Result<(), LauncherError>, now: Now) -> Vec<Event> {
        match result {
            Ok(()) => return vec![Event::normal("Migrating", "VirtualMachineInstance is aborting migration.")],
            Err(LauncherError::Refused { .. }) => {}
            Err(_) => {
                observed.aborted_migration = None;
                observed.hold_until = now.since_start + MIGRATE_RETRY;
            }
        }
        Vec::new()
    }
}
