//! The call that creates the files of host disks before the domain starts. The launcher is not asked: it has no right to the
//! directories.

use daemon::errors;

use super::{
    call::{Answer, Call, Connected},
    event::Event,
    observed::{Link, Now, Observed, SYNC},
};
use crate::{host_disks, launcher::LauncherError};

/// Creates the files of host disks that are missing, before the domain starts. A running or arriving domain has its files.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CreateHostDisks;

impl CreateHostDisks {
    /// Returns the call if the VMI has such files that were not looked at over the present connection.
    pub(super) fn of(observed: &Observed) -> Option<Self> {
        let Link::Up { connection, .. } = observed.link else { return None };
        let is_due = observed.host_disks != Some(connection) && !observed.domain().is_alive();
        (is_due && !host_disks::wanted(&observed.vmi).is_empty()).then_some(Self)
    }
}

impl Call for CreateHostDisks {
    type Reply = Vec<String>;
    const NAME: &'static str = "host-disks";
    /// As Sync, which needs the files.
    const SLOT: &'static str = SYNC;

    async fn send(&self, to: &Connected) -> Answer<Vec<String>> {
        let created = to.host.create_host_disks(&to.peer, &to.vmi).await;
        created.map_err(|error| LauncherError::Refused {
            call: Self::NAME,
            message: errors::chain(&error),
            irrecoverable: false,
        })
    }

    fn apply(&self, observed: &mut Observed, connection: u64, answer: Answer<Vec<String>>, now: Now) -> Vec<Event> {
        match answer {
            Ok(tolerated) => {
                observed.host_disks = Some(connection);
                tolerated.into_iter().map(|message| Event::normal("ToleratedSmallPV", message)).collect()
            }
            Err(error) => observed.failed(&error, now),
        }
    }
}
