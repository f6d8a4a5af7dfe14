//! The connection, reads of the domain, and times.

use std::time::Duration;

use protocol::Lifecycle;

use super::State;
use crate::{
    domain::parse::parse,
    engine::{
        jobs::dump::MemoryDump,
        model::{DomainCall, Effect, JobInput, JobName, Link, Stage, is_over},
    },
    hypervisor::{DomainFacts, HypervisorError},
};

/// Pause between attempts to connect to the daemon.
const CONNECT_RETRY: Duration = Duration::from_millis(15);
/// Pause after a read that failed.
const READ_RETRY: Duration = Duration::from_secs(2);
/// Least interval of crashes of the guest's kernel that are read and published: a guest can report any number, without crashing.
const CRASH_INTERVAL: Duration = Duration::from_secs(1);

impl State {
    /// Decides on an attempt to connect.
    pub(super) fn on_connected(&mut self, result: Result<bool, HypervisorError>) {
        match result {
            Ok(true) => {
                tracing::debug!("connected to libvirt");
                self.base.link = Link::Up;
                self.base.has_read = false;
                if self.base.stage == Stage::Waiting {
                    // In parallel to virt-handler's network setup. A Sync that arrives earlier loses nothing.
                    self.base.call(DomainCall::WarmUp);
                }
                self.base.read();
                self.pass_to(JobName::Sync, JobInput::Connected);
            }
            Ok(false) => self.base.link = Link::Down { retry_at: self.base.now + CONNECT_RETRY },
            Err(error) => {
                tracing::debug!(%error, "libvirt does not answer yet");
                self.base.link = Link::Down { retry_at: self.base.now + CONNECT_RETRY * 10 };
            }
        }
    }

    fn disconnect(&mut self) {
        if self.base.link != Link::Up {
            return;
        }
        tracing::warn!("lost the connection to libvirt");
        self.base.link = Link::Down { retry_at: self.base.now };
        self.base.has_read = false;
        self.base.effects.push(Effect::Disconnect);
    }

    /// Decides on a domain event.
    pub(super) fn on_domain_changed(&mut self, closed: bool, crashed: bool) {
        // First: virt-handler may disconnect once the domain has ended.
        if crashed && self.base.crashed_at.is_none_or(|at| self.base.now >= at + CRASH_INTERVAL) {
            self.base.crashed_at = Some(self.base.now);
            self.base.effects.push(Effect::ReadCrash);
        }
        if closed {
            self.disconnect();
        } else {
            self.base.read();
        }
    }

    /// Decides on a read of the domain.
    pub(super) fn on_read(&mut self, result: Result<DomainFacts, HypervisorError>, guest_agent: Option<bool>) {
        self.base.reading.in_progress = false;
        let has_answered = matches!(result, Ok(_) | Err(HypervisorError::NoDomain));
        self.base.has_read |= has_answered && self.base.link == Link::Up;
        let is_outdated = std::mem::take(&mut self.base.reading.outdated) || self.base.reading.held;
        if !is_outdated || matches!(result, Err(HypervisorError::Disconnected(_))) {
            self.learn(result, guest_agent);
        }
        self.base.reading.is_fresh = has_answered && self.base.link == Link::Up;
        for next in std::mem::take(&mut self.base.reading.then) {
            self.follow(next);
        }
        self.base.read_again();
        self.settle();
        if self.base.has_read() {
            // A domain that runs is adopted before it is ended; without one, requests to end it abort the start.
            if self.base.stage == Stage::Live {
                self.pass_to(JobName::Start, JobInput::Connected);
            }
            self.on_looked();
            self.pass_to_slot(JobInput::Connected);
            self.pass_to(JobName::Sync, JobInput::Connected);
        }
        self.resume_after_dump();
    }

    /// Lets a guest go on that is stopped for a dump without a job. libvirt keeps the reason of a guest that the user has paused.
    fn resume_after_dump(&mut self) {
        let base = &self.base;
        let is_known = base.reading.is_fresh && !base.reading.in_progress && base.stage == Stage::Live;
        let is_stopped = base.published.lifecycle() == Lifecycle::Paused && base.published.reason == "dump";
        if is_known && is_stopped && self.job.is_none() && base.actions.is_empty() {
            self.job = Some(MemoryDump::left(base).into());
        }
    }

    fn learn(&mut self, result: Result<DomainFacts, HypervisorError>, guest_agent: Option<bool>) {
        if self.base.stage == Stage::Ended {
            return;
        }
        match result {
            Ok(facts) => self.learn_facts(facts, guest_agent),
            // libvirt removes a domain that has not arrived.
            Err(HypervisorError::NoDomain) => {
                if !self.is_kept("unknown") && self.base.stage == Stage::Live {
                    self.base.end_as(Lifecycle::Shutoff, "unknown");
                }
            }
            Err(HypervisorError::Disconnected(_)) => self.disconnect(),
            Err(error) => {
                tracing::warn!(%error, "cannot read the domain's state");
                self.base.refresh_at = self.base.now + READ_RETRY;
            }
        }
        self.settle();
    }

    /// Gives the end of the domain to the job in the slot. Returns true if the job publishes it, or the VMI has not ended.
    fn is_kept(&mut self, reason: &'static str) -> bool {
        let is_kept = self.job.as_ref().is_some_and(|job| job.keeps_end());
        self.pass_to_slot(JobInput::Gone(reason));
        is_kept
    }

    fn learn_facts(&mut self, facts: DomainFacts, guest_agent: Option<bool>) {
        let over = is_over(facts.lifecycle);
        if over && self.is_kept(facts.reason) {
            return;
        }
        if self.base.stage == Stage::Waiting {
            // A domain that does not run was defined by a start that may have failed. Only an adopting worker has
            // missed the end of a domain that ran.
            if over && (!self.base.adopting || matches!(facts.reason, "unknown" | "failed")) {
                return;
            }
            self.base.stage = Stage::Live;
        }
        let active = parse(&facts.xml);
        let (id, connected) = (active.id, !over && guest_agent.unwrap_or(active.guest_agent_connected));
        let changed = self.base.publish_facts(&facts, active, connected);
        if !over {
            self.pass_to_slot(JobInput::Seen(id));
        }
        let runs = facts.lifecycle == Lifecycle::Running;
        self.base.effects.push(Effect::AttendGuestAgent { connected, runs, changed });
        self.base.set_late_clock();
        if over {
            let reason = facts.reason;
            tracing::info!(reason, state = facts.lifecycle.as_str_name(), "the domain has ended");
            if reason == "crashed" {
                self.base.effects.push(Effect::LogLastLines);
            }
            self.base.end();
        }
    }

    /// Decides on all times that have come.
    pub(super) fn on_timer(&mut self) {
        let now = self.base.now;
        if matches!(self.base.link, Link::Down { retry_at } if retry_at <= now) && self.base.may_connect() {
            self.base.link = Link::Connecting;
            self.base.effects.push(Effect::Connect);
        }
        let reads = self.base.link == Link::Up && self.base.stage != Stage::Ended;
        if reads && self.base.refresh_at <= now && !self.base.reading.in_progress {
            self.base.read();
        }
        for name in Vec::from_iter(self.jobs().map(|job| job.name())) {
            self.pass_to(name, JobInput::Timer);
        }
        if self.base.looking.as_ref().is_some_and(|looking| looking.until <= now) {
            self.on_looked();
        }
        if self.base.finish_at.is_some_and(|at| at <= now) && !self.base.finished {
            tracing::warn!("virt-handler did not record the domain's end in time");
            self.base.finished = true;
        }
    }
}
