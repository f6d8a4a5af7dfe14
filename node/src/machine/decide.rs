//! What to do next about one machine: a pure function of what is known of it.

use std::time::Duration;

use api::{VirtualMachineInstanceStatus, VmiPhase as Phase};

use super::{
    phase::{Domain, End},
    state::{Announcement, Link, Machine, Now, Presence, Refusal, Request, WRITE_BURST, WRITE_INTERVAL},
    status,
};
use crate::launcher::Candidates;

/// Wait for a socket, one attempt. The wait ends at once when the socket appears.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Wait for the launcher of a machine that is over: only to tell it that it may exit.
const LAST_CONNECT_WAIT: Duration = Duration::from_millis(500);
/// A launcher of a machine that is over is looked for this long.
const LAST_CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// The guest is asked to power off again, and a forced stop is repeated, this often.
const SIGNAL_INTERVAL: Duration = Duration::from_secs(5);
/// Time for the launcher's own forced stop before the agent asks for one.
const FORCE_MARGIN: Duration = Duration::from_secs(2);
/// What the guest does by itself is written once it has been quiet this long.
const GUEST_SETTLE: Duration = Duration::from_secs(1);
/// What the guest does by itself is written at most this often, however much it does.
const GUEST_INTERVAL: Duration = Duration::from_secs(10);

/// Something to do. Each kind is under way at most once.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Wait for the socket of a pod's launcher and connect.
    Connect {
        /// The pod's UID.
        pod: String,
        /// Longest wait.
        within: Duration,
    },
    /// Say hello.
    Hello,
    /// Set up the pod's network.
    SetUpNetwork,
    /// Tell the launcher how the machine should be.
    Sync {
        /// Stands for what it is told.
        fingerprint: u64,
    },
    /// Ask the guest to power off.
    Shutdown {
        /// Seconds it has left.
        grace: u64,
    },
    /// Stop the machine at once.
    Kill,
    /// Let the launcher exit.
    Finish,
    /// Write the status, then announce.
    Write(Box<VirtualMachineInstanceStatus>, Vec<Announcement>),
    /// Read the object.
    Read,
    /// Tell users.
    Announce(Announcement),
    /// There is nothing left to do for good.
    Retire,
}

/// What to do, and when to ask again if nothing happens before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// To be started, in this order.
    pub effects: Vec<Effect>,
    /// On the task's clock.
    pub wake_at: Option<Duration>,
}

impl Decision {
    fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn wake(&mut self, at: Duration) {
        self.wake_at = Some(self.wake_at.map_or(at, |known| known.min(at)));
    }

    /// True when `at` has come; otherwise it is a reason to wake.
    fn due(&mut self, at: Duration, now: Now) -> bool {
        if now.since_start < at {
            self.wake(at);
        }
        now.since_start >= at
    }
}

/// What to do next.
#[must_use]
pub fn decide(machine: &Machine, now: Now) -> Decision {
    let mut decision = Decision::default();
    match machine.presence {
        Presence::Elsewhere => {
            decision.push(Effect::Retire);
            return decision;
        }
        Presence::Unseen => {
            let retry_at = machine.write_retry.as_ref().map_or(Duration::ZERO, |retry| retry.retry_at);
            if !machine.busy.record && decision.due(retry_at, now) {
                decision.push(Effect::Read);
            }
        }
        Presence::Present => write(machine, now, &mut decision),
        Presence::Deleted(_) => {}
    }
    match machine.link {
        Link::Down { .. } => connect(machine, now, &mut decision),
        Link::Up { .. } => drive(machine, now, &mut decision),
    }
    decision
}

/// Whether a user's request can be carried out now.
pub fn admit(machine: &Machine, request: Request) -> Result<(), Refusal> {
    if !matches!(machine.link, Link::Up { greeted: true, .. }) {
        return Err(Refusal::NoLauncher(machine.facts.uid.clone()));
    }
    let wanted = match request {
        Request::Pause | Request::Unpause | Request::SoftReboot | Request::Reset => machine.domain().is_alive(),
    };
    if wanted { Ok(()) } else { Err(Refusal::NotRunning) }
}

/// No connection: look for the socket, as long as there is a reason to.
fn connect(machine: &Machine, now: Now, decision: &mut Decision) {
    let Link::Down { since, retry_at, pod_missing_since, .. } = &machine.link else { return };
    let gone = matches!(machine.presence, Presence::Deleted(_));
    if gone && (machine.finished || pod_missing_since.is_some() || machine.facts.pods == Candidates::None) {
        decision.push(Effect::Retire);
        return;
    }
    if machine.finished {
        return;
    }
    let over = machine.facts.is_final() || gone;
    if over {
        let from = match machine.presence {
            Presence::Deleted(at) => at.max(*since),
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
    if let Err(Some(at)) = status::lost(machine, now) {
        decision.wake(at);
    }
    let Candidates::One(pod) = &machine.facts.pods else { return };
    if !machine.busy.connect && decision.due(*retry_at, now) {
        let within = if over { LAST_CONNECT_WAIT } else { CONNECT_WAIT };
        decision.push(Effect::Connect { pod: pod.clone(), within });
    }
}

/// Connected: bring the machine to where it should be. Shutdown goes before start, the end before both.
fn drive(machine: &Machine, now: Now, decision: &mut Decision) {
    let Link::Up { greeted, .. } = &machine.link else { return };
    let domain = machine.domain();
    if machine.finished {
        // The launcher has been told; whether it lets go of the connection is its own affair.
        if matches!(machine.presence, Presence::Deleted(_)) {
            decision.push(Effect::Retire);
        }
        return;
    }
    if let Err(Some(at)) = status::lost(machine, now) {
        decision.wake(at);
    }
    let retry_at = machine.call_at();
    if !greeted && !machine.busy.hello && decision.due(retry_at, now) {
        decision.push(Effect::Hello);
    }
    if !machine.facts.is_final() && !machine.is_leaving() {
        start(machine, now, decision);
        return;
    }
    // Only a launcher that answered to the machine's UID is told to end it.
    if !greeted {
        if let Presence::Deleted(at) = machine.presence
            && !decision.due_before(at + LAST_CONNECT_LIMIT, now)
        {
            decision.push(Effect::Retire);
        }
        return;
    }
    if machine.is_leaving() {
        if domain.is_alive() {
            stop(machine, now, decision);
        } else if !matches!(domain, Domain::Unclear) && !machine.busy.sync {
            finish(machine, now, decision);
        }
        return;
    }
    // Something ended the machine in the records while it runs: it has to end here as well.
    if domain.is_alive() {
        kill(machine, now, decision);
    } else if !machine.busy.sync {
        finish(machine, now, decision);
    }
}

/// Connected, and the machine should run: prepare it, start it, keep it as its object says.
fn start(machine: &Machine, now: Now, decision: &mut Decision) {
    let Link::Up { greeted, networked, synced, .. } = &machine.link else { return };
    let domain = machine.domain();
    let retry_at = machine.call_at();
    let hopeless = machine.failure.as_ref().is_some_and(|failure| failure.hopeless)
        || machine.report.as_ref().is_some_and(|report| !report.failure.is_empty());
    if hopeless {
        // The status says so first; then the machine is final.
        return;
    }
    // The network is set up in the pod of this very machine only, while libvirtd starts there.
    if !greeted {
        return;
    }
    if !networked && !machine.busy.network && decision.due(retry_at, now) {
        decision.push(Effect::SetUpNetwork);
    }
    let startable = match domain {
        Domain::Alive => true,
        Domain::None | Domain::Ended(End::Unknown) => !machine.ran && machine.facts.phase != Phase::Running,
        Domain::Unclear | Domain::ShuttingDown | Domain::Ended(_) => false,
    };
    let ready = *networked && startable && !machine.busy.sync;
    if !ready {
        return;
    }
    let fingerprint = machine.facts.fingerprint;
    match machine.io_pause.filter(|pause| pause.gone_on_since.is_none()) {
        // A machine that stands still after an I/O error is tried again by a synchronization, at growing intervals.
        Some(pause) => {
            if decision.due(pause.retry_at.max(retry_at), now) {
                decision.push(Effect::Sync { fingerprint });
            }
        }
        None if *synced == Some(fingerprint) => {}
        None => {
            if decision.due(retry_at, now) {
                decision.push(Effect::Sync { fingerprint });
            }
        }
    }
}

/// The machine's object is going: ask the guest, again and again, and force it when its time is over.
fn stop(machine: &Machine, now: Now, decision: &mut Decision) {
    if machine.busy.power {
        return;
    }
    let grace = Duration::from_secs(machine.facts.grace);
    if grace.is_zero() {
        kill(machine, now, decision);
        return;
    }
    let Some(stopping) = machine.stopping else {
        decision.push(Effect::Shutdown { grace: machine.facts.grace });
        decision.push(Effect::Announce(Announcement::normal("ShuttingDown", "Signaled Graceful Shutdown")));
        return;
    };
    let end = stopping.since.saturating_add(grace).saturating_add(FORCE_MARGIN);
    if now.since_start >= end {
        kill(machine, now, decision);
        return;
    }
    decision.wake(end);
    // A guest that is early in its start, or busy, may have missed the button.
    if machine.domain() != Domain::ShuttingDown && decision.due(stopping.signalled + SIGNAL_INTERVAL, now) {
        let left = (stopping.since + grace).saturating_sub(now.since_start);
        decision.push(Effect::Shutdown { grace: left.as_secs().max(1) });
    }
}

fn kill(machine: &Machine, now: Now, decision: &mut Decision) {
    if machine.busy.power {
        return;
    }
    match machine.stopping {
        Some(stopping) if stopping.killed && !decision.due(stopping.signalled + SIGNAL_INTERVAL, now) => {}
        Some(stopping) if stopping.killed => decision.push(Effect::Kill),
        _ => {
            decision.push(Effect::Kill);
            decision.push(Effect::Announce(Announcement::normal("Deleted", "VirtualMachineInstance stopping")));
        }
    }
}

/// The machine is over. The launcher may exit once that is on record, or there is nothing to record.
fn finish(machine: &Machine, now: Now, decision: &mut Decision) {
    if machine.busy.finish || machine.busy.power {
        return;
    }
    let never_ran = !machine.ran && machine.facts.phase != Phase::Running;
    let nothing_to_record = match machine.domain() {
        Domain::None => true,
        Domain::Ended(End::Unknown) => never_ran,
        _ => false,
    };
    let recorded = machine.facts.is_final() || matches!(machine.presence, Presence::Deleted(_)) || nothing_to_record;
    let retry_at = machine.call_at();
    if !recorded || !decision.due(retry_at, now) {
        return;
    }
    // A launcher that still waits for its machine has to hear that none will come.
    let waits = machine.domain() == Domain::None && !machine.stopping.is_some_and(|stopping| stopping.killed);
    decision.push(if waits { Effect::Kill } else { Effect::Finish });
}

/// Keep the object's status as it should be.
fn write(machine: &Machine, now: Now, decision: &mut Decision) {
    if machine.busy.record {
        return;
    }
    let Some(wanted) = status::wanted(machine, now) else { return };
    let retry_at = machine.write_retry.as_ref().map_or(Duration::ZERO, |retry| retry.retry_at);
    if !decision.due(retry_at, now) {
        return;
    }
    // The end of a machine is told at once.
    let ends = wanted.status.phase.as_ref().is_some_and(Phase::is_final);
    if !ends && !decision.due(machine.paced.saturating_sub(WRITE_INTERVAL * WRITE_BURST), now) {
        return;
    }
    if wanted.may_wait {
        // Of what has changed while the last write was under way it is not known since when.
        let settled = machine.guest_changed_at.map_or(Duration::ZERO, |at| at + GUEST_SETTLE);
        let rested = machine.guest_written_at.map_or(Duration::ZERO, |at| at + GUEST_INTERVAL);
        if !decision.due(settled.max(rested), now) {
            return;
        }
    }
    decision.push(Effect::Write(Box::new(wanted.status), wanted.announcements));
}

impl Decision {
    /// True until `end`, which is a reason to wake.
    fn due_before(&mut self, end: Duration, now: Now) -> bool {
        if now.since_start < end {
            self.wake(end);
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests;
