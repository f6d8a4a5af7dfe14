//! Sync: starts the domain, or brings the running domain in line with the VMI.
//!
//! ```text
//!   Connecting -> Serving -> Comparing -> Changing (one step after the other) -> Resuming -> Reading -> done
//! ```
//! vCPUs are plugged, memory, interfaces and disks of hot-plugged volumes come and go, disks grow, and a guest that is stopped
//! by a disk error resumes; every other difference is reported as an item.

use std::sync::Arc;

use protocol::{ItemKind, ItemResult};

use super::{
    Turn,
    devices::{pluggable, unreadable},
    requests::WAITING,
    start::DAEMON_DEADLINE,
};
use crate::{
    domain::{
        DomainError,
        diff::{Step, diff},
        parse::DomainConfig,
    },
    engine::model::{
        AfterRead, Effect, Job, Link, LiveStep, LiveSync, NextSync, RequestError, RequestId, Stage, Wanted,
        waits_for_disk,
    },
    hypervisor::HypervisorError,
};

/// Limit of items in the published state.
const ITEMS: usize = 256;

impl Turn {
    /// Decides on the wanted VMI.
    pub(super) fn sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        if let Err(error) = self.check_sync(&wanted) {
            return self.answer_all(requests, &Err(error));
        }
        if self.state.sync.is_some() || matches!(self.state.job, Some(Job::Start(_))) {
            return self.wait_for_sync(requests, wanted);
        }
        // A domain that may be running is adopted and served first.
        let may_run = self.state.adopting || self.state.stage == Stage::Live;
        let supported = if may_run { Ok(()) } else { wanted.check_supported() };
        match supported {
            Err(error) => self.fail_sync(requests, error),
            Ok(()) if !self.state.cache_written => self.answer_all(requests, &Err(RequestError::NoHello)),
            Ok(()) if self.state.stage == Stage::Live => self.begin_live_sync(requests, wanted),
            Ok(()) => self.begin_start(requests, wanted),
        }
    }

    fn check_sync(&self, wanted: &Wanted) -> Result<(), RequestError> {
        if self.state.stage == Stage::Ended {
            return Err(RequestError::Ended);
        }
        self.check_vmi(wanted)?;
        match &self.state.job {
            Some(Job::Start(start)) if !start.then.is_empty() => Err(RequestError::Ending),
            // The domain that arrives is the source's, and one that leaves does not change.
            Some(job @ (Job::MigrationOut(_) | Job::MigrationIn(_))) => {
                Err(RequestError::Conflict { job: job.name(), progress: job.progress() })
            }
            _ => Ok(()),
        }
    }

    /// Rejects another VMI than the pod's.
    pub(super) fn check_vmi(&self, wanted: &Wanted) -> Result<(), RequestError> {
        let (identity, vmi) = (&self.state.identity, &wanted.vmi.metadata);
        if vmi.name.as_ref() != Some(&identity.name)
            || vmi.namespace.as_ref() != Some(&identity.namespace)
            || vmi.uid.as_ref() != Some(&identity.uid)
        {
            return Err(RequestError::OtherVmi(self.state.domain_name()));
        }
        Ok(())
    }

    /// Keeps the newest VMI for when the present Sync is done: it has the same time limit.
    fn wait_for_sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        let next =
            self.state.next_sync.get_or_insert_with(|| NextSync { requests: Vec::new(), wanted: wanted.clone() });
        if next.requests.len() >= WAITING {
            return self.answer_all(requests, &Err(RequestError::Busy));
        }
        next.requests.extend(requests);
        next.wanted = wanted;
    }

    /// Begins the Sync that has waited.
    pub(super) fn sync_next(&mut self) {
        if let Some(next) = self.state.next_sync.take() {
            self.sync(next.requests, next.wanted);
        }
    }

    /// Begins to bring the running domain in line with the VMI.
    pub(super) fn begin_live_sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        let step = LiveStep::Connecting { until: self.now + DAEMON_DEADLINE };
        self.state.sync = Some(LiveSync { requests, wanted, step, items: Vec::new(), changed: false });
        self.continue_live_sync();
    }

    /// Continues a Sync that has waited for the connection.
    pub(super) fn continue_live_sync(&mut self) {
        let connected = self.state.link == Link::Up;
        let Some(sync) = self.state.sync.as_mut().filter(|_| connected) else { return };
        if matches!(sync.step, LiveStep::Connecting { .. }) {
            sync.step = LiveStep::Serving;
            let wanted = sync.wanted.clone();
            self.effects.push(Effect::Serve(wanted));
        }
    }

    /// Decides on the started services, of a start or of a running domain.
    pub(super) fn served(&mut self, result: Result<(), RequestError>) {
        let stopping = self.state.is_stopping();
        let Some(sync) = &mut self.state.sync else { return self.start_served(result) };
        match result {
            Err(error) => self.fail_live_sync(error),
            // The domain stays as it is until its end.
            Ok(()) if stopping => self.complete_sync(),
            Ok(()) => {
                sync.step = LiveStep::Comparing;
                let (wanted, active) = (sync.wanted.clone(), self.state.active.clone());
                let allow_emulation = self.state.allow_emulation;
                self.effects.push(Effect::Compare { wanted, active, allow_emulation });
            }
        }
    }

    /// Decides on the differences between the active and the wanted domain.
    pub(super) fn compared(
        &mut self,
        sizes: &[(String, u64)],
        wanted: Result<Box<DomainConfig>, DomainError>,
        left_out: &[String],
    ) {
        let hotplugged = self.state.hotplugged.clone();
        let active = self.state.active.clone();
        let Some(sync) = &mut self.state.sync else { return };
        if let Ok(wanted) = &wanted {
            self.state.wanted_devices = pluggable(wanted).collect();
        }
        let mut difference = match &wanted {
            // Without the active XML, everything would differ.
            Ok(wanted) if !active.machine_type.is_empty() => diff(&active, wanted, sizes, &hotplugged),
            _ => diff(&active, &active, sizes, &hotplugged),
        };
        sync.items = difference.results();
        sync.items.extend(wanted.err().and_then(|error| rendering_failure(&error, &active)));
        sync.items.extend(unreadable(left_out));
        difference.steps.retain(|step| step.at_restart().is_none());
        sync.step = LiveStep::Changing(difference.steps.into());
        self.next_step();
    }

    /// Carries out the next step of a Sync of the running domain.
    pub(super) fn next_step(&mut self) {
        let stopping = self.state.is_stopping();
        let Some(LiveSync { step: LiveStep::Changing(steps), .. }) = &self.state.sync else { return };
        match steps.front() {
            Some(Step::Resize { target, size, .. }) if !stopping => {
                self.effects.push(Effect::GrowDisk { target: target.clone(), size: *size });
            }
            Some(Step::Device { change, xml, .. } | Step::Memory { change, xml, .. }) if !stopping => {
                self.effects.push(Effect::ChangeDevice(*change, xml.clone()));
            }
            Some(Step::Vcpus(vcpus)) if !stopping => self.effects.push(Effect::PlugVcpus(*vcpus)),
            _ => self.resume_after_disk_error(),
        }
    }

    /// Decides on a disk's new size.
    pub(super) fn disk_grown(&mut self, result: Result<bool, HypervisorError>) {
        let Some(LiveSync { step: LiveStep::Changing(steps), items, .. }) = &mut self.state.sync else { return };
        let Some(Step::Resize { volume, size, .. }) = steps.pop_front() else { return };
        match result {
            Ok(true) => tracing::info!(volume, size, "resized the disk to its claim"),
            Ok(false) => {}
            Err(error) if error.is_transient() => return self.fail_live_sync(error.into()),
            // The guest still has its disk.
            Err(error) => {
                tracing::warn!(volume, size, %error, "cannot resize the disk to its claim");
                items.push(ItemResult {
                    kind: ItemKind::Volume.into(),
                    name: volume,
                    message: format!("cannot resize the disk to its claim: {error}"),
                    needs_restart: false,
                });
            }
        }
        self.next_step();
    }

    /// Resumes a guest that is stopped by a disk error. It stops again if the cause persists.
    fn resume_after_disk_error(&mut self) {
        let published = &self.state.published;
        let stuck = waits_for_disk(published.lifecycle(), &published.reason)
            && !self.state.is_stopping()
            && self.state.link == Link::Up;
        match &mut self.state.sync {
            Some(sync) if stuck => {
                tracing::info!("resuming the guest after a disk error");
                sync.step = LiveStep::Resuming;
                self.effects.push(Effect::ResumeAfterDiskError);
            }
            _ => {
                if !self.read_changed() {
                    self.complete_sync();
                }
            }
        }
    }

    /// Decides on the guest that was resumed.
    pub(super) fn resumed(&mut self, result: Result<(), HypervisorError>) {
        let Some(sync) = &mut self.state.sync else { return };
        match result {
            Ok(()) => {
                sync.step = LiveStep::Reading;
                self.read_then(Some(AfterRead::Synced));
            }
            Err(error) => self.fail_live_sync(error.into()),
        }
    }

    /// Completes the Sync of the running domain and publishes its items.
    pub(super) fn complete_sync(&mut self) {
        let Some(mut sync) = self.state.sync.take() else { return };
        sync.items.extend(self.unreleased());
        sync.items.truncate(ITEMS);
        self.state.published.items = sync.items;
        match sync.wanted.check_spec_supported() {
            Ok(()) => self.answer_all(sync.requests, &Ok(false)),
            Err(error) => self.fail_sync(sync.requests, error),
        }
        self.sync_next();
    }

    /// Fails the Sync of the running domain. The items of the one before stay.
    pub(super) fn fail_live_sync(&mut self, error: RequestError) {
        if let Some(sync) = self.state.sync.take() {
            self.fail_sync(sync.requests, error);
            self.sync_next();
        }
    }
}

/// Returns the item of a VMI that cannot be rendered. An interface that runs needs nothing from virt-handler.
fn rendering_failure(error: &DomainError, active: &DomainConfig) -> Option<ItemResult> {
    let (kind, name) = match error {
        DomainError::NoNic(name) if active.interfaces.iter().any(|known| known.name == *name) => return None,
        DomainError::NoNic(name) => (ItemKind::Interface, name.clone()),
        _ => (ItemKind::Other, String::new()),
    };
    Some(ItemResult { kind: kind.into(), name, message: error.to_string(), needs_restart: true })
}
