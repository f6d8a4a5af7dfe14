//! The next effects for one VMI: a pure function of what is observed.

mod source;
mod target;

use std::{sync::Arc, time::Duration};

use api::VmiPhase as Phase;
use protocol::{DumpMemoryRequest, FinishRequest, KillRequest, SaveMemoryRequest, ShutdownRequest};

use super::{
    call::{AnyCall, Call},
    calls::{HandVolumes, Hello, Sync},
    desired::Desired,
    dump,
    effect::Effect,
    event::Event,
    hibernation,
    host_disks::CreateHostDisks,
    migration,
    observed::{CONNECT, Link, NETWORK, Now, ObjectState, Observed, RECORD, SYNC, WRITE_BURST, WRITE_INTERVAL},
    phase::{Domain, End},
    pod_network::SetUpNetwork,
    role::Role,
    status::{self, Loss},
    volumes,
};
use crate::launcher::Candidates;

/// Longest wait of one attempt for a socket. The attempt ends at once when the socket appears.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the launcher of a VMI that has ended, which only has to be permitted to exit.
const LAST_CONNECT_WAIT: Duration = Duration::from_millis(500);
/// Duration of attempts to reach the launcher of a VMI that has ended.
const LAST_CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Interval of repeated shutdown requests and forced stops.
const SIGNAL_INTERVAL: Duration = Duration::from_secs(5);
/// Time for the launcher's own forced stop after the grace period.
const FORCE_MARGIN: Duration = Duration::from_secs(2);
/// Time that a guest has to shut down after its object is gone. virt-controller waits for the pod, which ends early if it is deleted by
/// force.
const ORPHAN_GRACE: Duration = Duration::from_secs(10);
/// Time in which a restarted launcher finds the domain that runs. Before, it reports none.
const SEARCH_LIMIT: Duration = Duration::from_secs(30);
/// Changes by the guest itself are written once there were none for this long.
const GUEST_SETTLE: Duration = Duration::from_secs(1);
/// Least interval of writes for changes by the guest itself.
const GUEST_INTERVAL: Duration = Duration::from_secs(10);

/// Effects, and the time of the next decision if no input arrives before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decision {
    /// Effects in the order in which they start.
    pub(super) effects: Vec<Effect>,
    /// Time on the task's clock.
    pub(super) wake_at: Option<Duration>,
}

impl Decision {
    fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn call(&mut self, call: impl AnyCall) {
        self.push(Effect::Call(Arc::new(call)));
    }

    fn wake(&mut self, at: Duration) {
        self.wake_at = Some(self.wake_at.map_or(at, |known| known.min(at)));
    }

    /// Returns true if `at` has come; otherwise the task wakes then.
    fn due(&mut self, at: Duration, now: Now) -> bool {
        if now.since_start < at {
            self.wake(at);
        }
        now.since_start >= at
    }

    /// Returns true before `end`; the task wakes then.
    fn due_before(&mut self, end: Duration, now: Now) -> bool {
        if now.since_start < end {
            self.wake(end);
            return true;
        }
        false
    }
}

/// Decides what to do next.
pub(super) fn decide(observed: &Observed, now: Now) -> Decision {
    let mut decision = Decision::default();
    if observed.object == ObjectState::Unverified {
        read(observed, now, &mut decision);
    }
    match observed.role {
        Role::Owner => own(observed, now, &mut decision),
        Role::MigrationSource => source::leave(observed, now, &mut decision),
        Role::MigrationTarget if observed.is_superseded() => target::make_way(observed, now, &mut decision),
        Role::MigrationTarget => target::receive(observed, now, &mut decision),
        Role::None if observed.was_target => target::give_up(observed, now, &mut decision),
        Role::None => decision.push(Effect::Retire),
    }
    decision
}

/// Reads the object: the known version may be outdated.
fn read(observed: &Observed, now: Now, decision: &mut Decision) {
    let retry_at = observed.write_retry.as_ref().map_or(Duration::ZERO, |retry| retry.retry_at);
    if !observed.is_busy(RECORD) && decision.due(retry_at, now) {
        decision.push(Effect::Read);
    }
}

/// The owner writes the status and drives the launcher.
fn own(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.object == ObjectState::Current {
        write(observed, status::desired(observed, now), now, decision);
    }
    if let Some(at) = hibernation::given_up_at(observed) {
        decision.due_before(at, now);
    }
    source::relay(observed, decision);
    match observed.link {
        Link::Down { .. } => connect(observed, now, decision),
        Link::Up { .. } => drive(observed, now, decision),
    }
}

/// Not connected: waits for the socket while there is a reason to.
fn connect(observed: &Observed, now: Now, decision: &mut Decision) {
    let Link::Down { since, retry_at, pod_missing_since, .. } = &observed.link else { return };
    let gone = matches!(observed.object, ObjectState::Deleted(_));
    if gone && (observed.finished || pod_missing_since.is_some() || observed.facts.pods == Candidates::None) {
        decision.push(Effect::Retire);
        return;
    }
    if observed.finished {
        return;
    }
    let over = observed.facts.is_final() || gone;
    if over {
        let from = match observed.object {
            ObjectState::Deleted(at) => at.max(*since),
            _ => *since,
        };
        if pod_missing_since.is_some() {
            return;
        }
        if !decision.due_before(from + LAST_CONNECT_LIMIT, now) {
            if gone {
                decision.push(Effect::Retire);
            }
            return;
        }
    }
    if let Loss::At(at) = status::loss(observed, now) {
        decision.wake(at);
    }
    let Candidates::One(pod) = &observed.facts.pods else { return };
    if !observed.is_busy(CONNECT) && decision.due(*retry_at, now) {
        let within = if over { LAST_CONNECT_WAIT } else { CONNECT_WAIT };
        decision.push(Effect::Connect { pod: pod.clone(), within });
    }
}

/// Connected: brings the VMI to its desired state. A shutdown goes before a start.
fn drive(observed: &Observed, now: Now, decision: &mut Decision) {
    let Link::Up { greeted, .. } = &observed.link else { return };
    let domain = observed.domain();
    if observed.finished {
        // The launcher may keep the connection; nothing depends on it.
        if matches!(observed.object, ObjectState::Deleted(_)) {
            decision.push(Effect::Retire);
        }
        return;
    }
    if let Loss::At(at) = status::loss(observed, now) {
        decision.wake(at);
    }
    let retry_at = observed.call_at();
    if !greeted && !observed.is_busy(Hello::SLOT) && decision.due(retry_at, now) {
        decision.call(Hello);
    }
    source::advance(observed, now, decision);
    if !observed.facts.is_final() && !observed.is_leaving() {
        start(observed, now, decision);
        return;
    }
    // Only the launcher that accepted the UID of the VMI may end it.
    if !greeted {
        if let ObjectState::Deleted(at) = observed.object
            && !decision.due_before(at + LAST_CONNECT_LIMIT, now)
        {
            decision.push(Effect::Retire);
        }
        return;
    }
    // A final phase ends the grace period: virt-controller sets it when the pod is gone, as after its deletion by force.
    let has_grace = observed.is_leaving() && !observed.facts.is_final();
    if has_grace && source::is_gone(observed) {
        return;
    }
    if domain.is_alive() {
        // Without grace, the phase became final while the domain runs: the domain has to end as well.
        if has_grace { stop(observed, now, decision) } else { kill(observed, now, decision) }
    } else if (!has_grace || domain != Domain::Unclear) && !observed.is_busy(SYNC) {
        finish(observed, now, decision);
    }
}

/// Connected, and the VMI should run: prepares and starts it, and keeps it in line with its object.
fn start(observed: &Observed, now: Now, decision: &mut Decision) {
    let Link::Up { greeted, networked, synced, .. } = &observed.link else { return };
    let domain = observed.domain();
    let retry_at = observed.call_at();
    let permanent = observed.failure.as_ref().is_some_and(|failure| failure.permanent)
        || observed.report.as_ref().is_some_and(|report| !report.failure.is_empty());
    if permanent {
        // The status is written first; then the phase is final.
        return;
    }
    // The network is set up only in a pod whose launcher accepted the UID, in parallel to the start of libvirtd.
    if !greeted || !observed.may_change_domain() {
        return;
    }
    // Neither changes what the other was given.
    let is_busy = observed.is_busy(NETWORK) || observed.is_busy(SYNC);
    if !is_busy
        && let Some(work) = SetUpNetwork::of(observed)
        && decision.due(observed.network_at(), now)
    {
        decision.call(work);
        return hand_volumes(observed, now, decision);
    }
    hand_volumes(observed, now, decision);
    if let Some(request) = dump::request(observed).filter(|_| !observed.is_busy(DumpMemoryRequest::SLOT))
        && decision.due(observed.dump_at, now)
    {
        decision.call(request);
    }
    // None is begun late: its failure may be written already, also over a former connection.
    let is_over = hibernation::ends_at(observed).is_some_and(|at| now.since_start >= at);
    if let Some(request) = hibernation::request(observed).filter(|_| !observed.is_busy(SaveMemoryRequest::SLOT))
        && !is_over
        && decision.due(observed.dump_at, now)
    {
        decision.call(request);
    }
    let startable = match domain {
        Domain::Alive => true,
        Domain::None | Domain::Ended(End::Unknown) => !observed.ran && observed.facts.phase != Phase::Running,
        Domain::Unclear | Domain::ShuttingDown | Domain::Ended(_) => false,
    };
    let ready = *networked && startable && !is_busy;
    if !ready {
        return;
    }
    if !domain.is_alive() && (hibernation::delays_start(observed) || volumes::awaits_boot_disk(observed)) {
        return;
    }
    if !domain.is_alive()
        && let Some(until) = volumes::start_waits_until(observed)
        && decision.due_before(until, now)
    {
        return;
    }
    let io_pause = observed.io_pause.filter(|pause| pause.running_since.is_none()).map(|pause| pause.retry_at);
    let item_retry = observed.item_retry.map(|retry| retry.retry_at);
    // Sync is repeated at growing intervals for a guest that an I/O error paused, and for items that failed.
    let sync_at = match (io_pause, *synced == Some(observed.facts.fingerprint)) {
        (Some(at), _) => Some(at),
        (None, true) => item_retry,
        (None, false) => Some(Duration::ZERO),
    };
    if let Some(at) = sync_at
        && decision.due(at.max(retry_at), now)
    {
        match CreateHostDisks::of(observed) {
            Some(first) => decision.call(first),
            None => decision.call(Sync::of(observed)),
        }
    }
}

/// Hands hot-plugged volumes to the launcher and takes back those that the VMI no longer has.
fn hand_volumes(observed: &Observed, now: Now, decision: &mut Decision) {
    let (false, Candidates::One(pod)) = (observed.is_busy(HandVolumes::SLOT), &observed.facts.pods) else { return };
    if let Some((work, at)) = volumes::plan(observed)
        && decision.due(at, now)
    {
        decision.call(HandVolumes { pod: pod.clone(), work });
    }
}

/// The object is deleted: requests the shutdown repeatedly, and stops the domain by force after the grace period.
fn stop(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.is_busy(KillRequest::SLOT) {
        return;
    }
    let grace = Duration::from_secs(observed.facts.grace);
    if grace.is_zero() {
        kill(observed, now, decision);
        return;
    }
    let Some(stopping) = observed.stopping else {
        decision.call(ShutdownRequest { grace_period_seconds: observed.facts.grace });
        decision.push(Effect::Publish(Event::normal("ShuttingDown", "Signaled Graceful Shutdown")));
        return;
    };
    let mut end = stopping.since.saturating_add(grace);
    if let ObjectState::Deleted(at) = observed.object {
        end = end.min(at + ORPHAN_GRACE);
    }
    let end = end.saturating_add(FORCE_MARGIN);
    if now.since_start >= end {
        kill(observed, now, decision);
        return;
    }
    decision.wake(end);
    // A guest that is booting or busy can miss the power button.
    if observed.domain() != Domain::ShuttingDown && decision.due(stopping.signalled + SIGNAL_INTERVAL, now) {
        let left = (stopping.since + grace).saturating_sub(now.since_start);
        decision.call(ShutdownRequest { grace_period_seconds: left.as_secs().max(1) });
    }
}

fn kill(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.is_busy(KillRequest::SLOT) {
        return;
    }
    match observed.stopping {
        Some(stopping) if stopping.killed && !decision.due(stopping.signalled + SIGNAL_INTERVAL, now) => {}
        Some(stopping) if stopping.killed => decision.call(KillRequest {}),
        _ => {
            decision.call(KillRequest {});
            decision.push(Effect::Publish(Event::normal("Deleted", "VirtualMachineInstance stopping")));
        }
    }
}

/// The domain ended. The launcher may exit once the status contains it, or if there is nothing to write.
fn finish(observed: &Observed, now: Now, decision: &mut Decision) {
    if observed.is_busy(FinishRequest::SLOT) || observed.is_busy(KillRequest::SLOT) {
        return;
    }
    if observed.domain() == Domain::None
        && let Some(since) = observed.no_domain_since.filter(|_| !observed.facts.is_final())
        && !decision.due(since + SEARCH_LIMIT, now)
    {
        return;
    }
    let never_ran = !observed.ran && observed.facts.phase != Phase::Running;
    let nothing_to_record = match observed.domain() {
        Domain::None => true,
        Domain::Ended(End::Unknown) => never_ran,
        _ => false,
    };
    let recorded = observed.facts.is_final() || matches!(observed.object, ObjectState::Deleted(_)) || nothing_to_record;
    let retry_at = observed.call_at();
    if !recorded || !decision.due(retry_at, now) {
        return;
    }
    // A launcher that still waits for its first Sync is ended by Kill.
    let waits = observed.domain() == Domain::None && !observed.stopping.is_some_and(|stopping| stopping.killed);
    if waits { decision.call(KillRequest {}) } else { decision.call(FinishRequest {}) }
}

/// Keeps the status up to date.
fn write(observed: &Observed, desired: Option<Desired>, now: Now, decision: &mut Decision) {
    if observed.is_busy(RECORD) {
        return;
    }
    if let Some(at) = migration::completion::limit(observed, now) {
        decision.wake(at);
    }
    let Some(desired) = desired else {
        if let Some((progress, at)) = migration::progress::due(observed, now)
            && decision.due(at, now)
        {
            decision.push(Effect::WriteProgress(progress));
        }
        return;
    };
    let retry_at = observed.write_retry.as_ref().map_or(Duration::ZERO, |retry| retry.retry_at);
    if !decision.due(retry_at, now) {
        return;
    }
    // The end of a VMI is written at once.
    let ends = desired.status.phase.as_ref().is_some_and(Phase::is_final);
    if !ends && !decision.due(observed.paced.saturating_sub(WRITE_INTERVAL * WRITE_BURST), now) {
        return;
    }
    if desired.may_wait {
        // Changes during the last write have no known time.
        let settled = observed.guest_changed_at.map_or(Duration::ZERO, |at| at + GUEST_SETTLE);
        let rested = observed.guest_written_at.map_or(Duration::ZERO, |at| at + GUEST_INTERVAL);
        if !decision.due(settled.max(rested), now) {
            return;
        }
    }
    decision.push(Effect::Write(Box::new(desired)));
}

#[cfg(test)]
mod tests;
