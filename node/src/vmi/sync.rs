//! Sync: the launcher brings the domain in line with the VMI.

use std::time::{Duration, SystemTime};

use api::VirtualMachineInstance;
use protocol::{Nic, SyncReply, SyncRequest, TRACEPARENT};
use tonic::Request;

use super::{
    call::{Call, Connected, encode},
    event::Event,
    migration::target,
    nics,
    observed::{Link, Now, Observed, SYNC},
    resize,
};
use crate::launcher::LauncherError;

/// Sends the desired VMI.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SyncVmi {
    /// The VMI as the launcher may carry it out now.
    pub(super) vmi: VirtualMachineInstance,
    /// The network devices that are set up.
    pub(super) nics: Vec<Nic>,
    /// Fingerprint of the object.
    pub(super) fingerprint: u64,
}

impl SyncVmi {
    /// Returns the Sync of what is observed.
    pub(super) fn of(observed: &Observed) -> Self {
        let nics = observed.network.as_ref().map(|network| network.nics.clone()).unwrap_or_default();
        let mut vmi = resize::for_launcher(&target::for_owner(observed), &observed.link).into_owned();
        if observed.domain().is_alive() {
            nics::leave_out_unconnected(&mut vmi, &nics, observed.report.as_ref());
        }
        Self { vmi, nics, fingerprint: observed.facts.fingerprint }
    }
}

impl Call for SyncVmi {
    type Reply = SyncReply;
    type Error = LauncherError;

    const NAME: &'static str = SYNC;
    /// libvirtd may still start, and disk images are created.
    const LIMIT: Duration = Duration::from_secs(95);

    async fn send(&self, to: &Connected) -> Result<SyncReply, LauncherError> {
        let (vmi, options) = (encode("Sync", &self.vmi)?, Some(to.options(&self.nics)));
        let mut request = Request::new(SyncRequest { vmi, options });
        if let Some(context) = to.steps.as_ref().and_then(|steps| steps.context().to_string().parse().ok()) {
            request.metadata_mut().insert(TRACEPARENT, context);
        }
        let reply = to.send(request).await?;
        if let Some(steps) = &to.steps {
            steps.record(&reply.timings, SystemTime::now());
        }
        tracing::info!(started = reply.started, "Sync succeeded");
        Ok(reply)
    }

    fn apply(
        &self,
        observed: &mut Observed,
        connection: u64,
        result: Result<SyncReply, LauncherError>,
        now: Now,
    ) -> Vec<Event> {
        observed.delay_retries(now);
        match result {
            Ok(SyncReply { started, state_sequence, .. }) => {
                observed.failure = None;
                observed.ran |= started;
                if let Some(Link::Up { synced, results_from, .. }) = observed.link_of(connection) {
                    (*synced, *results_from) = (Some(self.fingerprint), state_sequence);
                }
                // Once, independent of later answers of the launcher.
                let is_new = started && !std::mem::replace(&mut observed.created_sent, true);
                let created = is_new.then(|| Event::normal("Created", "VirtualMachineInstance defined."));
                created.into_iter().collect()
            }
            Err(error) => {
                let events = observed.failed(&error, now);
                observed.spare_guest();
                events
            }
        }
    }
}
