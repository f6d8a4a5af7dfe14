//! The job that brings the running domain in line with the VMI. It holds no job slot.
//!
//! ```text
//!   Connecting -> Serving -> Comparing -> Changing (one step after the other) -> Resuming -> Reading -> done
//! ```
//! vCPUs are plugged, memory, interfaces and disks of hot-plugged volumes come and go, disks grow, and a guest that is stopped
//! by a disk error resumes; every other difference is reported as an item.

mod changes;

use std::sync::Arc;

use protocol::{ItemKind, ItemResult};
use tokio::time::Instant;

use self::changes::Changes;
use super::{DAEMON_DEADLINE, Steps};
use crate::{
    domain::{
        DomainError,
        diff::{Item, diff},
        parse::DomainConfig,
    },
    engine::model::{
        Base, DomainCall, JobInput, Link, RequestError, RequestId, Wanted, Work, daemon_is_late, pluggable,
        waits_for_disk,
    },
    hypervisor::HypervisorError,
};

/// Limit of items in the published state.
const ITEMS: usize = 256;

/// Sync of the running domain.
#[derive(Clone, Debug)]
pub(crate) struct Sync {
    /// Requests that wait for it.
    requests: Vec<RequestId>,
    /// The VMI.
    wanted: Arc<Wanted>,
    step: Step,
}

#[derive(Clone, Debug)]
enum Step {
    /// Waits for the connection.
    Connecting { until: Instant },
    /// Starts DHCP, console and credentials if a former worker did.
    Serving,
    /// Reads the claims' sizes and renders the wanted domain.
    Comparing,
    /// Carries out the changes; the first is in progress.
    Changing(Changes),
    /// Resumes a guest that is stopped by a disk error. Keeps the results of items that are not as wanted.
    Resuming(Vec<ItemResult>),
    /// Reads the domain.
    Reading(Vec<ItemResult>),
}

impl Sync {
    /// Begins to bring the running domain in line with the VMI.
    pub(crate) fn begin(base: &mut Base, requests: Vec<RequestId>, wanted: Arc<Wanted>) -> Self {
        Self { requests, wanted, step: Step::Connecting { until: base.now + DAEMON_DEADLINE } }.on_connected(base)
    }

    fn on_connected(self, base: &mut Base) -> Self {
        if !matches!(self.step, Step::Connecting { .. }) || base.link != Link::Up {
            return self;
        }
        base.work_for(Self::NAME, Work::Serve(self.wanted.clone()));
        Self { step: Step::Serving, ..self }
    }

    /// Decides on the started services.
    fn on_served(self, base: &mut Base) -> Option<Self> {
        if base.stopping {
            // The domain stays as it is until its end.
            return self.complete(base, Vec::new());
        }
        base.work_for(Self::NAME, Work::Compare(self.wanted.clone()));
        Some(Self { step: Step::Comparing, ..self })
    }

    /// Decides on the differences between the active and the wanted domain.
    fn on_compared(
        self,
        base: &mut Base,
        sizes: &[(String, u64)],
        wanted: Result<Box<DomainConfig>, DomainError>,
        left_out: Vec<(String, String)>,
    ) -> Option<Self> {
        let (hotplugged, active) = (base.hotplugged.clone(), base.active.clone());
        if let Ok(wanted) = &wanted {
            base.wanted_devices = pluggable(wanted).collect();
        }
        let mut difference = match &wanted {
            // Without the active XML, everything would differ.
            Ok(wanted) if !active.machine_type.is_empty() => diff(&active, wanted, sizes, &hotplugged),
            _ => diff(&active, &active, sizes, &hotplugged),
        };
        let mut items = difference.results();
        items.extend(wanted.err().and_then(|error| rendering_failure(&error, &active)));
        let unreadable = |(name, message): (String, String)| Item::new(ItemKind::Volume, &name).failed(message);
        items.extend(left_out.into_iter().map(unreadable));
        difference.steps.retain(|step| step.at_restart().is_none());
        self.change(base, Changes { steps: difference.steps.into(), items, changed: false })
    }

    /// Begins the next change. After the last one a guest that is stopped by a disk error resumes. It stops again if the cause
    /// persists.
    fn change(self, base: &mut Base, changes: Changes) -> Option<Self> {
        if let Some(call) = changes.next().filter(|_| !base.stopping) {
            base.call_for(Self::NAME, call);
            return Some(Self { step: Step::Changing(changes), ..self });
        }
        let published = &base.published;
        let is_stuck = waits_for_disk(published.lifecycle(), &published.reason);
        if is_stuck && !base.stopping && base.link == Link::Up {
            tracing::info!("resuming the guest after a disk error");
            base.call_for(Self::NAME, DomainCall::Resume);
            Some(Self { step: Step::Resuming(changes.items), ..self })
        } else if changes.changed {
            Some(self.read(base, changes.items))
        } else {
            self.complete(base, changes.items)
        }
    }

    /// Decides on the result of a change, which may have become an item.
    fn on_changed(self, base: &mut Base, changes: Changes, result: Result<(), HypervisorError>) -> Option<Self> {
        match result {
            Ok(()) => self.change(base, changes),
            Err(error) => self.fail(base, error.into()),
        }
    }

    fn read(self, base: &mut Base, items: Vec<ItemResult>) -> Self {
        base.read_for(Self::NAME);
        Self { step: Step::Reading(items), ..self }
    }

    /// Publishes the items.
    fn complete(self, base: &mut Base, mut items: Vec<ItemResult>) -> Option<Self> {
        items.extend(base.unreleased());
        items.truncate(ITEMS);
        base.published.items = items;
        match self.wanted.check_spec_supported() {
            Ok(()) => base.answer_all(self.requests, &Ok(false)),
            Err(error) => base.fail_sync(self.requests, error),
        }
        None
    }

    /// Fails the Sync. The items of the one before stay.
    fn fail(self, base: &mut Base, error: RequestError) -> Option<Self> {
        base.fail_sync(self.requests, error);
        None
    }
}

impl Steps for Sync {
    fn take(self, base: &mut Base, input: JobInput) -> Option<Self> {
        let Self { requests, wanted, step } = self;
        let sync = |step| Self { requests, wanted, step };
        match (step, input) {
            (step, JobInput::Connected) => Some(sync(step).on_connected(base)),
            (Step::Connecting { until }, JobInput::Timer) if until <= base.now => {
                sync(Step::Serving).fail(base, daemon_is_late())
            }
            (Step::Serving, JobInput::Served(Ok(()))) => sync(Step::Serving).on_served(base),
            (Step::Serving, JobInput::Served(Err(error))) => sync(Step::Serving).fail(base, error),
            (Step::Comparing, JobInput::Compared { sizes, wanted, left_out }) => {
                sync(Step::Comparing).on_compared(base, &sizes, wanted, left_out)
            }
            (Step::Changing(mut changes), JobInput::DiskGrown(result)) => {
                let result = changes.on_disk_grown(result);
                sync(Step::Comparing).on_changed(base, changes, result)
            }
            (Step::Changing(mut changes), JobInput::VcpusPlugged(result)) => {
                let result = changes.on_vcpus_plugged(result);
                sync(Step::Comparing).on_changed(base, changes, result)
            }
            (Step::Changing(mut changes), JobInput::DeviceChanged(result)) => {
                let result = changes.on_device_changed(base, result);
                sync(Step::Comparing).on_changed(base, changes, result)
            }
            (Step::Resuming(items), JobInput::Resumed(Ok(()))) => Some(sync(Step::Comparing).read(base, items)),
            (Step::Resuming(_), JobInput::Resumed(Err(error))) => sync(Step::Comparing).fail(base, error.into()),
            (Step::Reading(items), JobInput::Read) => sync(Step::Comparing).complete(base, items),
            // Late.
            (
                step,
                JobInput::Served(_)
                | JobInput::Compared { .. }
                | JobInput::DiskGrown(_)
                | JobInput::VcpusPlugged(_)
                | JobInput::DeviceChanged(_)
                | JobInput::Resumed(_),
            ) => Some(sync(step)),
            (
                step,
                JobInput::Timer
                | JobInput::Read
                | JobInput::Seen(_)
                | JobInput::Gone(_)
                | JobInput::Abort(_)
                | results_of!(start shutdown dump save source prepared opened paused),
            ) => Some(sync(step)),
        }
    }

    fn progress(&self) -> &'static str {
        "waiting for its end"
    }

    fn wake(&self) -> Option<Instant> {
        match self.step {
            Step::Connecting { until } => Some(until),
            _ => None,
        }
    }

    fn end(self, base: &mut Base) -> Option<Self> {
        base.answer_all(self.requests, &Err(RequestError::Ended));
        None
    }
}

/// Returns the item of a VMI that cannot be rendered. An interface that runs needs nothing from virt-handler.
fn rendering_failure(error: &DomainError, active: &DomainConfig) -> Option<ItemResult> {
    let (kind, name) = match error {
        DomainError::NoNic(name) if active.interfaces.iter().any(|known| known.name == *name) => return None,
        DomainError::NoNic(name) => (ItemKind::Interface, name.clone()),
        DomainError::Late => return Some(Item::new(ItemKind::Other, "").failed(error.to_string())),
        _ => (ItemKind::Other, String::new()),
    };
    Some(ItemResult { kind: kind.into(), name, message: error.to_string(), needs_restart: true })
}
